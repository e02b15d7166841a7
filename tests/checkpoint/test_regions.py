"""Boxes against brute force on small arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcptool.checkpoint.regions import (
    contiguous_strides,
    first_gap,
    flat_boxes,
    index_in,
    intersect,
    is_contiguous,
    span,
    volume,
)

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def shape_and_boxes(draw, most=6):
    shape = draw(SHAPES)
    boxes = []
    for _ in range(draw(st.integers(0, most))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        boxes.append((offsets, tuple(draw(st.integers(0, size)) for size in shape)))
    return shape, boxes


def paint(shape, boxes):
    count = np.zeros(shape, int)
    for offsets, sizes in boxes:
        count[(*(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True)), ...)] += 1
    return count


@given(shape_and_boxes())
def test_first_gap_is_uncovered_and_found_whenever_there_is_one(case):
    shape, boxes = case
    count = paint(shape, boxes)
    gap = first_gap(((0,) * len(shape), shape), boxes)
    assert (gap is None) == (not (count == 0).any())
    if gap:
        hole = count[(*(slice(a, a + n) for a, n in zip(*gap, strict=True)), ...)]
        assert hole.size == volume(gap[1]) > 0
        assert not hole.any()


@given(shape_and_boxes(most=2))
def test_intersection_is_where_both_are(case):
    shape, boxes = case
    if len(boxes) == 2:
        both = paint(shape, boxes) == 2
        common = intersect(*boxes)
        inside = paint(shape, [common] if common else []) == 1
        assert (both == inside).all()


@given(SHAPES)
def test_strides_and_span_are_numpys(shape):
    array = np.zeros(shape, np.int8)
    strides = contiguous_strides(shape)
    if array.size:
        assert strides == array.strides
    assert span(shape, strides) == array.size
    assert is_contiguous(shape, strides)
    if len(shape) > 1 and min(shape) > 1:
        assert not is_contiguous(shape, strides[::-1])


def test_a_large_grid_is_near_linear():
    boxes = [((row * 4, column * 8), (4, 8)) for row in range(300) for column in range(100)]
    assert first_gap(((0, 0), (1200, 800)), boxes) is None
    assert first_gap(((0, 0), (1200, 800)), boxes[:-1]) == ((1196, 792), (4, 8))


@given(SHAPES, st.data())
def test_a_flat_range_is_its_boxes_in_order(shape, data):
    count = volume(shape)
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    array = np.arange(count).reshape(shape)
    boxes = list(flat_boxes(shape, first, last))
    found = [array[index_in(((0,) * len(shape), shape), box)].reshape(-1) for box in boxes]
    assert np.concatenate([np.empty(0, int), *found]).tolist() == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
