"""Save as several ranks in one process: torch's own planner and writer, called in turn for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Shard(torch.Tensor):
    """What one rank holds of a tensor, as the checkpoint planner sees a DTensor; needs no process group."""

    offsets: tuple[int, ...]
    whole: torch.Size

    @staticmethod
    def of(whole: torch.Tensor, rank: int, count: int, dim: int = 0) -> Shard:
        """Part `rank` of `count` along one dimension, cut as torch.chunk does; later parts may be empty."""
        step = -(-whole.shape[dim] // count)
        start = min(rank * step, whole.shape[dim])
        size = min(step, whole.shape[dim] - start)
        shard = whole.narrow(dim, start, size).clone().as_subclass(Shard)
        shard.offsets = tuple(start if d == dim else 0 for d in range(whole.ndim))
        shard.whole = whole.shape
        return shard

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), self.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self), self.whole)
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def save(path: Path, *states: dict[str, Any], lowest_rank: bool = False, **options: Any) -> Path:
    """Save one state dict per rank into one checkpoint; replicas are stored once, as torch decides.

    Args:
        path: of the new folder.
        states: what each rank holds, rank 0 first.
        lowest_rank: replicas go to the lowest rank that has them.
        options: of `FileSystemWriter`.
    """
    planners = [DefaultSavePlanner(dedup_save_to_lowest_rank=lowest_rank) for _ in states]
    writers = [FileSystemWriter(path, **options) for _ in states]
    local = []
    for rank, (state, planner, writer) in enumerate(zip(states, planners, writers, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(local)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for plan, planner, writer in zip(plans, planners, writers, strict=True)
    ]
    writers[0].finish(metadata, results)
    return path


def save_apart(path: Path, *states: dict[str, Any]) -> Path:
    """Save as `dcp.save(use_collectives=False)` does on several ranks: each by itself, with metadata of its own."""
    for rank, state in enumerate(states):
        planner, writer = DefaultSavePlanner(), FileSystemWriter(path)
        planner.set_up_planner(state, is_coordinator=True)
        writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return path
