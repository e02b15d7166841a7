"""Rank files as a value: which there are. Reads nothing.

Source: verl 0.9.1, utils/checkpoint/fsdp_checkpoint_manager.py; skyrl 0.4.0, backends/skyrl_train/distributed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dcptool.checkpoint.format import Format

MODEL, OPTIM, EXTRA = "model", "optim", "extra_state"
MAX_RANKS = 1 << 17
_FILE = re.compile(rf"({MODEL}|{OPTIM}|{EXTRA})_world_size_(\d{{1,7}})_rank_(\d{{1,7}})\.pt")


class RankFile(NamedTuple):
    """What the name of a file says: what it holds, how many ranks saved, which of them this is."""

    kind: str
    world_size: int
    rank: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.kind}_world_size_{self.world_size}_rank_{self.rank}.pt"


def named(name: str) -> RankFile | None:
    """Return what the name of a file says, None if it is no rank's."""
    match = _FILE.fullmatch(name.rpartition("/")[2])
    if not match:
        return None
    found = RankFile(match[1], int(match[2]), int(match[3]))
    return found if found.rank < found.world_size <= MAX_RANKS and found.name == match[0] else None


def kind_of(files: Mapping[str, int]) -> str | None:
    """Say that a folder with these files holds a model as a file per rank, None if it does not."""
    found = any(file is not None and file.kind == MODEL for file in map(named, files))
    return "one file per rank" if found else None


def _rank_of(name: str) -> int | None:
    found = named(name)
    return found.rank if found else None


def _world_size(used: Iterable[str], files: Mapping[str, int]) -> int | None:
    found = [file for file in map(named, used) if file]
    return max((file.world_size for file in found), default=None)


RANK_FILES = Format(
    "rank_files",
    "the load_checkpoint of verl or SkyRL, on as many ranks",
    is_own=lambda name: named(name) is not None,
    rank_of=_rank_of,
    world_size=_world_size,
    owns_folder=True,
    saved_by_ranks=True,
    boxes_in_files=True,
)
