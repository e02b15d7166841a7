"""DCP directories as a value: which files they have, and who wrote them. Reads nothing.

Source: torch 2.13, distributed/checkpoint/filesystem.py (`_metadata_fn`, `DEFAULT_SUFFIX`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dcptool.checkpoint.format import Format

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r"__(\d+)_(\d+)\.distcp")


def metadata_rank(name: str) -> int | None:
    """Return the rank R of a rank-local metadata file `__R.metadata`, None for other names."""
    match = _RANK_METADATA.fullmatch(name)
    return int(match[1]) if match else None


def rank_name(rank: int) -> str:
    """Return the name of the metadata of one rank."""
    return f"__{rank}{METADATA}"


def rank_metadata(files: Iterable[str]) -> list[str]:
    """Return the names of rank-local metadata files, in rank order."""
    ranks = {name: rank for name in files if (rank := metadata_rank(name)) is not None}
    return sorted(ranks, key=ranks.__getitem__)


def metadata_names(files: Iterable[str]) -> list[str]:
    """Return the names of the metadata files that count: `.metadata`, else those of all ranks."""
    names = list(files)
    return [METADATA] if METADATA in names else rank_metadata(names)


def data_file_rank(name: str) -> int | None:
    """Return the rank R of a data file `__R_N.distcp`, None for other names."""
    match = _DATA_FILE.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else None


def is_metadata(name: str) -> bool:
    """Tell whether a name is that of metadata, of one rank too."""
    return name == METADATA or metadata_rank(name) is not None


def kind_of(files: Mapping[str, int]) -> str | None:
    """Say what kind of DCP directory a folder with these files is, None if it is none."""
    if METADATA in files:
        return "DCP"
    if rank_metadata(files):
        return "DCP, rank-local metadata"
    return "DCP data files without metadata" if any(data_file_rank(name) is not None for name in files) else None


def is_file(name: str, start: bytes) -> bool:
    """Tell whether a file is metadata or data of a DCP directory, by its name."""
    return is_metadata(name) or data_file_rank(name) is not None


def _is_own(name: str) -> bool:
    return name.startswith("__") or name.endswith((METADATA, ".distcp", "metadata.json"))


def _world_size(used: Iterable[str], files: Mapping[str, int]) -> int | None:
    """Count the files the metadata names, and the empty ones that idle ranks leave."""
    names = {*used, *(name for name, nbytes in files.items() if not nbytes)}
    return max((rank + 1 for name in names if (rank := data_file_rank(name)) is not None), default=None)


DCP = Format(
    "dcp",
    "dcp.load",
    is_metadata=is_metadata,
    is_own=_is_own,
    rank_of=data_file_rank,
    world_size=_world_size,
    owns_folder=True,
    saved_by_ranks=True,
    items_apart=True,
    paths_apart=True,
    keys_as_text=True,
    holds_empty_dicts=False,
    loads_in_torch=True,
)
