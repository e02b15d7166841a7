"""A small job of every parallelism and optimizer that is killed by itself, at a step and so many milliseconds later.

Rank 0 writes a line of JSON for all that happens to a log. The same job runs without dcptool, as the reference: there a
change of the number of ranks goes over `torch.save` of whole tensors, cut by `compute_local_shape_and_global_offset`.

    torchrun --nproc-per-node 2 tests/training/lives_job.py '{"row": "ddp", "run": "run", "log": "log", "life": 0, …}'
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import MultiStepLR, StepLR

WIDTH, HIDDEN, VOCAB, BATCH = 8, 12, 11, 6
INTERVAL, KEEP = 3, 2


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


class Kept:
    """A few plain values: the loader's place, or the job's history."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Job:
    """Everything of one rank: what is trained, and what is saved of it."""

    def __init__(self, row: Row) -> None:
        self.row, self.rank, self.world = row, dist.get_rank(), dist.get_world_size()
        self.model = build(row)
        self.optimizers = optimizers_of(row, self.model)
        first = self.optimizers[0]
        self.scheduler = MultiStepLR(first, [4, 9, 15], 0.7) if row.tensor_lr else StepLR(first, 3, 0.9)
        self.loader = Kept(place=0)
        self.history = Kept(worlds=[], step=0)
        self.ema = Ema(model_of(self.model), row.ema == "lazy") if row.ema else None
        torch.manual_seed(1000 + self.rank)

    def step(self, number: int, before: Any = lambda: None) -> list[str]:
        """Take a step; `before` is called before buffers and averages change. Returns each rank's loss, as hex."""
        own, self.loader.values["place"] = self.row.own_data, self.loader.values["place"] + 1
        index = self.rank if own else self.rank // 2 if self.row.shape == "fsdp+tp" else 0
        place = self.loader.values["place"] if own else number
        tokens = torch.randint(VOCAB, (BATCH,), generator=torch.Generator().manual_seed(97 * place + index))
        noise = 0.01 * torch.randn(BATCH, WIDTH) if own else torch.zeros(BATCH, WIDTH)
        before()
        loss = nn.functional.cross_entropy(self.model(tokens, noise), (tokens * 3 + 1) % VOCAB)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()
        if self.ema:
            self.ema.update()
        self.history.values["step"] = number
        return gathered(loss.item().hex())

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(model_of(self.model).named_parameters())

    def picture(self) -> dict[str, Any]:
        """A digest of every part, tensors put together: one, or where ranks differ one for each."""
        parts: dict[str, Any] = {}
        for name, parameter in self.named():
            parts[f"model.{name}"] = whole(parameter.detach())
            for number, optimizer in enumerate(self.optimizers):
                for key, value in optimizer.state.get(parameter, {}).items():
                    parts[f"optim.{number}.{name}.{key}"] = whole(value) if torch.is_tensor(value) else value
        for number, optimizer in enumerate(self.optimizers):
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            parts[f"groups.{number}"] = groups
        for name, value in (self.ema.shadow or {}).items() if self.ema else ():
            parts[f"ema.{name}"] = whole(value)
        parts |= {f"buffer.{name}": buffer for name, buffer in model_of(self.model).named_buffers()}
        parts |= {"scheduler": self.scheduler.state_dict(), "loader": self.loader.values, "rng": torch.get_rng_state()}
        everywhere = gathered({name: digest(value) for name, value in parts.items()})
        names = sorted({name for found in everywhere for name in found})
        ranks = {name: [found.get(name) for found in everywhere] for name in names}
        return {name: found[0] if len(set(found)) == 1 else found for name, found in ranks.items()}

    def dump(self, folder: str) -> None:
        """Keep all of it for the same job with another number of ranks."""
        states = [
            {
                name: {key: whole(v) if torch.is_tensor(v) else v for key, v in optimizer.state[parameter].items()}
                for name, parameter in self.named()
                if optimizer.state.get(parameter)
            }
            for optimizer in self.optimizers
        ]
        groups = [[{**group, "params": None} for group in optimizer.param_groups] for optimizer in self.optimizers]
        shared = {
            "model": {name: whole(parameter.detach()) for name, parameter in self.named()},
            "states": states,
            "groups": groups,
            "ema": self.ema and self.ema.shadow and {name: whole(value) for name, value in self.ema.shadow.items()},
            "scheduler": self.scheduler.state_dict(),
        }
        buffers = dict(model_of(self.model).named_buffers())
        os.makedirs(folder, exist_ok=True)
        if self.rank == 0:
            torch.save(shared, f"{folder}/shared.pt")
        mine = {"buffers": buffers, "loader": self.loader.values, "rng": torch.get_rng_state()}
        torch.save(mine, f"{folder}/rank{self.rank}.pt")

    @torch.no_grad()
    def take_over(self, folder: str) -> None:
        """Go on from what `dump` kept; a rank of a number that was not there has a loader and random numbers anew."""
        shared = torch.load(f"{folder}/shared.pt", weights_only=False)
        parameters = dict(self.named())
        for name, parameter in parameters.items():
            local(parameter).copy_(cut(shared["model"][name], parameter))
        for optimizer, states, groups in zip(self.optimizers, shared["states"], shared["groups"], strict=True):
            for name, values in states.items():
                optimizer.state[parameters[name]] = {key: like(v, parameters[name]) for key, v in values.items()}
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: copy.deepcopy(value) for key, value in kept.items() if key != "params"})
        self.scheduler.load_state_dict(shared["scheduler"])
        if self.ema and shared["ema"]:
            self.ema.shadow = {name: like(value, parameters[name]) for name, value in shared["ema"].items()}
        own = Path(folder, f"rank{self.rank}.pt")
        mine = torch.load(own if own.exists() else f"{folder}/rank0.pt", weights_only=False)
        for name, buffer in model_of(self.model).named_buffers():
            buffer.copy_(mine["buffers"][name])
        if own.exists():
            self.loader.values = mine["loader"]
            torch.set_rng_state(mine["rng"])


