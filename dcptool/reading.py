"""Read tensors of a checkpoint band by band, with the CRC32 of every record checked. Knows no format and no output.

A band is a row-major piece of a box, of at most BAND_NBYTES bytes; bands are read in any order, by several threads. A
record whose bytes are all read in the course of it is checked from those pieces; of which only a part is wanted, or in
another order than it is stored, is read whole once before, only to be checked.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool import dtypes
from dcptool.checkpoint import Checkpoint, Entry, TensorEntry, require_box
from dcptool.errors import DcptoolError, ItemError, LayoutError
from dcptool.fill import RecordCheck, fill
from dcptool.model import Chunk, Fill, Ints, Payload, Record
from dcptool.regions import Box, intersect, is_contiguous, volume

if TYPE_CHECKING:
    import numpy as np

BAND_NBYTES = 8 << 20
"""Bytes of one band, before and after a cast."""

Where = tuple[str, Chunk | None, Record | None]
"""What a failure is about: fqn, chunk, record."""


class Band(NamedTuple):
    """A piece of a box that is read at once: its own box, its bytes in the output, and whether it is the first."""

    reader: TensorReader
    offsets: Ints
    sizes: Ints
    nbytes: int
    is_first: bool

    @property
    def where(self) -> Where:
        return self.reader.entry.fqn, None, None


class TensorReader:
    """Reads a box of a tensor band by band; bands may be read in any order and by several threads."""

    def __init__(self, source: Checkpoint, part: Fill, chunks: ChunkIndex, fail: Callable[..., None]) -> None:
        self.entry, self._source, self._part, self._fail = chunks.entry, source, part, fail
        self._chunks = chunks
        self._payloads: dict[int, tuple[Payload, RecordCheck | None]] = {}
        self._lock = threading.Lock()

    def bands(self) -> Iterator[Band]:
        """Yield the bands of the box in row-major order; at least one, maybe empty."""
        wide = max(dtypes.lookup(self.entry.dtype).itemsize, dtypes.lookup(self._part.dtype).itemsize)
        itemsize = dtypes.lookup(self._part.dtype).itemsize
        for index, (offsets, sizes) in enumerate(cut_box((self._part.offsets, self._part.sizes), BAND_NBYTES // wide)):
            yield Band(self, offsets, sizes, volume(sizes) * itemsize, index == 0)

    def read(self, band: Band, out: memoryview) -> None:
        """Fill `out` with a band's values."""
        import numpy as np

        if not band.nbytes:
            return
        stored, wanted = dtypes.numpy_dtype(self.entry.dtype), dtypes.numpy_dtype(self._part.dtype)
        if stored == wanted:
            array = np.frombuffer(out, np.uint8).view(wanted).reshape(band.sizes)
            self._assemble(band, array)
            return
        array = np.empty(band.sizes, stored)
        self._assemble(band, array)
        with np.errstate(over="ignore", invalid="ignore"):
            np.frombuffer(out, np.uint8).view(wanted).reshape(band.sizes)[...] = array.astype(wanted)

    def checks(self) -> list[tuple[str, Chunk | None, RecordCheck | None]]:
        """Return for each chunk that was read what its record's checksum says."""
        return [
            (self.entry.fqn, self.entry.chunks[index], check) for index, (_, check) in sorted(self._payloads.items())
        ]

    def _assemble(self, band: Band, array: np.ndarray[Any, Any]) -> None:
        box = (band.offsets, band.sizes)
        covered = 0
        for index in self._chunks.touching(band.offsets[0] if band.offsets else 0, band.sizes[0] if band.sizes else 1):
            chunk = self.entry.chunks[index]
            common = intersect(box, (chunk.offsets, chunk.sizes))
            if common is None:
                continue
            covered += volume(common[1])
            here = tuple(a - b for a, b in zip(common[0], chunk.offsets, strict=True))
            there = [slice(a - b, a - b + n) for a, b, n in zip(common[0], band.offsets, common[1], strict=True)]
            index_: Any = (*there, ...)  # the ellipsis keeps zero dimensions an array
            part = array[index_]
            try:
                payload, check = self._payload(index, chunk)
                update = check.update if check else _ignore
                fill(payload, self._source.source.read_into, here, part, update)
            except DcptoolError as error:
                self._fail(str(error), (self.entry.fqn, chunk, None))
                part[...] = _zero(array)
        if covered != volume(band.sizes):
            raise LayoutError(f"no chunk holds all of the box at {list(band.offsets)} sizes {list(band.sizes)}")

    def _payload(self, index: int, chunk: Chunk) -> tuple[Payload, RecordCheck | None]:
        """Return the payload of a chunk, and its record's check if the pieces that are read make up the record.

        A record of which only parts are read, or not in order, is read whole once, only to check it.
        """
        with self._lock:
            found = self._payloads.get(index)
        if found:
            return found
        if chunk.item is None:
            raise LayoutError("the metadata has no place for it")
        payload = self._source.source.payload(self.entry, chunk, chunk.item)
        require_box(payload, self.entry, chunk)
        record = payload.record
        check = RecordCheck(record) if record.crc32 is not None else None
        if check and not self._reads_all(payload, chunk):
            _check_whole(self._source, record)
            check = None
        with self._lock:
            return self._payloads.setdefault(index, (payload, check))

    def _reads_all(self, payload: Payload, chunk: Chunk) -> bool:
        itemsize = dtypes.lookup(payload.dtype).itemsize
        whole = intersect((self._part.offsets, self._part.sizes), (chunk.offsets, chunk.sizes))
        return (
            whole == (chunk.offsets, chunk.sizes)
            and payload.storage_offset == 0
            and is_contiguous(payload.shape, payload.strides)
            and volume(payload.shape) * itemsize == payload.record.nbytes
        )


