"""Steps in which dcptool reads no tensor are judged by their files: whole as they were saved, else not."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.frameworks.table import profile_of
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests.conftest import DEEPSPEED, FOREIGN, OLD, RANKS, UNREAD, run
from tests.run_steps import prune

pytestmark = pytest.mark.torchfree
STEPS = {
    "ds_zero1_fp32_w2/global_step5": "DeepSpeed",
    "ds_zero2_bf16_w4/global_step5": "DeepSpeed",
    "ds_zero3_fp32_w2/global_step5": "DeepSpeed",
    "ds_universal_zero1_w2/global_step5_universal": "DeepSpeed's universal checkpoint",
    "megatron_legacy_tp2/iter_0000010": "Megatron-LM, legacy",
    "megatron_legacy_tp2_distopt/iter_0000010": "Megatron-LM, legacy",
}


def fixture(name: str) -> Path:
    return next(of / name for of in (DEEPSPEED, RANKS, UNREAD) if (of / name).exists())


def files_of(name: str) -> list[str]:
    """The files a resume needs; of a parameter's steps and of frozen ones not every file is missed."""
    folder = fixture(name)
    found = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [file for file in found if not file.endswith(("/step.pt", "optimizer_state.pt"))]


EVERY = [(name, file) for name in STEPS for file in files_of(name)]
OFTEN = [(name, file) for name, file in EVERY if "/zero/" not in f"/{file}" or "up.weight" in file]
_UNIVERSAL = "ds_universal_zero1_w2/global_step5_universal"
UNTOLD = {(_UNIVERSAL, f"zero/{name}/fp32.pt") for name in ("running", "frozen.bias", "frozen.weight", "head.weight")}
"""Nothing names what is no trained parameter of its own."""


def verdict_on(folder, level=Level.METADATA):
    return judge(folder, VerifyOptions(level=level, grace=0))


@pytest.fixture
def copied(tmp_path):
    return lambda name: shutil.copytree(fixture(name), tmp_path / (name.rpartition("/")[2] or name))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("level", Level)
def test_as_it_was_saved_it_is_whole(name, level):
    verdict = verdict_on(fixture(name), level)
    assert (verdict.state, verdict.resume.framework, verdict.resumable) == (State.COMPLETE, STEPS[name], True)
    if name.startswith("ds_"):
        assert {finding.kind for finding in verdict.findings} <= {"copies-left-out"}
        return
    [note] = verdict.findings
    assert note.kind == "tensors-not-read"
    assert f"{verdict.n_files} files there and whole" in note.message
    assert "tensors are not read by dcptool" in run("verify", fixture(name)).stdout


@pytest.mark.parametrize(("name", "file"), [case for case in EVERY if case not in UNTOLD])
def test_without_a_file_it_is_incomplete(copied, name, file):
    folder = copied(name)
    (folder / file).unlink()
    verdict = verdict_on(folder)
    assert (verdict.state, verdict.resumable) == (State.INCOMPLETE, False)
    assert f"{file} is missing" in verdict.reason or f"{file}, " in verdict.reason


@pytest.mark.parametrize(("name", "file"), OFTEN)
def test_an_empty_or_a_cut_file_is_seen_without_reading_it_whole(copied, name, file):
    folder = copied(name)
    nbytes = os.path.getsize(folder / file)
    for left in (nbytes - 1, nbytes // 2, 0):
        os.truncate(folder / file, left)
        verdict = verdict_on(folder)
        assert verdict.state is State.INCOMPLETE, left
        assert file in verdict.reason


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, file in OFTEN if not file.endswith(".pkl")])
def test_a_changed_byte_is_seen_by_deep(copied, name, file):
    folder = copied(name)
    data = bytearray((folder / file).read_bytes())
    at = data.index(b"PK\x03\x04", 30)  # the record after the first, which is the pickle
    data[at - 40] ^= 4
    (folder / file).write_bytes(data)
    pickled = bytearray((fixture(name) / file).read_bytes())
    assert data != pickled
    assert not verdict_on(folder, Level.DEEP).whole


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("ds_zero2_bf16_w4/global_step5", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ("ds_zero3_fp32_w2/global_step5", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("megatron_legacy_tp2/iter_0000010", "mp_rank_01/model_optim_rng.pt"),
    ],
)
def test_the_last_ranks_are_missed_too(copied, name, last):
    """By the names alone the others would be all there are."""
    folder = copied(name)
    (folder / last).unlink()
    assert last in verdict_on(folder).reason


