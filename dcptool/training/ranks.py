"""The ranks of a job as one: what one of them fails at, all of them raise; what they decide, they decide together.

Over a gloo group of its own, so that it works beside NCCL too and never meets a collective of the training loop.
Without a process group there is one rank. Knows nothing of checkpoints.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from dcptool.errors import DcptoolError, StorageError, TrainingError
from dcptool.words import of_numbers

T = TypeVar("T")


class Ranks:
    """All ranks of the job, or those of the group `among`.

    Every method but `close` is called by all of them, in the same order, by one thread.

    Attributes:
        rank: of this process, within the group.
        world_size: how many there are.
        group: the gloo group, None without a process group.
    """

    def __init__(self, timeout: timedelta | None = None, among: Any = None) -> None:
        self.group: Any = None
        self.rank, self.world_size = 0, 1
        self._spare: list[Any] | None = None
        if dist.is_available() and dist.is_initialized():
            if among is None:
                self.group = dist.new_group(backend="gloo", **({"timeout": timeout} if timeout else {}))
            else:
                self._spare = _SPARE.setdefault((dist.group.WORLD, _members(among), timeout), [])
                self.group = self._spare.pop() if self._spare else _new_group(_members(among), timeout)
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        elif among is not None:
            raise ValueError("process_group= without a process group: call init_process_group first")

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, rank 0's first; a rank that has died is an error of torch's."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, what: str, function: Callable[[], T]) -> T:
        """Call on every rank and return this rank's result.

        Args:
            what: what is tried, for the error.
            function: called once; it may use collectives that let no rank wait for one that failed.

        Raises:
            TrainingError: it raised on some rank; so do all others.
        """
        result, error = _tried(function)
        self._raise_of_any(what, error, None)
        return cast(T, result)

    def share(self, what: str, function: Callable[[], T]) -> list[T]:
        """Call on every rank and return the results of all, rank 0's first; what it raises on one, all raise."""
        result, error = _tried(function)
        return cast(list[T], self._raise_of_any(what, error, result))

    def _raise_of_any(self, what: str, error: BaseException | None, result: Any) -> list[Any]:
        """Raise if a rank failed, else return the results of all."""
        outcomes = self.gather((reasons(error, self.rank) if error else {}, _verdict(error), result))
        failed = {rank: reason for outcome, *_ in reversed(outcomes) for rank, reason in outcome.items()}
        _raise(what, error, failed, self.world_size, [verdict for _, verdict, _ in outcomes])
        return [result for *_, result in outcomes]

    def on_first(self, what: str, function: Callable[[], T]) -> T:
        """Call on rank 0 only and return its result on every rank; what it raises, all raise as TrainingError."""
        result, error = _tried(function) if self.rank == 0 else (None, None)
        outcomes: list[Any] = [(result, reasons(error, 0) if error else {}, _verdict(error))]
        if self.group is not None:
            dist.broadcast_object_list(outcomes, src=dist.get_global_rank(self.group, 0), group=self.group)
        result, failed, verdict = outcomes[0]
        _raise(what, error, failed, 1, [verdict])
        return cast(T, result)

    def close(self) -> None:
        """Give the group up."""
        if self.group is not None and self._spare is not None:
            self._spare.append(self.group)
        elif self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def cores_per_rank() -> int:
    """Return how many cores there are for each rank of this machine, at least 1; torchrun tells how many ranks."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    n_ranks = int(told) if told.isdigit() else 1
    return max(1, (os.cpu_count() or 1) // max(1, n_ranks))


_SPARE: dict[tuple[Any, tuple[int, ...], timedelta | None], list[Any]] = {}
"""Groups of some of the ranks, to be used again: one that is destroyed and made anew gets the same name, and hangs."""


def _members(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group.

    Raises:
        ValueError: this rank is none of them.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError("this rank is not in process_group: make the manager on the ranks of the group only")
    return tuple(dist.get_process_group_ranks(group))


def _new_group(members: tuple[int, ...], timeout: timedelta | None) -> Any:
    more = {"timeout": timeout} if timeout else {}
    return dist.new_group(list(members), backend="gloo", use_local_synchronization=True, **more)


def _tried(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # CheckpointException is no Exception
        return None, error


_Verdict = tuple[bool, bool]
"""Whether what went wrong on a rank is that something could not be read, and whether it was told to stop."""


def _verdict(error: BaseException | None) -> _Verdict:
    return could_not_read(error), was_stopped(error)


def _raise(
    what: str, error: BaseException | None, failed: dict[int, str], world_size: int, verdicts: Sequence[_Verdict]
) -> None:
    """Raise if a rank failed: TrainingError, but what ends this process as it is."""
    if error is not None and was_stopped(error) and not isinstance(error, TrainingError | CheckpointException):
        raise error
    if failed:
        raised = TrainingError(f"{what}: {_listed(failed, world_size)}")
        raised.unreadable, raised.stopped = (any(told) for told in zip(*verdicts, strict=True))
        raise raised from error


def reasons(error: BaseException, rank: int) -> dict[int, str]:
    """Return in one line each what went wrong, by rank; -1 stands for what all ranks know already."""
    if isinstance(error, TrainingError):
        return {-1: str(error)}
    if isinstance(error, CheckpointException):
        return {failed: _one_line(cause[0]) for failed, cause in error.failures.items()}
    return {rank: _one_line(error)}


def was_stopped(error: BaseException | None) -> bool:
    """Tell whether a rank did not fail at what it did, but was told to end: Ctrl-C, sys.exit, torchrun's signal."""
    if isinstance(error, CheckpointException):
        return any(was_stopped(cause[0]) for cause in error.failures.values())
    if isinstance(error, TrainingError):
        return error.stopped
    return error is not None and (not isinstance(error, Exception) or type(error).__name__ == "SignalException")


def could_not_read(error: BaseException | None) -> bool:
    """Tell whether what went wrong is that a file system or store would not give something out."""
    if isinstance(error, CheckpointException):
        return any(could_not_read(cause[0]) for cause in error.failures.values())
    if isinstance(error, TrainingError):
        return error.unreadable
    return isinstance(error, StorageError) and not error.gone


def sendably(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that raises nothing that cannot get to the other ranks; see `sendable`."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except Exception as error:
            if _can_be_sent(error):
                raise
            sent = TrainingError(_one_line(error))
            sent.stopped = was_stopped(error)
            raise sent from None

    return call


def sendable(base: type[Any], *methods: str) -> type[Any]:
    """Return a class like `base` whose methods raise nothing that cannot get to the other ranks.

    torch sends what a planner, writer or reader raises to all ranks, as a pickle. An error that cannot be pickled, or
    not be made again from its pickle, would leave them waiting for one another.
    """
    return type(base.__name__, (base,), {name: sendably(getattr(base, name)) for name in methods})


def _can_be_sent(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 our own bytes
    except Exception:
        return False


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__
    if text and isinstance(error, DcptoolError):
        return text
    return f"{name}: {text}" if text else name


def _listed(failed: dict[int, str], world_size: int) -> str:
    """Return who failed and why, each reason once."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(failed.items()):
        by_reason.setdefault(reason, []).append(rank)
    if world_size == 1 or -1 in failed:
        return "; ".join(by_reason)
    return "; ".join(f"{of_numbers('rank', ranks)}: {reason}" for reason, ranks in by_reason.items())
