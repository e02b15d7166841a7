"""Write a `.metadata` anew for the same entries in the same files at other places; all else in it stays as it was.

Source: torch 2.2 to 2.14, distributed/checkpoint/metadata.py and filesystem.py, for the names of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcptool.errors import MetadataError
from dcptool.formats.dcp.metadata import read_records
from dcptool.formats.dcp.reader import collector_paused
from dcptool.pickles import inert
from dcptool.pickles.emit import emit
from dcptool.pickles.standins import Node

Moves = Mapping[tuple[str, int], tuple[int, int | None]]
"""(file, byte offset of an item there) → its byte offset in the other checkpoint, and its length; None: as it was."""


@collector_paused()
def relocated(data: bytes, moves: Moves, path: str, save_id: str) -> bytes:
    """Return a `.metadata` or `__R.metadata` with its items at other places.

    Args:
        data: the whole file.
        moves: where each of its items is to be.
        path: of the checkpoint the result is for.
        save_id: of that checkpoint.

    Returns:
        A pickle with the same entries, boxes, properties and attributes in the same order. The path and the identifier
        of the save are replaced where there are any; torch 2.2 wrote none.

    Raises:
        MetadataError: it places an item where `moves` knows none, or its records have a form that is not understood.
    """
    root = inert.load(data)
    fields = _attributes(root)
    storage = fields.get("storage_data")
    if not isinstance(storage, dict):
        raise MetadataError("its storage_data is missing: it names no files")
    for info in storage.values():
        place = _attributes(info)
        file, offset = place.get("relative_path"), place.get("offset")
        move = moves.get((file, offset)) if isinstance(file, str) and isinstance(offset, int) else None
        if move is None or not isinstance(place.get("length"), int):
            raise MetadataError(f"it places an item in {file!r} at byte {offset!r}, where none was found")
        place["offset"], length = move
        place["length"] = place["length"] if length is None else length
        _set_attributes(info, place)
    _set_identity(fields, path, save_id)
    _set_attributes(root, fields)
    result = emit(root, 4)
    _require_moved(data, result, moves)
    return result


def _set_identity(fields: dict[str, Any], path: str, save_id: str) -> None:
    meta = fields.get("storage_meta")
    if not isinstance(meta, Node):
        return
    identity = _attributes(meta)
    for name, value in (("checkpoint_id", path), ("save_id", save_id)):
        if name in identity:
            identity[name] = value
    _set_attributes(meta, identity)


def _attributes(record: Any) -> dict[str, Any]:
    """Return the attributes of an instance, as a new dict."""
    state = record.state if isinstance(record, Node) else None
    if isinstance(state, tuple) and len(state) == 2:  # the form of a class with __slots__
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        raise MetadataError("a record of it has a form that is not understood")
    return dict(state)


def _set_attributes(record: Node, attributes: dict[str, Any]) -> None:
    """Set them in the form they had."""
    if isinstance(record.state, tuple):
        record.state = tuple({name: attributes[name] for name in part} if part else part for part in record.state)
    else:
        record.state = attributes


def _require_moved(data: bytes, result: bytes, moves: Moves) -> None:
    """Read the result and compare it with what it was made from, so that nothing wrong is ever written."""
    old, new = read_records(data), read_records(result)
    same = (old.tensors, old.order, old.objects, old.paths) == (new.tensors, new.order, new.objects, new.paths)
    for fqn, rows in old.items.items() if same else ():
        meant = []
        for offsets, file, byte_offset, nbytes, transforms in rows:
            at, length = moves[file, byte_offset]
            meant.append((offsets, file, at, nbytes if length is None else length, transforms))
        same = same and meant == new.items.get(fqn)
    if not same or len(old.items) != len(new.items):
        raise MetadataError("what was made of it does not read as what was meant; this is a bug")
