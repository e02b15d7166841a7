"""What a reshard answers. Decides nothing, and reads no values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from dcptool.checkpoint.casting import Loss
from dcptool.copying.engine import memory_nbytes
from dcptool.ops.guards import leftover_notes, source_notes
from dcptool.ops.reshard.plan import Plan, ReshardOptions


class Resharded(NamedTuple):
    """What was written, or would be.

    Attributes:
        source, path: of the source and of the output.
        world_size: ranks of the target.
        n_tensors, n_objects: how many are in it.
        nbytes: of all tensors' values.
        rank_nbytes: bytes of each rank's data files.
        metadata_nbytes: bytes of `.metadata` and of the marker.
        workers: processes that shared the work, or would.
        memory_nbytes: bytes of buffers in each of them.
        seconds: wall time, torch's start included.
        notes: worth knowing, one sentence each.
        published: whether it was written.
        parts: places of the checkpoints in the step, if there are several or the one is below it.
        carried: names of files beside them that were copied as they are.
        carried_nbytes: bytes of these.
        n_cast: tensors whose dtype changed.
        lost: what casts lost, by fqn: how many values became infinite, zero or subnormal.
    """

    source: str
    path: str
    world_size: int
    n_tensors: int
    n_objects: int
    nbytes: int
    rank_nbytes: tuple[int, ...]
    metadata_nbytes: int
    workers: int
    memory_nbytes: int
    seconds: float
    notes: tuple[str, ...]
    published: bool
    parts: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    carried_nbytes: int = 0
    n_cast: int = 0
    lost: Mapping[str, Loss] = {}

    @property
    def nbytes_out(self) -> int:
        """Bytes of all files."""
        return sum(self.rank_nbytes) + self.metadata_nbytes + self.carried_nbytes


def summarize_plan(
    plan: Plan,
    options: ReshardOptions,
    workers: int,
    seconds: float,
    published: bool,
    replaces: str,
    unproven: Collection[str] = (),
    lost: Mapping[str, Loss] = MappingProxyType({}),
) -> Resharded:
    """Return a plan as a result.

    Args:
        plan, options: what was, or would be, done.
        workers: processes that shared the work, or would.
        seconds: wall time so far.
        published: whether it was written.
        replaces: what is, or was, at the target, as a note; "" for nothing.
        unproven: names of the tensors that were read and have no checksums.
        lost: what casts lost, by fqn.
    """
    threads = options.threads or 1
    tensors = [item for part in plan.parts for item in part.selection.tensors]
    return Resharded(
        plan.source,
        plan.target,
        plan.n_ranks,
        len(tensors),
        sum(len(part.selection.objects) for part in plan.parts),
        sum(item.nbytes for item in tensors),
        tuple(map(sum, zip(*([file.nbytes for file in part.layout.files] for part in plan.parts), strict=True))),
        sum(file.nbytes for file in plan.last),
        workers,
        memory_nbytes(1, threads),
        seconds,
        (
            *([replaces] if replaces else []),
            *plan.notes,
            *(note for part in plan.parts for note in source_notes(part.source, part.selection, unproven)),
            *leftover_notes(plan.target),
        ),
        published,
        tuple(part.name for part in plan.parts if part.name),
        tuple(plan.following.sizes),
        plan.following.nbytes,
        sum(part.selection.n_cast for part in plan.parts),
        dict(sorted(lost.items())),
    )
