"""The checkpoints the benchmarks run on, made once by torch and kept."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ITEM_NBYTES = 17_000


def make(kind: str, cache: Path, *numbers: int) -> Path:
    """Make a checkpoint of a kind, or find the one made before, in a process of its own.

    The memory of a process that is started counts what its parent has: the harness must stay small.
    """
    command = [sys.executable, "-m", "benchmarks.checkpoints", kind, str(cache), *map(str, numbers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return Path(done.stdout.strip())


def small(cache: Path) -> Path:
    """Return a real FSDP2 + AdamW checkpoint saved by four ranks, under 1 MB."""
    run_dir = cache / "small"
    target = run_dir / "step_2"
    if not (target / ".metadata").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        script = str(ROOT / "fixtures" / "train.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script]
        command += ["--run-dir", str(run_dir), "--steps", "2", "--save-every", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment, capture_output=True)
    return target


def chunks(cache: Path, n_tensors: int, n_ranks: int) -> Path:
    """Return a checkpoint of n_tensors tensors sharded over n_ranks ranks: torch's metadata, data files with holes.

    The metadata is pickled by the installed torch as its own save does: a string per index, a file name per rank.
    """
    target = cache / f"chunks_{n_tensors}x{n_ranks}"
    if (target / ".metadata").exists():
        return target
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    names = [f"model.layers.{index // 8}.block{index % 8}.weight" for index in range(n_tensors)]
    size = torch.Size((4, 1024))
    state = {
        name: metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.float32),
            torch.Size((4 * n_ranks, 1024)),
            [metadata.ChunkStorageMetadata(torch.Size((4 * rank, 0)), torch.Size(size)) for rank in range(n_ranks)],
        )
        for name in names
    }
    storage = {}
    for rank in range(n_ranks):
        file = f"__{rank}_0.distcp"
        for index, name in enumerate(names):
            key = metadata.MetadataIndex(str(name.encode(), "ascii"), torch.Size((4 * rank, 0)), rank)
            storage[key] = filesystem._StorageInfo(file, index * ITEM_NBYTES, ITEM_NBYTES)
        with open(target / file, "wb") as data:
            data.truncate(n_tensors * ITEM_NBYTES)
    whole = metadata.Metadata(state, {name: ("model", name[6:]) for name in names}, storage)
    whole.version = "1.0.0"
    whole.storage_meta = metadata.StorageMeta(str(target))
    (target / ".metadata.tmp").write_bytes(pickle.dumps(whole, 4))
    (target / ".metadata.tmp").rename(target / ".metadata")
    return target


def model(cache: Path, mib: int, on_mesh: int) -> Path:
    """Return a checkpoint of about so many MiB saved by four ranks: Shard(0), or a 2×2 mesh."""
    target = cache / f"model_{mib}{'_mesh' if on_mesh else ''}"
    if not (target / ".metadata").exists():
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        command += ["-m", "benchmarks.save_model", str(target), str(mib), "mesh" if on_mesh else "rows"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, cwd=ROOT)
    return target


def pt(cache: Path, mib: int) -> Path:
    """Return a `.pt` file with the state of `model` of that size, written by torch's own converter."""
    target = cache / f"model_{mib}.pt"
    if not target.exists():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(model(cache, mib, 0), target)
    return target


if __name__ == "__main__":
    print(
        {"small": small, "chunks": chunks, "model": model, "pt": pt}[sys.argv[1]](
            Path(sys.argv[2]), *map(int, sys.argv[3:])
        )
    )
