"""Save one state in many layouts, each by a real process group of its size; load them, and train on.

Each of N_PROCESSES ranks of one group calls `save` and `load` (see `forks.run_ranks`); the first of them form the group
of a layout.

The state is the same in all layouts, bit for bit: parameters are drawn whole and then sharded, and gradients are a
function of the parameter, so that AdamW, which works element by element, does the same everywhere.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

N_PROCESSES = 8
LAYOUTS: dict[str, tuple[int, ...]] = {
    "fsdp1": (1,),
    "fsdp2": (2,),
    "fsdp3": (3,),
    "fsdp4": (4,),
    "fsdp6": (6,),
    "fsdp7": (7,),
    "fsdp8": (8,),
    "hsdp2x4": (2, 4),
    "tp2x3": (2, 3),
    "tp2x2": (2, 2),
}


class Block(nn.Module):
    """Uneven, tiny and odd tensors on purpose: 5 rows, 1 row, 0 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 24)
        self.down = nn.Linear(24, 10, bias=False)
        self.norm = nn.LayerNorm(5)
        self.one = nn.Parameter(torch.zeros(1, 3))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))
        return self.norm(x.reshape(-1, 5)).reshape(x.shape) * self.one.sum()


def build(mesh: DeviceMesh, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    if kind == "tp":
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard_mesh = mesh["dp"]
    else:
        shard_mesh = mesh
    for block in model:
        fully_shard(block, mesh=shard_mesh)
    fully_shard(model, mesh=shard_mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take an AdamW step with gradients that do not depend on the layout."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 1.0
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optim": optim_state,
        "train": {"step": 2, "list": [1, {"a": "b"}], "none": None},
        "replica": torch.arange(12.0).reshape(3, 4),
        f"dl.rank{rank}": {"position": rank},
    }


def mesh_of(name: str) -> tuple[DeviceMesh, Any] | None:
    """Make the mesh of a layout over the first ranks and return it with its group; None on ranks outside."""
    sizes = LAYOUTS[name]
    count = int(torch.tensor(sizes).prod())
    group = dist.new_group(list(range(count)))
    names = {"fsdp": ("dp",), "hsdp": ("rep", "shard"), "tp2x": ("dp", "tp")}[name[:4]]
    grid = torch.arange(count).reshape(sizes)
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=names)  # every rank makes it: its groups are collective
    return (mesh, group) if dist.get_rank() < count else None


def save(_: int, out: Path) -> None:
    """Save the state in every layout."""
    for name in LAYOUTS:
        found = mesh_of(name)
        if found:
            mesh, group = found
            model, optimizer = build(mesh, "tp" if name.startswith("tp") else "fsdp")
            for _ in range(2):
                step(model, optimizer)
            dcp.save(state_of(model, optimizer, dist.get_rank()), checkpoint_id=out / name, process_group=group)
        dist.barrier()


def digest(state: dict[str, Any]) -> dict[str, str]:
    """Return a hash for every tensor of a state, whole; objects as text."""
    found = {}
    flat, _ = dcp._nested_dict.flatten_state_dict(state)
    for fqn, value in flat.items():
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            data = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
            found[fqn] = hashlib.sha256(data).hexdigest()
        elif not fqn.startswith("dl."):
            found[fqn] = repr(value)
    return found


def load(_: int, paths: dict[str, list[Path]]) -> dict[tuple[str, Path], dict[str, Any]]:
    """For each layout load checkpoints into a fresh model, and train three steps on: the state, and the losses."""
    found = {}
    for name, sources in paths.items():
        here = mesh_of(name)
        for source in sources if here else ():
            mesh, group = here
            model, optimizer = build(mesh, "tp" if name.startswith("tp") else "fsdp")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            step(model, optimizer)
            state = state_of(model, optimizer, 0)
            state["train"] = {"step": 0, "list": [0, {"a": ""}], "none": 0}
            state["replica"].zero_()
            del state["dl.rank0"]
            dcp.load(state, checkpoint_id=source, process_group=group)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
            losses = []
            for _ in range(3):
                x = torch.linspace(-1, 1, 40).reshape(4, 10)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().item().hex())
            found[name, source] = {"state": digest(state), "losses": losses}
        dist.barrier()
    return found
