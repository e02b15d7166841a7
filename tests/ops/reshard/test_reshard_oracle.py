"""reshard against real saves of the same state by real process groups, read and loaded by torch, not by us."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import dcptool
from dcptool.ops.reshard.plan import ReshardOptions, make_plan
from tests.forks import run_ranks, values

pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp

from tests import reshard_saves

TENSOR_PARALLEL = ("model.*.up.*=tp:0,dp:0", "model.*.down.weight=tp:1,dp:0", "model.*=dp:0")
TARGETS = {
    **{f"fsdp{count}": ReshardOptions(count) for count in (1, 2, 3, 4, 6, 7, 8)},
    "hsdp2x4": ReshardOptions(mesh="rep=2,shard=4", placements=("model.*=shard:0",)),
    "tp2x3": ReshardOptions(mesh="dp=2,tp=3", placements=TENSOR_PARALLEL),
    "tp2x2": ReshardOptions(4, mesh="dp=2,tp=2", placements=TENSOR_PARALLEL),
}
FROM_A_MESH = {**TARGETS, "fsdp4": ReshardOptions(mesh="dp=4", placements=("model.*=dp:0",))}
PAIRS = [(source, target) for source in ("fsdp4", "fsdp7", "hsdp2x4") for target in TARGETS if target != source]
PAIRS += [("tp2x2", target) for target in ("fsdp4", "tp2x3", "hsdp2x4")] + [("tp2x3", "tp2x2"), ("fsdp8", "fsdp3")]


@pytest.fixture(scope="module")
def saves(once):
    """One state saved in every layout, by groups of processes of these sizes."""

    def save(folder: Path) -> Path:
        values(run_ranks(reshard_saves.N_PROCESSES, reshard_saves.save, folder))
        return folder

    return once("saves", save)


def of_ranks(fqn: str) -> bool:
    """Keys of single ranks: a job of another size has others."""
    return fqn.startswith("dl.rank")


def described(metadata) -> dict[str, object]:
    """Everything a save decides, but for byte offsets, its id, and keys of single ranks."""
    state = {fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if not of_ranks(fqn)}
    tensors = {fqn: entry for fqn, entry in state.items() if hasattr(entry, "chunks")}
    places = {key: place for key, place in metadata.storage_data.items() if not of_ranks(key.fqn)}
    return {
        "order": list(state),
        "kinds": {fqn: type(entry).__name__ for fqn, entry in state.items()},
        "sizes": {fqn: entry.size for fqn, entry in tensors.items()},
        "properties": {fqn: vars(entry.properties) for fqn, entry in tensors.items()},
        "chunks": {fqn: entry.chunks for fqn, entry in tensors.items()},
        "files": {(key.fqn, key.offset): place.relative_path for key, place in places.items()},
        "hints": {(key.fqn, key.offset): key.index for key in places},
        "planner_data": [item for item in metadata.planner_data.items() if not of_ranks(item[0])],
    }


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: str(name))
def test_metadata_is_that_of_a_real_save(saves, tmp_path, source, target):
    options = (FROM_A_MESH if source.startswith("tp") else TARGETS)[target]
    plan = make_plan(str(saves / source), str(tmp_path / "x"), options)
    ours = described(pickle.loads(b"".join(part.data for part in plan.parts[0].layout.metadata.parts)))
    theirs = described(dcp.FileSystemReader(saves / target).read_metadata())
    for what, value in theirs.items():
        assert ours[what] == value, what
    there = {path.name: path.stat().st_size for path in (saves / target).glob("*.distcp")}
    assert {file.name for file in plan.parts[0].layout.files} == set(there)
    assert {file.name for file in plan.parts[0].layout.files if not file.nbytes} <= {
        name for name, size in there.items() if not size
    }


def test_one_rank_source_differs_in_what_was_whole_only(saves, tmp_path):
    """A checkpoint of one rank does not say what was sharded: every tensor with dimensions is."""
    for target in ("fsdp2", "fsdp8"):
        plan = make_plan(str(saves / "fsdp1"), str(tmp_path / "x"), TARGETS[target])
        real = dcp.FileSystemReader(saves / target).read_metadata().state_dict_metadata
        for fqn, entry in real.items():
            if hasattr(entry, "chunks") and fqn != "replica":
                theirs = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                assert sorted(plan.parts[0].arrangement.boxes[fqn]) == sorted(theirs)


@pytest.fixture(scope="module")
def resharded(saves, commands, once):
    """Outputs of real groups of workers: (source, target) → path."""

    def reshard(folder: Path) -> dict[tuple[str, str], Path]:
        pairs = [("fsdp4", "fsdp1"), ("fsdp4", "fsdp3"), ("fsdp4", "fsdp8"), ("fsdp4", "tp2x3"), ("tp2x3", "fsdp8")]
        paths = {}
        for source, target in [*pairs, ("fsdp4", "48")]:
            chosen = TARGETS.get(target, ReshardOptions(48))
            options = ["--mesh", chosen.mesh] if chosen.mesh else ["--world-size", chosen.world_size]
            options += [word for placement in chosen.placements for word in ("--placement", placement)]
            paths[source, target] = folder / f"{source}-{target}"
            done = commands.run("reshard", "--workers", 2, *options, saves / source, paths[source, target])
            assert done.code == 0, done.err
        return paths

    return once("resharded", reshard)


def test_values_are_those_of_the_source(saves, resharded):
    for (source, _), path in resharded.items():
        found = dcptool.compare(saves / source, path)
        assert found.equal, found


def test_stock_load_and_training_go_on_as_from_the_original(saves, resharded, tmp_path):
    """The same model, optimizer, objects and next losses, bit for bit, on as many ranks as it was made for."""
    wanted: dict[str, list[Path]] = {}
    for (source, target), path in resharded.items():
        if target != "48":
            wanted.setdefault(target, []).extend([saves / source, path])
    found = values(run_ranks(reshard_saves.N_PROCESSES, reshard_saves.load, wanted))[0]
    compared = 0
    for (source, target), path in resharded.items():
        if target == "48":
            continue
        original, ours = found[target, saves / source], found[target, path]
        assert ours["losses"] == original["losses"]
        assert ours["state"] == original["state"]
        assert len(set(ours["losses"])) == 3
        assert ours["state"]["train.step"] == "2"
        compared += 1
    assert compared == 5


def load_48(_, ours, source):
    """Load a checkpoint as each of 48 ranks, one after the other; returns how many have an empty part of a tensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.testing._internal.distributed.fake_pg import FakeStore

    metadata = dcp.FileSystemReader(ours).read_metadata()
    shapes = {fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    whole = {fqn: torch.zeros(entry.size, dtype=entry.properties.dtype) for fqn, entry in shapes.items()}
    _load_state_dict(whole, dcp.FileSystemReader(source), no_dist=True)
    one = {fqn: torch.ones_like(tensor) for fqn, tensor in whole.items()}
    _load_state_dict(one, dcp.FileSystemReader(ours), no_dist=True)
    assert all(torch.equal(one[fqn], whole[fqn]) for fqn in whole)
    elements = dict.fromkeys(whole, 0)
    empty = 0
    for rank in range(48):
        dist.init_process_group("fake", rank=rank, world_size=48, store=FakeStore())
        mesh = init_device_mesh("cpu", (48,))
        state, boxes = {}, {}
        for fqn, tensor in whole.items():
            if not tensor.ndim:
                state[fqn] = torch.zeros_like(tensor)
                continue
            local, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, [Shard(0)])
            part = torch.full(local, 77, dtype=tensor.dtype)
            boxes[fqn] = tuple(slice(start, start + size) for start, size in zip(offsets, local, strict=True))
            known = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
            state[fqn] = DTensor.from_local(part, mesh, [Shard(0)], **known)
        _load_state_dict(state, dcp.FileSystemReader(ours), no_dist=True)
        for fqn, box in boxes.items():
            part = state[fqn].to_local()
            assert torch.equal(part, whole[fqn][box]), (rank, fqn)
            elements[fqn] += part.numel()
            empty += not part.numel()
        dist.destroy_process_group()
    assert all(elements[fqn] == tensor.numel() for fqn, tensor in whole.items() if tensor.ndim)
    return empty


def test_stock_load_on_48_ranks(saves, resharded):
    """FORMAT F17: rank by rank in one process."""
    path = resharded["fsdp4", "48"]
    assert values(run_ranks(0, load_48, str(path), str(saves / "fsdp4")))[0] > 0
    assert len(list(path.glob("*.distcp"))) == 48
