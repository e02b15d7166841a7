"""How things are said, once for all messages: names, counts, sizes, values. Imports nothing of the package."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

MAX_COMPARED = 10_000
"""Names that a misspelt one is compared with."""


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


def span(seconds: float) -> str:
    """Return a length of time in its largest unit.

    >>> span(40), span(90), span(7_200), span(200_000)
    ('40 s', '2 min', '2 h', '2 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 file`, `2,000 files`, `2 entries`."""
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun}"


def are(count: int, noun: str) -> str:
    """Return a count with its noun and verb: `1 tensor is`, `2 tensors are`."""
    return f"{plural(count, noun)} {'is' if count == 1 else 'are'}"


def of_numbers(noun: str, numbers: Iterable[int]) -> str:
    """Return which numbers of something: `rank 3`, `ranks 0, 2`."""
    found = list(numbers)
    return f"{noun}{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def listed(names: Sequence[str], most: int, *, counted: bool = True) -> str:
    """Return the first names in a row, and how many more there are.

    >>> listed(["a", "b", "c"], 2), listed(["a", "b", "c"], 2, counted=False), listed(["a"], 2)
    ('a, b and 1 more', 'a, b, …', 'a')
    """
    more = f" and {len(names) - most:,} more" if counted else ", …"
    return ", ".join(names[:most]) + (more if len(names) > most else "")


def cut_lines(lines: Sequence[str], most: int, count: int | None = None, more: str = "", indent: str = "") -> list[str]:
    """Return the first lines, and in one more how many others there are: of `count`, if that is not their number."""
    left = (len(lines) if count is None else count) - most
    return [*lines[:most], *([f"{indent}… and {left:,} more{more}"] if left > 0 else [])]


def endings(name: str) -> list[str]:
    """Return a dotted name and its endings behind dots, the longest first.

    >>> endings("model.emb.weight")
    ['model.emb.weight', 'emb.weight', 'weight']
    """
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def fields_of(found: object, *names: str) -> dict[str, Any]:
    """Return these attributes of a value by name, for JSON; what is said otherwise there is put over them."""
    return {name: getattr(found, name) for name in names}


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on a name that is not there: the known one most like it; "" if none is.

    >>> did_you_mean("modle", ["model", "optim"]), did_you_mean("modle", ["optim"])
    ("; did you mean 'model'?", '')
    """
    close = closest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like one that is not there, "" if none is like it."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(islice(known, MAX_COMPARED)), 1)
    return close[0] if close else ""
