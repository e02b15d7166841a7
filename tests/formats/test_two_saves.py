"""Weights of an older save beside new ones, in one folder: which are read is said, and nothing is chosen in silence."""

from __future__ import annotations

import json

import pytest

from dcptool.checkpoint.kinds import Severity
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State
from tests.conftest import run

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def new(folder, *, index: bool = False):
    """A save of two tensors in two files."""
    folder.mkdir()
    for number, file in enumerate(SHARDS, 1):
        save_file({f"w{number}": torch.ones(4)}, folder / file)
    if index:
        weight_map = {f"w{number}": file for number, file in enumerate(SHARDS, 1)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def old() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(4) for name in ("w1", "w2", "gone")}


def told(folder) -> dict[str, tuple[Severity, str, str]]:
    return {found.kind: (found.severity, found.message, found.next_step) for found in judge(folder).findings}


def test_n09_one_that_the_index_does_not_name(tmp_path):
    folder = new(tmp_path / "m", index=True)
    save_file(old(), folder / "model.safetensors")
    severity, message, step = told(folder)["unlisted-file"]
    assert severity is Severity.WARNING
    assert "model.safetensors is there" in message
    assert "of another save" in step


def test_n09_one_of_an_older_set(tmp_path):
    folder = new(tmp_path / "m")
    save_file({"gone": torch.zeros(4)}, folder / "model-00003-of-00003.safetensors")
    assert judge(folder).state is State.INCOMPLETE
    assert "2 of 3 files are missing" in told(folder)["missing-file"][1]


def test_n09_one_name_in_two_files_is_refused_and_each_can_be_taken(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"w1": torch.ones(4), "w2": torch.ones(4)}, folder / "model.safetensors")
    save_file(old(), folder / "consolidated.safetensors")
    assert judge(folder).state is State.DAMAGED
    done = run("convert", "--to", "torch", folder, tmp_path / "o.pt")
    assert done.returncode == 3
    assert "name the file itself" in done.stderr
    assert run("convert", "--to", "torch", folder / "model.safetensors", tmp_path / "o.pt").returncode == 0
    assert torch.equal(torch.load(tmp_path / "o.pt")["w1"], torch.ones(4))
    assert run("inspect", folder).stdout.count("name the file itself") == 1


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.bin", "adapter_model.bin", "consolidated.00.pth"],
)
def test_n09_weights_of_torch_save_beside_them_are_told(tmp_path, name):
    folder = new(tmp_path / "m", index=True)
    torch.save(old(), folder / name)
    severity, message, step = told(folder)["other-weights"]
    assert severity is Severity.NOTE  # models are published in both forms
    assert f"weights are in {name} too, which is not read" in message
    assert "diff" in step
    assert judge(folder).state is State.COMPLETE
    assert name in run("inspect", folder).stdout


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
def test_state_of_a_trainer_is_no_second_save(tmp_path, name):
    folder = new(tmp_path / "m", index=True)
    torch.save({"a": 1}, folder / name)
    assert "other-weights" not in told(folder)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_only_its_library_knows_is_no_damage(tmp_path, dtype):
    header = json.dumps({"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, 6]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    assert judge(path).state is State.OTHER
    assert run("convert", "--to", "torch", path, tmp_path / "o.pt").returncode == 3
