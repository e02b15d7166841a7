"""Which steps of a run to keep, and the deletion of the others. The plan is a pure function of what was found."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcptool.errors import CheckpointNotFoundError, DcptoolError, UnsupportedError
from dcptool.formats.dcp.reader import METADATA
from dcptool.formats.safetensors import INDEX_SUFFIX
from dcptool.marker import FOREIGN, NAME
from dcptool.newest import read_pointers
from dcptool.storage import Storage, join, locate, walk
from dcptool.verdict import DEFAULT_RULES, Rules, State, Verdict, judge
from dcptool.verification import run_at, verify


class Decision(NamedTuple):
    """What is to become of one step, and why.

    Attributes:
        name: of the step's folder.
        keep: whether it stays.
        reason: in a few words.
        state: it was found in.
        nbytes: of its files.
    """

    name: str
    keep: bool
    reason: str
    state: State
    nbytes: int


class PrunePlan(NamedTuple):
    """A decision for every step of a run directory, lowest step first."""

    run: str
    decisions: tuple[Decision, ...]

    @property
    def removed(self) -> tuple[Decision, ...]:
        """The steps that are to be deleted."""
        return tuple(decision for decision in self.decisions if not decision.keep)


class Deleted(NamedTuple):
    """What was deleted, with its bytes; what was not after all, with the reason."""

    names: tuple[str, ...]
    nbytes: int
    refused: tuple[tuple[str, str], ...]


def plan_prune(
    run: str,
    verdicts: Sequence[Verdict],
    keep: int,
    *,
    archive_every: int | None = None,
    include_incomplete: bool = False,
    older_than: float = 0.0,
    now: float = 0.0,
    pointers: Mapping[str, str] | None = None,
) -> PrunePlan:
    """Decide which steps of a run to delete. Reads nothing.

    Only complete steps count toward `keep`. Never deleted are the newest complete step, what a pointer names, what is
    being written, and what is no DCP checkpoint.

    Args:
        run: path of the run directory.
        verdicts: on all its steps.
        keep: how many of the newest complete steps to keep, at least 1.
        archive_every: keep every complete step whose number is a multiple of this too.
        include_incomplete: delete incomplete, damaged and unmarked steps too.
        older_than: but only those last written so many seconds before `now`.
        now: seconds since the epoch.
        pointers: names of pointer files and links → the step they name.

    Raises:
        ValueError: `keep` or `archive_every` is below 1.
    """
    if keep < 1 or (archive_every is not None and archive_every < 1):
        raise ValueError("keep and archive_every must be at least 1")
    ordered = sorted(verdicts, key=lambda verdict: (verdict.step or 0, verdict.name))
    complete = [verdict.name for verdict in ordered if verdict.state is State.COMPLETE]
    newest = dict(zip(reversed(complete), range(1, keep + 1), strict=False))
    named = {target: name for name, target in (pointers or {}).items()}

    def decide(verdict: Verdict) -> tuple[bool, str]:
        name, state = verdict.name, verdict.state
        if name in newest:
            return True, "newest complete step" if newest[name] == 1 else f"one of the newest {keep} complete steps"
        if name in named:
            return True, f"the pointer {named[name]} names it"
        if state is State.COMPLETE:
            if archive_every and (verdict.step or 0) % archive_every == 0:
                return True, f"milestone: a multiple of {archive_every}"
            return False, f"older than the newest {keep}"
        if state in (State.IN_PROGRESS, State.OTHER):
            return True, "it is being written" if state is State.IN_PROGRESS else "no DCP checkpoint: left alone"
        if not include_incomplete:
            return True, f"{state.value}: left alone without --include-incomplete"
        if not complete:
            return True, f"{state.value}, but there is no complete step to fall back on"
        if verdict.written is None or now - verdict.written < older_than:
            return True, f"{state.value}, but written too lately"
        return False, f"{state.value}: {verdict.reason}"

    decisions = (Decision(verdict.name, *decide(verdict), verdict.state, verdict.nbytes) for verdict in ordered)
    return PrunePlan(run, tuple(decisions))


def make_plan(
    run_dir: str | os.PathLike[str],
    keep: int,
    rules: Rules = DEFAULT_RULES,
    *,
    archive_every: int | None = None,
    include_incomplete: bool = False,
    older_than: float = 0.0,
    now: float,
) -> PrunePlan:
    """Look at a run directory and decide; arguments and errors as `plan_prune` and `find_latest`."""
    location = locate(run_dir)
    run = run_at(location)
    if run is None:
        raise UnsupportedError(f"{location.path} is no run directory: it holds no steps to keep or delete")
    report = verify(run_dir, rules)
    return plan_prune(
        run.path,
        report.verdicts,
        keep,
        archive_every=archive_every,
        include_incomplete=include_incomplete,
        older_than=older_than,
        now=now,
        pointers=read_pointers(locate(run.path).storage),
    )


def delete_steps(plan: PrunePlan, rules: Rules = DEFAULT_RULES) -> Deleted:
    """Delete the steps that a plan removes, lowest first, looking again at each just before.

    A step's marker and metadata go first, so that one half deleted never looks complete. A step is left alone if it
    changed since the plan was made, if a pointer names it now, or if no newer kept step is complete any more.

    Raises:
        StorageError: something cannot be deleted; what is deleted by then stays so.
    """
    storage = locate(plan.run).storage
    kept = [decision.name for decision in plan.decisions if decision.keep and decision.state is State.COMPLETE]
    names: list[str] = []
    refused: list[tuple[str, str]] = []
    nbytes = 0
    for decision in plan.removed:
        try:
            reason = _reason_to_stop(plan, storage, decision, kept, rules)
            if reason:
                refused.append((decision.name, reason))
                continue
            _delete(storage, decision.name, rules.marker)
        except CheckpointNotFoundError:  # somebody else deleted it
            continue
        names.append(decision.name)
        nbytes += decision.nbytes
    return Deleted(tuple(names), nbytes, tuple(refused))


def _reason_to_stop(plan: PrunePlan, storage: Storage, decision: Decision, kept: Sequence[str], rules: Rules) -> str:
    """Return why a step must not be deleted after all, "" if it may."""
    if "/" in decision.name or decision.name in ("", ".", "..") or decision.name in storage.links():
        return "it is no folder of this run directory"
    pointer = next((name for name, target in read_pointers(storage).items() if target == decision.name), None)
    if pointer:
        return f"the pointer {pointer} names it now"
    verdict = judge(join(plan.run, decision.name), rules)
    changed = verdict.state is State.IN_PROGRESS or verdict.nbytes != decision.nbytes
    if changed or (verdict.state is not decision.state and decision.state is not State.UNMARKED):
        return "it has changed since the plan was made"
    if not any(_is_complete(join(plan.run, name), rules) for name in reversed(kept)):
        return "no step that is kept is complete any more"
    return ""


def _is_complete(path: str, rules: Rules) -> bool:
    try:
        return judge(path, rules).state is State.COMPLETE
    except DcptoolError:
        return False


def _delete(storage: Storage, name: str, marker: str) -> None:
    """Delete a step's folder, what makes it look complete first: the markers, then the metadata."""
    step = storage.below(name)
    files = [entry.name for entry in walk(step)]
    markers = [file for file in files if file.rpartition("/")[2] in (marker, NAME, *FOREIGN)]
    metadata = [file for file in files if file.endswith((METADATA, INDEX_SUFFIX))]
    for file in [*markers, *metadata]:
        step.delete(file)
    storage.delete_folder(name)
