"""Layout words for boxes as DTensor, FSDP1 and Megatron leave them."""

from __future__ import annotations

import pytest

from dcptool.chunks import ChunkTable
from dcptool.placements import layout

pytestmark = pytest.mark.torchfree


def chunks(shape, boxes):
    table = ChunkTable()
    table.add((0,), (7,), None)  # somebody else's rows before
    mark = table.mark()
    for offsets, sizes in boxes:
        table.add(offsets, sizes, None)
    return table.chunks_since(mark, len(shape))


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((), [((), ())], "whole"),
        ((4, 3), [((0, 0), (4, 3))], "whole"),
        ((4, 3), [], "no chunks"),
        ((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))], "Shard(0) ×2"),
        ((4, 3), [((2, 0), (2, 3)), ((0, 0), (2, 3))], "Shard(0) ×2"),
        ((4, 3), [((0, 0), (4, 2)), ((0, 2), (4, 1))], "Shard(1) ×2"),
        ((6, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (2, 2)), ((6, 0), (0, 2))], "Shard(0) ×3 + 1 empty"),
        ((1, 3), [((0, 0), (1, 3)), ((1, 0), (0, 3))], "Shard(0) ×1 + 1 empty"),
        ((3, 1), [((0, 0), (3, 1)), ((0, 1), (3, 0))], "Shard(1) ×1 + 1 empty"),
        ((0, 5), [((0, 0), (0, 5))], "whole"),
        ((2, 4), [((r, c), (1, 2)) for c in (0, 2) for r in (0, 1)], "Shard(0) ×2, Shard(1) ×2"),
        ((2, 4), [((0, 0), (1, 4)), ((1, 0), (1, 2)), ((1, 2), (1, 2))], "irregular ×3"),
        ((2, 4), [((0, 0), (1, 4))], "irregular ×1"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "irregular ×2"),
    ],
)
def test_layout(shape, boxes, expected):
    assert layout(shape, chunks(shape, boxes)) == expected
