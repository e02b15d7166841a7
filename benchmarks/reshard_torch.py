"""Run under torchrun with N processes: reshard with torch alone, by loading into N shards and saving them."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def main(source: str, target: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for fqn, entry in dcp.FileSystemReader(source).read_metadata().state_dict_metadata.items():
        whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        if not whole.ndim:
            state[fqn] = torch.empty(entry.size, dtype=entry.properties.dtype)
            continue
        size, _ = compute_local_shape_and_global_offset(entry.size, mesh, [Shard(0)])
        local = torch.empty(size, dtype=entry.properties.dtype)
        state[fqn] = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
