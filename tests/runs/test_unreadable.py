"""What could not be read is not damaged: it may be whole, and newer than what could."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import dcptool
from dcptool.errors import StorageError
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.storage import LocalStorage, base
from tests.conftest import OLD, ROOT
from tests.conftest import run as cli
from tests.run_steps import ASK, kinds, latest, prune, steps

torchfree = pytest.mark.torchfree


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(base, "PATIENCE", (0.0, 0.0))


def failing(monkeypatch, place: str, number: int, times: int = 10**9) -> list[str]:
    """Let every read of files whose path holds `place` fail so many times; returns the paths that were tried."""
    tried: list[str] = []
    pread = os.pread

    def fail(descriptor, nbytes, byte_offset):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if place in path:
            tried.append(path)
            if len(tried) <= times:
                raise OSError(number, os.strerror(number))
        return pread(descriptor, nbytes, byte_offset)

    monkeypatch.setattr(os, "pread", fail)
    return tried


@torchfree
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_k_a_step_that_cannot_be_read_is_neither_damaged_nor_passed_over(tmp_path, monkeypatch, number):
    folder = steps(tmp_path, "step_1", "step_2", "step_3")
    tried = failing(monkeypatch, "step_3/", number)
    found = judge(folder / "step_3", VerifyOptions(grace=0))
    assert (found.state, kinds(found)) == (State.UNREADABLE, {"unreadable"})
    assert len(tried) > 1 or number == errno.EACCES  # asked again: it might have passed
    done = cli("latest", folder)
    assert (done.returncode, done.stdout) == (3, "")
    assert "step_3 could not be read" in done.stderr
    assert "--skip-unreadable" in done.stderr
    done = cli("latest", "--skip-unreadable", folder)
    assert (done.returncode, done.stdout) == (0, f"{folder}/step_2\n")
    assert "step_3 is unreadable" in done.stderr
    assert cli("verify", folder).returncode == 1
    assert prune(folder, **ASK) == ("step_1",)
    for command in (["mark", folder / "step_3"], ["convert", "--to", "torch", folder / "step_3", tmp_path / "m.pt"]):
        done = cli(*command)
        assert done.returncode == 3
        assert "damaged" not in done.stderr


@torchfree
def test_k_what_passes_is_never_seen(tmp_path, monkeypatch):
    folder = steps(tmp_path, "step_1", "step_2")
    tried = failing(monkeypatch, "step_2/", errno.EIO, times=2)
    assert latest(folder).path == str(folder / "step_2")
    assert len(tried) > 2


@torchfree
def test_one_that_is_only_older_stops_nothing(tmp_path, monkeypatch):
    folder = steps(tmp_path, "step_1", "step_2")
    failing(monkeypatch, "step_1/", errno.EIO)
    assert latest(folder).path == str(folder / "step_2")


@torchfree
@pytest.mark.parametrize("what", ["file", "folder"])
def test_k_no_permission_is_told_with_what_helps(what):
    with tempfile.TemporaryDirectory() as reachable:
        os.chmod(reachable, 0o755)
        _no_permission(Path(reachable), what)


def _no_permission(root, what):
    folder = steps(root / "run", "step_1", "step_2")
    place = folder / "step_2" / ("__0_0.distcp" if what == "file" else "")
    place.chmod(0 if what == "file" else 0o600)  # listed, and nothing in it can be looked at
    code = (
        f"import os, dcptool; dcptool.verify({str(folder)!r})\n"  # imports what it needs while it may
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"v = dcptool.verify({str(folder)!r}).verdicts[1]\n"
        "print(v.state.value, [f.next_step for f in v.findings if f.is_error])"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    finally:
        place.chmod(0o755)
    assert done.stdout.startswith("unreadable"), (done.stdout, done.stderr)
    assert "chmod" in done.stdout


@pytest.mark.parametrize("status", ["403 AccessDenied", "503 SlowDown"])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_k_an_object_that_a_store_refuses(s3_url, refused, tmp_path, monkeypatch, status, file):
    import fsspec
    import s3fs

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    folder = steps(tmp_path, "step_1", "step_2")
    filesystem = fsspec.filesystem("s3")
    filesystem.put(f"{folder}/", s3_url, recursive=True)
    assert latest(s3_url).path == f"{s3_url}/step_2"
    refused[f"step_2/{file}"] = status
    done = cli("latest", s3_url)
    assert (done.returncode, done.stdout) == (3, "")
    assert "could not be read" in done.stderr
    assert cli("latest", "--skip-unreadable", s3_url).stdout == f"{s3_url}/step_1\n"
    report = json.loads(cli("verify", "--json", s3_url).stdout)
    assert [step["state"] for step in report["checkpoints"]] == ["complete", "unreadable"]
    plan = make_plan(s3_url, 1, now=OLD + 10**9, include_incomplete=True)
    assert not plan.removed


class TestRestore:
    @pytest.fixture(autouse=True)
    def saved(self, tmp_path):
        """Two steps that a manager has saved."""
        pytest.importorskip("torch")
        from dcptool.training import CheckpointManager
        from tests.training_jobs import job, train

        model, optimizer, state = job()
        with CheckpointManager(tmp_path / "run") as manager:
            for step in (1, 2):
                train(model, optimizer, step)
                manager.save(step, state)

    def test_k_restore_raises_and_trains_on_from_nothing_older(self, tmp_path, monkeypatch):
        from dcptool.errors import TrainingError
        from dcptool.training import CheckpointManager
        from tests.training_jobs import job

        with CheckpointManager(tmp_path / "run") as manager, monkeypatch.context() as patch:
            failing(patch, "step_2/.metadata", errno.EIO)
            with pytest.raises(TrainingError, match=r"step_2 could not be read.*It may be whole"):
                manager.restore(job()[2])
        with CheckpointManager(tmp_path / "run") as manager:
            assert manager.restore(job()[2]).step == 2

    def test_k_what_fails_while_it_is_loaded(self, tmp_path, monkeypatch):
        from dcptool.errors import TrainingError
        from dcptool.training import CheckpointManager
        from tests.training_jobs import job

        def fail(storage, name, byte_offset, out):
            raise StorageError(f"{storage.root}/{name}: Input/output error")

        with CheckpointManager(tmp_path / "run") as manager, monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "read_into", fail)
            with pytest.raises(TrainingError, match=r"(?s)step_2 could not be read:.*Input/output error.*whole"):
                manager.restore(job()[2])


@torchfree
def test_a_file_that_is_gone_is_not_one_that_cannot_be_read(tmp_path):
    folder = steps(tmp_path, "step_1")
    storage = LocalStorage(str(folder / "step_1"))
    for read in (lambda: storage.read("nothing", 0, 1), lambda: storage.read(".metadata", 0, 1 << 21)):
        with pytest.raises(StorageError) as caught:
            read()
        assert caught.value.gone
    (folder / "step_1" / "__0_0.distcp").unlink()
    assert dcptool.verify(folder / "step_1").verdicts[0].state is State.INCOMPLETE
