"""What each process of the group does: rank 0 plans, all write their files, rank 0 checks, seals and publishes.

Knows nothing of who started the processes, or how they find each other: that is `groups`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from dcptool.checkpoint.casting import NO_LOSS, Loss
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.regions import Box
from dcptool.checkpoint.selection import Selection, select
from dcptool.copying.engine import CopyReport, copy
from dcptool.copying.outputs import OutputFile
from dcptool.copying.publishing import Target, prepare, require_place
from dcptool.errors import WorkerError
from dcptool.formats.dcp.write import Arrangement, data_files
from dcptool.formats.detect import open_checkpoint
from dcptool.groups.audience import Audience, NotedStorage
from dcptool.groups.group import ProcessGroup
from dcptool.groups.sharing import Contribution, agree, blocks, contribute, require_going, values_of
from dcptool.ops.carrying import carry, require_same_bytes
from dcptool.ops.guards import ANOTHER_STEP, require_equal, require_proven, require_same
from dcptool.ops.replacing import replaced
from dcptool.ops.reshard.plan import PartPlan, Plan, ReshardOptions, asked_of, make_plan
from dcptool.ops.reshard.result import Resharded, summarize_plan
from dcptool.ops.sources import open_again
from dcptool.storage import Creator, LocalStorage, is_url, join, storage_at

OPEN_FILES = 128
"""Files a process writes side by side; each gathers small writes in memory."""
OPEN_OBJECTS = 4
"""The same in an object store, whose clients hold a part of some MiB of each."""


_Files = dict[str, list[tuple[str, Box | None]]]


class _Orders(NamedTuple):
    """What rank 0 tells the others: what to read, where to write, and of each part the files of each member."""

    opens: tuple[str, str]
    target: str
    parts: dict[str, list[_Files]]


def reshard_member(
    group: ProcessGroup,
    audience: Audience,
    source: str | None,
    target: str | None,
    options: ReshardOptions,
    began: float,
) -> Resharded:
    """Take part in a reshard; all members return the same, or raise the same.

    Args:
        group: of all members.
        audience: told what this member does.
        source, target, options: as in `make_plan`; only rank 0's count.
        began: `time.perf_counter()` at the start.

    Raises:
        DcptoolError: as `make_plan`, and what a member met; nothing is published.
    """
    with ExitStack() as stack:
        coordinator = _Coordinator(group, audience, options, stack)
        orders = agree(group, lambda: coordinator.begin(source, target))
        plan = coordinator.plan if group.rank == 0 else None
        written = contribute(group, audience, lambda: _write(group, orders, plan, options, audience))
        return agree(group, lambda: coordinator.finish(written, began))


class _Coordinator:
    """What rank 0 does beside writing its files; the other ranks call nothing of it.

    Attributes:
        plan: what is done, once begun.
        place: where output goes, once begun.
    """

    plan: Plan
    place: Target

    def __init__(self, group: ProcessGroup, audience: Audience, options: ReshardOptions, stack: ExitStack) -> None:
        self._group, self._audience, self._options, self._stack = group, audience, options, stack

    def begin(self, source: str | None, target: str | None) -> _Orders:
        """Plan, and make the place, which goes again with the stack if anything fails."""
        options = self._options
        plan = self.plan = make_plan(source, target, options)
        require_place(plan.target, False, plan.nbytes, options.overwrite, read_paths(plan.source, options))
        self._replaces = replaced(plan.target, "dcp") if options.overwrite else ""
        self.place = self._stack.enter_context(prepare(plan.target, False, plan.nbytes, options.overwrite, plan.source))
        self._stack.push(lambda kind, *_: self._group.halt() if kind else None)
        self._audience.writing(self.place.written, tuple(reversed([file.name for file in plan.last])))
        files = {part.name: _files_of_members(part, self._group.size) for part in plan.parts}
        return _Orders(plan.opens, self.place.written, files)

    def finish(self, written: Sequence[Contribution[list[CopyReport]]], began: float) -> Resharded:
        """Look at what all have written, and complete it."""
        for one in written:
            self.place.note(one.made)
        reports = values_of(written)
        for index, part in enumerate(self.plan.parts):
            of_part = [of_member[index] for of_member in reports]
            require_proven(part.source, of_part, self._options.threads or 2, ANOTHER_STEP)
        _seal(self.plan, self.place, self._options, self._audience)
        self._audience.published()
        unproven = {fqn for of_member in reports for report in of_member for fqn in report.unproven}
        lost: dict[str, Loss] = {}
        for fqn, found in (pair for of_member in reports for report in of_member for pair in report.lost.items()):
            lost[fqn] = lost.get(fqn, NO_LOSS).plus(found)
        seconds = time.perf_counter() - began
        return summarize_plan(self.plan, self._options, self._group.size, seconds, True, self._replaces, unproven, lost)


def read_paths(source: str, options: ReshardOptions) -> tuple[str, ...]:
    """Return the paths of all that is read, which the output must not touch."""
    return (source, *options.also, *([options.like] if options.like is not None else []))


def _files_of_members(part: PartPlan, n_members: int) -> list[_Files]:
    """Give each member the files of a contiguous block of ranks."""
    files = part.arrangement.files
    return [{name: list(files[name]) for name in block} for block in blocks(list(files), n_members)]


def _write(
    group: ProcessGroup, orders: _Orders, plan: Plan | None, options: ReshardOptions, audience: Audience
) -> list[CopyReport]:
    """Write this member's files of each part; rank 0 also those that follow as they are."""

    def told(nbytes: int) -> None:
        require_going(group)
        audience.progress(nbytes)

    planned = {part.name: (part.source, part.selection) for part in plan.parts} if plan else {}
    reports = []
    try:
        storage, step = _storage(orders.target, audience)
        for name, members in orders.parts.items():
            source, selection = planned.get(name) or _opened(orders.opens, name, options)
            files = data_files(source, selection, Arrangement(members[group.rank], {}))
            named = [file._replace(name=join(name, file.name) if name else file.name) for file in files]
            side_by_side = [named[start : start + step] for start in range(0, len(named), step)]
            reports.append(copy(source, side_by_side, storage, options.threads or 1, told, shared=True))
        if plan:
            following = plan.following
            carry(following, [file for file in following.carried if file.name != following.last], storage, told)
        return reports
    except MemoryError:
        memory = f"rank {group.rank} of {group.size} has no memory left; --threads 1 and fewer --workers need less"
        raise WorkerError(memory) from None


