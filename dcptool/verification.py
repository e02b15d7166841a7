"""Verify what a user names: one checkpoint, or every step of a run directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcptool.checks.items import Progress
from dcptool.findings import Finding, Severity
from dcptool.formats.detect import find_parts, open_part
from dcptool.runs import Run, find_run
from dcptool.storage import Location, join, locate
from dcptool.verdict import DEFAULT_RULES, Rules, State, Verdict, judge

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
    rules: Rules = DEFAULT_RULES,
    progress: Progress | None = None,
    *,
    load: bool = False,
    trust: bool = False,
) -> VerifyReport:
    """Verify a checkpoint, or every step of a run directory.

    Args:
        path: local path or URL.
        rules: how closely to look, and what is asked; see `Rules`.
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
        >>> report = dcptool.verify("ckpt", dcptool.Rules(level=dcptool.Level.DEEP))
        >>> [(verdict.name, verdict.state.value) for verdict in report.verdicts]
    """
    location = locate(path, rules.also)
    run = run_at(location)
    if run is None:
        verdicts: Sequence[Verdict] = [judge(path, rules, progress)]
    else:
        every = [judge(join(run.path, name), _rules_of(run, name, rules), progress) for name in run.steps]
        verdicts = compare_steps(every)
    if load:
        verdicts = [loaded(verdict, trust, progress) for verdict in verdicts]
    return VerifyReport(run.path if run else location.path, run is not None, tuple(verdicts))


def loaded(verdict: Verdict, trust: bool, progress: Progress | None = None) -> Verdict:
    """Load every part of a checkpoint with the installed torch, and return the verdict with what came of it."""
    from dcptool.torch_load import load_with_torch

    findings: list[Finding] = []
    location = locate(verdict.path)
    for part in verdict.parts:
        checkpoint = open_part(location, part.name)
        if part.format != "dcp":
            findings.append(
                Finding("not-loaded", Severity.NOTE, "not loaded: dcp.load reads DCP only", part.name or None)
            )
            continue
        report = load_with_torch(checkpoint, trust=trust, progress=progress)
        findings += report.findings
        skipped = f", {report.n_skipped_objects:,} objects not tried (--trust)" if report.n_skipped_objects else ""
        message = f"torch {report.torch_version} loaded {report.n_tensors:,} tensors and {report.n_objects:,} objects"
        findings.append(Finding("loaded", Severity.NOTE, message + skipped, part.name or None))
    bad = any(finding.severity is Severity.ERROR for finding in findings)
    state = State.DAMAGED if bad and verdict.whole else verdict.state
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    rest = [finding for finding in findings if finding.severity is not Severity.ERROR]
    return verdict._replace(state=state, findings=(*errors, *verdict.findings, *rest))


def run_at(location: Location) -> Run | None:
    """Return the run directory at a location, None if it is a checkpoint itself or holds no steps."""
    if location.file is not None:
        return None
    itself = next((part for part in find_parts(location) if not part.name), None)
    return None if itself and itself.is_dcp else find_run(location)


def _rules_of(run: Run, name: str, rules: Rules) -> Rules:
    """Return the rules for one step: the other halves of it lie under the same name."""
    below = f"{run.folder}/{name}" if run.folder else name
    return rules._replace(also=tuple(path for folder in rules.also if _is_there(path := join(folder, below))))


def _is_there(path: str) -> bool:
    try:
        locate(path)
    except OSError:
        return False
    return True


def compare_steps(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts of a run's steps, lowest first, with what only comparing them shows.

    A whole step without a marker is unmarked once an earlier one has a marker that a save wrote; a step lacks a part
    that all others have.
    """
    compared = []
    marked = ""
    for verdict in verdicts:
        others = [other for other in verdicts if other is not verdict]
        lacking = missing_parts(verdict, [[part.name for part in other.parts] for other in others if other.parts])
        if lacking and verdict.whole:
            verdict = _with(verdict, State.INCOMPLETE, lacking)
        if marked and verdict.state is State.COMPLETE and verdict.marker is None:
            verdict = without_marker(verdict, marked)
        if is_saved_marker(verdict):
            marked = verdict.name
        compared.append(verdict)
    return tuple(compared)


def is_saved_marker(verdict: Verdict) -> bool:
    """Tell whether a step's marker shows that saves of this run write markers; one by hand does not."""
    return verdict.marker is not None and verdict.marker.writer in ("save", None)


def without_marker(verdict: Verdict, marked: str) -> Verdict:
    """Return the verdict on a whole step of a run whose earlier step `marked` has a marker."""
    message = f"it has no marker, though {marked} has one: the save may have died before it was done"
    step = f"If you know that it is whole: dcptool mark {verdict.path}"
    return _with(verdict, State.UNMARKED, [Finding("no-marker", Severity.ERROR, message, next_step=step)])


def missing_parts(verdict: Verdict, siblings: Sequence[Iterable[str]]) -> list[Finding]:
    """Return the parts that all sibling steps have and this one has not.

    Args:
        verdict: on the step.
        siblings: of each other step that has any, the names of its parts.
    """
    if len(siblings) < MIN_SIBLINGS or not verdict.parts:
        return []
    common = frozenset.intersection(*map(frozenset, siblings))
    there = {part.name for part in verdict.parts} | {finding.file for finding in verdict.findings}
    return [
        Finding("missing-part", Severity.ERROR, f"the part {name} is missing, which all other steps have", name)
        for name in sorted(common - there)
    ]


def _with(verdict: Verdict, state: State, findings: Sequence[Finding]) -> Verdict:
    return verdict._replace(state=state, findings=(*findings, *verdict.findings))
