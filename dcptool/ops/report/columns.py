"""Columns of integers, and the boxes of a tensor, as short rules: a grid of a million boxes is a few numbers.

Made for JSON; who reads it back needs no more than what is said here. Knows neither files nor checkpoints.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from itertools import groupby
from math import prod
from operator import sub
from typing import Any

from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.layouts import tiles

Rule = list[int] | str
"""A column: flat triples (count, first, step), one for each stretch of equal steps; or text, where that is shorter: the
first value and then the differences, zigzag (n ≥ 0 → 2n, n < 0 → -2n - 1), as LEB128, as base64."""


class ColumnTable:
    """Distinct columns, each encoded once: tensors that are cut alike share theirs."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self._known: dict[bytes, int] = {}

    def add(self, values: Sequence[int]) -> int:
        """Return the index of a column in `rules`, which gets it if it is new."""
        column = values if isinstance(values, array) and values.typecode == "q" else array("q", values)
        key = column.tobytes()
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = len(self.rules)
            self.rules.append(column_rule(column))
        return index


def column_rule(values: Sequence[int]) -> Rule:
    """Return the rule of a column.

    >>> column_rule([0, 4, 8, 12]), column_rule([7, 7, 7, 2])
    ([4, 0, 4], [3, 7, 0, 1, 2, 0])
    """
    runs = _runs(values)
    if len(runs) <= max(len(values) // 2, 12):
        return runs
    packed = _packed(values)
    return packed if len(packed) < len(",".join(map(str, runs))) else runs


def _runs(values: Sequence[int]) -> list[int]:
    runs: list[int] = []
    begin = 0  # the first value that is in no run yet
    at = 0  # the value before the first difference of a group
    for step, group in groupby(map(sub, values[1:], values)):
        count = sum(1 for _ in group)
        if begin == at or count > 1:
            runs += (at + count + 1 - begin, values[begin], step)
            begin = at + count + 1
        at += count
    if begin < len(values):
        runs += (1, values[begin], 0)
    return runs


def _packed(values: Sequence[int]) -> str:
    out = bytearray()
    before = 0
    for value in values:
        number = 2 * (value - before)
        number = number if number >= 0 else -number - 1
        before = value
        while number >= 128:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return base64.b64encode(out).decode("ascii")


def boxes_rule(shape: Ints, chunks: Chunks, table: ColumnTable) -> dict[str, Any]:
    """Return the rule of all boxes of a tensor.

    Args:
        shape: of the tensor, in elements.
        chunks: its chunks.
        table: gets the columns; the rule holds indexes into it.

    Returns:
        `{"cuts": [column, …]}` for a grid: for each dimension where it is cut, both ends included. Box i is cell i,
        row-major; with `"order": column` it is cell order[i]. Two equal cuts in a row are an interval without elements.
        Else `{"starts": [column, …], "sizes": [column, …]}`, for each dimension.
    """
    columns = [chunks.column(dim) for dim in range(len(shape))]
    intervals = [sorted(set(zip(*column, strict=True))) for column in columns]
    if all(map(tiles, shape, intervals)) and prod(map(len, intervals)) == len(chunks):
        order = _cells(columns, intervals)
        if len(set(order)) == len(order):
            cuts = [[*(start for start, _ in found), size] for size, found in zip(shape, intervals, strict=True)]
            rule: dict[str, Any] = {"cuts": [table.add(column) for column in cuts]}
            if order != list(range(len(order))):
                rule["order"] = table.add(order)
            return rule
    return {
        "starts": [table.add(starts) for starts, _ in columns],
        "sizes": [table.add(sizes) for _, sizes in columns],
    }


def _cells(
    columns: Sequence[tuple[Sequence[int], Sequence[int]]], intervals: Sequence[Sequence[tuple[int, int]]]
) -> list[int]:
    """Return for each box the row-major index of its cell."""
    if not columns:
        return [0]
    order: list[int] = []
    for (starts, sizes), found in zip(columns, intervals, strict=True):
        index_of = {interval: index for index, interval in enumerate(found)}
        indexes = [index_of[interval] for interval in zip(starts, sizes, strict=True)]
        count = len(found)
        order = [a * count + b for a, b in zip(order, indexes, strict=True)] if order else indexes
    return order
