"""Run directories: folders of numbered checkpoints. Finds the steps; does not judge them."""

from __future__ import annotations

from typing import NamedTuple

from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.steps import in_step_order
from dcptool.storage import Location, Storage, join

_WRAPPER_DEPTH = 2


class Run(NamedTuple):
    """A run directory: its path, its place below the folder looked at, and its steps' names, lowest step first."""

    path: str
    folder: str
    steps: tuple[str, ...]

    def holds(self, name: str) -> bool:
        """Tell whether a path below the folder looked at is one of the steps, or in one."""
        inside = name.removeprefix(f"{self.folder}/") if self.folder else name
        return (not self.folder or inside != name) and inside.partition("/")[0] in self.steps


def find_run(location: Location) -> Run | None:
    """Return the run directory at a folder, or the only one a level or two below it, None if there is none.

    Trainers put their steps into `checkpoint/`, `checkpoints/` or `ckpt/` below the folder users think of.

    Raises:
        CheckpointNotFoundError, StorageError: the folder cannot be listed.
    """
    storage = location.storage
    level = [""]
    for depth in range(_WRAPPER_DEPTH + 1):
        folders = {folder: _folders(storage, folder) for folder in level}
        runs = {folder: in_step_order(names) for folder, names in folders.items() if in_step_order(names)}
        if len(runs) == 1:
            folder, steps = next(iter(runs.items()))
            return Run(join(storage.root, folder), folder, tuple(steps))
        if runs or depth == _WRAPPER_DEPTH:
            return None
        level = [f"{folder}/{name}" if folder else name for folder, names in folders.items() for name in names][:50]
    return None


def _folders(storage: Storage, folder: str) -> list[str]:
    try:
        entries = storage.entries(folder)
    except (CheckpointNotFoundError, StorageError):
        if not folder:
            raise
        return []
    # A link names a step that is elsewhere, or another one of this run: a pointer, not a step.
    names = [entry.name.rpartition("/")[2] for entry in entries if entry.is_dir and not entry.is_link]
    return [name for name in names if not name.startswith(".")]
