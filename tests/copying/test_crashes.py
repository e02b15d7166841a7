"""A conversion that is stopped at every write, sync and rename: nothing half-written is left under the final name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import dcptool
from dcptool.ops.convert.convert import convert
from tests import damage
from tests.conftest import FOREIGN, ROOT

DRIVER = textwrap.dedent(
    """
    import json, os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from dcptool.ops.convert.convert import ConvertOptions, convert
    import numpy, ml_dtypes, zlib_ng.zlib_ng, concurrent.futures.thread

    def attempt(stop_at, source, target, to, overwrite, how):
        events = 0
        def shimmed(name):
            real = getattr(os, name)
            def shim(*arguments, **options):
                nonlocal events
                events += 1
                if events == stop_at:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise OSError(28, "No space left on device")
                return real(*arguments, **options)
            return shim
        for name in ("write", "fsync", "rename", "replace", "mkdir"):
            setattr(os, name, shimmed(name))
        try:
            convert(source, target, to, ConvertOptions(overwrite=overwrite, threads=2))
        except BaseException as error:
            os._exit(3 if "No space left" in str(error) else 4)
        os._exit(0 if events < stop_at else 6)

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            attempt(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
)


@pytest.fixture(scope="module")
def attempt():
    """Convert in a process that is stopped at an event: `attempt(stop_at, source, target, to, overwrite, how)`."""
    command = [sys.executable, "-c", DRIVER, str(ROOT)]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(*request: object) -> int:
        driver.stdin.write(json.dumps(request) + "\n")
        driver.stdin.flush()
        return int(driver.stdout.readline())

    yield ask
    driver.stdin.close()
    driver.wait(60)
    driver.stdout.close()


def snapshot(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("how", ["kill", "full"])
@pytest.mark.parametrize(("to", "name"), [("torch", "m.pt"), ("safetensors", "m.safetensors"), ("dcp", "step_2")])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_stopped_at_every_event(tmp_path, attempt, to, name, overwrite, how):
    source = damage.copy(FOREIGN / "w_async", tmp_path / "source")
    before = snapshot(source)
    target = tmp_path / "out" / name
    target.parent.mkdir()
    old = None
    if overwrite:
        convert(FOREIGN / "w_threads3", target, to)
        old = snapshot(target) if target.is_dir() else target.read_bytes()
    for count in range(500):
        status = attempt(count + 1, str(source), str(target), to, overwrite, how)
        assert snapshot(source) == before
        if status == 0:
            break
        assert status in ((-signal.SIGKILL,) if how == "kill" else (3, 6))  # 6: it did not matter
        if target.exists():
            now = snapshot(target) if target.is_dir() else target.read_bytes()
            if now != old:  # then it is the new one, and all of it
                assert dcptool.verify(target, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
                shutil.rmtree(target) if target.is_dir() else target.unlink()
                if overwrite:
                    convert(FOREIGN / "w_threads3", target, to)
        else:
            # Between two renames the old one has a temporary name; nothing is lost.
            assert not overwrite or any(path.name.startswith(".dcptool-") for path in target.parent.iterdir())
            if overwrite:
                convert(FOREIGN / "w_threads3", target, to)
        left = [path for path in target.parent.iterdir() if path != target]
        assert all(path.name.startswith(".dcptool-") for path in left)
        assert how == "kill" or not left
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert status == 0
    assert count >= 3
    assert dcptool.verify(target, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good


def test_leftovers_are_named(tmp_path):
    (tmp_path / ".dcptool-0badf00d.tmp").mkdir()
    done = convert(FOREIGN / "w_async", tmp_path / "m.safetensors", "safetensors")
    assert any(".dcptool-0badf00d.tmp" in note for note in done.notes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(tmp_path, number):
    """A source that is slow: a FIFO-like wait is not needed, an engine that sleeps at its first write is."""
    script = textwrap.dedent(
        f"""
        import os, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        real = os.write
        def slow(*arguments):
            print("writing", file=sys.stderr, flush=True)
            time.sleep(60)
            return real(*arguments)
        from dcptool.storage import local
        class Os:
            def __getattr__(self, name):
                return slow if name == "write" else getattr(os, name)
        local.os = Os()
        from dcptool.cli import main
        main(["convert", "--to", "safetensors", {str(FOREIGN / "w_async")!r}, {str(tmp_path / "m.safetensors")!r}])
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "writing\n"
    began = time.monotonic()
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)
    code = process.wait(70)
    process.stderr.close()
    assert code == 128 + number
    assert not [path for path in tmp_path.iterdir() if path.name == "m.safetensors"]
    assert time.monotonic() - began < 70


def test_two_runs_to_one_target(tmp_path):
    commands = [
        [sys.executable, "-m", "dcptool", "convert", "--quiet", "--to", "dcp", str(FOREIGN / name), str(tmp_path / "d")]
        for name in ("w_async", "w_threads3")
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) for command in commands]
    codes = []
    for process in running:
        process.communicate(timeout=60)
        codes.append(process.returncode)
    assert sorted(codes) in ([0, 0], [0, 3])
    assert codes.count(0) == 1, codes
    assert dcptool.verify(tmp_path / "d", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
