"""The chunks of all tensors of a checkpoint as columns of numbers.

A `Chunk` is made when somebody asks for it, so that a million of them cost what their numbers cost.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import add
from typing import NamedTuple, overload

from dcptool.checkpoint.extents import Chunk, Extent, Ints
from dcptool.checkpoint.regions import Box


class FileUse(NamedTuple):
    """How the items of one file use it: their number, their bytes together, one past the last byte of any."""

    items: int
    nbytes: int
    end: int


class ChunkTable:
    """Columns of all chunks of a checkpoint; rows are appended, never changed.

    Attributes:
        files: file names; `file` holds indexes into it, -1 where the metadata names no place.
        bounds: for each row ndim offsets, then ndim sizes, in elements.
        file, byte_offset, byte_length: the item of each row, in bytes.
        transforms: distinct lists of stream transforms; `transform` holds indexes into it.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.transforms: list[tuple[str, ...]] = [()]
        self.bounds = array("q")
        self.file = array("i")
        self.byte_offset = array("q")
        self.byte_length = array("q")
        self.transform = array("i")
        self._file_index: dict[str, int] = {}
        self._transform_index: dict[tuple[str, ...], int] = {(): 0}

    def for_more(self) -> ChunkTable:
        """Return an empty table in which files have the indexes they have here."""
        other = ChunkTable()
        other.files, other._file_index = list(self.files), dict(self._file_index)
        return other

    def add(self, offsets: Ints, sizes: Ints, item: Extent | None) -> None:
        """Append one row."""
        self.bounds.extend(offsets)
        self.bounds.extend(sizes)
        if item is None:
            item = Extent("", 0, 0)
            self.file.append(-1)
        else:
            index = self._file_index.get(item.file)
            if index is None:
                index = self._file_index[item.file] = len(self.files)
                self.files.append(item.file)
            self.file.append(index)
        self.byte_offset.append(item.byte_offset)
        self.byte_length.append(item.nbytes)
        index = self._transform_index.setdefault(item.transforms, len(self.transforms))
        if index == len(self.transforms):
            self.transforms.append(item.transforms)
        self.transform.append(index)

    def extend(
        self, boxes: Sequence[Box], files: Sequence[str], byte_offsets: Sequence[int], nbytes: Sequence[int]
    ) -> None:
        """Append many rows without transforms at once; all sequences are of one length."""
        self.bounds.extend(chain.from_iterable(chain.from_iterable(boxes)))
        for file in dict.fromkeys(files):
            if file not in self._file_index:
                self._file_index[file] = len(self.files)
                self.files.append(file)
        self.file.extend(map(self._file_index.__getitem__, files))
        self.byte_offset.extend(byte_offsets)
        self.byte_length.extend(nbytes)
        self.transform.extend(repeat(0, len(boxes)))

    def item(self, row: int) -> Extent | None:
        """Return the place of a row, None if it has none."""
        index = self.file[row]
        if index < 0:
            return None
        transforms = self.transforms[self.transform[row]]
        return Extent(self.files[index], self.byte_offset[row], self.byte_length[row], transforms)

    def usage(self) -> dict[str, FileUse]:
        """Return for each file how much of it the chunks use."""
        items = Counter(self.file)
        nbytes, ends = [0] * len(self.files), [0] * len(self.files)
        for index, length, end in zip(
            self.file, self.byte_length, map(add, self.byte_offset, self.byte_length), strict=True
        ):
            if index >= 0:
                nbytes[index] += length
                if end > ends[index]:
                    ends[index] = end
        return {name: FileUse(items[i], nbytes[i], ends[i]) for i, name in enumerate(self.files)}

    def mark(self) -> tuple[int, int]:
        """Return the next row and the next index into `bounds`, to open a `Chunks` later."""
        return len(self.file), len(self.bounds)

    def chunks_since(self, mark: tuple[int, int], ndim: int) -> Chunks:
        """Return the rows appended since a mark as the chunks of one tensor."""
        return Chunks(self, mark[0], len(self.file) - mark[0], mark[1], ndim)


class Chunks(Sequence[Chunk]):
    """The chunks of one tensor, in the order of the metadata: a view of the table.

    Attributes:
        first_row: row of the first chunk in the table; the others follow it.
        ndim: dimensions of the tensor.
    """

    __slots__ = ("_count", "_first_bound", "_table", "first_row", "ndim")

    def __init__(self, table: ChunkTable, first_row: int, count: int, first_bound: int, ndim: int) -> None:
        self._table, self.first_row, self._count = table, first_row, count
        self._first_bound, self.ndim = first_bound, ndim

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{self._count} chunks>"

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        index %= self._count
        return Chunk(*self.box(index), self._table.item(self.first_row + index))

    def box(self, index: int) -> Box:
        """Return (offsets, sizes) of one chunk, 0 ≤ index < len, in elements."""
        start, ndim = self._first_bound + 2 * self.ndim * index, self.ndim
        bounds = self._table.bounds
        return tuple(bounds[start : start + ndim]), tuple(bounds[start + ndim : start + 2 * ndim])

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of all chunks without looking up their items."""
        return map(self.box, range(self._count))

    def column(self, dim: int) -> tuple[array[int], array[int]]:
        """Return the offsets and the sizes of all chunks along one dimension, in elements."""
        start, width = self._first_bound + dim, 2 * self.ndim
        end = self._first_bound + width * self._count
        bounds = self._table.bounds
        return bounds[start:end:width], bounds[start + self.ndim : end : width]

    def file_indexes(self) -> array[int]:
        """Return for each chunk the index of its file in the table's `files`, -1 where the metadata names no place."""
        return self._table.file[self.first_row : self.first_row + self._count]

    def places(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """Return for each chunk file index, byte offset, byte length and index into `transforms`, as columns."""
        rows = slice(self.first_row, self.first_row + self._count)
        table = self._table
        return table.file[rows], table.byte_offset[rows], table.byte_length[rows], table.transform[rows]

    def key(self) -> tuple[bytes, bytes]:
        """Return what tells boxes and files of two tensors of one table and ndim apart: equal keys, equal both."""
        start, end = self._first_bound, self._first_bound + 2 * self.ndim * self._count
        return self._table.bounds[start:end].tobytes(), self.file_indexes().tobytes()

    def files(self) -> list[str]:
        """Return the names of the files that hold them, each once, in order of first use."""
        return [self._table.files[index] for index in dict.fromkeys(self.file_indexes()) if index >= 0]
