"""Compare the values of tensors of two checkpoints, band by band, in constant memory.

Most bands are equal: their bytes are compared and nothing is computed. What differs is looked at element by element;
once it is known which tensors differ, the statistics of their equal bands are added from one side.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Chunk, Ints
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import contiguous_strides, volume
from dcptool.errors import DcptoolError
from dcptool.ops.diff import arithmetic
from dcptool.ops.diff.arithmetic import Errors, Sums
from dcptool.ops.diff.bands import MAX_BAND_NBYTES, Access, Band, Run, SideReader, UnreadableError, cut
from dcptool.ops.diff.pool import Pool
from dcptool.ops.diff.results import DiffOptions, Statistics, Values
from dcptool.storage import Progress

Result = TypeVar("Result")


class Outcome(NamedTuple):
    """What came of comparing two tensors of one shape.

    Attributes:
        values: how they differ; None if they do not, or if there is no saying.
        is_within: they are equal within the tolerance, not bit for bit.
        unreadable: chunks that could not be read; the others were compared.
    """

    values: Values | None
    is_within: bool
    unreadable: tuple[Finding, ...]


class Buffers:
    """What one thread reads into: a band of each side and a scratch of booleans; made once."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np

        self.a, self.b = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        self.mask = np.empty(nbytes // 8, bool)


class ValueComparison:
    """Compares the tensors of two checkpoints.

    Args:
        a, b: the checkpoints.
        options: tolerances.
        pool: where bands are read.
        progress: told the bytes of A's values as they are compared.
    """

    def __init__(self, a: Access, b: Access, options: DiffOptions, pool: Pool, progress: Progress | None) -> None:
        self._a, self._b, self._options, self._pool = a, b, options, pool
        self._progress = progress or (lambda nbytes: None)
        pieces = (access.checkpoint.storage.piece_nbytes for access in (a, b))
        self._band_nbytes = min(max(pieces), MAX_BAND_NBYTES)
        self._local = threading.local()

    def run(self, pairs: Sequence[tuple[TensorEntry, TensorEntry]]) -> list[Outcome]:
        """Compare pairs of tensors; both of a pair have one shape.

        Returns:
            What came of each pair, in their order.
        """
        states = [_State(SideReader(self._a, a), SideReader(self._b, b)) for a, b in pairs]
        for job, found in _releasing(self._pool.run(self._compare, self._jobs(states))):
            for index, errors in found:
                job.state.take(job.ordinal + index, errors)
            self._progress(sum(volume(band.sizes) for band in job.run.bands) * job.state.itemsize)
        partly = [state for state in states if state.errors.n_different]
        for job, sums in _releasing(self._pool.run(self._sum_up, self._jobs(partly))):
            job.state.add(sums)
        return [state.outcome() for state in states]

    def _jobs(self, states: Iterable[_State]) -> Iterator[_Job]:
        for state in states:
            try:
                if state.common is None:
                    continue
                ordinal = 0
                for run in cut(state.a, state.b, self._band_nbytes // state.width):
                    yield _Job(state, ordinal, run)
                    ordinal += len(run.bands)
            except UnreadableError as error:
                state.fail(error)

    def _compare(self, job: _Job) -> list[tuple[int, Errors | UnreadableError]]:
        """Return, by their place in the run, the bands that are not equal bit for bit: how they differ, or why they
        cannot be read."""
        first = job.run.bands[0]
        try:
            if job.run.is_whole and job.state.is_one_dtype and self._is_same_item(job.state, first):
                return []
        except UnreadableError as error:
            return [(0, error)]
        found = ((index, self._compare_band(job.state, band)) for index, band in enumerate(job.run.bands))
        return [(index, errors) for index, errors in found if errors is not None]

    def _is_same_item(self, state: _State, band: Band) -> bool:
        """Tell whether a chunk is stored as the same bytes on both sides, with the header that says what it is."""
        a, b, index_a, index_b = state.a, state.b, band.chunk_a, band.chunk_b
        if a.item_nbytes(index_a) != b.item_nbytes(index_b) or not a.is_zip(index_a):
            return False
        if not b.access.checkpoint.format.items_apart:
            return False
        buffers = self._buffers()
        pieces = zip(a.pieces(index_a, buffers.a), b.pieces(index_b, buffers.b), strict=True)
        return all(arithmetic.same_bits(one, other, buffers.mask) for one, other in pieces)

    def _compare_band(self, state: _State, band: Band) -> Errors | UnreadableError | None:
        """Return None if a band is equal bit for bit, else how it differs, or why it cannot be read."""
        buffers = self._buffers()
        try:
            a = state.a.read(band, band.chunk_a, buffers.a)
            b = state.b.read(band, band.chunk_b, buffers.b)
            if state.is_one_dtype and arithmetic.same_bits(a, b, buffers.mask):
                return None
            errors = arithmetic.compare_arrays(a, b, state.a.entry.dtype, state.b.entry.dtype, self._options)
            if errors.n_different:
                state.a.require_undamaged(band, band.chunk_a)
                state.b.require_undamaged(band, band.chunk_b)
        except UnreadableError as error:
            return error
        if errors.first is None:
            return errors
        return errors._replace(first=_place(errors.first, band, state.a.entry.shape))

    def _sum_up(self, job: _Job) -> list[Sums]:
        """Return the sums of the bands of a run that were found equal."""
        state, found = job.state, []
        for index, band in enumerate(job.run.bands):
            if job.ordinal + index not in state.looked_at:
                try:
                    array = state.a.read(band, band.chunk_a, self._buffers().a)
                except UnreadableError:
                    continue
                sums = arithmetic.sum_up(array, state.a.entry.dtype)
                found += [sums] if sums else []
        return found

    def _buffers(self) -> Buffers:
        buffers: Buffers | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = Buffers(self._band_nbytes)
        return buffers


class _Job(NamedTuple):
    """A run of bands of two tensors; `ordinal` is the place of its first band among all bands of the tensor."""

    state: _State
    ordinal: int
    run: Run


def _releasing(results: Iterable[tuple[_Job, Result]]) -> Iterator[tuple[_Job, Result]]:
    """Pass results on, and drop what a tensor's readers know once those of the next one come: a checkpoint may have
    millions of chunks."""
    last: _State | None = None
    for job, result in results:
        if last and job.state is not last:
            last.a.release()
            last.b.release()
        last = job.state
        yield job, result


class _Failure(NamedTuple):
    """Chunks of one side of a tensor that cannot be read: why not the first, which is the last, and how many more."""

    first: UnreadableError
    last: Chunk | None
    n_more: int


class _State:
    """How far the comparison of two tensors is."""

    __slots__ = ("a", "b", "common", "errors", "failures", "is_one_dtype", "itemsize", "looked_at", "width")

    def __init__(self, a: SideReader, b: SideReader) -> None:
        self.a, self.b = a, b
        self.is_one_dtype = a.entry.dtype == b.entry.dtype
        self.errors = Errors()
        self.looked_at: set[int] = set()
        self.failures: dict[str, _Failure] = {}
        self.common: str | None = None
        self.width = self.itemsize = 1
        try:
            self.common = arithmetic.common_dtype(a.entry.dtype, b.entry.dtype)
            self.itemsize = dtypes.lookup(a.entry.dtype).itemsize
            self.width = max(self.itemsize, dtypes.lookup(b.entry.dtype).itemsize)
        except DcptoolError as error:
            self.fail(UnreadableError(str(error), a.access, a.entry))

    def take(self, ordinal: int, errors: Errors | UnreadableError) -> None:
        """Add what came of one band that is not equal bit for bit."""
        self.looked_at.add(ordinal)
        if isinstance(errors, UnreadableError):
            self.fail(errors)
        else:
            self.errors = arithmetic.merge(self.errors, errors)

    def add(self, found: Iterable[Sums]) -> None:
        """Add the sums of bands that are equal on both sides."""
        for sums in found:
            errors = self.errors
            if errors.sums_a and errors.sums_b:
                self.errors = errors._replace(sums_a=errors.sums_a.plus(sums), sums_b=errors.sums_b.plus(sums))

    def fail(self, error: UnreadableError) -> None:
        """Note that a chunk of one side cannot be read; the bands of a chunk come one after the other."""
        known = self.failures.get(error.access.name)
        if known is None:
            self.failures[error.access.name] = _Failure(error, error.chunk, 0)
        elif known.last != error.chunk:
            self.failures[error.access.name] = _Failure(known.first, error.chunk, known.n_more + 1)

    def outcome(self) -> Outcome:
        """Return what came of all bands."""
        unreadable = tuple(failure.first.finding(failure.n_more) for failure in self.failures.values())
        is_different = self.errors.n_different > 0
        if self.common is None or (self.is_one_dtype and not is_different):
            return Outcome(None, bool(self.looked_at) and not unreadable and self.is_one_dtype, unreadable)
        return Outcome(self._values(self.common), False, unreadable)

    def _values(self, common: str) -> Values:
        errors, a, b = self.errors, self.a.entry, self.b.entry
        shape = a.shape
        if not errors.n_different:
            return Values(common, volume(shape), 0)
        narrower = a if dtypes.lookup(a.dtype).itemsize < dtypes.lookup(b.dtype).itemsize else b
        return Values(
            common,
            volume(shape),
            errors.n_different,
            errors.max_abs,
            errors.max_rel,
            None if errors.first is None else _index(errors.first, shape),
            errors.first_a,
            errors.first_b,
            self.is_one_dtype and errors.bits_a == errors.bits_b,
            narrower.dtype if errors.rounded and not self.is_one_dtype else "",
            _statistics(errors.sums_a),
            _statistics(errors.sums_b),
        )


def _statistics(sums: Sums | None) -> Statistics | None:
    if sums is None:
        return None
    total = sums.total
    mean = None if isinstance(total, complex) or not sums.n_finite else total / sums.n_finite
    return Statistics(sums.n_nan, sums.n_inf, mean, math.sqrt(sums.squares))


def _place(position: int, band: Band, shape: Ints) -> int:
    """Return the row-major place in a tensor of an element that stands at a place in a band."""
    inside = _index(position, band.sizes)
    index = (start + step for start, step in zip(band.offsets, inside, strict=True))
    return sum(i * stride for i, stride in zip(index, contiguous_strides(shape), strict=True))


def _index(position: int, shape: Ints) -> Ints:
    """Return the index per dimension of the element at a row-major place."""
    return tuple(position // stride % size for size, stride in zip(shape, contiguous_strides(shape), strict=True))
