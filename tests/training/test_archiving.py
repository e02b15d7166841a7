"""`CheckpointManager(archive=…)`: milestones go elsewhere while training goes on, and only then are deleted here."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import fsspec  # noqa: E402
import torch.distributed as dist  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import StorageError, UnsupportedError  # noqa: E402
from dcptool.ops.copy import retrying  # noqa: E402
from dcptool.ops.copy.journal import LocalJournal, StoreJournal  # noqa: E402
from dcptool.ops.prune import archive as archive_module  # noqa: E402
from dcptool.storage import locate  # noqa: E402
from dcptool.training import CheckpointManager  # noqa: E402
from tests.forks import run_ranks, start, values  # noqa: E402
from tests.launches import launch, told  # noqa: E402
from tests.training_jobs import job, train, whole  # noqa: E402

KILLS = int(os.environ.get("ARCHIVE_KILLS", "4"))
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


@pytest.fixture(autouse=True)
def no_handler_of_an_earlier_test():
    """The manager calls the handler there was before, and a command that ran in this process leaves one that exits."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(params=["local", "s3"])
def archive(request, tmp_path) -> str:
    return f"{request.getfixturevalue('s3_url')}-archive" if request.param == "s3" else str(tmp_path / "archive")


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "dcptool.training")
    return caplog


def names(path: str | Path) -> list[str]:
    """Names of the complete steps there, each byte of which is right."""
    if not dcptool.storage.is_url(str(path)) and not Path(path).exists():
        return []
    report = dcptool.verify(path, DEEP)
    assert report.good, [(verdict.name, verdict.reason) for verdict in report.verdicts]
    return sorted(verdict.name for verdict in report.verdicts)


def folders(path: str | Path) -> list[str]:
    return sorted(entry.name for entry in locate(path).storage.entries() if entry.is_dir)


def settle(manager: CheckpointManager) -> None:
    """Wait until it does nothing in the background."""
    with manager._archiver._changing:
        assert manager._archiver._changing.wait_for(lambda: not manager._archiver._is_running, 60)


def run(root: Path, archive: str, upto: int, how: str = "save", **more) -> dict[int, dict]:
    """Train up to a step and save each; multiples of 2 are milestones. Returns the weights after each step."""
    model, optimizer, state = job()
    weights = {}
    with CheckpointManager(root, more.pop("keep", 1), 2, archive=archive, **more) as manager:
        restored = manager.restore(state)
        for step in range((restored.step if restored else 0) + 1, upto + 1):
            train(model, optimizer, step)
            getattr(manager, how)(step, state)
            weights[step] = whole(model)
    return weights


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_milestones_go_there_and_come_back(tmp_path, archive, how, log):
    weights = run(tmp_path / "run", archive, 7, how)
    assert names(archive) == ["step_2", "step_4", "step_6"]
    assert names(tmp_path / "run") == ["step_7"]
    assert "archived " in log.text
    assert not [record for record in log.records if record.levelno >= logging.WARNING]
    for step in (2, 6):
        model, optimizer, state = job(seed=1)
        with CheckpointManager(tmp_path / "run", 2, 2, archive=archive) as manager:
            restored = manager.restore(state, path=f"{archive}/step_{step}")
            assert (restored.step, whole(model)) == (step, weights[step])
            if step == 6:
                train(model, optimizer, 7)
                manager.save(7, state)
                assert whole(model) == weights[7]


def test_a_milestone_stays_as_long_as_it_is_one_of_the_newest(tmp_path, archive):
    run(tmp_path / "run", archive, 4, keep=3)
    assert names(archive) == ["step_2", "step_4"]
    assert names(tmp_path / "run") == ["step_2", "step_3", "step_4"]
    run(tmp_path / "run", archive, 5, keep=3)
    assert names(tmp_path / "run") == ["step_3", "step_4", "step_5"]
    run(tmp_path / "run", archive, 6, keep=None)
    assert names(tmp_path / "run") == ["step_3", "step_4", "step_5", "step_6"]
    assert names(archive) == ["step_2", "step_4", "step_6"]


