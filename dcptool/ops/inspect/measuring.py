"""Read tensors of one checkpoint band by band and measure their values, every record checked. Words nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.boxes import ChunkIndex, record_problem
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.cover import cover
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.fill import RecordCheck
from dcptool.checkpoint.regions import cut_box, volume
from dcptool.copying.outputs import Fill
from dcptool.copying.pool import per_thread
from dcptool.copying.reading import BAND_NBYTES, Band, TensorReader, Where
from dcptool.errors import DcptoolError, ItemError, LayoutError
from dcptool.ops.inspect.moments import Moments, measure


class BandOfTensor(NamedTuple):
    """What is read at once: a band of one tensor; None marks the tensor's end."""

    measurement: Measurement
    band: Band | None


class CheckpointReading:
    """What is shared by the tensors of one checkpoint while they are read.

    Attributes:
        n_unproven: tensors so far with values that are stored without a checksum.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._buffer = per_thread(lambda: memoryview(bytearray(BAND_NBYTES)))
        self._problems: dict[tuple[str, int, int], str] = {}
        self.n_unproven = 0
        # What decompresses an item keeps the result, and is made for one thread.
        self._lock = threading.Lock() if any(checkpoint.table.transforms) else nullcontext()

    def bands(self, entries: Sequence[TensorEntry]) -> Iterator[BandOfTensor]:
        """Yield the bands of all tensors, each tensor's end after them."""
        for entry in entries:
            measurement = Measurement(entry)
            try:
                yield from (BandOfTensor(measurement, band) for band in measurement.bands(self.checkpoint))
            except DcptoolError as error:
                measurement.fail(error, (entry.fqn, None, None))
            yield BandOfTensor(measurement, None)

    def measure(self, wanted: BandOfTensor) -> Moments:
        """Read a band and measure its values; nothing is measured of a tensor that cannot be read."""
        measurement, band = wanted
        if band is None or measurement.failures:
            return Moments()
        out = self._buffer()[: band.nbytes]
        try:
            with self._lock:
                band.reader.read(band, out)
        except DcptoolError as error:
            measurement.fail(error, band.reader.where)
            return Moments()
        import numpy as np

        dtype = measurement.entry.dtype
        return measure(np.frombuffer(out, np.uint8).view(dtypes.numpy_dtype(dtype)), dtype)

    def damage(self, reader: TensorReader) -> Iterator[tuple[str, Where]]:
        """Yield what is wrong with the records that were read; what was read in part, others have read or will be."""
        for index, check in reader.checks():
            problem = self._problem(check)
            if problem:
                yield problem, (reader.entry.fqn, reader.entry.chunks[index], check.record)

    def _problem(self, check: RecordCheck) -> str:
        record = check.record
        key = record.item.file, record.item.byte_offset, record.byte_offset
        if check.is_whole():
            self._problems[key] = check.problem()
        elif key not in self._problems:
            self._problems[key] = record_problem(self.checkpoint.source, record)
        return self._problems[key]


class Measurement:
    """How far one tensor is.

    Attributes:
        entry: the tensor.
        moments: of the bands so far.
        failures: what of it could not be read, or is damaged, and where.
    """

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.failures: list[tuple[DcptoolError, Where]] = []
        self._reader: TensorReader | None = None
        self.moments = Moments()

    def fail(self, error: DcptoolError, where: Where) -> None:
        """Note what of the tensor cannot be read."""
        self.failures.append((error, where))

    def add(self, moments: Moments) -> None:
        """Add those of one band."""
        self.moments = self.moments.plus(moments)

    def bands(self, checkpoint: Checkpoint) -> Iterator[Band]:
        """Yield bands that together hold each element once, chunk by chunk, which is the order of the files.

        None follow one that could not be read: metadata may say any size, and time is to be that of what is there.

        Raises:
            UnsupportedError: there are no numbers of this dtype.
            LayoutError: elements are in no chunk, or in several.
        """
        entry = self.entry
        itemsize = dtypes.numpy_dtype(entry.dtype).itemsize
        if not volume(entry.shape):
            return
        _require_exact_cover(entry)
        whole = Fill(entry.fqn, (0,) * len(entry.shape), entry.shape, entry.dtype, entry.nbytes)
        reader = self._reader = TensorReader(checkpoint.source, entry, [whole], ChunkIndex(entry.chunks), self.fail)
        for chunk in entry.chunks.boxes():
            for box in cut_box(chunk, BAND_NBYTES // itemsize) if volume(chunk[1]) else ():
                if self.failures:
                    return
                yield Band(reader, box, volume(box[1]) * itemsize, ())

    def finish(self, reading: CheckpointReading) -> None:
        """Check what was read once all bands are there: what is damaged is a failure too."""
        if self._reader and not self.failures:
            for message, where in reading.damage(self._reader):
                self.fail(ItemError(message), where)
            records = [check.record for _, check in self._reader.checks()]
            reading.n_unproven += any(record.crc32 is None and record.nbytes for record in records)
        self._reader = None


def _require_exact_cover(entry: TensorEntry) -> None:
    """Check that each element of a tensor is in one chunk.

    Raises:
        LayoutError: it is in none, or in several.
    """
    found = cover(entry.shape, entry.chunks, max_found=1)
    if found.gaps:
        raise LayoutError(f"no chunk holds the {list(found.gaps[0][1])} elements at {list(found.gaps[0][0])}")
    if found.overlaps:
        raise LayoutError(f"two chunks hold the elements at {list(found.overlaps[0].offsets)}")
