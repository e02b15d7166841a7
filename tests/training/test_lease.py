"""One job at a time saves to a run: the lease of a run directory, held, refused, lapsed, taken over and lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.runs.lease import Lease, machine, mine, process, read_lease  # noqa: E402
from dcptool.storage import LocalStorage, is_url, storage_at  # noqa: E402
from dcptool.training import CheckpointManager, TrainState, lease  # noqa: E402
from tests.conftest import run as cli  # noqa: E402
from tests.forks import run_ranks, start  # noqa: E402
from tests.launches import launch, told  # noqa: E402

DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP, grace=0.0)
HERE = f"process {os.getpid()} on {socket.gethostname()}, since 2"


def tagged(tag: float) -> TrainState:
    """A job whose weights are all one number: a mix of two saves shows."""
    model = torch.nn.Linear(4, 6, bias=False)
    torch.nn.init.constant_(model.weight, tag)
    return TrainState(model, torch.optim.SGD(model.parameters()))


def tags(path: Path) -> set[float]:
    return set(dcptool.open(path).read("model.weight").reshape(-1).tolist())


def marked(root: Path) -> set[str]:
    return {file.parent.name for file in root.glob("step_*/_COMPLETE")}


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(params=["folder", "s3", "memory"])
def root(request, tmp_path) -> str:
    """A run directory of each kind: S3 has conditional writes, fsspec's memory file system but creation."""
    if request.param == "folder":
        return str(tmp_path / "run")
    return request.getfixturevalue("s3_url") if request.param == "s3" else f"memory://{tmp_path.name}/run"


def lease_in(root: str) -> Lease | None:
    return read_lease(storage_at(root) if is_url(root) else LocalStorage(root))


def put(root: str, lease: Lease) -> None:
    if is_url(root):
        storage_at(root).write("_LEASE", lease.document())
    else:
        os.makedirs(root, exist_ok=True)
        Path(root, "_LEASE").write_bytes(lease.document())


class TestOneManagerAtATime:
    def test_it_is_taken_by_the_first_save_and_given_back_by_close(self, root):
        with CheckpointManager(root, lease_seconds=30) as manager:
            assert manager.restore(tagged(1.0)) is None
            assert lease_in(root) is None
            manager.save(1, tagged(1.0))
            found = lease_in(root)
            assert (found.host, found.pid, found.seconds) == (socket.gethostname(), os.getpid(), 30.0)
            assert abs(found.since - time.time()) < 60
            with CheckpointManager(root) as other:  # who only reads needs none
                assert other.restore(tagged(0.0)).step == 1
            assert lease_in(root).id == found.id
        assert lease_in(root) is None

    @pytest.mark.parametrize("how", ["save", "async_save"])
    def test_a_second_is_refused_with_who_holds_it(self, root, how):
        with CheckpointManager(root, lease_seconds=2) as first, CheckpointManager(root, lease_seconds=2) as second:
            first.save(1, tagged(1.0))
            with pytest.raises(TrainingError, match=f"step_2 was not saved: another job saves to .*: {HERE}"):
                getattr(second, how)(2, tagged(2.0))
            assert first.should_stop() is False
            getattr(first, how)(3, tagged(1.0))
            first.close()
            getattr(second, how)(4, tagged(2.0))  # nobody holds it any more
        assert [verdict.name for verdict in dcptool.verify(root, DEEP).verdicts] == ["step_1", "step_3", "step_4"]

    def test_an_exception_in_the_loop_gives_it_back_once_the_save_in_the_background_is_done(
        self, tmp_path, monkeypatch
    ):
        root, write, go_on = tmp_path / "run", FileSystemWriter.write_data, threading.Event()
        monkeypatch.setattr(FileSystemWriter, "write_data", lambda *args: (go_on.wait(60), write(*args))[1])
        manager = CheckpointManager(root)
        future = manager.async_save(1, tagged(1.0))
        manager.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert lease_in(str(root))
        go_on.set()
        future.result()
        wait_for(lambda: lease_in(str(root)) is None)
        assert marked(root) == {"step_1"}

    def test_it_is_renewed_between_saves(self, root):
        with CheckpointManager(root, lease_seconds=1) as manager:
            manager.save(1, tagged(1.0))
            before = lease_in(root)
            wait_for(lambda: lease_in(root).renewed > before.renewed + 1)
            assert lease_in(root)._replace(renewed=0, version="") == before._replace(renewed=0, version="")

    def test_a_lease_that_somebody_deleted_is_made_anew(self, tmp_path):
        root = tmp_path / "run"
        with CheckpointManager(root) as manager:
            manager.save(1, tagged(1.0))
            before = lease_in(str(root))
            (root / "_LEASE").unlink()
            manager.save(2, tagged(1.0))
            assert lease_in(str(root)).id == before.id
        assert marked(root) == {"step_1", "step_2"}

    def test_wrong_arguments(self, tmp_path):
        for seconds in (0, -1, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="lease_seconds"):
                CheckpointManager(tmp_path, lease_seconds=seconds)


