"""Models of every parallelism, optimizers of several kinds and moving averages, for the jobs of many lives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW, Optimizer

WIDTH, HIDDEN, VOCAB = 8, 12, 11


class Row(NamedTuple):
    """One kind of job.

    Attributes:
        shape: "ddp", "fsdp", "hsdp", "tp" or "fsdp+tp" (two ranks of tensor parallelism).
        worlds: numbers of ranks that it may have.
        optimizer: "adamw", "muon", "eight" (8-bit codes, one scale for a tensor) or "eight-local" (one for a shard).
        ema: "" for none, "eager", or "lazy": made after the first step.
        batchnorm, tied, tensor_lr: what is special.
        own_data: whether ranks read loaders and random numbers of their own; else data are a function of the step.
    """

    shape: str
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    optimizer: str = "adamw"
    ema: str = ""
    batchnorm: bool = False
    tied: bool = False
    tensor_lr: bool = False
    own_data: bool = True


ROWS = {
    "fsdp": Row("fsdp"),
    "ddp": Row("ddp"),
    "hsdp": Row("hsdp", (2, 4)),
    "tp": Row("tp", (1, 2, 4), own_data=False),
    "fsdp+tp": Row("fsdp+tp", (2, 4), own_data=False),
    "fsdp-muon": Row("fsdp", optimizer="muon"),
    "ddp-muon-ema": Row("ddp", optimizer="muon", ema="eager"),
    "fsdp-eight": Row("fsdp", optimizer="eight"),
    "fsdp-tied-ema": Row("fsdp", tied=True, ema="eager"),
    "ddp-tensor-lr": Row("ddp", tensor_lr=True),
    "ddp-batchnorm": Row("ddp", batchnorm=True),
    # What only one rank has is for the same number of ranks.
    "fsdp-batchnorm": Row("fsdp", (2,), batchnorm=True),
    "fsdp-eight-local": Row("fsdp", (3,), optimizer="eight-local"),
    "fsdp-lazy-ema": Row("fsdp", ema="lazy"),
}


class Net(nn.Module):
    """Embedding, one residual block, output: with tied weights, with BatchNorm, and with a parameter of 3 elements."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if row.batchnorm else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Parameter(torch.ones(3))  # of 4 ranks one has nothing of it
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        if row.tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + noise
        return self.out(x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gate.sum())


def build(row: Row) -> nn.Module:
    """The model, the same on every rank, wrapped or cut as the row says."""
    torch.manual_seed(0)
    model, world = Net(row), dist.get_world_size()
    if row.shape == "ddp":  # else its buckets, and with them the order of sums, change after the first step of a life
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    sizes = {"fsdp": (world, 1), "hsdp": (2, world // 2), "tp": (1, world), "fsdp+tp": (world // 2, 2)}[row.shape]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
    if "tp" in row.shape:
        parallelize_module(model, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if row.shape != "tp":
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh if row.shape == "hsdp" else mesh["a"])
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank has of `like`, without any collective."""
    if not isinstance(like, DTensor):
        return full.clone()
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        full = full.narrow(dim, min(offset, full.shape[dim]), size)
    return full.clone()


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal (Newton-Schulz), as Muon does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                x = whole(state["momentum"])
                x = x / (x.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                local(parameter).add_(cut(x, parameter), alpha=-float(group["lr"]))


class Eight(Optimizer):
    """Momentum in 8-bit codes: with one scale for a tensor, the same on all ranks, or with one for this rank's part."""

    def __init__(self, params: Any, lr: float, apart: bool) -> None:
        super().__init__(params, {"lr": lr, "apart": apart})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, mine = self.state[parameter], local(parameter)
                if not state:
                    like = mine if group["apart"] else parameter
                    state["codes"] = torch.full_like(like, 128, dtype=torch.uint8)
                    state["scale"] = torch.zeros(())
                momentum = (local(state["codes"]).float() - 128) * state["scale"] * 0.9 + local(parameter.grad)
                scale = (momentum.abs().max() if momentum.numel() else torch.zeros(())) / 127
                if isinstance(parameter, DTensor) and not group["apart"]:
                    dist.all_reduce(scale, dist.ReduceOp.MAX)
                state["scale"].copy_(scale)
                local(state["codes"]).copy_((momentum / scale.clamp(min=1e-30)).round() + 128)
                mine.sub_(momentum, alpha=float(group["lr"]))


def optimizers_of(row: Row, model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    if row.optimizer == "muon":
        matrices = [*model_of(model).up.parameters(), *model_of(model).down.parameters()]
        matrices = [parameter for parameter in matrices if parameter.ndim == 2]
        others = [one for one in parameters if not any(one is matrix for matrix in matrices)]
        return [Muon(matrices, 0.02), AdamW(others, 0.01)]
    if row.optimizer.startswith("eight"):
        return [Eight(parameters, 0.01, row.optimizer.endswith("local"))]
    if row.tensor_lr:
        return [AdamW(parameters, torch.tensor(0.01), foreach=False)]
    return [AdamW(parameters, 0.01)]


def model_of(model: nn.Module) -> Any:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


class Ema:
    """Moving averages of the parameters, made at once or after the first step."""

    def __init__(self, model: nn.Module, lazy: bool) -> None:
        self.model = model
        self.shadow: dict[str, torch.Tensor] | None = None if lazy else self._now()

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        if self.shadow is None:
            self.shadow = self._now()
        for name, parameter in self.model.named_parameters():
            local(self.shadow[name]).lerp_(local(parameter), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]
