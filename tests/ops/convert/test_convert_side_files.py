"""What lies beside a checkpoint when it is converted: what describes a model goes along, the rest is named, once."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import pytest

import dcptool
from dcptool.checkpoint.families import grouped
from dcptool.checkpoint.selection import Renaming
from dcptool.errors import ItemError, UnsafePickleError
from dcptool.ops.convert.convert import ConvertOptions, convert
from tests import damage
from tests.conftest import FOREIGN, run

torch = pytest.importorskip("torch")

from tests.ranks import Shard, save  # noqa: E402

CONFIG = {"architectures": ["Tiny"], "dtype": "float32", "text_config": {"torch_dtype": "float32"}, "eps": 1e-05}
DESCRIBING = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
              "special_tokens_map.json", "chat_template.jinja", "merges.txt", "vocab.json", "LICENSE", "README.md",
              "preprocessor_config.json", "modeling_tiny.py")  # fmt: skip


@pytest.fixture
def model(tmp_path) -> Path:
    """A model folder as transformers saves it, with things of a job beside."""
    from safetensors.torch import save_file

    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": torch.randn(4, 4), "ids": torch.arange(3)}, folder / "model.safetensors", {"format": "pt"})
    for name in DESCRIBING:
        (folder / name).write_text(json.dumps(CONFIG) if name.endswith(".json") else name)
    for rank in range(3):
        torch.save({"seed": rank}, folder / f"rng_rank{rank}.pt")
    torch.save({"lr": 0.1}, folder / "scheduler.pt")
    return folder


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_n39_what_describes_a_model_goes_with_it_and_the_rest_is_named_once(tmp_path, model, to):
    done = convert(model, tmp_path / "out", to, ConvertOptions(check=True))
    for name in DESCRIBING:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert set(done.carried) == set(DESCRIBING)
    assert not list((tmp_path / "out").glob("rng*"))
    [left] = [note for note in done.notes if note.startswith("not carried")]
    assert "rng_rank*.pt (3 files)" in left
    assert "scheduler.pt" in left
    assert dict(done.files) == {
        path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.is_file()
    }
    if to == "dcp":
        assert dcptool.verify(tmp_path / "out", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good


def test_n39_a_cast_model_says_what_it_was_cast_to(tmp_path, model):
    done = convert(model, tmp_path / "out", "safetensors", ConvertOptions(renaming=Renaming(dtype="bfloat16")))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {**CONFIG, "dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}
    assert list(written) == list(CONFIG)
    assert any("config.json names bfloat16 in place of float32" in note for note in done.notes)
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == CONFIG


def test_nothing_is_carried_if_nothing_is_wanted_or_the_output_is_a_file(tmp_path, model):
    done = convert(model, tmp_path / "out", "safetensors", ConvertOptions(side_files=False))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"}
    told = "\n".join(done.notes)
    assert "not carried" in told
    assert "config.json" in told
    result = run("convert", "--to", "torch", str(model), str(tmp_path / "m.pt"))
    assert result.returncode == 0
    assert len(re.findall(r"(?<!_)config\.json", result.stderr)) == 1
    result = run("convert", "--to", "safetensors", "--no-side-files", str(model), str(tmp_path / "bare"))
    assert {path.name for path in (tmp_path / "bare").iterdir()} == {"model.safetensors"}


def test_a_model_folder_of_its_own_kind_may_be_replaced(tmp_path, model):
    convert(model, tmp_path / "out", "safetensors")
    convert(model, tmp_path / "out", "safetensors", ConvertOptions(overwrite=True, side_files=False))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"}


def test_from_dcp_to_dcp_all_goes_that_the_trainer_loads(tmp_path):
    source = FOREIGN / "megatron_tp2" / "iter_0000010"
    convert(source, tmp_path / "iter_0000010", "dcp", ConvertOptions(check=True))
    for name in ("common.pt", "metadata.json"):
        assert (tmp_path / "iter_0000010" / name).read_bytes() == (source / name).read_bytes()
    [verdict] = dcptool.verify(tmp_path / "iter_0000010").verdicts
    assert verdict.resume.resumable
    assert {"common.pt", "metadata.json"} <= set(verdict.marker.files)


def test_a_part_of_a_step_takes_the_models_configuration_of_the_step(tmp_path):
    step = damage.copy(FOREIGN / "trainer_fsdp2" / "checkpoint-2", tmp_path / "checkpoint-2")
    (step / "config.json").write_text("{}")
    done = convert(step / "pytorch_model_fsdp_0", tmp_path / "hf", "safetensors")
    assert done.carried == ("config.json",)
    [left] = [note for note in done.notes if note.startswith("not carried")]
    assert "scheduler.pt" in left
    assert "rng_state_*.pth (2 files" in left
    assert "optimizer_0" in left


@pytest.mark.parametrize("how", ["damaged", "unsafe"])
def test_what_is_wrong_beside_is_refused(tmp_path, how):
    step = damage.copy(FOREIGN / "megatron_tp2" / "iter_0000010", tmp_path / "iter_0000010")
    if how == "damaged":
        damage.truncate(step / "common.pt", 1000)
    else:

        class Evil:
            def __reduce__(self):
                return os.system, ("true",)

        (step / "common.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ItemError if how == "damaged" else UnsafePickleError, match=r"common\.pt"):
        convert(step, tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()
    convert(step, tmp_path / "out", "dcp", ConvertOptions(side_files=False))


def test_objects_of_single_ranks_are_one_line(tmp_path):
    states = [
        {"w": Shard.of(torch.arange(8.0), rank, 4), "step": 7, f"dl.rank{rank}": {"at": rank, "seed": rank}}
        for rank in range(4)
    ]
    source = save(tmp_path / "c", *states)
    result = run("convert", "--to", "safetensors", str(source), str(tmp_path / "m.safetensors"))
    [line] = [line for line in result.stderr.splitlines() if "left out" in line]
    assert "9 objects left out: step, dl.rankN.* (8 entries) of 4 ranks" in line
    assert grouped(["a.rank3.b", "z"]) == ["a.rank3.b", "z"]