def like(value: Any, parameter: torch.Tensor) -> Any:
    """A part of an optimizer's state, cut as its parameter if it has the same shape."""
    if not torch.is_tensor(value) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return copy.deepcopy(value)
    part, mesh = cut(value, parameter), parameter.device_mesh
    return DTensor.from_local(
        part, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(value: Any) -> str:
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Values whose `repr` tells all of them apart, those of tensors too."""
    if torch.is_tensor(value):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return sorted(((repr(key), plain(part)) for key, part in value.items()), key=lambda pair: pair[0])
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def log_of(path: str, life: Any) -> Any:
    """A function that appends a line to the log, on rank 0; what is written outlives a kill."""
    if dist.get_rank():
        return lambda **_: None
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    return lambda **said: os.write(file, json.dumps({"life": life, **said}).encode() + b"\n")


def die_after(seconds: float, pid: int) -> None:
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def watch_agent(agent: int, linger: float) -> None:
    """Die some time after torchrun has: what is left of such a job goes on for a while."""

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(0.05)
        time.sleep(linger)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def reference(job: Job, settings: dict[str, Any]) -> None:
    """Train from one step to another without dcptool; pictures and dumps where they are asked for."""
    log, start = log_of(settings["log"], "reference"), settings["start"]
    if settings["source"]:
        job.take_over(settings["source"])
    for number in range(start, settings["until"] + 1):
        if number > start:
            log(step=number, losses=job.step(number))
        if number in settings["pictures"]:
            log(picture=job.picture(), at=number)
        if number in settings["dumps"]:
            job.dump(f"{settings['folder']}/{number}")
    assert "dcptool" not in sys.modules or not settings["alone"]


def live(job: Job, settings: dict[str, Any]) -> None:
    """Restore, train and save until the kill that is meant for this life, or up to a step."""
    from dcptool.training import CheckpointManager, RandomState, TrainState

    log, kill, agent = log_of(settings["log"], settings["life"]), settings["kill"], os.getppid()
    watch_agent(agent, settings["linger"] * (1 + job.rank))
    pid = agent if kill and kill["victim"] == "agent" else os.getpid()
    mine = kill and job.rank == (0 if kill["victim"] == "agent" else kill["victim"])
    if mine and kill["at"] == 0:
        die_after(kill["delay"], pid)
    extra = {"ema": job.ema} if job.ema else {}
    per_rank = {"loader": job.loader, "rng": RandomState()}
    state = TrainState(job.model, job.optimizers, job.scheduler, per_rank=per_rank, history=job.history, **extra)
    with CheckpointManager(settings["run"], KEEP) as manager:
        log(looking=True)
        restored = manager.restore(state)
        start = restored.step if restored else 0
        worlds = job.history.values["worlds"]
        if not worlds or worlds[-1][0] != job.world:
            job.history.values["worlds"] = worlds = [*worlds, [job.world, start]]
        log(resumed=start, worlds=worlds, step_in_state=job.history.values["step"], picture=job.picture())
        last = start + settings["steps"]
        for number in range(start + 1, last + 1):
            log(step=number, losses=job.step(number, manager.wait_staged))
            if mine and number == start + kill["at"]:
                die_after(kill["delay"], pid)
            if number % INTERVAL == 0:
                log(saving=number)
                getattr(manager, settings["how"])(number, state)
                log(saved=number)
        manager.wait()
        log(ended=last, picture=job.picture())


def run(text: str) -> None:
    """Be one rank of one life, or of the reference; `text` is JSON."""
    settings = json.loads(text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(ROWS[settings["row"]])
    (reference if "source" in settings else live)(job, settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1])
