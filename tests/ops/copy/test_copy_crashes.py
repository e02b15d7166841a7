"""A copy that is killed, or finds the disk full, at every write, sync, rename and deletion, and then goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.ops.copy.copy import copy_steps
from dcptool.ops.copy.step import CopyOptions
from dcptool.ops.verify.verdict import VerifyOptions
from tests.conftest import FOREIGN, OLD, ROOT
from tests.ops.copy.test_copy_stores import contents

DRIVER = textwrap.dedent(
    """
    import json, os, signal, sys, threading
    sys.path.insert(0, sys.argv[1])
    from dcptool.ops.copy.copy import copy_steps
    from dcptool.ops.copy.step import CopyOptions
    import numpy, ml_dtypes, zlib_ng.zlib_ng, concurrent.futures.thread, tempfile

    with tempfile.TemporaryDirectory() as folder:  # imports all there is to import
        copy_steps(sys.argv[2], folder + "/out")

    def attempt(stop_at, source, target, overwrite, how):
        events, lock = 0, threading.Lock()
        def shimmed(name):
            real = getattr(os, name)
            def shim(*arguments, **options):
                nonlocal events
                with lock:
                    events += 1
                    now = events
                if now == stop_at and how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if now >= stop_at and how == "full":
                    raise OSError(28, "No space left on device")
                return real(*arguments, **options)
            return shim
        for name in ("pwrite", "fsync", "rename", "replace", "mkdir", *(("unlink", "rmdir") if how == "kill" else ())):
            setattr(os, name, shimmed(name))
        try:
            copy_steps(source, target, CopyOptions(overwrite=overwrite, threads=2))
        except BaseException as error:
            os._exit(3 if "No space left" in str(error) else 4)
        os._exit(0 if events < stop_at else 6)

    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            attempt(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
)


@pytest.fixture(scope="module")
def attempt():
    """Copy in a process that is stopped at an event: `attempt(stop_at, source, target, overwrite, how)`."""
    command = [sys.executable, "-c", DRIVER, str(ROOT), str(FOREIGN / "w_async")]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "ready\n"

    def ask(*request: object) -> int:
        driver.stdin.write(json.dumps(request) + "\n")
        driver.stdin.flush()
        return int(driver.stdout.readline())

    yield ask
    driver.stdin.close()
    driver.wait(60)
    driver.stdout.close()


@pytest.fixture
def source(tmp_path) -> Path:
    folder = Path(shutil.copytree(FOREIGN / "w_async", tmp_path / "run" / "step_2"))
    (folder / "data").mkdir()
    (folder / "data" / "order.txt").write_text("3 1 2")
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    return folder


@pytest.mark.parametrize("how", ["kill", "full"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["anew", "goes on"])
def test_stopped_at_every_event(tmp_path, attempt, source, overwrite, how, goes_on):
    """After each stop there is the old one, or nothing, or all of the new one; and what is left can be gone on from."""
    target = tmp_path / "out" / "step_2"
    target.parent.mkdir()
    meant = contents(source)
    old = contents(FOREIGN / "w_threads3") if overwrite else None
    status = -1
    for count in range(500):
        if overwrite and not target.exists():
            shutil.copytree(FOREIGN / "w_threads3", target)
        status = attempt(count + 1, str(source), str(target), overwrite, how)
        assert contents(source) == meant
        if status == 0:
            break
        assert status in ((-signal.SIGKILL,) if how == "kill" else (3, 6))  # 6: it did not matter
        if target.exists():
            now = contents(target)
            if now != old:  # then it is the new one, and all of it
                assert now.pop("_COMPLETE")
                assert now == meant
        left = [path for path in target.parent.iterdir() if path != target]
        assert all(path.name.startswith(".dcptool-") for path in left)
        if not target.exists() and overwrite:  # between two renames the old one has a temporary name
            assert any(contents(path) == old for path in left if path.is_dir())
        if goes_on and not (target.exists() and not overwrite):
            copy_steps(source, target, CopyOptions(overwrite=overwrite))
            now = contents(target)
            assert now.pop("_COMPLETE")
            assert now == meant
        for path in target.parent.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert status == 0
    assert count >= 10
    assert dcptool.verify(target, VerifyOptions(Level.DEEP)).good
    assert os.listdir(target.parent) == ["step_2"]


def test_killed_after_it_had_its_name(tmp_path, source):
    """What the end of a copy would have removed goes with the next look."""
    copy_steps(source, tmp_path / "out" / "step_2")
    from dcptool.ops.copy.places import unfinished_at

    _, journal = unfinished_at(str(tmp_path / "out" / "step_2"))
    Path(journal).write_text('{"schema": 1, "source": "x"}\n')
    assert copy_steps(source, tmp_path / "out" / "step_2").steps[0].state == "there"
    assert os.listdir(tmp_path / "out") == ["step_2"]
