"""Rows that differ only in the numbers in their names, folded into one: thousands of layers stay readable."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import NamedTuple

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Fold(NamedTuple):
    """Several entries as one: the name with its numbers as ranges, and the indexes of the entries it stands for."""

    name: str
    indexes: tuple[int, ...]


def fold(names: Sequence[str], alike: Sequence[Hashable], least: int = 3) -> list[Fold]:
    """Fold names that are equal but for dotted parts that are numbers, where `alike` is equal too.

    Args:
        names: of the entries, in order.
        alike: what else must be equal for entries to fold, one value each.
        least: fewer entries than this are not folded.

    Returns:
        Folds in the order of their first entry. A fold's name has `{0–31}` for a number that takes all values of a
        range, `{*}` for one that takes some.

    >>> [found.name for found in fold(["a.0.w", "a.1.w", "b", "a.2.w"], [0, 0, 0, 0])]
    ['a.{0–2}.w', 'b']
    """
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for index, (name, same) in enumerate(zip(names, alike, strict=True)):
        groups.setdefault((_NUMBER.sub("\0", name), same), []).append(index)
    folds = []
    for (pattern, _), indexes in groups.items():
        if len(indexes) < least:
            folds += [Fold(names[index], (index,)) for index in indexes]
        else:
            folds.append(Fold(_name(pattern, [names[index] for index in indexes]), tuple(indexes)))
    return sorted(folds, key=lambda found: found.indexes[0])


def _name(pattern: str, names: Iterable[str]) -> str:
    columns = [sorted(set(map(int, column))) for column in zip(*(_NUMBER.findall(name) for name in names), strict=True)]
    full = prod(map(len, columns)) == len(set(names))
    head, *rest = pattern.split("\0")
    shown = [_range(column, full) for column in columns]
    return head + "".join(part for pair in zip(shown, rest, strict=True) for part in pair)


def _range(numbers: Sequence[int], full: bool) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if full and numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{{{numbers[0]}–{numbers[-1]}}}"
    return "{*}"
