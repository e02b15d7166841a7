"""What is at a path: a checkpoint, several of them, or a run directory, as frozen values.

Reads metadata and one listing per folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, errors, state_of
from dcptool.checkpoint.selection import globs, require_match, unmatched
from dcptool.errors import DcptoolError
from dcptool.formats.detect import (
    Part,
    find_parts,
    not_a_checkpoint,
    open_checkpoint,
    open_part,
    part_path,
)
from dcptool.ops.inspect.summary import CheckpointSummary, summarize_checkpoint
from dcptool.runs.directory import run_at
from dcptool.storage import Location, locate

if TYPE_CHECKING:
    from dcptool.ops.inspect.stats import StatsReport
    from dcptool.ops.verify.verdict import Verdict
    from dcptool.storage import Progress

_FINE = frozenset({"complete", "in-progress", "other"})


class Summary(NamedTuple):
    """What is at a path.

    Attributes:
        path: where it was found, which may be below the path asked for.
        checkpoints: the checkpoint, or those of a folder.
        steps: verdicts on the steps of a run directory; its checkpoints are not shown one by one then.
        others: paths of checkpoints beside the steps, or below a safetensors folder.
        errors: (path, message) of checkpoints of a folder that do not open.
        stats: statistics of the tensors of each checkpoint, if asked for; what they show is among its problems too.
        notes: how the steps were found; of a folder of several checkpoints what is wrong beside them.
    """

    path: str
    checkpoints: tuple[CheckpointSummary, ...] = ()
    steps: tuple[Verdict, ...] = ()
    others: tuple[str, ...] = ()
    errors: tuple[tuple[str, str], ...] = ()
    stats: tuple[StatsReport, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def good(self) -> bool:
        """Whether everything that was looked at is whole and readable."""
        found = all(checkpoint.good for checkpoint in self.checkpoints)
        return (
            found and not (self.errors or errors(self.notes)) and all(step.state.value in _FINE for step in self.steps)
        )


def summarize(
    path: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    chunks: bool = False,
    values: bool = False,
    depth: int = 1,
    stats: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Summarize the checkpoint, the checkpoints or the run directory at a path.

    Args:
        path: local path or fsspec URL; see `dcptool.open`.
        keys: names or shell globs on whole fqns, `*` crosses dots; default: all.
        exclude: names or globs of what to leave out.
        chunks: keep every tensor's boxes and places too.
        values: read the first elements of each tensor, at most 8 × 8 of at most 50 tensors; needs numpy.
        depth: leading parts of a name that make a group.
        stats: read all selected tensors and compute their statistics; needs numpy. A run directory has none.
        threads, progress: of that; see `tensor_stats`.

    Raises:
        CheckpointNotFoundError, MetadataError, UnsupportedError, StorageError: as `dcptool.open`, if nothing opens.
        LayoutError: `keys` match nothing; the message lists what there is.

    Example:
        >>> str(dcptool.summarize("ckpt/step_500").checkpoints[0].tensors[0].layout)
        'Shard(0) ×4'
    """
    keys, exclude = globs(keys), globs(exclude)
    location = locate(path)
    if location.file is not None:
        opened = [open_checkpoint(path)]
        require_match(opened, keys, exclude)
        found = summarize_checkpoint(opened[0], keys, exclude, chunks, depth, values)
        summary = Summary(found.path, _with_unmatched((found,), opened, keys, exclude))
        return _with_stats(summary, opened, threads, progress) if stats else summary
    parts = find_parts(location)
    itself = [part for part in parts if not part.name]
    run = run_at(location)
    if run:
        from dcptool.ops.verify.verify import verify  # what one checkpoint does without

        report = verify(path)
        others = (part for part in parts if not run.holds(part.name))
        paths = tuple(part_path(location, part) for part in others)
        return Summary(run.path, (), report.verdicts, paths, notes=report.notes)
    if not parts:
        raise not_a_checkpoint(location)
    wanted = itself or parts
    opened, failed = _open_all(location, wanted)
    require_match(opened, keys, exclude)
    summaries = tuple(summarize_checkpoint(checkpoint, keys, exclude, chunks, depth, values) for checkpoint in opened)
    others = (part for part in parts if part not in wanted)
    paths = tuple(part_path(location, part) for part in others)
    summaries = _with_unmatched(summaries, opened, keys, exclude)
    beside = () if failed else _beside(location, wanted, opened)
    if len(summaries) == 1:
        problems = (*beside, *summaries[0].problems)
        summaries, beside = (summaries[0]._replace(problems=problems, state=state_of(problems)),), ()
    summary = Summary(location.storage.root, summaries, (), paths, failed, notes=beside)
    return _with_stats(summary, opened, threads, progress) if stats else summary


def _with_unmatched(
    summaries: tuple[CheckpointSummary, ...],
    opened: Sequence[Checkpoint],
    keys: Sequence[str],
    exclude: Sequence[str],
) -> tuple[CheckpointSummary, ...]:
    """Add to the first of several summaries a note on each name or glob that matches nothing in any of them."""
    names = dict.fromkeys(fqn for checkpoint in opened for fqn in checkpoint) if keys or exclude else ()
    notes = unmatched(names, keys, exclude)
    told = (Finding.of("unmatched-glob", message) for message in notes)
    first, *rest = summaries
    return (first._replace(problems=(*first.problems, *told)), *rest)


def _beside(location: Location, parts: Sequence[Part], opened: Sequence[Checkpoint]) -> tuple[Finding, ...]:
    """Return the errors that the files beside the checkpoints of a folder show, where all of these are opened."""
    names = [part.name for part in parts]
    if names != [part.name for part in find_parts(location, below_whole=True)]:
        return ()
    from dcptool.ops.verify.judge import beside_step

    return tuple(errors(beside_step(location, dict(zip(names, opened, strict=True)))))


def _with_stats(
    summary: Summary, opened: Sequence[Checkpoint], threads: int | None, progress: Progress | None
) -> Summary:
    """Add the statistics of the tensors shown, and what they tell to the problems of their checkpoint."""
    from dcptool.ops.inspect.stats import stats_of  # what most summaries do without

    checkpoints, reports = [], []
    for checkpoint, shown in zip(opened, summary.checkpoints, strict=True):
        flat = checkpoint.flat
        entries = [flat.tensors[tensor.fqn] for tensor in shown.tensors if tensor.fqn in flat.tensors]
        report = stats_of(flat, entries, threads, progress)
        problems = (*shown.problems, *report.findings)
        known = {problem.file for problem in errors(shown.problems)} - {None}
        # What a missing file held is missing, not damaged.
        new = [finding for finding in report.findings if finding.file not in known]
        checkpoints.append(shown._replace(problems=problems, state=state_of([*shown.problems, *new])))
        reports.append(report)
    return summary._replace(checkpoints=tuple(checkpoints), stats=tuple(reports))


def _open_all(location: Location, parts: Sequence[Part]) -> tuple[list[Checkpoint], tuple[tuple[str, str], ...]]:
    """Open the parts of a folder; what does not open is returned as (path, message), unless nothing does."""
    opened: list[Checkpoint] = []
    failed: list[tuple[str, DcptoolError]] = []
    for part in parts:
        try:
            opened.append(open_part(location, part.name))
        except DcptoolError as error:
            failed.append((part_path(location, part), error))
    if not opened:
        raise failed[0][1]
    return opened, tuple((path, str(error)) for path, error in failed)
