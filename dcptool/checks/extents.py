"""Where items lie in their files: beyond the end, or one over another. Works on columns; reads nothing."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable
from itertools import repeat
from operator import mul, sub
from typing import NamedTuple

from dcptool import dtypes
from dcptool.checkpoint import Checkpoint, Entry, TensorEntry
from dcptool.errors import StorageError
from dcptool.findings import Finding, Severity
from dcptool.model import Chunk, Extent

MAX_PER_FILE = 20
"""Overlaps named for one file."""


class Placed(NamedTuple):
    """An item with what it belongs to; `chunk` is None for an object."""

    item: Extent
    entry: Entry
    chunk: Chunk | None


class Placement:
    """All items of a checkpoint by file, in the order of their bytes; an item becomes an object only when asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._table = table = checkpoint.table
        self._rows: dict[str, array[int]] = {}
        by_index = [self._rows.setdefault(name, array("q")) for name in table.files]
        for row, index in enumerate(table.file):
            if index >= 0:
                by_index[index].append(row)
        self._owners = [entry for entry in checkpoint.tensors.values() if len(entry.chunks)]
        self._first_rows = [entry.chunks.first_row for entry in self._owners]
        self._others: list[Placed] = []
        for entry in checkpoint.tensors.values():
            self._others += [Placed(chunk.item, entry, chunk) for chunk in entry.replicas if chunk.item]
        self._others += [Placed(entry.item, entry, None) for entry in checkpoint.objects.values() if entry.item]
        for index, placed in enumerate(self._others):
            self._rows.setdefault(placed.item.file, array("q")).append(-1 - index)
        self._spans: dict[str, tuple[array[int], array[int]]] = {}

    @property
    def files(self) -> list[str]:
        """Names of all files that hold items."""
        return list(self._rows)

    def spans(self, file: str) -> tuple[array[int], array[int]]:
        """Return of each item of a file, in order, the first byte and the one past its last."""
        if file not in self._spans:
            rows = self._rows[file] = array("q", sorted(self._rows[file], key=self._start))
            self._spans[file] = array("q", map(self._start, rows)), array("q", map(self._end, rows))
        return self._spans[file]

    def item(self, file: str, index: int) -> Placed:
        """Return one item of a file; `index` counts in the order of `spans`."""
        self.spans(file)
        row = self._rows[file][index]
        if row < 0:
            return self._others[-1 - row]
        entry = self._owners[bisect_right(self._first_rows, row) - 1]
        chunk = entry.chunks[row - entry.chunks.first_row]
        if chunk.item is None:
            raise IndexError(index)
        return Placed(chunk.item, entry, chunk)

    def _start(self, row: int) -> int:
        return self._table.byte_offset[row] if row >= 0 else self._others[-1 - row].item.byte_offset

    def _end(self, row: int) -> int:
        if row >= 0:
            return self._table.byte_offset[row] + self._table.byte_length[row]
        item = self._others[-1 - row].item
        return item.byte_offset + item.nbytes


def extent_problems(checkpoint: Checkpoint, placement: Placement) -> list[Finding]:
    """Return items that lie over one another in their file; only zips and frames lie side by side."""
    if checkpoint.format != "dcp" or "SAFETENSORS" in checkpoint.flavour:
        return []
    problems = []
    for file in placement.files:
        starts, ends = placement.spans(file)
        overlapping = [index for index in range(1, len(starts)) if starts[index] < ends[index - 1]]
        for index in overlapping[:MAX_PER_FILE]:
            problems.append(_overlap(file, placement.item(file, index - 1), placement.item(file, index)))
        if len(overlapping) > MAX_PER_FILE:
            message = f"{len(overlapping) - MAX_PER_FILE:,} more items of {file} lie over one another"
            problems.append(Finding("items-overlap", Severity.ERROR, message, file))
    return problems


