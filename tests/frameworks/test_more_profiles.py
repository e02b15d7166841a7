"""Steps of composer, torchtune, Megatron-Bridge and of plain exports, laid out as these lay them out."""

from __future__ import annotations

import os
import shutil

import pytest

from dcptool.frameworks.profile import Follow
from dcptool.frameworks.table import PROFILES
from dcptool.ops.latest import find_latest
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests.conftest import FOREIGN

PLAIN = {"state": {"model": {"w": 1}, "optimizers": {"Adam": {"step": 1}}, "timestamp": {"Timestamp": 5}}}


def verdict_on(folder):
    return judge(folder, VerifyOptions(grace=0))


def found(folder):
    verdict = verdict_on(folder)
    return verdict.state, verdict.resume.framework, verdict.resumable


@pytest.fixture
def save():
    pytest.importorskip("torch")
    from tests.ranks import save

    return save


def test_composer(tmp_path, save):
    save(tmp_path / "ep1-ba5", {**PLAIN, "rng": {"0": {"cuda": 1}}})
    assert found(tmp_path / "ep1-ba5") == (State.COMPLETE, "composer", True)
    save(tmp_path / "ep1-ba9", {"state": {"model": {"w": 1}}})
    assert found(tmp_path / "ep1-ba9") == (State.COMPLETE, "composer", False)
    assert find_latest(tmp_path).path == str(tmp_path / "ep1-ba5")
    save(tmp_path / "step_3", PLAIN)  # somebody else's `state`
    assert verdict_on(tmp_path / "step_3").resume.framework == ""


def test_torchtune(tmp_path, save):
    whole = {"model": {"w": 1}, "optimizer": {"state": 1}, "epochs_run": 2, "seed": 1}
    save(tmp_path / "dist_epoch_9", whole)
    save(tmp_path / "dist_epoch_10", whole)
    assert found(tmp_path / "dist_epoch_10") == (State.COMPLETE, "torchtune", True)
    assert find_latest(tmp_path).path == str(tmp_path / "dist_epoch_10")
    save(tmp_path / "dist_epoch_11", {"model": {"w": 1}, "epochs_run": 2})
    assert found(tmp_path / "dist_epoch_11") == (State.COMPLETE, "torchtune", False)


@pytest.mark.torchfree
class TestMegatronBridge:
    @pytest.fixture
    def step(self, tmp_path):
        folder = shutil.copytree(FOREIGN / "megatron_tp2" / "iter_0000010", tmp_path / "iter_0000010")
        shutil.copy(FOREIGN / "trainer_fsdp2" / "checkpoint-2" / "scheduler.pt", folder / "train_state.pt")
        (folder / "run_config.yaml").write_text("model: {}\n")
        return folder

    def test_a_whole_step(self, step):
        assert found(step) == (State.COMPLETE, "Megatron-Bridge", True)

    @pytest.mark.parametrize("file", ["metadata.json", "common.pt", "train_state.pt", "run_config.yaml"])
    def test_without_a_file(self, step, file):
        (step / file).unlink()
        assert verdict_on(step).state is State.INCOMPLETE
        assert f"{file} is missing" in verdict_on(step).reason

    @pytest.mark.parametrize("file", ["common.pt", "train_state.pt", "run_config.yaml"])
    def test_with_an_empty_file(self, step, file):
        os.truncate(step / file, 0)
        assert verdict_on(step).state is State.INCOMPLETE
        assert f"{file} is empty" in verdict_on(step).reason

    def test_what_was_there_last_tells_a_loss_from_a_save_that_died(self, step):
        (step / "train_state.pt").unlink()
        assert "The save was finished" in verdict_on(step).findings[0].next_step
        (step / "run_config.yaml").unlink()
        (step / "train_state.pt").write_bytes(b"")
        assert "The save died" in verdict_on(step).findings[-1].next_step


@pytest.mark.torchfree
def test_a_model_among_steps_is_complete_and_holds_weights_alone(tmp_path):
    shutil.copytree(FOREIGN / "trainer_fsdp2" / "checkpoint-2", tmp_path / "checkpoint-2")
    for name in ("checkpoint-3", "final"):
        shutil.copytree(FOREIGN / "hf_consolidated", tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    assert found(tmp_path / "checkpoint-3") == (State.COMPLETE, "transformers", False)
    assert "it lacks optimizer and progress" in verdict_on(tmp_path / "checkpoint-3").reason
    assert verdict_on(tmp_path / "final").resumable is None  # by its name no step
    assert find_latest(tmp_path).path == str(tmp_path / "checkpoint-2")


@pytest.mark.torchfree
@pytest.mark.parametrize(
    ("trainer", "file", "follows"),
    [
        ("Lightning", "meta.pt", Follow.CARRY),
        ("accelerate", "random_states_3.pkl", Follow.PER_RANK),
        ("accelerate", "custom_checkpoint_0.pkl", Follow.CARRY),
        ("accelerate", "optimizer_0/", Follow.RESHARD),
        ("transformers Trainer", "rng_state_1.pth", Follow.PER_RANK),
        ("transformers Trainer", "rng_state.pth", Follow.CARRY),
        ("transformers Trainer", "optimizer.pt", Follow.CARRY),
        ("transformers Trainer", "wandb.txt", None),
        ("Megatron-core", "common.pt", Follow.CARRY),
        ("Megatron-core", "integrity.json", Follow.STALE),
        ("Megatron-core", "mp_rank_00/train_dataloader_dprank003.pt", Follow.PER_RANK),
        ("Megatron-LM, legacy", "mp_rank_01/model_optim_rng.pt", Follow.FIXED),
        ("OLMo-core", "train/rank3.pt", Follow.PER_RANK),
        ("DeepSpeed", "zero_pp_rank_1_mp_rank_00_optim_states.pt", Follow.FIXED),
        ("DeepSpeed", "mp_rank_00_model_states.pt", Follow.CARRY),
        ("verl", "actor/model_world_size_2_rank_1.pt", Follow.FIXED),
        ("verl", "data.pt", Follow.CARRY),
        ("torch_checkpointing", "model_1.pt", Follow.FIXED),
    ],
)
def test_what_follows_to_another_number_of_ranks(trainer, file, follows):
    [profile] = [profile for profile in PROFILES if profile.name == trainer]
    assert profile.follows(file) is follows
