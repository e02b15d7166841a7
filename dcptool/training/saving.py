"""What a save does to a run directory: make room for a step, mark it, delete older ones. Done by one rank.

Between the first two `writing` writes it, on all ranks. Knows no collectives.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from typing import NamedTuple

from dcptool.checkpoint.findings import state_of
from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError, DcptoolError, ItemError, OutputExistsError, StorageError
from dcptool.formats.dcp.format import METADATA, data_file_rank, rank_metadata
from dcptool.formats.marker import FOREIGN, NAME, SAVING, Marker, is_of_save, is_unfinished, marker_in
from dcptool.ops.mark import make_marker
from dcptool.ops.prune.delete import Deleted, delete_steps
from dcptool.ops.prune.plan import Decision
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, Verdict, VerifyOptions
from dcptool.runs.order import next_number
from dcptool.storage import LocalStorage, Storage, is_temporary, is_url, join, locate, storage_at
from dcptool.storage.base import translated
from dcptool.words import listed, plural

logger = logging.getLogger("dcptool.training")
NO_GRACE = VerifyOptions(grace=0.0)
"""What has no metadata is no save that goes on: this job is the one that saves here."""
_STEP = re.compile(r"step_\d+")
_PATIENCE = (0.1, 0.4, 1.5)
"""Seconds to wait for what other machines wrote to show in a mounted folder."""


class Times(NamedTuple):
    """How long a save took from its beginning, and how long training waited for it, in seconds."""

    save_seconds: float
    blocked_seconds: float


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step}"


def clear_unfinished(root: str) -> None:
    """Remove what saves that failed or were killed left in a run directory; only who holds its lease may.

    Such a step has the `_SAVING` with which every save begins, and no `_COMPLETE`. `_SAVING` goes last, so that what is
    left of this is found again if it is killed too. Files that no save writes stay.

    Raises:
        StorageError: something cannot be listed or removed.
    """
    storage = storage_of(root)
    try:
        names = [entry.name for entry in storage.entries() if entry.is_dir and not entry.is_link]
    except CheckpointNotFoundError:
        return
    for name in filter(_STEP.fullmatch, names):
        folder = storage.below(name)
        files = _files_of(folder)
        if is_unfinished(files):
            logger.info("removing %s: its save did not finish", join(root, name))
            for file in [file for file in _saved(files) if file != SAVING]:
                folder.delete(file)
            _forget(folder, files)


def _forget(folder: Storage, files: Collection[str]) -> None:
    """Remove `_SAVING`, and the folder if nothing else is in it."""
    folder.delete(SAVING)
    if isinstance(folder, LocalStorage):
        for file in filter(is_temporary, files):
            folder.delete(file)
        with suppress(OSError):
            os.rmdir(folder.root)


def _files_of(folder: Storage) -> list[str]:
    try:
        return [entry.name for entry in folder.entries() if not entry.is_dir]
    except CheckpointNotFoundError:
        return []


def _saved(files: Iterable[str]) -> list[str]:
    """Return those files that a save writes, in the order in which they go: markers, metadata, data."""
    there = set(files)
    metadata = [METADATA, f"{METADATA}.tmp", *rank_metadata(there)]
    data = [file for file in there if data_file_rank(file) is not None]
    return [file for chosen in ((NAME, *FOREIGN), metadata, data) for file in sorted(there & set(chosen))]


def make_room(root: str, step: int, owner: str) -> None:
    """Prepare the folder of a step for a save: `_SAVING` says from now on that one began.

    What a save left there is removed before anything is written: markers first, then the metadata, then data files,
    those of a wider save too. So nothing that is half old and half new ever looks whole. Other files stay. If the step
    is the only complete one of the run, it is set aside instead, under another name of the same step, until the
    new one is marked (not in an object store, which cannot rename).

    Args:
        root: the run directory.
        step: number of the step.
        owner: id of the lease under which it is saved, for `_SAVING`.

    Raises:
        OutputExistsError: there is a file of that name.
        StorageError: something cannot be removed.
    """
    storage = storage_of(root)
    name = step_name(step)
    folder = storage.below(name)
    files = _files_of(folder)
    if not is_url(root) and os.path.lexists(folder.root) and not os.path.isdir(folder.root):
        raise OutputExistsError(f"{join(root, name)} is no folder: remove it, or save elsewhere")
    if files and isinstance(storage, LocalStorage) and _is_only_one(root, name):
        aside = next(other for other in _asides(step) if not os.path.lexists(join(root, other)))
        logger.warning("%s is the only complete checkpoint: it is kept as %s until it is saved anew", name, aside)
        os.rename(join(root, name), join(root, aside))
        files = []
    _announce(folder, owner)
    for file in _saved(files):
        folder.delete(file)


def _announce(folder: Storage, owner: str) -> None:
    """Write `_SAVING`; what is in it is for people."""
    said = json.dumps({"lease": owner, "began": datetime.now(timezone.utc).isoformat(timespec="seconds")}).encode()
    if not isinstance(folder, LocalStorage):
        folder.write(SAVING, said)
        return
    path = os.path.join(folder.root, SAVING)
    with translated(path, StorageError, writes=True):  # not synced: it may be lost with the power, and only it
        os.makedirs(folder.root, exist_ok=True)
        with open(path, "wb") as file:
            file.write(said)


def _asides(step: int) -> list[str]:
    """Return other names of a step, all sorted before its own."""
    return [f"step-{step}", f"step{step}", *(f"step-{step:0{width}}" for width in range(len(str(step)) + 1, 19))]


def _is_only_one(root: str, name: str) -> bool:
    """Tell whether a step is complete and no other of the run is."""
    try:
        if judge(join(root, name), NO_GRACE).state is not State.COMPLETE:
            return False
        plan = make_plan(root, 1, NO_GRACE, now=time.time())
    except DcptoolError:
        return False
    return not any(d.state is State.COMPLETE and d.name != name for d in plan.decisions)


def storage_of(root: str) -> Storage:
    """Return the storage of a run directory, there or not."""
    return storage_at(root) if is_url(root) else LocalStorage(root)


def mark_saved(
    path: str,
    step: int,
    world_size: int,
    times: Times,
    resumed_from: int | None = None,
    still_ours: Callable[[], None] = lambda: None,
) -> Marker:
    """Look at what was saved and write its marker, with a number higher than those of all saves before in its run.

    Args:
        path: of the checkpoint.
        step: its number.
        world_size: ranks that saved it.
        times: how long that took.
        resumed_from: the step that this job went on from, None if it began anew.
        still_ours: called just before the marker is written; raises if that must not be.

    Raises:
        ItemError: it is not whole, for example because ranks wrote to disks that are not shared.
        StorageError: the marker cannot be written.
    """
    for seconds in (*_PATIENCE, None):
        verdict = judge(path, NO_GRACE)
        if _is_whole(verdict) or seconds is None:
            break
        time.sleep(seconds)
    if not _is_whole(verdict):
        raise ItemError(f"{path} is {verdict.state.value} after it was saved: {verdict.reason}")
    location = locate(path)
    marker = make_marker(location, verdict, NAME, checksums=False)._replace(
        writer="save",
        step=step,
        number=next_number(path),
        resumed_from=resumed_from,
        world_size=world_size,
        save_seconds=round(times.save_seconds, 3),
        blocked_seconds=round(times.blocked_seconds, 3),
    )
    still_ours()
    location.storage.write(NAME, marker.document())
    with suppress(StorageError):  # beside a marker it says nothing any more
        location.storage.delete(SAVING)
    return marker


def _is_whole(verdict: Verdict) -> bool:
    """Tell whether nothing is wrong with what was saved but that it is not marked yet."""
    if not verdict.parts or any(finding.kind == "being-written" and finding.file for finding in verdict.findings):
        return False  # another file changed while it was looked at
    others = [finding for finding in verdict.findings if finding.kind != "unfinished-save"]
    return state_of(others) in (State.COMPLETE.value, State.UNMARKED.value)


class Keeping(NamedTuple):
    """Which steps of its run a job keeps.

    Attributes:
        keep: how many of the newest complete ones; None for all.
        archive_every: those whose number is a multiple of this, too.
        adopt: whether steps that no manager saved are deleted like others.
        told: such steps of which it was said.
    """

    keep: int | None
    archive_every: int | None
    adopt: bool
    told: set[str]


def tidy(root: str, step: int, keeping: Keeping) -> Deleted:
    """Delete the steps that are not to be kept, and what was set aside for the step that is marked now.

    Never the step itself, nor, unless they are adopted, whole ones that no manager saved. What cannot be deleted, or
    not even be looked at, is logged: that is no reason to stop training.
    """
    try:
        plan = make_plan(root, keeping.keep or 1, NO_GRACE, archive_every=keeping.archive_every, now=time.time())
        asides = _asides(step)
        storage = storage_of(root)
        decisions, foreign = [], []
        for decision in plan.decisions:
            if decision.name in asides:
                decision = decision._replace(keep=False, reason=f"saved anew as {step_name(step)}")
            elif keeping.keep is None or decision.name == step_name(step):
                decision = decision._replace(keep=True)
            elif not decision.keep and is_foreign(storage, decision):
                foreign.append(decision.name)
                decision = decision._replace(keep=not keeping.adopt)
            decisions.append(decision)
        if foreign and not keeping.told:
            _tell_foreign(root, foreign, keeping.adopt)
        keeping.told.update(foreign)
        # The newest is what this job has written, synced and looked at a moment ago.
        deleted = delete_steps(plan._replace(decisions=tuple(decisions)), NO_GRACE, proof=Level.METADATA)
    except DcptoolError as error:
        logger.warning("no old checkpoint was deleted: %s", error)
        return Deleted((), 0, ())
    for name, reason in deleted.refused:
        logger.warning("%s was not deleted: %s", name, reason)
    if deleted.names:
        logger.info("deleted %s", ", ".join(deleted.names))
    return deleted


def is_foreign(storage: Storage, decision: Decision) -> bool:
    """Tell whether a step is whole, and was not saved by a manager nor marked as if it were."""
    if decision.state not in (State.COMPLETE, State.UNMARKED):
        return False
    return not is_of_save(marker_in(storage.below(decision.name), NAME))


def _tell_foreign(root: str, names: list[str], adopt: bool) -> None:
    """Say what becomes of steps that no manager saved."""
    which = f"{plural(len(names), 'step')} of {root} that no manager saved ({listed(names, 3)})"
    if adopt:
        logger.warning("%s are deleted like others, for adopt=True", which)
    else:
        logger.warning("%s stay though newer ones are kept; adopt=True deletes such steps like others", which)
