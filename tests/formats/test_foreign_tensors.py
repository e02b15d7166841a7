"""Tensors of forms and classes that dcptool does not look into: whole as far as can be told, never damaged.

Real ones are torchao's weights and optimizer states, and torch's quantised tensors; a subclass of our own stands for
every other. torch's own loader says that they are whole.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checkpoint.kinds import Severity  # noqa: E402
from dcptool.checks.check import Level  # noqa: E402
from dcptool.errors import DcptoolError, UnsupportedError  # noqa: E402
from dcptool.ops.verify.verdict import State  # noqa: E402
from tests.conftest import NOT_LOOKED_INTO, OLD, foreign_tensors, part, run  # noqa: E402
from tests.damage import flip_byte  # noqa: E402

DCP = [found for found in NOT_LOOKED_INTO if found.path.is_dir()]


def by_name(found):
    return found.name


def verdict(path, level=Level.METADATA, **options):
    (only,) = dcptool.verify(path, dcptool.VerifyOptions(level=level), **options).verdicts
    return only


@pytest.mark.parametrize("found", NOT_LOOKED_INTO, ids=by_name)
def test_by_metadata_it_is_complete_with_a_note(found):
    judged = verdict(found.path)
    (note,) = [finding for finding in judged.findings if finding.kind == "unsupported-item"]
    assert (judged.state, note.severity) == (State.COMPLETE, Severity.NOTE)
    count, _, what = note.message.partition(" tensors are not looked into")
    assert what
    assert 1 < int(count) <= len(foreign_tensors(found))  # of DCP those whose items are too short for a plain tensor
    assert note.fqn in foreign_tensors(found)
    assert "not proven" in note.message
    done = run("inspect", found.path)
    assert done.returncode == 0
    assert note.message in " ".join(done.stdout.split())


@pytest.mark.parametrize("level", [Level.RECORDS, Level.DEEP])
@pytest.mark.parametrize("found", NOT_LOOKED_INTO, ids=by_name)
def test_looked_at_closely_it_is_not_proven_and_nothing_else(found, level):
    judged = verdict(found.path, level)
    assert judged.state is State.OTHER
    assert {finding.fqn for finding in judged.findings} == foreign_tensors(found)
    for finding in judged.findings:
        assert finding.kind == "unsupported-item"
        assert "not proven" in finding.message
        assert "again" not in finding.next_step
    assert judged.tally.n_items == len(found.expected)  # their checksums are looked at as those of others


@pytest.mark.parametrize("found", NOT_LOOKED_INTO, ids=by_name)
def test_what_is_beside_them_is_read(found):
    checkpoint = dcptool.open(found.path)
    assert set(checkpoint) == set(found.expected)
    for fqn, expected in found.expected.items():
        if fqn in foreign_tensors(found):
            with pytest.raises((UnsupportedError, DcptoolError)):
                checkpoint.read(fqn)
        elif expected["kind"] == "tensor":
            assert hashlib.sha256(checkpoint.read(fqn).tobytes()).hexdigest() == expected["sha256"]


@pytest.mark.parametrize("found", NOT_LOOKED_INTO, ids=by_name)
def test_a_flipped_bit_in_one_is_still_damage(found, tmp_path):
    copied = tmp_path / "copy"
    shutil.copytree(found.path, copied) if found.path.is_dir() else shutil.copy(found.path, copied)
    file = copied / "__0_0.distcp" if copied.is_dir() else copied
    checkpoint = dcptool.open(found.path)
    fqn = sorted(foreign_tensors(found))[0]
    entry = checkpoint[fqn]
    item = entry.chunks[0].item if fqn in checkpoint.tensors else entry.item
    chunk = entry.chunks[0] if fqn in checkpoint.tensors else None
    records = checkpoint.source.examine(entry, chunk, item).records
    record = max(records, key=lambda record: record.nbytes if record.name.startswith("data/") else -1)
    flip_byte(file, item.byte_offset + record.byte_offset + record.nbytes // 2)
    judged = verdict(copied, Level.DEEP)
    assert judged.state is State.DAMAGED
    assert "wrong-crc" in {finding.kind for finding in judged.findings}


@pytest.mark.parametrize("found", DCP, ids=by_name)
def test_a_run_of_such_steps_is_resumed_from_and_not_deleted(found, tmp_path):
    folder = tmp_path / "run"
    for name in ("step_10", "step_20", "step_30"):
        shutil.copytree(found.path, folder / name)
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    assert run("latest", folder).stdout.strip().endswith("step_30")
    assert run("latest", "--deep", folder).returncode == 1
    done = run("prune", folder, "--keep", "3", "--include-incomplete", "--older-than", "1s", "--yes")
    assert done.returncode == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step_10", "step_20", "step_30"]
    done = run("mark", folder / "step_30")
    assert done.returncode == 3
    assert "not proven" in done.stderr
    assert "damaged" not in done.stderr


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
@pytest.mark.parametrize("found", DCP, ids=by_name)
def test_a_conversion_of_items_is_refused_not_as_damaged(found, to, tmp_path):
    done = run("convert", "--to", to, found.path, tmp_path / ("out.pt" if to == "torch" else "out"))
    assert done.returncode == 3
    assert "cannot be read here" in done.stderr or "safetensors cannot hold 'q." in done.stderr
    assert "--to torch" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_pt_file_of_them_loses_none_without_a_word(tmp_path):
    found = part("ao_weights_pt/model.pt")
    done = run("convert", "--to", "safetensors", found.path, tmp_path / "out.safetensors")
    assert done.returncode == 3
    assert "10 tensors are of a form or class that dcptool does not look into" in done.stderr
    assert not list(tmp_path.iterdir())
    done = run("convert", "--to", "safetensors", "--objects", "skip", found.path, tmp_path / "out.safetensors")
    assert done.returncode == 0
    assert "11 objects left out" in done.stderr + done.stdout
    done = run("convert", "--to", "torch", found.path, tmp_path / "out.pt")
    assert done.returncode == 0
    before, after = dcptool.open(found.path), dcptool.open(tmp_path / "out.pt")
    assert {fqn: entry.foreign for fqn, entry in before.objects.items()} == {
        fqn: entry.foreign for fqn, entry in after.objects.items()
    }


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
