"""What `convert --to dcp` writes, loaded by stock torch on one, two and three ranks of one spawned gloo group."""

from __future__ import annotations

import hashlib

import pytest

from dcptool.ops.convert.convert import ConvertOptions, convert
from tests.conftest import FOREIGN, part
from tests.forks import run_ranks, values

pytest.importorskip("torch")
NAMES = [
    "xver_t2130",
    "mesh2d_fsdp_tp",
    "w_zstd",
    "w_safetensors",
    "w_no_collectives",
    "hf_sharded",
    "dtypes_keys_t2130",
]


def load(rank, paths):
    """Load each on one, two and three ranks; returns the hash of every tensor by size of the group, path and name."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    found = {}
    for size in (1, 2, 3):
        group = dist.new_group(list(range(size)))
        if rank < size:
            mesh = DeviceMesh.from_group(group, "cpu")
            for path in paths:
                found |= {(size, path, fqn): digest(tensor) for fqn, tensor in loaded(path, mesh, group).items()}
    dist.barrier()
    return found


def loaded(path, mesh, group):
    """Everything that has a shape, as DTensors where that can be."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    state = {}
    for fqn, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if not hasattr(entry, "size"):
            continue
        whole = torch.zeros(entry.size, dtype=entry.properties.dtype)
        shard = len(entry.size) > 0 and entry.properties.dtype in (torch.float32, torch.bfloat16, torch.int64)
        state[fqn] = distribute_tensor(whole, mesh, [Shard(0)]) if shard else whole
    dcp.load(state, checkpoint_id=path, process_group=group)
    return state


def digest(tensor):
    import torch

    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    full = full.resolve_conj().contiguous().view(-1)
    data = full.view(torch.uint8).numpy().tobytes() if full.numel() else b""
    return hashlib.sha256(data).hexdigest()


def test_one_two_and_three_ranks(tmp_path):
    for name in NAMES:
        rank = 0 if name == "w_no_collectives" else None
        convert(FOREIGN / name, tmp_path / name, "dcp", ConvertOptions(rank=rank))
    found = values(run_ranks(3, load, [str(tmp_path / name) for name in NAMES]))[0]
    for size in (1, 2, 3):
        for name in NAMES:
            expected = {fqn: entry["sha256"] for fqn, entry in part(name).expected.items() if entry["kind"] == "tensor"}
            of_name = {fqn: found[size, str(tmp_path / name), fqn] for fqn in expected}
            assert of_name == expected, (size, name)
    assert hashlib.sha256(b"").hexdigest() in found.values()  # empty tensors too
