"""Read tensors of a checkpoint band by band, with the CRC32 of every record checked. Knows no format and no output.

A band is a row-major piece of a region, of at most BAND_NBYTES bytes; bands are read in any order, by several threads.
The bytes of a record are checked as they come; where only parts of it are wanted, what others read of it may be added.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool import dtypes
from dcptool.checkpoint import Checkpoint, Entry, TensorEntry, require_box
from dcptool.errors import DcptoolError, LayoutError, UnsupportedError
from dcptool.fill import RecordCheck, fill
from dcptool.model import Chunk, Fill, Payload, Record
from dcptool.regions import Box, bounding, index_in, intersect, volume

if TYPE_CHECKING:
    import numpy as np

BAND_NBYTES = 8 << 20
"""Bytes of one band, before and after a cast."""

Progress = Callable[[int], None]
"""Told how many more bytes were read, or written."""

Where = tuple[str, Chunk | None, Record | None]
"""What a failure is about: fqn, chunk, record."""


def check_whole(source: Checkpoint, record: Record) -> str:
    """Read all of a record and say what is wrong with it, "" if nothing is."""
    check = RecordCheck(record)
    buffer = memoryview(bytearray(min(1 << 20, record.nbytes)))
    for start in range(0, record.nbytes, max(len(buffer), 1)):
        piece = buffer[: record.nbytes - start]
        source.source.read_into(record, start, piece)
        check.update(start, piece)
    return check.problem()


class Band(NamedTuple):
    """A box that is read at once, and what of it each of the reader's parts takes.

    Attributes:
        reader: what reads it.
        box: offsets and sizes, in elements of the whole tensor.
        nbytes: of its values in the output.
        takers: indexes into the reader's parts with the box that each takes of this one.
    """

    reader: TensorReader
    box: Box
    nbytes: int
    takers: tuple[tuple[int, Box], ...]

    @property
    def where(self) -> Where:
        return self.reader.entry.fqn, None, None


class TensorReader:
    """Reads boxes of one tensor band by band; bands may be read in any order and by several threads.

    Args:
        source: the checkpoint.
        parts: what is wanted: boxes of one tensor, all of one dtype.
        chunks: of the tensor.
        fail: told what cannot be read or does not check, where, and whether its form is unsupported; zeros stand in
            its place.
    """

    def __init__(
        self, source: Checkpoint, parts: Sequence[Fill], chunks: ChunkIndex, fail: Callable[..., None]
    ) -> None:
        self.entry, self.parts, self._source, self._fail = chunks.entry, parts, source, fail
        self._chunks = chunks
        self._payloads: dict[int, tuple[Payload, RecordCheck]] = {}
        self._lock = threading.Lock()

    def bands(self) -> Iterator[Band]:
        """Yield bands that together hold all that is wanted, in row-major order, which is that of each part too."""
        itemsize = dtypes.lookup(self.parts[0].dtype).itemsize
        wide = max(dtypes.lookup(self.entry.dtype).itemsize, itemsize)
        wanted = [(index, (part.offsets, part.sizes)) for index, part in enumerate(self.parts) if part.nbytes]
        if not wanted:
            return
        for box in cut_box(bounding([part for _, part in wanted]), BAND_NBYTES // wide):
            takers = tuple((index, common) for index, part in wanted if (common := _common(box, part)))
            if takers:
                box = takers[0][1] if len(takers) == 1 else bounding([common for _, common in takers])
                yield Band(self, box, volume(box[1]) * itemsize, takers)

    def read(self, band: Band, out: memoryview) -> None:
        """Fill `out` with a band's values."""
        import numpy as np

        stored, wanted = dtypes.numpy_dtype(self.entry.dtype), dtypes.numpy_dtype(self.parts[0].dtype)
        sizes = band.box[1]
        if stored == wanted:
            self._assemble(band.box, np.frombuffer(out, np.uint8).view(wanted).reshape(sizes))
            return
        array = np.empty(sizes, stored)
        self._assemble(band.box, array)
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(np.frombuffer(out, np.uint8).view(wanted).reshape(sizes), array, "unsafe")  # no third array

    def checks(self) -> list[tuple[int, RecordCheck]]:
        """Return for each chunk that was read its index and what was seen of its record."""
        return [(index, check) for index, (_, check) in sorted(self._payloads.items())]

    def _assemble(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        covered = 0
        for index in self._chunks.touching(box[0][0] if box[0] else 0, box[1][0] if box[1] else 1):
            chunk = self.entry.chunks[index]
            common = intersect(box, (chunk.offsets, chunk.sizes))
            if common is None:
                continue
            covered += volume(common[1])
            here = tuple(a - b for a, b in zip(common[0], chunk.offsets, strict=True))
            part = array[index_in(box, common)]
            try:
                payload, check = self._payload(index, chunk)
                fill(payload, self._source.source.read_into, here, part, check.update)
            except DcptoolError as error:
                self._fail(str(error), (self.entry.fqn, chunk, None), isinstance(error, UnsupportedError))
                part[...] = _zero(array)
        if covered != volume(box[1]):
            raise LayoutError(f"no chunk holds all of the box at {list(box[0])} sizes {list(box[1])}")

    def _payload(self, index: int, chunk: Chunk) -> tuple[Payload, RecordCheck]:
        with self._lock:
            found = self._payloads.get(index)
        if found:
            return found
        if chunk.item is None:
            raise LayoutError("the metadata has no place for it")
        payload = self._source.source.payload(self.entry, chunk, chunk.item)
        require_box(payload, self.entry, chunk)
        with self._lock:
            return self._payloads.setdefault(index, (payload, RecordCheck(payload.record)))


def _common(box: Box, part: Box) -> Box | None:
    return box if box == part else intersect(box, part)


def _zero(array: np.ndarray[Any, Any]) -> Any:
    """Return a zero that an array of any dtype takes."""
    import numpy as np

    return np.zeros((), array.dtype)


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