class Gate:
    """Copies wait in front of it; counts them."""

    def __init__(self, monkeypatch) -> None:
        self.open, self.began = threading.Event(), threading.Event()
        self.most = self.count = self._now = 0
        original, lock = archive_module.copy_step, threading.Lock()

        def copy_step(*arguments, **options):
            with lock:
                self._now += 1
                self.count += 1
                self.most = max(self.most, self._now)
            self.began.set()
            assert self.open.wait(60)
            try:
                return original(*arguments, **options)
            finally:
                with lock:
                    self._now -= 1

        monkeypatch.setattr(archive_module, "copy_step", copy_step)


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_slow_archive_blocks_no_save_and_there_are_never_two_copies(tmp_path, monkeypatch, how):
    gate = Gate(monkeypatch)
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run", 1, 2, archive=tmp_path / "archive") as manager:
        for step in range(1, 9):
            train(model, optimizer, step)
            getattr(manager, how)(step, state)
            manager.wait()
            assert (tmp_path / "run" / f"step_{step}" / "_COMPLETE").exists()
        assert gate.began.wait(30)
        assert gate.count == 1
        assert names(tmp_path / "run") == ["step_2", "step_4", "step_6", "step_8"]  # nothing goes that is not there
        assert not (tmp_path / "archive").exists()
        gate.open.set()
    assert gate.most == 1
    assert names(tmp_path / "archive") == ["step_2", "step_4", "step_6", "step_8"]
    assert names(tmp_path / "run") == ["step_8"]


def test_a_bucket_that_is_gone_and_comes_back(tmp_path, s3_url, log, monkeypatch):
    monkeypatch.setattr(retrying, "WAITS", (0.01,))
    bucket = f"gone-{uuid.uuid4().hex[:8]}"
    run(tmp_path / "run", f"s3://{bucket}/archive", 3)
    assert "step_2 was not archived: " in log.text
    assert names(tmp_path / "run") == ["step_2", "step_3"]
    assert len([record for record in log.records if record.levelno >= logging.WARNING]) == 1
    fsspec.filesystem("s3").mkdir(bucket)
    run(tmp_path / "run", f"s3://{bucket}/archive", 5)
    assert names(f"s3://{bucket}/archive") == ["step_2", "step_4"]
    assert names(tmp_path / "run") == ["step_5"]


def test_a_failure_is_tried_again_at_the_next_milestone_and_not_before(tmp_path, log, monkeypatch):
    tried = []

    def copy_step(source, *arguments, **options):
        tried.append(Path(source).name)
        raise StorageError("the archive is gone")

    model, optimizer, state = job()
    original = archive_module.copy_step
    monkeypatch.setattr(archive_module, "copy_step", copy_step)
    with CheckpointManager(tmp_path / "run", 1, 3, archive=tmp_path / "archive") as manager:

        def go(*steps):
            for step in steps:
                train(model, optimizer, step)
                manager.save(step, state)
                settle(manager)

        go(3, 4, 5)
        assert tried == ["step_3"]
        go(6)
        assert tried == ["step_3", "step_3", "step_6"]
        assert names(tmp_path / "run") == ["step_3", "step_6"]
        assert "step_3 was not archived: the archive is gone; it stays here" in log.text
        monkeypatch.setattr(archive_module, "copy_step", original)
        go(7, 8)
        assert not (tmp_path / "archive").exists()
        go(9)
        assert names(tmp_path / "archive") == ["step_3", "step_6", "step_9"]
        assert names(tmp_path / "run") == ["step_9"]


def test_what_is_not_proven_there_stays(tmp_path, archive, log, monkeypatch):
    original = archive_module.judge

    def judge(path, *more):
        verdict = original(path, *more)
        if os.fspath(path).endswith("archive/step_2"):
            raise StorageError(f"{path} is not given out")
        return verdict

    monkeypatch.setattr(archive_module, "judge", judge)
    run(tmp_path / "run", archive, 5)
    assert names(tmp_path / "run") == ["step_2", "step_5"]
    monkeypatch.setattr(archive_module, "judge", original)
    run(tmp_path / "run", archive, 6)
    assert names(tmp_path / "run") == ["step_6"]


def test_a_milestone_that_is_saved_anew_is_another_one(tmp_path, archive, log):
    """The archive keeps the first one, and the second stays here."""
    weights = run(tmp_path / "run", archive, 5)
    model, optimizer, state = job(seed=3)
    with CheckpointManager(tmp_path / "run", 1, 2, archive=archive) as manager:
        for step in (4, 5, 6, 7):
            train(model, optimizer, step)
            manager.save(step, state)
    assert "step_4 was not archived: " in log.text
    assert "is there already" in log.text
    assert names(tmp_path / "run") == ["step_4", "step_7"]
    assert names(archive) == ["step_2", "step_4", "step_6"]
    model, _, state = job(seed=1)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.restore(state, path=f"{archive}/step_4")
    assert whole(model) == weights[4]


