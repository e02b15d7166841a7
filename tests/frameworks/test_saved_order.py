"""accelerate counts its saves from 0 again when a job goes on: what is in steps, or their times, tells the order."""

from __future__ import annotations

import os
import shutil

import pytest

import dcptool
from dcptool.runs.counters import order_of_counted
from dcptool.runs.directory import find_runs
from dcptool.runs.order import in_order
from dcptool.storage import locate
from tests.conftest import FOREIGN, OLD
from tests.run_steps import steps

SAVED = FOREIGN / "accelerate_fsdp2"


def order_of(folder):
    [run] = find_runs(locate(folder))
    found = tuple(save.name for save in in_order(run))
    assert order_of_counted(run) in (None, found)
    return found


def made(run, name, seconds):
    shutil.copytree(SAVED, run / name)
    touch(run / name, seconds)


def touch(step, seconds):
    for path in step.rglob("*"):
        os.utime(path, (OLD + seconds, OLD + seconds))


@pytest.fixture
def run(tmp_path):
    """The stale step 2 of a first job; 0 and 1 of a second one, which went on from it."""
    for name, seconds in (("checkpoint_2", 10), ("checkpoint_0", 20), ("checkpoint_1", 30)):
        made(tmp_path / "run", name, seconds)
    return tmp_path / "run"


@pytest.mark.torchfree
def test_by_time_where_numbers_begin_anew(run):
    assert order_of(run) == ("checkpoint_2", "checkpoint_0", "checkpoint_1")
    assert dcptool.find_latest(run).path == str(run / "checkpoint_1")


@pytest.mark.torchfree
def test_times_of_a_copy_tell_nothing(run):
    for step in run.iterdir():
        touch(step, 0)
    assert order_of(run) == ("checkpoint_0", "checkpoint_1", "checkpoint_2")


@pytest.mark.torchfree
def test_steps_of_others_are_in_the_order_of_their_numbers(tmp_path):
    for name, seconds in (("step_2", 10), ("step_1", 20)):
        made(tmp_path / "named", name, seconds)
    assert order_of(tmp_path / "named") == ("step_1", "step_2")
    folder = steps(tmp_path / "other", "checkpoint_1", "checkpoint_2")
    touch(folder / "checkpoint_1", 50)
    assert order_of(folder) == ("checkpoint_1", "checkpoint_2")


def test_the_scheduler_tells_whatever_times_and_numbers_say(run):
    torch = pytest.importorskip("torch")
    for name, reached in (("checkpoint_2", 200), ("checkpoint_0", 300), ("checkpoint_1", 400)):
        torch.save({"last_epoch": reached, "_step_count": 1}, run / name / "scheduler.bin")
        touch(run / name, 0)
    assert order_of(run) == ("checkpoint_2", "checkpoint_0", "checkpoint_1")
    os.truncate(run / "checkpoint_1" / "scheduler.bin", 40)
    touch(run / "checkpoint_1", 0)
    assert order_of(run) == ("checkpoint_0", "checkpoint_1", "checkpoint_2")
