"""How well the chunks of a tensor cover it: what none of them holds, and what several do. Knows boxes only.

The number of boxes that hold an element, less one, is zero everywhere in an exact cover. Like any function on a grid
it is given by its differences along all dimensions, and those of a box are zero but for 1 or -1 at each of its corners.
Where boxes meet, these cancel; what is left over describes holes and overlaps alone, and only that is swept. No box is
compared with another one until it is known where some overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, islice, pairwise
from math import prod
from operator import add, eq, itemgetter, lt, sub
from typing import NamedTuple, TypeVar

from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import Box, intersect, volume
from dcptool.errors import LayoutError

MAX_STEPS = 120_000_000
"""Steps after which a tensor is given up: some ten to twenty seconds."""
_ROW_STEPS, _LINE_STEPS = 3, 3
"""What a number in a row and what a place in a line costs, in steps."""
_MAX_KEPT = 1000
"""Regions that are kept to merge them and to look for the chunks in them."""


class Overlap(NamedTuple):
    """Two chunks that share elements.

    Attributes:
        first, second: indexes of the chunks, first < second.
        offsets, sizes: the box they share, in elements.
    """

    first: int
    second: int
    offsets: Ints
    sizes: Ints


class Cover(NamedTuple):
    """What is wrong with a cover; all empty and zero if it is exact.

    Attributes:
        gaps: boxes that no chunk holds, disjoint, in row-major order of their offsets.
        n_missing: elements that no chunk holds, whether their gaps are listed or not.
        overlaps: pairs of chunks that share elements, in row-major order of what they share.
        n_overlapping: elements that more than one chunk holds, each counted once.
    """

    gaps: tuple[Box, ...]
    n_missing: int
    overlaps: tuple[Overlap, ...]
    n_overlapping: int


_Key = TypeVar("_Key", int, Ints)
_Column = tuple[Sequence[int], Sequence[int]]
_Table = list[list[int]]
_EXACT = Cover((), 0, (), 0)


class _Bounds(NamedTuple):
    """First element and one past the last of each box along one dimension."""

    lows: list[int]
    highs: list[int]


class _Region(NamedTuple):
    """A box whose elements all lie in the same number of chunks: 1 + excess."""

    offsets: Ints
    sizes: Ints
    excess: int


class _Budget:
    """Steps that may still be made; `known` says what is known when they are used up."""

    def __init__(self, known: str) -> None:
        self.known, self.left = known, MAX_STEPS

    def spend(self, n_steps: int) -> None:
        self.left -= n_steps
        if self.left < 0:
            raise LayoutError(f"too irregular to check: {self.known} after {MAX_STEPS:,} steps")


def cover(shape: Ints, chunks: Chunks, max_found: int = 10) -> Cover:
    """Find what of a tensor no chunk holds and what more than one holds.

    Time is linear in the number of chunks however they are cut. Holes and overlaps cost more, the more of them there
    are beside one another along a dimension.

    Args:
        shape: of the whole tensor, in elements.
        chunks: of the same ndim, any order. Empty ones are ignored, what lies outside the shape too.
        max_found: gaps and overlaps to list at most, each. The numbers of elements are exact all the same.

    Returns:
        What is wrong; where there are more than 1,000 regions, some of them are not looked at for the lists.

    Raises:
        LayoutError: too many boxes do not fit together to find out in reasonable time (`MAX_STEPS`).
    """
    if 0 in shape or (len(chunks) == 1 and chunks.box(0) == ((0,) * len(shape), shape)):
        return _EXACT
    columns = [chunks.column(dim) for dim in range(len(shape))]
    if _is_grid(shape, columns, len(chunks)):
        return _EXACT
    indexes, bounds = _inside(shape, columns, len(chunks))
    budget = _Budget(f"whether {len(indexes):,} chunks are an exact cover is open")
    cut = [dim for dim, size in enumerate(shape) if any(bounds[dim].lows) or min(bounds[dim].highs, default=0) < size]
    cut.sort(key=lambda dim: len(set(bounds[dim].lows)))
    corners = _corners([shape[dim] for dim in cut], [bounds[dim] for dim in cut], len(indexes), budget)
    if not corners:
        return _EXACT
    budget.known = f"{len(indexes):,} chunks are no exact cover, but what they lack or share is open"
    sweep = _Sweep(shape, cut, budget)
    sweep.run(corners, 0, prod(size for dim, size in enumerate(shape) if dim not in cut))
    gaps = tuple((offsets, sizes) for offsets, sizes, _ in _merged(sweep.gaps)[:max_found])
    pairs = _pairs(_merged(sweep.shared), indexes, bounds, max_found)
    return Cover(gaps, sweep.n_missing, pairs, sweep.n_overlapping)


def _is_grid(shape: Ints, columns: Sequence[_Column], n_boxes: int) -> bool:
    """Tell whether boxes, offsets and sizes by dimension, are all cells of a grid, each once."""
    n_cells = 1
    cut = []
    for size, column in zip(shape, columns, strict=True):
        n_tiles = _n_tiles(size, *column, n_boxes // n_cells)
        if not n_tiles:
            return False
        n_cells *= n_tiles
        if n_tiles > 1:
            cut.append(column[0])
    return n_cells == n_boxes and (len(cut) < 2 or _increase(cut) or len(set(zip(*cut, strict=True))) == n_boxes)


def _n_tiles(size: int, offsets: Sequence[int], sizes: Sequence[int], most: int) -> int:
    """Return into how many intervals boxes cut 0 to `size` exactly; 0 if they do not, or into more than `most`."""
    size_of = dict(zip(offsets, sizes, strict=True))
    if not 0 < len(size_of) <= most:
        return 0
    ends = set(map(add, size_of.keys(), size_of.values()))
    if len(ends) != len(size_of) or size_of.keys() ^ ends != {0, size} or min(size_of.values()) <= 0:
        return 0  # bounds other than 0 and size must end one interval and begin one
    if len(size_of) < len(offsets) and not all(map(eq, map(size_of.__getitem__, offsets), sizes)):
        return 0
    return len(size_of)


def _increase(columns: Sequence[Sequence[int]]) -> bool:
    """Tell whether the rows of some columns increase strictly."""
    return all(map(lt, zip(*columns, strict=True), islice(zip(*columns, strict=True), 1, None)))


def _inside(shape: Ints, columns: Sequence[_Column], n_boxes: int) -> tuple[Sequence[int], list[_Bounds]]:
    """Return the indexes of boxes with elements inside the shape, and their bounds there by dimension."""
    indexes: Sequence[int] = range(n_boxes)
    bounds = []
    for size, (offsets, sizes) in zip(shape, columns, strict=True):
        lows, highs = list(offsets), list(map(add, offsets, sizes))
        if min(lows, default=0) < 0 or max(highs, default=0) > size:
            lows, highs = [max(low, 0) for low in lows], [min(high, size) for high in highs]
        bounds.append(_Bounds(lows, highs))
    if not all(all(map(lt, *bound)) for bound in bounds):
        indexes = [i for i in indexes if all(lows[i] < highs[i] for lows, highs in bounds)]
        bounds = [_Bounds([lows[i] for i in indexes], [highs[i] for i in indexes]) for lows, highs in bounds]
    return indexes, bounds


def _corners(sizes: Sequence[int], bounds: Sequence[_Bounds], n_boxes: int, budget: _Budget) -> dict[Ints, int]:
    """Return the corners, with weights, of the number of boxes that hold an element less one.

    The last dimension is done first: if it is the one with the most cuts, most corners cancel at once.
    """
    if not bounds:
        return {(): n_boxes - 1} if n_boxes != 1 else {}
    boxes = [column for bound in bounds for column in bound]
    whole = [[bound] for size in sizes for bound in (0, size)]
    rows = _ends(boxes, whole, budget)
    for done in range(1, len(bounds)):
        width = 2 * len(bounds) - done
        rows = _ends(_table(rows, 1, width), _table(rows, -1, width), budget)
    return rows


def _ends(added: _Table, removed: _Table, budget: _Budget) -> dict[Ints, int]:
    """Replace each row (*rest, low, high) by (low, *rest) and, with the opposite sign, (high, *rest).

    A box that ends where one with the same cross-section begins cancels here.

    Returns:
        Row → how often it is added less how often it is removed, without zeros.
    """
    budget.spend(2 * _ROW_STEPS * (len(added[0]) + len(removed[0])) * (len(added) - 1))
    (*rest, low, high), (*rest_removed, low_removed, high_removed) = added, removed
    rows = chain(zip(low, *rest, strict=True), zip(high_removed, *rest_removed, strict=True))
    weights: dict[Ints, int] = dict(Counter(rows))
    get = weights.get
    for row in chain(zip(high, *rest, strict=True), zip(low_removed, *rest_removed, strict=True)):
        weight = get(row, 0) - 1
        if weight:
            weights[row] = weight
        else:
            del weights[row]
    return weights


def _table(weights: Mapping[Ints, int], sign: int, width: int) -> _Table:
    """Return the columns of the rows whose weights have a sign, each row as often as it weighs."""
    rows = [row for row, weight in weights.items() if weight * sign > 0]
    rows += [row for row, weight in weights.items() for _ in range(1, weight * sign)]
    return [list(map(itemgetter(i), rows)) for i in range(width)]


def _slabs(events: Mapping[int, Sequence[tuple[_Key, int]]]) -> Iterator[tuple[int, int, dict[_Key, int]]]:
    """Yield low and high of each slab and the sum of the weights by key of all events at or before it, if not zero."""
    active: dict[_Key, int] = {}
    for low, high in pairwise(sorted(events)):
        for key, weight in events[low]:
            weight += active.pop(key, 0)
            if weight:
                active[key] = weight
        if active:
            yield low, high, active


class _Sweep:
    """Turns corners into what is missing and what overlaps, slab by slab along one dimension after the other.

    Attributes:
        n_missing, n_overlapping: elements.
        gaps, shared: the first regions that no box and that several boxes hold, disjoint.
    """

    def __init__(self, shape: Ints, dims: Sequence[int], budget: _Budget) -> None:
        """Take the shape of the tensor and the dimensions of the corners' coordinates; boxes span all others."""
        self.n_missing = self.n_overlapping = 0
        self.gaps: list[_Region] = []
        self.shared: list[_Region] = []
        self._dims, self._budget = dims, budget
        self._offsets, self._sizes = [0] * len(shape), list(shape)  # of the slab in the dimensions done

    def run(self, corners: Mapping[Ints, int], depth: int, width: int) -> None:
        """Sweep corners along `dims[depth:]`; `width` is the number of elements beside one another in a slab."""
        n_left = len(self._dims) - depth
        self._budget.spend(_ROW_STEPS * len(corners) * n_left)
        if n_left == 0:
            self._count(corners[()], width)
        elif n_left == 1:
            self._line({low: weight for (low,), weight in corners.items()}, width)
        elif n_left == 2:
            ends: dict[int, list[tuple[int, int]]] = {}
            for (low, last), weight in corners.items():
                ends.setdefault(low, []).append((last, weight))
            for low, high, line in _slabs(ends):
                self._set(depth, low, high - low)
                self._line(line, width * (high - low))
        else:
            events: dict[int, list[tuple[Ints, int]]] = {}
            for (low, *rest), weight in corners.items():
                events.setdefault(low, []).append((tuple(rest), weight))
            for low, high, active in _slabs(events):
                self._set(depth, low, high - low)
                self.run(active, depth + 1, width * (high - low))

    def _line(self, weights: Mapping[int, int], width: int) -> None:
        """Sweep along the last dimension."""
        self._budget.spend(_LINE_STEPS * (len(weights) + 6))
        lows = sorted(weights)
        sizes = list(map(sub, islice(lows, 1, None), lows))
        excess = list(accumulate(map(weights.__getitem__, lows)))
        self.n_missing += width * sum(compress(sizes, map((0).__gt__, excess)))
        self.n_overlapping += width * sum(compress(sizes, map((0).__lt__, excess)))
        if (len(self.gaps) < _MAX_KEPT and min(excess) < 0) or (len(self.shared) < _MAX_KEPT and max(excess) > 0):
            for low, size, value in zip(lows, sizes, excess, strict=False):
                self._set(len(self._dims) - 1, low, size)
                self._keep(value)

    def _count(self, excess: int, n_elements: int) -> None:
        """Take a tensor that all boxes hold whole."""
        if excess < 0:
            self.n_missing = n_elements
        else:
            self.n_overlapping = n_elements
        self._keep(excess)

    def _set(self, depth: int, offset: int, size: int) -> None:
        self._offsets[self._dims[depth]], self._sizes[self._dims[depth]] = offset, size

    def _keep(self, excess: int) -> None:
        kept = self.gaps if excess < 0 else self.shared
        if excess and len(kept) < _MAX_KEPT:
            kept.append(_Region(tuple(self._offsets), tuple(self._sizes), excess))


