"""fixtures/train.py: a real FSDP2 job under torchrun whose checkpoints dcptool reads as torch does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import OLD, ROOT
from tests.conftest import run as cli

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

import dcptool  # noqa: E402


class Killed(NamedTuple):
    """A run directory and the losses, by step, that were printed before each of two kills."""

    folder: Path
    first: dict[int, float]
    resumed: dict[int, float]


def train(run_dir, ranks, *options):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(ROOT / "fixtures" / "train.py"), "--run-dir", str(run_dir), "--hidden", "16", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "SIGKILL" in done.stderr, done.stderr[-3000:]
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)}


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Killed:
    """A run killed twice: 4 ranks in the middle of saving step 4, then 2 resumed ranks when one dies saving step 6.

    Whole are step 2, by 4 ranks, and step 3, by 2. Of step 6 rank 1's file is cut; rank 0 may have finished its own.
    """
    folder = tmp_path_factory.mktemp("train") / "run"
    first = train(folder, 4, "--steps", "4", "--save-every", "2", "--die-in-save", "4")
    options = ("--steps", "6", "--save-every", "3", "--die-in-save", "6", "--die-rank", "1")
    return Killed(folder, first, train(folder, 2, *options, "--resume"))


@pytest.fixture
def run(killed, tmp_path) -> Path:
    """A copy of the run directory, with its file times."""
    return Path(shutil.copytree(killed.folder, tmp_path / "run"))


def age(*steps: Path) -> None:
    """Set the times of all files to long ago: no grace any more."""
    for step in steps:
        for file in step.iterdir():
            os.utime(file, (OLD, OLD))


def rows(stdout: str) -> dict[str, tuple[str, str]]:
    """The table that `prune` prints: step → plan and state."""
    found = re.findall(r"^(step_\d+) +(keep|DELETE) +(\S+) ", stdout, re.MULTILINE)
    return {step: (plan, state) for step, plan, state in found}


def left(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_a_run_killed_in_a_save_and_resumed_with_fewer_ranks(killed):
    run = killed.folder
    summary = dcptool.summarize(run)
    assert [(step.name, step.state.value, step.world_size) for step in summary.steps] == [
        ("step_2", "complete", 4),
        ("step_3", "complete", 2),
        ("step_4", "in-progress", None),
        ("step_6", "in-progress", None),
    ]
    assert "perhaps still being saved" in summary.steps[2].reason
    assert set(killed.first) == {1, 2, 3, 4}
    assert set(killed.resumed) == {3, 4, 5, 6}  # from step 2
    assert all(abs(killed.resumed[step] - killed.first[step]) < 1e-4 for step in (3, 4))


def test_dcptool_reads_the_run_as_torch_does(killed):
    step = killed.folder / "step_2"
    checkpoint = dcptool.open(step)
    state = {
        fqn: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for fqn, entry in checkpoint.tensors.items()
    }
    dcp.load(state, checkpoint_id=step, no_dist=True)
    for fqn, tensor in state.items():
        assert torch.equal(checkpoint.read_torch(fqn), tensor), fqn
    tensors = dcptool.summarize(step).checkpoints[0].tensors
    weight = next(tensor for tensor in tensors if "up.weight" in tensor.fqn)
    assert (weight.layout, weight.n_chunks) == ("Shard(0) ×4", 4)
    assert checkpoint.value("dl.rank3") == b'{"rank": 3, "batches": 2}'


def test_the_last_good_step_is_resumed_from(run):
    done = cli("latest", run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'step_3'}\n")
    assert re.findall(r"^(step_\d) is (\S+): ", done.stderr, re.MULTILINE) == [
        ("step_6", "in-progress"),
        ("step_4", "in-progress"),
    ]
    age(run / "step_4", run / "step_6")
    done = cli("latest", "--deep", run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'step_3'}\n")
    assert re.findall(r"^(step_\d) is incomplete: no \.metadata", done.stderr, re.MULTILINE) == ["step_6", "step_4"]
    assert dcptool.verify(run / "step_3", load=True).good


def test_what_is_missing_from_the_broken_steps_is_named(run):
    steps = [run / "step_4", run / "step_6"]
    done = cli("verify", run)
    assert done.returncode == 0  # they may still be in progress
    assert done.stdout.count("perhaps still being saved") >= 2
    age(*steps)
    done = cli("verify", run)
    assert done.returncode == 1
    for name, ranks in (("step_4", "ranks 0–3"), ("step_6", "ranks? [01](–1)?")):
        assert re.search(
            rf"^{name}: incomplete\n  error: no \.metadata, only data files of {ranks}: the save never finished",
            done.stdout,
            re.MULTILINE,
        )
    assert done.stdout.endswith(f"newest complete step: {run / 'step_3'}\n")
    # A copy of step 3's metadata does not make step 6 whole: rank 1's file was cut when it was killed.
    shutil.copy(run / "step_3" / ".metadata", run / "step_6")
    age(*steps)
    verdict = dcptool.verify(run / "step_6").verdicts[0]
    assert verdict.state.value == "incomplete"
    assert "__1_0.distcp" in [finding.file for finding in verdict.findings if finding.kind == "short-file"]
    refused = cli("mark", run / "step_6")
    assert refused.returncode == 3
    assert "step_6 is incomplete, not marked: __" in refused.stderr
    assert not (run / "step_6" / "_COMPLETE").exists()


def test_prune_keeps_the_good_one_and_what_is_being_written(run):
    before = {file.name: file.read_bytes() for file in (run / "step_3").iterdir()}
    done = cli("prune", run, "--keep", "1", "--yes")
    assert done.returncode == 0
    assert rows(done.stdout) == {
        "step_2": ("DELETE", "complete"),
        "step_3": ("keep", "complete"),
        "step_4": ("keep", "in-progress"),
        "step_6": ("keep", "in-progress"),
    }
    assert left(run) == ["step_3", "step_4", "step_6"]
    ask = ("prune", run, "--keep", "1", "--yes", "--include-incomplete", "--older-than", "0s")
    assert "nothing to delete" in cli(*ask).stdout
    age(run / "step_4", run / "step_6")
    assert cli("prune", run, "--keep", "1", "--yes").returncode == 0
    assert left(run) == ["step_3", "step_4", "step_6"]
    done = cli(*ask)
    assert done.returncode == 0
    assert [plan for plan, _ in rows(done.stdout).values()] == ["keep", "DELETE", "DELETE"]
    assert left(run) == ["step_3"]
    assert {file.name: file.read_bytes() for file in (run / "step_3").iterdir()} == before
    assert dcptool.verify(run / "step_3", dcptool.Rules(level=dcptool.Level.DEEP)).good


def test_marking_an_old_step_by_hand_hides_no_newer_one(run):
    age(run / "step_4", run / "step_6")
    assert cli("mark", run / "step_2").returncode == 0
    assert cli("latest", run).stdout == f"{run / 'step_3'}\n"
    assert cli("latest", "--require-marker", run).stdout == f"{run / 'step_2'}\n"
    done = cli("prune", run, "--keep", "1", "--dry-run")
    assert rows(done.stdout)["step_3"] == ("keep", "complete")
