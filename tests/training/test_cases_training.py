"""Real cases of lost training runs, by their id, as a job that uses dcptool.training meets them."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.training import CheckpointManager  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import Box, job, train, whole  # noqa: E402


def save(root: Path, *steps: int, keep: int | None = None, **more):
    """Train up to the last of the steps in this process, saving each; returns the model."""
    model, optimizer, state = job(**more)
    with CheckpointManager(root, keep) as manager:
        for step in range(1, max(steps) + 1):
            train(model, optimizer, step)
            if step in steps:
                manager.save(step, state)
    return model


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_r04_a_save_in_the_background_marks_and_prunes_only_when_it_is_done(tmp_path, monkeypatch):
    """The crash in the flush window: nothing may point at, or make room for, what is still on its way."""
    write, go_on, writing = FileSystemWriter.write_data, threading.Event(), threading.Event()

    def held(self, plan, planner):
        writing.set()
        assert go_on.wait(60)
        return write(self, plan, planner)

    root = tmp_path / "run"
    model, optimizer, state = job()
    with CheckpointManager(root, keep=1) as manager:
        train(model, optimizer, 10)
        manager.save(10, state)
        monkeypatch.setattr(FileSystemWriter, "write_data", held)
        train(model, optimizer, 20)
        future = manager.async_save(20, state)
        assert writing.wait(60)
        # Here the job may die: the last good one is there, and it is what is found.
        assert not future.done()
        assert names(root) == ["_LEASE", "step_10", "step_20"]
        assert not (root / "step_20" / "_COMPLETE").exists()
        assert dcptool.find_latest(root).verdict.step == 10
        go_on.set()
    assert names(root) == ["step_20"]
    assert dcptool.find_latest(root).verdict.step == 20


@pytest.mark.parametrize("pointer", ["link", "dangling link", "text"])
def test_r04_a_pointer_to_a_step_that_was_never_finished_is_not_followed(tmp_path, pointer):
    root = tmp_path / "run"
    saved = save(root, 10)
    (root / "step_20").mkdir()
    (root / "step_20" / "__0_0.distcp").write_bytes(b"cut")
    if pointer == "text":
        (root / "latest").write_text("step_20\n")
    else:
        (root / "latest").symlink_to("step_20" if pointer == "link" else "step_30")
    model, _, state = job(seed=1)
    with CheckpointManager(root) as manager:
        assert manager.restore(state).step == 10
    assert whole(model) == whole(saved)


def per_rank_job(rank, root, save_it):
    """Save, or restore, loaders that are at another place on each rank; returns what each rank has then."""
    _, _, state = job("ddp", per_rank={"dl": Box(at=rank * 10 if save_it else None)})
    with CheckpointManager(root) as manager:
        if save_it:
            manager.async_save(1, state)
        else:
            report = [tuple(found) for found in manager.restore(state).per_rank]
            return state.per_rank["dl"].state["at"], report
    return None


def test_r17_every_rank_gets_its_own_loader_back(tmp_path):
    values(run_ranks(4, per_rank_job, str(tmp_path / "run"), True))
    checkpoint = dcptool.open(tmp_path / "run" / "step_1")
    assert [checkpoint.value(f"dl.rank{rank}") for rank in range(4)] == [({"at": rank * 10},) for rank in range(4)]
    found = values(run_ranks(4, per_rank_job, str(tmp_path / "run"), False))
    assert [at for at, _ in found] == [0, 10, 20, 30]
    everyone = (0, 1, 2, 3)
    assert all(report == [("dl", everyone, everyone, (), ())] for _, report in found)


@pytest.mark.parametrize(
    ("ranks", "at", "report"),
    [
        (2, [0, 10], ("dl", (0, 1, 2), (0, 1), (), (2,))),
        (4, [0, 10, 20, None], ("dl", (0, 1, 2), (0, 1, 2), (3,), ())),
    ],
)
def test_r18_loaders_of_another_number_of_ranks_are_reported(tmp_path, ranks, at, report):
    values(run_ranks(3, per_rank_job, str(tmp_path / "run"), True))
    found = values(run_ranks(ranks, per_rank_job, str(tmp_path / "run"), False))
    assert [place for place, _ in found] == at
    assert all(told == [report] for _, told in found)


def test_r19_retention_counts_whole_steps_and_leaves_odd_names_alone(tmp_path):
    root = tmp_path / "run"
    save(root, 5, 9, 10)
    crashed = root / "step_7"  # not whole: it must not count
    shutil.copytree(root / "step_5", crashed)
    (crashed / ".metadata").unlink()
    (crashed / "_COMPLETE").unlink()
    for odd in ("step_015x", "step_20.tmp", "notes", "tmp_step_3", "old_1"):
        shutil.copytree(root / "step_5", root / odd)
    outside = tmp_path / "outside"
    shutil.copytree(root / "step_5", outside)
    (root / "step_4").symlink_to(outside)
    model, optimizer, state = job()
    with CheckpointManager(root, keep=2) as manager:
        assert manager.restore(state).step == 10
        train(model, optimizer, 11)
        manager.save(11, state)
    left = ["notes", "old_1", "step_015x", "step_10", "step_11", "step_20.tmp", "step_4", "step_7", "tmp_step_3"]
    assert names(root) == left
    assert names(outside) == [".metadata", "_COMPLETE", "__0_0.distcp"]


def test_r19_a_missing_root_is_a_fresh_start(tmp_path):
    _, _, state = job()
    with CheckpointManager(tmp_path / "not" / "yet") as manager:
        assert manager.restore(state) is None
        manager.save(1, state)
    assert dcptool.find_latest(tmp_path / "not" / "yet").verdict.step == 1


@pytest.mark.parametrize("tracker", ["none", "dangling", "old"])
def test_r20_good_checkpoints_are_found_whatever_the_tracker_says(tmp_path, tracker):
    root = tmp_path / "run"
    save(root, 10, 20)
    if tracker != "none":
        (root / "latest_checkpointed_iteration.txt").write_text("30" if tracker == "dangling" else "10")
    _, _, state = job(seed=1)
    with CheckpointManager(root) as manager:
        assert manager.restore(state).step == 20


def test_r20_a_job_never_starts_anew_over_checkpoints_it_cannot_read(tmp_path):
    """None means that there never was one; everything else is an error."""
    root = tmp_path / "run"
    save(root, 10, 20)
    for step in ("step_10", "step_20"):
        os.truncate(root / step / "__0_0.distcp", 100)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    _, optimizer, state = job(seed=1)
    with CheckpointManager(root) as manager, pytest.raises(TrainingError, match="none could be restored"):
        manager.restore(state)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert not optimizer.state


def test_r35_a_save_before_the_first_step_has_the_optimizer_in_it(tmp_path):
    """Plain torch.save-like code leaves no trace of it; get_state_dict would step it."""
    _, optimizer, state = job()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, state)
    assert not optimizer.state
    checkpoint = dcptool.open(tmp_path / "run" / "step_0")
    moments = [fqn for fqn in checkpoint.tensors if fqn.endswith(".exp_avg")]
    assert len(moments) == 4
    assert len(checkpoint.value("optim_unstarted")) == 4
    _, other, state = job(seed=1)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(state).step == 0
    assert not other.state


@pytest.mark.parametrize("lost", ["all", "one parameter"])
def test_r35_a_checkpoint_without_the_optimizer_is_not_resumed_from(tmp_path, lost):
    import torch.distributed.checkpoint as dcp

    root = tmp_path / "run"
    model, optimizer, state = job()
    train(model, optimizer, 1)
    tree = state.state_dict()
    tree["optim"]["state"] = {} if lost == "all" else {**tree["optim"]["state"], "up.bias": {}}
    dcp.save(tree, checkpoint_id=root / "step_1", no_dist=True)
    _, _, state = job(seed=1)
    with CheckpointManager(root) as manager, pytest.raises(TrainingError) as raised:
        manager.restore(state)
    assert "missing from the checkpoint: " in str(raised.value)
    one = "the optimizer's state of 1 parameter that was saved untrained, frozen perhaps: up.bias"
    assert ("optim.state.up.bias.exp_avg_sq" if lost == "all" else one) in str(raised.value)
    assert ("optim.state.up.weight.exp_avg" in str(raised.value)) == (lost == "all")
