"""Which rank stores what: the assignment torch's planners make when several ranks hold the same.

Every rank proposes what it holds, in the order of its state dict; what several propose goes to the one that has the
least to write so far. Ties go by the order in which Python iterates a set of rank numbers, as in torch.

Source: torch 2.13, distributed/checkpoint/_dedup_save_plans.py, default_planner.py (`create_default_global_save_plan`)
and filesystem.py (`_write_files_from_queue`: objects before tensors).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from dcptool.checkpoint.regions import Box
from dcptool.formats.dcp.write import Arrangement


class Holding(NamedTuple):
    """A box of a tensor, or an object where it is None, and the ranks that hold it, ascending."""

    box: Box | None
    ranks: Sequence[int]


class Held(NamedTuple):
    """What all ranks hold of one entry.

    Attributes:
        name: of the entry.
        weight: what torch's balancing counts for each holding: bytes of the whole tensor, 1 for what has none.
        holdings: one for each offset, since a checkpoint holds one chunk for each.
    """

    name: str
    weight: int
    holdings: Sequence[Holding]


def assign(entries: Sequence[Held], n_ranks: int) -> Arrangement:
    """Assign every holding to one of the ranks that hold it.

    Args:
        entries: in the order of the state dict.
        n_ranks: how many ranks there are.

    Returns:
        One file for each rank, empty where it has nothing to write.
    """
    proposed: list[list[tuple[int, int]]] = [[] for _ in range(n_ranks)]
    for position, entry in enumerate(entries):
        for index, holding in enumerate(entry.holdings):
            proposed[holding.ranks[0]].append((position, index))
    planned = [0] * n_ranks
    everywhere, least = range(n_ranks), [(0, rank) for rank in range(n_ranks)]
    kept: list[list[tuple[int, int]]] = [[] for _ in range(n_ranks)]
    for proposals in proposed:
        for position, index in proposals:
            ranks = entries[position].holdings[index].ranks
            if len(ranks) == 1:
                rank = ranks[0]
            elif ranks == everywhere:
                rank = _least(least, planned)
            else:
                rank = min(set(ranks), key=planned.__getitem__)
            planned[rank] += entries[position].weight or 1
            kept[rank].append((position, index))
    files: dict[str, Sequence[tuple[str, Box | None]]] = {}
    boxes: dict[str, list[Box]] = {}
    for rank, items in enumerate(kept):
        found = [(entries[position].name, entries[position].holdings[index].box) for position, index in sorted(items)]
        for name, box in found:
            boxes.setdefault(name, []).extend([box] if box else ())
        files[f"__{rank}_0.distcp"] = sorted(found, key=lambda item: item[1] is not None)
    for entry in entries:
        boxes.setdefault(entry.name, [])  # a tensor of no elements may have no chunk at all
    return Arrangement(files, boxes)


def _least(heap: list[tuple[int, int]], planned: Sequence[int]) -> int:
    """Return the first of all ranks with the least to write; the heap holds what each had when it was last looked at.

    With thousands of ranks, looking at all of them for every scalar would take longer than the copy.
    """
    while heap[0][0] != planned[heap[0][1]]:
        heapq.heapreplace(heap, (planned[heap[0][1]], heap[0][1]))
    return heap[0][1]
