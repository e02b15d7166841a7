"""Run under torchrun: save a state like a model's with its Adam moments, of a given size, with torch's own writer.

Every tensor is a DTensor of random numbers: Shard(0) over all ranks, or [Shard(0), Shard(1)] over a 2×2 mesh.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

HIDDEN = 1024


def main(target: str, mib: int, layout: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    world_size = dist.get_world_size()
    shape, placements = ((2, 2), [Shard(0), Shard(1)]) if layout == "mesh" else ((world_size,), [Shard(0)])
    mesh = init_device_mesh("cpu", shape)
    state = {}
    n_layers = max(1, mib // 48)  # 4 × HIDDEN × HIDDEN float32 values are 16 MiB, three times
    for layer in range(n_layers):
        for prefix in ("model.", "optim.state.", "optim.state."):
            kind = ".exp_avg" if f"optim.state.layers.{layer}.mlp.weight.exp_avg" not in state else ".exp_avg_sq"
            name = f"{prefix}layers.{layer}.mlp.weight{kind if prefix != 'model.' else ''}"
            size = (4 * HIDDEN // shape[0], HIDDEN // (shape[1] if len(shape) > 1 else 1))
            state[name] = DTensor.from_local(torch.randn(size), mesh, placements)
    state["step"] = torch.tensor(1)
    dcp.save(state, checkpoint_id=target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
