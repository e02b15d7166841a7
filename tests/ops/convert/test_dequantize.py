"""`convert --dequantize`: the values are those that torchao's and torch's own code make of quantised tensors."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

import dcptool
from dcptool.checkpoint.scaled import BLOCK
from dcptool.ops.convert.convert import ConvertOptions
from tests.conftest import MADE_OF_TENSORS, part, run

REAL = [found for found in MADE_OF_TENSORS if found.name.startswith(("ao_weights", "ao_scales"))]
TO_BF16 = ConvertOptions(dequantize="bfloat16", objects="skip", check=True)


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("found", REAL, ids=lambda found: found.name)
def test_values_are_torchaos(found, to, tmp_path):
    path = tmp_path / {"safetensors": "o.safetensors", "torch": "o.pt", "dcp": "o"}[to]
    done = dcptool.convert(found.path, path, to, TO_BF16)
    assert any("dequantised" in note for note in done.notes)
    written = dcptool.open(path)
    checked = 0
    for fqn, expected in found.expected.items():
        if "dequantized" in expected:
            assert written.tensors[fqn].dtype == "bfloat16"
            assert hashlib.sha256(written.read(fqn).tobytes()).hexdigest() == expected["dequantized"]["sha256"], fqn
            checked += 1
    assert checked == len(dcptool.open(found.path).subclasses)
    assert not written.subclasses


def test_a_flipped_bit_in_a_scale_stops_it(tmp_path):
    found = part("ao_weights_pt/model.pt")
    checkpoint = dcptool.open(found.path)
    inner = next(inner for inner in checkpoint.subclasses["model.float8.0.weight"].inner if inner.inner == "scale")
    record = checkpoint.payload(inner, inner.chunks[0]).record
    data = bytearray(found.path.read_bytes())
    data[record.byte_offset + 5] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    done = run("convert", "--to", "safetensors", "--objects", "skip", "--dequantize", "bfloat16",
               tmp_path / "m.pt", tmp_path / "o.safetensors")  # fmt: skip
    assert done.returncode == 3
    assert "CRC32" in done.stderr
    assert not (tmp_path / "o.safetensors").exists()


def quantised_folder(folder, tensors):
    """A HuggingFace folder with an index, as torch's own reader of such wants it, and a configuration."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder.mkdir()
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    return torch


def read_by_torch(torch, folder, shapes, dtype):
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    state = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(folder), target_dtype=dtype), no_dist=True)
    return state


def require_same(torch, path, state):
    written = dcptool.open(path)
    for name, tensor in state.items():
        assert torch.equal(written.read_torch(name), tensor), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_block_fp8_is_as_torch_reads_it(dtype, tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    shapes = {"a.weight": (300, 260), "b.weight": (128, 128), "c.weight": (1, 129)}
    tensors = {name: (torch.randn(shape) * 50).to(torch.float8_e4m3fn) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        tensors[f"{name}_scale_inv"] = torch.rand([-(-n // BLOCK) for n in shape])
    tensors["norm.weight"] = torch.randn(7)
    quantised_folder(tmp_path / "hf", tensors)
    state = read_by_torch(torch, tmp_path / "hf", shapes, getattr(torch, dtype))
    done = run("convert", "--to", "safetensors", "--dequantize", dtype, tmp_path / "hf", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    require_same(torch, tmp_path / "out", state)
    assert set(dcptool.open(tmp_path / "out")) == {*shapes, "norm.weight"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"torch_dtype": dtype}


def test_mxfp4_is_as_torch_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    quantised_folder(tmp_path / "hf", {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales})
    # Loading it whole gives the first 4 of 128 columns only in torch 2.13: its metadata's chunks keep four dimensions.
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path / "hf"), target_dtype=torch.bfloat16)
    whole = SimpleNamespace(storage_offsets=(0, 0, 0), lengths=(3, 10, 128))
    state = {"e.down_proj_blocks": reader._dequantize_tensor_mxfp4(blocks, scales, whole, 0, 0)}
    dcptool.convert(tmp_path / "hf", tmp_path / "out", "dcp", TO_BF16)
    require_same(torch, tmp_path / "out", state)


def test_what_is_not_of_such_blocks_is_not_guessed(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.ones(300, 260).to(torch.float8_e4m3fn)
    quantised_folder(tmp_path / "hf", {"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 2)})
    done = run("convert", "--to", "torch", "--dequantize", "bfloat16", tmp_path / "hf", tmp_path / "o.pt")
    assert done.returncode == 3
    assert "nothing that --dequantize knows" in done.stderr


def test_bands_of_any_border_are_the_same(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(300, 260).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.rand(3, 3)}
    tensors["x_blocks"] = torch.randint(0, 256, (2, 5, 3, 16), dtype=torch.uint8)
    tensors["x_scales"] = torch.randint(120, 130, (2, 5, 3), dtype=torch.uint8)
    quantised_folder(tmp_path / "hf", tensors)
    dcptool.convert(tmp_path / "hf", tmp_path / "one.pt", "torch", TO_BF16)
    monkeypatch.setattr("dcptool.copying.reading.BAND_NBYTES", 74)
    dcptool.convert(tmp_path / "hf", tmp_path / "other.pt", "torch", TO_BF16)
    one, other = dcptool.open(tmp_path / "one.pt"), dcptool.open(tmp_path / "other.pt")
    assert {fqn: np.asarray(one.read(fqn)).tobytes() for fqn in one} == {
        fqn: np.asarray(other.read(fqn)).tobytes() for fqn in other
    }


def test_with_a_dtype_it_is_refused(tmp_path):
    done = run("convert", "--to", "torch", "--dequantize", "bfloat16", "--dtype", "float16",
               part("ao_weights_dcp_w1").path, tmp_path / "o.pt")  # fmt: skip
    assert done.returncode == 2
    assert "two dtypes" in done.stderr
