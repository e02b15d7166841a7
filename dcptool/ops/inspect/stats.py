"""Statistics of the tensors of a checkpoint, and what in them is not as a trained model has it.

Every tensor is read once, chunk by chunk in bands, in constant memory, with the CRC32 of every record checked.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.boxes import ChunkIndex, check_whole
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.cover import cover
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.fill import RecordCheck
from dcptool.checkpoint.findings import Finding, Severity
from dcptool.checkpoint.regions import cut_box, volume
from dcptool.checkpoint.selection import globs, select
from dcptool.copying.checking import damaged_item
from dcptool.copying.outputs import Fill
from dcptool.copying.pool import Pool
from dcptool.copying.reading import BAND_NBYTES, Band, TensorReader, Where
from dcptool.errors import DcptoolError, LayoutError, UnsupportedError
from dcptool.formats.detect import open_checkpoint
from dcptool.ops.inspect.moments import Moments, measure
from dcptool.storage import Progress

VALUES, MAGNITUDES, UNPACKED = "values", "magnitudes", "unpacked"
_SECOND_MOMENT = re.compile(r"(?:^|\.)(?:max_)?(?:exp_avg_sq|square_avg)(?:$|\.)")
"""What Adam and its like keep of the squares of gradients, in torch's names and in Megatron-core's."""


class TensorStats(NamedTuple):
    """Statistics of one tensor. NaN and infinities are counted; everything else is of the finite values.

    Attributes:
        fqn, dtype, shape: as in `TensorEntry`.
        measured: what the numbers are of: "values" (False is 0, True is 1), "magnitudes" of a complex tensor, or the
            values "unpacked" of float4, two for each element.
        n_values: how many there are.
        n_nan, n_inf: NaN; infinities of either sign. A complex number with a NaN in it is NaN.
        n_zero: 0 and -0.
        min, max: exact, for integers too; None if there is no finite value.
        mean: in float64; None if there is no finite value.
        std: standard deviation over n - 1, as `torch.std`; None for fewer than two finite values.
        norm: Euclidean norm; None only if nothing was computed.
        problem: why nothing was computed, else "".
    """

    fqn: str
    dtype: str
    shape: Ints
    measured: str = VALUES
    n_values: int = 0
    n_nan: int = 0
    n_inf: int = 0
    n_zero: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    problem: str = ""

    @property
    def is_constant(self) -> bool:
        """Whether there are several values and all are finite and the same."""
        return self.n_values > 1 and self.min == self.max and not self.n_nan and not self.n_inf and not self.problem

    @property
    def is_zero(self) -> bool:
        """Whether there are several values and all are zero."""
        return self.n_values > 1 and self.n_zero == self.n_values


class StatsReport(NamedTuple):
    """Statistics of the selected tensors of one checkpoint.

    Attributes:
        path: of the checkpoint.
        tensors: in the order of the metadata.
        findings: tensors that could not be read (errors), that hold NaN or infinities (a warning), that are all zero,
            constant, or the trace of training that never reached a parameter (notes).
        nbytes: of the values that were read.
        n_unproven: tensors with values that are stored without a checksum.
    """

    path: str
    tensors: tuple[TensorStats, ...]
    findings: tuple[Finding, ...]
    nbytes: int
    n_unproven: int = 0

    @property
    def good(self) -> bool:
        """Whether all of them could be read, with nothing changed since they were saved."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)