def _merged(regions: Sequence[_Region]) -> Sequence[_Region]:
    """Return regions in row-major order, neighbours with the same cross-section joined."""
    count = 0
    while len(regions) != count:
        count = len(regions)
        for dim in reversed(range(len(regions[0].sizes))):
            regions = _join(regions, dim)
    return sorted(regions)


def _join(regions: Sequence[_Region], dim: int) -> list[_Region]:
    """Join regions that follow one another along a dimension and are alike in all others."""
    joined: list[_Region] = []
    for region in sorted(regions, key=lambda region: (_beside(region, dim), region.offsets[dim])):
        last = joined[-1] if joined else region
        if _beside(last, dim) == _beside(region, dim) and last.offsets[dim] + last.sizes[dim] == region.offsets[dim]:
            sizes = (*last.sizes[:dim], last.sizes[dim] + region.sizes[dim], *last.sizes[dim + 1 :])
            joined[-1] = _Region(last.offsets, sizes, last.excess)
        else:
            joined.append(region)
    return joined


def _beside(region: _Region, dim: int) -> tuple[int, Ints, Ints, Ints, Ints]:
    """Return what two regions have in common that may be joined along a dimension."""
    offsets, sizes, excess = region
    return excess, offsets[:dim], offsets[dim + 1 :], sizes[:dim], sizes[dim + 1 :]


