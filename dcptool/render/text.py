"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

MIN_NAME_WIDTH = 40
"""Names up to this long stay in their row however narrow the terminal is."""


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
