"""What a tensor's boxes, and the ranks that wrote them, say about how it was sharded: boxes → "Shard(0) ×8".

Knows boxes and ranks only; values and files never decide (two equal shards are no replica).
Source: torch 2.13, distributed/tensor/placement_types.py, for the words; Megatron-core stacks its layers on axis 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.extents import Ints

MAX_SHOWN_RANKS = 8


class _Cut(NamedTuple):
    """How the boxes cut one dimension: first element and length of each box, and the distinct intervals in order."""

    dim: int
    starts: Sequence[int]
    intervals: Sequence[tuple[int, int]]

    def __str__(self) -> str:
        return f"Shard({self.dim}) ×{len(self.intervals)}"


def layout(
    shape: Ints,
    chunks: Chunks,
    ranks: Sequence[int | None] | None = None,
    world_size: int | None = None,
    stacked: bool = False,
) -> str:
    """Say in a few words how a tensor is cut into chunks, the outermost dimension of the device mesh first.

    The order of the ranks counts only where each box has a writer of its own and there are more boxes than half the
    ranks; else there are replicas, and which rank stored one says nothing.

    Args:
        shape: of the whole tensor, in elements.
        chunks: as stored; each box at most once.
        ranks: for each chunk the rank that wrote it; None if unknown.
        world_size: number of ranks that saved; None if unknown.
        stacked: dimension 0 counts layers if every box holds one index of it.

    Returns:
        "whole"; "Shard(0) ×4"; "Shard(1) ×2, Shard(0) ×2" for a grid; "_StridedShard(0, sf=2) ×4, Shard(0) ×2" for one
        dimension that two mesh dimensions cut, the inner one first; "Shard(0) ×3, ranks 0 2 1" for another order of
        ranks; "stack(0) ×2, Shard(1) ×4" for layers; "irregular ×7" for anything else. Empty chunks, which ranks
        without elements leave, are counted apart: "Shard(0) ×3 + 1 empty".
    """
    count = len(chunks)
    if count == 0:
        return "no chunks"
    if not shape:
        return "whole" if count == 1 else f"irregular ×{count}"
    columns: list[tuple[Sequence[int], Sequence[int]]] = [chunks.column(dim) for dim in range(len(shape))]
    empty = 0
    if any(0 in sizes for _, sizes in columns):
        kept = [index for index, box in enumerate(chunks.boxes()) if 0 not in box[1]]
        empty = count - len(kept)
        columns = [([starts[i] for i in kept], [sizes[i] for i in kept]) for starts, sizes in columns]
        ranks = [ranks[i] for i in kept] if ranks is not None else None
        count = len(kept)
    suffix = f" + {empty} empty" if empty else ""
    if count == 0:
        return "whole" if empty == 1 else f"empty ×{empty}"
    cuts = _grid(shape, columns)
    if cuts is None:
        return f"irregular ×{count}{suffix}"
    sharded = [cut for cut in cuts if len(cut.intervals) > 1]
    if not sharded:
        return f"Shard({_empty_dim(shape, chunks)}) ×1{suffix}" if empty else "whole"
    if stacked and sharded[0].dim == 0 and all(length == 1 for _, length in sharded[0].intervals):
        return ", ".join([f"stack(0) ×{shape[0]}", *map(str, sharded[1:])]) + suffix
    words, order = _placements(sharded, _writers(ranks, world_size))
    return words + suffix + order


def is_grid(words: str) -> bool:
    """Tell whether a layout is of one box or of a regular grid, which cover a tensor exactly."""
    return not words.startswith(("irregular", "no chunks", "empty"))


def _grid(shape: Ints, columns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[_Cut] | None:
    """Return how each dimension is cut if the boxes are a full grid; boxes are starts and sizes by dimension."""
    cuts = []
    product = 1
    for dim, (starts, sizes) in enumerate(columns):
        intervals = sorted(set(zip(starts, sizes, strict=True)))
        if not tiles(shape[dim], intervals):
            return None
        product *= len(intervals)
        cuts.append(_Cut(dim, starts, intervals))
    return cuts if product == len(columns[0][0]) else None


def tiles(size: int, intervals: Sequence[tuple[int, int]]) -> bool:
    """Tell whether sorted (start, length) intervals follow one another from 0 to `size`."""
    position = 0
    for start, length in intervals:
        if start != position:
            return False
        position += length
    return position == size


def _writers(ranks: Sequence[int | None] | None, world_size: int | None) -> list[int] | None:
    """Return the rank of each box if they tell of the mesh: all known, each once, too many for there to be replicas."""
    if ranks is None or world_size is None or 2 * len(ranks) <= world_size:
        return None
    known = [rank for rank in ranks if rank is not None]
    return known if len(set(known)) == len(ranks) else None


def _placements(sharded: Sequence[_Cut], writers: Sequence[int] | None) -> tuple[str, str]:
    """Name the placements by the order in which the ranks hold the boxes, and that order if it is none of a mesh."""
    if writers is None:
        return ", ".join(map(str, sharded)), ""
    if len(sharded) > 1:
        return ", ".join(map(str, _in_mesh_order(sharded, writers))), ""
    cut = sharded[0]
    order = [rank for _, rank in sorted(zip(cut.starts, writers, strict=True))]
    if order == sorted(order):
        return str(cut), ""
    inner = _inner_size(order)
    if inner:
        return f"_StridedShard({cut.dim}, sf={inner}) ×{len(order) // inner}, Shard({cut.dim}) ×{inner}", ""
    more = " …" if len(order) > MAX_SHOWN_RANKS else ""
    return str(cut), f", ranks {' '.join(map(str, order[:MAX_SHOWN_RANKS]))}{more}"


def _inner_size(order: Sequence[int]) -> int:
    """Return b if ranks i·b + j of an a × b mesh come in the order j·a + i, as FSDP2 over tensor parallelism; else 0.

    There the inner mesh dimension cuts first and the outer one cuts each of its parts again.
    """
    inner = order[1]  # the rank of i = 1, j = 0
    if inner < 2 or len(order) % inner:
        return 0
    outer = len(order) // inner
    return inner if outer > 1 and list(order) == [i * inner + j for j in range(inner) for i in range(outer)] else 0


def _in_mesh_order(sharded: Sequence[_Cut], writers: Sequence[int]) -> Sequence[_Cut]:
    """Order dimensions so that ranks increase row-major, outermost first; as they are where no order does that."""
    first = {cut.dim: min(rank for start, rank in zip(cut.starts, writers, strict=True) if start) for cut in sharded}
    ordered = sorted(sharded, key=lambda cut: -first[cut.dim])
    rows = sorted(zip(*(cut.starts for cut in ordered), writers, strict=True))
    ranks = [row[-1] for row in rows]
    return ordered if ranks == sorted(ranks) else sharded


def _empty_dim(shape: Ints, chunks: Chunks) -> int:
    """Return the dimension along which the empty chunks lie behind the only full one."""
    for offsets, sizes in chunks.boxes():
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            if size == 0 and start == shape[dim]:
                return dim
    return 0