def _ignore(byte_offset: int, data: memoryview) -> None:
    return None


def _zero(array: np.ndarray[Any, Any]) -> Any:
    """Return a zero that an array of any dtype takes."""
    import numpy as np

    return np.zeros((), array.dtype)


def _check_whole(source: Checkpoint, record: Record) -> None:
    check = RecordCheck(record)
    buffer = memoryview(bytearray(min(1 << 20, record.nbytes)))
    for start in range(0, record.nbytes, max(len(buffer), 1)):
        piece = buffer[: record.nbytes - start]
        source.source.read_into(record, start, piece)
        check.update(start, piece)
    problem = check.problem()
    if problem:
        raise ItemError(problem)


class ChunkIndex:
    """The chunks of a tensor by their place along the first dimension.

    Raises:
        LayoutError: the entry is no tensor.
    """

    def __init__(self, entry: Entry) -> None:
        if not isinstance(entry, TensorEntry):
            raise LayoutError(f"{entry.fqn!r} is no tensor")
        self.entry = entry
        starts, sizes = entry.chunks.column(0) if entry.shape else ([0] * len(entry.chunks), [1] * len(entry.chunks))
        self._ordered = sorted(zip(starts, range(len(starts)), strict=True))
        self._longest = max(sizes, default=0)

    def touching(self, start: int, size: int) -> list[int]:
        """Return the indexes of chunks that may touch rows from `start` on."""
        first = bisect_left(self._ordered, (start - self._longest + 1, -1))
        last = bisect_right(self._ordered, (start + size - 1, 1 << 62))
        return sorted(index for _, index in self._ordered[first:last])


def cut_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box into row-major bands: runs of its first dimension, or of a later one within one index of the first.

    >>> list(cut_box(((0, 0), (4, 3)), 6))
    [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    """
    offsets, sizes = box
    if volume(sizes) <= max_elements or not sizes:
        yield box
        return
    inner = volume(sizes[1:])
    if inner > max_elements:
        for row in range(sizes[0]):
            for rest in cut_box((offsets[1:], sizes[1:]), max_elements):
                yield (offsets[0] + row, *rest[0]), (1, *rest[1])
        return
    step = max(1, max_elements // inner)
    for start in range(0, sizes[0], step):
        yield (offsets[0] + start, *offsets[1:]), (min(step, sizes[0] - start), *sizes[1:])
