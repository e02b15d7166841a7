"""Verify with the processes that torchrun started, on one machine or several: each reads a share of the bytes.

All of them list the checkpoint and read its metadata, from storage that they share, and come to the same verdict.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from dcptool.errors import DcptoolError, LayoutError
from dcptool.groups.audience import Audience
from dcptool.groups.group import ProcessGroup
from dcptool.groups.sharing import contribute, values_of
from dcptool.groups.together import require_gloo, work_together
from dcptool.ops.verify.verdict import VerifyOptions
from dcptool.ops.verify.verify import VerifyReport, verify
from dcptool.storage import Progress

T = TypeVar("T")
R = TypeVar("R")
TIMEOUT_SECONDS = 600.0
"""A process that gives no sign of life for so long is given up."""


def verify_together(
    path: str | os.PathLike[str], options: VerifyOptions, progress: Progress | None = None
) -> VerifyReport:
    """Verify as `verify.verify` does, with every process of torchrun's group; each of them calls this.

    Args:
        path: local path or URL, the same for all: of storage that they share.
        options: as of `verify.verify`; threads are those of one process.
        progress: told the bytes that this process reads.

    Returns:
        The same on all of them.

    Raises:
        DcptoolError: as `verify.verify`, or what one process raised.
        LayoutError: they do not see the same files.
        WorkerError: a process was lost.
    """
    require_gloo("verify under torchrun")

    def work(group: ProcessGroup, audience: Audience) -> VerifyReport:
        return verify(path, options._replace(split=_Among(group, audience)), audience.progress)

    return work_together(0, work, TIMEOUT_SECONDS, progress)


class _Among:
    """Gives each process its share of the things, and all of them all results."""

    def __init__(self, group: ProcessGroup, audience: Audience) -> None:
        self._group, self._audience = group, audience

    def __call__(self, work: Callable[[Sequence[T]], Sequence[R]], things: Sequence[T]) -> list[R]:
        rank, size = self._group.rank, self._group.size
        mine = (repr(things[0]) if things else "", len(things))

        def part() -> tuple[tuple[str, int], list[R]]:
            return mine, list(work(things[rank::size]))

        try:
            parts = values_of(contribute(self._group, self._audience, part))
        except DcptoolError as error:
            error.told_elsewhere = rank != 0
            raise
        if any(seen != mine for seen, _ in parts):
            raise LayoutError("the processes do not see the same files: is the checkpoint on storage that all share?")
        results: list[R | None] = [None] * len(things)
        for at, (_, found) in enumerate(parts):
            results[at::size] = found
        return cast(list[R], results)
