"""`verify --load` of `.pt` files and safetensors: loaded with torch and safetensors, or said not to be."""

from __future__ import annotations

import io
import os
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import save_file  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import UnsupportedError  # noqa: E402
from dcptool.ops.verify.verdict import State  # noqa: E402
from tests.conftest import part, run  # noqa: E402
from tests.damage import copy, flip_byte  # noqa: E402


def loaded(path, trust=False):
    (verdict,) = dcptool.verify(path, load=True, trust=trust).verdicts
    return verdict


class Config:
    """A class whose package is not there when it is loaded again."""


@pytest.fixture
def with_config(tmp_path, monkeypatch):
    module = types.ModuleType("trainer_of_theirs")
    module.Config = Config
    monkeypatch.setitem(sys.modules, "trainer_of_theirs", module)
    monkeypatch.setattr(Config, "__module__", "trainer_of_theirs")
    torch.save({"w": torch.ones(3), "config": Config()}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_a_state_dict_is_loaded(tmp_path):
    torch.save({"w": torch.ones(3), "n": {"b": torch.zeros(2, 2)}, "step": 3}, tmp_path / "a.pt")
    verdict = loaded(tmp_path / "a.pt")
    assert verdict.state is State.COMPLETE
    assert f"torch {torch.__version__} loaded 2 tensors and 1 objects" in [found.message for found in verdict.findings]


def test_it_is_torch_that_loads(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    calls = []
    real = torch.load

    def load(path, **options):
        calls.append((path, options))
        return real(path, **options)

    monkeypatch.setattr(torch, "load", load)
    loaded(tmp_path / "a.pt")
    assert calls == [(str(tmp_path / "a.pt"), {"map_location": "cpu", "weights_only": True, "mmap": True})]
    loaded(tmp_path / "a.pt", trust=True)
    assert calls[1][1]["weights_only"] is False


@pytest.mark.parametrize("name", ["hf_sharded", "hf_consolidated"])
def test_safetensors_are_loaded_tensor_by_tensor(name):
    verdict = loaded(part(name).path)
    assert verdict.state is State.COMPLETE
    count = len(dcptool.open(part(name).path).tensors)
    assert any(f"loaded {count} tensors" in found.message for found in verdict.findings)


def test_what_needs_a_class_is_not_proven_and_not_damaged(with_config, monkeypatch):
    verdict = loaded(with_config)
    assert verdict.state is State.OTHER
    assert verdict.findings[0].kind == "not-loaded"
    assert "trainer_of_theirs.Config" in verdict.findings[0].message
    assert "--trust" in verdict.findings[0].next_step
    assert loaded(with_config, trust=True).state is State.COMPLETE
    monkeypatch.delitem(sys.modules, "trainer_of_theirs")
    verdict = loaded(with_config, trust=True)
    assert verdict.state is State.OTHER
    assert "No module named 'trainer_of_theirs'" in verdict.findings[0].message


def test_code_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/executed",))

    torch.save({"w": torch.ones(3), "x": Evil()}, tmp_path / "a.pt")
    verdict = loaded(tmp_path / "a.pt")
    assert verdict.state is State.UNSAFE
    assert "unsafe-metadata" in {found.kind for found in verdict.findings}
    assert not (tmp_path / "executed").exists()


def test_what_torch_refuses_is_an_error(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    save_file({"w": np.ones(3)}, tmp_path / "a.safetensors")

    def fail(*args, **options):
        raise RuntimeError("this version does not read it. More words")

    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr("safetensors.safe_open", fail)
    for name in ("a.pt", "a.safetensors"):
        verdict = loaded(tmp_path / name)
        assert verdict.state is State.DAMAGED
        assert verdict.findings[0].kind == "torch-cannot-load"
        assert verdict.findings[0].message.endswith("RuntimeError: this version does not read it")
        assert run("verify", "--load", tmp_path / name).returncode == 1


def test_without_torch_or_in_a_store_it_says_so(tmp_path, monkeypatch):
    import fsspec

    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    buffer = io.BytesIO((tmp_path / "a.pt").read_bytes())
    with fsspec.open("memory://load/a.pt", "wb") as file:
        file.write(buffer.getvalue())
    with pytest.raises(UnsupportedError, match="reads local files"):
        loaded("memory://load/a.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("verify", "--load", tmp_path / "a.pt")
    assert done.returncode == 3
    assert "pip install 'dcptool[torch]'" in done.stderr


def test_values_are_what_the_levels_are_for(tmp_path):
    """torch.load checks no CRC32: a flipped bit loads, and --deep finds it."""
    folder = copy(part("hf_sharded").path, tmp_path / "c")
    file = sorted(folder.iterdir())[0]
    flip_byte(file, file.stat().st_size - 1)
    assert loaded(folder).state is State.COMPLETE
