"""A job that is told to end within some seconds: its last save is in time, or the one on its way is finished."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.training import CheckpointManager  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import job, train  # noqa: E402


@pytest.fixture(autouse=True)
def no_handler_of_an_earlier_test():
    """The manager calls the handler there was before, and a command that ran in this process leaves one that exits."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


class Slow(FileSystemWriter):
    """A writer that takes `seconds`, and fails to write the step `fails`."""

    seconds = 0.0
    fails = ""

    def write_data(self, plan, planner):
        time.sleep(Slow.seconds)
        if Path(self.path).name == Slow.fails:
            raise ValueError("no luck")
        return super().write_data(plan, planner)


def loop(rank: int, root: str, within, how: str, told_rank: int, busy: bool, fails: bool) -> dict:
    """Train as the loop in the README does; a rank is told to stop in step 4, while step 3 is being saved, or is not.

    Steps 1 and 2 take 0.5 s to write. Returns what came of it.
    """
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("dcptool.training").addHandler(handler)
    model, optimizer, state = job("fsdp")
    found = {"stopped": None}
    with CheckpointManager(root, keep=None, writer=Slow, stop_within=within) as manager:
        for step in range(1, 10):
            train(model, optimizer, step)
            if step == 4 and rank == told_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            stop = manager.should_stop()
            Slow.seconds, Slow.fails = 0.5, "step_3" if fails else ""
            saved = getattr(manager, how)(step, state)
            found["path"] = saved if how == "save" else saved.result() if stop else ""
            if not busy or step < 3:
                manager.wait()
            if stop:
                found["done at once"] = how == "save" or saved.done()
                found["stopped"] = step
                break
    return {**found, "lines": [line for line in lines if not line.startswith("INFO")]}


def steps(root: Path) -> list[str]:
    assert dcptool.verify(root, DEEP).good
    return sorted(file.parent.name for file in root.glob("step_*/_COMPLETE"))


@pytest.mark.parametrize("told_rank", [0, 1])
def test_there_is_time_for_both(tmp_path, told_rank):
    root = tmp_path / "run"
    for found in values(run_ranks(2, loop, str(root), timedelta(seconds=30), "async_save", told_rank, True, False)):
        assert (found["stopped"], found["path"], found["lines"]) == (4, str(root / "step_4"), [])
        assert found["done at once"]
    assert steps(root) == ["step_1", "step_2", "step_3", "step_4"]


@pytest.mark.parametrize("told_rank", [0, 1])
def test_the_save_on_its_way_is_finished_instead_where_there_is_no_time_for_both(tmp_path, told_rank):
    root = tmp_path / "run"
    first, second = values(run_ranks(2, loop, str(root), 0.7, "async_save", told_rank, True, False))
    for found in (first, second):
        assert (found["stopped"], found["path"]) == (4, str(root / "step_3"))
    (line,) = first["lines"]
    assert line.startswith("WARNING step 4 is not saved: a save takes about ")
    assert line.endswith(f" s are left. The save before it was finished: {root / 'step_3'}")
    assert second["lines"] == []
    assert steps(root) == ["step_1", "step_2", "step_3"]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_it_is_tried_where_none_is_on_its_way(tmp_path, how):
    root = tmp_path / "run"
    first, _ = values(run_ranks(2, loop, str(root), 0.2, how, 1, False, False))
    assert (first["stopped"], first["path"]) == (4, str(root / "step_4"))
    (line,) = first["lines"]
    assert line.startswith("WARNING step 4 may not be saved in time: a save takes about ")
    assert steps(root) == ["step_1", "step_2", "step_3", "step_4"]


def test_a_save_on_its_way_that_fails_does_not_take_the_last_one_with_it(tmp_path):
    root = tmp_path / "run"
    first, second = values(run_ranks(2, loop, str(root), 0.7, "async_save", 0, True, True))
    for found in (first, second):
        assert (found["stopped"], found["path"]) == (4, str(root / "step_4"))
        assert any("step_3 was not saved" in line and "saving step 4 instead" in line for line in found["lines"])
    assert steps(root) == ["step_1", "step_2", "step_4"]


def test_without_a_limit_nothing_is_left_out(tmp_path):
    """And what failed in the background is raised, as ever."""
    root = tmp_path / "run"
    for found in values(run_ranks(2, loop, str(root), None, "async_save", 0, True, False)):
        assert (found["stopped"], found["path"], found["lines"]) == (4, str(root / "step_4"), [])
    assert steps(root) == ["step_1", "step_2", "step_3", "step_4"]
    outcomes = run_ranks(2, loop, str(root), None, "async_save", 0, True, True)
    assert all("the last save failed" in outcome.error for outcome in outcomes)


def test_the_time_counts_from_the_first_signal(tmp_path):
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run", writer=Slow, stop_within=5) as manager:
        Slow.seconds, Slow.fails = 0.3, ""
        train(model, optimizer, 1)
        manager.save(1, state)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager._signals.seconds_left() == pytest.approx(5, abs=0.2)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager._signals.seconds_left() < 4.8
        assert manager.should_stop()
        assert manager.async_save(2, state).done()
    assert steps(tmp_path / "run") == ["step_1", "step_2"]


def test_a_last_save_that_fails_is_an_error(tmp_path):
    with CheckpointManager(tmp_path / "run", writer=Slow, stop_within=5) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()
        Slow.seconds, Slow.fails = 0.0, "step_1"
        with pytest.raises(TrainingError, match="step_1 was not saved: ValueError: no luck"):
            manager.async_save(1, job()[2])
        Slow.fails = ""
        manager.save(1, job()[2])
