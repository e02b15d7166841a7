"""Verify what a user names: one checkpoint, or every step of a run directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, errors, state_of, worst_first
from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.formats.detect import open_part
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.siblings import compare_steps
from dcptool.ops.verify.verdict import DEFAULTS, State, Verdict, VerifyOptions, unreadable
from dcptool.runs.activity import exists
from dcptool.runs.directory import Run, run_at
from dcptool.runs.order import Save, branch_note, in_order, later_by_time
from dcptool.storage import Progress, join, locate


class VerifyReport(NamedTuple):
    """What verifying a path shows.

    Attributes:
        path: as given; of a run directory the folder that holds the steps.
        is_run: whether it is a run directory.
        verdicts: of the checkpoint, or of each step, the one saved first first.
        notes: what is odd about the run as a whole, and how its steps were found where names do not tell.
        later: complete steps that were written after the newest complete one by what times say, the last one first.
        finite: whether it was asked for values that are not finite.
    """

    path: str
    is_run: bool
    verdicts: tuple[Verdict, ...]
    notes: tuple[Finding, ...] = ()
    later: tuple[str, ...] = ()
    finite: bool = False

    @property
    def good(self) -> bool:
        """Whether all are complete and hold no NaN or infinity, if that was asked; in a run some may be in progress."""
        fine = {State.COMPLETE, State.IN_PROGRESS} if self.is_run else {State.COMPLETE}
        return all(verdict.state in fine and not verdict.not_finite for verdict in self.verdicts)


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
    saves = in_order(run, options.marker, options.by, run.below(location.storage)) if run else ()
    if run:
        every = [judge_step(run, save.name, options, progress) for save in saves]
        verdicts = compare_steps([verdict for verdict in every if verdict])
    else:
        verdicts = (judge(path, options, progress),)
    if load:
        verdicts = tuple(loaded(verdict, trust, progress) for verdict in verdicts)
    if run is None:
        return VerifyReport(location.path, False, verdicts, finite=options.finite)
    odd, later = _saved_later(run, saves, verdicts, options)
    notes = (*odd, *branch_note(run, saves), *run.notes)
    return VerifyReport(run.path, True, verdicts, notes, later, options.finite)


def _saved_later(
    run: Run, saves: Sequence[Save], verdicts: Sequence[Verdict], options: VerifyOptions
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return that a complete step was written after the newest complete one, if one was, and the names of all such."""
    complete = {verdict.name for verdict in verdicts if verdict.state is State.COMPLETE}
    newest = next((save for save in reversed(saves) if save.name in complete), None)
    if newest is None or options.by:
        return (), ()
    later = [save for save in later_by_time(run, saves, newest.name, options.marker) if save.name in complete]
    return tuple(save.contradiction for save in later[:1]), tuple(save.name for save in later)


def loaded(verdict: Verdict, trust: bool, progress: Progress | None = None) -> Verdict:
    """Load every part of a checkpoint with the installed torch, and return the verdict with what came of it."""
    from dcptool.ops.verify.file_load import load_files
    from dcptool.ops.verify.torch_load import load_with_torch

    findings: list[Finding] = []
    if verdict.whole and not verdict.parts:
        findings.append(Finding.of("not-loaded", "not loaded: dcptool reads no tensor of it"))
    location = locate(verdict.path)
    for part in verdict.parts:
        checkpoint = open_part(location, part.name)
        load = load_with_torch if checkpoint.format.loads_in_torch else load_files
        report = load(checkpoint, trust=trust, progress=progress)
        findings += report.findings
        skipped = f", {report.n_skipped_objects:,} objects not tried (--trust)" if report.n_skipped_objects else ""
        message = f"torch {report.torch_version} loaded {report.n_tensors:,} tensors and {report.n_objects:,} objects"
        findings.append(Finding.of("loaded", message + skipped, part.name or None))
    bad = errors(findings)
    state = State(state_of(bad)) if bad and verdict.whole else verdict.state
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
        return judge(path, options, progress)._replace(step=run.number(name))
    except CheckpointNotFoundError:
        return None
    except StorageError as error:
        return unreadable(path, error, options.depth)
