"""A small job of every parallelism and optimizer that is killed by itself, at a step and so many milliseconds later.

Rank 0 writes a line of JSON for all that happens to a log. The same job runs without dcptool, as the reference: there a
change of the number of ranks goes over `torch.save` of whole tensors, cut by `compute_local_shape_and_global_offset`.

    torchrun --nproc-per-node 2 tests/training/lives_job.py '{"row": "ddp", "run": "run", "log": "log", "life": 0, …}'
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import MultiStepLR, StepLR

from tests.training.lives_model import ROWS, VOCAB, WIDTH, Ema, Row, build, cut, local, model_of, optimizers_of, whole

BATCH, INTERVAL, KEEP = 6, 3, 2
PATIENCE = 90
"""Seconds after which a job that hangs says where, and ends."""


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
    log(done=True)


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
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(ROWS[settings["row"]])
    (reference if "source" in settings else live)(job, settings)
    del job  # DDP has the process group: it would be freed after its end, when its threads can wait for this one
    gc.collect()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run(sys.argv[1])
