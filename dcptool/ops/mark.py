"""Write the marker of a checkpoint that somebody vouches for, after checking it."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import NamedTuple

from dcptool.checks.check import Level
from dcptool.errors import ItemError, OutputExistsError, StorageError, UnsupportedError
from dcptool.formats.digests import sha256
from dcptool.formats.marker import FOREIGN, NAME, NEGATIVE, NEGATIVE_SUFFIX, SAVING, Marker, is_marker
from dcptool.formats.table import is_metadata, is_own_name
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, Verdict, VerifyOptions
from dcptool.runs.activity import list_files, remove_left_behind
from dcptool.runs.directory import runs_at
from dcptool.runs.order import next_number
from dcptool.storage import Location, Progress, is_temporary, join, locate, walk


class Marked(NamedTuple):
    """What was marked: the marker's path, the marker itself, and the verdict it rests on."""

    path: str
    marker: Marker
    verdict: Verdict


def mark_complete(
    path: str | os.PathLike[str],
    *,
    checksums: bool = False,
    saved: bool = False,
    marker: str = NAME,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Marked:
    """Check a checkpoint at level RECORDS and write its marker, replacing an old one.

    Args:
        path: folder of the checkpoint, or of several parts that belong together.
        checksums: check at level DEEP instead, and keep the SHA-256 of every file: reads all bytes twice.
        saved: mark it as the job does that has just saved it: later steps of this run that have no marker are then
            unmarked, and it counts as saved after all others of the run.
        marker: name of the marker's file; a plain name that hides no file of a checkpoint.
        threads: how many read at the same time, None for the number of processors.
        progress: told the number of bytes as they are read.

    Raises:
        ValueError: `marker` cannot be a marker's name.
        ItemError: the checkpoint does not verify; nothing is written. The message names the worst finding.
        OutputExistsError: there is a file of the marker's name that is no marker.
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: the marker cannot be written, or somebody wrote to the checkpoint meanwhile.
        UnsupportedError: the path is a file, or a run directory: a marker stands in the folder of a checkpoint.
    """
    problem = name_problem(marker)
    if problem:
        raise ValueError(f"a marker cannot be named so: {problem}")
    location = locate(path)
    if location.file is not None:
        raise UnsupportedError(f"{location.path} is a file; a marker stands in the folder of a checkpoint")
    runs = runs_at(location)
    if runs:
        raise UnsupportedError(
            f"{location.path} is a run directory; mark a step: {join(runs[0].path, runs[0].steps[-1])}"
        )
    there = next((entry for entry in location.storage.entries() if entry.name == marker), None)
    if there and (there.is_dir or not is_marker(location.storage, marker, there.nbytes)):
        raise OutputExistsError(f"{join(location.path, marker)} is there and is no marker of dcptool: not replaced")
    before = list_files(location)
    options = VerifyOptions(Level.DEEP if checksums else Level.RECORDS, marker, threads=threads)
    verdict = judge(path, options, progress)
    if not verdict.whole:
        named = f" --marker {marker}" if marker != NAME else ""
        hint = f"dcptool verify {'--deep' if checksums else '--records'}{named} {verdict.path}"
        unknown = verdict.state in (State.OTHER, State.UNREADABLE)
        how = "cannot be checked" if unknown else f"is {verdict.state.value}"
        raise ItemError(f"{verdict.path} {how}, not marked: {verdict.reason}", next_step=f"See all: {hint}")
    made = make_marker(location, verdict, marker, checksums)
    if saved and made.writer != "save":
        made = made._replace(writer="save", number=next_number(verdict.path, marker))
    if list_files(location) != before:
        message = f"{verdict.path} changed while it was read, not marked"
        raise StorageError(message, next_step="Somebody saves there: mark it when that is done.")
    remove_left_behind(location)
    location.storage.write(marker, made.document())
    return Marked(join(location.path, marker), made, verdict)


def name_problem(name: str) -> str:
    """Say why a marker's file cannot have this name, "" if it can: it must hide no file of a checkpoint."""
    if not name.strip() or name in (".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        return f"{name!r} is no plain file name"
    if is_temporary(name) or name.endswith(NEGATIVE_SUFFIX) or is_own_name(name):
        return f"{name!r} is a name that files of checkpoints have"
    if name in (*NEGATIVE, SAVING):
        return f"{name!r} says that a checkpoint is being written"
    return ""


def make_marker(location: Location, verdict: Verdict, name: str, checksums: bool) -> Marker:
    """Describe the files of a folder as they are now; who saved them, and how long it took, an old marker knows."""
    storage = location.storage
    ours = {name, NAME, SAVING, *FOREIGN, *NEGATIVE}
    files = {entry.name: entry.nbytes for entry in walk(storage) if entry.name not in ours}
    valid = verdict.marker is not None and verdict.marker.name == name and verdict.state is State.COMPLETE
    old = verdict.marker if valid else None
    return Marker(
        name,
        (old and old.writer) or "mark",
        verdict.step,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        verdict.world_size,
        old.save_seconds if old else None,
        old.blocked_seconds if old else None,
        save_id=next((part.save_id for part in verdict.parts if part.save_id), None),
        metadata_sha256={file: sha256(storage, file, files[file]) for file in files if is_metadata(file)},
        files=files,
        sha256={file: sha256(storage, file, nbytes) for file, nbytes in files.items()} if checksums else {},
        number=old.number if old else None,
        resumed_from=old.resumed_from if old else None,
    )
