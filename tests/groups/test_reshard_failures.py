"""Reshards that are killed, stopped, starved or half started: one clear error in time, and nothing is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from tests.commands import HURRY, Commands, Done, Running, wait_for  # noqa: E402
from tests.conftest import ROOT, run_process  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N_TENSORS = 30
PRELUDE = """
import os, time
from dcptool.groups import forked
from dcptool.ops.reshard import member
from dcptool.storage import local
FLAGS = {flags!r}
real_write = member._write
def told_write(group, *rest):
    global RANK
    RANK = group.rank
    with open(f"{{FLAGS}}/{{os.getpid()}}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{{FLAGS}}/{{os.getpid()}}.tmp", f"{{FLAGS}}/{{group.rank}}")
    return real_write(group, *rest)
member._write = told_write
real_sink_write = local.LocalSink.write
def on_write(action):
    def write(self, data):
        action()
        return real_sink_write(self, data)
    local.LocalSink.write = write
"""
SLOW = "on_write(lambda: time.sleep(0.01))\n"
STUCK = "on_write(lambda: time.sleep(100))\n"


def save_source(folder: Path) -> Path:
    """Four ranks, thirty sharded tensors, objects of all and of single ranks."""
    whole = {f"layers.{index}.weight": torch.full((12, 8), float(index)) for index in range(N_TENSORS)}
    states = [
        {
            **{name: Shard.of(tensor, rank, 4) for name, tensor in whole.items()},
            "step": 7,
            f"dl.rank{rank}": {"position": rank},
        }
        for rank in range(4)
    ]
    return save(folder / "run" / "step_7", *states)


@pytest.fixture(scope="module")
def source(once) -> Path:
    return once("source", save_source)


class Job:
    """One reshard of the source, in a folder of its own, with shims."""

    def __init__(self, commands: Commands, source: Path, folder: Path) -> None:
        self.commands, self.source = commands, source
        self.flags = folder / "flags"
        self.flags.mkdir()
        self.out = folder / "out"
        self.out.mkdir()
        self.target = self.out / "step_7"
        self._before = snapshot(source)

    def start(
        self, *args: object, code: str = "", workers: int = 2, real_time: bool = False, **options: Any
    ) -> Running:
        code = ("" if real_time else HURRY) + PRELUDE.format(flags=str(self.flags)) + textwrap.dedent(code)
        command = ["reshard", "--world-size", 3, "--workers", workers, *args, self.source, self.target]
        return self.commands.start(*command, code=code, **options)

    def wait_until_writing(self, running: Running, workers: int = 2) -> list[int]:
        """Wait until all workers write, and return their process ids by rank."""
        wait_for(lambda: all((self.flags / str(rank)).exists() for rank in range(workers)))
        running.children()
        return [int((self.flags / str(rank)).read_text()) for rank in range(workers)]

    def require_nothing(self, running: Running, left: bool = False) -> None:
        """Nothing is left: no process, no output, no change of the source."""
        wait_for(lambda: not running.left(), 10)
        assert snapshot(self.source) == self._before
        found = [path.name for path in self.out.iterdir()]
        assert len(found) == left
        assert all(name.startswith(".dcptool-") for name in found)

    def require_error(self, running: Running, pattern: str, code: int = 3, within: float = 20.0) -> Done:
        """It ends in time with one error of at most two lines, and nothing is left."""
        done = running.wait()
        assert done.code == code, done
        assert done.out == ""
        assert re.search(pattern, done.err), done.err
        assert done.err.count("error:") == 1
        assert len(done.err.splitlines()) <= 2, done.err
        assert done.seconds < within
        self.require_nothing(running)
        return done


@pytest.fixture
def job(commands, source, tmp_path) -> Job:
    return Job(commands, source, tmp_path)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*"))}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class TestLost:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_worker_is_killed(self, job, rank):
        running = job.start(code=SLOW)
        os.kill(job.wait_until_writing(running)[rank], signal.SIGKILL)
        job.require_error(
            running, rf"^error: rank {rank} of 2 was killed by SIGKILL \(out of memory\?.*nothing was publ"
        )

    def test_a_worker_is_ended_by_sigterm(self, job):
        running = job.start(code=SLOW)
        os.kill(job.wait_until_writing(running)[1], signal.SIGTERM)
        job.require_error(running, r"^error: rank 1 of 2 was stopped by SIGTERM; nothing was published")

    def test_a_worker_is_suspended(self, job):
        running = job.start("--timeout", "2s", code=SLOW, real_time=True)
        os.kill(job.wait_until_writing(running)[1], signal.SIGSTOP)
        job.require_error(running, r"^error: rank 1 of 2 gave no sign of life for 2 s", within=10)

    def test_a_worker_never_arrives(self, job):
        code = """
        real_group = forked.ProcessGroup
        def late(store, rank, *rest):
            time.sleep(100 * (rank == 1))
            return real_group(store, rank, *rest)
        forked.ProcessGroup = late
        """
        running = job.start("--timeout", "1s", code=code)
        job.require_error(running, r"^error: rank 1 of 2 never arrived, waited 1 s for it", within=8)

    def test_all_are_suspended_for_longer_than_the_timeout_and_go_on(self, job):
        running = job.start("--timeout", "1s", code=SLOW)
        job.wait_until_writing(running)
        os.killpg(running.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.killpg(running.pid, signal.SIGCONT)
        assert running.wait().code == 0


class TestStopped:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_signals(self, job, number, code):
        running = job.start(code=SLOW)
        job.wait_until_writing(running)
        # A terminal sends Ctrl-C to all of them.
        (os.killpg if number == signal.SIGINT else os.kill)(running.pid, number)
        time.sleep(0.1)
        os.kill(running.pid, number)
        done = running.wait(10)
        assert (done.code, done.out, done.err.strip()) == (code, "", "interrupted" if number == signal.SIGINT else "")
        job.require_nothing(running)

    def test_the_parent_is_killed(self, job):
        running = job.start(code=SLOW)
        job.wait_until_writing(running)
        os.kill(running.pid, signal.SIGKILL)
        job.require_nothing(running)

    def test_the_parent_is_killed_and_the_meeting_place_is_gone(self, job, tmp_path):
        """torch waits for a store's file for minutes; the workers do not."""
        place = tmp_path / "temporary"
        place.mkdir()
        running = job.start(code=SLOW, env={"TMPDIR": str(place)})
        job.wait_until_writing(running)
        os.kill(running.pid, signal.SIGSTOP)
        (folder,) = place.iterdir()
        shutil.rmtree(folder)
        os.kill(running.pid, signal.SIGKILL)
        wait_for(lambda: not running.left(), 15)

    def test_the_parent_is_killed_and_the_workers_are_stuck(self, job):
        running = job.start(code=STUCK)
        job.wait_until_writing(running)
        os.kill(running.pid, signal.SIGKILL)
        job.require_nothing(running, left=True)
        done = job.start().wait()
        assert done.code == 0
        assert re.search(r"note: .*/out/\.dcptool-\w+\.tmp is temporary output of a run that was killed", done.err)


