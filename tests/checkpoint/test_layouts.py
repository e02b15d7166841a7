"""Layout words for boxes as DTensor, FSDP1 and Megatron leave them, against torch and foreign checkpoints."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest

import dcptool
from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.layouts import layout
from tests.conftest import WHOLE, Part, part


def chunks(shape, boxes):
    table = ChunkTable()
    table.add((0,), (7,), None)  # somebody else's rows before
    mark = table.mark()
    for offsets, sizes in boxes:
        table.add(offsets, sizes, None)
    return table.chunks_since(mark, len(shape))


@pytest.mark.torchfree
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
    assert str(layout(shape, chunks(shape, boxes))) == expected


def along(dim, sizes, other=2):
    """Boxes that cut one of two dimensions into parts of these sizes."""
    starts = [0, *itertools.accumulate(sizes)]
    boxes = [((start, 0), (size, other)) for start, size in zip(starts, sizes, strict=False)]
    return boxes if dim == 0 else [(start[::-1], size[::-1]) for start, size in boxes]


def grid(*counts):
    """Boxes of one element, row-major."""
    return [(offsets, (1,) * len(counts)) for offsets in itertools.product(*map(range, counts))]


@pytest.mark.torchfree
@pytest.mark.parametrize(
    ("shape", "boxes", "ranks", "world_size", "expected"),
    [
        ((4, 2), along(0, [1] * 4), [0, 1, 2, 3], 4, "Shard(0) ×4"),
        ((2, 4), along(1, [1] * 4), [0, 1, 2, 5], 6, "Shard(1) ×4"),
        # FSDP2 over tensor parallelism: rank i·b + j holds box j·a + i.
        ((4, 2), along(0, [1] * 4), [0, 2, 1, 3], 4, "_StridedShard(0, sf=2) ×2, Shard(0) ×2"),
        ((6, 2), along(0, [1] * 6), [0, 2, 4, 1, 3, 5], 6, "_StridedShard(0, sf=2) ×3, Shard(0) ×2"),
        ((2, 6), along(1, [1] * 6), [0, 3, 1, 4, 2, 5], 6, "_StridedShard(1, sf=3) ×2, Shard(1) ×3"),
        # Another order of ranks is told as it is.
        ((5, 2), along(0, [1] * 5), [0, 2, 1, 3, 4], 5, "Shard(0) ×5, ranks 0 2 1 3 4"),
        ((4, 2), along(0, [1] * 4), [1, 3, 2, 4], 5, "Shard(0) ×4, ranks 1 3 2 4"),
        ((2, 2), along(0, [1, 1]), [1, 0], 2, "Shard(0) ×2, ranks 1 0"),
        ((9, 2), along(0, [1] * 9), [*range(8, -1, -1)], 9, "Shard(0) ×9, ranks 8 7 6 5 4 3 2 1 …"),
        ((3, 2), along(0, [1, 1, 1, 0]), [0, 2, 1, 3], 4, "Shard(0) ×3 + 1 empty, ranks 0 2 1"),
        ((3, 2), along(0, [1, 1, 1, 0]), [0, 1, 2, 1], 4, "Shard(0) ×3 + 1 empty"),
        # Where ranks say nothing: replicas, one writer of several boxes, places that are not known.
        ((4, 2), along(0, [1] * 4), [0, 6, 1, 3], 8, "Shard(0) ×4"),
        ((4, 2), along(0, [1] * 4), [0, 1, 1, 0], 4, "Shard(0) ×4"),
        ((4, 2), along(0, [1] * 4), [0, 2, 1, None], 4, "Shard(0) ×4"),
        ((4, 2), along(0, [1] * 4), [0, 2, 1, 3], None, "Shard(0) ×4"),
        ((4, 2), along(0, [1] * 4), None, 4, "Shard(0) ×4"),
        # Several dimensions, the outermost of the mesh first.
        ((2, 2), grid(2, 2), [0, 1, 2, 3], 4, "Shard(0) ×2, Shard(1) ×2"),
        ((2, 2), grid(2, 2), [0, 2, 1, 3], 4, "Shard(1) ×2, Shard(0) ×2"),
        ((2, 3), grid(2, 3), [0, 2, 4, 1, 3, 5], 6, "Shard(1) ×3, Shard(0) ×2"),
        ((2, 2), grid(2, 2), [0, 3, 1, 2], 4, "Shard(0) ×2, Shard(1) ×2"),
        ((2, 2, 2), grid(2, 2, 2), [0, 2, 1, 3, 4, 6, 5, 7], 8, "Shard(0) ×2, Shard(2) ×2, Shard(1) ×2"),
        ((2, 1, 2), grid(2, 1, 2), [0, 2, 1, 3], 4, "Shard(2) ×2, Shard(0) ×2"),
    ],
)
def test_the_order_of_ranks_tells_of_the_mesh(shape, boxes, ranks, world_size, expected):
    found = layout(shape, chunks(shape, boxes), ranks, world_size)
    words = str(found)
    assert words == expected
    assert found.is_grid


@pytest.mark.torchfree
@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((2, 3), along(0, [1, 1], 3), "stack(0) ×2"),
        ((2,), grid(2), "stack(0) ×2"),
        ((2, 1, 2), grid(2, 1, 2), "stack(0) ×2, Shard(2) ×2"),
        ((4, 3), along(0, [2, 2], 3), "Shard(0) ×2"),
        ((2, 2), along(1, [1, 1]), "Shard(1) ×2"),
        ((1, 2), [((0, 0), (1, 2))], "whole"),
        ((3,), [((0,), (1,)), ((2,), (1,))], "irregular ×2"),
    ],
)
def test_stacks_of_layers(shape, boxes, expected):
    found = layout(shape, chunks(shape, boxes), list(range(len(boxes))), len(boxes), stacked=True)
    words = str(found)
    assert words == expected
    assert found.is_grid != words.startswith("irregular")


PLACEMENT = re.compile(r"(_StridedShard|Shard)\((?:dim=)?(\d+)(?:, sf=(\d+))?\)(?: ×(\d+))?")
MESHES = [
    ((4,), "Shard(0) ×4"),
    ((4,), "Shard(1) ×4"),
    ((2, 3), "Shard(0) ×2, Shard(1) ×3"),
    ((2, 3), "Shard(1) ×2, Shard(0) ×3"),
    ((3, 2), "_StridedShard(0, sf=2) ×3, Shard(0) ×2"),
    ((2, 4), "_StridedShard(1, sf=4) ×2, Shard(1) ×4"),
    ((2, 2, 2), "Shard(2) ×2, Shard(0) ×2, Shard(1) ×2"),
]


@pytest.mark.parametrize(("mesh", "words"), MESHES, ids=[words for _, words in MESHES])
def test_words_give_back_the_placements_torch_cut_by(mesh, words):
    pytest.importorskip("torch")
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [
        _StridedShard(int(dim), split_factor=int(factor)) if factor else Shard(int(dim))
        for _, dim, factor, _ in PLACEMENT.findall(words)
    ]
    shape = (24, 48, 8)
    boxes = []
    for coordinate in itertools.product(*map(range, mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        boxes.append((offsets, sizes))
    ranks = list(range(math.prod(mesh)))
    assert str(layout(shape, chunks(shape, boxes), ranks, len(ranks))) == words
    turned = chunks(shape, boxes[::-1])
    assert str(layout(shape, turned, ranks[::-1], len(ranks))) == words


def expected_boxes(part: Part) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The boxes of each tensor as torch itself reads them from the metadata."""
    chunks = part.about.get("chunks", {})
    folder = part.path.name
    chunks = chunks.get(folder, chunks)
    return {
        fqn: [(tuple(box["offsets"]), tuple(box["sizes"])) for box in chunks[fqn]["chunks"]]
        for fqn in part.expected
        if chunks.get(fqn, {}).get("tensor")
    }


