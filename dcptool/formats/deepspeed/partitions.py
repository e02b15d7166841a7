"""Where the parts of each parameter lie in the flat partitions of ranks. Pure arithmetic.

Stages 1 and 2 lay the parameters of a group one after the other and cut the whole into equal partitions, the last one
padded; stage 3 cuts each parameter into equal pieces, the last one padded, and lays these one after the other.
Source: deepspeed 0.19.8, utils/zero_to_fp32.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import volume


class Stretch(NamedTuple):
    """A run of elements of a flattened parameter.

    Attributes:
        rank, group: whose flat part it is in.
        start: its first element there.
        first: its first element in the parameter.
        numel: how many.
    """

    rank: int
    group: int
    start: int
    first: int
    numel: int


class Cuts(NamedTuple):
    """Where everything is, and how many elements ranks should hold.

    Attributes:
        parts: group and name → its parts, in order.
        used: for each group elements that a rank uses, by rank.
        partition: for each group elements of a rank with padding; of stage 3 there is none.
    """

    parts: dict[tuple[int, str], list[Stretch]]
    used: list[dict[int, int]]
    partition: list[int]


def needed(shapes: Mapping[str, Ints], alignments: Sequence[int] = ()) -> int:
    """Return how many elements the parameters of a group take, one after the other."""
    return sum(map(volume, shapes.values())) + sum(alignments)


def cut_groups(
    groups: Sequence[Mapping[str, Ints]],
    partitions: Sequence[int],
    ranks: Sequence[int],
    alignments: Sequence[Sequence[int]] | None,
) -> Cuts:
    """Lay out parameters as stages 1 and 2 do.

    Args:
        groups: shapes of the parameters of each.
        partitions: elements of each rank's part of a group, with padding.
        ranks: whose files there are, sorted.
        alignments: elements free behind each parameter of a group, if there are any.
    """
    layout = Cuts({}, [], list(partitions))
    for group, (shapes, partition) in enumerate(zip(groups, partitions, strict=True)):
        free = alignments[group] if alignments else ()
        at = 0
        for index, (name, shape) in enumerate(shapes.items()):
            numel = volume(shape)
            layout.parts[group, name] = list(_cut(group, at, numel, partition, ranks))
            at += numel + (free[index] if index < len(free) else 0)
        layout.used.append({rank: min(max(at - rank * partition, 0), partition) for rank in ranks})
    return layout


def _cut(group: int, at: int, numel: int, partition: int, ranks: Sequence[int]) -> Iterator[Stretch]:
    if not numel or not partition:
        return
    first, last = bisect_left(ranks, at // partition), bisect_right(ranks, (at + numel - 1) // partition)
    for rank in ranks[first:last]:
        start, end = max(at, rank * partition), min(at + numel, (rank + 1) * partition)
        yield Stretch(rank, group, start - rank * partition, start - at, end - start)


def cut_each(groups: Sequence[Mapping[str, Ints]], sizes: Sequence[int], world_size: int, ranks: Sequence[int]) -> Cuts:
    """Lay out parameters as stage 3 does.

    Args:
        groups: shapes of the parameters; they go through all flat groups one after the other.
        sizes: elements of a rank's flat groups.
        world_size: into how many pieces each parameter is cut.
        ranks: whose files there are, sorted.
    """
    ends = list(accumulate(sizes, initial=0))
    layout = Cuts({}, [dict.fromkeys(ranks, end - start) for start, end in pairwise(ends)], list(sizes))
    at = 0
    for group, shapes in enumerate(groups):
        for name, shape in shapes.items():
            numel = volume(shape)
            piece = piece_numel(numel, world_size)
            layout.parts[group, name] = [
                part for rank in ranks for part in _runs(rank, at, min(piece, numel - rank * piece), rank * piece, ends)
            ]
            at += piece
    return layout


def piece_numel(numel: int, world_size: int) -> int:
    """Return how many elements of a parameter each rank has in stage 3, with padding."""
    return -(-numel // world_size)


def _runs(rank: int, at: int, numel: int, first: int, ends: Sequence[int]) -> Iterator[Stretch]:
    """Yield the runs of a piece: more than one where it goes on in the next flat group."""
    while numel > 0:
        group = bisect_right(ends, at) - 1
        if group + 1 >= len(ends):
            return
        run = min(numel, ends[group + 1] - at)
        yield Stretch(rank, group, at - ends[group], first, run)
        at, first, numel = at + run, first + run, numel - run
