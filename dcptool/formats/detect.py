"""Which format a path is, and which parts a folder of checkpoints has. Looks at names and first bytes only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.steps import step_number
from dcptool.errors import (
    CheckpointNotFoundError,
    MetadataError,
    SeveralCheckpointsError,
    StorageError,
    UnsupportedError,
)
from dcptool.formats.dcp.metadata import check_pickle_start
from dcptool.formats.dcp.reader import METADATA, data_file_rank, is_dcp, megatron_backend, open_dcp, rank_metadata
from dcptool.formats.safetensors.reader import INDEX_SUFFIX, SUFFIX, open_safetensors
from dcptool.formats.torch_save.reader import LEGACY_MAGIC, open_torch_save
from dcptool.storage import DirEntry, Location, Storage, is_url, join, locate

MAX_LISTED = 20
MAX_PART_DEPTH = 3
MAX_FOLDERS = 2_000
"""Folders of one level that are looked into."""
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_OTHER_TOOLS = (
    (
        re.compile(r"metadata\.pkl"),
        "a checkpoint with metadata.pkl, a format after DCP's",
        "the software that wrote it",
    ),
    (re.compile(r"model_world_size_\d+_rank_\d+\.pt"), "verl's one-file-per-rank format", "verl's model_merger"),
    (
        re.compile(r"(zero_pp_rank|mp_rank)_.*_(model|optim)_states\.pt|zero_to_fp32\.py"),
        "a DeepSpeed checkpoint",
        "zero_to_fp32.py",
    ),
    (
        re.compile(r"model\.rank_?\d+\.pth?|.*rank_\d+.*\.pth?|.*[-_.](rank|shard)\d+\.pth?"),
        "one torch.save file per rank",
        "the trainer that wrote it",
    ),
    (
        re.compile(r"consolidated\.\d\d\.pth"),
        "Meta's Llama format, one file per model-parallel rank",
        "Meta's llama code",
    ),
    (re.compile(r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt"), "an Orbax checkpoint", "JAX's orbax-checkpoint"),
    (re.compile(r"\.snapshot_metadata"), "a torchsnapshot", "torchsnapshot's Snapshot.restore"),
    (re.compile(r"mp_rank_\d+.*"), "a legacy Megatron checkpoint", "Megatron-LM's checkpoint tools"),
    (
        re.compile(r".*\.bin\.index\.json"),
        "a transformers model in several torch.save files",
        "transformers' from_pretrained",
    ),
    (re.compile(r".*\.nemo"), "a NeMo archive, which is a tar file", "NeMo's restore_from"),
    (re.compile(r"recipe_state\.pt"), "a torchtune checkpoint", "torchtune's checkpointer"),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), "a TensorFlow checkpoint", "TensorFlow's tf.train.load_checkpoint"),
)
_MEGATRON_ZARR = (
    "metadata.json",
    "a Megatron checkpoint of the zarr back end",
    "A megatron-core that still has zarr, or NeMo's convert_zarr_to_torch_dist.py,",
)


class Part(NamedTuple):
    """A checkpoint somewhere under a folder: its path below the folder ("" = the folder itself)."""

    name: str
    kind: str

    @property
    def is_dcp(self) -> bool:
        """Whether it is a DCP directory, with or without its metadata."""
        return self.kind.startswith("DCP")


def open_checkpoint(path: str | os.PathLike[str], also: Sequence[str | os.PathLike[str]] = ()) -> Checkpoint:
    """Open the one checkpoint at a path without torch and without executing a pickle; only its metadata is read.

    Args:
        path: local path or fsspec URL of a DCP directory, a `.pt` file, a safetensors file, index or folder, or of a
            parent folder that holds exactly one checkpoint.
        also: further folders whose files are taken as lying in the first, as node-local halves of one save.

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
    location = locate(path, also)
    if location.file is not None:
        return open_part(location, "")
    parts = find_parts(location)
    if len(parts) == 1 or any(part.name == "" for part in parts):
        return open_part(location, parts[0].name)
    if not parts:
        raise CheckpointNotFoundError(not_a_checkpoint(location))
    root = location.storage.root
    listed = "\n".join(f"{join(root, part.name)}  ({part.kind})" for part in parts[:MAX_LISTED])
    message = f"{root} holds {len(parts)} checkpoints; name one:\n{listed}"
    raise SeveralCheckpointsError(message, root, tuple(join(root, part.name) for part in parts))


def found_below(path: str | os.PathLike[str], checkpoint: Checkpoint) -> tuple[str, ...]:
    """Say which checkpoint was opened where a folder above it was named; nothing if it was named itself."""
    given = os.fspath(path)
    if not is_url(given):
        given = given.removeprefix("file://")
        is_above = os.path.isdir(given) and not os.path.samefile(given, checkpoint.root)
    else:
        is_above = checkpoint.root.startswith(f"{given.rstrip('/')}/")
    return (f"the one checkpoint in {given.rstrip('/')} is {checkpoint.root}",) if is_above else ()


def open_part(location: Location, name: str) -> Checkpoint:
    """Open a checkpoint that `find_parts` found, or the file that the location is; `name` is its path below it."""
    if location.file is not None:
        return _open_file(location.storage, location.file)
    storage = location.storage.below(name) if name else location.storage
    files = part_files(Location(storage, None), "")
    if is_dcp(files):
        return open_dcp(storage, files)
    if any(file.endswith((SUFFIX, INDEX_SUFFIX)) for file in files):
        return open_safetensors(storage, files)
    raise CheckpointNotFoundError(not_a_checkpoint(Location(storage, None)))


def part_files(location: Location, name: str) -> dict[str, int]:
    """Return name → size in bytes of the files of a part."""
    prefix = f"{name}/" if name else ""
    entries = location.storage.entries(name)
    return {entry.name.removeprefix(prefix): entry.nbytes for entry in entries if not entry.is_dir}