class TestLapsed:
    def test_one_of_another_machine_that_is_not_renewed(self, root, caplog):
        put(root, mine("theirs", 1.0)._replace(machine="another", host="node7", renewed=time.time() - 3600))
        with CheckpointManager(root, lease_seconds=1) as manager:
            manager.save(1, tagged(1.0))
            assert lease_in(root).id not in ("", "theirs")
        assert f"took over from process {os.getpid()} on node7" in caplog.text

    def test_old_times_of_one_that_is_renewed_are_another_clock(self, root):
        """The clock of the other machine is an hour behind: what counts is that its lease changes."""
        theirs = mine("theirs", 1.0)._replace(machine="another", host="node7")
        ended = threading.Event()

        def renew():
            while not ended.is_set():
                put(root, theirs._replace(renewed=time.time() - 3600))
                time.sleep(0.1)

        put(root, theirs._replace(renewed=time.time() - 3600))
        thread = threading.Thread(target=renew)
        thread.start()
        try:
            with CheckpointManager(root, lease_seconds=1) as manager, pytest.raises(TrainingError, match="on node7"):
                manager.save(1, tagged(1.0))
        finally:
            ended.set()
            thread.join()
        assert lease_in(root).id == "theirs"

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 1, "id": "x", "seconds": "no"}', b"\0" * 5000])
    def test_what_is_no_lease_lapses_too(self, tmp_path, monkeypatch, data):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "_LEASE").write_bytes(data)
        os.utime(tmp_path / "run" / "_LEASE", (1, 1))
        found = lease_in(str(tmp_path / "run"))
        assert found == Lease("", renewed=1.0, seconds=60.0)
        assert found.is_old()
        monkeypatch.setattr(lease, "_has_lapsed", lambda lease, unchanged: lease.is_old())  # which takes a minute
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, tagged(1.0))

    def test_a_pid_that_is_another_process_now(self, tmp_path):
        assert process(os.getpid())
        assert not mine("x", 60.0).is_dead()
        assert mine("x", 60.0)._replace(began="1").is_dead()
        assert not mine("x", 60.0)._replace(began="1", machine="another").is_dead()
        assert not process(2**22 + 1)
        assert machine()

    def test_of_many_that_take_one_over_at_once_one_holds_it(self, root):
        put(root, mine("theirs", 1.0)._replace(began="1"))  # its process has ended
        leases = [lease.RunLease(root, 4.0) for _ in range(6)]
        holding = []

        def take(one):
            try:
                one.hold(lambda: None)
                one.confirm()
                holding.append(one.id)
            except TrainingError:
                pass

        threads = [threading.Thread(target=take, args=(one,)) for one in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there = lease_in(root).id
        for one in leases:
            one._ended.set()
        assert there in holding
        if not root.startswith("memory"):  # which has no conditional writes
            assert holding == [there]


# ---- real processes ----


def save_on(root: str, tag: float, seconds: float, out: str, stop_in: str = "") -> None:
    """Save one step after the other, as another job; what it is told goes to a file.

    It stops itself in step 5: before a file is opened, or with one open.
    """
    create_stream = FileSystem.create_stream

    def stop():
        Path(out).with_suffix(".writing").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    @contextmanager
    def stopping(self, path, mode):
        here = "step_5" in str(path) and not Path(out).with_suffix(".writing").exists()
        if here and stop_in == "in a save":
            stop()
        with create_stream(self, path, mode) as stream:
            if here and stop_in == "with a file open":
                stop()
            yield stream

    FileSystem.create_stream = stopping
    try:
        with CheckpointManager(root, keep=None, lease_seconds=seconds) as manager:
            for step in range(1, 10_000):
                manager.save(step, tagged(tag))
                manager.should_stop()
                time.sleep(0.05)
        message = "done"
    except TrainingError as error:
        message = str(error)
    Path(out).with_suffix(".tmp").write_text(message)
    os.rename(Path(out).with_suffix(".tmp"), out)


def test_after_a_kill_the_next_job_on_this_machine_saves_at_once(tmp_path, caplog):
    root = tmp_path / "run"
    job = start(save_on, str(root), 1.0, 60.0, str(tmp_path / "out"))
    wait_for(lambda: "step_3" in marked(root))
    job.kill()
    job.join()
    assert (root / "_LEASE").exists()
    began = time.monotonic()
    with CheckpointManager(root, keep=None) as manager:
        manager.save(20_000, tagged(2.0))
        assert time.monotonic() - began < 20  # a lease lasts a minute
    assert f"took over from process {job.pid} on " in caplog.text
    assert not (root / "_LEASE").exists()
    assert all(verdict.whole for verdict in dcptool.verify(root, DEEP).verdicts)


@pytest.mark.parametrize("ended", [False, True], ids=["while the second saves", "when the second has ended"])
@pytest.mark.parametrize("where", ["between saves", "in a save", "with a file open"])
def test_a_job_that_stood_still_notices_and_marks_nothing(tmp_path, where, ended):
    """SIGSTOP stands for a machine that hangs. In a save it comes back to the very step the second has saved anew."""
    root, out = tmp_path / "run", tmp_path / "out"
    in_save = where != "between saves"
    job = start(save_on, str(root), 1.0, 1.5, str(out), where)
    if in_save:
        wait_for(out.with_suffix(".writing").exists)
    else:
        wait_for(lambda: "step_3" in marked(root))
        os.kill(job.pid, signal.SIGSTOP)
    before = marked(root)
    try:
        with CheckpointManager(root, keep=None, lease_seconds=1.5) as manager:
            manager.save(5 if in_save else 20_000, tagged(2.0))
            after = marked(root)
            if ended:
                manager.close()
            os.kill(job.pid, signal.SIGCONT)
            wait_for(out.exists)
    finally:
        job.kill()
        job.join()
    assert "taken over while this job did not renew its lease" in out.read_text()
    assert (f"process {os.getpid()} on" in out.read_text()) == (not ended)
    assert marked(root) == after
    assert after == before | {"step_5" if in_save else "step_20000"}
    for step in after:
        assert tags(root / step) == {2.0 if step in ("step_5", "step_20000") else 1.0}
        assert dcptool.verify(root / step, DEEP).good


def test_a_job_that_stood_still_while_it_looked_notices_too(tmp_path, monkeypatch):
    """It has read its own lease, stands still, and goes on when the second job has come and gone."""
    import dcptool.training.lease as module

    clock = [0.0]
    monkeypatch.setattr(module, "_now", lambda: clock[0])
    with CheckpointManager(tmp_path, lease_seconds=5.0) as manager:
        manager.save(1, tagged(1.0))
        lease = manager._lease
        lease._ended.set()  # nobody else renews it
        read = lease._file.read

        def read_and_stand_still():
            found = read()
            clock[0] += 60
            lease._file.remove()
            return found

        monkeypatch.setattr(lease._file, "read", read_and_stand_still)
        lease.confirm()
        monkeypatch.setattr(lease._file, "read", read)
        with pytest.raises(TrainingError, match="taken over"):
            lease.confirm()


def train_and_save(root: str, tag: float, seconds: float, first: int, count: int) -> None:
    """What each rank of a job under torchrun does; says what it was told."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    try:
        with CheckpointManager(root, keep=None, lease_seconds=seconds) as manager:
            for step in range(first, first + count):
                manager.save(step, tagged(tag))
                time.sleep(0.1)
        message = "done"
    except TrainingError as error:
        message = f"refused {error.message}"
    os.write(1, f"{dist.get_rank()} {message}\n".encode())  # whole lines of both ranks
    dist.destroy_process_group()


def test_of_two_torchrun_jobs_one_saves(tmp_path):
    root, outs = tmp_path / "run", [tmp_path / "one", tmp_path / "two"]
    jobs = [
        start(told, 0, out, launch, 2, 0, train_and_save, str(root), float(number), 3.0, 1, 60)
        for number, out in enumerate(outs, 1)
    ]
    for job in jobs:
        job.join(120)
        assert job.exitcode == 0
    said = [sorted(out.read_text().splitlines()) for out in outs]
    (winner,) = [number for number, lines in enumerate(said, 1) if lines == ["0 done", "1 done"]]
    loser = [line for line in said[2 - winner] if "refused" in line]
    assert [line.split()[:2] for line in loser] == [["0", "refused"], ["1", "refused"]]
    assert "another job saves to" in loser[0]
    assert loser[0][1:] == loser[1][1:]
    assert len(marked(root)) == 60
    assert {tag for step in marked(root) for tag in tags(root / step)} == {float(winner)}


def test_workers_of_a_torchrun_that_was_killed_go_on_and_the_next_job_waits_for_them(tmp_path):
    root, outs = tmp_path / "run", [tmp_path / "one", tmp_path / "two"]
    old = start(told, 0, outs[0], launch, 2, 0, train_and_save, str(root), 1.0, 60.0, 1, 40)
    wait_for(lambda: len(marked(root)) > 2)
    old.kill()
    new = start(told, 0, outs[1], launch, 2, 0, train_and_save, str(root), 2.0, 60.0, 101, 3)
    new.join(120)
    assert sorted(outs[1].read_text().splitlines()) == ["0 done", "1 done"], outs[1].with_name("two.err").read_text()
    found = {step: tags(root / step) for step in marked(root)}
    assert {step for step, tag in found.items() if tag == {2.0}} == {"step_101", "step_102", "step_103"}
    assert all(tag == {1.0} for step, tag in found.items() if len(step) < 8)
    assert all(verdict.whole for verdict in dcptool.verify(root, DEEP).verdicts)


def lose_it(rank: int, root: str) -> list[str]:
    """Rank 0's lease is another's all at once; returns what this rank is told, by save and by the next call."""
    messages = []
    manager = CheckpointManager(root, keep=None)
    manager.save(1, tagged(1.0))
    if rank == 0:
        put(root, mine("theirs", 60.0))
    for call in (lambda: manager.save(2, tagged(1.0)), manager.should_stop, lambda: manager.save(3, tagged(1.0))):
        try:
            call()
        except TrainingError as error:
            messages.append(str(error))
    manager.close()
    return messages


def test_all_ranks_are_told_and_no_more_is_saved(tmp_path):
    root = tmp_path / "run"
    outcomes = run_ranks(2, lose_it, str(root))
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for message in (*outcomes[0].value, *outcomes[1].value):
        assert "run was taken over while this job did not renew its lease: process" in message
    assert [len(outcome.value) for outcome in outcomes] == [3, 3]
    assert marked(root) == {"step_1"}
    assert lease_in(str(root)).id == "theirs"  # close gives back only what is ours


def test_commands_say_that_a_job_holds_a_run_and_nothing_else(tmp_path):
    root = tmp_path / "run"
    with CheckpointManager(root, keep=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, tagged(float(step)))
        done = cli("prune", root, "--keep", "1", "--dry-run")
        assert done.returncode == 0
        assert f"a job saves here: {HERE}" in done.stdout
        done = cli("prune", root, "--keep", "2", "--yes", "--json")
        assert [note["kind"] for note in json.loads(done.stdout)["notes"]] == ["run-held"]
        assert marked(root) == {"step_2", "step_3"}
        for command in ("verify", "latest", "inspect"):
            done = cli(command, root)
            assert (done.returncode, "_LEASE" in done.stdout + done.stderr) == (0, False)
    assert "saves here" not in cli("prune", root, "--keep", "1", "--dry-run").stdout
    put(str(root), mine("dead", 60.0)._replace(began="1"))
    assert "saves here" not in cli("prune", root, "--keep", "1", "--dry-run").stdout
