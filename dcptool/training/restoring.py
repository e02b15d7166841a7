"""The way back: which checkpoints of a run there are, whether one fits the job, and loading it, on all ranks together.

Compares before it loads. What fails, on any rank, is passed over for the next older one, with the reason.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import NamedTuple

from dcptool.checkpoint.steps import in_step_order
from dcptool.errors import CheckpointNotFoundError, ItemError, LayoutError, StorageError, TrainingError
from dcptool.formats.detect import open_checkpoint
from dcptool.ops.latest import find_latest
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, Verdict
from dcptool.runs.directory import find_runs, runs_at
from dcptool.storage import is_url, join, locate
from dcptool.training.loading import PerRank, load, load_model
from dcptool.training.objects import ObjectLoader
from dcptool.training.ranks import Ranks
from dcptool.training.saving import NO_GRACE, step_name
from dcptool.training.state import JobState, TrainState
from dcptool.words import listed

logger = logging.getLogger("dcptool.training")
_MAX_STEPS = 40
_WAIT = (
    "It may be whole, and newer than the others: try again when it can be read, or move it out of the run directory."
)


class Restored(NamedTuple):
    """What was restored.

    Attributes:
        step: its number.
        path: of the checkpoint.
        world_size: ranks that saved it, None if that is not known.
        per_rank: what became of state that differs between ranks.
        skipped: newer steps that were passed over: (path, why).
        ignored: differences that were let pass, because `strict` was not asked for.
    """

    step: int
    path: str
    world_size: int | None
    per_rank: tuple[PerRank, ...]
    skipped: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...] = ()


class _Looked(NamedTuple):
    """The newest complete step, ("", "", 0) if there is none; what was passed over; whether any was ever complete."""

    name: str
    path: str
    step: int
    others: tuple[tuple[str, str], ...]
    existed: bool


class Job(NamedTuple):
    """Who restores, and how.

    Attributes:
        ranks: of the job.
        objects: decodes objects.
        strict: whether a missing, unexpected or renamed entry, or another dtype, is one too many.
    """

    ranks: Ranks
    objects: ObjectLoader
    strict: bool = True


def restore_chosen(root: str, chosen: int | str, state: JobState, job: Job) -> Restored:
    """Load one checkpoint that was named, and no other.

    Args:
        root: the run directory.
        chosen: number of a step of it, or the path or URL of any checkpoint.
        state: to load into.
        job: who restores, and how.

    Raises:
        TrainingError: it is not complete, does not fit, or cannot be loaded.
    """
    what = f"step {chosen}" if isinstance(chosen, int) else chosen
    path, step = job.ranks.on_first(f"{what} was not restored", partial(_named, root, chosen))
    return _restore(step, path, state, job)


def is_step_of(root: str, path: str) -> bool:
    """Tell whether a checkpoint is a step of a run directory, however both are written."""
    if is_url(root) or is_url(path):
        return path.rstrip("/").rpartition("/")[0] == root.rstrip("/")
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(root)


def _named(root: str, chosen: int | str) -> tuple[str, int]:
    """Return the path and the number of a checkpoint that was named, if it is complete.

    Raises:
        ItemError: it is not; says why.
        CheckpointNotFoundError, StorageError: it is not there, or cannot be looked at.
    """
    verdict = judge(_step_path(root, chosen) if isinstance(chosen, int) else chosen, NO_GRACE)
    if verdict.state is not State.COMPLETE:
        raise ItemError(f"it is {verdict.state.value}: {verdict.reason}")
    return verdict.path, verdict.step or 0


def _step_path(root: str, step: int) -> str:
    """Return the path of a run's step by its number.

    Raises:
        CheckpointNotFoundError: there is none; names those there are.
    """
    runs = [run for run in find_runs(locate(root)) if run.path.rstrip("/") == root.rstrip("/")]
    names = {name: run.number(name) for run in runs for name in run.steps}
    found = [name for name, number in names.items() if number == step]
    if not found:
        there = listed([str(number) for number in names.values()][::-1], _MAX_STEPS)
        raise CheckpointNotFoundError(f"{root} has no step {step}; it has {there or 'none'}")
    return join(root, step_name(step) if step_name(step) in found else found[-1])


def restore_newest(root: str, state: JobState, job: Job) -> Restored | None:
    """Load the newest checkpoint of a run that is complete, fits and loads.

    Returns:
        What was loaded; None if there never was a complete checkpoint.

    Raises:
        TrainingError: there are checkpoints, and none could be restored; the message says why of each. Or the newest
            could not be read: it may be whole, so none older is taken.
    """
    skipped: list[tuple[str, str]] = []
    before: str | None = None
    existed = tried = False
    ranks = job.ranks
    while True:
        found = ranks.on_first(f"looking for checkpoints in {root}", partial(_look, root, before))
        existed |= found.existed
        for path, reason in found.others:
            _warn(ranks, f"{path} was passed over: {reason}")
        skipped += found.others
        if not found.path:
            break
        try:
            return _restore(found.step, found.path, state, job)._replace(skipped=tuple(skipped))
        except TrainingError as error:
            if error.stopped:
                raise
            if error.unreadable:
                raise error.saying(f"{found.path} could not be read: {error}", next_step=_WAIT) from error
            tried |= not error.untouched
            before = found.name
            skipped.append((found.path, str(error)))
            _warn(ranks, f"{found.path} was not restored: {error}")
    if not existed:
        return None
    lines = "\n".join(f"  {path}: {reason}" for path, reason in skipped)
    touched = "\nWhat the model holds now may be a part of one of them." if tried else ""
    raise TrainingError(f"{root} has checkpoints, but none could be restored:\n{lines}{touched}")


def load_model_only(path: str, state: TrainState, job: Job) -> str:
    """Load the model's weights alone from a checkpoint, or from the newest complete one of a run directory.

    Returns:
        The path of the checkpoint.

    Raises:
        TrainingError: there is none, it does not fit, or it cannot be loaded.
    """
    ranks = job.ranks
    chosen = ranks.on_first(f"looking for a checkpoint at {path}", lambda: _resolve(path))
    checkpoint = ranks.agree(chosen, lambda: open_checkpoint(chosen))
    load_model(checkpoint, state, job.objects, ranks)
    return chosen


def _warn(ranks: Ranks, message: str) -> None:
    if ranks.rank == 0:
        logger.warning("%s", message)


def _look(root: str, before: str | None) -> _Looked:
    """Look for the newest complete step of a run, before another one if that is named.

    A folder whose save never finished (no metadata, no marker) is no sign that there ever was a checkpoint.

    Raises:
        DcptoolError: the run directory cannot be listed, or the steps are not in it.
    """
    try:
        latest = find_latest(root, NO_GRACE, before=before)
    except CheckpointNotFoundError:
        return _Looked("", "", 0, (), False)
    except StorageError as error:
        raise error.saying(error.message, next_step=_WAIT) from error
    if latest.run.rstrip("/") != root.rstrip("/") or "run directories" in latest.problem:
        raise LayoutError(f"{root} holds the run directory {latest.run}: name the one that holds the steps itself")
    if latest.problem:
        steps = in_step_order(entry.name for entry in locate(root).storage.entries() if entry.is_dir)
        if steps:  # `run/4/step_4`: all of it could be one checkpoint
            raise LayoutError(f"{root} is named like the step in it, {steps[-1]}; name the run directory otherwise")
    others = tuple((verdict.path, f"{verdict.state.value}: {verdict.reason}") for verdict in latest.skipped)
    verdict = latest.verdict
    existed = verdict is not None or any(map(_has_existed, latest.skipped))
    if verdict is None:
        return _Looked("", "", 0, others, existed)
    return _Looked(verdict.name, verdict.path, verdict.step or 0, others, existed)


def _has_existed(verdict: Verdict) -> bool:
    """Tell whether a folder shows that there was a finished save in it."""
    if verdict.state is State.OTHER or any(finding.kind == "unfinished-save" for finding in verdict.findings):
        return False
    unfinished = all(finding.traits.unfinished for finding in verdict.findings)
    return bool(verdict.parts) or verdict.marker is not None or not unfinished


def _resolve(path: str) -> str:
    if not runs_at(locate(path)):
        return path
    latest = find_latest(path, NO_GRACE)
    if latest.path is None:
        raise CheckpointNotFoundError(latest.problem or f"{latest.run} has no complete checkpoint")
    return latest.path


def _restore(step: int, path: str, state: JobState, job: Job) -> Restored:
    """Load one checkpoint on all ranks, or raise TrainingError on all."""
    checkpoint = job.ranks.agree("opening it", lambda: open_checkpoint(path))
    found = load(checkpoint, state, job.objects, job.ranks, job.strict)
    return Restored(step, path, checkpoint.world_size, found.per_rank, (), found.ignored)