def test_a_milestone_is_saved_anew_while_it_is_copied(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run", 1, 2, archive=tmp_path / "archive") as manager:
        for step in (2, 3, 2):
            train(model, optimizer, step)
            manager.save(step, state)
        saved = whole(model)
        train(model, optimizer, 3)
        manager.save(3, state)
        gate.open.set()
    assert names(tmp_path / "run") == ["step_3"]
    model, _, state = job(seed=1)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.restore(state, path=tmp_path / "archive" / "step_2")
    assert whole(model) == saved


def test_steps_of_no_manager_are_left_alone(tmp_path):
    run(tmp_path / "run", str(tmp_path / "archive"), 3)
    (tmp_path / "run" / "step_3" / "_COMPLETE").unlink()
    foreign = (tmp_path / "run" / "step_3").rename(tmp_path / "run" / "step_4")
    dcptool.mark_complete(foreign)
    shutil.rmtree(tmp_path / "archive")
    model, optimizer, state = job()
    for adopt, there in ((False, []), (True, ["step_4"])):
        with CheckpointManager(tmp_path / "run", 1, 2, archive=tmp_path / "archive", adopt=adopt) as manager:
            for step in (5, 7):
                train(model, optimizer, step)
                manager.save(step, state)
        assert names(tmp_path / "archive") == there
        assert (foreign.exists(), names(tmp_path / "run")[-1]) == (not adopt, "step_7")


def test_a_job_that_is_told_to_stop_breaks_a_copy_off_and_the_next_one_goes_on(tmp_path, archive, log, monkeypatch):
    notes, slow = [], threading.Event()
    for journal in (LocalJournal, StoreJournal):

        def add(self, name, moved, original=journal.add):
            original(self, name, moved)
            notes.append(name)
            slow.wait()

        monkeypatch.setattr(journal, "add", add)
    model, optimizer, state = job()
    manager = CheckpointManager(tmp_path / "run", 1, 2, archive=archive, stop_within=8)
    train(model, optimizer, 2)
    manager.save(2, state)
    while not notes:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_stop()
    began = time.monotonic()
    threading.Timer(4, slow.set).start()  # after 3 s it is broken off, and what is on its way ends then
    manager.close()
    assert time.monotonic() - began > 1
    assert "step_2 is not archived yet: the next job goes on with it" in log.text
    moved = []
    original = archive_module.copy_step

    def copy_step(*arguments, **options):
        done = original(*arguments, **options)
        moved.append(done)
        return done

    monkeypatch.setattr(archive_module, "copy_step", copy_step)
    run(tmp_path / "run", archive, 3)
    assert moved[0].kept_nbytes > 0
    assert names(archive) == ["step_2"]
    assert names(tmp_path / "run") == ["step_3"]


def test_after_an_exception_nothing_is_waited_for(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    model, optimizer, state = job()
    manager = CheckpointManager(tmp_path / "run", 1, 2, archive=tmp_path / "archive")

    def loop():
        with manager:
            train(model, optimizer, 2)
            manager.save(2, state)
            assert gate.began.wait(30)
            raise KeyError("a bug of the loop")

    with pytest.raises(KeyError):
        loop()
    assert manager._archiver._is_running
    gate.open.set()
    settle(manager)
    assert names(tmp_path / "run") == ["step_2"]


def test_where_it_may_not_be(tmp_path):
    with pytest.raises(ValueError, match="archive_every"):
        CheckpointManager(tmp_path / "run", archive=tmp_path / "archive")
    for inside in ("run", "run/archive"):
        with pytest.raises(UnsupportedError, match="is the run directory"):
            CheckpointManager(tmp_path / "run", 1, 2, archive=tmp_path / inside)


def life(root: str, archive: str, upto: int, victim: int, environment: dict[str, str]) -> None:
    """A life of a job on some ranks: the first one is killed as a file has been copied into the archive."""
    os.environ.update(environment)
    dist.init_process_group("gloo")
    is_first = not Path(f"{root}-second").exists()
    dist.barrier()
    if is_first and dist.get_rank() == 0:
        Path(f"{root}-second").touch()
        for journal in (LocalJournal, StoreJournal):

            def add(self, name, moved, original=journal.add):
                original(self, name, moved)
                Path(f"{root}-killed").touch()
                if victim == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3)  # so that it is not done before the other rank is dead

            journal.add = add
    model, optimizer, state = job("fsdp")
    with CheckpointManager(root, 1, 2, archive=archive, lease_seconds=2) as manager:
        restored = manager.restore(state)
        for step in range((restored.step if restored else 0) + 1, upto + 1):
            train(model, optimizer, step)
            manager.async_save(step, state)
            if is_first:
                manager.wait()
                while step == 2 and not Path(f"{root}-killed").exists():
                    time.sleep(0.01)
                if step == 2 and dist.get_rank() == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_it_copies_the_next_life_goes_on(tmp_path, archive, victim):
    """Under torchrun's agent, on two ranks: the rank that copies is killed, or the other one."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    arguments = (str(tmp_path / "run"), archive, 5, victim, environment)
    values(run_ranks(1, told, tmp_path / "out", launch, 2, 1, life, *arguments, group=False))
    assert (tmp_path / "run-killed").exists(), (tmp_path / "out.err").read_text()
    assert names(archive) == ["step_2", "step_4"]
    assert names(tmp_path / "run") == ["step_5"]
    assert folders(archive) == ["step_2", "step_4"]  # nothing is left of the copy that was killed


def go_on(root: str, archive: str, log: str) -> None:
    """Train and save until it is killed; each step that is marked is a line of the log."""
    torch.set_num_threads(1)
    model, optimizer, state = job(hidden=4000)
    manager = CheckpointManager(root, 1, 2, archive=archive)
    restored = manager.restore(state)
    with open(log, "a") as file:
        for step in range((restored.step if restored else 0) + 1, 1000):
            train(model, optimizer, step)
            manager.save(step, state)
            print(step, file=file, flush=True)


def test_killed_at_any_moment_no_milestone_is_lost(tmp_path):
    """Each that was marked is complete here or there, whenever the job is killed."""
    root, archive, log = tmp_path / "run", tmp_path / "archive", tmp_path / "log"
    log.touch()
    moments = random.Random(0)
    for life in range(KILLS):
        before = len(log.read_text().split())
        process = start(go_on, str(root), str(archive), str(log))
        while len(log.read_text().split()) < before + 2:
            assert process.is_alive()
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        process.join()
        marked = max(map(int, log.read_text().split()))
        here = {verdict.name for verdict in dcptool.verify(root, DEEP).verdicts if verdict.state.value == "complete"}
        there = set(names(archive))
        assert {f"step_{step}" for step in range(2, marked + 1, 2)} <= here | there, f"life {life}"
    model, optimizer, state = job(hidden=4000)
    with CheckpointManager(root, 1, 2, archive=archive) as manager:  # a last life, which ends in order
        step = manager.restore(state).step + 1
        train(model, optimizer, step)
        manager.save(step, state)
    assert {f"step_{milestone}" for milestone in range(2, step + 1, 2)} == set(names(archive))
    assert (root / f"step_{step}" / "_COMPLETE").exists()


def without_a_bucket(root: str, bucket: str, environment: dict[str, str]) -> None:
    """A life of a job on some ranks whose archive is there only after step 3."""
    os.environ.update(environment)
    retrying.WAITS = (0.01,)
    dist.init_process_group("gloo")
    model, optimizer, state = job("fsdp")
    with CheckpointManager(root, 1, 2, archive=f"s3://{bucket}/archive") as manager:
        for step in range(1, 6):
            train(model, optimizer, step)
            manager.async_save(step, state)
            if step == 3:
                manager.wait()
                if dist.get_rank() == 0:
                    settle(manager)
                    assert names(root) == ["step_2", "step_3"]
                    fsspec.filesystem("s3").mkdir(bucket)
                dist.barrier()
    dist.destroy_process_group()


def test_on_two_ranks_an_archive_that_fails_stops_no_training(tmp_path, s3_url):
    bucket = f"gone-{uuid.uuid4().hex[:8]}"
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    arguments = (str(tmp_path / "run"), bucket, environment)
    ended = values(run_ranks(1, told, tmp_path / "out", launch, 2, 0, without_a_bucket, *arguments, group=False))
    assert ended == [0], (tmp_path / "out.err").read_text()
    assert "step_2 was not archived: " in (tmp_path / "out.err").read_text()
    assert names(f"s3://{bucket}/archive") == ["step_2", "step_4"]
    assert names(tmp_path / "run") == ["step_5"]


def test_a_job_that_lost_its_lease_deletes_nothing(tmp_path, monkeypatch, log):
    gate = Gate(monkeypatch)
    model, optimizer, state = job()
    manager = CheckpointManager(tmp_path / "run", 1, 2, archive=tmp_path / "archive")
    for step in (2, 3):
        train(model, optimizer, step)
        manager.save(step, state)
    manager._lease.lost = "the run was taken over"
    gate.open.set()
    settle(manager)
    manager._release()
    assert "step_2 was not archived: the run was taken over" in log.text
    assert names(tmp_path / "run") == ["step_2", "step_3"]
    assert not (tmp_path / "archive" / "step_2").exists()
