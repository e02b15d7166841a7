"""Compare the values of tensors of two checkpoints, box by box, in constant memory.

Most boxes are equal: their bytes are compared and nothing is computed. What differs is looked at element by element;
once it is known which tensors differ, the statistics of their equal boxes are added from one side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Chunk, Ints
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import Box, contiguous_strides, volume
from dcptool.copying.pool import Pool, per_thread
from dcptool.errors import DcptoolError
from dcptool.ops.diff import arithmetic
from dcptool.ops.diff.arithmetic import Errors, Sums
from dcptool.ops.diff.refinement import CommonBox, cut
from dcptool.ops.diff.results import DiffOptions, Statistics, Values
from dcptool.ops.diff.sides import Access, SideReader, UnreadableError
from dcptool.storage import Progress

MAX_BOX_NBYTES = 4 << 20
"""Most bytes of a box that are read at once, of each side."""

Result = TypeVar("Result")


class TensorOutcome(NamedTuple):
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
    """What one thread reads into: a box of each side and a scratch of booleans; made once."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np

        self.a, self.b = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        self.mask = np.empty(nbytes // 8, bool)


class ValueComparison:
    """Compares the tensors of two checkpoints.

    Args:
        a, b: the checkpoints.
        options: tolerances.
        pool: where boxes are read.
        progress: told the bytes of A's values as they are compared.
    """

    def __init__(self, a: Access, b: Access, options: DiffOptions, pool: Pool, progress: Progress | None) -> None:
        self._a, self._b, self._options, self._pool = a, b, options, pool
        self._progress = progress or (lambda nbytes: None)
        pieces = (access.checkpoint.storage.piece_nbytes for access in (a, b))
        self._box_nbytes = min(max(pieces), MAX_BOX_NBYTES)
        self._buffers = per_thread(lambda: Buffers(self._box_nbytes))

    def run(self, pairs: Sequence[tuple[TensorEntry, TensorEntry]]) -> list[TensorOutcome]:
        """Compare pairs of tensors; both of a pair have one shape.

        Returns:
            What came of each pair, in their order.
        """
        states = [_PairState(SideReader(self._a, a), SideReader(self._b, b)) for a, b in pairs]
        for batch, found in _releasing(self._pool.run(self._compare, self._batches(states))):
            for index, errors in found:
                batch.state.take(batch.ordinal + index, errors)
            self._progress(sum(common.n_elements for common in batch.boxes) * batch.state.itemsize)
        partly = [state for state in states if state.errors.n_different]
        for batch, sums in _releasing(self._pool.run(self._sum_up, self._batches(partly))):
            batch.state.add(sums)
        return [state.outcome() for state in states]

    def _batches(self, states: Iterable[_PairState]) -> Iterator[_PairBatch]:
        for state in states:
            try:
                if state.common is None:
                    continue
                ordinal = 0
                for boxes, is_whole in cut(state.a, state.b, self._box_nbytes // state.width):
                    yield _PairBatch(state, ordinal, boxes, is_whole)
                    ordinal += len(boxes)
            except UnreadableError as error:
                state.fail(error)

    def _compare(self, batch: _PairBatch) -> list[tuple[int, Errors | UnreadableError]]:
        """Return, by their place in the batch, the boxes that are not equal bit for bit: how they differ, or why they
        cannot be read."""
        state, boxes = batch.state, batch.boxes
        try:
            if batch.is_whole and state.is_one_dtype and self._is_same_item(state, boxes[0]):
                return []
        except UnreadableError as error:
            return [(0, error)]
        found = ((index, self._compare_box(state, common)) for index, common in enumerate(boxes))
        return [(index, errors) for index, errors in found if errors is not None]

    def _is_same_item(self, state: _PairState, common: CommonBox) -> bool:
        """Tell whether a chunk is stored as the same bytes on both sides, with the header that says what it is."""
        a, b = state.a, state.b
        one, other = a.entry.chunks[common.chunk_a], b.entry.chunks[common.chunk_b]
        if not (one.item and other.item and one.item.nbytes == other.item.nbytes):
            return False
        if not b.access.checkpoint.format.items_apart or not a.is_zip(common.chunk_a, one):
            return False
        buffers = self._buffers()
        pieces = zip(a.pieces(one, one.item, buffers.a), b.pieces(other, other.item, buffers.b), strict=True)
        return all(arithmetic.same_bits(x, y, buffers.mask) for x, y in pieces)

    def _compare_box(self, state: _PairState, common: CommonBox) -> Errors | UnreadableError | None:
        """Return None if a box is equal bit for bit, else how it differs, or why it cannot be read."""
        buffers, (box, index_a, index_b) = self._buffers(), common
        try:
            a = state.a.read(box, index_a, buffers.a)
            b = state.b.read(box, index_b, buffers.b)
            if state.is_one_dtype and arithmetic.same_bits(a, b, buffers.mask):
                return None
            errors = arithmetic.compare_arrays(a, b, state.a.entry.dtype, state.b.entry.dtype, self._options)
            if errors.n_different:
                state.a.require_undamaged(box, index_a)
                state.b.require_undamaged(box, index_b)
        except UnreadableError as error:
            return error
        if errors.first is None:
            return errors
        return errors._replace(first=_place(errors.first, box, state.a.entry.shape))

    def _sum_up(self, batch: _PairBatch) -> list[Sums]:
        """Return the sums of the boxes of a batch that were found equal."""
        state, found = batch.state, []
        for index, common in enumerate(batch.boxes):
            if batch.ordinal + index not in state.looked_at:
                try:
                    array = state.a.read(common.box, common.chunk_a, self._buffers().a)
                except UnreadableError:
                    continue
                sums = arithmetic.sum_up(array, state.a.entry.dtype)
                found += [sums] if sums else []
        return found


class _PairBatch(NamedTuple):
    """A batch of boxes of two tensors; `ordinal` is the place of its first box among all boxes of the tensor."""

    state: _PairState
    ordinal: int
    boxes: Sequence[CommonBox]
    is_whole: bool


def _releasing(results: Iterable[tuple[_PairBatch, Result]]) -> Iterator[tuple[_PairBatch, Result]]:
    """Pass results on, and drop what a tensor's readers know once those of the next one come: a checkpoint may have
    millions of chunks."""
    last: _PairState | None = None
    for batch, result in results:
        if last and batch.state is not last:
            last.a.release()
            last.b.release()
        last = batch.state
        yield batch, result


class _Failure(NamedTuple):
    """Chunks of one side of a tensor that cannot be read: why not the first, which is the last, and how many more."""

    first: UnreadableError
    last: Chunk | None
    n_more: int


class _PairState:
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
        """Add what came of one box that is not equal bit for bit."""
        self.looked_at.add(ordinal)
        if isinstance(errors, UnreadableError):
            self.fail(errors)
        else:
            self.errors = arithmetic.merge(self.errors, errors)

    def add(self, found: Iterable[Sums]) -> None:
        """Add the sums of boxes that are equal on both sides."""
        for sums in found:
            errors = self.errors
            if errors.sums_a and errors.sums_b:
                self.errors = errors._replace(sums_a=errors.sums_a.plus(sums), sums_b=errors.sums_b.plus(sums))

    def fail(self, error: UnreadableError) -> None:
        """Note that a chunk of one side cannot be read; the boxes of a chunk come one after the other."""
        known = self.failures.get(error.access.name)
        if known is None:
            self.failures[error.access.name] = _Failure(error, error.chunk, 0)
        elif known.last != error.chunk:
            self.failures[error.access.name] = _Failure(known.first, error.chunk, known.n_more + 1)

    def outcome(self) -> TensorOutcome:
        """Return what came of all boxes."""
        unreadable = tuple(failure.first.finding(failure.n_more) for failure in self.failures.values())
        is_different = self.errors.n_different > 0
        if self.common is None or (self.is_one_dtype and not is_different):
            return TensorOutcome(None, bool(self.looked_at) and not unreadable and self.is_one_dtype, unreadable)
        return TensorOutcome(self._values(self.common), False, unreadable)

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


def _place(position: int, box: Box, shape: Ints) -> int:
    """Return the row-major place in a tensor of an element that stands at a place in a box of it."""
    inside = _index(position, box[1])
    index = (start + step for start, step in zip(box[0], inside, strict=True))
    return sum(i * stride for i, stride in zip(index, contiguous_strides(shape), strict=True))


def _index(position: int, shape: Ints) -> Ints:
    """Return the index per dimension of the element at a row-major place."""
    return tuple(position // stride % size for size, stride in zip(shape, contiguous_strides(shape), strict=True))
