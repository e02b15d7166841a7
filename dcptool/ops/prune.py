"""Which steps of a run to keep, and the deletion of the others. The plan is a pure function of what was found."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.errors import CheckpointNotFoundError, DcptoolError, StorageError, UnsupportedError
from dcptool.formats.table import vouching
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import DEFAULTS, State, Verdict, VerifyOptions
from dcptool.ops.verify.verify import verify
from dcptool.runs.activity import last_written, list_files, negative_sign
from dcptool.runs.directory import Run, listed, runs_at
from dcptool.runs.pointers import read_pointers
from dcptool.storage import DirEntry, Storage, join, locate, walk


class Decision(NamedTuple):
    """What is to become of one step, and why.

    Attributes:
        name: of the step's folder.
        keep: whether it stays.
        reason: in a few words.
        state: it was found in.
        nbytes: of its files.
        n_files: how many they are.
        written: when the newest of them was written, seconds since the epoch; None if unknown.
    """

    name: str
    keep: bool
    reason: str
    state: State
    nbytes: int
    n_files: int = 0
    written: float | None = None


class PrunePlan(NamedTuple):
    """A decision for every step of a run directory, the one saved first first; `notes`: what is odd about the run."""

    run: str
    decisions: tuple[Decision, ...]
    notes: tuple[Finding, ...] = ()

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
    links: Mapping[str, Collection[str]] | None = None,
    later: Sequence[str] = (),
) -> PrunePlan:
    """Decide which steps of a run to delete. Reads nothing.

    Only complete steps count toward `keep`. Never deleted are the newest complete step, the newest of them that a job
    can resume from, whole ones newer than it, what
    a pointer names, what a kept step has links into, what is being written, what could not be read, and what is no DCP
    checkpoint.

    Args:
        run: path of the run directory.
        verdicts: on all its steps, the one saved first first.
        keep: how many of the newest complete steps to keep, at least 1.
        archive_every: keep every complete step whose number is a multiple of this too.
        include_incomplete: delete incomplete, damaged and unmarked steps too.
        older_than: but only those last written so many seconds before `now`.
        now: seconds since the epoch.
        pointers: names of pointer files and links → the step they name.
        links: names of steps → the other steps that links in them lead into.
        later: steps that were written after the newest complete one, by what times say, the last one first.

    Raises:
        ValueError: `keep` or `archive_every` is below 1.
    """
    if keep < 1 or (archive_every is not None and archive_every < 1):
        raise ValueError("keep and archive_every must be at least 1")
    names = [verdict.name for verdict in verdicts]
    complete = [verdict.name for verdict in verdicts if verdict.state is State.COMPLETE]
    newest = dict(zip(reversed(complete), range(1, keep + 1), strict=False))
    newest_by_time = [name for name in later if name in complete][:keep]
    resumable = [v.name for v in verdicts if v.state is State.COMPLETE and v.resumable is not False]
    named = {target: name for name, target in (pointers or {}).items()}

    def decide(verdict: Verdict) -> tuple[bool, str]:
        name, state = verdict.name, verdict.state
        if name in newest:
            return True, "newest complete step" if newest[name] == 1 else f"one of the newest {keep} complete steps"
        if name in resumable[-1:]:
            return True, "newest complete step to resume from"
        if name in newest_by_time:
            return True, f"written after {complete[-1]}, perhaps by a job that went back to it"
        if name in named:
            return True, f"the pointer {named[name]} names it"
        if state is State.COMPLETE:
            if archive_every and (verdict.step or 0) % archive_every == 0:
                return True, f"milestone: a multiple of {archive_every}"
            return False, f"older than the newest {keep}"
        if state is State.IN_PROGRESS:
            return True, "it is being written"
        if state is State.UNREADABLE:
            return True, "could not be read: left alone"
        if state is State.OTHER:
            return True, "could not be read: left alone" if verdict.parts else "no DCP checkpoint: left alone"
        if not include_incomplete:
            return True, f"{state.value}: left alone without --include-incomplete"
        if not complete:
            return True, f"{state.value}, but there is no complete step to fall back on"
        if any(finding.traits.may_be_whole for finding in verdict.findings):
            return True, "could not be read: left alone"
        if state is State.UNMARKED and names.index(name) > names.index(complete[-1]):
            return True, "whole and newer than the newest complete step: mark it, or delete it yourself"
        if verdict.written is None or now - verdict.written < older_than:
            return True, f"{state.value}, but written too lately"
        return False, f"{state.value}: {verdict.reason}"

    decisions = [
        Decision(verdict.name, *decide(verdict), verdict.state, verdict.nbytes, verdict.n_files, verdict.written)
        for verdict in verdicts
    ]
    return PrunePlan(run, tuple(_keep_linked(decisions, links or {})))


def _keep_linked(decisions: Sequence[Decision], links: Mapping[str, Collection[str]]) -> list[Decision]:
    """Keep what kept steps have links into, and what links in these lead into, and so on."""
    users: dict[str, str] = {}
    waiting = [decision.name for decision in decisions if decision.keep]
    while waiting:
        name = waiting.pop()
        new = set(links.get(name, ())) - users.keys()
        users.update(dict.fromkeys(new, name))
        waiting += new
    return [
        decision if decision.keep or decision.name not in users
        else decision._replace(keep=True, reason=f"links in {users[decision.name]} lead into it")
        for decision in decisions
    ]  # fmt: skip


def make_plan(
    run_dir: str | os.PathLike[str],
    keep: int,
    options: VerifyOptions = DEFAULTS,
    *,
    archive_every: int | None = None,
    include_incomplete: bool = False,
    older_than: float = 0.0,
    now: float,
) -> PrunePlan:
    """Look at a run directory and decide; arguments as `plan_prune`.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        UnsupportedError: it is no run directory, or holds several.
        StorageError: it, or a pointer in it, cannot be read.
    """
    location = locate(run_dir)
    runs = runs_at(location)
    if len(runs) != 1:
        raise UnsupportedError(listed(location.path, runs))
    run = runs[0]
    storage = locate(run.path).storage
    report = verify(run_dir, options)
    plan = plan_prune(
        run.path,
        report.verdicts,
        keep,
        archive_every=archive_every,
        include_incomplete=include_incomplete,
        older_than=older_than,
        now=now,
        pointers=_pointers(run),
        links={name: links_into(storage, name, run.steps) for name in run.steps},
        later=report.later,
    )
    return plan._replace(notes=report.notes)


def _pointers(run: Run) -> Mapping[str, str]:
    """Return what pointers name; one that cannot be read may name anything, so nothing is deleted then."""
    pointers = read_pointers(run)
    if pointers.problems:
        raise StorageError(pointers.problems[0].message, next_step="Nothing is deleted: it may name a step.")
    return pointers.named


def links_into(storage: Storage, step: str, steps: Collection[str]) -> set[str]:
    """Return the other steps of a run into which links in a step lead; none if it has vanished.

    Raises:
        StorageError: it cannot be listed.
    """
    root = storage.target("") + "/"
    found = set()
    waiting = [step]
    while waiting:
        folder = waiting.pop()
        try:
            entries = storage.entries(folder)
        except CheckpointNotFoundError:
            continue
        waiting += [entry.name for entry in entries if entry.is_dir and not entry.is_link]
        targets = (storage.target(entry.name) for entry in entries if entry.is_link)
        found |= {target.removeprefix(root).partition("/")[0] for target in targets if target.startswith(root)}
    return (found & set(steps)) - {step}


def delete_steps(plan: PrunePlan, options: VerifyOptions = DEFAULTS) -> Deleted:
    """Delete the steps that a plan removes, the one saved first first, looking again at each just before.

    A step's marker and metadata go first, so that one half deleted never looks complete. A step is left alone if it
    changed since the plan was made, if a pointer or a link in a kept step leads to it now, or if no kept step that is
    newer (for one that was not whole: none at all) is complete any more. What cannot be deleted is refused too, and
    the others go on.

    Raises:
        CheckpointNotFoundError, StorageError: the run directory cannot be listed.
    """
    storage = locate(plan.run).storage
    look = _Look(plan, storage, options)
    names: list[str] = []
    refused: list[tuple[str, str]] = []
    nbytes = 0
    for decision in plan.removed:
        try:
            reason = look.reason_to_stop(decision) or _delete(storage, decision.name, options.marker)
        except CheckpointNotFoundError:  # somebody else deleted it
            continue
        except StorageError as error:
            reason = str(error)
        if reason:
            refused.append((decision.name, reason))
            continue
        names.append(decision.name)
        nbytes += decision.nbytes
    return Deleted(tuple(names), nbytes, tuple(refused))


class _Look:
    """Another look at a run just before a deletion; what has not changed on disk is not judged again."""

    def __init__(self, plan: PrunePlan, storage: Storage, options: VerifyOptions) -> None:
        self._plan, self._storage, self._options = plan, storage, options
        self._names = tuple(decision.name for decision in plan.decisions)
        self._judged: dict[str, tuple[Mapping[str, DirEntry], bool]] = {}

    def reason_to_stop(self, decision: Decision) -> str:
        """Return why a step must not be deleted after all, "" if it may.

        Raises:
            CheckpointNotFoundError: it is gone.
            StorageError: something cannot be listed.
        """
        name, storage = decision.name, self._storage
        if "/" in name or name in ("", ".", "..") or name in storage.links():
            return "it is no folder of this run directory"
        pointers = read_pointers(Run(self._plan.run, "", self._names))
        pointer = next((pointer for pointer, target in pointers.named.items() if target == name), None)
        if pointer or pointers.problems:
            return f"the pointer {pointer} names it now" if pointer else pointers.problems[0].message
        if self._has_changed(decision):
            return "it has changed since the plan was made"
        kept = [other for other in self._plan.decisions if other.keep]
        user = next((other.name for other in kept if name in links_into(storage, other.name, self._names)), None)
        if user:
            return f"links in {user} lead into it"
        whole = decision.state in (State.COMPLETE, State.UNMARKED)
        others = [other.name for other in kept if other.state is State.COMPLETE]
        safe = [other for other in others if not whole or self._names.index(other) > self._names.index(name)]
        if not any(self._is_complete(other) for other in reversed(safe)):
            return f"no {'newer ' * whole}step that is kept is complete any more"
        return ""

    def _has_changed(self, decision: Decision) -> bool:
        location = locate(join(self._plan.run, decision.name))
        listing = list_files(location)
        now = (len(listing), sum(entry.nbytes for entry in listing.values()), last_written(location, listing))
        parts = {name.rpartition("/")[0] for name in listing}
        planned = (decision.n_files, decision.nbytes, decision.written)
        return now != planned or negative_sign(location, listing, parts) is not None

    def _is_complete(self, name: str) -> bool:
        path = join(self._plan.run, name)
        try:
            listing = list_files(locate(path))
            if name not in self._judged or self._judged[name][0] != listing:
                self._judged[name] = listing, judge(path, self._options).state is State.COMPLETE
        except DcptoolError:
            return False
        return self._judged[name][1]


def _delete(storage: Storage, name: str, marker: str) -> str:
    """Delete a step's folder, what makes it look complete first: the markers, then the metadata.

    Returns:
        Why that failed, "" if it did not.
    """
    step = storage.below(name)
    try:
        for file in vouching((entry.name for entry in walk(step)), marker):
            step.delete(file)
        storage.delete_folder(name)
    except StorageError as error:
        return f"{error}; a part of it may be gone"
    return ""
