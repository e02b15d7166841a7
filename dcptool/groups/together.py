"""Do a work together: with the processes torchrun started where it did, with forked ones elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dcptool.errors import UnsupportedError
from dcptool.groups.audience import Audience, ProgressAudience
from dcptool.groups.group import ProcessGroup
from dcptool.groups.supervisor import run_members
from dcptool.groups.torchrun import join_torchrun, under_torchrun
from dcptool.storage import Progress

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
        n_members, work, timeout, progress, publishes: see `run_members`.

    Returns:
        What all members return; under torchrun on each of them.

    Raises:
        DcptoolError: what the members agree on; under torchrun `told_elsewhere` on all but rank 0.
        WorkerError: a member was lost, or never came.
    """
    if not under_torchrun():
        return run_members(n_members, work, timeout, progress, publishes)
    group = join_torchrun(timeout)
    try:
        return work(group, ProgressAudience(progress))
    finally:
        group.leave()
