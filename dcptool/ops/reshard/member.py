"""What each process of the group does: rank 0 plans, all write their files, rank 0 checks, seals and publishes.

Knows nothing of who started the processes, or how they find each other: that is `groups`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import Box
from dcptool.checkpoint.selection import select
from dcptool.copying.checking import settle
from dcptool.copying.engine import CopyReport, copy
from dcptool.copying.publishing import Target, prepare, require_place
from dcptool.errors import ItemError, WorkerError
from dcptool.formats.dcp.format import METADATA
from dcptool.formats.dcp.write import Arrangement, data_files
from dcptool.formats.detect import open_checkpoint
from dcptool.formats.marker import NAME
from dcptool.groups.audience import Audience, NotedStorage
from dcptool.groups.group import ProcessGroup
from dcptool.groups.sharing import Contribution, agree, blocks, contribute, require_going, values_of
from dcptool.ops.guards import ANOTHER_STEP, damaged, require_equal, require_same, require_unchanged
from dcptool.ops.replacing import replaced
from dcptool.ops.reshard.plan import Plan, ReshardOptions, make_plan
from dcptool.ops.reshard.result import Resharded, summarize_plan
from dcptool.storage import Creator, LocalStorage, is_url, storage_at

OPEN_FILES = 128
"""Files a process writes side by side; each gathers small writes in memory."""
OPEN_OBJECTS = 4
"""The same in an object store, whose clients hold a part of some MiB of each."""


class _Orders(NamedTuple):
    """What rank 0 tells the others: what to read, where to write, and the files of each."""

    source: str
    target: str
    files: list[dict[str, list[tuple[str, Box | None]]]]


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
        require_place(plan.target, False, plan.nbytes, options.overwrite, read_paths(plan.source.path, options))
        self._replaces = replaced(plan.target, "dcp") if options.overwrite else ""
        self.place = self._stack.enter_context(
            prepare(plan.target, False, plan.nbytes, options.overwrite, plan.source.path)
        )
        self._stack.push(lambda kind, *_: self._group.halt() if kind else None)
        self._audience.writing(self.place.written, (NAME, METADATA))
        return _Orders(plan.source.path, self.place.written, _files_of_members(plan, self._group.size))

    def finish(self, written: Sequence[Contribution[CopyReport]], began: float) -> Resharded:
        """Look at what all have written, and complete it."""
        for one in written:
            self.place.note(one.made)
        reports = values_of(written)
        _require_proven(self.plan, reports, self._options)
        _seal(self.plan, self.place, self._options, self._audience)
        self._audience.published()
        unproven = {fqn for report in reports for fqn in report.unproven}
        seconds = time.perf_counter() - began
        return summarize_plan(self.plan, self._options, self._group.size, seconds, True, self._replaces, unproven)


def read_paths(source: str, options: ReshardOptions) -> tuple[str, ...]:
    """Return the paths of all that is read, which the output must not touch."""
    return (source, *options.also, *([options.like] if options.like is not None else []))


def _files_of_members(plan: Plan, n_members: int) -> list[dict[str, list[tuple[str, Box | None]]]]:
    """Give each member the files of a contiguous block of ranks."""
    files = plan.arrangement.files
    return [{name: list(files[name]) for name in block} for block in blocks(list(files), n_members)]


def _write(
    group: ProcessGroup, orders: _Orders, plan: Plan | None, options: ReshardOptions, audience: Audience
) -> CopyReport:
    """Write this member's files."""

    def told(nbytes: int) -> None:
        require_going(group)
        audience.progress(nbytes)

    try:
        source = plan.source if plan else open_checkpoint(orders.source, options.also)
        selection = plan.selection if plan else select(source, options.keys, options.exclude)
        files = data_files(source, selection, Arrangement(orders.files[group.rank], {}))
        storage, step = _storage(orders.target, audience)
        side_by_side = [files[start : start + step] for start in range(0, len(files), step)]
        return copy(source, side_by_side, storage, options.threads or 1, told, shared=True)
    except MemoryError:
        memory = f"rank {group.rank} of {group.size} has no memory left; --threads 1 and fewer --workers need less"
        raise WorkerError(memory) from None


def _storage(target: str, audience: Audience) -> tuple[Creator, int]:
    """Return where files are made, and how many side by side."""
    if is_url(target):
        return NotedStorage(storage_at(target), audience), OPEN_OBJECTS
    return LocalStorage(target), OPEN_FILES


def _require_proven(plan: Plan, reports: Sequence[CopyReport], options: ReshardOptions) -> None:
    """Refuse a source that changed or is damaged; check the records that several members read parts of.

    Raises:
        ItemError: names tensors, files and bytes.
        StorageError: somebody wrote to it meanwhile.
    """
    require_unchanged(plan.source)
    failures: dict[Any, Finding] = {}
    for report in reports:
        failures |= {(finding.fqn, finding.file, finding.byte_range): finding for finding in report.failures}
    partly_read = [found for report in reports for found in report.partly_read]
    for finding in settle(plan.source, partly_read, options.threads or 2):
        failures.setdefault((finding.fqn, finding.file, finding.byte_range), finding)
    if failures:
        raise ItemError(damaged(plan.source, list(failures.values()), ANOTHER_STEP))


def _seal(plan: Plan, place: Target, options: ReshardOptions, audience: Audience) -> None:
    """Write what makes the output complete, look at it, and give it its name."""
    storage: Creator = NotedStorage(place.storage, audience) if is_url(place.written) else place.storage
    for file in plan.layout.last:
        copy(plan.source, [place.named([file])], storage, 1, audience.progress)
    require_same(place, plan.layout.files, plan.selection)
    if options.check:
        require_equal(plan.source, open_checkpoint(place.written), plan.selection, options.threads or 2)
    place.publish(options.overwrite)