class TestFailed:
    def test_a_bug_on_one_rank(self, job):
        code = "on_write(lambda: 1 // (0 if RANK == 1 else 1))\n"
        running = job.start(code=code)
        job.require_error(running, r"^error: rank 1 of 2 failed, this is a bug in dcptool: ZeroDivisionError: ", 70)

    def test_a_bug_in_the_plan_shows_its_traceback_with_debug(self, job):
        code = "def odd(*_):\n    {}['odd']\nmember.make_plan = odd\n"
        job.require_error(job.start(code=code), r"^error: rank 0 of 2 failed, this is a bug in dcptool: KeyError", 70)
        command = ["--debug", "reshard", "--world-size", 3, job.source, job.target]
        done = job.commands.run(*command, code=PRELUDE.format(flags=str(job.flags)) + code)
        assert "in odd" in done.err

    def test_the_disk_of_one_rank_is_full(self, job):
        code = """
        def full():
            if RANK == 1:
                raise local.StorageError("/data/x: No space left on device")
        on_write(full)
        """
        job.require_error(job.start(code=code), r"^error: rank 1 of 2: .*No space left on device")

    def test_a_real_disk_is_full(self, job, tmp_path):
        mounted = tmp_path / "small"
        mounted.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)]
        if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting is not permitted here")
        try:
            job.target, job.out = mounted / "step_7", mounted
            job.require_error(
                job.start(), r"^error: not enough space: .*/small has 65,536 bytes free, \d+,\d+ are needed"
            )
            blind = "import shutil\nshutil.disk_usage = lambda _: type('Usage', (), {'free': 1 << 40})\n"
            job.require_error(job.start(code=blind), r"^error: rank \d of 2: .*No space left on device")
        finally:
            subprocess.run(["umount", str(mounted)], check=True)

    def test_no_memory_on_one_rank(self, job):
        code = "def short():\n    if RANK == 1:\n        raise MemoryError\non_write(short)\n"
        job.require_error(
            job.start(code=code), r"^error: rank 1 of 2 has no memory left; --threads 1 and fewer --workers"
        )


