"""How a tensor was sharded, as its boxes and the ranks that wrote them tell: boxes → `Layout`, in words "Shard(0) ×8".

Knows boxes and ranks only; values and files never decide (two equal shards are no replica).
Source: torch 2.13, distributed/tensor/placement_types.py, for the words; Megatron-core stacks its layers on axis 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.extents import Ints

MAX_SHOWN_RANKS = 8
MAX_ALIKE = 1024
"""Tensors of more chunks are each looked at by themselves: the keys of such would take more memory than they save."""
MAX_RANKED = 65_536
"""Chunks of one tensor whose ranks are looked up; with more of them the layout names no order of ranks."""
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
"""Megatron-core's name for all layers as one tensor; layers with a number in their names are tensors of their own."""


class Shard(NamedTuple):
    """One dimension of the device mesh that cuts a tensor.

    Attributes:
        dim: the tensor's dimension.
        n_parts: into how many parts.
        split_factor: of torch's `_StridedShard`: an inner mesh dimension has cut `dim` into so many parts before;
            0 for a plain one.
        is_stack: the dimension counts layers, each a part.
    """

    dim: int
    n_parts: int
    split_factor: int = 0
    is_stack: bool = False

    def __str__(self) -> str:
        if self.is_stack:
            return f"stack({self.dim}) ×{self.n_parts}"
        if self.split_factor:
            return f"_StridedShard({self.dim}, sf={self.split_factor}) ×{self.n_parts}"
        return f"Shard({self.dim}) ×{self.n_parts}"


class Layout(NamedTuple):
    """How a tensor is cut into chunks.

    Attributes:
        n_boxes: chunks with elements.
        shards: the outermost dimension of the device mesh first; none for a whole tensor, and for what is no grid.
        is_grid: whether the boxes are one box or a regular grid, which cover the tensor exactly.
        n_empty: chunks without elements, which ranks without any leave.
        ranks: who wrote the parts of the one sharded dimension, where that is the order of no mesh.
    """

    n_boxes: int
    shards: tuple[Shard, ...] = ()
    is_grid: bool = True
    n_empty: int = 0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.n_boxes:
            return f"empty ×{self.n_empty}" if self.n_empty else "no chunks"
        words = ", ".join(map(str, self.shards)) or ("whole" if self.is_grid else f"irregular ×{self.n_boxes}")
        empty = f" + {self.n_empty} empty" if self.n_empty else ""
        more = " …" if len(self.ranks) > MAX_SHOWN_RANKS else ""
        order = f", ranks {' '.join(map(str, self.ranks[:MAX_SHOWN_RANKS]))}{more}" if self.ranks else ""
        return words + empty + order

    @property
    def is_whole(self) -> bool:
        """Whether one chunk holds all of the tensor, and nothing else was stored."""
        return self == WHOLE

    @property
    def sharded_dim(self) -> int | None:
        """The dimension that ranks in a row cut; None if there is none, or are several, or it counts layers."""
        one = self.shards[0] if len(self.shards) == 1 else None
        return None if one is None or one.is_stack else one.dim

    @property
    def n_layers(self) -> int | None:
        """How many layers are stacked, None if none are."""
        return self.shards[0].n_parts if self.shards and self.shards[0].is_stack else None


WHOLE = Layout(1)


class _Cut(NamedTuple):
    """How the boxes cut one dimension: first element and length of each box, and the distinct intervals in order."""

    dim: int
    starts: Sequence[int]
    intervals: Sequence[tuple[int, int]]

    @property
    def shard(self) -> Shard:
        return Shard(self.dim, len(self.intervals))


