"""What a tensor's boxes say about how it was sharded: boxes → "Shard(0) ×8".

Knows boxes only; values and files never decide (two equal shards are no replica).
Source: torch 2.13, distributed/tensor/placement_types.py, for the words.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcptool.chunks import Chunks
from dcptool.model import Ints


def layout(shape: Ints, chunks: Chunks) -> str:
    """Say in a few words how a tensor is cut into chunks.

    Args:
        shape: of the whole tensor, in elements.
        chunks: as stored; each box at most once.

    Returns:
        "whole"; "Shard(0) ×4"; "Shard(0) ×2, Shard(1) ×2" for a grid; "irregular ×7" for anything else. Empty
        chunks, which ranks without elements leave, are counted apart: "Shard(0) ×3 + 1 empty".
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
        count = len(kept)
    suffix = f" + {empty} empty" if empty else ""
    if count == 0:
        return "whole" if empty == 1 else f"empty ×{empty}"
    cuts = [sorted(set(zip(starts, sizes, strict=True))) for starts, sizes in columns]
    grid = 1
    for size, intervals in zip(shape, cuts, strict=True):
        grid *= len(intervals)
        if not _tiles(size, intervals):
            return f"irregular ×{count}{suffix}"
    if grid != count:
        return f"irregular ×{count}{suffix}"
    sharded = [f"Shard({dim}) ×{len(intervals)}" for dim, intervals in enumerate(cuts) if len(intervals) > 1]
    if not sharded and empty:
        sharded = [f"Shard({_empty_dim(shape, chunks)}) ×1"]
    return (", ".join(sharded) or "whole") + suffix


def is_grid(words: str) -> bool:
    """Tell whether a layout is of one box or of a regular grid, which cover a tensor exactly."""
    return not words.startswith(("irregular", "no chunks", "empty"))


def _tiles(size: int, intervals: list[tuple[int, int]]) -> bool:
    """Tell whether sorted (start, length) intervals follow one another from 0 to `size`."""
    position = 0
    for start, length in intervals:
        if start != position:
            return False
        position += length
    return position == size


def _empty_dim(shape: Ints, chunks: Chunks) -> int:
    """Return the dimension along which the empty chunks lie behind the only full one."""
    for offsets, sizes in chunks.boxes():
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            if size == 0 and start == shape[dim]:
                return dim
    return 0
