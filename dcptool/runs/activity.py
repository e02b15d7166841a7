"""Is somebody writing to a checkpoint just now? What its folder, and a second listing of it, tell."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from dcptool.checkpoint.findings import Finding
from dcptool.errors import DcptoolError, StorageError
from dcptool.formats.marker import NEGATIVE_SUFFIX, negative_marker
from dcptool.storage import DirEntry, Location, is_temporary, is_url, join, locate, walk
from dcptool.words import span

BUSY_SECONDS = 60.0
"""Younger temporary files may be those of a command that is still at work."""
CLOCKS_APART_SECONDS = 60.0
"""Clocks of two machines may differ by so much; what is later was written in the future, and that is said."""
_NOT_YET = {
    "no-metadata": "no metadata yet",
    "unfinished-save": "not marked yet",
    "rank-metadata-missing": "metadata of some ranks not yet there",
    "missing-side-file": "files beside the checkpoint not yet there",
    "cut-side-file": "files beside the checkpoint not yet whole",
    "bad-manifest": "a manifest not yet whole",
}
"""What a save in its middle lacks, by the kind of finding that tells it, the earliest first."""


def list_files(location: Location) -> dict[str, DirEntry]:
    """Return what is in a folder and below it, by name; of a file itself only.

    Raises:
        CheckpointNotFoundError, StorageError: it cannot be listed.
    """
    if location.file is not None:
        found = [entry for entry in location.storage.entries() if entry.name == location.file]
        return {entry.name: entry for entry in found}
    return {entry.name: entry for entry in walk(location.storage)}


def last_written(location: Location, listing: Mapping[str, DirEntry]) -> float | None:
    """Return when the newest file, or an empty folder itself, was written, in seconds since the epoch."""
    if not listing:
        return location.storage.written()
    return max((entry.mtime for entry in listing.values() if entry.mtime is not None), default=None)


def left_behind(location: Location, folders: Iterable[str]) -> list[str]:
    """Return temporary files of dcptool in folders of a local checkpoint: a command was killed as it wrote them."""
    if location.file is not None or is_url(location.path):
        return []
    now = time.time()
    found = [entry for folder in folders for entry in location.storage.entries(folder) if is_temporary(entry.name)]
    return [entry.name for entry in found if entry.mtime is not None and now - entry.mtime > BUSY_SECONDS]


def remove_left_behind(location: Location) -> None:
    """Remove what commands that were killed left in a checkpoint that is about to be written to."""
    for name in left_behind(location, [""]):
        with suppress(StorageError):
            location.storage.delete(name)


def folders_of(parts: Iterable[str]) -> list[str]:
    """Return the folder itself ("") and all that lead to its parts, each once."""
    found = {"": None}
    for part in parts:
        names = part.split("/") if part else []
        found.update({"/".join(names[:depth]): None for depth in range(1, len(names) + 1)})
    return list(found)


def sign_of_writing(
    location: Location,
    before: Mapping[str, DirEntry],
    parts: Collection[str],
    problems: Iterable[Finding],
    age_limit: float | None,
) -> Finding | None:
    """Return what tells that somebody is writing there now, None if nothing does.

    Args:
        location: the checkpoint.
        before: its files when the look at it began.
        parts: places of the checkpoints in it.
        problems: what was found.
        age_limit: seconds in which a file makes an unfinished save one that is going on; None or 0 if none does.
    """
    negative = negative_sign(location, before, parts)
    if negative:
        return Finding.of("being-written", f"{negative} says that it is being written", negative)
    after = list_files(location)
    if after != before:
        changed = sorted({*before.items()} ^ {*after.items()})[0][0]
        return Finding.of("being-written", f"{changed} changed while it was looked at", changed)
    written = last_written(location, after)
    unfinished = {problem.kind for problem in problems if problem.traits.unfinished}
    if not age_limit or written is None or not unfinished:
        return None
    age = time.time() - written
    if age >= age_limit:
        return None
    what = "a file was written" if after else "the folder was made"
    lacking = next((what for kind, what in _NOT_YET.items() if kind in unfinished), "no metadata yet")
    when = f"{max(age, 0):,.0f} s ago"
    if age < -CLOCKS_APART_SECONDS:
        when = f"{span(-age)} in the future, by the clock here"
    return Finding.of("being-written", f"{lacking}, and {what} {when}: perhaps still being saved")


def negative_sign(location: Location, files: Collection[str], parts: Iterable[str]) -> str | None:
    """Return the file that says that a checkpoint, or a part of it, is being written; None if there is none."""
    if location.file is not None:
        return None
    path = location.path if is_url(location.path) else os.path.abspath(location.path)
    for folder in folders_of(parts):
        prefix = f"{folder}/" if folder else ""
        name = negative_marker([file.removeprefix(prefix) for file in files if file.startswith(prefix)])
        if name:
            return f"{prefix}{name}"
        unfinished = join(path, folder) + NEGATIVE_SUFFIX
        if exists(unfinished):
            return unfinished
    return None


def exists(path: str) -> bool:
    """Tell whether there is anything at a path; what cannot be looked at counts as not there."""
    try:
        locate(path)
    except DcptoolError:
        return False
    return True
