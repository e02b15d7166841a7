"""Which checkpoint a path is, and which parts a folder of checkpoints has. Looks at names and first bytes only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.steps import step_number
from dcptool.errors import (
    CheckpointNotFoundError,
    MetadataError,
    SeveralCheckpointsError,
    StorageError,
    UnsupportedError,
)
from dcptool.formats.dcp.copy_folders import is_copy
from dcptool.formats.dcp.metadata import check_pickle_start
from dcptool.formats.dcp.reader import megatron_backend
from dcptool.formats.others import looks_like
from dcptool.formats.table import FORMATS, KnownFormat, format_of
from dcptool.formats.torch_save.format import SUFFIXES
from dcptool.storage import DirEntry, Location, Storage, is_url, join, locate
from dcptool.storage.stream import stream
from dcptool.words import listed

MAX_LISTED = 20
HEAD_NBYTES = 512
MAX_PART_DEPTH = 3
MAX_POINTER_NBYTES = 4096
MAX_FOLDERS = 2_000
"""Folders of one level that are looked into."""


class Part(NamedTuple):
    """A checkpoint somewhere under a folder.

    Attributes:
        name: its path below the folder; "" is the folder itself.
        kind: what it is, for a person.
        known: its format; None where it cannot be listed.
    """

    name: str
    kind: str
    known: KnownFormat | None


def open_checkpoint(
    path: str | os.PathLike[str],
    also: Sequence[str | os.PathLike[str]] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open the one checkpoint at a path without torch and without executing a pickle; only its metadata is read.

    Args:
        path: local path or fsspec URL of a DCP directory, a `.pt` file, a safetensors file, index or folder, or of a
            parent folder that holds exactly one checkpoint.
        also: further folders whose files are taken as lying in the first, as node-local halves of one save.
        storage_options: what the fsspec file system of a URL takes, such as `anon` or `endpoint_url`.

    Returns:
        The checkpoint: a mapping from fqn to entries, with `read`, `read_torch` and `value`.

    Raises:
        CheckpointNotFoundError: nothing there, or several checkpoints: the message lists them.
        MetadataError: the metadata cannot be read.
        UnsupportedError: a format dcptool does not read; the message says what does.
        StorageError: the file system said no.

    Example:
        >>> ckpt = dcptool.open("ckpt/step_500")
        >>> ckpt.read("model.embed.weight", offsets=(10, 0), sizes=(2, 4))
    """
    return open_at(locate(path, also, storage_options))


def open_at(location: Location) -> Checkpoint:
    """Open the one checkpoint at a location; errors as of `open_checkpoint`."""
    if location.file is not None:
        return open_part(location, "")
    parts = find_parts(location)
    if len(parts) == 1 or any(part.name == "" for part in parts):
        return open_part(location, parts[0].name)
    if not parts:
        raise not_a_checkpoint(location)
    pointed = _pointed_at(location, parts)
    if pointed:
        return open_part(location, pointed)
    root = location.storage.root
    lines = "\n".join(f"{join(root, part.name)}  ({part.kind})" for part in parts[:MAX_LISTED])
    message = f"{root} holds {len(parts)} checkpoints; name one:\n{lines}"
    raise SeveralCheckpointsError(message, root, tuple(join(root, part.name) for part in parts))


def _pointed_at(location: Location, parts: Sequence[Part]) -> str:
    """Return the part that the format's own pointer names, "" if there is none that names one of the parts."""
    names = {part.name for part in parts}
    for pointer in dict.fromkeys(part.known.format.pointer for part in parts if part.known):
        seen = location.storage.entry(pointer) if pointer else None
        if seen is not None and seen.nbytes <= MAX_POINTER_NBYTES:
            said = location.storage.read(pointer, 0, seen.nbytes).decode(errors="replace").strip()
            if said in names:
                return said
    return ""


def found_below(path: str | os.PathLike[str], checkpoint: Checkpoint) -> tuple[str, ...]:
    """Say which checkpoint was opened where a folder above it was named; nothing if it was named itself."""
    given = os.fspath(path)
    if not is_url(given):
        given = given.removeprefix("file://")
        is_above = os.path.isdir(given) and not os.path.samefile(given, checkpoint.root)
    else:
        is_above = checkpoint.root.startswith(f"{given.rstrip('/')}/")
    which = "checkpoint to open" if checkpoint.format.pointer else "one checkpoint"
    return (f"the {which} in {given.rstrip('/')} is {checkpoint.root}",) if is_above else ()


def open_part(location: Location, name: str) -> Checkpoint:
    """Open a checkpoint that `find_parts` found, or the file that the location is; `name` is its path below it."""
    if location.file is not None:
        return _open_file(location.storage, location.file)
    storage = location.storage.below(name) if name else location.storage
    seen = storage.entries()
    files = _sizes(seen)
    known = format_of(files)
    if known is None:
        raise not_a_checkpoint(Location(storage, None))
    return replace(known.open(storage, files, ""), seen=tuple(seen))


def part_files(location: Location, name: str) -> dict[str, int]:
    """Return name → size in bytes of the files of a part."""
    return _sizes(location.storage.entries(name), f"{name}/" if name else "")


