"""Small pieces of terminal text: safe names, sizes, short values, tables."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any


def shown(text: str) -> str:
    """Return text from a checkpoint with everything that could act on a terminal escaped.

    An empty name, or one that begins or ends with a space, is put in quotes.

    >>> shown("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text != text.strip() or not text:
        return repr(text)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def nbytes(count: int) -> str:
    """Return a byte count in decimal units, three significant digits.

    >>> nbytes(999), nbytes(1024), nbytes(1_500_000_000)
    ('999 B', '1.02 kB', '1.5 GB')
    """
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB", "PB", "EB")
    power = min(len(units), int(math.log(count, 1000)))
    if count / 1000**power >= 999.5:
        power = min(len(units), power + 1)
    return f"{count / 1000**power:.3g} {units[power - 1]}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 file`, `2,000 files`, `2 entries`."""
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun}"


MIN_NAME_WIDTH = 40
"""Names up to this long stay in their row however narrow the terminal is."""


class _Short(reprlib.Repr):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.maxlevel = 6
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 100
        self.maxstring = self.maxother = self.maxlong = width

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, dict):
            return f"{type(x).__name__}({self.repr_dict(x, level)})"
        if isinstance(x, bytes | bytearray):
            return repr(x[: self.maxstring]) + ("…" if len(x) > self.maxstring else "")
        return super().repr_instance(x, level)


def value(item: Any, width: int) -> str:
    """Return a decoded value on one line of at most `width` characters; the cut is marked with an ellipsis."""
    text = shown(_Short(max(width, 20)).repr(item))
    return text if len(text) <= width else text[: width - 1] + "…"


def column_width(header: str, cells: Sequence[str]) -> int:
    """Return how wide tabulate makes a column: as its widest cell, and never less than two more than its header."""
    return max(len(header) + 2, *map(len, cells), 0)


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), width: int | None = None
) -> str:
    """Return an aligned table.

    Args:
        headers: one per column.
        rows: cells, without newlines.
        right: indexes of the columns that are right-aligned.
        width: of the terminal, in columns. A first cell that would make the table wider than this stands on a line
            of its own above its row; it is never cut.
    """
    from tabulate import tabulate  # a fifth of a small command's time, and not all print a table

    room = None
    if width is not None and rows:
        columns = list(zip(headers, *rows, strict=True))
        others = [column_width(header, cells) + 2 for header, *cells in columns[1:]]
        room = max(MIN_NAME_WIDTH, width - sum(others))
    kept = [["" if room and len(row[0]) > room else row[0], *row[1:]] for row in rows]
    align = ["right" if index in right else "left" for index in range(len(headers))]
    text = tabulate(kept, headers, tablefmt="simple", disable_numparse=True, colalign=align if rows else None)
    head, rule, *lines = text.splitlines()
    out = [head, rule]
    for line, row, shortened in zip(lines, rows, kept, strict=True):
        out += [line] if shortened[0] == row[0] else [row[0], line]
    return "\n".join(line.rstrip() for line in out)
