"""A `.pt` of a Lightning step is what Lightning's own consolidation makes of it.

That is written down here as Lightning 2.6.6 does it, with torch's own unflattening of DCP; Lightning is not needed.
"""

from __future__ import annotations

import os
import pickle
import re

import pytest

import dcptool
from dcptool.errors import ItemError, UnsafePickleError
from dcptool.ops.convert.convert import ConvertOptions, convert
from tests import damage
from tests.conftest import FOREIGN

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEP = FOREIGN / "lightning_modelparallel" / "step=3.ckpt"


def consolidated(step, tmp_path) -> dict:
    """What Lightning does: load the DCP folder whole, rename, add what is in `meta.pt`."""
    dcp_to_torch_save(step, tmp_path / "theirs.pt")
    found = torch.load(tmp_path / "theirs.pt", weights_only=False)
    found.update(torch.load(step / "meta.pt", weights_only=False))
    if "model" in found:
        found["state_dict"] = found.pop("model")
    optimizers = sorted(key for key in found if re.match("optimizer_[0-9]+", key))
    found["optimizer_states"] = [found.pop(key) for key in optimizers]
    return found


def same(a, b, at="") -> None:
    assert type(a) is type(b), at
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, at
        assert torch.equal(a, b), at
    elif isinstance(a, dict):
        assert set(a) == set(b), at
        for key in a:
            same(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for index, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{at}[{index}]")
    else:
        assert a == b, at


@pytest.fixture
def fsdp(tmp_path):
    """A step as FSDPStrategy saves it: `model`, two optimizers, and in `meta.pt` tensors and state of callbacks."""
    weights = {"l1.weight": torch.randn(6, 3), "l1.bias": torch.randn(6)}
    states = [
        {
            "model": {name: Shard.of(tensor, rank, 2) for name, tensor in weights.items()},
            **{
                f"optimizer_{index}": {
                    "state": {name: {"exp_avg": Shard.of(tensor * index, rank, 2), "step": torch.tensor(3.0)}
                              for name, tensor in weights.items()},
                    "param_groups": [{"lr": 0.1, "params": list(weights)}],
                }
                for index in range(2)
            },
        }
        for rank in range(2)
    ]  # fmt: skip
    step = save(tmp_path / "run" / "epoch=0-step=3.ckpt", *states)
    shared = torch.arange(4.0)
    meta = {
        "epoch": 0,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.6",
        "state": {"a": shared, "b": shared},
        "loops": {"fit_loop": {"state_dict": {}, "done": (1, 2)}},
        "callbacks": {"ModelCheckpoint{}": {"best_model_path": "/run/a.ckpt", "score": torch.tensor(0.5)}},
        "hyper_parameters": {"width": 6},
    }
    torch.save(meta, step / "meta.pt")
    return step


def test_g_of_model_parallel(tmp_path):
    done = convert(STEP, tmp_path / "out.ckpt", "torch", ConvertOptions(check=True))
    same(torch.load(tmp_path / "out.ckpt", weights_only=False), consolidated(STEP, tmp_path))
    assert any("meta.pt is merged in" in note for note in done.notes)
    assert not any("not carried" in note for note in done.notes)


def test_g_of_fsdp_with_several_optimizers(tmp_path, fsdp):
    convert(fsdp, tmp_path / "out.pt", "torch", ConvertOptions(check=True))
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    same(found, consolidated(fsdp, tmp_path))
    assert found["state"]["a"].data_ptr() == found["state"]["b"].data_ptr()
    assert torch.load(tmp_path / "out.pt", weights_only=True)["global_step"] == 3
    assert dcptool.verify(tmp_path / "out.pt", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good


@pytest.mark.parametrize(
    "options", [{"keys": ("model.*",)}, {"nesting": "flat"}, {"side_files": False}, {"exclude": ("optimizer_1.*",)}]
)
def test_of_a_part_of_it_names_stay(tmp_path, fsdp, options):
    done = convert(fsdp, tmp_path / "out.pt", "torch", ConvertOptions(**options))
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert not {"state_dict", "optimizer_states", "global_step"} & set(found)
    assert any("meta.pt" in note and "not carried" in note for note in done.notes)


def test_nothing_of_meta_pt_is_executed(tmp_path, fsdp):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"callbacks": {"x": Evil()}}, fsdp / "meta.pt")
    with pytest.raises(UnsafePickleError, match=r"meta\.pt"):
        convert(fsdp, tmp_path / "out.pt", "torch")
    convert(fsdp, tmp_path / "out.pt", "torch", ConvertOptions(trust=True))
    assert not (tmp_path / "ran").exists()


def test_a_damaged_meta_pt_is_refused(tmp_path, fsdp):
    whole = (fsdp / "meta.pt").read_bytes()
    damage.truncate(fsdp / "meta.pt", len(whole) // 2)
    with pytest.raises(ItemError, match=r"meta\.pt"):
        convert(fsdp, tmp_path / "out.pt", "torch")
    (fsdp / "meta.pt").write_bytes(whole)
    at = whole.index(torch.arange(4.0).numpy().tobytes())
    damage.flip_byte(fsdp / "meta.pt", at + 5)
    with pytest.raises(ItemError, match="bytes were changed"):
        convert(fsdp, tmp_path / "out.pt", "torch")
    torch.save([1], fsdp / "meta.pt")
    with pytest.raises(ItemError, match="is no dict"):
        convert(fsdp, tmp_path / "out.pt", "torch")
    assert not (tmp_path / "out.pt").exists()


def test_objects_of_classes_are_carried_unexecuted(tmp_path, fsdp):
    meta = {"hyper_parameters": pickle.PickleBuffer, "loops": {"path": re.compile("a+")}}
    torch.save(meta, fsdp / "meta.pt")
    convert(fsdp, tmp_path / "out.pt", "torch", ConvertOptions(trust=True))
    assert torch.load(tmp_path / "out.pt", weights_only=False)["loops"]["path"].pattern == "a+"