def _sizes(entries: Iterable[DirEntry], prefix: str = "") -> dict[str, int]:
    """Return name → size in bytes of the files in a listing, without what they all begin with."""
    return {entry.name.removeprefix(prefix): entry.nbytes for entry in entries if not entry.is_dir}


def part_path(location: Location, part: Part) -> str:
    """Return the path that opens a part; for one beside other things the file that names it."""
    name = part.name
    if not name and part.known:
        name = part.known.place(part_files(location, ""))
    return join(location.storage.root, name)


def find_parts(location: Location, below_whole: bool = False) -> list[Part]:
    """Find the checkpoints at a folder, the folder itself first, and in its subfolders at most MAX_PART_DEPTH deep.

    Hidden and temporary subfolders are not looked at. A subfolder that cannot be listed is a part too, so that opening
    it says why.

    Args:
        location: the folder.
        below_whole: whether to look below a checkpoint that fills the folder too, but for steps; else it is the only
            part.
    """
    storage = location.storage
    parts: list[Part] = []
    level = [""]
    for depth in range(MAX_PART_DEPTH + 1):
        deeper: list[str] = []
        for folder in level[:MAX_FOLDERS]:
            try:
                entries = storage.entries(folder)
            except CheckpointNotFoundError:  # gone since it was listed
                if not folder:
                    raise
                continue
            except StorageError:
                if not folder:
                    raise
                parts.append(Part(folder, "cannot be listed", None))
                continue
            prefix = f"{folder}/" if folder else ""
            files = {entry.name.removeprefix(prefix): entry.nbytes for entry in entries if not entry.is_dir}
            known = format_of(files)
            if known and not (parts and is_copy(folder) and not any(map(known.format.is_metadata, files))):
                parts.append(Part(folder, known.kind_of(files) or "", known))
            is_filled = depth == 0 and known is not None and known.format.owns_folder
            if is_filled and not below_whole:
                return parts
            if not known or depth == 0:
                names = [entry.name for entry in entries if entry.is_dir and not _is_passed_over(entry)]
                deeper += [name for name in names if not is_filled or step_number(name) is None]
        level = deeper
    return parts


def not_a_checkpoint(location: Location) -> CheckpointNotFoundError:
    """Return the error that a folder holds no checkpoint: what it looks like instead, and what to do."""
    files = part_files(location, "")
    names = sorted(entry.name for entry in location.storage.entries())
    root = location.storage.root
    single = [name for name in sorted(files) if name.endswith(SUFFIXES)]
    found, what, tool = looks_like(names, megatron_backend(location.storage, files) == "zarr")
    if found:
        also = f"; dcptool shows one file at a time: {join(root, single[0])}" if single else "."
        message = f"{root} is no DCP checkpoint: {found} looks like {what}."
        return CheckpointNotFoundError(message, next_step=f"{tool} reads it{also}")
    if single:
        named = listed(single, 5, counted=False)
        message = f"{root} is no DCP checkpoint, but holds torch.save files ({named}); "
        return CheckpointNotFoundError(f"{message}name one: {join(root, single[0])}")
    if not names:
        return CheckpointNotFoundError(f"{root} is empty: no checkpoint in it")
    return CheckpointNotFoundError(
        f"{root} holds no checkpoint, nor do its folders {MAX_PART_DEPTH} levels down "
        "(no .metadata, no __R_N.distcp, no safetensors)"
    )


def _is_passed_over(entry: DirEntry) -> bool:
    """Tell whether a folder is hidden, somebody's work in progress, or a link that only points at a step."""
    name = entry.name.rpartition("/")[2]
    hidden = name.startswith((".", "tmp_", "__pycache__")) or ".tmp" in name
    return hidden or (entry.is_link and (name.startswith("latest") or step_number(name) is not None))


def _open_file(storage: Storage, name: str) -> Checkpoint:
    path = join(storage.root, name)
    seen = storage.entry(name)
    if seen is None:
        raise StorageError(f"{path} is not a regular file")
    nbytes = seen.nbytes
    start = storage.read(name, 0, min(nbytes, HEAD_NBYTES))
    known = next((known for known in FORMATS if known.is_file(name, start)), None)
    if known:
        beside = storage.entries() if known.kind_of({name: nbytes}) else []
        opened = known.open(storage, {**_sizes(beside), name: nbytes}, name)
        return replace(opened, seen=tuple({entry.name: entry for entry in (*beside, seen)}.values()))
    from dcptool.pickles.files import refuse_code

    error = _no_checkpoint(path, name, start)
    refuse_code(stream(storage, name, nbytes), error)
    raise error


def _no_checkpoint(path: str, name: str, start: bytes) -> MetadataError | UnsupportedError:
    """Return what a file is, going by its first bytes, that is none of a known format."""
    if start[257:262] == b"ustar" or name.endswith(".nemo"):
        return UnsupportedError(f"{path} is a tar archive, as NeMo's .nemo files are; unpack it and name the folder")
    try:
        check_pickle_start(start)
    except MetadataError as error:
        return MetadataError(f"{path} is no checkpoint: {error}")
    return UnsupportedError(f"{path} is a bare pickle, not a checkpoint; pickletools shows what is in it")