def test_a_save_killed_before_any_optimizer_was_written_is_no_zero_0(copied):
    for name in ("ds_zero1_fp32_w2/global_step5", "ds_zero3_fp32_w2/global_step5"):
        folder = copied(name)
        for file in folder.glob("*optim_states.pt"):
            file.unlink()
        assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in verdict_on(folder).reason
        shutil.rmtree(folder)


def test_a_damaged_model_file_hides_no_other(copied):
    folder = copied("ds_zero1_fp32_w2/global_step5")
    os.truncate(folder / "mp_rank_00_model_states.pt", 50)
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    found = {finding.file for finding in verdict_on(folder).findings}
    assert found == {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}


def test_a_file_that_runs_code_is_unsafe(copied, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    folder = copied("ds_zero1_fp32_w2/global_step5")
    (folder / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Evil()))
    assert verdict_on(folder, Level.RECORDS).state is State.UNSAFE
    assert not (tmp_path / "executed").exists()


class TestRun:
    """A run of three steps: the newest lacks a rank's file, the one before is whole."""

    @pytest.fixture
    def deepspeed(self, tmp_path):
        for number in (5, 10, 15):
            shutil.copytree(DEEPSPEED / "ds_zero1_fp32_w2" / "global_step5", tmp_path / "run" / f"global_step{number}")
        (tmp_path / "run" / "global_step15" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        (tmp_path / "run" / "latest").write_text("global_step15")
        for path in (tmp_path / "run").rglob("*"):
            os.utime(path, (OLD, OLD))
        return tmp_path / "run"

    def test_latest_passes_over_what_is_not_whole(self, deepspeed):
        done = run("latest", deepspeed)
        assert done.stdout == f"{deepspeed / 'global_step10'}\n"
        assert "global_step15 is incomplete: zero_pp_rank_1_mp_rank_00_optim_states.pt is missing" in done.stderr
        assert "the pointer latest names global_step15, which is not complete" in done.stderr

    def test_verify_judges_each(self, deepspeed):
        states = [(verdict.name, verdict.state.value) for verdict in dcptool.verify(deepspeed).verdicts]
        assert states == [("global_step5", "complete"), ("global_step10", "complete"), ("global_step15", "incomplete")]

    def test_inspect_shows_the_run_and_what_shows_the_newest_whole_step(self, deepspeed):
        done = run("inspect", deepspeed)
        assert f"newest complete step: dcptool inspect {deepspeed}/global_step10" in done.stdout

    def test_prune_keeps_the_newest_whole_one_and_what_it_cannot_judge(self, deepspeed):
        shutil.copytree(FOREIGN / "torchtitan_dcp", deepspeed / "global_step1" / "other")
        shutil.rmtree(deepspeed / "global_step1" / "other" / "checkpoint")
        (deepspeed / "global_step1" / "notes.txt").write_text("somebody's")
        assert prune(deepspeed) == ("global_step5",)
        assert {path.name for path in deepspeed.iterdir()} == {
            "latest",
            "global_step1",
            "global_step10",
            "global_step15",
        }

    def test_a_step_can_be_marked_and_a_change_is_found(self, deepspeed):
        marked = dcptool.mark_complete(deepspeed / "global_step10", checksums=True)
        assert marked.verdict.state is State.COMPLETE
        assert verdict_on(deepspeed / "global_step10", Level.DEEP).marker is not None
        file = deepspeed / "global_step10" / "mp_rank_00_model_states.pt"
        file.write_bytes((DEEPSPEED / "ds_zero2_bf16_w4" / "global_step5" / file.name).read_bytes())
        assert not verdict_on(deepspeed / "global_step10").whole


def test_verl_saves_a_folder_for_each_model(tmp_path):
    for role in ("actor", "critic"):
        shutil.copytree(RANKS / "verl_fsdp2_w2", tmp_path / "global_step_7" / role)
    step = tmp_path / "global_step_7"
    assert "data.pt is missing: the data loader" in verdict_on(step).reason
    shutil.copy(FOREIGN / "trainer_fsdp2" / "checkpoint-2" / "scheduler.pt", step / "data.pt")
    assert (verdict_on(step).state, verdict_on(step).resume.framework) == (State.COMPLETE, "verl")
    (step / "critic" / "optim_world_size_2_rank_1.pt").unlink()
    verdict = verdict_on(step)
    assert "critic: optim_world_size_2_rank_1.pt is missing" in verdict.reason
    assert len([finding for finding in verdict.findings if finding.is_error]) == 1
    for file in step.glob("*/optim_*"):
        file.unlink()
    for file in step.glob("*/extra_state_*"):
        file.unlink()
    verdict = verdict_on(step)
    assert (verdict.state, verdict.resumable) == (State.COMPLETE, False)


def test_skyrl_needs_its_trainers_state(tmp_path):
    step = tmp_path / "global_step_7"
    shutil.copytree(RANKS / "verl_fsdp2_w2", step / "policy")
    for name in ("data.pt", "trainer_state.pt"):
        shutil.copy(FOREIGN / "trainer_fsdp2" / "checkpoint-2" / "scheduler.pt", step / name)
    assert (verdict_on(step).state, verdict_on(step).resume.framework) == (State.COMPLETE, "SkyRL")
    (step / "trainer_state.pt").unlink()
    assert "trainer_state.pt is missing" in verdict_on(step).reason


TRAINED = FOREIGN / "trainer_fsdp2" / "checkpoint-2"


def trainer_with_deepspeed(folder):
    shutil.copytree(DEEPSPEED / "ds_zero3_fp32_w2" / "global_step5", folder / "global_step30")
    (folder / "latest").write_text("global_step30")
    for name in ("rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"):
        shutil.copy(TRAINED / name, folder)
    return folder


def test_the_trainers_steps_with_deepspeed(tmp_path):
    folder = trainer_with_deepspeed(tmp_path / "whole" / "checkpoint-30")
    verdict = verdict_on(folder, Level.DEEP)
    assert (verdict.state, verdict.resume.framework) == (State.COMPLETE, "transformers Trainer with DeepSpeed")
    needed = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    for number, file in enumerate(needed):
        again = trainer_with_deepspeed(tmp_path / str(number) / "checkpoint-30")
        (again / file).write_bytes(b"")
        assert verdict_on(again).state is State.INCOMPLETE, file
        (again / file).unlink()
        verdict = verdict_on(again)
        assert verdict.state is State.INCOMPLETE
        assert all(part in verdict.reason for part in file.split("/"))


def test_accelerates_steps_with_deepspeed(tmp_path):
    folder = tmp_path / "checkpoint_0"
    shutil.copytree(DEEPSPEED / "ds_zero2_bf16_w4" / "global_step5", folder / "pytorch_model")
    (folder / "latest").write_text("pytorch_model")
    for rank in range(4):
        shutil.copy(FOREIGN / "accelerate_fsdp2" / "random_states_0.pkl", folder / f"random_states_{rank}.pkl")
    verdict = verdict_on(folder, Level.DEEP)
    assert (verdict.state, verdict.resume.framework) == (State.COMPLETE, "accelerate with DeepSpeed")
    (folder / "random_states_3.pkl").unlink()
    assert "random_states_3.pkl is missing" in verdict_on(folder).reason
    shutil.copy(FOREIGN / "accelerate_fsdp2" / "random_states_0.pkl", folder / "random_states_3.pkl")
    (folder / "pytorch_model" / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    assert "pytorch_model: bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt is missing" in verdict_on(folder).reason


def test_weights_in_files_of_torch_save_are_no_part_and_count(tmp_path):
    """What the Trainer and accelerate leave without safetensors."""
    for name, files in {
        "checkpoint-30": ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
        "checkpoint_3": ("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"),
    }.items():
        for file in files:
            (tmp_path / name).mkdir(exist_ok=True)
            source = TRAINED / ("trainer_state.json" if file.endswith("json") else "scheduler.pt")
            shutil.copy(source, tmp_path / name / file)
        verdict = verdict_on(tmp_path / name)
        assert (verdict.state, verdict.resumable) == (State.COMPLETE, True)
        (tmp_path / name / files[0]).unlink()
        assert verdict_on(tmp_path / name).state is State.OTHER  # no weights in any file: it can be anybody's


@pytest.mark.parametrize("index", [True, False])
def test_every_file_of_a_model_in_several_counts(tmp_path, index):
    step = tmp_path / "checkpoint-30"
    step.mkdir()
    for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        shutil.copy(TRAINED / "scheduler.pt", step / file)
    shutil.copy(TRAINED / "trainer_state.json", step)
    shards = [f"pytorch_model-0000{number}-of-00004.bin" for number in (1, 2, 3, 4)]
    for file in (*shards, *["pytorch_model.bin.index.json"] * index):
        shutil.copy(FOREIGN / "hf_bin_sharded_tied" / file, step)
    assert (verdict_on(step).state, verdict_on(step).resumable) == (State.COMPLETE, True)
    for shard in shards:
        (step / shard).rename(tmp_path / shard)
        found = verdict_on(step)
        assert found.state is State.INCOMPLETE
        assert any(shard in finding.message and finding.kind == "missing-file" for finding in found.findings)
        (tmp_path / shard).rename(step / shard)


def test_folders_of_other_things_are_recognised_as_none(tmp_path):
    from dcptool.frameworks.profile import SavedStep

    for files in (
        {"metadata.pkl": 5, "notes.txt": 3},
        {"global_step_7/actor/model_world_size_2_rank_0.pt": 5},
        {"global_step5/mp_rank_00_model_states.pt": 5},
        {"data.pt": 5},
        {"model_0.pt": 5, "model_1.pt": 5},
        {"trainer_state.json": 5, "rng_state_0.pth": 4},
        {"model_world_size_0_rank_0.pt": 5},
        {"model_world_size_99999999999_rank_0.pt": 5},
    ):
        assert profile_of(SavedStep("run", files, {})) is None, files


@pytest.mark.parametrize(
    ("name", "file", "odd"),
    [
        ("ds_zero1_fp32_w2/global_step5", "mp_rank_00_model_states.pt", "mp_rank_99999999999_model_states.pt"),
        (
            "ds_zero1_fp32_w2/global_step5",
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_130000_mp_rank_131000_optim_states.pt",
        ),
        ("megatron_legacy_tp2/iter_0000010", "mp_rank_00/model_optim_rng.pt", "mp_rank_99_999_999/model_optim_rng.pt"),
        ("verl_fsdp2_w2", "model_world_size_2_rank_0.pt", "model_world_size_99999999999_rank_7.pt"),
        ("verl_fsdp2_w2", "model_world_size_2_rank_0.pt", "model_world_size_2_rank_99999999999.pt"),
        ("tck_w2", "model_0.pt", "model_131000.pt"),
    ],
)
def test_numbers_in_names_that_are_no_ranks_cost_nothing(copied, name, file, odd):
    folder = copied(name)
    (folder / odd).parent.mkdir(exist_ok=True)
    shutil.copy(folder / file, folder / odd)
    assert verdict_on(folder).state in (State.COMPLETE, State.INCOMPLETE)


@pytest.mark.parametrize("value", [2**40, -1, True, "2", None, [2], 1e300, 131_000])
def test_numbers_in_files_that_are_no_ranks_cost_nothing(copied, value):
    torch = pytest.importorskip("torch")
    folder = copied("ds_zero1_fp32_w2/global_step5")
    zero = {"stage": value, "mics_shard_size": value}
    state = {"dp_world_size": value, "mp_world_size": value, "ds_config": {"zero_optimization": zero}}
    for content in (state, value, {"ds_config": value}, {"ds_config": {"zero_optimization": value}}):
        torch.save(content, folder / "mp_rank_00_model_states.pt")
        assert verdict_on(folder).state is State.DAMAGED  # it holds no model
