"""Delete the steps that a plan removes, looking again at each just before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError, DcptoolError, StorageError
from dcptool.formats.table import vouching
from dcptool.ops.prune.archive import Archived, is_sound
from dcptool.ops.prune.plan import Decision, PrunePlan
from dcptool.ops.prune.prune import links_into, names_of
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import DEFAULTS, State, VerifyOptions
from dcptool.runs.activity import last_written, list_files, negative_sign
from dcptool.runs.directory import Run
from dcptool.storage import DirEntry, Progress, Storage, join, locate, walk
from dcptool.words import listed

_PATIENCE = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds to wait for what somebody else seems to be deleting to be gone."""
_NOT_THERE = "it has not been proven to be in the archive"


class Deleted(NamedTuple):
    """What was deleted, with its bytes; what was not after all, with the reason."""

    names: tuple[str, ...]
    nbytes: int
    refused: tuple[tuple[str, str], ...]


def delete_steps(
    plan: PrunePlan,
    options: VerifyOptions = DEFAULTS,
    *,
    proof: Level = Level.RECORDS,
    finite: bool = False,
    archived: Archived | None = None,
    progress: Progress | None = None,
) -> Deleted:
    """Delete the steps that a plan removes, the one saved first first, looking again at each just before.

    Nothing is deleted unless the newest complete step that is kept passes a check. A step's marker and metadata go
    first, so that one half deleted never looks complete. A step is left alone if it changed since the plan was made, if
    a pointer or a link in a kept step leads to it now, or if no kept step that is newer (for one that was not whole:
    none at all) is complete any more. One that belongs into the archive is left alone unless it has been proven to be
    there, and nothing here was written since. What cannot be deleted is refused too, and the others go on. What
    somebody else deletes meanwhile counts as gone.

    Args:
        plan: as `make_plan` returns it.
        options: as the plan was made with.
        proof: how closely the newest step that is kept is looked at first.
        finite: whether it must hold no NaN and no infinity, for which every byte of it is read.
        archived: what `archive_steps` has proven to be in the plan's archive.
        progress: told the number of bytes as they are read for that.

    Raises:
        CheckpointNotFoundError, StorageError: the run directory cannot be listed.
    """
    storage = locate(plan.run).storage
    closely = options._replace(level=proof, finite=finite)
    reason = _unproven(plan, closely, progress) if plan.removed else ""
    if reason:
        return Deleted((), 0, tuple((decision.name, reason) for decision in plan.removed))
    proven = archived.proven if archived and archived.path == plan.archive else {}
    unproven = {one.name: _NOT_THERE for one in plan.milestones if not one.keep and one.name not in proven}
    plan = plan.keeping(unproven)
    look = _Look(plan, storage, options, proven)
    names: list[str] = []
    refused: list[tuple[str, str]] = list(unproven.items())
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
    left = tuple((name, reason) for name, reason in refused if not _goes(storage, name))
    return Deleted(tuple(names), nbytes, left)


def _unproven(plan: PrunePlan, options: VerifyOptions, progress: Progress | None) -> str:
    """Return why the newest step that is kept is not good enough to delete others, "" if it is."""
    if not plan.newest:
        return "no complete step is kept" if any(one.state is State.COMPLETE for one in plan.removed) else ""
    try:
        verdict = judge(join(plan.run, plan.newest), options, progress)
    except DcptoolError as error:
        return f"{plan.newest}, the newest that is kept, cannot be looked at: {error.message}"
    if verdict.not_finite:
        return f"{plan.newest}, the newest that is kept, holds NaN or infinities: {listed(verdict.not_finite, 3)}"
    if is_sound(verdict):
        return ""
    return f"{plan.newest}, the newest that is kept, is {verdict.state.value}: {verdict.reason}"


def _goes(storage: Storage, name: str) -> bool:
    """Tell whether a step is gone, or goes within seconds, as where two prunes run at once."""
    for seconds in (*_PATIENCE, None):
        try:
            entries = walk(storage.below(name))
        except CheckpointNotFoundError:
            return True
        except StorageError:
            return False
        if seconds is None or vouching(entry.name for entry in entries):  # nobody deletes it: these go first
            return False
        time.sleep(seconds)
    return False


class _Look:
    """Another look at a run just before a deletion; what has not changed on disk is not judged again."""

    def __init__(
        self, plan: PrunePlan, storage: Storage, options: VerifyOptions, archived: Mapping[str, Mapping[str, DirEntry]]
    ) -> None:
        self._plan, self._storage, self._options, self._archived = plan, storage, options, archived
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
        named, _ = names_of(Run(self._plan.run, "", self._names))
        if name in named:
            return f"{named[name]} now"
        if self._has_changed(decision):
            return "it has changed since the plan was made"
        if decision in self._plan.milestones and not self._is_archived(name):
            return "it has changed since it was archived"
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

    def _is_archived(self, name: str) -> bool:
        return self._archived.get(name) == list_files(locate(join(self._plan.run, name)))

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
