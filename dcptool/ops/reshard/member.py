"""What each process of the group does: rank 0 plans, all write their files, rank 0 checks, seals and publishes.

No member raises between two meetings: what goes wrong is gathered, so that all of them end together and with the same
error.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import Box
from dcptool.checkpoint.selection import select
from dcptool.copying.checking import settle
from dcptool.copying.engine import CopyReport, copy, memory_nbytes
from dcptool.copying.outputs import OutputFile
from dcptool.copying.publishing import Target, prepare, require_place
from dcptool.errors import DcptoolError, ItemError, WorkerError
from dcptool.formats.dcp.write import Arrangement, data_files
from dcptool.formats.detect import open_checkpoint
from dcptool.groups.group import Group, blocks
from dcptool.ops.guards import ANOTHER_STEP, damaged, leftover_notes, require_equal, require_same, source_notes
from dcptool.ops.reshard.plan import Plan, ReshardOptions, make_plan
from dcptool.storage import Creator, LocalStorage, Progress, Sink, is_url, storage_at

OPEN_FILES = 128
"""Files a process writes side by side; each gathers small writes in memory."""
OPEN_OBJECTS = 4
"""The same in an object store, whose clients hold a part of some MiB of each."""


class Resharded(NamedTuple):
    """What was written, or would be.

    Attributes:
        source, path: of the source and of the output.
        world_size: ranks of the target.
        n_tensors, n_objects: how many are in it.
        nbytes: of all tensors' values.
        rank_nbytes: bytes of each rank's data file.
        metadata_nbytes: bytes of `.metadata` and of the marker.
        workers: processes that shared the work, or would.
        memory_nbytes: bytes of buffers in each of them.
        seconds: wall time, torch's start included.
        notes: worth knowing, one sentence each.
        published: whether it was written.
    """

    source: str
    path: str
    world_size: int
    n_tensors: int
    n_objects: int
    nbytes: int
    rank_nbytes: tuple[int, ...]
    metadata_nbytes: int
    workers: int
    memory_nbytes: int
    seconds: float
    notes: tuple[str, ...]
    published: bool

    @property
    def nbytes_out(self) -> int:
        """Bytes of all files."""
        return sum(self.rank_nbytes) + self.metadata_nbytes


class Audience:
    """Who is told what a member does; this one does not listen."""

    def progress(self, nbytes: int) -> None:
        """Take note of bytes that were written."""

    def written(self, path: str) -> None:
        """Take note, on rank 0, of where output is put until it is published."""

    def made(self, name: str) -> None:
        """Take note of a file in an object store that is about to be made, under its final name."""

    def published(self) -> None:
        """Take note, on rank 0, that the output is complete and has its name."""


NOBODY = Audience()


class Speaking(Audience):
    """Passes the bytes on, and nothing else."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def progress(self, nbytes: int) -> None:
        if self._progress:
            self._progress(nbytes)


class _Work(NamedTuple):
    """What rank 0 tells the others: what to read, where to write, and each one's share of the files."""

    source: str
    target: str
    files: list[dict[str, list[tuple[str, Box | None]]]]


class _Outcome(NamedTuple):
    """What one member did: its report, or the error that ended it, and the names it made in an object store."""

    report: CopyReport | None = None
    error: DcptoolError | None = None
    made: tuple[str, ...] = ()


class _Stopped(WorkerError):
    """This member stopped because another one failed: what follows from the cause, never the cause."""


class _Noted:
    """A storage for new files that remembers and tells which were made."""

    def __init__(self, storage: Creator, audience: Audience) -> None:
        self._storage, self._audience = storage, audience
        self.names: list[str] = []

    def create(self, name: str) -> Sink:
        """Begin a file."""
        sink = self._storage.create(name)
        self.names.append(name)
        self._audience.made(name)
        return sink


def summarize_plan(
    plan: Plan,
    options: ReshardOptions,
    workers: int,
    seconds: float,
    published: bool,
    unproven: Collection[str] = (),
) -> Resharded:
    """Return a plan as a result; `unproven` are the tensors that were read and have no checksums."""
    threads = options.threads or 1
    return Resharded(
        plan.source.path,
        plan.target,
        plan.n_ranks,
        len(plan.selection.tensors),
        len(plan.selection.objects),
        sum(item.nbytes for item in plan.selection.tensors),
        tuple(file.nbytes for file in plan.layout.files),
        sum(file.nbytes for file in plan.layout.last),
        workers,
        memory_nbytes(1, threads),
        seconds,
        (*plan.notes, *source_notes(plan.source, plan.selection, unproven), *leftover_notes(plan.target)),
        published,
    )


