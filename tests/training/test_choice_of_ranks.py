"""Managers on some of the ranks, on object stores with options, and what FSDP1 gives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.training import CheckpointManager, TrainState  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training.test_choices import loaded, same  # noqa: E402
from tests.training_jobs import Box, build, job, train, whole  # noqa: E402

DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


def save_on_some(rank: int, root: str, how: str) -> list:
    """Of four ranks, 1 and 3 hold a model and save it, twice with new managers; the last fails on rank 3 in step 3."""
    from torch.distributed.checkpoint import FileSystemWriter

    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        with pytest.raises(ValueError, match="this rank is not in process_group: make the manager on the ranks of"):
            CheckpointManager(root, process_group=group)
        return []
    model, optimizer, state = job(per_rank={"loader": Box(place=rank)})
    for steps in ((1, 2), (3, 4)):
        with CheckpointManager(root, keep=None, process_group=group) as manager:
            restored = manager.restore(state)
            for step in steps:
                train(model, optimizer, step)
                if step == 3 and rank == 3:
                    write, FileSystemWriter.write_data = FileSystemWriter.write_data, lambda *_: 1 / 0
                try:
                    getattr(manager, how)(step, state)
                    manager.wait()
                except TrainingError as error:
                    said = str(error)
                if step == 3 and rank == 3:
                    FileSystemWriter.write_data = write
            assert not manager.should_stop()
    return [restored.step, said, whole(model)]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_manager_on_some_of_the_ranks(tmp_path, how):
    root = tmp_path / "run"
    outside, one, also_outside, other = values(run_ranks(4, save_on_some, str(root), how))
    assert outside == also_outside == []
    assert one == other
    assert one[0] == 2
    assert "step_3 was not saved: rank 1: ZeroDivisionError" in one[1]  # of the group
    assert sorted(path.name for path in root.iterdir()) == ["step_1", "step_2", "step_4"]
    assert json.loads((root / "step_4" / "_COMPLETE").read_text())["world_size"] == 2
    assert dcptool.verify(root, DEEP).good
    model, _, state = job(seed=1)
    with CheckpointManager(root) as manager:
        assert manager.restore(state).step == 4
    assert whole(model) == one[2]


def fsdp1(meshed: bool):
    """A job of FullyShardedDataParallel, with or without a device mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    mesh = {"device_mesh": init_device_mesh("cpu", (2,))} if meshed else {}
    model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True, **mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return model, optimizer, TrainState(model, optimizer)


def save_fsdp1(rank: int, folder: str) -> dict:
    """Save a job of FSDP1 in both ways; returns what was refused, and whether the weights came back."""
    found = {}
    for meshed in (False, True):
        for how in ("save", "async_save"):
            model, optimizer, state = fsdp1(meshed)
            with CheckpointManager(Path(folder, f"{how}{meshed}"), keep=None) as manager:
                train(model, optimizer, 1)
                try:
                    getattr(manager, how)(1, state)
                except TrainingError as error:
                    found[how, meshed] = str(error)
                    manager.save(1, state)
                    assert not manager.should_stop()
                before = [parameter.detach().clone() for parameter in model.parameters()]
                train(model, optimizer, 2)
                assert manager.restore(state).step == 1
                assert all(map(torch.equal, before, model.parameters()))
    return found


def test_fsdp1_without_a_mesh_cannot_be_copied_in_the_background_and_is_told_so_at_the_first_call(tmp_path):
    first, second = values(run_ranks(2, save_fsdp1, str(tmp_path)))
    assert first == second
    assert list(first) == [("async_save", False)]  # save works, and with a mesh both do
    message = first["async_save", False]
    assert "FullyShardedDataParallel (FSDP1) without device_mesh gives ShardedTensors" in message
    assert "device_mesh=init_device_mesh(…), or use fully_shard; or call save, not async_save" in message
    folders = [tmp_path / f"{how}{meshed}" / "step_1" for how in ("save", "async_save") for meshed in (False, True)]
    for folder in folders:
        assert dcptool.verify(folder, DEEP).good
        assert same(loaded(folder), loaded(folders[0]))


def test_a_url_with_options(s3_url, monkeypatch):
    """Where the store is and who asks is said only to the manager: all of a run's life is under these options."""
    import fsspec
    from s3fs import S3FileSystem

    options = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    S3FileSystem.clear_instance_cache()
    model, optimizer, state = job()
    more = {"storage_options": options, "writer": {"thread_count": 2}}
    with CheckpointManager(s3_url, keep=2, **more) as manager:
        assert manager.restore(state) is None
        for step in (1, 2, 3):
            train(model, optimizer, step)
            manager.async_save(step, state)
        manager.wait()
        other, _, again = job(seed=1)
        assert manager.restore(again).step == 3
    assert whole(other) == whole(model)
    there = [path.rpartition("/")[2] for path in fsspec.filesystem("s3", **options).ls(s3_url, detail=False)]
    assert sorted(there) == ["step_2", "step_3"]
    assert dcptool.find_latest(s3_url, DEEP).verdict.step == 3  # in this process nobody has to say it again
    S3FileSystem.clear_instance_cache()
