"""Find the checkpoint to resume from: the newest step that is whole, whatever names and pointers say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checks.check import Level
from dcptool.checks.side_files import FilePattern, patterns_of
from dcptool.errors import CheckpointNotFoundError, DcptoolError, StorageError
from dcptool.formats.detect import find_parts, open_part
from dcptool.formats.marker import is_of_save, marker_in
from dcptool.ops.verify.siblings import (
    MAX_SIBLINGS,
    common_of,
    has_optimizer,
    lacking_files,
    lacking_groups,
    lacking_parts,
    without_marker,
)
from dcptool.ops.verify.verdict import DEFAULTS, State, Verdict, VerifyOptions
from dcptool.ops.verify.verify import judge_step
from dcptool.runs.activity import list_files
from dcptool.runs.directory import Run, find_runs, listed, require_run
from dcptool.runs.order import Save, in_order, later_by_time
from dcptool.runs.pointers import pointer_problems, read_pointers
from dcptool.storage import Location, Storage, join, locate

_UNREADABLE = "It may be whole: look again when it can be read; --skip-unreadable takes an older one."


class Step(NamedTuple):
    """A numbered checkpoint directory: its number, its name in the run directory, its path."""

    number: int
    name: str
    path: str


class Latest(NamedTuple):
    """The answer: false if there is nothing to resume from, else a path of what there is.

    Attributes:
        run: path of the run directory.
        verdict: on the newest complete step; None if there is none.
        skipped: verdicts on the newer ones, newest first.
        pointers: what pointer files and links say that is not so, and how the steps were found where names do not tell.
        problem: why there is no run to look at: no steps, or several runs; "" if there is one.
        order: that an older complete step was written long after the answer, if one was.
    """

    run: str
    verdict: Verdict | None
    skipped: tuple[Verdict, ...]
    pointers: tuple[Finding, ...]
    problem: str = ""
    order: tuple[Finding, ...] = ()

    @property
    def path(self) -> str | None:
        """Path of the newest complete step, None if there is none."""
        return self.verdict.path if self.verdict else None

    def __bool__(self) -> bool:
        return self.verdict is not None

    def __fspath__(self) -> str:
        """Return the path of the newest complete step, for whatever takes a path.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        if self.verdict is None:
            raise CheckpointNotFoundError(self.problem or f"{self.run} has no complete step to resume from")
        return self.verdict.path

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What is probably not as it was meant to be in the answer."""
        findings = self.verdict.findings if self.verdict else ()
        return tuple(finding for finding in findings if finding.severity is Severity.WARNING)


def find_steps(run_dir: str | os.PathLike[str]) -> tuple[Step, ...]:
    """List the steps of a run directory, lowest first, by their names alone.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no step in it, or several run directories.
        StorageError: it cannot be listed.
    """
    run = require_run(locate(run_dir))
    return tuple(Step(run.number(name) or 0, name, join(run.path, name)) for name in run.steps)


def find_latest(
    run_dir: str | os.PathLike[str],
    options: VerifyOptions = DEFAULTS,
    *,
    before: str | None = None,
    weights: bool = False,
    skip_unreadable: bool = False,
) -> Latest:
    """Find the newest complete step of a run directory that a job can resume from.

    Newest is what was saved last, by the markers of saves, or else has the highest number; see `VerifyOptions.by`.
    Every step is judged by what is in it. Of steps older than the answer the markers and the listings are read, and the
    metadata of a few where the answer has no optimizer. If no step can be resumed from, the newest complete one it is.
    With `VerifyOptions.finite` a step with NaN or infinities is never the answer.

    Args:
        run_dir: local path or URL.
        options: how closely to look, and what is asked; see `VerifyOptions`.
        before: name of a step; only what stands before it is looked at.
        weights: whether the newest complete step is wanted even if it was saved for its weights alone.
        skip_unreadable: whether a step that cannot be read is passed over for an older one.

    Returns:
        The newest complete step, why newer ones were passed over, and what pointers say that is not so.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        StorageError: it cannot be listed; or the newest step cannot be read, which says nothing against it.
    """
    location = locate(run_dir, options.also)
    if location.file is not None:
        raise CheckpointNotFoundError(f"{location.path} is a file, no run directory")
    runs = find_runs(location)
    if len(runs) != 1:
        return Latest(location.path, None, (), (), listed(location.path, runs))
    run = runs[0]
    storage = run.below(location.storage)
    skipped: list[Verdict] = []
    answer: Verdict | None = None
    saves = in_order(run, options.marker, options.by, storage)
    names = [save.name for save in saves]
    newest_first = saves[: names.index(before) if before in names else len(names)][::-1]
    for position, save in enumerate(newest_first):
        verdict = judge_step(run, save.name, options)
        if verdict is None:  # deleted meanwhile
            continue
        verdict = _beside_older(verdict, storage, newest_first[position + 1 :], options)
        if _is_good(verdict) and (weights or verdict.resumable is not False):
            answer = verdict
            break
        if verdict.state is State.UNREADABLE and not skip_unreadable:
            raise StorageError(f"{verdict.path} could not be read: {verdict.reason}", next_step=_UNREADABLE)
        skipped.append(verdict)
    if answer is None:
        answer = next(filter(_is_good, skipped), None)
        skipped = skipped[: skipped.index(answer)] if answer else skipped
    pointers = pointer_problems(names, read_pointers(run), answer.name if answer else None)
    order = _order_notes(run, answer, saves, options) if answer and not options.by else ()
    return Latest(run.path, answer, tuple(skipped), (*pointers, *run.notes), order=order)


def _is_good(verdict: Verdict) -> bool:
    """Tell whether a step is complete, with no value that is not finite if that was asked."""
    return verdict.state is State.COMPLETE and not verdict.not_finite


def _order_notes(run: Run, answer: Verdict, saves: Sequence[Save], options: VerifyOptions) -> tuple[Finding, ...]:
    """Return that a complete step was written long after the answer, though its number is lower, if one was."""
    for later in later_by_time(run, saves, answer.name, options.marker)[:MAX_SIBLINGS]:
        verdict = judge_step(run, later.name, options._replace(level=Level.METADATA, finite=False))
        if verdict and verdict.state is State.COMPLETE:
            return (later.contradiction,)
    return ()


def _beside_older(verdict: Verdict, storage: Storage, older: Sequence[Save], options: VerifyOptions) -> Verdict:
    """Return the verdict on a step with what only comparing it with older ones shows."""
    if verdict.state is not State.COMPLETE:
        return verdict
    siblings = [found for save in older[:MAX_SIBLINGS] if (found := _sibling(storage, save.name, options.marker))]
    verdict = lacking_parts(verdict, len(siblings), common_of(found.parts for found in siblings))
    verdict = lacking_files(verdict, len(siblings), common_of(found.patterns for found in siblings))
    if verdict.state is State.COMPLETE and verdict.resumable is not False and not has_optimizer(verdict.groups):
        groups = [found.groups(storage) for found in siblings]
        verdict = lacking_groups(verdict, len(siblings), common_of(groups))
    if verdict.state is State.COMPLETE and verdict.marker is None:
        for save in older:
            known = save.of_save
            if is_of_save(marker_in(storage.below(save.name), options.marker)) if known is None else known:
                return without_marker(verdict, save.name)
    return verdict


class _Sibling(NamedTuple):
    """An older step as its listing shows it: its name, its parts, patterns of the files beside them."""

    name: str
    parts: frozenset[str]
    patterns: frozenset[FilePattern]

    def groups(self, storage: Storage) -> frozenset[str]:
        """Open its parts, and return the first parts of the names of their entries."""
        location = Location(storage.below(self.name), None)
        try:
            opened = [open_part(location, part) for part in self.parts]
        except DcptoolError:
            return frozenset()
        return frozenset(fqn.partition(".")[0] for checkpoint in opened for fqn in checkpoint)


def _sibling(storage: Storage, step: str, marker: str) -> _Sibling | None:
    """Look at another step; None if it has no parts, or cannot be listed: that says nothing of this one."""
    location = Location(storage.below(step), None)
    try:
        parts = frozenset(part.name for part in find_parts(location, below_whole=True))
        return _Sibling(step, parts, patterns_of(list_files(location), marker)) if parts else None
    except DcptoolError:
        return None
