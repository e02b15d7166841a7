"""Verify what a user names: one checkpoint, or every step of a run directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, errors, worst_first
from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.formats.detect import open_part
from dcptool.formats.marker import is_of_save
from dcptool.ops.verify.verdict import DEFAULTS, State, Verdict, VerifyOptions, judge, unreadable
from dcptool.runs.activity import exists
from dcptool.runs.directory import Run, run_at
from dcptool.storage import Progress, join, locate

MIN_SIBLINGS = 2
"""Other steps that must all have a part before one without it counts as lacking it."""


class VerifyReport(NamedTuple):
    """What verifying a path shows.

    Attributes:
        path: as given; of a run directory the folder that holds the steps.
        is_run: whether it is a run directory.
        verdicts: of the checkpoint, or of each step, lowest step first.
    """

    path: str
    is_run: bool
    verdicts: tuple[Verdict, ...]

    @property
    def good(self) -> bool:
        """Whether all are complete; in a run directory some may be in progress."""
        fine = {State.COMPLETE, State.IN_PROGRESS} if self.is_run else {State.COMPLETE}
        return all(verdict.state in fine for verdict in self.verdicts)


def verify(
    path: str | os.PathLike[str],
    options: VerifyOptions = DEFAULTS,
    progress: Progress | None = None,
    *,
    load: bool = False,
    trust: bool = False,
) -> VerifyReport:
    """Verify a checkpoint, or every step of a run directory.

    Args:
        path: local path or URL.
        options: how closely to look, and what is asked; see `VerifyOptions`.
        progress: told the number of bytes as they are read.
        load: also load everything with the installed torch, to see that this version still can.
        trust: with `load`, load objects too, which executes their pickles.

    Returns:
        A verdict each, with all findings; nothing that is wrong with a checkpoint is raised.

    Raises:
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: the path itself cannot be looked at.
        UnsupportedError: `load` without torch.

    Example:
        >>> report = dcptool.verify("ckpt", dcptool.VerifyOptions(level=dcptool.Level.DEEP))
        >>> [(verdict.name, verdict.state.value) for verdict in report.verdicts]
    """
    location = locate(path, options.also)
    run = run_at(location)
    if run is None:
        verdicts: Sequence[Verdict] = [judge(path, options, progress)]
    else:
        every = [judge_step(run, name, options, progress) for name in run.steps]
        verdicts = compare_steps([verdict for verdict in every if verdict])
    if load:
        verdicts = [loaded(verdict, trust, progress) for verdict in verdicts]
    return VerifyReport(run.path if run else location.path, run is not None, tuple(verdicts))


def loaded(verdict: Verdict, trust: bool, progress: Progress | None = None) -> Verdict:
    """Load every part of a checkpoint with the installed torch, and return the verdict with what came of it."""
    from dcptool.ops.verify.torch_load import load_with_torch

    findings: list[Finding] = []
    location = locate(verdict.path)
    for part in verdict.parts:
        checkpoint = open_part(location, part.name)
        if not checkpoint.format.loads_in_torch:
            findings.append(Finding.of("not-loaded", "not loaded: dcp.load reads DCP only", part.name or None))
            continue
        report = load_with_torch(checkpoint, trust=trust, progress=progress)
        findings += report.findings
        skipped = f", {report.n_skipped_objects:,} objects not tried (--trust)" if report.n_skipped_objects else ""
        message = f"torch {report.torch_version} loaded {report.n_tensors:,} tensors and {report.n_objects:,} objects"
        findings.append(Finding.of("loaded", message + skipped, part.name or None))
    bad = errors(findings)
    state = State.DAMAGED if bad and verdict.whole else verdict.state
    rest = [finding for finding in findings if not finding.is_error]
    return verdict._replace(state=state, findings=tuple(worst_first([*bad, *verdict.findings, *rest])))


def judge_step(run: Run, name: str, options: VerifyOptions, progress: Progress | None = None) -> Verdict | None:
    """Judge one step of a run; None if it has vanished. One that cannot be looked at is damaged: others go on.

    Of a run in several halves (`VerifyOptions.also`) the halves of a step lie under the same name; one may lack it.
    """
    path = join(run.path, name)
    below = f"{run.folder}/{name}" if run.folder else name
    halves = [half for half in (path, *(join(folder, below) for folder in options.also)) if exists(half)]
    if options.also and halves:
        path, options = halves[0], options._replace(also=tuple(halves[1:]))
    try:
        return judge(path, options, progress)
    except CheckpointNotFoundError:
        return None
    except StorageError as error:
        return unreadable(path, error, options.level)


def compare_steps(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts of a run's steps, lowest first, with what only comparing them shows.

    A whole step without a marker is unmarked once an earlier one has a marker that a save wrote; a step lacks a part
    that all others have.
    """
    compared = []
    marked = ""
    with_parts = [verdict for verdict in verdicts if verdict.parts]
    count = Counter(part.name for verdict in with_parts for part in verdict.parts)
    for verdict in verdicts:
        n_others = len(with_parts) - bool(verdict.parts)
        # What this step has is not missing, so the count of the others is the count of all.
        common = [name for name, number in count.items() if number == n_others]
        lacking = missing_parts(verdict, n_others, common)
        if lacking and verdict.whole:
            verdict = _with(verdict, State.INCOMPLETE, lacking)
        if marked and verdict.state is State.COMPLETE and verdict.marker is None:
            verdict = without_marker(verdict, marked)
        if is_of_save(verdict.marker):
            marked = verdict.name
        compared.append(verdict)
    return tuple(compared)


def without_marker(verdict: Verdict, marked: str) -> Verdict:
    """Return the verdict on a whole step of a run whose earlier step `marked` has a marker."""
    message = f"it has no marker, though {marked} has one: the save may have died before it was done"
    step = f"If you know that it is whole: dcptool mark {verdict.path}"
    return _with(verdict, State.UNMARKED, [Finding.of("no-marker", message, next_step=step)])


def missing_parts(verdict: Verdict, n_siblings: int, common: Iterable[str]) -> list[Finding]:
    """Return the parts that all sibling steps have and this one has not.

    Args:
        verdict: on the step.
        n_siblings: how many other steps have parts.
        common: names of parts that all these have.
    """
    if n_siblings < MIN_SIBLINGS or not verdict.parts:
        return []
    there = {part.name for part in verdict.parts} | {finding.file for finding in verdict.findings}
    return [
        Finding.of("missing-part", f"the part {name} is missing, which all other steps have", name)
        for name in sorted(set(common) - there)
    ]


def _with(verdict: Verdict, state: State, findings: Sequence[Finding]) -> Verdict:
    return verdict._replace(state=state, findings=(*findings, *verdict.findings))
