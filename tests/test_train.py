"""fixtures/train.py: a real FSDP2 job under torchrun whose checkpoints dcptool reads as torch does."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

import dcptool  # noqa: E402


def train(run_dir, ranks, *options, check=True):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(ROOT / "fixtures" / "train.py"), "--run-dir", str(run_dir), "--hidden", "16", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)}


def test_a_real_run_killed_in_a_save_and_resumed_with_fewer_ranks(tmp_path):
    run = tmp_path / "run"
    losses = train(run, 4, "--steps", "4", "--die-in-save", "4", check=False)
    summary = dcptool.summarize(run)
    assert [(step.name, step.state.value) for step in summary.steps] == [
        ("step_2", "complete"),
        ("step_4", "in-progress"),
    ]
    assert "perhaps still being saved" in summary.steps[1].reason
    assert summary.steps[0].world_size == 4

    checkpoint = dcptool.open(run / "step_2")
    state = {
        fqn: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for fqn, entry in checkpoint.tensors.items()
    }
    dcp.load(state, checkpoint_id=run / "step_2", no_dist=True)
    for fqn, tensor in state.items():
        assert torch.equal(checkpoint.read_torch(fqn), tensor), fqn
    weight = next(
        tensor for tensor in dcptool.summarize(run / "step_2").checkpoints[0].tensors if "up.weight" in tensor.fqn
    )
    assert (weight.layout, weight.n_chunks) == ("Shard(0) ×4", 4)
    assert checkpoint.value("dl.rank3") == b'{"rank": 3, "batches": 2}'

    resumed = train(run, 2, "--steps", "4", "--resume")
    assert set(resumed) == {3, 4}
    assert all(abs(resumed[step] - losses[step]) < 1e-4 for step in resumed)
    assert dcptool.summarize(run).steps[1].state == "complete"
