"""What chunks cover, against counting every element; layouts that make other algorithms slow; damage of each kind."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cover import KINDS, chunks_of, damage
from dcptool.checkpoint import cover as module
from dcptool.checkpoint.cover import Cover, Overlap, cover
from dcptool.checkpoint.regions import intersect, volume
from dcptool.errors import LayoutError

EXACT = Cover((), 0, (), 0)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
FULL_SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def shape_and_boxes(draw, most=7):
    shape = draw(SHAPES)
    box = st.tuples(*[st.tuples(*[st.integers(0, size + extra) for size in shape]) for extra in (0, 1)])
    boxes = draw(st.lists(box, max_size=most))
    return shape, boxes + draw(st.lists(st.sampled_from(boxes), max_size=2) if boxes else st.just([]))


@st.composite
def partitions(draw):
    """A shape and boxes that cover it exactly: one box, divided again and again."""
    shape = draw(FULL_SHAPES)
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, sizes[dim]))  # an end of it leaves an empty box
        for start, size in ((0, first), (first, sizes[dim] - first)):
            moved = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            boxes.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :])))
    return shape, draw(st.permutations(boxes))


def paint(shape, boxes):
    count = np.zeros(shape, int)
    for offsets, sizes in boxes:
        count[(*(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True)), ...)] += 1
    return count


def check(shape, boxes, max_found=10):
    """Compare everything that is found with a count of every element."""
    found = cover(shape, chunks_of(shape, boxes), max_found)
    count = paint(shape, boxes)
    assert found.n_missing == (count == 0).sum()
    assert found.n_overlapping == (count > 1).sum()
    gaps = paint(shape, found.gaps)
    assert gaps.max(initial=0) <= 1
    assert not count[gaps > 0].any()
    assert all(volume(sizes) for _, sizes in found.gaps)
    assert list(found.gaps) == sorted(found.gaps)
    assert len(found.gaps) == max_found or gaps.sum() == found.n_missing
    inside = [intersect(((0,) * len(shape), shape), box) for box in boxes]
    pairs = {
        Overlap(first, second, *common)
        for first, second in combinations(range(len(boxes)), 2)
        if inside[first] and inside[second] and (common := intersect(inside[first], inside[second]))
    }
    assert set(found.overlaps) <= pairs
    assert len(set(found.overlaps)) == len(found.overlaps) == min(max_found, len(pairs))
    return found


@given(shape_and_boxes(), st.sampled_from([0, 1, 2, 10]))
def test_any_boxes(case, max_found):
    check(*case, max_found)


@given(partitions())
def test_an_exact_partition(case):
    shape, boxes = case
    assert cover(shape, chunks_of(shape, boxes)) == EXACT


@given(partitions(), st.data())
def test_a_partition_without_one_box(case, data):
    shape, boxes = case
    at = data.draw(st.integers(0, len(boxes) - 1))
    found = check(shape, [*boxes[:at], *boxes[at + 1 :]])
    gap = boxes[at] if volume(boxes[at][1]) else None
    assert found == Cover((gap,) if gap else (), volume(boxes[at][1]), (), 0)


@given(partitions(), st.data())
def test_a_partition_with_one_box_twice(case, data):
    shape, boxes = case
    at = data.draw(st.integers(0, len(boxes) - 1))
    found = check(shape, [*boxes, boxes[at]])
    if volume(boxes[at][1]):
        assert found == Cover((), 0, (Overlap(at, len(boxes), *boxes[at]),), volume(boxes[at][1]))
    else:
        assert found == EXACT


@given(partitions(), st.data())
def test_a_partition_with_one_box_moved(case, data):
    shape, boxes = case
    at = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[at]
    offsets = tuple(max(0, offset + data.draw(st.integers(-1, 1))) for offset in offsets)
    check(shape, [*boxes[:at], (offsets, sizes), *boxes[at + 1 :]])


@given(partitions(), partitions())
def test_two_partitions_over_one_another(first, second):
    shape = first[0]
    check(shape, first[1] + [box for box in second[1] if len(box[0]) == len(shape)])


@pytest.mark.torchfree
@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((), [((), ())], EXACT),
        ((), [], Cover((((), ()),), 1, (), 0)),
        ((), [((), ())] * 3, Cover((), 0, tuple(Overlap(*pair, (), ()) for pair in ((0, 1), (0, 2), (1, 2))), 1)),
        ((0, 3), [], EXACT),
        ((0, 3), [((0, 0), (0, 3))] * 2, EXACT),
        ((4, 3), [], Cover((((0, 0), (4, 3)),), 12, (), 0)),
        # Shard(0) of 1 row over 4 ranks: torch writes empty chunks behind the end
        ((1, 3), [((0, 0), (1, 3)), ((1, 0), (0, 3)), ((1, 0), (0, 3))], EXACT),
        # 7 rows on a 3 × 2 mesh as torch 2.13 describes them: 1 row at 6, none at 7
        ((7,), [((0,), (2,)), ((2,), (2,)), ((4,), (1,)), ((5,), (1,)), ((6,), (1,)), ((7,), (0,))], EXACT),
        ((4,), [((2,), (9,)), ((0,), (2,)), ((7,), (1,))], EXACT),
        ((4,), [((3,), (9,)), ((0,), (2,)), ((4,), (1,))], Cover((((2,), (1,)),), 1, (), 0)),
        ((9,), [((0,), (5,)), ((3,), (6,))], Cover((), 0, (Overlap(0, 1, (3,), (2,)),), 2)),
        ((2, 9), [((0, 0), (2, 3)), ((0, 6), (2, 3))], Cover((((0, 3), (2, 3)),), 6, (), 0)),
    ],
)
def test_cases(shape, boxes, expected):
    assert cover(shape, chunks_of(shape, boxes)) == expected


@pytest.mark.torchfree
def test_neighbouring_gaps_are_one():
    """A hole of four rows beside a row of bricks, whose cuts divide the slabs of the sweep."""
    boxes = [((0, 0), (4, 6)), ((8, 0), (2, 9)), ((0, 6), (1, 3)), ((1, 6), (3, 3)), ((4, 3), (4, 6))]
    assert cover((10, 9), chunks_of((10, 9), boxes)).gaps == (((4, 0), (4, 3)),)


@pytest.mark.torchfree
def test_lists_are_cut_but_counts_are_not():
    boxes = [((4 * i,), (2,)) for i in range(50)] * 2
    found = cover((200,), chunks_of((200,), boxes), max_found=3)
    assert (found.n_missing, found.n_overlapping) == (100, 100)
    assert found.gaps == tuple(((offset,), (2,)) for offset in (2, 6, 10))
    assert found.overlaps == tuple(Overlap(i, i + 50, (4 * i,), (2,)) for i in range(3))


def test_one_pair_may_share_thousands_of_regions():
    """Two chunks hold the same column, which the ends of other chunks divide into slabs: more than are kept."""
    n = 3 * module._MAX_KEPT
    column = ((0, 0), (n, 1))
    boxes = [column, column] + [((i, i + 1), (1, 1)) for i in range(0, n, 2)]
    found = cover((n, n + 1), chunks_of((n, n + 1), boxes))
    assert found.overlaps == (Overlap(0, 1, *column),)
    assert (len(found.gaps), found.n_missing, found.n_overlapping) == (10, n * n - n // 2, n)


@pytest.mark.torchfree
def test_the_largest_tensors():
    shape = (2**31, 2**31)
    quarter = (2**30, 2**30)
    boxes = [((a, b), quarter) for a in (0, 2**30) for b in (0, 2**30)]
    assert cover(shape, chunks_of(shape, boxes)) == EXACT
    assert cover(shape, chunks_of(shape, boxes[1:])) == Cover((((0, 0), quarter),), 2**60, (), 0)
    ends = [((0, 1), (2**31, 2**62)), ((0, 0), (2**31, 1))]
    assert cover(shape, chunks_of(shape, ends)) == EXACT


@pytest.mark.torchfree
@pytest.mark.parametrize("kind", ["shards", "grid-2d", "grid-3d"])
def test_a_grid_is_recognised_from_its_columns(kind, monkeypatch):
    shape, boxes = KINDS[kind](216, random.Random(5))
    monkeypatch.setattr(module, "_corners", None)
    assert cover(shape, chunks_of(shape, boxes)) == EXACT
    random.Random(6).shuffle(boxes)
    assert cover(shape, chunks_of(shape, boxes)) == EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_linear_in_boxes(kind, monkeypatch):
    """No kind of layout needs more than so many steps per box, exact or damaged, few or many."""
    for count in (300, 5000):
        shape, boxes = KINDS[kind](count, random.Random(count))
        monkeypatch.setattr(module, "MAX_STEPS", 130 * count)
        assert cover(shape, chunks_of(shape, boxes)) == EXACT
        found = cover(shape, chunks_of(shape, damage(boxes)))
        assert found.gaps == (boxes[len(boxes) // 2],)
        assert found.n_missing == volume(found.gaps[0][1])
        assert {pair.second for pair in found.overlaps} == {len(boxes) - 1}


@pytest.mark.torchfree
def test_hopeless_boxes_are_given_up(monkeypatch):
    """Rows across columns share n²/4 squares."""
    rows = [((4 * i, 0), (2, 4000)) for i in range(1000)]
    columns = [((0, 4 * i), (4000, 2)) for i in range(1000)]
    chunks = chunks_of((4000, 4000), rows + columns)
    monkeypatch.setattr(module, "MAX_STEPS", 1_000_000)
    with pytest.raises(LayoutError, match=r"^too irregular to check: 2,000 chunks are no exact cover, but what they"):
        cover((4000, 4000), chunks)
    monkeypatch.setattr(module, "MAX_STEPS", 10_000)
    with pytest.raises(LayoutError, match=r"^too irregular to check: whether 2,000 chunks are an exact cover is open"):
        cover((4000, 4000), chunks)
