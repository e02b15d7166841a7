"""Read what parts of files are made of, band by band, with the CRC32 of every record checked. Knows no format.

A band is a row-major piece of a region, of at most BAND_NBYTES bytes; bands are read in any order, by several threads.
A carried record is read as a row of bytes.
The bytes of a record are checked as they come; where only parts of it are wanted, what others read of it may be added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.boxes import BoxReader, ChunkIndex
from dcptool.checkpoint.casting import NO_LOSS, Loss, loss_of_cast
from dcptool.checkpoint.entries import Source, TensorEntry
from dcptool.checkpoint.extents import Chunk, Ints, Record
from dcptool.checkpoint.fill import RecordCheck
from dcptool.checkpoint.regions import Box, bounding, cut_box, index_in, intersect, volume
from dcptool.copying.outputs import Fill
from dcptool.errors import DcptoolError, LayoutError

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
        box: offsets and sizes, in elements of the whole tensor; in bytes of a record.
        nbytes: of its values in the output.
        takers: indexes into the reader's parts with the box that each takes of this one.
    """

    reader: PartReader
    box: Box
    nbytes: int
    takers: tuple[tuple[int, Box], ...]

    def shares(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield what each part takes of the band's bytes, by its index."""
        if len(self.takers) == 1:
            yield self.takers[0][0], data
            return
        array = _elements(data, self.reader.itemsize, self.box[1])
        for index, common in self.takers:
            yield index, _bytes_of(array[index_in(self.box, common)])


class RecordReader:
    """Reads a record that is carried as it is, for one part.

    Args:
        source: of the checkpoint.
        record: the record.
    """

    itemsize = 1

    def __init__(self, source: Source, record: Record) -> None:
        self._source, self.check = source, RecordCheck(record)
        self.where: Where = "", None, record

    def bands(self) -> Iterator[Band]:
        """Yield bands that together are the record, in order."""
        nbytes = self.check.record.nbytes
        for start in range(0, nbytes, BAND_NBYTES):
            box = (start,), (min(BAND_NBYTES, nbytes - start),)
            yield Band(self, box, box[1][0], ((0, box),))

    def read(self, band: Band, out: memoryview) -> None:
        """Fill `out` with a band's bytes."""
        start = band.box[0][0]
        self._source.read_into(self.check.record, start, out)
        self.check.update(start, out)


class TensorReader:
    """Reads boxes of one tensor band by band; bands may be read in any order and by several threads.

    Args:
        source: of the checkpoint.
        entry: the tensor.
        parts: what is wanted: boxes of it, all of one dtype.
        chunks: its chunks.
        fail: told what cannot be read or does not check, and where; zeros stand in its place.

    Attributes:
        entry: the tensor.
        where: what a failure of a whole band is about.
        itemsize: bytes of an element in the output.
        lost: what casting has lost so far.
    """

    def __init__(
        self,
        source: Source,
        entry: TensorEntry,
        parts: Sequence[Fill],
        chunks: ChunkIndex,
        fail: Callable[[DcptoolError, Where], None],
    ) -> None:
        self.entry, self._parts, self._chunks, self._fail = entry, parts, chunks, fail
        self.where: Where = self.entry.fqn, None, None
        self._dtype = parts[0].dtype
        self._boxes = BoxReader(source, self.entry)
        self._checks: dict[int, RecordCheck] = {}
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self.lost = NO_LOSS

    @property
    def itemsize(self) -> int:
        return dtypes.lookup(self._dtype).itemsize

    def bands(self) -> Iterator[Band]:
        """Yield bands that together hold all that is wanted, in row-major order, which is that of each part too."""
        itemsize = self.itemsize
        wide = max(dtypes.lookup(self.entry.dtype).itemsize, itemsize)
        wanted = [(index, (part.offsets, part.sizes)) for index, part in enumerate(self._parts) if part.nbytes]
        if not wanted:
            return
        for box in cut_box(bounding([part for _, part in wanted]), BAND_NBYTES // wide):
            takers = tuple((index, common) for index, part in wanted if (common := intersect(box, part)))
            if takers:
                box = takers[0][1] if len(takers) == 1 else bounding([common for _, common in takers])
                yield Band(self, box, volume(box[1]) * itemsize, takers)

    def read(self, band: Band, out: memoryview) -> None:
        """Fill `out` with a band's values."""
        import numpy as np

        stored, wanted = dtypes.numpy_dtype(self.entry.dtype), dtypes.numpy_dtype(self._dtype)
        sizes = band.box[1]
        if stored == wanted:
            self._assemble(band.box, np.frombuffer(out, np.uint8).view(wanted).reshape(sizes))
            return
        array = np.empty(sizes, stored)
        self._assemble(band.box, array)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = np.frombuffer(out, np.uint8).view(wanted).reshape(sizes)
            np.copyto(cast, array, "unsafe")  # no third array
        self.lose(loss_of_cast(array, cast, self.entry.dtype, self._dtype))

    @property
    def sources(self) -> Sequence[TensorReader]:
        """What reads the stored tensors that this one's values are of."""
        return [self]

    def lose(self, lost: Loss) -> None:
        """Note what a cast lost."""
        if any(lost):
            with self._lock:
                self.lost = self.lost.plus(lost)

    def array(self, box: Box) -> np.ndarray[Any, Any]:
        """Return a box as it is stored."""
        import numpy as np

        array = np.empty(box[1], dtypes.numpy_dtype(self.entry.dtype))
        self._assemble(box, array)
        return array

    def checks(self) -> list[tuple[int, RecordCheck]]:
        """Return for each chunk that was read its index and what was seen of its record."""
        return sorted(self._checks.items(), key=itemgetter(0))

    def _assemble(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        covered = 0
        for index, common in self._chunks.touching(box):
            covered += volume(common[1])
            part = array[index_in(box, common)]
            try:
                self._boxes.fill(index, common, part, self._check(index).update)
            except DcptoolError as error:
                chunk = self.entry.chunks[index]
                self._fail(error, (self.entry.fqn, chunk, None))
                part[...] = _zero(array)
        if covered != volume(box[1]):
            raise LayoutError(f"no chunk holds all of the box at {list(box[0])} sizes {list(box[1])}")

    def _check(self, index: int) -> RecordCheck:
        record = self._boxes.payload(index).record
        with self._lock:
            return self._checks.setdefault(index, RecordCheck(record))


PartReader = TensorReader | RecordReader
"""What reads the bands of a part."""


def _zero(array: np.ndarray[Any, Any]) -> Any:
    """Return a zero that an array of any dtype takes."""
    import numpy as np

    return np.zeros((), array.dtype)


def _elements(data: memoryview, itemsize: int, sizes: Ints) -> np.ndarray[Any, Any]:
    """Return bytes as an array of elements of that many bytes each, whatever they mean."""
    import numpy as np

    plain = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(itemsize, f"V{itemsize}")
    return np.frombuffer(data, np.dtype(plain)).reshape(sizes)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
