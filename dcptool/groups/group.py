"""A gloo process group whose members notice when one of them is gone, and tell who it was.

A collective of gloo waits for its timeout when a member is missing, and does not say which. So members first meet at a
store: each says that it has come, and says every second that it is alive; who is silent for too long, or has left, is
named. Knows only that there are members, and values they pass around: not what they work at, nor who started them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from dcptool.errors import DcptoolError, WorkerError

BEAT_SECONDS = 1.0
POLL_SECONDS = 0.02
SLOW_POLL_SECONDS = 0.25
"""How often members look for the others once that has taken a while: a hundred of them share one store."""
LINGER_SECONDS = 3.0
"""How long a member waits for the others to stop before it takes away what they still use."""
ORPHAN_SECONDS = 5.0
"""How long a member whose parent is gone may take to end in order."""

JOINED = (
    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, so dcptool joins that group; without them it works alone."
)


class ProcessGroup:
    """This process's membership in the group.

    Args:
        store: a torch.distributed store that all members share.
        rank, size: this member's number, and how many there are.
        timeout: seconds after which a silent member is given up.
        parent: id of the process without which this one shall end, and which cleans up; None if it needs nobody.
        hosts: the store ends with this process.

    Raises:
        WorkerError: a member has not come within the timeout.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, parent: int | None = None, hosts: bool = False
    ) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.timeout, self._parent, self._hosts = rank, size, timeout, parent, hosts
        self._store = dist.PrefixStore("dcptool", store)
        self._n_meetings = 0
        self._given_up: set[int] = set()
        self._over = threading.Event()
        self._left = threading.Event()
        self.failed = threading.Event()
        """Set when some member has failed: the others need not finish."""
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._beating.start()
        if parent is not None:
            threading.Thread(target=self._watch_parent, args=(parent,), name="parent", daemon=True).start()
        try:
            self._meet()
            self._connect(dist.PrefixStore("group", store))
        except BaseException:
            self.leave()
            raise

    def _connect(self, store: Any) -> None:
        import torch.distributed as dist

        limit = timedelta(seconds=self.timeout)
        try:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)
        except RuntimeError as error:
            raise WorkerError(
                f"rank {self.rank} of {self.size} cannot connect to the others by gloo: {first_line(error)}",
                next_step="Between machines GLOO_SOCKET_IFNAME names the network interface to use.",
            ) from error

    def fail(self) -> None:
        """Tell the others that this member has failed, so that they stop."""
        with connected():
            self._store.set("failed", str(self.rank))

    def halt(self) -> None:
        """Tell the others to stop, and wait a moment until they do. Never raises."""
        if self._parent is None:
            with suppress(RuntimeError):
                self.fail()
                self._linger("gave", "left")

    def _linger(self, *signs: str) -> None:
        """Wait until each of the others has given one of the signs, or for LINGER_SECONDS."""
        others = [rank for rank in range(self.size) if rank != self.rank and rank not in self._given_up]
        deadline = time.monotonic() + LINGER_SECONDS
        while others and time.monotonic() < deadline:
            others = [rank for rank in others if not any(self._store.check([f"{sign} {rank}"]) for sign in signs)]
            time.sleep(POLL_SECONDS)

    def share(self, value: Any) -> Any:
        """Return on every member what rank 0 gives.

        Raises:
            WorkerError: a member is gone.
        """
        import torch.distributed as dist

        self._meet()
        box = [value if self.rank == 0 else None]
        with connected():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return on every member what all of them give, by rank; who gives writes no more.

        Raises:
            WorkerError: a member is gone.
        """
        import torch.distributed as dist

        with connected():
            self._store.set(f"gave {self.rank}", "")
        self._meet()
        found: list[Any] = [None] * self.size
        with connected():
            dist.all_gather_object(found, value)
        return found

    def leave(self) -> None:
        """End the membership; who still waits for this member need not any more. Never raises."""
        import torch.distributed as dist

        self._over.set()
        self._beating.join(timeout=BEAT_SECONDS)
        with suppress(RuntimeError):
            self._why(f"rank {self.rank} of {self.size} was stopped, so the others stop too")
            self._store.set(f"left {self.rank}", "")
            if self._hosts:
                self._linger("left")
        with suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()
        self._left.set()

    def _meet(self) -> None:
        """Wait until all members have come here; who left before, or is silent for the whole timeout, is gone."""
        self._n_meetings += 1
        meeting = f"meeting {self._n_meetings}"
        with connected():
            self._store.set(f"{meeting} {self.rank}", "here")
            missing = [rank for rank in range(self.size) if rank != self.rank]
            silences: dict[int, tuple[bytes, float]] = {}
            pause, looked = POLL_SECONDS, time.monotonic()
            while missing and not self._store.check([f"{meeting} {rank}" for rank in missing]):
                time.sleep(pause)
                pause = min(pause * 1.2, SLOW_POLL_SECONDS)
                passed = time.monotonic() - looked
                if passed > BEAT_SECONDS / 2:
                    looked += passed
                    missing = [rank for rank in missing if not self._store.check([f"{meeting} {rank}"])]
                    # No more than a beat at once: all of us may have been suspended for hours.
                    self._require_alive(missing, min(passed, BEAT_SECONDS), silences)

    def _require_alive(self, missing: Sequence[int], passed: float, silences: dict[int, tuple[bytes, float]]) -> None:
        """Raise if one of the missing has left, or gave no new beat for too long.

        Args:
            missing: ranks.
            passed: seconds since the last call.
            silences: by rank its last beat, and since how many seconds there was no other; changed here.
        """
        for rank in missing:
            if self._store.check([f"left {rank}"]):
                raise WorkerError(self._why(f"rank {rank} of {self.size} has left"))
            beat = self._beat_of(rank)
            last, silent = silences.get(rank, (beat, 0.0))
            silent = silent + passed if beat == last else 0.0
            silences[rank] = beat, silent
            if silent > self.timeout:
                self._given_up.add(rank)
                cause = _gone(rank, self.size, self.timeout, came=beat != b"")
                joined = f"\n{JOINED}" if self._parent is None and not beat else ""
                raise WorkerError(self._why(cause + joined))

    def _why(self, cause: str) -> str:
        """Return why the group ends: what the first member said that had to say something."""
        return bytes(self._store.compare_set("why", "", cause)).decode()

    def _beat_of(self, rank: int) -> bytes:
        key = f"beat {rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        """Say again and again that this process lives, and listen for the failure or the end of another."""
        count = 0
        silences: dict[int, tuple[bytes, float]] = {}
        watched = [] if self.rank or self._parent is not None else list(range(1, self.size))
        while True:
            count += 1
            try:
                self._store.set(f"beat {self.rank}", str(count))
                self._require_alive(watched, BEAT_SECONDS, silences)
                if self._store.check(["failed"]) or self._store.check(["why"]):
                    self.failed.set()
            except RuntimeError:  # one is gone, or the store; the next meeting tells
                self.failed.set()
            if self._over.wait(BEAT_SECONDS):
                return

    def _watch_parent(self, parent: int) -> None:
        """End this process in time once its parent is gone, whatever it waits for.

        Looks at no store: where another orphan has removed its file already, torch waits for that for minutes.
        """
        while os.getppid() == parent:
            if self._left.wait(BEAT_SECONDS):
                return
        self.failed.set()
        if not self._left.wait(ORPHAN_SECONDS):
            os._exit(1)


@contextmanager
def connected() -> Iterator[None]:
    """Turn what torch raises when a connection breaks into an error of ours."""
    try:
        yield
    except DcptoolError:
        raise
    except RuntimeError as error:
        raise WorkerError(
            f"the connection to another process of the group broke ({first_line(error)}): it was stopped, or its "
            "machine is gone"
        ) from error


def _gone(rank: int, size: int, timeout: float, came: bool) -> str:
    if not came:
        return f"rank {rank} of {size} never arrived, waited {timeout:g} s for it; --timeout waits longer"
    return f"rank {rank} of {size} gave no sign of life for {timeout:g} s: it was killed, or its machine is gone"


def first_line(error: Exception) -> str:
    """Return the first line of what torch raised, cut: the rest are C++ stacks."""
    return str(error).partition("\n")[0][:200]
