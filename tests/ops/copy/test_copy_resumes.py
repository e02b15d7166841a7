"""Whatever stops a copy, nothing wrong looks complete, and the next one moves only the rest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import ItemError, StorageError
from dcptool.ops.copy.copy import copy_steps
from dcptool.ops.copy.step import CopyOptions
from dcptool.ops.verify.verdict import VerifyOptions
from dcptool.storage import LocalStorage
from tests.conftest import FOREIGN, OLD, ROOT, run
from tests.damage import flip_byte
from tests.ops.copy.proxy import Proxy, Weather
from tests.ops.copy.test_copy_stores import contents, store_contents

SOURCE = FOREIGN / "xver_t2130"
MIB = 1 << 20
N_LARGE = 6


@pytest.fixture
def step(tmp_path) -> Path:
    """A step with some files of a MiB each beside the checkpoint."""
    folder = Path(shutil.copytree(SOURCE, tmp_path / "run" / "step_1"))
    for index in range(N_LARGE):
        (folder / f"state_{index}.bin").write_bytes(random.Random(index).randbytes(MIB))
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    return folder


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr("dcptool.ops.copy.retrying.WAITS", (0.01, 0.02))


class Interrupted(BaseException):
    """As Ctrl-C is."""


def stopping_after(nbytes: int, error: BaseException):
    """Progress that raises once so many bytes have passed."""
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done >= nbytes:
            raise error

    return progress


def total(step: Path) -> int:
    return sum(map(len, contents(step).values()))


@pytest.mark.parametrize("where", ["local", "s3", "memory"])
def test_a_copy_that_stopped_goes_on_with_the_rest(step, tmp_path, where, request):
    urls = {"local": lambda: str(tmp_path / "out"), "s3": lambda: f"{request.getfixturevalue('s3_url')}/step_1"}
    target = urls.get(where, lambda: f"memory://{random.random()}/step_1")()
    with pytest.raises(Interrupted):
        copy_steps(step, target, CopyOptions(threads=1), progress=stopping_after(3 * MIB + MIB // 2, Interrupted()))
    assert not (tmp_path / "out").exists()
    moved = []
    done = copy_steps(step, target, CopyOptions(threads=1), progress=moved.append, expect=lambda n: moved.append(-n))
    assert sum(moved) == 0  # what was announced is what was moved
    kept = done.steps[0].kept_nbytes
    assert kept >= 2 * MIB
    assert sum(n for n in moved if n > 0) == total(step) - kept
    found = contents(tmp_path / "out") if where == "local" else store_contents(target)
    marker = json.loads(found.pop("_COMPLETE"))
    assert found == contents(step)
    assert marker["sha256"] == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    assert sorted(os.listdir(tmp_path)) == (["out", "run"] if where == "local" else ["run"])


def stopped(step: Path, target: Path) -> tuple[Path, Path]:
    """Stop a copy half way; gives its temporary folder and its journal."""
    with pytest.raises(Interrupted):
        copy_steps(step, target, CopyOptions(threads=1), progress=stopping_after(4 * MIB, Interrupted()))
    [temporary] = target.parent.glob(".dcptool-*.tmp")
    [journal] = target.parent.glob(".dcptool-*.journal")
    return temporary, journal


class TestDoubtful:
    """What cannot be proven to be there is moved anew."""

    def finished(self, step: Path, target: Path) -> int:
        done = copy_steps(step, target)
        found = contents(target)
        del found["_COMPLETE"]
        assert found == contents(step)
        assert sorted(os.listdir(target.parent)) == ["out", "run"]
        return done.steps[0].kept_nbytes

    def test_nothing(self, step, tmp_path):
        stopped(step, tmp_path / "out")
        assert self.finished(step, tmp_path / "out") == 3 * MIB

    def test_bytes_that_changed(self, step, tmp_path):
        temporary, _ = stopped(step, tmp_path / "out")
        flip_byte(temporary / "state_0.bin", 5000)
        assert self.finished(step, tmp_path / "out") == 2 * MIB

    def test_a_file_that_was_cut(self, step, tmp_path):
        temporary, _ = stopped(step, tmp_path / "out")
        os.truncate(temporary / "state_0.bin", 5000)
        assert self.finished(step, tmp_path / "out") == 2 * MIB

    def test_a_file_that_is_gone(self, step, tmp_path):
        temporary, _ = stopped(step, tmp_path / "out")
        (temporary / "state_0.bin").unlink()
        assert self.finished(step, tmp_path / "out") == 2 * MIB

    def test_a_source_that_changed(self, step, tmp_path):
        stopped(step, tmp_path / "out")
        flip_byte(step / "state_0.bin", 5000)
        assert self.finished(step, tmp_path / "out") == 2 * MIB

    def test_a_file_that_is_no_longer_in_the_source(self, step, tmp_path):
        stopped(step, tmp_path / "out")
        (step / "state_0.bin").unlink()
        assert self.finished(step, tmp_path / "out") == 2 * MIB

    def test_something_nobody_knows(self, step, tmp_path):
        temporary, _ = stopped(step, tmp_path / "out")
        (temporary / "other").mkdir()
        (temporary / "other" / "file").write_text("1")
        (temporary / ".dcptool-0.tmp").write_text("1")
        assert self.finished(step, tmp_path / "out") == 3 * MIB

    def test_a_torn_last_line(self, step, tmp_path):
        _, journal = stopped(step, tmp_path / "out")
        os.truncate(journal, journal.stat().st_size - 10)
        assert self.finished(step, tmp_path / "out") == 2 * MIB

    @pytest.mark.parametrize("content", [b"", b"\0" * 5000, b'{"schema": 9, "source": "x"}\n', b"[1]\nnull\n{}\n"])
    def test_a_journal_that_says_nothing(self, step, tmp_path, content):
        _, journal = stopped(step, tmp_path / "out")
        journal.write_bytes(content)
        assert self.finished(step, tmp_path / "out") == 0

    def test_what_a_marker_denies(self, step, tmp_path):
        """A marker that came after the first run says that the file was another: it is read again, and refused."""
        stopped(step, tmp_path / "out")
        dcptool.mark_complete(step, checksums=True)
        document = json.loads((step / "_COMPLETE").read_text())
        document["sha256"]["state_0.bin"] = "0" * 64
        (step / "_COMPLETE").write_text(json.dumps(document))
        with pytest.raises(ItemError, match=r"state_0\.bin is not what _COMPLETE lists"):
            copy_steps(step, tmp_path / "out")
        assert os.listdir(tmp_path) == ["run"]

    def test_another_source(self, step, tmp_path):
        stopped(step, tmp_path / "out")
        step = Path(shutil.copytree(step, tmp_path / "run" / "other"))
        assert self.finished(step, tmp_path / "out") == 0


def test_two_at_once(step, tmp_path):
    """The second is refused, whatever the first has done so far."""
    refused = []

    def progress(nbytes: int) -> None:
        with pytest.raises(StorageError, match="somebody else copies to this place") as caught:
            copy_steps(step, tmp_path / "out")
        refused.append(caught.value)

    copy_steps(step, tmp_path / "out", CopyOptions(threads=1), progress=progress)
    assert refused
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk(step, tmp_path, monkeypatch, code, call):
    """Said at once, with the file's name; once there is room, the rest is moved."""
    original, left = getattr(os, call), [4]

    def fails(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return original(*args)

    monkeypatch.setattr(os, call, fails)
    began = time.monotonic()
    with pytest.raises(StorageError, match=os.strerror(code)):
        copy_steps(step, tmp_path / "out", CopyOptions(threads=1))
    assert time.monotonic() - began < 5
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    done = copy_steps(step, tmp_path / "out")
    assert done.steps[0].kept_nbytes > 0
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.fixture
def disk(tmp_path):
    """A disk of 9 MB, where one can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("only root mounts a disk")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(done.stderr.decode())
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_real_disk_is_full(step, disk):
    """Before anything is written, if that shows; else when somebody else fills it meanwhile."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(4 * MIB))
    with pytest.raises(StorageError, match="not enough space"):
        copy_steps(step, disk / "out")
    assert os.listdir(disk) == ["ballast"]
    ballast.unlink()

    def progress(nbytes: int) -> None:
        if not ballast.exists():
            with open(ballast, "wb", buffering=0) as file:
                file.write(bytes(4 * MIB))

    with pytest.raises(StorageError, match=r"state_\d\.bin: No space left on device"):
        copy_steps(step, disk / "out", CopyOptions(threads=1), progress=progress)
    assert not (disk / "out").exists()
    ballast.unlink()
    done = copy_steps(step, disk / "out").steps[0]  # there is no room for what was copied and all of it once more
    assert done.kept_nbytes >= MIB
    assert is_wrong(step, disk / "out") == ""
    assert os.listdir(disk) == ["out"]


def test_what_may_pass_is_tried_again_and_said(step, tmp_path, monkeypatch, no_waiting):
    original, failures = LocalStorage.read_into, {"state_0.bin": 2, "state_1.bin": 1}

    def read_into(self, name, byte_offset, out):
        if failures.get(name, 0):
            failures[name] -= 1
            raise StorageError(f"{name}: slow down") from TimeoutError("slow down")
        original(self, name, byte_offset, out)

    monkeypatch.setattr(LocalStorage, "read_into", read_into)
    said = []
    done = copy_steps(step, tmp_path / "out", say=said.append)
    assert done.steps[0].retries == len(said) == 3
    assert "state_0.bin: state_0.bin: slow down; trying again in 0.02 s" in said
    failures["state_0.bin"] = 1
    command = run("copy", step, tmp_path / "again")
    assert (command.returncode, "note: state_0.bin: " in command.stderr) == (0, True)
    failures["state_0.bin"] = 1
    assert run("copy", "--quiet", step, tmp_path / "quiet") == (0, "", "")


def test_what_does_not_pass_is_given_up_with_the_files_name(step, tmp_path, monkeypatch, no_waiting):
    original = LocalStorage.read_into

    def read_into(self, name, byte_offset, out):
        if name == "state_3.bin":
            raise StorageError("slow down") from ConnectionResetError("reset")
        original(self, name, byte_offset, out)

    monkeypatch.setattr(LocalStorage, "read_into", read_into)
    with pytest.raises(StorageError, match=r"state_3\.bin: slow down; given up after 3 attempts"):
        copy_steps(step, tmp_path / "out")
    monkeypatch.undo()
    assert copy_steps(step, tmp_path / "out").steps[0].kept_nbytes > 0


class TestNetwork:
    @pytest.fixture
    def proxy(self, s3_url, monkeypatch, no_waiting):
        """A proxy in front of the store, which s3fs goes through from now on."""
        monkeypatch.setattr("dcptool.storage.base.PATIENCE", (0.01, 0.02))
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore; s3fs and we try again too
        with Proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            fsspec.filesystem("s3").clear_instance_cache()
            yield proxy
            proxy.weather = Weather()
            fsspec.filesystem("s3").clear_instance_cache()

    @pytest.mark.parametrize(
        "weather",
        [Weather(delayed=0.2), Weather(cut=0.01), Weather(refused=0.3), Weather(0.1, 0.005, 0.1)],
        ids=["delays", "cuts", "refuses", "all"],
    )
    def test_bad_weather(self, step, tmp_path, s3_url, proxy, weather):
        """Whatever happens on the way: either a copy that is right, or none, and the next one goes on."""
        url = f"{s3_url}/step_1"
        proxy.weather = weather
        for _ in range(8):
            try:
                copy_steps(step, url)
                break
            except StorageError:
                proxy.weather, bad = Weather(), proxy.weather
                assert "_COMPLETE" not in store_contents(url)
                proxy.weather = bad
        assert proxy.spoilt
        proxy.weather = Weather()
        copy_steps(step, url)
        found = store_contents(url)
        del found["_COMPLETE"]
        assert found == contents(step)
        proxy.weather = weather
        for _ in range(8):
            try:
                copy_steps(url, tmp_path / "back")
                break
            except StorageError:
                assert not (tmp_path / "back").exists()
        proxy.weather = Weather()
        copy_steps(url, tmp_path / "back")
        assert contents(tmp_path / "back").keys() == {*found, "_COMPLETE"}
        assert dcptool.verify(tmp_path / "back", VerifyOptions(Level.DEEP)).good

    def test_the_network_is_gone_and_comes_back(self, step, s3_url, proxy):
        """The bytes that pass the proxy in the second run are those of the files that were not there."""
        url = f"{s3_url}/step_1"

        def progress(nbytes: int) -> None:
            if proxy.sent > 4 * MIB:
                proxy.weather = Weather(dark=True)

        with pytest.raises(StorageError, match="given up after"):
            copy_steps(step, url, CopyOptions(threads=1), progress=progress)
        proxy.weather = Weather()
        assert "_COMPLETE" not in store_contents(url)
        before = proxy.sent
        done = copy_steps(step, url).steps[0]
        moved = proxy.sent - before
        assert done.kept_nbytes >= 3 * MIB
        assert done.nbytes - done.kept_nbytes <= moved < done.nbytes - done.kept_nbytes + MIB // 2


def is_wrong(step: Path, out: Path) -> str:
    """Say what is wrong with a copy that has its name, "" if nothing is, or it has none."""
    if not out.exists():
        return ""
    found = contents(out)
    marker = found.pop("_COMPLETE", None)
    if found != contents(step):
        return f"differs: {found.keys() ^ contents(step).keys()}"
    return "" if marker else "has its name and no marker"


def killed(step: Path, target: str, seconds: float, env: dict[str, str] | None = None) -> int:
    """Copy in a process of its own, which is killed after a while; returns its exit code."""
    command = [sys.executable, "-c", WARM, str(step), target]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, **(env or {})}) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            return process.wait()


