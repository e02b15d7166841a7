"""The command line as processes of their own, forked from one that has imported torch: a tenth of a second each.

A process may be given code that is run in it before the command, to make something slow or fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HURRY = """
from dcptool.groups import group, together
from dcptool.ops.reshard import plan
group.BEAT_SECONDS, group.LINGER_SECONDS, group.ORPHAN_SECONDS = 0.2, 1.0, 1.0
together.GRACE_SECONDS, together.LAST_SECONDS = 1.0, 0.5
plan.MIN_TIMEOUT = 1.0
"""
"""Code that has `reshard` wait a fifth as long for what will not come: the same, sooner."""
_SERVER = """if True:
    import gc, json, os, sys, time, traceback
    gc.disable()
    import torch.distributed, numpy, s3fs
    import dcptool.cli, dcptool.ops.reshard.reshard, dcptool.render.reshard, dcptool.ops.diff.diff

    def work(args, code, cwd, env, out, err):
        os.setsid()
        for name, descriptor in ((out, 1), (err, 2)):
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv = ["dcptool", *args]
        status = 99
        try:
            exec(code, {"__name__": "shim"})
            dcptool.cli.main(args)
        except SystemExit as done:
            status = done.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    gc.freeze()
    gc.enable()
    ended = {}
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "args" in request:
            pid = os.fork()
            if not pid:
                work(**request)
            print(pid, flush=True)
            continue
        pid = request["wait"]
        deadline = time.monotonic() + request["seconds"]
        while pid not in ended and time.monotonic() < deadline:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        print(json.dumps(ended.get(pid)), flush=True)
"""


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


class Running:
    """A command that was started; it leads a process group of its own."""

    def __init__(self, commands: Commands, pid: int, out: Path, err: Path) -> None:
        self._commands, self.pid, self._out, self._err = commands, pid, out, err
        self._began = time.monotonic()
        self.seen: set[int] = set()

    def wait(self, seconds: float = 60.0) -> Done:
        """Wait for its end, and for that of every child that was seen."""
        code = self._commands.ask({"wait": self.pid, "seconds": seconds})
        took = time.monotonic() - self._began
        assert code is not None, f"still running after {seconds} s: {self._err.read_text()}"
        return Done(code, self._out.read_text(), self._err.read_text(), took)

    def children(self) -> list[int]:
        """Its children, oldest first."""
        found = sorted(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))
        self.seen.update(found)
        return found

    def left(self) -> list[int]:
        """Children seen before that still run."""
        return [pid for pid in self.seen if _runs(pid)]


class Commands:
    """Starts commands."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},  # as the command sets it, before it imports torch
        )
        self._is_ready = False

    def start(
        self, *args: object, code: str = "", cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> Running:
        """Start `dcptool ARGS`, with code that is run before it."""
        self._count += 1
        out, err = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        request = {
            "args": [*map(str, args)],
            "code": code,
            "cwd": str(cwd or ROOT),
            "env": {**os.environ, "COLUMNS": "120", **(env or {})},
            "out": str(out),
            "err": str(err),
        }
        return Running(self, self.ask(request), out, err)

    def run(self, *args: object, **options: Any) -> Done:
        """Run `dcptool ARGS` to its end."""
        return self.start(*args, **options).wait()

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request to the process that forks, and return its answer."""
        if not self._is_ready:
            assert self._server.stdout.readline() == "ready\n"
            self._is_ready = True
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End the process that forks."""
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_for(condition: Any, seconds: float = 30.0) -> Any:
    """Wait until a condition gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found
