"""torch_checkpointing's folders as a value: which files there are. Reads nothing.

Source: torch_checkpointing 0.1.1, checkpoint_writer.py and metadata_serialization.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dcptool.checkpoint.format import Format

METADATA = "metadata.pkl"
MAX_RANKS = 1 << 17
_FILE = re.compile(r"(.+)_(\d{1,7})\.pt")


class ItemFile(NamedTuple):
    """What the name of a file says: which item it holds, and of which rank."""

    item: str
    rank: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.item}_{self.rank}.pt"


def named(name: str) -> ItemFile | None:
    """Return what the name of a file says, None if it is no item's."""
    match = _FILE.fullmatch(name.rpartition("/")[2])
    found = ItemFile(match[1], int(match[2])) if match else None
    return found if found and match and found.name == match[0] and found.rank < MAX_RANKS else None


def kind_of(files: Mapping[str, int]) -> str | None:
    """Say that a folder with these files is one of torch_checkpointing, None if it is not."""
    return "torch_checkpointing" if METADATA in files and any(map(named, files)) else None


def _rank_of(name: str) -> int | None:
    found = named(name)
    return found.rank if found else None


def _world_size(used: Iterable[str], files: Mapping[str, int]) -> int | None:
    return max((file.rank + 1 for file in map(named, used) if file), default=None)


TORCH_CHECKPOINTING = Format(
    "torch_checkpointing",
    "torch_checkpointing's CheckpointManager",
    is_metadata=lambda name: name == METADATA,
    is_own=lambda name: name == METADATA,
    rank_of=_rank_of,
    world_size=_world_size,
    owns_folder=True,
    saved_by_ranks=True,
    boxes_in_files=True,
)
