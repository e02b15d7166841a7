"""What people ran into with steps of trainers, one test per case: a job resumes from a step, not from its tensors."""

from __future__ import annotations

import json
import os

import pytest

import dcptool
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests.conftest import OLD, run

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

ASKED = VerifyOptions(grace=0)


def trainer_step(step) -> None:
    """A step of the transformers Trainer on one process, in the order in which it writes."""
    number = int(step.name.rpartition("-")[2])
    step.mkdir(parents=True)
    (step / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": torch.full((4,), float(number))}, step / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.ones(400)}}, "param_groups": []}, step / "optimizer.pt")
    torch.save({"last_epoch": number}, step / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, step / "rng_state.pth")
    (step / "trainer_state.json").write_text(json.dumps({"global_step": number}))


def cut(path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture
def run_of_trainer(tmp_path):
    for number in (10, 20, 30):
        trainer_step(tmp_path / "run" / f"checkpoint-{number}")
    return tmp_path / "run"


@pytest.mark.parametrize("killed_at", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_n18b_a_trainer_killed_in_its_save(run_of_trainer, killed_at):
    newest = run_of_trainer / "checkpoint-30"
    written = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
    cut(newest / killed_at)
    for file in written[written.index(killed_at) + 1 :]:
        (newest / file).unlink()
    assert dcptool.find_latest(run_of_trainer, ASKED).path == str(run_of_trainer / "checkpoint-20")
    verdict = dcptool.verify(run_of_trainer, ASKED).verdicts[-1]
    assert (verdict.state, verdict.resumable) == (State.INCOMPLETE, False)
    assert run("mark", newest).returncode == 3
    plan = make_plan(run_of_trainer, 1, ASKED, now=OLD)
    assert {decision.name for decision in plan.decisions if decision.keep} == {"checkpoint-20", "checkpoint-30"}


@pytest.mark.parametrize("how", ["cut", "empty", "absent"])
def test_n41_megatrons_common_state(tmp_path, how):
    for number in (10, 20, 30):
        step = tmp_path / "run" / f"iter_{number:07}"
        dcp.save({"decoder.w": torch.ones(4), "optimizer.m": torch.ones(4)}, checkpoint_id=step, no_dist=True)
        torch.save({"iteration": number, "rng": torch.get_rng_state()}, step / "common.pt")
        (step / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    common = step / "common.pt"
    if how == "absent":
        common.unlink()
    else:
        os.truncate(common, 700 * (how == "cut"))
    found = dcptool.find_latest(tmp_path / "run", ASKED)
    assert found.path == str(tmp_path / "run" / "iter_0000020")
    assert "common.pt" in found.skipped[0].reason
    assert run("mark", step).returncode == 3


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_n41_a_model_folder_is_judged_with_what_lies_beside(tmp_path, how):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.ones(400)}, tmp_path / "optimizer.pt")
    data = bytearray((tmp_path / "optimizer.pt").read_bytes())
    if how == "cut":
        del data[700:]
    else:
        data[data.index(b"\0\0\x80\x3f" * 8) + 2] ^= 1
    (tmp_path / "optimizer.pt").write_bytes(data)
    done = run("verify", "--deep", "--grace", "0s", tmp_path)
    assert done.returncode == 1
    assert "error: optimizer.pt is" in done.stdout


def test_n17_a_file_of_a_rank_between_others_is_missed(tmp_path):
    for number in (10, 20):
        step = tmp_path / "run" / f"step_{number}"
        dcp.save({"model": {"w": torch.ones(4)}, "step": number}, checkpoint_id=step, no_dist=True)
        for rank in range(4):
            torch.save({"pos": rank}, step / f"rng_rank{rank}.pt")
    (step / "rng_rank2.pt").unlink()
    assert dcptool.find_latest(tmp_path / "run", ASKED).path == str(tmp_path / "run" / "step_10")
    assert "rng_rank2.pt is missing" in dcptool.verify(step, ASKED).verdicts[0].reason
    assert run("inspect", step).returncode == 1
    assert run("mark", step).returncode == 3


def test_n19_nemos_names_are_steps_and_its_signs_are_heeded(tmp_path):
    for number, last in ((99, ""), (199, ""), (299, "-last")):
        name = f"llama--val_loss=1.20-step={number}-consumed_samples={number * 8}.0{last}"
        step = tmp_path / "checkpoints" / name
        dcp.save(
            {"module.w": torch.ones(4), "optimizer.s": torch.ones(2)}, checkpoint_id=step / "weights", no_dist=True
        )
        (step / "context").mkdir()
        (step / "context" / "model.yaml").write_text("a: 1\n")
        torch.save({"iteration": number}, step / "weights" / "common.pt")
        (step / "weights" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert dcptool.find_latest(tmp_path, ASKED).verdict.name == name
    (tmp_path / "checkpoints" / f"{name}-unfinished").touch()
    found = dcptool.find_latest(tmp_path, ASKED)
    assert found.verdict.name == "llama--val_loss=1.20-step=199-consumed_samples=1592.0"
    assert found.skipped[0].state is State.IN_PROGRESS