class TestPlaces:
    def test_two_runs_to_one_place(self, job):
        running = [job.start(code=SLOW) for _ in range(2)]
        done = sorted(one.wait() for one in running)
        assert [one.code for one in done] == [0, 3], done
        assert re.search(r"^error: .*/out/step_7 is there already$", done[1].err.strip())
        assert [path.name for path in job.out.iterdir()] == ["step_7"]
        assert dcptool.verify(job.target, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
        again = job.start()
        assert "is there already; --overwrite replaces it" in again.wait().err
        replaced = job.start("--overwrite", "--check")
        assert replaced.wait().code == 0
        assert [path.name for path in job.out.iterdir()] == ["step_7"]

    def test_places_that_cannot_be_meant(self, job, tmp_path):
        before = snapshot(job.source)
        (tmp_path / "file").write_text("mine")
        cases = {
            str(job.source): "is the source itself",
            f"{job.source}/": "is the source itself",
            str(job.source / "inner"): "lies in the source",
            str(job.source.parent): "holds the source",
            str(tmp_path / "file"): "is a file; the output is a folder",
            str(tmp_path / "file" / "x"): "is no folder: nothing can be written below it",
            "": "the path of the output is empty",
        }
        for target, words in cases.items():
            done = job.commands.run("reshard", "--world-size", 2, "--overwrite", job.source, target)
            assert done.code == 3, target
            assert words in done.err
            assert len(done.err.splitlines()) == 1
        forbidden = "os.access = lambda _, mode: not mode & os.W_OK\n"  # root may write anywhere
        running = job.start(code=forbidden)
        job.require_error(running, r"^error: .*/out cannot be written to: no permission, or .* read-only$")
        assert snapshot(job.source) == before
        assert (tmp_path / "file").read_text() == "mine"

    def test_nothing_it_reads_is_replaced(self, job, tmp_path):
        half = Path(shutil.copytree(job.source, tmp_path / "half"))
        (half / "__0_0.distcp").unlink()
        like = save(tmp_path / "like", {"layers.0.weight": torch.zeros(12, 8)})
        before = snapshot(half), snapshot(like)
        for options, target in ((["--like", like], like), (["--world-size", 2, "--also", half], half)):
            for extra in ([], ["--dry-run"]):
                done = job.commands.run("reshard", *options, *extra, "--overwrite", job.source, target)
                assert done.code == 3
                assert re.search(r"^error: \S* is the source itself, which is never written to", done.err), done.err
        assert (snapshot(half), snapshot(like)) == before


class TestByHand:
    """Processes that are started one by one with torchrun's environment."""

    def start(self, job: Job, port: int, rank: int, size: int, *args: object, code: str = SLOW) -> Running:
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return job.start(*args, code=code, env={**place, "GLOO_SOCKET_IFNAME": "lo"})

    def test_a_rank_that_never_comes(self, job):
        running = self.start(job, free_port(), 0, 2, "--timeout", "1s")
        job.require_error(
            running,
            r"^error: rank 1 of 2 never arrived, waited 1 s for it; --timeout waits longer\n  RANK, .* are set",
            within=9,
        )

    def test_the_meeting_place_does_not_answer(self, job):
        """In a process that imports torch itself: torch's own lines about it must not be seen."""
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = run_process("reshard", "--world-size", 3, "--timeout", "2s", job.source, job.target, env=place)
        assert done.returncode == 3
        assert re.search(
            r"^error: 127.0.0.1:\d+, where the processes meet, does not answer: .*\n  RANK, .* works alone\.\n$",
            done.stderr,
        )

    def test_a_group_of_one_needs_no_meeting_place(self, job):
        """Some clusters set these everywhere, and a job may be using the port."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            done = self.start(job, taken.getsockname()[1], 0, 1, code="").wait()
        assert done.code == 0
        assert "for 3 ranks" in done.out

    def test_all_work_and_rank_0_speaks(self, job):
        port = free_port()
        running = [self.start(job, port, rank, 3, code="") for rank in (2, 1, 0)]
        done = [one.wait() for one in running]
        assert [one.code for one in done] == [0, 0, 0]
        assert [bool(one.out) for one in done] == [False, False, True]
        assert [one.err.count("note:") for one in done[:2]] == [0, 0]
        assert dcptool.verify(job.target, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good

    def test_an_error_is_told_once(self, job):
        port = free_port()
        job.target.mkdir()
        (job.target / "mine").write_text("mine")
        running = [self.start(job, port, rank, 2) for rank in (0, 1)]
        done = [one.wait() for one in running]
        assert [one.code for one in done] == [3, 3]
        assert "is there already" in done[0].err
        assert done[1].err == ""

    @pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGKILL)])
    def test_one_is_stopped(self, job, victim, number):
        port = free_port()
        running = [self.start(job, port, rank, 3, "--timeout", "1s") for rank in range(3)]
        wait_for(lambda: all((job.flags / str(rank)).exists() for rank in range(3)))
        os.kill(running[victim].pid, number)
        done = [one.wait(20) for one in running]
        how = "was stopped" if number == signal.SIGTERM else "gave no sign of life for 1 s"
        for rank, one in enumerate(done):
            assert one.out == ""
            if rank != victim:
                assert one.code == 3
                if victim:  # with rank 0 goes the place where they meet
                    assert re.search(rf"^error: rank {victim} of 3 {how}", one.err), one.err
                assert len(one.err.splitlines()) == 1
        job.require_nothing(running[0])


def test_without_torch(tmp_path, source):
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        sys.modules["torch"] = None
        from dcptool.cli import main
        main(sys.argv[1:])
    """
    command = [sys.executable, "-c", code, "reshard", "--world-size", "2", str(source), str(tmp_path / "out")]
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True)
    assert "would be" in done.stdout
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "error: reshard needs torch: pip install 'dcptool[torch]'; --dry-run does not\n"
    assert not (tmp_path / "out").exists()