def _pairs(
    regions: Sequence[_Region], indexes: Sequence[int], bounds: Sequence[_Bounds], max_found: int
) -> tuple[Overlap, ...]:
    """Return pairs of boxes that share elements; `regions` are where there are some.

    All boxes are looked through only for a region that the pairs found before do not account for, which gives a new
    one. Every box in a region has a partner there, so that the partners of few boxes are enough.
    """
    found: dict[tuple[int, int], Box] = {}
    for offsets, sizes, excess in regions:
        if len(found) >= max_found:
            break
        known = sorted({position for pair in found for position in pair})
        inside = _sharing((offsets, sizes), known, bounds)
        if _held((offsets, sizes), inside, bounds) < (excess + 1) * volume(sizes):
            inside = _sharing((offsets, sizes), range(len(indexes)), bounds)
        for start, first in enumerate(inside, 1):
            box = _box(first, bounds)
            for second in _sharing(box, inside[start:], bounds)[:max_found]:
                common = intersect(box, _box(second, bounds))
                if common:
                    found[first, second] = common
            if len(found) >= max_found:
                break
    pairs = [Overlap(indexes[first], indexes[second], *box) for (first, second), box in found.items()]
    return tuple(sorted(pairs[:max_found], key=lambda pair: (pair.offsets, pair)))


def _sharing(box: Box, among: Sequence[int], bounds: Sequence[_Bounds]) -> Sequence[int]:
    """Return which of some boxes, by position, share elements with one."""
    for (lows, highs), offset, size in zip(bounds, *box, strict=True):
        end = offset + size
        among = [position for position in among if lows[position] < end and highs[position] > offset]
    return among


def _held(box: Box, among: Sequence[int], bounds: Sequence[_Bounds]) -> int:
    """Return how many elements of one box some others hold, an element once for each of them."""
    common = (intersect(box, _box(position, bounds)) for position in among)
    return sum(volume(inside[1]) for inside in common if inside)


def _box(position: int, bounds: Sequence[_Bounds]) -> Box:
    offsets = tuple(lows[position] for lows, _ in bounds)
    return offsets, tuple(highs[position] - offset for (_, highs), offset in zip(bounds, offsets, strict=True))