def run_member(
    group: Group,
    source: str | None,
    target: str | None,
    options: ReshardOptions,
    began: float,
    audience: Audience = NOBODY,
) -> Resharded:
    """Take part in a reshard; all members return the same, or raise the same.

    Args:
        group: of all members.
        source, target, options: as in `make_plan`; only rank 0's count.
        began: `time.perf_counter()` at the start.
        audience: told what this member does.

    Raises:
        DcptoolError: as `make_plan`, and what a member met; nothing is published.
    """
    with ExitStack() as stack:
        plan: Plan | None = None
        place: Target | None = None
        told: _Work | DcptoolError | None = None
        if group.rank == 0:
            try:
                plan = make_plan(source, target, options)
                require_place(plan.target, False, plan.nbytes, options.overwrite, read_paths(plan.source.path, options))
                place = stack.enter_context(
                    prepare(plan.target, False, plan.nbytes, options.overwrite, plan.source.path)
                )
                stack.push(lambda kind, *_: group.halt() if kind else None)
                audience.written(place.written)
                told = _Work(plan.source.path, place.written, _shares(plan, group.size))
            except DcptoolError as error:
                told = error
            except Exception as error:
                told = bug(group.rank, group.size, error)
        work = _agreed(group, group.share(told))
        outcome = _write(group, work, plan, options, audience)
        if outcome.error:
            group.fail()
        outcomes: list[_Outcome] = group.gather(outcome)
        result: Resharded | DcptoolError | None = None
        if plan and place:
            for found in outcomes:
                place.note(found.made)
            try:
                _require_written(plan, outcomes, options)
                _seal(plan, place, options, audience)
                audience.published()
                unproven = {fqn for found in outcomes if found.report for fqn in found.report.unproven}
                result = summarize_plan(plan, options, group.size, time.perf_counter() - began, True, unproven)
            except DcptoolError as error:
                result = error
            except Exception as error:
                result = bug(group.rank, group.size, error)
        return cast(Resharded, _agreed(group, group.share(result)))


def read_paths(source: str, options: ReshardOptions) -> tuple[str, ...]:
    """Return the paths of all that is read, which the output must not touch."""
    return (source, *options.also, *([options.like] if options.like is not None else []))


def bug(rank: int, size: int, error: Exception) -> WorkerError:
    """Return an error for all members in place of one that nobody expected on one of them."""
    found = WorkerError(f"rank {rank} of {size} failed, this is a bug in dcptool: {type(error).__name__}: {error}")
    found.trace = "".join(traceback.format_exception(error))
    return found


def _agreed(group: Group, shared: Any) -> Any:
    """Return what rank 0 shared, or raise it: on the other ranks marked as told by rank 0."""
    if isinstance(shared, DcptoolError):
        shared.told_elsewhere = group.rank != 0
        raise shared
    return shared


def _shares(plan: Plan, n_members: int) -> list[dict[str, list[tuple[str, Box | None]]]]:
    """Give each member the files of a contiguous block of ranks."""
    files = plan.arrangement.files
    return [{name: list(files[name]) for name in block} for block in blocks(list(files), n_members)]


def _write(group: Group, work: _Work, plan: Plan | None, options: ReshardOptions, audience: Audience) -> _Outcome:
    """Write this member's files."""
    noted: _Noted | None = None

    def told(nbytes: int) -> None:
        if group.failed.is_set():
            raise _Stopped("stopped, because another process failed")
        audience.progress(nbytes)

    def outcome(report: CopyReport | None = None, error: DcptoolError | None = None) -> _Outcome:
        return _Outcome(report, error, tuple(noted.names) if noted else ())

    try:
        source = plan.source if plan else open_checkpoint(work.source, options.also)
        selection = plan.selection if plan else select(source, options.keys, options.exclude)
        files = data_files(source, selection, Arrangement(work.files[group.rank], {}))
        if is_url(work.target):
            noted = _Noted(storage_at(work.target), audience)
        storage: Creator = noted or LocalStorage(work.target)
        step = OPEN_OBJECTS if noted else OPEN_FILES
        groups: list[list[OutputFile]] = [files[start : start + step] for start in range(0, len(files), step)]
        return outcome(copy(source, groups, storage, options.threads or 1, told, shared=True))
    except DcptoolError as error:
        return outcome(error=error)
    except MemoryError:
        memory = f"rank {group.rank} of {group.size} has no memory left; --threads 1 and fewer --workers need less"
        return outcome(error=WorkerError(memory))
    except Exception as error:  # the others must end too
        return outcome(error=bug(group.rank, group.size, error))


def _require_written(plan: Plan, outcomes: list[_Outcome], options: ReshardOptions) -> None:
    """Raise what went wrong, the cause before what followed from it; check the records that several read parts of."""
    errors = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error]
    if errors:
        rank, first = next((pair for pair in errors if not isinstance(pair[1], _Stopped)), errors[0])
        where = f"rank {rank} of {len(outcomes)}: " if len(outcomes) > 1 and not isinstance(first, WorkerError) else ""
        raise type(first)(f"{where}{first}") if where else first
    reports = [outcome.report for outcome in outcomes if outcome.report]
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
    storage: Creator = _Noted(place.storage, audience) if is_url(place.written) else place.storage
    for file in plan.layout.last:
        copy(plan.source, [place.named([file])], storage, 1, audience.progress)
    require_same(place, plan.layout.files, plan.selection)
    if options.check:
        require_equal(plan.source, _opened(place), plan.selection, options.threads or 2)
    place.publish(options.overwrite)


def _opened(place: Target) -> Checkpoint:
    return open_checkpoint(place.written)