WARM = """if True:
    import sys
    import dcptool
    from dcptool.ops.copy.copy import copy_steps
    from dcptool.ops.verify.verify import verify
    verify("fixtures/foreign/xver_t2130")
    if "://" in sys.argv[2]:
        from dcptool.storage import locate
        try:
            locate(sys.argv[2])
        except dcptool.errors.DcptoolError:
            pass
    print("ready", flush=True)
    copy_steps(sys.argv[1], sys.argv[2])
"""


def kill_often(step: Path, target: str, times: int, look) -> tuple[int, int]:
    """Kill copies at random moments, each going on where the last was killed; returns how many were, and finished."""
    chance = random.Random(times)
    began = time.monotonic()
    killed(step, target, 60)
    longest = time.monotonic() - began
    n_killed = n_finished = 0
    look(last=True)
    for _ in range(times):
        code = killed(step, target, chance.uniform(0, longest * 0.6))
        n_killed += code == -signal.SIGKILL
        n_finished += code == 0
        assert code in (0, -signal.SIGKILL)
        look(last=code == 0)
    return n_killed, n_finished


def local_kills(step: Path, folder: Path, times: int) -> None:
    out = folder / "out"

    def look(last: bool) -> None:
        assert is_wrong(step, out) == ""
        if last:
            assert out.exists()
            shutil.rmtree(out)

    n_killed, _ = kill_often(step, str(out), times, look)
    assert n_killed > times / 10
    copy_steps(step, out)
    assert is_wrong(step, out) == ""
    assert sorted(os.listdir(folder)) == ["out", "run"]


def store_kills(step: Path, url: str, times: int) -> None:
    filesystem, path = fsspec.url_to_fs(url)

    def look(last: bool) -> None:
        found = store_contents(url)
        if "_COMPLETE" in found or last:
            assert {name: data for name, data in found.items() if name in contents(step)} == contents(step)
        else:
            assert not found or not dcptool.verify(url).good
        if last:
            filesystem.rm(path, recursive=True)

    n_killed, _ = kill_often(step, url, times, look)
    assert n_killed > times / 10
    copy_steps(step, url)
    assert store_contents(url).keys() == {*contents(step), "_COMPLETE"}


def test_killed_at_any_moment(step, tmp_path):
    local_kills(step, tmp_path, 12)


def test_killed_at_any_moment_on_the_way_to_a_store(step, s3_url):
    store_kills(step, f"{s3_url}/step_1", 8)


@pytest.mark.slow
def test_killed_two_hundred_times(step, tmp_path):
    local_kills(step, tmp_path, 200)


@pytest.mark.slow
def test_killed_two_hundred_times_on_the_way_to_a_store(step, s3_url):
    store_kills(step, f"{s3_url}/step_1", 200)
