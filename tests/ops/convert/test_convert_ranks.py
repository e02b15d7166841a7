"""What `convert --to dcp` writes, loaded by stock torch on one, two and three ranks of one spawned gloo group."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap

import pytest

from dcptool.ops.convert.convert import convert
from tests.conftest import FOREIGN, ROOT, part

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

LOAD = textwrap.dedent(
    """
    import hashlib, json, os, sys, warnings
    warnings.simplefilter("ignore")
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    paths = json.loads(sys.argv[1])
    found = {}
    for size in (1, 2, 3):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        mesh = DeviceMesh.from_group(group, "cpu")
        for path in paths:
            metadata = dcp.FileSystemReader(path).read_metadata()
            state = {}
            for fqn, entry in metadata.state_dict_metadata.items():
                if not hasattr(entry, "size"):
                    continue
                whole = torch.zeros(entry.size, dtype=entry.properties.dtype)
                shard = len(entry.size) > 0 and entry.properties.dtype in (torch.float32, torch.bfloat16, torch.int64)
                state[fqn] = distribute_tensor(whole, mesh, [Shard(0)]) if shard else whole
            dcp.load(state, checkpoint_id=path, process_group=group)
            for fqn, tensor in state.items():
                full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                full = full.resolve_conj().contiguous().view(-1)
                data = full.view(torch.uint8).numpy().tobytes() if full.numel() else b""
                found[f"{size} {path} {fqn}"] = hashlib.sha256(data).hexdigest()
    dist.barrier()
    if rank == 0:
        json.dump(found, open(sys.argv[2], "w"))
    dist.destroy_process_group()
    """
)


def test_one_two_and_three_ranks(tmp_path):
    for name in NAMES:
        convert(FOREIGN / name, tmp_path / name, "dcp")
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    paths = [str(tmp_path / name) for name in NAMES]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    command += [json.dumps(paths), str(tmp_path / "found.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for size in (1, 2, 3):
        for name in NAMES:
            expected = {fqn: entry["sha256"] for fqn, entry in part(name).expected.items() if entry["kind"] == "tensor"}
            loaded = {fqn: found[f"{size} {tmp_path / name} {fqn}"] for fqn in expected}
            assert loaded == expected, (size, name)
    assert hashlib.sha256(b"").hexdigest() in found.values()  # empty tensors too
