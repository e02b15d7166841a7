"""Read tensors of a checkpoint band by band, with the CRC32 of every record checked. Knows no format and no output.

A band is a row-major piece of a region, of at most BAND_NBYTES bytes; bands are read in any order, by several threads.
The bytes of a record are checked as they come; where only parts of it are wanted, what others read of it may be added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.boxes import BoxReader, ChunkIndex
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.extents import Chunk, Record
from dcptool.checkpoint.fill import RecordCheck
from dcptool.checkpoint.regions import Box, bounding, cut_box, index_in, intersect, volume
from dcptool.copying.outputs import Fill
from dcptool.errors import DcptoolError, LayoutError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

BAND_NBYTES = 8 << 20
"""Bytes of one band, before and after a cast."""

Where = tuple[str, Chunk | None, Record | None]
"""What a failure is about: fqn, chunk, record."""


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
        self.entry, self.parts, self._fail = chunks.entry, parts, fail
        self._boxes = BoxReader(source.source, chunks)
        self._checks: dict[int, RecordCheck] = {}
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
        return sorted(self._checks.items(), key=itemgetter(0))

    def _assemble(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        covered = 0
        for index, common in self._boxes.touching(box):
            covered += volume(common[1])
            part = array[index_in(box, common)]
            try:
                self._boxes.fill(index, common, part, self._check(index).update)
            except DcptoolError as error:
                chunk = self.entry.chunks[index]
                self._fail(str(error), (self.entry.fqn, chunk, None), isinstance(error, UnsupportedError))
                part[...] = _zero(array)
        if covered != volume(box[1]):
            raise LayoutError(f"no chunk holds all of the box at {list(box[0])} sizes {list(box[1])}")

    def _check(self, index: int) -> RecordCheck:
        record = self._boxes.payload(index).record
        with self._lock:
            return self._checks.setdefault(index, RecordCheck(record))


def _common(box: Box, part: Box) -> Box | None:
    return box if box == part else intersect(box, part)


def _zero(array: np.ndarray[Any, Any]) -> Any:
    """Return a zero that an array of any dtype takes."""
    import numpy as np

    return np.zeros((), array.dtype)
