"""A step saved on 2 ranks, resharded as a user types it, is gone on from by its trainer with nothing else done.

Slow, and run by hand: DCPTOOL_TRAINERS names the python of an environment with torch and the trainers; tests of those
it lacks are skipped. What a trainer does with the step itself on as many ranks is what it must do with the output, to
the bit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import dcptool
from dcptool.ops.latest import find_latest
from dcptool.ops.verify.verdict import Level, State, VerifyOptions
from tests.conftest import run_process

PYTHON = os.environ.get("DCPTOOL_TRAINERS", "")
JOBS = Path(__file__).parent / "jobs"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
SAVED = 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DCPTOOL_TRAINERS names no python with trainers"),
]


class Trainer(NamedTuple):
    """A job, the package it needs, and where under its run it saves the step."""

    package: str
    job: str
    step: str
    arguments: tuple[str, ...] = ()


TRAINERS = {
    "lightning-fsdp": Trainer("lightning", "resume_lightning.py", "epoch=0-step=2.ckpt", ("fsdp",)),
    "lightning-model-parallel": Trainer("lightning", "resume_lightning.py", "epoch=0-step=2.ckpt", ("model_parallel",)),
    "accelerate": Trainer("accelerate", "resume_accelerate.py", "checkpoints/checkpoint_0"),
    "trainer": Trainer("transformers", "resume_trainer.py", "checkpoint-2"),
    "torchtitan": Trainer("torchtitan", "resume_torchtitan.py", "checkpoint/step-2"),
    "megatron": Trainer("megatron", "resume_megatron.py", "iter_0000002"),
}


def python(*arguments: object) -> None:
    command = [PYTHON, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **SETTINGS}, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def job(trainer: Trainer, n_ranks: int, run: Path, out: Path, *step: Path) -> list[list]:
    """Rows of what the job saw in each step: the step's number, its loss, then its rate and where it is in the data."""
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n_ranks)
    python(*launched, JOBS / trainer.job, *trainer.arguments, run, out, *step)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Gives for a trainer its run directory, and the rows of the job that made it and went on."""
    there: dict[str, tuple[Path, list[list]]] = {}

    def of(name: str) -> tuple[Path, list[list]]:
        trainer = TRAINERS[name]
        if subprocess.run([PYTHON, "-c", f"import {trainer.package}"], capture_output=True, check=False).returncode:
            pytest.skip(f"no {trainer.package} there")
        if name not in there:
            folder = tmp_path_factory.mktemp(name)
            there[name] = folder / "run", job(trainer, 2, folder / "run", folder / "whole.json")
        return there[name]

    return of


def typed(*words: object) -> str:
    done = run_process(*words)
    assert done.returncode == 0, done.stderr
    return done.stderr


def require_resumable(step: Path) -> None:
    [verdict] = dcptool.verify(step, VerifyOptions(level=Level.DEEP)).verdicts
    assert (verdict.state, verdict.resumable) == (State.COMPLETE, True), verdict.findings
    assert find_latest(step.parent).path == str(step)


@pytest.mark.parametrize("n_ranks", [1, 3, 4])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_resharded_step_is_gone_on_from_as_the_step_itself(name, n_ranks, saved, tmp_path):
    trainer = TRAINERS[name]
    run, whole = saved(name)
    step, out = run / trainer.step, tmp_path / "resharded" / trainer.step
    typed("reshard", "--world-size", n_ranks, step, out)
    require_resumable(out)
    wanted = job(trainer, n_ranks, tmp_path / "a", tmp_path / "wanted.json", step)
    found = job(trainer, n_ranks, tmp_path / "b", tmp_path / "found.json", out)
    print(name, n_ranks, *(f"{row[1]:.6f}" for row in found))
    assert found == wanted
    for row, same in zip(found, whole[SAVED:], strict=True):  # other sums of the same numbers
        assert row[:2] == [same[0], pytest.approx(same[1], rel=1e-4)]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_copied_step_is_gone_on_from_as_the_step_itself(name, saved, tmp_path):
    trainer = TRAINERS[name]
    run, whole = saved(name)
    copied = tmp_path / "copied" / trainer.step
    typed("copy", run / trainer.step, copied)
    require_resumable(copied)
    found = job(trainer, 2, tmp_path / "run", tmp_path / "found.json", copied)
    assert [row[:2] for row in found] == [row[:2] for row in whole[SAVED:]]


@pytest.mark.parametrize("n_ranks", [0, 1, 3])
@pytest.mark.parametrize("name", ["accelerate", "trainer"])
def test_what_is_made_for_transformers_is_loaded_by_it(name, n_ranks, saved, tmp_path):
    """Of the step itself, and of what resharding made of it: its loss is the one that the trainer itself had."""
    run, whole = saved(name)
    step = run / TRAINERS[name].step
    if n_ranks:
        typed("reshard", "--world-size", n_ranks, step, tmp_path / "resharded" / step.name)
        step = tmp_path / "resharded" / step.name
    model = tmp_path / "model"
    typed("convert", "--to", "safetensors", "--strip-prefix", "model.", step / "pytorch_model_fsdp_0", model)
    if name == "trainer":  # a sharded step of it has none
        shutil.copy(run / "model" / "config.json", model)
    python(JOBS / "pretrained.py", model, SAVED, tmp_path / "out.json")
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["wrong"] == []
    wanted = whole[SAVED][1] if name == "accelerate" else json.loads((run / "loss.json").read_text())[0]
    assert told["loss"] == pytest.approx(wanted, rel=1e-5)
