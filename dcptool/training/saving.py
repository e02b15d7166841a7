"""What a save does to a run directory: make room for a step, write it with torch, mark it, delete older ones.

All but the writer is done by one rank. Knows no collectives.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError, DcptoolError, ItemError, OutputExistsError
from dcptool.formats.dcp.format import METADATA, data_file_rank, rank_metadata
from dcptool.formats.marker import FOREIGN, NAME, Marker
from dcptool.ops.mark import make_marker
from dcptool.ops.prune.delete import Deleted, delete_steps
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.runs.order import next_number
from dcptool.storage import LocalStorage, Storage, is_url, join, locate, storage_at
from dcptool.training.ranks import sendable

logger = logging.getLogger("dcptool.training")
NO_GRACE = VerifyOptions(grace=0.0)
"""What has no metadata is no save that goes on: this job is the one that saves here."""
_PATIENCE = (0.1, 0.4, 1.5)
"""Seconds to wait for what other machines wrote to show in a mounted folder."""


class Times(NamedTuple):
    """How long a save took from its beginning, and how long training waited for it, in seconds."""

    save_seconds: float
    blocked_seconds: float


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step}"


def make_room(root: str, step: int) -> None:
    """Prepare the folder of a step for a save.

    What a save left there is removed before anything is written: markers first, then the metadata, then data files,
    those of a wider save too. So nothing that is half old and half new ever looks whole. Other files stay. If the step
    is the only complete one of the run, it is set aside instead, under another name of the same step, until the
    new one is marked (not in an object store, which cannot rename).

    Raises:
        OutputExistsError: there is a file of that name.
        StorageError: something cannot be removed.
    """
    if not is_url(root):
        os.makedirs(root, exist_ok=True)
    storage = storage_of(root)
    name = step_name(step)
    try:
        entries = storage.entries(name)
    except CheckpointNotFoundError as error:
        if not is_url(root) and os.path.lexists(join(root, name)):
            raise OutputExistsError(f"{join(root, name)} is no folder: remove it, or save elsewhere") from error
        return
    if entries and isinstance(storage, LocalStorage) and _is_only_one(root, name):
        aside = next(other for other in _asides(step) if not os.path.lexists(join(root, other)))
        logger.warning("%s is the only complete checkpoint: it is kept as %s until it is saved anew", name, aside)
        os.rename(join(root, name), join(root, aside))
        return
    folder = storage.below(name)
    files = [entry.name.removeprefix(f"{name}/") for entry in entries if not entry.is_dir]
    metadata = [METADATA, f"{METADATA}.tmp", *rank_metadata(files)]
    for chosen in ((NAME, *FOREIGN), metadata, [file for file in files if data_file_rank(file) is not None]):
        for file in sorted(set(files) & set(chosen)):
            folder.delete(file)


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


def write(tree: dict[str, Any], path: str, group: Any) -> None:
    """Write a state with torch, on all ranks of a group.

    Args:
        tree: nested dicts, as torch.distributed.checkpoint takes them.
        path: local path or URL of the checkpoint.
        group: the process group; None without one.
    """
    writer: Any = FileSystemWriter
    if is_url(path):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter
    writer = sendable(
        writer, "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"
    )
    planner = sendable(DefaultSavePlanner, "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
    dcp.save(tree, storage_writer=writer(path), planner=planner(), process_group=group)


def mark_saved(path: str, step: int, world_size: int, times: Times, resumed_from: int | None = None) -> Marker:
    """Look at what was saved and write its marker, with a number higher than those of all saves before in its run.

    Args:
        path: of the checkpoint.
        step: its number.
        world_size: ranks that saved it.
        times: how long that took.
        resumed_from: the step that this job went on from, None if it began anew.

    Raises:
        ItemError: it is not whole, for example because ranks wrote to disks that are not shared.
        StorageError: the marker cannot be written.
    """
    for seconds in (*_PATIENCE, None):
        verdict = judge(path, NO_GRACE)
        if verdict.whole or seconds is None:
            break
        time.sleep(seconds)
    if not verdict.whole:
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
    location.storage.write(NAME, marker.document())
    return marker


def tidy(root: str, step: int, keep: int | None, archive_every: int | None) -> Deleted:
    """Delete the steps that are not to be kept, and what was set aside for the step that is marked now.

    What cannot be deleted, or not even be looked at, is logged: that is no reason to stop training.
    """
    try:
        plan = make_plan(root, keep or 1, NO_GRACE, archive_every=archive_every, now=time.time())
        asides = _asides(step)
        decisions = []
        for decision in plan.decisions:
            if decision.name in asides:
                decision = decision._replace(keep=False, reason=f"saved anew as {step_name(step)}")
            elif keep is None:
                decision = decision._replace(keep=True)
            decisions.append(decision)
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
