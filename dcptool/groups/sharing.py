"""How members share a work, and come to one end: all of them return, or all raise the same error.

No member raises between two meetings, for the others would wait for it: what goes wrong is gathered like a result. Does
not know what the work is.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from dcptool.errors import DcptoolError, WorkerError
from dcptool.groups.audience import Audience
from dcptool.groups.group import ProcessGroup

T = TypeVar("T")


class StoppedError(WorkerError):
    """This member stopped because another one failed: what follows from the cause, never the cause."""


@dataclass(frozen=True, slots=True)
class Contribution(Generic[T]):
    """What one member did.

    Attributes:
        value: what its part of the work gave, or the error that ended it.
        made: names of the files it made in an object store, as its audience was told.
    """

    value: T | DcptoolError
    made: tuple[str, ...]


def agree(group: ProcessGroup, decide: Callable[[], T]) -> T:
    """Do something on rank 0 and return on every member what it gave.

    Args:
        group: of all members, each of which calls this.
        decide: called on rank 0 alone.

    Raises:
        DcptoolError: what it raised, on all members: on the others marked as told by rank 0.
        WorkerError: a member is gone.
    """
    return outcome(group, attempt(group, decide) if group.rank == 0 else None)


def outcome(group: ProcessGroup, found: T | DcptoolError | None) -> T:
    """Return on every member what rank 0 found, or raise it there if it is an error; see `agree`."""
    shared: T | DcptoolError = group.share(found)
    if isinstance(shared, DcptoolError):
        shared.told_elsewhere = group.rank != 0
        raise shared
    return shared


def contribute(group: ProcessGroup, audience: Audience, part: Callable[[], T]) -> list[Contribution[T]]:
    """Do this member's part of the work and return on every member what all of them did, by rank.

    Args:
        group: of all members, each of which calls this.
        audience: told of what this member makes.
        part: does it; calls `require_going` now and then, so that it ends when another one failed.

    Raises:
        WorkerError: a member is gone.
    """
    value = attempt(group, part)
    if isinstance(value, DcptoolError):
        group.fail()
    return group.gather(Contribution(value, tuple(audience.names)))


def values_of(contributions: Sequence[Contribution[T]]) -> list[T]:
    """Return what all parts gave, by rank.

    To be called in `agree`, so that an error of one is told once.

    Raises:
        DcptoolError: one failed; the cause before what followed from it, and the rank where it was.
    """
    failed = [(rank, one.value) for rank, one in enumerate(contributions) if isinstance(one.value, DcptoolError)]
    if not failed:
        return [one.value for one in contributions if not isinstance(one.value, DcptoolError)]
    rank, cause = next((pair for pair in failed if not isinstance(pair[1], StoppedError)), failed[0])
    if len(contributions) == 1 or isinstance(cause, WorkerError):
        raise cause
    raise cause.saying(f"rank {rank} of {len(contributions)}: {cause.message}")


def require_going(group: ProcessGroup) -> None:
    """End this member's part once another one has failed.

    Raises:
        StoppedError: one has.
    """
    if group.failed.is_set():
        raise StoppedError("stopped, because another process failed")


def bug(rank: int, size: int, error: Exception) -> WorkerError:
    """Return an error for all members in place of one that nobody expected on one of them."""
    found = WorkerError(f"rank {rank} of {size} failed, this is a bug in dcptool: {type(error).__name__}: {error}")
    found.trace = "".join(traceback.format_exception(error))
    return found


def blocks(names: Sequence[str], n_members: int) -> list[list[str]]:
    """Cut a list into contiguous blocks, one for each member, as equally long as can be.

    >>> blocks(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    """
    step, longer = divmod(len(names), n_members)
    bounds = [index * step + min(index, longer) for index in range(n_members + 1)]
    return [list(names[start:end]) for start, end in pairwise(bounds)]


def attempt(group: ProcessGroup, action: Callable[[], T]) -> T | DcptoolError:
    """Return what an action of this member gives, or the error that ends it."""
    try:
        return action()
    except DcptoolError as error:
        return error
    except Exception as error:  # the others must end too
        return bug(group.rank, group.size, error)
