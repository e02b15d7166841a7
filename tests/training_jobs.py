"""Small jobs that the tests of dcptool.training run on forked ranks: models of every parallelism, damaged disks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

WIDTH, HIDDEN = 8, 12


class Box:
    """A stateful thing that holds any dict."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def build(kind: str = "plain", seed: int = 0, hidden: int = HIDDEN) -> nn.Module:
    """A model: "plain", "ddp", "fsdp" or "fsdp+tp" (two ranks of tensor parallelism)."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("up", nn.Linear(WIDTH, hidden))
    model.add_module("act", nn.Tanh())
    model.add_module("down", nn.Linear(hidden, 1))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        if kind == "fsdp+tp":
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Take step number `step`, the same for any number of ranks, and return the loss."""
    inputs = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step))
    loss = (model(inputs) - inputs[:, :1]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def job(kind: str = "plain", seed: int = 0, **more):
    """A model, its optimizer and the state of both; `more` as of TrainState."""
    from dcptool.training import TrainState

    hidden = more.pop("hidden", HIDDEN)
    model = build(kind, seed, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return model, optimizer, TrainState(model, optimizer, **more)


def whole(model: nn.Module) -> dict[str, list[float]]:
    """Every weight as numbers, put together from all ranks."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    found = get_model_state_dict(model)
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).tolist() for name, t in found.items()}
