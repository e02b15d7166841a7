"""The items of a checkpoint by file, in the order of their bytes. Works on columns; reads nothing."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent


class Placed(NamedTuple):
    """An item with what it belongs to; `chunk` is None for an object."""

    item: Extent
    entry: Entry
    chunk: Chunk | None


class FileItems:
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
        for found in checkpoint.objects.values():
            self._others += [Placed(item, found, None) for item in (found.item, *found.replicas) if item]
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
        return self._others[-1 - row].item.span[1]


def name_of(placed: Placed) -> str:
    """Return the fqn of an item, with the offsets of its chunk where there are several."""
    entry, chunk = placed.entry, placed.chunk
    if chunk is None or (isinstance(entry, TensorEntry) and len(entry.chunks) == 1):
        return repr(entry.fqn)
    return f"{entry.fqn!r} at {list(chunk.offsets)}"
