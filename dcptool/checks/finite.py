"""Which tensors hold NaN or infinities, told from the bytes of records as they are read for their checksums.

A record is looked at front to back, once for each dtype in which tensors view it, however many tensors do; what none of
them uses does not count. Only views whose elements lie over one another are read by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.boxes import fill_box, require_stored
from dcptool.checkpoint.entries import ObjectEntry, Source
from dcptool.checkpoint.extents import Ints, Payload
from dcptool.checkpoint.fill import numpy_empty
from dcptool.checkpoint.findings import MAX_NAMED, Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.numbers import can_be_not_finite, not_finite
from dcptool.checkpoint.regions import contiguous_strides, cut_box, is_contiguous, span
from dcptool.pickles.tensors import tensors_in
from dcptool.words import plural

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WIDEST_NBYTES = 16
"""Bytes of the widest element: pieces of a multiple of it, from the start of a record on, cut no element."""
_BAND_ELEMENTS = 1 << 20
"""Elements of a view over itself in memory at once."""
_OLDER = "Nothing recovers from them by itself; dcptool latest --finite names the newest step without."


class NotFinite(NamedTuple):
    """What of a tensor is not finite.

    Attributes:
        n_nan, n_inf: elements that are NaN, that are infinite; what is stored several times counts each time.
        first: index in the whole tensor of the first of them, in row-major order.
    """

    n_nan: int
    n_inf: int
    first: Ints

    def plus(self, other: NotFinite) -> NotFinite:
        """Return what is not finite in two parts of a tensor together."""
        return NotFinite(self.n_nan + other.n_nan, self.n_inf + other.n_inf, min(self.first, other.first))

    def __str__(self) -> str:
        counts = " and ".join(f"{n:,} {what}" for n, what in ((self.n_nan, "NaN"), (self.n_inf, "infinite")) if n)
        return f"{counts}, the first at {list(self.first)}" if self.first else counts


Found = dict[str, NotFinite]
"""fqn → what of it is not finite."""


def merged(parts: Iterable[Mapping[str, NotFinite]]) -> Found:
    """Return what was found in several parts of a checkpoint together."""
    found: Found = {}
    for part in parts:
        for fqn, more in part.items():
            _add(found, fqn, more)
    return found


def _add(found: Found, fqn: str, more: NotFinite) -> None:
    found[fqn] = found[fqn].plus(more) if fqn in found else more


def not_finite_problems(found: Mapping[str, NotFinite]) -> list[Finding]:
    """Return the finding that tensors of a checkpoint hold NaN or infinities, none if none does.

    Args:
        found: fqn → what of it is not finite; the first are named.
    """
    if not found:
        return []
    named = list(found)[:MAX_NAMED]
    more = f" and {len(found) - len(named):,} more" if len(found) > len(named) else ""
    verb = "holds" if len(found) == 1 else "hold"
    which = ", ".join(f"{fqn!r} ({found[fqn]})" for fqn in named)
    message = f"{plural(len(found), 'tensor')} {verb} NaN or infinities: {which}{more}"
    return [Finding.of("not-finite", message, fqn=named[0], next_step=_OLDER, severity=Severity.ERROR)]


class Elements(NamedTuple):
    """Elements of a record that are a chunk of a tensor: its name, where the chunk begins in it, and what it holds."""

    fqn: str
    offsets: Ints
    payload: Payload

    @property
    def first(self) -> int:
        """The first element's place in the record, in elements."""
        return self.payload.storage_offset

    @property
    def end(self) -> int:
        """The place behind the last element's."""
        return self.first + span(self.payload.shape, self.payload.strides)

    @property
    def can_be_not_finite(self) -> bool:
        """Whether it has elements, of a dtype with NaN or infinities."""
        return 0 not in self.payload.shape and can_be_not_finite(self.payload.dtype)


def views_inside(source: Source, entry: ObjectEntry) -> list[Elements]:
    """Return what the tensors inside an object use of its records.

    Raises:
        ItemError, StorageError, MetadataError, UnsupportedError: the object cannot be read.
    """
    root, records = source.graph(entry)
    views = []
    for found in tensors_in(root):
        record = records.get(found.storage)
        if record and found.storage_nbytes <= record.nbytes:
            how = found.dtype, found.shape, found.strides, found.storage_offset
            views.append(Elements(entry.fqn, (0,) * len(found.shape), Payload(record, *how)))
    return views


