"""What --overwrite may replace: a file of the same format, or a folder that is one checkpoint and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from dcptool.errors import OutputExistsError
from dcptool.formats.table import beside
from dcptool.formats.torch_save.format import is_legacy
from dcptool.storage import is_url, locate, walk
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
    what = _folder(path) if os.path.isdir(path) else _file(path, to)
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


def _folder(path: str) -> str:
    location = locate(path)
    files = {entry.name: entry.nbytes for entry in walk(location.storage)}
    folders = [f"{entry.name}/" for entry in location.storage.entries() if entry.is_dir]
    others = [*beside(name for name in files if "/" not in name), *folders]
    if others:
        there = listed(sorted(others), MAX_LISTED)
        raise OutputExistsError(
            f"{path} is not one checkpoint and nothing else: not replaced; there is {there}",
            next_step="Name another place, or move away what is there.",
        )
    return f"{plural(len(files), 'file')}, {nbytes(sum(files.values()))}" if files else ""


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
