"""The file that says a checkpoint is whole: written last, removed first.

dcptool's own is `_COMPLETE`, a JSON document with the names and sizes of all files and the SHA-256 of the metadata, so
that it can be told when it speaks of another save than the one beside it. Other software leaves files whose being there
is all they say. Not a dotfile, since `cp ckpt/* …` loses those.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from dcptool.checkpoint.findings import Finding, cannot_be_read
from dcptool.errors import DcptoolError, StorageError
from dcptool.formats.digests import sha256
from dcptool.storage import Storage, is_inside
from dcptool.words import plural

NAME = "_COMPLETE"
SCHEMA = 1
WRITERS = ("save", "mark", "convert", "reshard")
FOREIGN = ("_SUCCESS", "SUCCESS", ".complete", "COMPLETE", "_complete", "commit_success.txt", "STABLE", "DONE", ".done")
SAVING = "_SAVING"
"""What `CheckpointManager` writes first into a step, and removes once `_COMPLETE` is there."""
NEGATIVE = (".incomplete", "INCOMPLETE", "_INCOMPLETE", ".in_progress", "IN_PROGRESS")
NEGATIVE_SUFFIX = "-unfinished"
"""A sibling named like the checkpoint with this added says that it is being written."""
MAX_MARKER_NBYTES = 256 << 20
_MAX_INT = (1 << 63) - 1
"""JSON has numbers of any length; no float holds one of 400 digits, and Python shows none of more than 4,300."""


class Marker(NamedTuple):
    """What a marker says.

    Attributes:
        name: of its file.
        writer: "save", "mark", "convert" or "reshard"; None for another software's, which says nothing more.
        step: number of the step, None if unknown.
        created: when it was written, ISO 8601 in UTC.
        world_size: ranks that saved the checkpoint.
        save_seconds, blocked_seconds: how long the save took, and how long training waited for it.
        save_id: torch's identifier of the save.
        metadata_sha256: SHA-256 of each metadata file, by name.
        files: bytes of every file, by name relative to the marker's folder.
        sha256: SHA-256 of files, empty without checksums.
        number: of the save in its run: each is higher than all before it; None where no save tells.
        resumed_from: the step that the job which saved it had gone on from; None if it began anew, or none is known.
    """

    name: str
    writer: str | None = None
    step: int | None = None
    created: str | None = None
    world_size: int | None = None
    save_seconds: float | None = None
    blocked_seconds: float | None = None
    save_id: str | None = None
    metadata_sha256: Mapping[str, str] = {}
    files: Mapping[str, int] = {}
    sha256: Mapping[str, str] = {}
    number: int | None = None
    resumed_from: int | None = None

    def document(self) -> bytes:
        """Return the bytes of the marker's file."""
        fields = {name: value for name, value in self._asdict().items() if name != "name" and value not in (None, {})}
        return json.dumps({"schema": SCHEMA, **fields}, indent=1).encode() + b"\n"


def read_marker(storage: Storage, files: Mapping[str, int], name: str = NAME) -> tuple[Marker | None, list[Finding]]:
    """Find and read the marker in a folder.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it.
        name: of the marker; any other software's is understood too.

    Returns:
        The marker, None if there is none that can be read, and what is wrong with it. Of a file that is empty or holds
        other text than JSON, that it is there is all it says.
    """
    found = next((candidate for candidate in (name, *FOREIGN) if candidate in files), None)
    if found is None:
        return None, []
    try:
        fields = _fields(storage, found, files[found])
        if fields is None or (found != name and not is_ours(fields)):
            return Marker(found), []
        return _marker(found, fields), []
    except (ValueError, StorageError) as error:
        message = f"the marker {found} cannot be read ({error}); it counts for nothing"
        step = "Check the checkpoint, then write it anew: dcptool mark"
        return None, [Finding.of("bad-marker", message, found, next_step=step)]


def marker_in(storage: Storage, name: str = NAME) -> Marker | None:
    """Return the marker in a folder; None if there is none, or it, or the folder, cannot be read."""
    try:
        files = {entry.name: entry.nbytes for entry in storage.entries() if not entry.is_dir}
    except DcptoolError:
        return None
    return read_marker(storage, files, name)[0]


def marked_as(storage: Storage, name: str = NAME) -> Marker | None:
    """Return dcptool's own marker in a folder, which is not listed; None if there is none, or it cannot be read."""
    try:
        nbytes = storage.size(name)
    except DcptoolError:
        return None
    return None if nbytes is None else read_marker(storage, {name: nbytes}, name)[0]


