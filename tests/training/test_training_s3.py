"""A run in an object store: save, mark, latest, prune, restore, on one rank and on two."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import fsspec  # noqa: E402

import dcptool  # noqa: E402
from dcptool.training import CheckpointManager  # noqa: E402
from tests import damage  # noqa: E402
from tests.conftest import run as cli  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import job, train, whole  # noqa: E402


def folders(url: str) -> list[str]:
    filesystem = fsspec.filesystem("s3")
    filesystem.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in filesystem.ls(url, detail=False))


def save_steps(rank, url, steps, how, environment):
    """Restore, train on, and save each step; returns where it began, and the weights."""
    import os

    os.environ.update(environment)
    model, optimizer, state = job("fsdp" if environment["RANKS"] != "0" else "plain")
    with CheckpointManager(url, keep=2) as manager:
        restored = manager.restore(state)
        for step in steps:
            train(model, optimizer, step)
            getattr(manager, how)(step, state)
    return restored and restored.step, whole(model)


def test_a_run_on_s3(s3_url, monkeypatch):
    import os

    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    first = values(run_ranks(2, save_steps, s3_url, [1, 2, 3], "async_save", {**environment, "RANKS": "2"}))
    assert first[0][0] is None
    assert folders(s3_url) == ["step_2", "step_3"]  # older ones are deleted
    marker = json.loads(fsspec.filesystem("s3").cat_file(f"{s3_url}/step_3/_COMPLETE"))
    assert (marker["writer"], marker["world_size"], len(marker["files"])) == ("save", 2, 3)
    assert cli("latest", s3_url).stdout == f"{s3_url}/step_3\n"
    # On one rank: what comes back is what two ranks had, and the step is saved anew, narrower.
    model, optimizer, state = job(seed=1)
    with CheckpointManager(s3_url, keep=2) as manager:
        assert manager.restore(state).step == 3
        assert whole(model) == first[0][1]
        manager.save(3, state)
        assert "__1_0.distcp" not in folders(f"{s3_url}/step_3")
        train(model, optimizer, 4)
        manager.save(4, state)
    assert folders(s3_url) == ["step_3", "step_4"]
    assert dcptool.verify(s3_url, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
    # The newest one loses its data: the next older one is what is restored.
    fsspec.filesystem("s3").rm(f"{s3_url}/step_4/__0_0.distcp")
    model, _, state = job(seed=2)
    with CheckpointManager(s3_url) as manager:
        restored = manager.restore(state)
    assert (restored.step, restored.skipped[0][0]) == (3, f"{s3_url}/step_4")
    assert whole(model) == first[0][1]


def test_a_flipped_bit_on_s3(s3_url, tmp_path):
    model, optimizer, state = job()
    with CheckpointManager(s3_url) as manager:
        for step in (1, 2):
            train(model, optimizer, step)
            manager.save(step, state)
    filesystem = fsspec.filesystem("s3")
    checkpoint = dcptool.open(f"{s3_url}/step_2")
    entry = checkpoint.tensors["model.up.weight"]
    place = entry.chunks[0].item.byte_offset + checkpoint.payload(entry, entry.chunks[0]).record.byte_offset
    filesystem.get_file(f"{s3_url}/step_2/__0_0.distcp", str(tmp_path / "file"))
    damage.flip_byte(tmp_path / "file", place)
    filesystem.put_file(str(tmp_path / "file"), f"{s3_url}/step_2/__0_0.distcp")
    _, _, state = job(seed=1)
    with CheckpointManager(s3_url) as manager:
        restored = manager.restore(state)
    assert restored.step == 1
    assert "'model.up.weight': bytes were changed" in restored.skipped[0][1]