def _opened(opens: tuple[str, str], part: str, options: ReshardOptions) -> tuple[Checkpoint, Selection]:
    """Open a part of what rank 0 opened, and select the same of it."""
    path, folder = opens
    checkpoint = open_again(path, options.also, "/".join(filter(None, (folder, part))))
    return checkpoint, select(checkpoint, *asked_of(options).of_part(checkpoint))


def _storage(target: str, audience: Audience) -> tuple[Creator, int]:
    """Return where files are made, and how many side by side."""
    if is_url(target):
        return NotedStorage(storage_at(target), audience), OPEN_OBJECTS
    return LocalStorage(target), OPEN_FILES


def _seal(plan: Plan, place: Target, options: ReshardOptions, audience: Audience) -> None:
    """Write what makes the output complete, look at it, and give it its name."""
    storage: Creator = NotedStorage(place.storage, audience) if is_url(place.written) else place.storage
    following = plan.following
    *metadata, marker = plan.last
    for file in metadata:
        _write_last(plan, place.named([file]), storage, audience)
    carry(following, [file for file in following.carried if file.name == following.last], storage, audience.progress)
    place.note(following.sizes)
    _write_last(plan, place.named([marker]), storage, audience)
    for part in plan.parts:
        require_same(place, part.layout.files, part.selection, part.name)
        if options.check:
            written = open_checkpoint(join(place.written, part.name) if part.name else place.written)
            require_equal(part.source, written, part.selection, options.threads or 2)
    if options.check:
        require_same_bytes(following, place.storage)
    place.publish(options.overwrite)


def _write_last(plan: Plan, files: Sequence[OutputFile], storage: Creator, audience: Audience) -> None:
    copy(plan.parts[0].source, [files], storage, 1, audience.progress)