def short_items(checkpoint: Checkpoint) -> list[Finding]:
    """Return tensors with an item that has fewer bytes than the elements of its box need; compressed ones may."""
    if checkpoint.format != "dcp":
        return []
    problems = []
    table = checkpoint.table
    for entry in checkpoint.tensors.values():
        dtype = dtypes.BY_NAME.get(entry.dtype)
        if dtype is None:
            continue
        rows = slice(entry.chunks.first_row, entry.chunks.first_row + len(entry.chunks))
        lacking = map(sub, _needed_nbytes(entry, dtype.itemsize), table.byte_length[rows])
        candidates = [index for index, nbytes in enumerate(lacking) if nbytes > 0]
        chunks = (entry.chunks[index] for index in candidates)
        short = [chunk for chunk in chunks if chunk.item and not chunk.item.transforms]
        if short:
            problems.append(_short_item(entry, short[0], len(short)))
    return problems


def _needed_nbytes(entry: TensorEntry, itemsize: int) -> Iterable[int]:
    """Return the bytes of each chunk's elements, column by column."""
    needed: Iterable[int] = repeat(itemsize, len(entry.chunks))
    for dim in range(len(entry.shape)):
        needed = map(mul, needed, entry.chunks.column(dim)[1])
    return needed


def _short_item(entry: TensorEntry, chunk: Chunk, count: int) -> Finding:
    item = chunk.item or Extent("", 0, 0)
    more = f", and {count - 1:,} more of its items are too short" if count > 1 else ""
    message = f"{entry.fqn!r}: its item in {item.file} at byte {item.byte_offset:,} has {item.nbytes:,} bytes, "
    message += f"too few for {entry.dtype} {list(chunk.sizes)}{more}"
    span = (item.byte_offset, item.byte_offset + item.nbytes)
    return Finding("short-item", Severity.ERROR, message, item.file, entry.fqn, chunk.offsets, chunk.sizes, span)


def edge_problems(checkpoint: Checkpoint, placement: Placement, known: Collection[str | None]) -> list[Finding]:
    """Return files that a few bytes at their first and last tensor show to be wrong.

    A file of another save under this metadata mostly shows here, unless its items happen to lie in the same places.
    Files in `known` have been found wrong before.
    """
    problems = []
    for file in sorted(set(placement.files).difference(known)):
        nbytes = checkpoint.files.get(file, 0)
        _, ends = placement.spans(file)
        there = [index for index in (0, len(ends) - 1) if ends[index] <= nbytes]
        for placed in dict.fromkeys(placement.item(file, index) for index in there):
            try:
                wrong = checkpoint.source.edge_problem(placed.item) if placed.chunk is not None else ""
            except StorageError as error:
                problems.append(Finding("unreadable", Severity.ERROR, str(error), file))
                break
            if wrong and placed.chunk is not None:
                message = f"{file}: {name_of(placed)}: {wrong}"
                span = (placed.item.byte_offset, placed.item.byte_offset + placed.item.nbytes)
                where = (file, placed.entry.fqn, placed.chunk.offsets, None, span)
                problems.append(Finding("misplaced-item", Severity.ERROR, message, *where))
                break
    return problems


def _overlap(file: str, first: Placed, second: Placed) -> Finding:
    start = second.item.byte_offset
    message = f"items of {name_of(first)} and {name_of(second)} lie over one another in {file} at byte {start:,}"
    span = (start, min(first.item.byte_offset + first.item.nbytes, start + second.item.nbytes))
    offsets = second.chunk.offsets if second.chunk else None
    return Finding("items-overlap", Severity.ERROR, message, file, second.entry.fqn, offsets, None, span)


def name_of(placed: Placed) -> str:
    """Return the fqn of an item, with the offsets of its chunk where there are several."""
    entry, chunk = placed.entry, placed.chunk
    if chunk is None or (isinstance(entry, TensorEntry) and len(entry.chunks) == 1):
        return repr(entry.fqn)
    return f"{entry.fqn!r} at {list(chunk.offsets)}"
