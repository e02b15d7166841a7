"""A step as its trainer saved it is whole; without a file it resumes with it is not, at the level that says so."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.frameworks.table import PROFILES
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests.conftest import DEEPSPEED, FOREIGN, run

pytestmark = pytest.mark.torchfree
STEPS = {
    "Lightning": ("lightning_modelparallel/step=3.ckpt", ("meta.pt",)),
    "accelerate": ("accelerate_fsdp2", ("random_states_0.pkl", "random_states_1.pkl")),
    "transformers Trainer": (
        "trainer_fsdp2/checkpoint-2",
        ("rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"),
    ),
    "Megatron-core": ("megatron_tp2/iter_0000010", ("common.pt", "metadata.json")),
    "torchtitan": ("torchtitan_dcp/checkpoint/step-2", ()),
}
NEEDED = [(trainer, file) for trainer, (_, files) in STEPS.items() for file in files]


def verdict_on(folder, level=Level.METADATA):
    return judge(folder, VerifyOptions(level=level, grace=0))


@pytest.fixture
def step(tmp_path):
    def copied(trainer):
        name = STEPS[trainer][0]
        return shutil.copytree(FOREIGN / name, tmp_path / name.rpartition("/")[2])

    return copied


@pytest.mark.parametrize("trainer", STEPS)
@pytest.mark.parametrize("level", Level)
def test_as_it_was_saved_it_is_whole_and_can_be_resumed_from(trainer, level):
    verdict = verdict_on(FOREIGN / STEPS[trainer][0], level)
    assert (verdict.state, verdict.resume.framework, verdict.resumable) == (State.COMPLETE, trainer, True)
    assert not verdict.resume.lacks
    assert set(STEPS[trainer][1]) <= set(verdict.side_files.names)


def test_every_profile_has_a_source_and_a_page():
    page = (FOREIGN.parents[1] / "docs" / "trainers.md").read_text()
    for profile in PROFILES:
        assert profile.source
        assert f"\n### {profile.name}\n" in page
        for needed in profile.needed:
            assert needed.holds in page


@pytest.mark.parametrize(("trainer", "file"), NEEDED)
def test_without_a_file_it_resumes_with_it_is_incomplete(step, trainer, file):
    folder = step(trainer)
    (folder / file).unlink()
    verdict = verdict_on(folder)
    assert verdict.state is State.INCOMPLETE
    assert verdict.resumable is False
    assert file in verdict.reason
    assert "missing" in verdict.reason


@pytest.mark.parametrize(("trainer", "file"), NEEDED)
def test_an_empty_or_a_cut_file_is_seen_without_reading_it_whole(step, trainer, file):
    folder = step(trainer)
    for nbytes in (len((folder / file).read_bytes().rstrip(b"\n")) - 1, os.path.getsize(folder / file) // 2, 0):
        os.truncate(folder / file, nbytes)
        verdict = verdict_on(folder)
        assert verdict.state is State.INCOMPLETE, nbytes
        assert file in verdict.reason


@pytest.mark.parametrize(("trainer", "file"), [pair for pair in NEEDED if not pair[1].endswith(".json")])
def test_another_file_in_the_place_of_one_is_seen(step, trainer, file):
    """Such as the page that says that a download failed."""
    folder = step(trainer)
    (folder / file).write_text("<html>503</html>")
    verdict = verdict_on(folder)
    assert verdict.state is State.DAMAGED
    assert f"{file} is neither a zip nor a pickle" in verdict.reason


@pytest.mark.parametrize(("trainer", "file"), NEEDED)
def test_a_changed_byte_of_a_zip_is_seen_by_deep(step, trainer, file):
    folder = step(trainer)
    if not zipfile.is_zipfile(folder / file):
        pytest.skip("it has no checksums")
    with zipfile.ZipFile(folder / file) as archive:
        member = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray((folder / file).read_bytes())
    start = member.header_offset + 30 + int.from_bytes(data[member.header_offset + 26 :][:2], "little")
    start += int.from_bytes(data[member.header_offset + 28 :][:2], "little")
    data[start + member.file_size // 2] ^= 4
    (folder / file).write_bytes(data)
    verdict = verdict_on(folder, Level.DEEP)
    assert not verdict.whole
    assert file in verdict.reason


@pytest.mark.parametrize(("trainer", "file"), [("Lightning", "meta.pt"), ("accelerate", "random_states_0.pkl")])
def test_a_file_that_runs_code_is_unsafe(step, trainer, file, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    folder = step(trainer)
    (folder / file).write_bytes(pickle.dumps(Evil()))
    assert verdict_on(folder, Level.RECORDS).state is State.UNSAFE
    assert not (tmp_path / "executed").exists()


def test_a_step_being_saved_is_in_progress_until_its_last_files_are_there(step):
    folder = step("accelerate")
    (folder / "random_states_1.pkl").unlink()
    (folder / "scheduler.bin").touch()
    os.utime(folder / "scheduler.bin")
    assert judge(folder).state is State.IN_PROGRESS


def test_what_a_conversion_named_as_a_trainers_step_lacks_is_told(step, tmp_path):
    pytest.importorskip("torch")
    for side_files in (False, True):
        target = tmp_path / str(side_files) / "step=4.ckpt"
        options = dcptool.ConvertOptions(side_files=side_files)
        dcptool.convert(FOREIGN / STEPS["Lightning"][0], target, "dcp", options)
        verdict = verdict_on(target)
        assert (verdict.state, verdict.resumable) == (State.COMPLETE, side_files)
        assert ("meta.pt" in verdict.reason) is not side_files


def test_files_of_other_kinds_are_judged_as_far_as_they_tell(step):
    folder = step("torchtitan")
    (folder / "log.json").write_text('{"loss": 1}\n{"loss": 2}\n')  # a value on each line
    (folder / "notes.txt").touch()
    (folder / "tokenizer.json").write_text(json.dumps({"a": 1}))
    assert verdict_on(folder, Level.DEEP).state is State.COMPLETE
    (folder / "tokenizer.json").write_text('{"a": ')
    assert "tokenizer.json is cut short" in verdict_on(folder).reason
    (folder / "settings.json").write_text("{} // that is how we write it")
    (folder / "tokenizer.json").write_text('{"a" 1}')
    assert verdict_on(folder).state is State.DAMAGED
    (folder / "tokenizer.json").unlink()
    (folder / "rng.pt").write_bytes(bytes(100))
    assert "rng.pt begins with zero bytes" in verdict_on(folder).reason
    (folder / "rng.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert "rng.pt is a Git LFS pointer" in verdict_on(folder).reason


def test_state_of_generators_as_pickle_stores_it_is_no_danger(step, tmp_path):
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    folder = step("torchtitan")
    (folder / "rng.pkl").write_bytes(pickle.dumps({"torch": torch.get_rng_state(), "step": 7}))
    assert verdict_on(folder, Level.DEEP).state is State.COMPLETE
    hidden = io.BytesIO()
    torch.save(Evil(), hidden, _use_new_zipfile_serialization=False)

    class Nested:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (hidden.getvalue(),)

    (folder / "rng.pkl").write_bytes(pickle.dumps(Nested()))
    verdict = verdict_on(folder, Level.RECORDS)
    assert verdict.state is State.UNSAFE
    assert "posix.mkdir" in verdict.reason
    assert not (tmp_path / "executed").exists()


def test_checksums_switched_off_and_records_that_are_compressed(step):
    folder = step("torchtitan")
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", bytes(10_000))
    assert verdict_on(folder, Level.DEEP).state is State.COMPLETE
    data = bytearray((folder / "a.npz").read_bytes())
    data[40] ^= 255
    (folder / "a.npz").write_bytes(data)
    assert "a.npz is damaged in its record a.npy" in verdict_on(folder, Level.DEEP).reason
    (folder / "a.npz").unlink()
    torch = pytest.importorskip("torch")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, folder / "extra.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert verdict_on(folder, Level.DEEP).state is State.COMPLETE


def test_numbers_that_are_no_ranks_cost_nothing(step):
    folder = step("torchtitan")
    for number in (0, 1_735_689_600):
        shutil.copy(FOREIGN / "accelerate_fsdp2" / "random_states_0.pkl", folder / f"sampler_{number}.pt")
    (folder / "long.json").write_text('{"a": ' + "1" * 5000 + "}")
    assert verdict_on(folder).state is State.COMPLETE


def test_the_file_of_this_kind_of_step_is_named(step):
    folder = step("transformers Trainer")
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    assert "pytorch_model_fsdp_0/ is missing: the model" in verdict_on(folder).reason


def test_a_rank_between_others_is_missed(step):
    folder = step("torchtitan")
    for rank in (0, 1, 3):
        shutil.copy(FOREIGN / "accelerate_fsdp2" / "random_states_0.pkl", folder / f"rng_rank{rank}.pt")
    verdict = verdict_on(folder)
    assert verdict.state is State.INCOMPLETE
    assert "rng_rank2.pt is missing, though there are files of rank 0 and 3" in verdict.reason


HEALTHY = {
    "accelerate, DDP": (
        "checkpoint_3",
        "model.safetensors optimizer.bin scheduler.bin random_states_0.pkl random_states_1.pkl",
        "accelerate",
        True,
    ),
    "accelerate, a model alone": ("checkpoint_3", "model.safetensors random_states_0.pkl", "accelerate", False),
    "Trainer, DDP": (
        "checkpoint-30",
        "model.safetensors config.json optimizer.pt scheduler.pt rng_state_0.pth rng_state_1.pth trainer_state.json",
        "transformers Trainer",
        True,
    ),
    "Trainer, one process": (
        "checkpoint-30",
        "adapter_model.safetensors optimizer.pt scheduler.pt rng_state.pth trainer_state.json training_args.bin",
        "transformers Trainer",
        True,
    ),
    "Trainer, save_only_model": (
        "checkpoint-30",
        "model.safetensors config.json trainer_state.json",
        "transformers Trainer",
        False,
    ),
    "Trainer, DeepSpeed": (
        "checkpoint-30",
        "model.safetensors global_step30/mp_rank_00_model_states.pt rng_state_0.pth rng_state_1.pth latest "
        "trainer_state.json",
        "transformers Trainer with DeepSpeed",
        True,
    ),
    "diffusers": (
        "checkpoint-500",
        "unet/model.safetensors optimizer.bin scheduler.bin random_states_0.pkl",
        "accelerate",
        True,
    ),
    "accelerate, named as the Trainer's": (
        "checkpoint-500",
        "model.safetensors optimizer.bin scheduler.bin random_states_0.pkl",
        "accelerate",
        True,
    ),
    "LLaMA-Factory": ("checkpoint-5", "model/model.safetensors scheduler.pt rng_state/rank_0.pt", "", None),
    "Trainer.save_model": ("checkpoint-5", "model.safetensors config.json training_args.bin", "transformers", False),
    "Apple's own files": ("step_3", "model.safetensors ._x.json", "", None),
    "samples": ("step_3", "model.safetensors random_prompt_0.png random_prompt_3.png epoch_loader_3.json", "", None),
    "a home-made loop": ("step_3", "model.safetensors loader_step_100.pt loader_step_300.pt state.json", "", None),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_steps_raise_no_alarm(case, tmp_path):
    name, files, trainer, resumable = HEALTHY[case]
    tensors = next((FOREIGN / "hf_consolidated").glob("*.safetensors"))
    for file in files.split():
        path = tmp_path / "run" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".safetensors"):
            shutil.copy(tensors, path)
        elif file.endswith("_model_states.pt"):
            shutil.copy(DEEPSPEED / "zero0_w2" / "global_step3" / path.name, path)
        elif file.endswith((".json", ".png", "latest")):
            path.write_text("\0" if path.name.startswith("._") else "{}")
        else:
            shutil.copy(FOREIGN / "trainer_fsdp2" / "checkpoint-2" / "scheduler.pt", path)
    verdict = verdict_on(tmp_path / "run" / name, Level.DEEP)
    assert (verdict.state, verdict.resume.framework, verdict.resumable) == (State.COMPLETE, trainer, resumable)


def test_nemo_keeps_megatrons_step_in_weights(tmp_path):
    folder = tmp_path / "gpt--val_loss=2.1-epoch=0-last"
    shutil.copytree(FOREIGN / "megatron_tp2" / "iter_0000010", folder / "weights")
    (folder / "context").mkdir()
    (folder / "context" / "io.json").write_text("{}")
    verdict = verdict_on(folder, Level.DEEP)
    assert (verdict.state, verdict.resume.framework, verdict.resumable) == (State.COMPLETE, "NeMo", True)
    (folder / "weights" / "common.pt").unlink()
    assert "weights/common.pt is missing" in verdict_on(folder).reason


def test_olmo_writes_the_version_last(tmp_path):
    folder = tmp_path / "step5"
    shutil.copytree(FOREIGN / "torchtitan_dcp" / "checkpoint" / "step-2", folder / "model_and_optim")
    (folder / "train").mkdir()
    for rank in (0, 1):
        shutil.copy(FOREIGN / "trainer_fsdp2" / "checkpoint-2" / "scheduler.pt", folder / "train" / f"rank{rank}.pt")
    assert ".metadata.json is missing" in verdict_on(folder).reason
    (folder / ".metadata.json").write_text('{"version": "2"}')
    verdict = verdict_on(folder)
    assert (verdict.state, verdict.resume.framework) == (State.COMPLETE, "OLMo-core")
    shutil.rmtree(folder / "train")
    assert "train/rank0.pt is missing: the trainer's state" in verdict_on(folder).reason


def test_lightnings_fsdp_names_its_model_as_everybody(tmp_path):
    torch = pytest.importorskip("torch")
    from tests.ranks import save

    folder = save(tmp_path / "epoch=0-step=2.ckpt", {"model": {"w": torch.ones(3)}, "optimizer_0": {"lr": 0.1}})
    assert "meta.pt is missing" in verdict_on(folder).reason
    shutil.copy(FOREIGN / STEPS["Lightning"][0] / "meta.pt", folder)
    assert verdict_on(folder).resumable is True
    save(tmp_path / "model.ckpt", {"model": {"w": torch.ones(3)}, "optim": {"lr": 0.1}})
    assert verdict_on(tmp_path / "model.ckpt").state is State.COMPLETE  # somebody else's


def test_verify_says_who_saved_it_and_what_lies_beside():
    text = run("verify", FOREIGN / STEPS["transformers Trainer"][0]).stdout
    assert "saved by" in text
    assert (
        "rng_state_0.pth, rng_state_1.pth, scheduler.pt and 1 more; 1 file, 1.06 kB, holds nothing that can be checked"
        in text
    )
    done = json.loads(run("verify", "--json", FOREIGN / STEPS["transformers Trainer"][0]).stdout)
    [verdict] = done["checkpoints"]
    assert (verdict["framework"], verdict["resumable"], verdict["lacks"]) == ("transformers Trainer", True, [])
    assert verdict["side_files"]["n_unproven"] == 1
