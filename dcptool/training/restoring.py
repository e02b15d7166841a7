"""The way back: which checkpoints of a run there are, whether one fits the job, and loading it, on all ranks together.

Compares before it loads. What fails, on any rank, is passed over for the next older one, with the reason.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.steps import in_step_order
from dcptool.errors import CheckpointNotFoundError, ItemError, LayoutError, StorageError, TrainingError
from dcptool.formats.detect import open_checkpoint
from dcptool.ops.diff import live
from dcptool.ops.diff.diff import compare
from dcptool.ops.diff.results import DiffReport
from dcptool.ops.latest import find_latest
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, Verdict
from dcptool.runs.directory import find_runs, runs_at
from dcptool.storage import is_url, join, locate
from dcptool.training.optimizers import loading
from dcptool.training.ranks import Ranks, sendable
from dcptool.training.reader import Reader
from dcptool.training.saving import NO_GRACE, step_name
from dcptool.training.state import MODEL, OPTIM, UNSTARTED, TrainState, rank_key
from dcptool.words import listed, of_numbers

logger = logging.getLogger("dcptool.training")
MAX_LISTED = 40
"""Differences of one kind that are told one by one."""
_WAIT = (
    "It may be whole, and newer than the others: try again when it can be read, or move it out of the run directory."
)
_OF_RANK = re.compile(r"(.+)\.rank(\d+)$")


class PerRank(NamedTuple):
    """What became of one kind of per-rank state.

    Attributes:
        name: as given to `TrainState`, or as found.
        saved: ranks that have one in the checkpoint.
        restored: ranks that got theirs back.
        missing: ranks of today that found none, and keep what they have.
        unused: ranks of the checkpoint whose state nobody took.
    """

    name: str
    saved: tuple[int, ...]
    restored: tuple[int, ...]
    missing: tuple[int, ...]
    unused: tuple[int, ...]


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


def restore_chosen(root: str, chosen: int | str, state: TrainState, ranks: Ranks, strict: bool) -> Restored:
    """Load one checkpoint that was named, and no other.

    Args:
        root: the run directory.
        chosen: number of a step of it, or the path or URL of any checkpoint.
        state, ranks, strict: as in `restore_newest`.

    Raises:
        TrainingError: it is not complete, does not fit, or cannot be loaded.
    """
    what = f"step {chosen}" if isinstance(chosen, int) else chosen
    path, step = ranks.on_first(f"{what} was not restored", partial(_named, root, chosen))
    return _restore(step, path, state, ranks, strict)


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
        there = listed([str(number) for number in names.values()][::-1], MAX_LISTED)
        raise CheckpointNotFoundError(f"{root} has no step {step}; it has {there or 'none'}")
    return join(root, step_name(step) if step_name(step) in found else found[-1])


def restore_newest(root: str, state: TrainState, ranks: Ranks, strict: bool) -> Restored | None:
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
    while True:
        found = ranks.on_first(f"looking for checkpoints in {root}", partial(_look, root, before))
        existed |= found.existed
        for path, reason in found.others:
            _warn(ranks, f"{path} was passed over: {reason}")
        skipped += found.others
        if not found.path:
            break
        try:
            return _restore(found.step, found.path, state, ranks, strict)._replace(skipped=tuple(skipped))
        except TrainingError as error:
            if error.unreadable:
                raise error.saying(f"{found.path} could not be read: {error}", next_step=_WAIT) from error
            tried = True
            before = found.name
            skipped.append((found.path, str(error)))
            _warn(ranks, f"{found.path} was not restored: {error}")
    if not existed:
        return None
    lines = "\n".join(f"  {path}: {reason}" for path, reason in skipped)
    touched = "\nWhat the model holds now may be a part of one of them." if tried else ""
    raise TrainingError(f"{root} has checkpoints, but none could be restored:\n{lines}{touched}")


def load_model_only(path: str, state: TrainState, ranks: Ranks) -> str:
    """Load the model's weights alone from a checkpoint, or from the newest complete one of a run directory.

    Returns:
        The path of the checkpoint.

    Raises:
        TrainingError: there is none, it does not fit, or it cannot be loaded.
    """
    chosen = ranks.on_first(f"looking for a checkpoint at {path}", lambda: _resolve(path))
    tree = {MODEL: ranks.agree("the model's state", state.model_tree)}
    checkpoint = ranks.agree(chosen, lambda: open_checkpoint(chosen))
    keep = {fqn for fqn in checkpoint if fqn.startswith(f"{MODEL}.")}
    ranks.agree(chosen, lambda: _require_fit(tree, checkpoint, set(checkpoint) - keep, True))
    _load(tree, checkpoint, ranks, True)
    ranks.agree(chosen, lambda: state.load_model(tree[MODEL]))
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


def _restore(step: int, path: str, state: TrainState, ranks: Ranks, strict: bool) -> Restored:
    """Load one checkpoint on all ranks, or raise TrainingError on all."""
    checkpoint = ranks.agree("opening it", lambda: open_checkpoint(path))
    tree = ranks.agree("the state of this job", lambda: state.tree(apart=True))
    mine = {fqn for fqn in checkpoint if fqn not in checkpoint.tensors and _OF_RANK.match(fqn)}
    for name in state.per_rank:
        if f"{name}.{rank_key(ranks.rank)}" not in mine:
            del tree[name]
    blank = tree[UNSTARTED]
    if UNSTARTED not in checkpoint:
        del tree[UNSTARTED]
    shared = {name: value for name, value in tree.items() if name not in state.per_rank}
    ignored = ranks.agree("comparing it with this job", lambda: _require_fit(shared, checkpoint, mine, strict))
    _load(tree, checkpoint, ranks, strict)
    stored = {fqn.rpartition(".")[0] for fqn in checkpoint.tensors}
    not_stored = [fqn for fqn in blank if f"{OPTIM}.state.{fqn}" not in stored]
    tree[UNSTARTED] = [*(tree.get(UNSTARTED) or ()), *not_stored]
    with loading(state.optimizers):
        ranks.agree("taking its state over", lambda: state.load_state_dict(tree, strict=strict))
    per_rank = _per_rank(mine, tuple(state.per_rank), ranks.world_size)
    for found in per_rank:
        if found.missing or found.unused:
            _warn(ranks, f"{path}: {per_rank_words(found)}")
    return Restored(step, path, checkpoint.world_size, per_rank, (), tuple(ignored))


def _load(tree: dict[str, Any], checkpoint: Checkpoint, ranks: Ranks, strict: bool) -> None:
    planner = sendable(
        DefaultLoadPlanner, "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes"
    )(**({} if strict else {"allow_partial_load": True}))
    reader = sendable(Reader, "read_metadata", "set_up_storage_reader", "read_data")(checkpoint)
    ranks.agree("loading it", lambda: dcp.load(tree, storage_reader=reader, planner=planner, process_group=ranks.group))


def _require_fit(tree: dict[str, Any], checkpoint: Checkpoint, others: Iterable[str], strict: bool) -> list[str]:
    """Compare the state of a job with a checkpoint, and return the differences that are let pass.

    Args:
        tree: the state.
        checkpoint: an open checkpoint.
        others: entries of it that are not meant to be loaded.
        strict: whether a missing, unexpected or renamed entry, or another dtype, is one too many.

    Raises:
        LayoutError: they differ; the message lists all differences.
    """
    report = compare(tree, checkpoint)
    left_out = set(others)
    missing = [entry.fqn for entry in report.only_in_a]
    unexpected = [entry.fqn for entry in report.only_in_b if entry.fqn not in left_out]
    differences = report.differences
    nothing: list[str] = []
    if not strict:
        if report.alignment:  # what is paired under a rule is loaded under its own name only, which is not there
            names = dict.fromkeys(known.fqn for known in live.known_entries(tree))
            missing = [name for name in names if name not in checkpoint]
            unexpected = [name for name in checkpoint if name not in names and name not in left_out]
            differences = tuple(found for found in differences if found.fqn_a == found.fqn_b)
        absent = {name for name in missing if name.startswith(f"{MODEL}.")}
        if absent and len(absent) == sum(known.fqn.startswith(f"{MODEL}.") for known in live.known_entries(tree)):
            nothing = ["no entry of the model is in the checkpoint under its name: nothing of it would be loaded"]
    minor = [
        *_renamed(report),
        *_some("missing from the checkpoint: {}", missing),
        *_some("only in the checkpoint: {}", unexpected),
        *_some("{}", [_words(found) for found in differences if found.kind == "dtype"]),
    ]
    major = [
        *nothing,
        *_some("{}", [_words(found) for found in differences if found.kind != "dtype"]),
        *_some("{}", [finding.message for finding in report.unreadable]),
    ]
    if major or (strict and minor):
        raise LayoutError("; ".join([*major, *minor]))
    return minor


def _words(difference: Any) -> str:
    return f"{difference.fqn_a!r}: {difference.kind} {difference.a} here, {difference.b} stored"


def _some(form: str, names: Sequence[str]) -> list[str]:
    return [form.format(listed(names, MAX_LISTED))] if names else []


def _renamed(report: DiffReport) -> list[str]:
    """Return what is wrong with entries whose names are the same only under a rule; torch would not find them."""
    rule = report.alignment
    if rule is None:
        return []
    taken = [f"{prefix!r} {where}" for prefix, where in ((rule.prefix_a, "here"), (rule.prefix_b, "there")) if prefix]
    wrappers = [f"the wrapper {name}" for name in rule.wrappers]
    return [f"{rule.n_aligned:,} names differ by {' and '.join([*taken, *wrappers])}"]


def _per_rank(names: Iterable[str], wanted: Sequence[str], size: int) -> tuple[PerRank, ...]:
    saved: dict[str, set[int]] = {name: set() for name in wanted}
    for fqn in names:
        match = _OF_RANK.match(fqn)
        if match:
            saved.setdefault(match[1], set()).add(int(match[2]))
    found = []
    for name, ranks in saved.items():
        today = set(range(size)) if name in wanted else set()
        parts = (ranks, ranks & today, today - ranks, ranks - today)
        found.append(PerRank(name, *(tuple(sorted(part)) for part in parts)))
    return tuple(found)


def per_rank_words(found: PerRank) -> str:
    """Say in one line what became of one kind of per-rank state."""
    of = partial(of_numbers, "rank")
    said = [f"the {found.name} state of {of(found.restored)} was restored" if found.restored else ""]
    said.append(f"{of(found.missing)} found no {found.name} state and keep what they have" if found.missing else "")
    said.append(f"the {found.name} state of {of(found.unused)} was not used" if found.unused else "")
    return "; ".join(filter(None, said))