def tensor_stats(
    checkpoint: Checkpoint | str | os.PathLike[str],
    keys: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> StatsReport:
    """Compute statistics of the tensors of a checkpoint, reading each once in constant memory.

    Args:
        checkpoint: an open checkpoint, or the path or URL of one.
        keys: names or shell globs on whole fqns, `*` crosses dots; default: all.
        exclude: names or globs of what to leave out.
        threads: bands read at the same time, None for the number of processors, at most 8.
        progress: told the bytes of values as they are read.

    Returns:
        Statistics of each, and what is to be pointed out. A tensor that cannot be read has a `problem`; others go on.

    Raises:
        LayoutError: nothing is selected; the message lists what there is.
        CheckpointNotFoundError, MetadataError, StorageError, UnsupportedError: as `dcptool.open`.

    Example:
        >>> [tensor.fqn for tensor in dcptool.tensor_stats("ckpt/step_500").tensors if tensor.n_nan]
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    entries = [tensor.entry for tensor in select(opened, globs(keys), globs(exclude)).tensors]
    return stats_of(opened, entries, threads, progress)


def stats_of(
    checkpoint: Checkpoint,
    entries: Sequence[TensorEntry],
    threads: int | None = None,
    progress: Progress | None = None,
) -> StatsReport:
    """Compute statistics of tensors of an open checkpoint; see `tensor_stats`."""
    reading = _CheckpointReading(checkpoint)
    tensors: list[TensorStats] = []
    findings: list[Finding] = []
    nbytes = 0
    with Pool(threads) as pool:
        for (measurement, band), moments in pool.run(reading.measure, reading.bands(entries)):
            if band is None:
                found, told = measurement.finish(reading)
                tensors.append(found)
                findings += told
                continue
            measurement.add(moments)
            nbytes += band.nbytes
            if progress:
                progress(band.nbytes)
    return StatsReport(checkpoint.path, tuple(tensors), (*findings, *_pointed_out(tensors)), nbytes, reading.n_unproven)


class _BandOfTensor(NamedTuple):
    """What is read at once: a band of one tensor; None marks the tensor's end."""

    measurement: _Measurement
    band: Band | None


class _CheckpointReading:
    """What is shared by the tensors of one checkpoint while they are read.

    Attributes:
        n_unproven: tensors so far with values that are stored without a checksum.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._local = threading.local()
        self._problems: dict[tuple[str, int, int], str] = {}
        self.n_unproven = 0
        # What decompresses an item keeps the result, and is made for one thread.
        self._lock = threading.Lock() if any(checkpoint.table.transforms) else nullcontext()

    def bands(self, entries: Sequence[TensorEntry]) -> Iterator[_BandOfTensor]:
        """Yield the bands of all tensors, each tensor's end after them."""
        for entry in entries:
            measurement = _Measurement(entry)
            try:
                yield from (_BandOfTensor(measurement, band) for band in measurement.bands(self.checkpoint))
            except DcptoolError as error:
                measurement.fail(str(error), (entry.fqn, None, None), isinstance(error, UnsupportedError))
            yield _BandOfTensor(measurement, None)

    def measure(self, wanted: _BandOfTensor) -> Moments:
        """Read a band and measure its values; nothing is measured of a tensor that cannot be read."""
        measurement, band = wanted
        if band is None or measurement.failures:
            return Moments()
        out = self._buffer()[: band.nbytes]
        try:
            with self._lock:
                band.reader.read(band, out)
        except DcptoolError as error:
            measurement.fail(str(error), band.reader.where, isinstance(error, UnsupportedError))
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
            try:
                self._problems[key] = check_whole(self.checkpoint.source, record)
            except DcptoolError as error:
                self._problems[key] = str(error)
        return self._problems[key]

    def _buffer(self) -> memoryview:
        """Return this thread's buffer for a band."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(BAND_NBYTES))
        return buffer


class _Measurement:
    """How far one tensor is."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.failures: list[tuple[str, Where, bool]] = []
        self._reader: TensorReader | None = None
        self._moments = Moments()

    def fail(self, message: str, where: Where, unsupported: bool = False) -> None:
        """Note what of the tensor cannot be read."""
        self.failures.append((message, where, unsupported))

    def add(self, moments: Moments) -> None:
        """Add those of one band."""
        self._moments = self._moments.plus(moments)

    def bands(self, checkpoint: Checkpoint) -> Iterator[Band]:
        """Yield bands that together hold each element once, chunk by chunk, which is the order of the files.

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
        reader = self._reader = TensorReader(checkpoint.source, [whole], ChunkIndex(entry), self.fail)
        for chunk in entry.chunks.boxes():
            for box in cut_box(chunk, BAND_NBYTES // itemsize) if volume(chunk[1]) else ():
                yield Band(reader, box, volume(box[1]) * itemsize, ())

    def finish(self, reading: _CheckpointReading) -> tuple[TensorStats, list[Finding]]:
        """Return the statistics once all bands are there, and findings on what is damaged."""
        entry = self.entry
        self._check_records(reading)
        head = TensorStats(entry.fqn, entry.dtype, entry.shape, _measured(entry.dtype))
        if not self.failures:
            return _with_moments(head, self._moments), []
        message, where, unsupported = self.failures[0]
        finding = _finding(reading.checkpoint, message, where, unsupported, len(self.failures) - 1)
        return head._replace(problem=message), [finding]

    def _check_records(self, reading: _CheckpointReading) -> None:
        if self._reader and not self.failures:
            for message, where in reading.damage(self._reader):
                self.fail(message, where)
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


def _with_moments(stats: TensorStats, moments: Moments) -> TensorStats:
    return stats._replace(
        n_values=moments.n_finite + moments.n_nan + moments.n_inf,
        n_nan=moments.n_nan,
        n_inf=moments.n_inf,
        n_zero=moments.n_zero,
        min=moments.low,
        max=moments.high,
        mean=moments.average,
        std=moments.deviation,
        norm=moments.norm,
    )


def _measured(dtype: str) -> str:
    return MAGNITUDES if dtype.startswith("complex") else UNPACKED if dtype.startswith("float4") else VALUES


def _finding(checkpoint: Checkpoint, message: str, where: Where, unsupported: bool, n_more: int) -> Finding:
    fqn, chunk, _ = where
    if unsupported and not chunk:
        return Finding("not-computed", Severity.NOTE, f"no statistics of {fqn!r}: {message}", fqn=fqn)
    more = f" (and {n_more:,} more such chunks of it)" if n_more else ""
    if unsupported:
        found = damaged_item(message, where, unsupported)
        return found._replace(message=found.message + more)
    found = damaged_item(message + more, where)
    return found._replace(kind="unreadable", next_step=f"dcptool verify --deep {checkpoint.path}")


def _pointed_out(tensors: Sequence[TensorStats]) -> list[Finding]:
    """Return what is to be pointed out, each kind once: R45, R46."""
    bad = [tensor for tensor in tensors if tensor.n_nan or tensor.n_inf]
    bad.sort(key=lambda tensor: -(tensor.n_nan + tensor.n_inf) / tensor.n_values)
    zero = [tensor for tensor in tensors if tensor.is_zero]
    untouched = [tensor for tensor in zero if _SECOND_MOMENT.search(tensor.fqn)]
    findings = []
    if bad:
        counts = [f"{n:,} {what}" for n, what in ((bad[0].n_nan, "NaN"), (bad[0].n_inf, "infinite")) if n]
        message = f"{_which(bad, 'NaN or infinities')} ({' and '.join(counts)} of {bad[0].n_values:,} values)"
        step = "Nothing recovers from them by itself; look at older steps with --stats too."
        findings.append(Finding("not-finite", Severity.WARNING, message, fqn=bad[0].fqn, next_step=step))
    for kind, which, what in (
        ("all-zero", [tensor for tensor in zero if tensor not in untouched], "zeros only"),
        ("never-updated", untouched, "zeros only: no gradient but zero has reached these parameters"),
        ("constant", [tensor for tensor in tensors if tensor.is_constant and not tensor.is_zero], "one value only"),
    ):
        if which:
            value = f" ({which[0].min:.4g} everywhere)" if kind == "constant" else ""
            findings.append(Finding(kind, Severity.NOTE, _which(which, what) + value, fqn=which[0].fqn))
    return findings


def _which(tensors: Sequence[TensorStats], what: str) -> str:
    """Say what some tensors hold, by the first of them."""
    if len(tensors) == 1:
        return f"{tensors[0].fqn!r} holds {what}"
    what, colon, more = what.partition(": ")
    return f"{len(tensors):,} tensors hold {what}, such as {tensors[0].fqn!r}{colon}{more}"