class RecordValues:
    """Looks at the elements of one record as its bytes come, piece after piece.

    Args:
        views: all that tensors use of the record, each of a dtype that `can_be_not_finite` and with elements; they do
            not lie over themselves.
        found: takes what is not finite.
    """

    def __init__(self, views: Iterable[Elements], found: Found) -> None:
        self._found = found
        self._views: dict[str, list[Elements]] = {}
        for view in views:
            self._views.setdefault(view.payload.dtype, []).append(view)
        for alike in self._views.values():
            alike.sort(key=lambda view: view.first, reverse=True)
        self._reached: dict[str, list[Elements]] = {dtype: [] for dtype in self._views}

    def look(self, byte_offset: int, piece: memoryview) -> None:
        """Look at the next bytes of the record.

        Args:
            byte_offset: where they begin in it, a multiple of `WIDEST_NBYTES`.
            piece: of a length that is one too, but for the last.
        """
        import numpy as np

        for dtype, waiting in self._views.items():
            form = dtypes.numpy_dtype(dtype)
            start, count = byte_offset // form.itemsize, len(piece) // form.itemsize
            reached = self._reached[dtype]
            while waiting and waiting[-1].first < start + count:
                reached.append(waiting.pop())
            if reached:
                array = np.frombuffer(piece[: count * form.itemsize], np.uint8).view(form)
                for places, is_nan in not_finite(array, dtype):
                    self._look_at(reached, places + start, is_nan)
                self._reached[dtype] = [view for view in reached if view.end > start + count]

    def _look_at(self, views: Iterable[Elements], places: Array, is_nan: Array) -> None:
        """Add to each view what of it lies at some places of the record, which are rising."""
        import numpy as np

        for view in views:
            low, high = np.searchsorted(places, (view.first, view.end))
            if low < high:
                _count(view, places[low:high] - view.first, is_nan[low:high], self._found)


def lies_over_itself(payload: Payload) -> bool:
    """Tell whether elements of a view may lie over or between one another, in other ways than by a stride of 0."""
    end = 1
    for stride, size in _steps(payload)[::-1]:
        if stride < end:
            return True
        end += (size - 1) * stride
    return False


def look_at_box(source: Source, view: Elements, found: Found) -> None:
    """Read all elements of a view, and look at them.

    Raises:
        UnsupportedError: they are a few stored ones, repeated without end.
        ItemError, StorageError: they cannot be read.
    """
    payload = view.payload
    require_stored(payload)
    zeros = (0,) * len(payload.shape)
    for offsets, sizes in cut_box((zeros, payload.shape), _BAND_ELEMENTS):
        out = numpy_empty(sizes, payload.dtype)
        fill_box(source, payload, zeros, (offsets, sizes), out)
        start = tuple(a + b for a, b in zip(view.offsets, offsets, strict=True))
        band = Elements(view.fqn, start, payload._replace(shape=sizes, strides=contiguous_strides(sizes)))
        for places, is_nan in not_finite(out, payload.dtype):
            _count(band, places, is_nan, found)


def _steps(payload: Payload) -> list[tuple[int, int]]:
    """Return stride and size of each dimension that has a step, the widest stride first."""
    pairs = zip(payload.strides, payload.shape, strict=True)
    return sorted(((stride, size) for stride, size in pairs if size > 1 and stride), reverse=True)


def _count(view: Elements, places: Array, is_nan: Array, found: Found) -> None:
    """Count what is not finite at some places, which are those of elements of a record, from a view's first one on."""
    payload = view.payload
    times = 1
    if not is_contiguous(payload.shape, payload.strides):
        places, is_nan = _in_view(payload, places, is_nan)
        times = prod(size for stride, size in zip(payload.strides, payload.shape, strict=True) if not stride)
    if not len(places):
        return
    n_nan = int(is_nan.sum())
    index = _unravel(int(places.min()), payload.shape)
    first = tuple(a + b for a, b in zip(view.offsets, index, strict=True))
    _add(found, view.fqn, NotFinite(n_nan * times, (len(places) - n_nan) * times, first))


def _in_view(payload: Payload, places: Array, is_nan: Array) -> tuple[Array, Array]:
    """Return the places that are elements of a view, as row-major numbers of these, and which of them are NaN."""
    import numpy as np

    numbers = np.zeros_like(places)
    rest = places.copy()
    inside = np.ones(len(places), bool)
    by_step = contiguous_strides(payload.shape)
    for dim in sorted(range(len(by_step)), key=lambda dim: -payload.strides[dim]):
        if payload.shape[dim] > 1 and payload.strides[dim]:
            index, rest = np.divmod(rest, payload.strides[dim])
            inside &= index < payload.shape[dim]
            numbers += index * by_step[dim]
    inside &= rest == 0
    return numbers[inside], is_nan[inside]


def _unravel(number: int, shape: Ints) -> Ints:
    """Return the index of an element by its row-major number."""
    index = []
    for step in contiguous_strides(shape):
        place, number = divmod(number, step)
        index.append(place)
    return tuple(index)
