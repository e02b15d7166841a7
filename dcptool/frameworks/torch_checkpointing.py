"""torch_checkpointing: a folder with a file for each item and rank; `metadata.pkl` knows how many ranks there were."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Needed, Places, Profile, SavedStep, any_of, highest, numbered
from dcptool.frameworks.values import count_of, items_of

_FILE = re.compile(r"(.+)_(\d+)\.pt")
_file = any_of(_FILE.pattern)


def _places(step: SavedStep) -> Places:
    names = [name for name in step.files if "/" not in name]
    recorded = count_of(items_of(step.value("metadata.pkl")).get("world_size"))
    return {
        "item": sorted({match[1] for name in names if (match := _FILE.fullmatch(name))}),
        "rank": numbered(max(recorded, 1 + highest(r".+_(\d+)\.pt", names))),
    }


TORCH_CHECKPOINTING = Profile(
    "torch_checkpointing",
    "torch_checkpointing 0.1.1, checkpoint_writer.py and metadata_serialization.py",
    lambda step: "metadata.pkl" in step.files and _file([name for name in step.files if "/" not in name]),
    (
        Needed(("{item}_{rank}.pt",), "one rank's part of an item", fixed=True),
        Needed(("metadata.pkl",), "how items are cut"),
    ),
    places=_places,
)
