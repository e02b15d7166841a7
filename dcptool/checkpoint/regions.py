"""Boxes of n-d arrays: volumes, intersections, strides, exact cover. Pure integer arithmetic on tuples.

A box is a pair (offsets, sizes) of equally long tuples, in elements. An empty box has a zero size somewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import add, sub
from typing import Any

from dcptool.checkpoint.extents import Ints

Box = tuple[Ints, Ints]


def volume(sizes: Iterable[int]) -> int:
    """Return the number of elements of a box; 1 for zero dimensions."""
    return prod(sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common box of two boxes of the same ndim, None when they share no element."""
    offsets, sizes = [], []
    for a_offset, a_size, b_offset, b_size in zip(*a, *b, strict=True):
        start = max(a_offset, b_offset)
        size = min(a_offset + a_size, b_offset + b_size) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return tuple(offsets), tuple(sizes)


def bounding(boxes: Sequence[Box]) -> Box:
    """Return the smallest box around one or more boxes of the same ndim."""
    if len(boxes) == 1:
        return boxes[0]
    offsets = tuple(map(min, zip(*(box[0] for box in boxes), strict=True)))
    ends = (map(add, *box) for box in boxes)
    return offsets, tuple(map(sub, map(max, zip(*ends, strict=True)), offsets))


def contiguous_strides(shape: Ints) -> Ints:
    """Return the row-major strides of a shape, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Ints, strides: Ints) -> bool:
    """Tell whether a view is row-major without gaps; dimensions of size 1 may have any stride."""
    return 0 in shape or all(
        size == 1 or stride == step
        for size, stride, step in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def span(sizes: Ints, strides: Ints) -> int:
    """Return how many elements lie from the first to the last of a strided box, both included; 0 if empty."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def index_in(outer: Box, inner: Box) -> Any:
    """Return the index of a box in an array that holds another one around it; the ellipsis keeps 0-d an array."""
    starts = zip(inner[0], outer[0], inner[1], strict=True)
    return (*(slice(a - b, a - b + n) for a, b, n in starts), ...)


def first_gap(region: Box, boxes: Sequence[Box]) -> Box | None:
    """Return a box inside `region` that no box covers, None if there is none.

    Sweeps one dimension after the other: the cuts of all boxes divide a dimension into slabs, and each slab
    looks only at the boxes that span it, so that the work for any grid of n boxes is about n·ndim.

    Args:
        region: what should be covered; elements of the whole tensor.
        boxes: any order, overlapping or not, empty ones allowed; same ndim as `region`.

    Returns:
        The first uncovered slab in row-major order of the cuts.
    """
    inside = [common for box in boxes if (common := intersect(region, box))]
    return _first_gap(*region, inside, 0)


def _first_gap(offsets: Ints, sizes: Ints, boxes: list[Box], dim: int) -> Box | None:
    if 0 in sizes:
        return None
    if not boxes:
        return offsets, sizes
    if dim == len(sizes):
        return None
    starts: dict[int, list[Box]] = {}
    ends: dict[int, int] = {}
    for box in boxes:
        starts.setdefault(box[0][dim], []).append(box)
        end = box[0][dim] + box[1][dim]
        ends[end] = ends.get(end, 0) + 1
    cuts = sorted({offsets[dim], offsets[dim] + sizes[dim], *starts, *ends})
    active: list[Box] = []
    for start, end in itertools.pairwise(cuts):
        if start in ends:
            active = [box for box in active if box[0][dim] + box[1][dim] > start]
        active += starts.get(start, ())
        slab = (*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], end - start, *sizes[dim + 1 :])
        gap = _first_gap(*slab, active, dim + 1)
        if gap:
            return gap
    return None


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


def chunk_of(size: int, count: int, part: int) -> tuple[int, int]:
    """Return first element and length of one of `count` parts of a dimension, as torch.chunk cuts it.

    >>> [chunk_of(7, 4, part) for part in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 1)]
    """
    step = -(-size // count)
    start = min(part * step, size)
    return start, min(step, size - start)


def flat_boxes(shape: Ints, first: int, last: int) -> Iterator[Box]:
    """Yield, in row-major order, the boxes that together are elements `first` up to `last` of a flattened array.

    >>> list(flat_boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= last:
        return
    if len(shape) <= 1:
        yield ((first,), (last - first,)) if shape else ((), ())
        return
    inner = volume(shape[1:])
    head, tail = -(-first // inner), last // inner  # the first row that is whole, and the one past the last
    if head > tail:  # all of it is inside one row
        yield from _in_row(shape, tail, first - tail * inner, last - tail * inner)
        return
    yield from _in_row(shape, head - 1, first - (head - 1) * inner, inner)
    if head < tail:
        yield (head, *(0,) * len(shape[1:])), (tail - head, *shape[1:])
    yield from _in_row(shape, tail, 0, last - tail * inner)


def _in_row(shape: Ints, row: int, first: int, last: int) -> Iterator[Box]:
    for offsets, sizes in flat_boxes(shape[1:], first, last):
        yield (row, *offsets), (1, *sizes)
