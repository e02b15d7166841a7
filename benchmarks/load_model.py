"""Load all of a checkpoint with dcp.load, through `training.Reader` or torch's FileSystemReader; alone or by torchrun.

Each rank loads its share of every tensor, Shard(0). The seconds that dcp.load took on rank 0 are printed.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcptool.training import Reader


def main(path: str, reader: str) -> None:
    alone = not dist.is_torchelastic_launched()
    if not alone:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, torch.Tensor] = {}
    for fqn, entry in Reader(path).checkpoint.tensors.items():
        dtype = getattr(torch, entry.dtype)
        if alone or not entry.shape:
            state[fqn] = torch.empty(entry.shape, dtype=dtype)
        else:
            local = torch.empty((entry.shape[0] // dist.get_world_size(), *entry.shape[1:]), dtype=dtype)
            state[fqn] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    began = time.perf_counter()
    dcp.load(state, storage_reader=Reader(path) if reader == "dcptool" else dcp.FileSystemReader(path), no_dist=alone)
    if alone or dist.get_rank() == 0:
        print(f"{time.perf_counter() - began:.3f}")
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
