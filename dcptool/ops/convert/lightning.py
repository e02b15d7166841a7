"""A `.pt` of a Lightning step as Lightning's own consolidation makes it: with `meta.pt`, and its Trainer's names.

Nothing of `meta.pt` is executed: its pickle is loaded into stand-ins and emitted again, its storages are copied.

Source: lightning 2.6.6, pytorch/utilities/consolidate_checkpoint.py (`_format_checkpoint`) and fabric/utilities/load.py
(`_load_distributed_checkpoint`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.extents import Extent
from dcptool.checkpoint.selection import Path, SelectedObject, SelectedTensor, Selection
from dcptool.copying.outputs import Merged
from dcptool.errors import ItemError
from dcptool.formats.torch_save.items import storages
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.frameworks.lightning import LIGHTNING
from dcptool.ops.following import FoundStep
from dcptool.pickles import inert
from dcptool.storage import join

META = "meta.pt"
_OPTIMIZER = re.compile(r"optimizer_(\d{1,6})")
_MAX_PICKLE_NBYTES = 1 << 30


class Consolidated(NamedTuple):
    """A selection under the names that Lightning's Trainer loads, and what is merged into it."""

    selection: Selection
    merged: Merged
    note: str


def is_whole(step: FoundStep) -> bool:
    """Tell whether a step is one of Lightning's, with all that its consolidation needs."""
    return step.profile is LIGHTNING and META in step.listing


def consolidated(checkpoint: Checkpoint, selection: Selection, step: FoundStep) -> Consolidated:
    """Return what Lightning's consolidation makes of all of a step.

    Raises:
        ItemError: `meta.pt` is damaged.
        StorageError: it cannot be read.
    """
    nbytes = step.listing[META].nbytes
    archive = TorchZip(lambda at, n: checkpoint.storage.read(META, at, n), nbytes)
    root = inert.load(archive.content("data.pkl", _MAX_PICKLE_NBYTES))
    if not isinstance(root, dict) or not all(isinstance(key, str) for key in root):
        raise ItemError(f"{join(checkpoint.root, META)} is no dict, as Lightning writes it")
    renamed = tuple(map(_renamed, selection.in_order))
    members = tuple(item for item in renamed if not (item.path and item.path[0] in root))
    note = f"{META} is merged in, and the names are those that Lightning's Trainer loads (state_dict, optimizer_states)"
    merged = Merged(root, storages(archive, Extent(META, 0, nbytes)))
    return Consolidated(selection._replace(in_order=members), merged, note)


def _renamed(item: SelectedTensor | SelectedObject) -> SelectedTensor | SelectedObject:
    path = _path(item.path or (item.name,))
    return item._replace(path=path, name=".".join(map(str, path)))


def _path(path: Path) -> Path:
    """Return the place of an entry in Lightning's dict: `model` and `optimizer_N` have other names there."""
    first = str(path[0])
    optimizer = _OPTIMIZER.fullmatch(first)
    if optimizer:
        return ("optimizer_states", int(optimizer[1]), *path[1:])
    return ("state_dict", *path[1:]) if first == "model" else path
