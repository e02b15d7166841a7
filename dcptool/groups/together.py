"""Do a work together: with the processes torchrun started where it did, else with forked ones, which are watched.

torch is imported before the fork, once for all; nothing that has threads is. Ends all members when one is lost; does no
work itself, and knows none.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

from dcptool.errors import DcptoolError, UnsupportedError, WorkerError
from dcptool.groups.audience import Audience, UnfinishedOutput
from dcptool.groups.forked import STOPS, be_member
from dcptool.groups.group import ProcessGroup
from dcptool.groups.torchrun import join_torchrun, under_torchrun
from dcptool.storage import Progress

GRACE_SECONDS = 5.0
"""How long a member may take to end by itself once it is told to."""
LAST_SECONDS = 2.0
"""How long the others are waited for once one member has told the result."""

T = TypeVar("T")


def require_gloo(what: str, otherwise: str = "") -> None:
    """Refuse where no group can be formed; imports torch.

    Args:
        what: needs a group.
        otherwise: what does not.

    Raises:
        UnsupportedError: torch is not installed, or has no gloo.
    """
    try:
        import torch.distributed as dist
    except ImportError:
        hint = f"; {otherwise}" if otherwise else ""
        raise UnsupportedError(f"{what} needs torch: pip install 'dcptool[torch]'{hint}") from None
    if not dist.is_available() or not dist.is_gloo_available():
        raise UnsupportedError(f"{what} needs a torch that has gloo")


def work_together(
    n_members: int,
    work: Callable[[ProcessGroup, Audience], T],
    timeout: float,
    progress: Progress | None = None,
    publishes: bool = False,
) -> T:
    """Do a work as a group; where torchrun made one it is that, and `n_members` does not count.

    Args:
        n_members: how many processes are forked.
        work: called in each member with its membership and with whom to tell; all return the same, which can be
            pickled, or raise the same.
        timeout: seconds after which a silent member is given up.
        progress: told the bytes that all of them move; under torchrun those of this member.
        publishes: the work makes output; that a member was lost is told with what became of it.

    Returns:
        What all members return; under torchrun on each of them.

    Raises:
        DcptoolError: what the members agree on; under torchrun `told_elsewhere` on all but rank 0.
        WorkerError: a member was lost, or never came; of forked ones output that is not published is removed.
    """
    if under_torchrun():
        group = join_torchrun(timeout)
        try:
            return work(group, Audience(progress))
        finally:
            group.leave()
    import torch.distributed  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="dcptool-") as folder:
        watch = _Watch(progress, publishes)
        try:
            for rank in range(n_members):
                watch.start(rank, n_members, folder, work, timeout)
            return cast(T, watch.result())
        finally:
            watch.end()


class _Watch:
    """Starts members, listens to them, and sees to their end."""

    def __init__(self, progress: Progress | None, publishes: bool) -> None:
        self._progress, self._publishes = progress, publishes
        self._context = multiprocessing.get_context("fork")
        self._members: dict[Connection, Any] = {}
        self._output = UnfinishedOutput()
        self._results: list[Any] = []
        self._deadline: float | None = None

    def start(self, rank: int, size: int, *rest: Any) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (theirs, os.getpid(), rank, size, *rest)
        member = self._context.Process(target=be_member, args=arguments, name=f"rank {rank}")
        with _undisturbed():
            member.start()
        theirs.close()
        self._members[ours] = member

    def result(self) -> Any:
        """Wait for all members and return what they agree on.

        Raises:
            DcptoolError: their error, or that one was lost.
        """
        waiting = dict(self._members)
        while waiting:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready: list[Any] = wait(list(waiting), left)
            if not ready:  # the others need not be waited for: one may be suspended
                break
            for pipe in ready:
                told = _received(pipe)
                if told is None:
                    self._require_well(waiting.pop(pipe))
                else:
                    self._hear(*told)
        return self._agreed()

    def _hear(self, kind: str, value: Any) -> None:
        """Take note of what a member says."""
        if kind == "bytes":
            if self._progress:
                self._progress(value)
        elif kind == "result":
            self._results.append(value)
            self._deadline = self._deadline or time.monotonic() + LAST_SECONDS
        else:
            self._output.note(kind, value)

    def _require_well(self, member: Any) -> None:
        """Raise if a member that says no more was lost.

        Raises:
            WorkerError: it was, and nobody gave a better reason.
        """
        member.join()
        # That a connection broke is no cause, but what follows from the loss.
        if member.exitcode and (not self._results or isinstance(self._results[0], WorkerError)):
            after = _fate(self._output.published) if self._publishes else ""
            raise WorkerError(f"{member.name} of {len(self._members)} {_ended(member.exitcode)}{after}")

    def _agreed(self) -> Any:
        """Return what the first member told, for all tell the same.

        Raises:
            DcptoolError: it told an error, or nobody told anything.
        """
        if not self._results:
            raise WorkerError("the workers ended without a result; this is a bug")
        found = self._results[0]
        if isinstance(found, DcptoolError):
            found.told_elsewhere = False  # whoever it came from: here is where the user is told
            trace = getattr(found, "trace", "")
            raise found from (RuntimeError(f"\n{trace}") if trace else None)
        self._output.path = ""  # the members ended well: nothing is to be removed
        return found

    def end(self) -> None:
        """End every member that is left, and remove what was written unless all went well. Never raises."""
        with _undisturbed():
            self._end_members()
            for pipe in self._members:  # what each said last of its output
                while self._output.path and pipe.poll() and (told := _received(pipe)):
                    self._output.note(*told)
            self._output.remove()

    def _end_members(self) -> None:
        alive = [member for member in self._members.values() if member.is_alive()]
        for member in alive:
            member.terminate()
            with suppress(OSError):  # one that is suspended ends in order, too
                os.kill(member.pid, signal.SIGCONT)
        deadline = time.monotonic() + GRACE_SECONDS
        for member in alive:
            member.join(max(0.0, deadline - time.monotonic()))
        for member in alive:
            if member.is_alive():
                member.kill()
                member.join()


def _received(pipe: Connection) -> tuple[str, Any] | None:
    """Return the next that a member says, None at the end of its pipe."""
    try:
        return cast("tuple[str, Any]", pipe.recv())
    except (EOFError, OSError):
        return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(code: int) -> str:
    """Say how a process ended, by its exit code."""
    if code == 128 + signal.SIGTERM:
        return "was stopped by SIGTERM"
    if code < 0:
        hint = " (out of memory? fewer --workers need less)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code}"


def _fate(published: bool) -> str:
    """Say what became of the output."""
    return " when the output was published already: it is complete" if published else "; nothing was published"
