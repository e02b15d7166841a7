"""Tensors of classes whose pickled form is their own, which dcptool does not look into: whole as far as can be told.

A subclass of our own stands for them, as torchao's were; torch's own loader says that they are whole.
"""

from __future__ import annotations

import pickle
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checks.check import Level  # noqa: E402
from dcptool.ops.verify.verdict import State  # noqa: E402
from tests.conftest import run  # noqa: E402


def verdict(path, level=Level.METADATA, **options):
    (only,) = dcptool.verify(path, dcptool.VerifyOptions(level=level), **options).verdicts
    return only


class Halves(torch.Tensor):
    """A subclass with tensors inside and a pickled form of its own, as torchao's were."""

    @staticmethod
    def __new__(cls, q, scale):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.bfloat16)

    def __init__(self, q, scale):
        self.q, self.scale = q, scale

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args[0].q.copy_(args[1].q)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if "is_pinned" in str(func):
            return False
        return cls(args[0].q, args[0].scale)

    def __reduce_ex__(self, protocol):
        return (Halves, (self.q, self.scale))


@pytest.fixture
def halves(monkeypatch):
    module = types.ModuleType("quantised_like")
    module.Halves = Halves
    monkeypatch.setitem(sys.modules, "quantised_like", module)
    monkeypatch.setattr(Halves, "__module__", "quantised_like")
    return lambda number: Halves(torch.full((64, 8), number, dtype=torch.int8), torch.full((64,), 0.5))


def test_a_class_nobody_knows(halves, tmp_path):
    dcp.save({"w": halves(3), "b": torch.ones(4)}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    state = {"w": halves(0)}
    with torch.serialization.safe_globals([Halves]):
        dcp.load(state, checkpoint_id=tmp_path / "step_1", no_dist=True)
    assert torch.equal(state["w"].q, halves(3).q)  # stock torch restores it
    assert verdict(tmp_path / "step_1").state is State.COMPLETE
    judged = verdict(tmp_path / "step_1", Level.DEEP)
    assert (judged.state, len(judged.findings)) == (State.OTHER, 1)
    assert "it is a quantised_like.Halves" in judged.findings[0].message
    judged = verdict(tmp_path / "step_1", load=True)
    assert judged.state is State.OTHER
    assert "it is a quantised_like.Halves" in judged.findings[0].message
    torch.save({"w": halves(3), "list": [halves(1)]}, tmp_path / "model.pt")
    assert {fqn: entry.foreign for fqn, entry in dcptool.open(tmp_path / "model.pt").objects.items()} == {
        "w": "a quantised_like.Halves",
        "list.0": "a quantised_like.Halves",
    }


def test_an_object_in_the_place_of_a_tensor_is_damage(tmp_path):
    dcp.save({"o": {"a": [1, 2]}, "w": torch.ones(4)}, checkpoint_id=tmp_path / "s", no_dist=True)
    metadata = pickle.loads((tmp_path / "s" / ".metadata").read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    there = metadata.storage_data
    there[places["w"]], there[places["o.a"]] = there[places["o.a"]], there[places["w"]]
    (tmp_path / "s" / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    assert verdict(tmp_path / "s", Level.RECORDS).state is State.DAMAGED


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("how", ["tensor", "channel"])
def test_quantised_tensors_are_loaded_by_torch_where_it_can(how, tmp_path):
    values = torch.arange(12.0).view(3, 4)
    if how == "tensor":
        made = torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    else:
        made = torch.quantize_per_channel(values, torch.ones(3), torch.zeros(3), 0, torch.qint8)
    dcp.save({"q": made}, checkpoint_id=tmp_path / "s", no_dist=True)
    judged = verdict(tmp_path / "s", load=True)
    assert judged.state is (State.COMPLETE if how == "tensor" else State.OTHER)
    assert "damaged" not in " ".join(finding.message for finding in judged.findings)


def test_a_pt_file_of_dtensors_says_that_it_is_one_ranks(tmp_path):
    """torch.save of a state dict of DTensors: each rank's file holds its slices only."""
    from torch.distributed._tensor import DTensor  # noqa: F401  its class must be there to be pickled
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        state = {"w": distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None), "b": torch.ones(2)}
        torch.save(state, tmp_path / "rank0.pt")
    finally:
        torch.distributed.destroy_process_group()
    done = run("verify", tmp_path / "rank0.pt")
    assert done.returncode == 1
    assert "rank 0 of 2 alone: it holds 1/2 of 1 tensor, such as 'w'" in done.stdout
    assert "Gather the files of all ranks" in run("verify", "--deep", tmp_path / "rank0.pt").stdout
    done = run("convert", "--to", "safetensors", tmp_path / "rank0.pt", tmp_path / "o.safetensors")
    assert done.returncode == 3
    assert "rank 0 of 2 alone" in done.stderr
    assert not (tmp_path / "o.safetensors").exists()