def layouts_of(checkpoint: Checkpoint) -> dict[str, Layout]:
    """Return fqn → layout of all tensors; those that are cut alike, as the layers of a model, are looked at once."""
    n_ranks = checkpoint.world_size
    rank_of = [*map(checkpoint.format.rank_of, checkpoint.table.files), None]  # the last for chunks without a place, -1
    layouts = {}
    alike: dict[tuple[Any, ...], Layout] = {}
    for fqn, entry in checkpoint.tensors.items():
        stacked = is_stacked(checkpoint, fqn)
        key = (entry.shape, stacked, *entry.chunks.key()) if len(entry.chunks) <= MAX_ALIKE else (fqn,)
        if key not in alike:
            known = 1 < len(entry.chunks) <= MAX_RANKED
            ranks = [rank_of[index] for index in entry.chunks.file_indexes()] if known else None
            alike[key] = layout(entry.shape, entry.chunks, ranks, n_ranks, stacked)
        layouts[fqn] = alike[key]
    return layouts


def is_stacked(checkpoint: Checkpoint, fqn: str) -> bool:
    """Tell whether dimension 0 of a tensor may count layers, as Megatron-core stores them."""
    return checkpoint.variant.stacks_layers and _LAYERS.search(fqn) is not None


def layout(
    shape: Ints,
    chunks: Chunks,
    ranks: Sequence[int | None] | None = None,
    world_size: int | None = None,
    stacked: bool = False,
) -> Layout:
    """Find out how a tensor is cut into chunks.

    The order of the ranks counts only where each box has a writer of its own and there are more boxes than half the
    ranks; else there are replicas, and which rank stored one says nothing.

    Args:
        shape: of the whole tensor, in elements.
        chunks: as stored; each box at most once.
        ranks: for each chunk the rank that wrote it; None if unknown.
        world_size: number of ranks that saved; None if unknown.
        stacked: dimension 0 counts layers if every box holds one index of it.
    """
    count = len(chunks)
    if count == 0 or not shape:
        return WHOLE if count == 1 else Layout(count, is_grid=False)
    columns: list[tuple[Sequence[int], Sequence[int]]] = [chunks.column(dim) for dim in range(len(shape))]
    n_empty = 0
    if any(0 in sizes for _, sizes in columns):
        kept = [index for index, box in enumerate(chunks.boxes()) if 0 not in box[1]]
        n_empty = count - len(kept)
        columns = [([starts[i] for i in kept], [sizes[i] for i in kept]) for starts, sizes in columns]
        ranks = [ranks[i] for i in kept] if ranks is not None else None
        count = len(kept)
    if count == 0:
        return WHOLE if n_empty == 1 else Layout(0, is_grid=False, n_empty=n_empty)
    cuts = _grid(shape, columns)
    if cuts is None:
        return Layout(count, is_grid=False, n_empty=n_empty)
    shards, order = _shards(cuts, _writers(ranks, world_size), stacked)
    if not shards and n_empty:
        shards = (Shard(_empty_dim(shape, chunks), 1),)
    return Layout(count, shards, True, n_empty, order)


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


def _shards(
    cuts: Sequence[_Cut], writers: Sequence[int] | None, stacked: bool
) -> tuple[tuple[Shard, ...], tuple[int, ...]]:
    """Order the sharded dimensions as the ranks hold the boxes; return that order too if it is none of a mesh."""
    sharded = [cut for cut in cuts if len(cut.intervals) > 1]
    if stacked and sharded and sharded[0].dim == 0 and all(length == 1 for _, length in sharded[0].intervals):
        first, *rest = (cut.shard for cut in sharded)
        return (first._replace(is_stack=True), *rest), ()
    if writers is None or not sharded:
        return tuple(cut.shard for cut in sharded), ()
    if len(sharded) > 1:
        return tuple(cut.shard for cut in _in_mesh_order(sharded, writers)), ()
    cut = sharded[0]
    order = [rank for _, rank in sorted(zip(cut.starts, writers, strict=True))]
    if order == sorted(order):
        return (cut.shard,), ()
    inner = _inner_size(order)
    if inner:
        return (Shard(cut.dim, len(order) // inner, inner), Shard(cut.dim, inner)), ()
    return (cut.shard,), tuple(order)


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
