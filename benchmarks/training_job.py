"""Run under torchrun: a training job that saves, saves in the background, loads and restores, by dcptool or by torch.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.training_job dcptool FOLDER 5

Printed is a JSON object: per measure the seconds of all rounds, those of the slowest rank, and the peak resident bytes
of all ranks together meanwhile. One more round of each comes first and is not counted. Every save of both sides counts
until one older step is deleted; between rounds nothing is on its way.

    save          until the step is saved
    return        until `async_save` is back
    next          the step of training after it: forward, backward, optimizer
    stall         `return`, and what the step takes longer than one without a save
    total         from the call of `async_save` until its step is saved and an older one is deleted, training meanwhile
    load          `dcp.load` into the state of the job
    restore       the same, and the state handed to model and optimizer

torch's side saves by `dcp.async_save` without options, and once more, as `return-stager` and so on, with a
`DefaultStager` that copies in a thread.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dcptool.training import CheckpointManager, Reader, TrainState

HIDDEN, LAYERS, BATCH = 1024, 12, 8
"""Twelve weights of 16 MiB, and two moments each: 604 MB to save, over all ranks."""


class Job:
    """A model, its optimizer, and steps of training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        widths = (HIDDEN, 4 * HIDDEN)
        layers = [nn.Linear(widths[i % 2], widths[1 - i % 2], bias=False) for i in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        if dist.get_world_size() > 1:
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(BATCH, HIDDEN)

    def step(self, before_optimizer: Callable[[], None] = lambda: None) -> None:
        """Take a step of training."""
        self.model(self.batch).square().mean().backward()
        before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch's recipe of an `AppState` does."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Dcptool:
    """Saves by the manager, loads through its reader."""

    variants = ("",)

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder, self.n_saves = job, folder, 0
        self.manager = CheckpointManager(folder, keep=1)
        self.state = TrainState(job.model, job.optimizer)

    def save(self) -> None:
        self.n_saves += 1
        self.manager.save(self.n_saves, self.state)

    def async_save(self, variant: str) -> tuple[Callable[[], None], Callable[[], object]]:
        """Save in the background; return what the optimizer must wait for, and what waits for all of it."""
        self.n_saves += 1
        saving = self.manager.async_save(self.n_saves, self.state)
        return (lambda: None), saving.result  # the manager has the optimizer wait

    def load(self, state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=Reader(self.folder / f"step_{self.n_saves}"))

    def restore(self) -> None:
        assert self.manager.restore(self.state)

    def close(self) -> None:
        self.manager.close()


class Torch:
    """Does the same with what torch has."""

    variants = ("", "-stager")

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder, self.n_saves = job, folder, 0
        self.stager: DefaultStager | None = None
        self.group = dist.new_group(backend="gloo")

    def save(self) -> None:
        dcp.save(self.job.state_dict(), checkpoint_id=self._next())
        self._delete_one()

    def async_save(self, variant: str) -> tuple[Callable[[], object], Callable[[], object]]:
        state = self.job.state_dict()
        if not variant:
            saving = dcp.async_save(state, checkpoint_id=self._next(), process_group=self.group)
            return (lambda: None), lambda: (saving.result(), self._delete_one())
        if self.stager is None:
            self.stager = DefaultStager(StagingOptions(False, False, True, False))  # all but the thread needs a GPU
        begun = dcp.async_save(state, checkpoint_id=self._next(), process_group=self.group, async_stager=self.stager)
        return begun.staging_completion.result, lambda: (begun.upload_completion.result(), self._delete_one())

    def _next(self) -> Path:
        self.n_saves += 1
        return self.folder / f"step_{self.n_saves}"

    def _delete_one(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / f"step_{self.n_saves - 1}", ignore_errors=True)

    def load(self, state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder / f"step_{self.n_saves}"))

    def restore(self) -> None:
        state = self.job.state_dict()
        self.load(state)
        self.job.load_state_dict(state)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


def timed(function: Callable[[], object]) -> float:
    """Return the seconds a call takes, begun by all ranks at once."""
    dist.barrier()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def rounds_of_async_save(side: Dcptool | Torch, variant: str, n_rounds: int) -> dict[str, list[float]]:
    """Save in the background and train; return the seconds by measure."""
    found: dict[str, list[float]] = {name: [] for name in ("return", "next", "alone", "total")}
    for _ in range(n_rounds):
        found["alone"].append(timed(side.job.step))
        dist.barrier()
        began = time.perf_counter()
        staged, saved = side.async_save(variant)
        returned = time.perf_counter()
        side.job.step(staged)
        stepped = time.perf_counter()
        saved()
        found["return"].append(returned - began)
        found["next"].append(stepped - returned)
        found["total"].append(time.perf_counter() - began)
    alone = statistics.median(found.pop("alone"))
    # No step is shorter because of a save: that is noise.
    found["stall"] = [back + max(0, step - alone) for back, step in zip(found["return"], found["next"], strict=True)]
    return {f"{name}{variant}": seconds for name, seconds in found.items()}


class Peak:
    """Adds to what was measured inside it how much memory all ranks together took at most."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results

    def __enter__(self) -> dict[str, list[float]]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier measure has freed is not counted in this one
        Path("/proc/self/clear_refs").write_text("5")  # begin to look for the highest resident size anew
        self.found: dict[str, list[float]] = {}
        return self.found

    def __exit__(self, *_: object) -> None:
        status = Path("/proc/self/status").read_text()
        mine = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self.found, mine))
        for name in self.found:
            slowest = [max(rounds) for rounds in zip(*(found[name] for found, _ in everywhere), strict=True)]
            self.results[name] = {"seconds": slowest[1:], "nbytes": sum(nbytes for _, nbytes in everywhere)}


def main(name: str, folder: str, n_rounds: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    job = Job()
    job.step()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    dist.barrier()
    side = {"dcptool": Dcptool, "torch": Torch}[name](job, Path(folder))
    results: dict[str, Any] = {}
    with Peak(results) as found:
        found["save"] = [timed(side.save) for _ in range(n_rounds + 1)]
    with Peak(results) as found:
        state = job.state_dict()
        found["load"] = [timed(lambda: side.load(state)) for _ in range(n_rounds + 1)]
    with Peak(results) as found:
        found["restore"] = [timed(side.restore) for _ in range(n_rounds + 1)]
    for variant in side.variants:
        with Peak(results) as found:
            found.update(rounds_of_async_save(side, variant, n_rounds + 1))
    side.close()
    if dist.get_rank() == 0:
        print(json.dumps(results))
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