def is_marker(storage: Storage, name: str, nbytes: int) -> bool:
    """Tell whether a file is a marker, which `mark` may replace: blank, or JSON of ours.

    Raises:
        StorageError: it cannot be read.
    """
    if nbytes > MAX_MARKER_NBYTES:
        return False
    data = storage.read(name, 0, nbytes).strip()
    if not data or (name == NAME and data.startswith(b"{")):
        return True
    try:
        return is_ours(json.loads(data))
    except (ValueError, RecursionError):
        return False


def is_ours(fields: object) -> bool:
    """Tell whether a JSON value is a marker of dcptool, of whatever version."""
    return isinstance(fields, dict) and "schema" in fields and "writer" in fields


def is_of_save(marker: Marker | None) -> bool:
    """Tell whether a marker shows that saves of its run write markers; one made by hand or a conversion does not."""
    return marker is not None and marker.writer in ("save", None)


def negative_marker(files: Collection[str]) -> str | None:
    """Return the name of a file that says the checkpoint is being written, None if there is none.

    `SAVING` is not among them: what a save that was killed leaves must not be taken for one that goes on for ever.
    """
    return next((name for name in NEGATIVE if name in files), None)


def is_unfinished(files: Collection[str]) -> bool:
    """Tell whether a save of `CheckpointManager` began in a folder, and has not finished."""
    return SAVING in files and NAME not in files


def _fields(storage: Storage, name: str, nbytes: int) -> dict[str, Any] | None:
    """Return the JSON object in a marker's file, None if it holds none.

    Raises:
        ValueError: it begins like one and is none, or is too large.
        StorageError: it cannot be read.
    """
    if nbytes > MAX_MARKER_NBYTES:
        raise ValueError(f"it has {nbytes:,} bytes, more than any marker needs")
    data = storage.read(name, 0, nbytes).strip()
    if not data.startswith(b"{"):
        return None
    try:
        fields: dict[str, Any] = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return fields


def _marker(name: str, fields: Mapping[str, Any]) -> Marker:
    marker = Marker(name, **{field: value for field, value in fields.items() if field in Marker._fields[1:]})
    if fields.get("schema") != SCHEMA or not _is_sound(marker):
        raise ValueError("its fields are not those of this version")
    outside = next((file for file in (*marker.files, *marker.sha256) if not is_inside(file)), None)
    if outside is not None:
        raise ValueError(f"it lists {outside!r}, outside its folder")
    return marker


def _is_sound(marker: Marker) -> bool:
    tables: list[Any] = [marker.metadata_sha256, marker.files, marker.sha256]
    return (
        marker.writer in WRITERS
        and all(isinstance(table, dict) for table in tables)
        and all(_is_int(nbytes) and nbytes >= 0 for nbytes in marker.files.values())
        and all(isinstance(digest, str) for table in (tables[0], tables[2]) for digest in table.values())
        and all(value is None or _is_int(value) for value in (marker.step, marker.world_size, marker.resumed_from))
        and (marker.number is None or (_is_int(marker.number) and marker.number > 0))
        and all(value is None or isinstance(value, str) for value in (marker.created, marker.save_id))
        and all(value is None or _is_seconds(value) for value in (marker.save_seconds, marker.blocked_seconds))
    )


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) <= _MAX_INT


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MAX_INT  # type: ignore[operator]


def marker_problems(marker: Marker, storage: Storage, files: Mapping[str, int]) -> list[Finding]:
    """Return where a marker and what is beside it disagree. Reads the metadata files, of the others the sizes.

    Args:
        marker: as read.
        storage: its folder.
        files: name → size in bytes of all files in the folder and below.
    """
    for name, digest in marker.metadata_sha256.items():
        try:
            same = name not in files or sha256(storage, name, files[name]) == digest
        except StorageError as error:
            return [cannot_be_read(error, name)]
        if not same:
            message = f"the marker {marker.name} is of another save than {name}, which has changed since"
            step = f"If the checkpoint is right, write the marker anew: dcptool mark {storage.root}"
            return [Finding.of("stale-marker", message, name, next_step=step)]
    problems = []
    for name, nbytes in marker.files.items():
        if name not in files:
            message = f"{name} ({plural(nbytes, 'byte')}) is missing: the marker {marker.name} lists it"
            problems.append(Finding.of("missing-file", message, name))
        elif files[name] != nbytes:
            message = f"{name} has {plural(files[name], 'byte')}, {nbytes:,} when it was marked"
            kind = "short-file" if files[name] < nbytes else "changed-file"
            problems.append(Finding.of(kind, message, name))
    return problems
