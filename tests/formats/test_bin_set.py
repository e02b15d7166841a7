"""Models in several `.bin` files: by index, by name, and with something wrong."""

from __future__ import annotations

import json
import os
import shutil
import zipfile

import numpy as np
import pytest

import dcptool
from dcptool.errors import CheckpointNotFoundError, MetadataError
from tests.conftest import FOREIGN, OLD, run
from tests.damage import flip_byte

SET, SINGLE = FOREIGN / "hf_bin_sharded_tied", FOREIGN / "hf_bin_single_bf16"
INDEX, SECOND = "pytorch_model.bin.index.json", "pytorch_model-00002-of-00004.bin"
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(SET, tmp_path / "model")


def verdict(path, options=DEEP):
    return dcptool.verify(path, options).verdicts[0]


def kinds(path):
    return {finding.kind for finding in verdict(path).findings if finding.severity.name != "NOTE"}


@pytest.mark.torchfree
class TestWhatIsThere:
    def test_by_folder_by_index_and_by_names_it_is_the_same(self, model):
        whole = dcptool.open(model)
        by_index = dcptool.open(model / INDEX)
        (model / INDEX).unlink()
        by_names = dcptool.open(model)
        assert list(whole) == list(by_index) == list(by_names)
        assert len(whole) == 30
        for fqn in whole:
            assert whole.read(fqn).tobytes() == by_index.read(fqn).tobytes() == by_names.read(fqn).tobytes()

    def test_a_folder_with_a_single_one_opens(self):
        assert dcptool.open(SINGLE)["lm_head.weight"].dtype == "bfloat16"
        assert dcptool.open(SINGLE / "pytorch_model.bin").format.name == "torch_save"

    @pytest.mark.parametrize("name", ["adapter_model.bin", "diffusion_pytorch_model.bin", "pytorch_model.fp16.bin"])
    def test_names_of_others(self, tmp_path, name):
        shutil.copy(SINGLE / "pytorch_model.bin", tmp_path / name)
        assert len(dcptool.open(tmp_path)) == 30

    def test_safetensors_beside_go_first_and_say_so(self, model):
        shutil.copy(FOREIGN / "hf_consolidated" / "model-00001-of-00002.safetensors", model)
        opened = dcptool.open(model)
        assert opened.format.name == "safetensors"
        assert "other-weights" in {finding.kind for finding in opened.problems}


@pytest.mark.torchfree
class TestSomethingIsWrong:
    def test_a_missing_file(self, model):
        (model / SECOND).unlink()
        assert kinds(model) == {"missing-file"}
        assert verdict(model).state is dcptool.State.INCOMPLETE
        (model / INDEX).unlink()
        assert verdict(model).state is dcptool.State.INCOMPLETE

    def test_a_flipped_byte(self, model):
        opened = dcptool.open(model)
        entry = opened.tensors["model.layers.0.mlp.up_proj.weight"]
        flip_byte(model / SECOND, opened.payload(entry, entry.chunks[0]).record.byte_offset + 5)
        found = verdict(model)
        assert found.state is dcptool.State.DAMAGED
        assert SECOND in found.reason

    def test_a_file_cut_short(self, model):
        (model / SECOND).write_bytes((model / SECOND).read_bytes()[:5000])
        os.utime(model / SECOND, (OLD, OLD))  # nobody writes it now
        found = verdict(model)
        assert found.state in (dcptool.State.DAMAGED, dcptool.State.INCOMPLETE)
        assert SECOND in found.reason

    def test_two_files_with_one_name(self, model):
        weights = json.loads((model / INDEX).read_text())
        shutil.copy(model / SECOND, model / "again.bin")
        weights["weight_map"]["more"] = "again.bin"
        (model / INDEX).write_text(json.dumps(weights))
        assert kinds(model) == {"duplicate-name", "missing-tensor"}

    def test_an_index_that_says_otherwise(self, model):
        weights = json.loads((model / INDEX).read_text())
        weights["weight_map"]["lm_head.weight"] = SECOND
        (model / INDEX).write_text(json.dumps(weights))
        assert kinds(model) == {"missing-tensor"}
        shutil.copy(model / SECOND, model / "pytorch_model.fp16.bin")
        assert kinds(model) == {"missing-tensor", "unlisted-file"}

    @pytest.mark.parametrize("file", ["../outside.bin", "/etc/passwd"])
    def test_an_index_that_leads_outside(self, model, file):
        (model / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(MetadataError, match="outside the folder"):
            dcptool.open(model)

    def test_no_index_and_several(self, model):
        (model / INDEX).write_text("{}")
        with pytest.raises(MetadataError, match="not an index"):
            dcptool.open(model)
        shutil.copy(SET / INDEX, model / "other.bin.index.json")
        with pytest.raises(CheckpointNotFoundError, match="2 indexes"):
            dcptool.open(model)

    def test_code_in_one_of_the_files(self, model):
        with zipfile.ZipFile(model / SECOND, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.")
            archive.writestr("archive/version", "3\n")
        assert verdict(model, dcptool.VerifyOptions()).state is dcptool.State.UNSAFE


class TestOthersReadIt:
    @pytest.mark.parametrize("folder", [SET, SINGLE], ids=lambda path: path.name)
    @pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
    def test_it_becomes_any_format(self, folder, to, tmp_path):
        torch = pytest.importorskip("torch")
        suffix = {"torch": "m.pt", "safetensors": "m.safetensors", "dcp": "m"}[to]
        dcptool.convert(folder, tmp_path / suffix, to)
        truth = {}
        for file in sorted(folder.glob("*.bin")):
            truth |= torch.load(file, weights_only=True)
        converted = dcptool.open(tmp_path / suffix)
        assert set(converted) == set(truth)
        for fqn, tensor in truth.items():
            assert torch.equal(converted.read_torch(fqn), tensor)

    def test_torch_loads_each_of_its_files(self, model):
        pytest.importorskip("torch")
        result = run("verify", "--load", model)
        assert result.returncode == 0, result.stderr
        assert "30 tensors" in result.stdout

    def test_diff_with_the_same_as_safetensors(self, tmp_path):
        pytest.importorskip("torch")
        dcptool.convert(SET, tmp_path / "m.safetensors", "safetensors")
        assert run("diff", SET, tmp_path / "m.safetensors").returncode == 0

    def test_it_is_resharded(self, tmp_path):
        pytest.importorskip("torch")
        result = run("reshard", "--world-size", 3, SET, tmp_path / "three")
        assert result.returncode == 0, result.stderr
        ours, source = dcptool.open(tmp_path / "three"), dcptool.open(SET)
        assert ours.world_size == 3
        assert all(np.array_equal(ours.read(fqn), source.read(fqn)) for fqn in source)
