"""A gloo process group whose members notice when one of them is gone, and tell who it was.

A collective of gloo waits for its timeout when a member is missing, and does not say which. So members first meet at a
store: each says that it has come, and says every second that it is alive; who is silent for too long is named.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

from dcptool.errors import DcptoolError, WorkerError

BEAT_SECONDS = 1.0
POLL_SECONDS = 0.02


class Group:
    """This process's membership in the group.

    Args:
        store: a torch.distributed store that all members share.
        rank, size: this member's number, and how many there are.
        timeout: seconds after which a silent member is given up.

    Raises:
        WorkerError: a member has not come within the timeout.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        import torch.distributed as dist

        self.rank, self.size, self._timeout = rank, size, timeout
        self._store = dist.PrefixStore("dcptool", store)
        self._n_meetings = 0
        self._over = threading.Event()
        self.failed = threading.Event()
        """Set when some member has failed: the others need not finish."""
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._beating.start()
        try:
            self._meet()
            limit = timedelta(seconds=timeout)
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit
            )
        except BaseException:
            self._over.set()
            raise

    def fail(self) -> None:
        """Tell the others that this member has failed, so that they stop."""
        self._store.set("failed", str(self.rank))

    def share(self, value: Any) -> Any:
        """Return on every member what rank 0 gives.

        Raises:
            WorkerError: a member is gone.
        """
        import torch.distributed as dist

        self._meet()
        box = [value if self.rank == 0 else None]
        with _Translated():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return on every member what all of them give, by rank.

        Raises:
            WorkerError: a member is gone.
        """
        import torch.distributed as dist

        self._meet()
        found: list[Any] = [None] * self.size
        with _Translated():
            dist.all_gather_object(found, value)
        return found

    def leave(self) -> None:
        """End the membership. Never raises."""
        import torch.distributed as dist

        self._over.set()
        self._beating.join(timeout=BEAT_SECONDS)
        try:
            dist.destroy_process_group()
        except (RuntimeError, ValueError, AssertionError):
            return

    def _meet(self) -> None:
        """Wait until all members have come here; whoever is silent for the whole timeout meanwhile is gone."""
        self._n_meetings += 1
        meeting = f"meeting {self._n_meetings}"
        with _Translated():
            self._store.set(f"{meeting} {self.rank}", "here")
            missing = [rank for rank in range(self.size) if rank != self.rank]
            heard: dict[int, tuple[bytes, float]] = {}
            while missing:
                missing = [rank for rank in missing if not self._store.check([f"{meeting} {rank}"])]
                now = time.monotonic()
                for rank in missing:
                    beat = self._beat_of(rank)
                    if beat != heard.get(rank, (None, 0.0))[0]:
                        heard[rank] = beat, now
                    elif now - heard[rank][1] > self._timeout:
                        raise WorkerError(_gone(rank, self.size, self._timeout, came=beat != b""))
                if missing:
                    time.sleep(POLL_SECONDS)

    def _beat_of(self, rank: int) -> bytes:
        key = f"beat {rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        """Say again and again that this process lives, and listen for the failure of another."""
        count = 0
        while True:
            count += 1
            try:
                self._store.set(f"beat {self.rank}", str(count))
                if self._store.check(["failed"]):
                    self.failed.set()
            except RuntimeError:  # the store is gone; the next meeting tells
                self.failed.set()
                return
            if self._over.wait(BEAT_SECONDS):
                return


class _Translated:
    """Turns what torch raises when a connection breaks into an error of ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, DcptoolError):
            first = str(error).partition("\n")[0][:200]
            raise WorkerError(f"the connection to another process of the group broke: {first}") from error


def _gone(rank: int, size: int, timeout: float, came: bool) -> str:
    if not came:
        return f"rank {rank} of {size} never arrived, waited {timeout:g} s for it; --timeout waits longer"
    return f"rank {rank} of {size} has given no sign of life for {timeout:g} s: it was killed, or its machine is gone"


def under_torchrun() -> bool:
    """Tell whether torchrun, or something like it, started this process as one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def torchrun_group(timeout: float) -> Group:
    """Join the group that torchrun made.

    Raises:
        WorkerError: it does not form.
    """
    import torch.distributed as dist

    with _Translated():
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
    return Group(store, rank, size, timeout)


def blocks(names: Sequence[str], n_members: int) -> list[list[str]]:
    """Cut a list into contiguous blocks, one for each member, as equally long as can be.

    >>> blocks(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    """
    step, longer = divmod(len(names), n_members)
    bounds = [index * step + min(index, longer) for index in range(n_members + 1)]
    return [list(names[start:end]) for start, end in pairwise(bounds)]