def part_path(location: Location, part: Part) -> str:
    """Return the path that opens a part; for safetensors beside other things, its index or first file."""
    files = part_files(location, part.name) if not part.name and not part.is_dcp else {}
    name = min((file for file in files if file.endswith((INDEX_SUFFIX, SUFFIX))), key=len, default=part.name)
    index = next((file for file in files if file.endswith(INDEX_SUFFIX)), name)
    return join(location.storage.root, index)


def kind_of(files: Mapping[str, int]) -> str | None:
    """Say what kind of checkpoint a folder with these files is, None if it is none dcptool reads."""
    if METADATA in files:
        return "DCP"
    if rank_metadata(files):
        return "DCP, rank-local metadata"
    if is_dcp(files):
        return "DCP data files without metadata"
    if any(file.endswith((SUFFIX, INDEX_SUFFIX)) for file in files):
        return "safetensors"
    return None


def find_parts(location: Location, below_dcp: bool = False) -> list[Part]:
    """Find the checkpoints at a folder, the folder itself first, and in its subfolders at most MAX_PART_DEPTH deep.

    Hidden and temporary subfolders are not looked at. A subfolder that cannot be listed is a part too, so that opening
    it says why.

    Args:
        location: the folder.
        below_dcp: whether to look below a DCP directory too, but for steps; else it is the only part.
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
                parts.append(Part(folder, "cannot be listed"))
                continue
            prefix = f"{folder}/" if folder else ""
            files = {entry.name.removeprefix(prefix): entry.nbytes for entry in entries if not entry.is_dir}
            kind = kind_of(files)
            if kind:
                parts.append(Part(folder, kind))
            root_dcp = depth == 0 and is_dcp(files)
            if root_dcp and not below_dcp:
                return parts
            if not kind or depth == 0:
                names = [entry.name for entry in entries if entry.is_dir and not _is_passed_over(entry)]
                deeper += [name for name in names if not root_dcp or step_number(name) is None]
        level = deeper
    return parts


def not_a_checkpoint(location: Location) -> str:
    """Say what a folder without a checkpoint looks like and what to do, one or two lines."""
    files = part_files(location, "")
    names = sorted(entry.name for entry in location.storage.entries())
    root = location.storage.root
    single = [name for name in sorted(files) if name.endswith(_TORCH_SUFFIXES)]
    zarr = megatron_backend(location.storage, files) == "zarr"
    found, what, tool = _MEGATRON_ZARR if zarr else _looks_like(names)
    if found:
        also = f"; dcptool shows one file at a time: {join(root, single[0])}" if single else "."
        return f"{root} is no DCP checkpoint: {found} looks like {what}.\n{tool} reads it{also}"
    if single:
        listed = ", ".join(single[:5]) + (", …" if len(single) > 5 else "")
        return f"{root} is no DCP checkpoint, but holds torch.save files ({listed}); name one: {join(root, single[0])}"
    if not names:
        return f"{root} is empty: no checkpoint in it"
    return (
        f"{root} holds no checkpoint, nor do its folders {MAX_PART_DEPTH} levels down "
        "(no .metadata, no __R_N.distcp, no safetensors)"
    )


def _looks_like(names: Sequence[str]) -> tuple[str, str, str]:
    """Return the file or folder that tells, what it looks like and what reads that; empty if none is recognised."""
    for pattern, what, tool in _OTHER_TOOLS:
        found = next(filter(pattern.fullmatch, names), None)
        if found:
            return found, what, tool
    return "", "", ""


def _is_passed_over(entry: DirEntry) -> bool:
    """Tell whether a folder is hidden, somebody's work in progress, or a link that only points at a step."""
    name = entry.name.rpartition("/")[2]
    hidden = name.startswith((".", "tmp_", "__pycache__")) or ".tmp" in name
    return hidden or (entry.is_link and (name.startswith("latest") or step_number(name) is not None))


def _open_file(storage: Storage, name: str) -> Checkpoint:
    path = join(storage.root, name)
    nbytes = storage.size(name)
    if nbytes is None:
        raise StorageError(f"{path} is not a regular file")
    if name == METADATA or name in rank_metadata({name: 0}):
        return open_dcp(storage, part_files(Location(storage, None), ""))
    if data_file_rank(name) is not None:
        raise UnsupportedError(f"{path} is one data file of a DCP checkpoint; name its folder: {storage.root}")
    if name.endswith(INDEX_SUFFIX):
        return open_safetensors(storage, part_files(Location(storage, None), ""), name)
    start = storage.read(name, 0, min(nbytes, 512))
    if start.startswith(b"PK\x03\x04"):
        return open_torch_save(storage, name, nbytes)
    if start.startswith(LEGACY_MAGIC[:13]):
        raise UnsupportedError(
            f"{path} was written by torch.save before 1.6 (or with the old format asked for), which is no zip.\n"
            "Load it with torch.load and save it again."
        )
    if start[8:9] == b"{" or name.endswith(SUFFIX):
        return open_safetensors(storage, {name: nbytes}, name)
    if start[257:262] == b"ustar" or name.endswith(".nemo"):
        raise UnsupportedError(f"{path} is a tar archive, as NeMo's .nemo files are; unpack it and name the folder")
    if name.endswith(".bin.index.json"):
        raise UnsupportedError(f"{path} is the index of a model in several torch.save files; name one of these")
    try:
        check_pickle_start(start)
    except MetadataError as error:
        raise MetadataError(f"{path} is no checkpoint: {error}") from None
    raise UnsupportedError(f"{path} is a bare pickle, not a checkpoint; pickletools shows what is in it")
