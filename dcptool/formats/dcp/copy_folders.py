"""Data files that a writer keeps several times, in `copy-0/`, `copy-1/`, …: the metadata names them without folder.

Source: the proposed copies of s3torchconnector's S3StorageWriter, which notes `num_copies=N` in `storage_meta.modules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dcptool.checkpoint.findings import Finding
from dcptool.storage import DirEntry, Storage, base_name
from dcptool.storage.through import Through
from dcptool.words import listed

_FOLDER = re.compile(r"copy-(\d+)")


def is_copy(folder: str) -> bool:
    """Tell whether a folder beside `.metadata` is one of copies, by its name."""
    return bool(_FOLDER.fullmatch(folder))


def find_copies(storage: Storage, names: Iterable[str], files: Mapping[str, int]) -> dict[str, DirEntry]:
    """Return where the data files are that are not where the metadata says: of each the longest copy.

    Args:
        storage: the folder of the checkpoint.
        names: files that the metadata names.
        files: name → size in bytes of what is in the folder itself.

    Returns:
        Name → what there is in a folder of copies, for those that are there.
    """
    missing = {name for name in names if name not in files and storage.size(name) is None}
    if not missing:
        return {}
    folders = [entry.name for entry in storage.entries() if entry.is_dir and is_copy(entry.name)]
    found: dict[str, DirEntry] = {}
    for folder in sorted(folders, key=lambda folder: (len(folder), folder)):
        for entry in storage.entries(folder):
            name = base_name(entry.name)
            if name in missing and not entry.is_dir and (name not in found or entry.nbytes > found[name].nbytes):
                found[name] = entry
    return found


def copies_note(found: Mapping[str, DirEntry]) -> Finding:
    """Say where data files are read from."""
    folders = sorted({entry.name.partition("/")[0] for entry in found.values()})
    message = f"data files are read from {listed([f'{folder}/' for folder in folders], 3)}"
    step = "Other copies are not looked at; --also with the folder of each compares them."
    return Finding.of("in-copies", message, next_step=step)


class WithCopies(Through):
    """A folder in which some files are found in its folders of copies; for reading only."""

    def __init__(self, storage: Storage, found: Mapping[str, DirEntry]) -> None:
        super().__init__(storage)
        self._places = {name: entry.name for name, entry in found.items()}

    def _place(self, name: str) -> str:
        return self._places.get(name, name)
