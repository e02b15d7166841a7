"""What a forked member does around its work: joins the group, tells its parent, and ends as the parent wishes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from dcptool.errors import DcptoolError
from dcptool.groups.audience import Audience
from dcptool.groups.group import ProcessGroup
from dcptool.groups.sharing import bug

TOLD_SECONDS = 0.1
"""How often a member tells its bytes."""
STOPS = (signal.SIGINT, signal.SIGTERM)


def be_member(
    pipe: Connection,
    parent: int,
    rank: int,
    size: int,
    folder: str,
    work: Callable[[ProcessGroup, Audience], Any],
    timeout: float,
) -> None:
    """Be one of the members; the parent handles Ctrl-C, and ends this process by SIGTERM.

    Args:
        pipe: to the parent; takes (kind, value) pairs, at the end ("result", the work's or a DcptoolError).
        parent: id of that process, without which this one ends and cleans up.
        rank, size: this member's number, and how many there are.
        folder: where the members meet; holds nothing else.
        work: what to do.
        timeout: seconds after which a silent member is given up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch.distributed as dist

    told = PipeAudience(pipe)
    group: ProcessGroup | None = None
    try:
        store = dist.FileStore(os.path.join(folder, "store"), size)
        group = ProcessGroup(store, rank, size, timeout, parent)
        told.result(work(group, told))
    except DcptoolError as error:
        told.result(error)
    except Exception as error:
        told.result(bug(rank, size, error))
    finally:
        if group:
            group.leave()
        if os.getppid() != parent and rank == 0:  # last, for who still meets there would wait for minutes
            shutil.rmtree(folder, ignore_errors=True)
        pipe.close()


class PipeAudience(Audience):
    """Tells the parent what happens; bytes at most every TOLD_SECONDS."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe, self._nbytes, self._last = pipe, 0, 0.0
        self._lock = threading.Lock()

    def progress(self, nbytes: int) -> None:
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._last > TOLD_SECONDS:
            self._send("bytes", self._nbytes)
            self._nbytes, self._last = 0, now

    def writing(self, path: str, sealing: Sequence[str]) -> None:
        self._send("writing", (path, tuple(sealing)))

    def made(self, name: str) -> None:
        super().made(name)
        self._send("made", name)

    def published(self) -> None:
        self._send("published", None)

    def result(self, value: Any) -> None:
        """Tell what the work gave, or the error that ended it."""
        self._send("bytes", self._nbytes)
        self._send("result", value)

    def _send(self, kind: str, value: Any) -> None:
        with suppress(OSError), self._lock:
            self._pipe.send((kind, value))
