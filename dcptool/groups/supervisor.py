"""Fork the processes of a group, watch them, and end all when one is lost. Does no work itself.

torch is imported before the fork, once for all; nothing that has threads is.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from dcptool.errors import DcptoolError, WorkerError
from dcptool.formats.dcp.format import METADATA
from dcptool.formats.marker import NAME
from dcptool.groups.group import Group
from dcptool.ops.reshard.member import Audience, Resharded, bug, run_member
from dcptool.ops.reshard.plan import ReshardOptions
from dcptool.storage import Progress, is_temporary, storage_at

TOLD_SECONDS = 0.1
"""How often a worker tells its bytes."""
GRACE_SECONDS = 5.0
"""How long a worker may take to end by itself once it is told to."""
LAST_SECONDS = 2.0
"""How long the others are waited for once one worker has told the result."""
STOPS = (signal.SIGINT, signal.SIGTERM)


def run_workers(
    n_workers: int,
    source: str | None,
    target: str | None,
    options: ReshardOptions,
    began: float,
    progress: Progress | None,
) -> Resharded:
    """Reshard with a group of forked processes.

    Args:
        n_workers: how many.
        source, target, options, began: see `run_member`.
        progress: told the bytes as they are written.

    Raises:
        DcptoolError: what the workers say, or that one of them was lost; nothing is published.
    """
    import torch.distributed  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="dcptool-") as folder:
        watch = _Watch(progress)
        try:
            for rank in range(n_workers):
                watch.start(rank, n_workers, folder, source, target, options, began)
            return watch.result()
        finally:
            watch.end()


class _Watch:
    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._context = multiprocessing.get_context("fork")
        self._workers: dict[Connection, Any] = {}
        self._written = ""
        self._made: list[str] = []
        self._published = False

    def start(self, rank: int, size: int, *rest: Any) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (theirs, os.getpid(), rank, size, *rest)
        worker = self._context.Process(target=_work, args=arguments, name=f"rank {rank}")
        with _undisturbed():
            worker.start()
        theirs.close()
        self._workers[ours] = worker

    def result(self) -> Resharded:
        """Wait for all workers and return what they agree on.

        Raises:
            DcptoolError: their error, or that one was lost.
        """
        waiting = dict(self._workers)
        found: Resharded | DcptoolError | None = None
        deadline: float | None = None
        while waiting:
            ready: list[Any] = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:  # the others need not be waited for: one may be suspended
                break
            for pipe in ready:
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    worker = waiting.pop(pipe)
                    worker.join()
                    # That a connection broke is no cause, but what follows from the loss.
                    if worker.exitcode and (found is None or isinstance(found, WorkerError)):
                        raise WorkerError(_lost(worker, len(self._workers), self._published)) from None
                    continue
                if kind == "bytes" and self._progress:
                    self._progress(value)
                elif kind == "written":
                    self._written = value
                elif kind == "made":
                    self._made.append(value)
                elif kind == "published":
                    self._written, self._published = "", True
                elif kind == "result":
                    found = found or value
                    deadline = deadline or time.monotonic() + LAST_SECONDS
        if isinstance(found, DcptoolError):
            found.told_elsewhere = False  # whoever it came from: here is where the user is told
            trace = getattr(found, "trace", "")
            raise found from (RuntimeError(f"\n{trace}") if trace else None)
        if found is None:
            raise WorkerError("the workers ended without a result; this is a bug")
        self._written = ""
        return found

    def end(self) -> None:
        """End every worker that is left, and remove what was written unless all went well. Never raises."""
        with _undisturbed():
            alive = [worker for worker in self._workers.values() if worker.is_alive()]
            for worker in alive:
                worker.terminate()
                with suppress(OSError):  # one that is suspended ends in order, too
                    os.kill(worker.pid, signal.SIGCONT)
            deadline = time.monotonic() + GRACE_SECONDS
            for worker in alive:
                worker.join(max(0.0, deadline - time.monotonic()))
            for worker in alive:
                if worker.is_alive():
                    worker.kill()
                    worker.join()
            while self._written and any(pipe.poll() and self._noted(pipe) for pipe in self._workers):
                pass
            if is_temporary(self._written):
                shutil.rmtree(self._written, ignore_errors=True)
            elif self._written and self._made:
                storage = storage_at(self._written)
                # What makes it complete goes first, so that nothing half removed looks whole.
                for name in sorted(self._made, key=lambda name: name not in (NAME, METADATA)):
                    with suppress(DcptoolError):
                        storage.delete(name)

    def _noted(self, pipe: Connection) -> bool:
        """Note what a worker said last that is to be removed; False at the end of its pipe."""
        with suppress(EOFError, OSError):
            kind, value = pipe.recv()
            if kind == "made":
                self._made.append(value)
            elif kind == "published":
                self._written, self._published = "", True
            return True
        return False


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _lost(worker: Any, size: int, published: bool) -> str:
    code = worker.exitcode
    how = f"ended with exit code {code}"
    if code == 128 + signal.SIGTERM:
        how = "was stopped by SIGTERM"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        how += " (out of memory? fewer --workers need less)" if -code == signal.SIGKILL else ""
    what = "when the output was published already: it is complete" if published else "; nothing was published"
    return f"{worker.name} of {size} {how}{' ' if published else ''}{what}"


def _work(
    pipe: Connection,
    parent: int,
    rank: int,
    size: int,
    folder: str,
    source: str | None,
    target: str | None,
    options: ReshardOptions,
    began: float,
) -> None:
    """Be one of the workers; the parent handles Ctrl-C, and ends this process by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch.distributed as dist

    tell = _Telling(pipe)
    group: Group | None = None
    try:
        store = dist.FileStore(os.path.join(folder, "store"), size)
        group = Group(store, rank, size, options.timeout, parent)
        tell.result(run_member(group, source, target, options, began, tell))
    except DcptoolError as error:
        tell.result(error)
    except Exception as error:
        tell.result(bug(rank, size, error))
    finally:
        if group:
            group.leave()
        if os.getppid() != parent and rank == 0:  # last, for who still meets there would wait for minutes
            shutil.rmtree(folder, ignore_errors=True)
        pipe.close()


class _Telling(Audience):
    """Tells the parent what happens; bytes at most every TOLD_SECONDS."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._nbytes, self._last = pipe, 0, 0.0
        self._lock = threading.Lock()

    def progress(self, nbytes: int) -> None:
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._last > TOLD_SECONDS:
            self._send("bytes", self._nbytes)
            self._nbytes, self._last = 0, now

    def written(self, path: str) -> None:
        self._send("written", path)

    def made(self, name: str) -> None:
        self._send("made", name)

    def published(self) -> None:
        self._send("published", None)

    def result(self, value: Any) -> None:
        self._send("bytes", self._nbytes)
        self._send("result", value)

    def _send(self, kind: str, value: Any) -> None:
        with suppress(OSError), self._lock:
            self._pipe.send((kind, value))
