"""What --overwrite may replace: a file of the same format, or a folder that is one checkpoint and nothing else.

What was carried into the folder belongs to it: a step that a marker of ours lists whole, and what describes a model
beside its weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from dcptool.errors import OutputExistsError
from dcptool.formats.marker import NAME, marked_as
from dcptool.formats.table import beside
from dcptool.formats.torch_save.format import is_legacy
from dcptool.ops.following import describes, is_of_model
from dcptool.storage import Storage, is_url, locate, walk
from dcptool.words import listed, nbytes, plural

MAX_LISTED = 5
_START_NBYTES = 512
_TORCH_RECORD = b"data.pkl"
"""The name of the first record of every zip that torch.save writes."""


def replaced(path: str, to: str) -> str:
    """Return what --overwrite would replace, as a note; "" if nothing is there.

    Args:
        path: of the output.
        to: "torch", "safetensors", "dcp", or "page" of a report.

    Raises:
        OutputExistsError: there is something else; the message lists it.
        StorageError: what is there cannot be looked at.
    """
    path = path.removeprefix("file://").rstrip("/")
    if is_url(path) or not os.path.lexists(path) or os.path.islink(path):
        return ""  # of a link only the link is replaced
    what = _folder(path, to) if os.path.isdir(path) else _file(path, to)
    return f"--overwrite replaces what is at {path}: {what}" if what else ""


def _file(path: str, to: str) -> str:
    location = locate(path)
    size = os.path.getsize(path)
    start = location.storage.read(os.path.basename(path), 0, min(size, _START_NBYTES))
    if size and not _IS[to](start):
        raise OutputExistsError(
            f"{path} is there and is no {_NAMES[to]}: not replaced", next_step="Name another place, or move it away."
        )
    return f"a file of {nbytes(size)}"


def _folder(path: str, to: str) -> str:
    storage = locate(path).storage
    files = {entry.name: entry.nbytes for entry in walk(storage)}
    ours = _listed_by_marker(storage)
    others = [name for name in beside(files) if "/" not in name and name not in ours]
    if to == "safetensors" and is_of_model(files):
        others = [name for name in others if not describes(name)]
    inside = {name.partition("/")[0] for name in files if "/" in name and name not in ours}
    empty = {entry.name for entry in storage.entries() if entry.is_dir} - {name.partition("/")[0] for name in ours}
    others += [f"{name}/" for name in inside | empty]
    if others:
        there = listed(sorted(others), MAX_LISTED)
        raise OutputExistsError(
            f"{path} is not one checkpoint and nothing else: not replaced; there is {there}",
            next_step="Name another place, or move away what is there.",
        )
    return f"{plural(len(files), 'file')}, {nbytes(sum(files.values()))}" if files else ""


def _listed_by_marker(storage: Storage) -> set[str]:
    """Return the files that `reshard` or `convert` wrote into a folder, as their marker lists them; none of others."""
    marker = marked_as(storage)
    return {NAME, *marker.files} if marker is not None and marker.writer in ("reshard", "convert") else set()


def _is_torch(start: bytes) -> bool:
    return is_legacy(start) or (start.startswith(b"PK") and _TORCH_RECORD in start)


def _is_safetensors(start: bytes) -> bool:
    return start[8:9] == b"{"


_IS: Mapping[str, Callable[[bytes], bool]] = {
    "torch": _is_torch,
    "safetensors": _is_safetensors,
    "page": lambda start: start.lstrip().lower().startswith(b"<!doctype html"),
}
_NAMES = {"torch": "file of torch.save", "safetensors": "safetensors file", "page": "HTML page"}
