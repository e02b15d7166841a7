"""A checkpoint's entries as torch's Metadata, with a place for every item; nothing is read.

Source: torch 2.13, distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.extents import Extent, Ints
from dcptool.checkpoint.regions import volume
from dcptool.errors import UnsupportedError

_NOWHERE = Extent("", 0, 0)
_PLAIN = (str, int, float, bool, bytes, type(None))


@dataclass
class ItemPlace(_StorageInfo):  # type: ignore[misc]
    """torch's record of where an item is stored, and which item of the checkpoint that is.

    Attributes:
        fqn: name of its entry.
        chunk: number of the chunk in a tensor; None for an object.
    """

    fqn: str = ""
    chunk: int | None = None


def as_metadata(checkpoint: Checkpoint, path: str, load_id: str) -> Metadata:
    """Return torch's metadata of a checkpoint.

    Args:
        checkpoint: of any format.
        path: what the user calls it.
        load_id: of the load this is for.

    Raises:
        UnsupportedError: the installed torch has no such dtype.
    """
    places: dict[MetadataIndex, ItemPlace] = {}
    for fqn, entry in checkpoint.entries.items():
        _add_places(places, fqn, entry)
    trained = checkpoint.requires_grad
    found = Metadata(
        {fqn: _storage_metadata(entry, fqn in trained) for fqn, entry in checkpoint.entries.items()},
        _planner_data(checkpoint),
        places,
        StorageMeta(checkpoint_id=path, save_id=checkpoint.save_id, load_id=load_id),
    )
    found.version = checkpoint.version  # an attribute: older versions of torch have no such field
    return found


def _add_places(places: dict[MetadataIndex, ItemPlace], fqn: str, entry: Entry) -> None:
    """Add where the items of an entry are; of several chunks at one place, one that is not empty."""
    if not isinstance(entry, TensorEntry):
        places[_index(fqn, None)] = _place(fqn, None, entry.item)
        return
    for number, chunk in enumerate(entry.chunks):
        index = _index(fqn, chunk.offsets)
        if volume(chunk.sizes) or index not in places:
            places[index] = _place(fqn, number, chunk.item)


def _index(fqn: str, offsets: Ints | None) -> MetadataIndex:
    return MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))


def _place(fqn: str, chunk: int | None, item: Extent | None) -> ItemPlace:
    item = item or _NOWHERE
    place = ItemPlace(item.file, item.byte_offset, item.nbytes, fqn=fqn, chunk=chunk)
    place.transform_descriptors = item.transforms or None  # likewise
    return place


def _storage_metadata(entry: Entry, trained: bool) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(entry, TensorEntry):
        return BytesStorageMetadata()
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise UnsupportedError(f"{entry.fqn!r}: torch {torch.__version__} has no dtype {entry.dtype}")
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)) for start, sizes in entry.chunks.boxes()]
    properties = TensorProperties(dtype=dtype, requires_grad=trained)
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _planner_data(checkpoint: Checkpoint) -> Any:
    """Return what the saver's planner left, as far as it is plain values, or else the paths of the entries."""
    left = checkpoint.planner_data
    if isinstance(left, dict):
        return {key: value for key, value in left.items() if _is_plain(value)}
    if left is not None:
        return left if _is_plain(left) else None
    return {fqn: entry.path for fqn, entry in checkpoint.entries.items() if entry.path is not None} or None


def _is_plain(value: Any) -> bool:
    """Tell whether all of a value is what a pickle makes without calling anything; it is not nested without end."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if type(found) in (dict, list, tuple, set, frozenset):
            if id(found) not in seen:
                seen.add(id(found))
                waiting += [*found.keys(), *found.values()] if isinstance(found, dict) else found
        elif type(found) not in _PLAIN:
            return False
    return True