def split(size: int, count: int) -> list[tuple[int, int]]:
    """(start, length) of the parts torch.chunk makes, without empty ones."""
    step = -(-size // count)
    return [(start, min(step, size - start)) for start in range(0, size, step)]


def cut_by(words: str, shape: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that a layout of shards means; placements on one dimension cut it one after the other, strided last."""
    intervals: list[list[tuple[int, int]]] = [[(0, size)] for size in shape]
    for _, dim, _factor, count in sorted(PLACEMENT.findall(words), key=lambda found: found[2]):
        cut = intervals[int(dim)]
        intervals[int(dim)] = [(start + a, n) for start, size in cut for a, n in split(size, int(count))]
    return {(tuple(a for a, _ in box), tuple(n for _, n in box)) for box in itertools.product(*intervals)}


def layouts(part: Part) -> dict[str, str]:
    (checkpoint,) = dcptool.summarize(part.path).checkpoints
    return {tensor.fqn: str(tensor.layout) for tensor in checkpoint.tensors}


@pytest.mark.parametrize("part", [part for part in WHOLE if expected_boxes(part)], ids=lambda part: part.name)
def test_words_mean_the_boxes_of_the_foreign_checkpoint(part):
    words = layouts(part)
    for fqn, boxes in expected_boxes(part).items():
        full = {box for box in boxes if 0 not in box[1]}
        shape = tuple(part.expected[fqn]["shape"])
        if words[fqn] == "whole":
            assert boxes == [((0,) * len(shape), shape)]
            continue
        _, _, empty = words[fqn].partition(" + ")
        assert len(boxes) - len(full) == int(empty.partition(" ")[0] or 0)
        if part.name != "mesh2d_strided_uneven":  # whose boxes torch gets wrong
            assert cut_by(words[fqn].replace("stack", "Shard"), shape) == full


def stated(part: Part) -> dict[str, tuple[str, ...]]:
    """Which words the producer's account of its sharding allows: fqn of a tensor that is cut → words."""
    account = part.about["sharding"]
    ranks = part.about["world_size"]
    cut = {fqn: boxes for fqn, boxes in expected_boxes(part).items() if len(boxes) > 1}
    if account.startswith("mesh"):
        return {fqn: mesh_words(account, fqn) for fqn in cut}
    if account.startswith("tp="):
        return {fqn: tuple(megatron_words(fqn)) for fqn in cut}
    dims = (0, 1) if "Shard(1)" in account or part.name.startswith("w_") else (0,)
    return {fqn: tuple(f"Shard({dim}) ×{n}" for dim in dims for n in range(1, ranks + 1)) for fqn in cut}


def mesh_words(account: str, fqn: str) -> tuple[str, ...]:
    """Words for one parameter, or state of it, from `mesh 2x2 (dp,tp); placements {…}`."""
    mesh = list(map(int, re.search(r"mesh (\d+)x(\d+)", account).groups()))
    table = json.loads(re.search(r"\{.*\}", account)[0].replace("'", '"'))
    name = max((name for name in table if name in fqn), key=len)
    placements = re.findall(r"\w+\((?:[^()]*)\)", table[name])
    # On less than the whole mesh a tensor lies along its first dimension.
    kept = [(p.replace("dim=", ""), n) for p, n in zip(placements, mesh, strict=False) if p != "Replicate()"]
    return (", ".join(f"{placement} ×{count}" for placement, count in kept),)


def megatron_words(fqn: str) -> list[str]:
    stacked = ["stack(0) ×2"] if ".layers." in fqn else []
    return [", ".join([*stacked, *shard]) for shard in ([], ["Shard(0) ×2"], ["Shard(1) ×2"], ["Shard(2) ×2"])]


@pytest.mark.torchfree
@pytest.mark.parametrize("part", [part for part in WHOLE if expected_boxes(part)], ids=lambda part: part.name)
def test_words_agree_with_how_the_producer_says_it_sharded(part):
    words = layouts(part)
    allowed = stated(part)
    assert allowed or part.name in ("ddp", "w_nodist")
    for fqn, choices in allowed.items():
        if part.name == "mesh2d_strided_uneven" and "Strided" in choices[0]:
            assert words[fqn].startswith(("Shard(0) ×5 + 1 empty, ranks 0 2 1 3 4", "Shard(0) ×1 + 1 empty"))
        else:
            assert words[fqn].partition(" + ")[0] in choices, fqn


# In words of its own, what the accounts above come to.
@pytest.mark.torchfree
def test_words_of_two_meshes():
    assert layouts(part("mesh2d_fsdp_tp"))["model.w1.weight"] == "_StridedShard(0, sf=2) ×2, Shard(0) ×2"
    assert layouts(part("mesh2d_fsdp_tp"))["model.w2.weight"] == "Shard(0) ×2, Shard(1) ×2"
    assert layouts(part("mesh2d_fsdp_tp"))["model.norm.weight"] == "Shard(0) ×2"
    assert layouts(part("mesh2d_strided_uneven"))["row.weight"] == "Shard(0) ×3, Shard(1) ×2"
    assert set(layouts(part("hsdp")).values()) == {"Shard(0) ×2"}
    stacked = layouts(part("megatron_tp2/iter_0000010"))
    assert stacked["decoder.layers.mlp.linear_fc2.weight"] == "stack(0) ×2, Shard(2) ×2"
    assert stacked["output_layer.weight"] == "Shard(0) ×2"
