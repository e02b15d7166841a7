"""Run directories: folders of numbered checkpoints. Finds the steps; does not judge them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.steps import Pattern, common_pattern, in_step_order, is_rare, step_number, step_order
from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.formats.detect import find_parts, part_files
from dcptool.formats.others import looks_like
from dcptool.formats.table import fills_folder
from dcptool.storage import DirEntry, Location, Storage, base_name, join
from dcptool.words import plural

_WRAPPER_DEPTH = 2
_MAX_FOLDERS = 50
"""Folders of one level that are looked into for steps."""


class Run(NamedTuple):
    """A run directory.

    Attributes:
        path: of it.
        folder: its place below the folder looked at.
        steps: their names, lowest step first.
        pattern: what tells that these are steps where no name does by itself.
    """

    path: str
    folder: str
    steps: tuple[str, ...]
    pattern: Pattern | None = None

    def below(self, storage: Storage) -> Storage:
        """Return the storage of the run directory in that of the folder looked at."""
        return storage.below(self.folder) if self.folder else storage

    def number(self, step: str) -> int | None:
        """Return the number that the name of one of the steps stands for."""
        return self.pattern.number(step) if self.pattern else step_number(step)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """What is worth knowing of how the steps were found."""
        if self.pattern is None:
            return ()
        message = f"{plural(len(self.steps), 'folder')} named {self.pattern} are taken as steps, by their names alone"
        return (Finding.of("steps-by-pattern", message),)

    def holds(self, name: str) -> bool:
        """Tell whether a path below the folder looked at is one of the steps, or in one."""
        inside = name.removeprefix(f"{self.folder}/") if self.folder else name
        return (not self.folder or inside != name) and inside.partition("/")[0] in self.steps


def find_runs(location: Location) -> list[Run]:
    """Return the run directory at a folder, or else those a level or two below it; none if there are none.

    Trainers put their steps into `checkpoint/`, `checkpoints/` or `ckpt/` below the folder users think of. A folder
    named by a bare number may be a step, or the run directory of a job of that number: it is looked into.

    Raises:
        CheckpointNotFoundError, StorageError: the folder cannot be listed.
    """
    storage = location.storage
    level = [""]
    for _ in range(_WRAPPER_DEPTH + 1):
        folders = {folder: _folders(storage, folder) for folder in level}
        runs = [_run(storage, folder, names) for folder, names in folders.items()]
        found = [run for run in runs if run.steps]
        if found:
            return [run for run in found if not _is_one_step(location, run)]
        level = [_below(folder, name) for folder, names in folders.items() for name in names][:_MAX_FOLDERS]
    return []


def runs_at(location: Location) -> list[Run]:
    """Return the run directory at a location, or those below it; none if it is a checkpoint or there are no steps."""
    if location.file is not None:
        return []
    return [] if fills_folder(part_files(location, "")) else find_runs(location)


def run_at(location: Location) -> Run | None:
    """Return the one run directory at a location, None if it is a checkpoint itself, or holds no steps or several."""
    runs = runs_at(location)
    return runs[0] if len(runs) == 1 else None


def require_run(location: Location) -> Run:
    """Return the one run directory at a location.

    Raises:
        CheckpointNotFoundError: there is none, or there are several, which the message lists.
    """
    if location.file is not None:
        raise CheckpointNotFoundError(f"{location.path} is a file, no run directory")
    runs = find_runs(location)
    if len(runs) != 1:
        raise CheckpointNotFoundError(listed(location.path, runs))
    return runs[0]


def listed(path: str, runs: Sequence[Run]) -> str:
    """Say that a folder is no run directory, listing those in it."""
    if not runs:
        return f"{path} is no run directory: it holds no steps (step_500, checkpoint-500, iter_0000500, …)"
    names = "\n".join(f"  {run.path}  ({plural(len(run.steps), 'step')})" for run in runs[:20])
    return f"{path} holds {len(runs)} run directories; name one:\n{names}"


def is_run_of(name: str, parts: Iterable[str]) -> bool:
    """Tell by the checkpoints below a folder that it is a run directory, not one checkpoint of several parts.

    Args:
        name: of the folder.
        parts: paths of the checkpoints below it.

    A step named again inside, as in `checkpoint-500/iter_0000500`, is a part of it. Deeper inside, bare numbers are
    no steps: parts are numbered too.
    """
    own = step_number(name)
    for part in parts:
        first, *others = part.split("/")
        steps = {step_number(first), *(step_number(other) for other in others if not other.isdigit())}
        if steps - {own, None}:
            return True
    return False


def _is_one_step(location: Location, run: Run) -> bool:
    """Tell whether a "run" is only the step looked at, named again inside: `checkpoint-500/iter_0000500`."""
    own = step_number(base_name(location.path))
    return own is not None and {step_number(step) for step in run.steps} == {own}


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _run(storage: Storage, folder: str, names: Sequence[str]) -> Run:
    """Return a folder as a run directory, with no steps if it is none."""
    path = join(storage.root, folder)
    steps = _steps(storage, folder, names)
    pattern = common_pattern(names) if not steps else None
    if pattern is None:
        return Run(path, folder, steps)
    fitting = sorted((name for name in names if pattern.number(name) is not None), key=step_order)
    whole = (name for name in fitting if _is_checkpoint(storage, _below(folder, name), pattern.is_of_steps))
    return Run(path, folder, tuple(fitting), pattern) if len(tuple(islice(whole, 2))) > 1 else Run(path, folder, ())


def _is_checkpoint(storage: Storage, folder: str, named_so: bool) -> bool:
    """Tell whether a folder is a checkpoint a job saved; a model alone or parts below only if named as a step."""
    parts = _part_names(storage, folder)
    if named_so:
        return bool(parts) and not is_run_of("", parts)
    return parts == [""] and fills_folder(part_files(Location(storage.below(folder), None), ""))


def _steps(storage: Storage, folder: str, names: Iterable[str]) -> tuple[str, ...]:
    ordered = in_step_order(names)
    steps = [name for name in ordered if not (name.isdigit() and _holds_steps(storage, _below(folder, name)))]
    rare = [name for name in steps if is_rare(name)]
    if any(_holds_checkpoint(storage, _below(folder, name)) for name in reversed(rare)):
        return tuple(steps)
    return tuple(name for name in steps if name not in rare)


def _holds_checkpoint(storage: Storage, folder: str) -> bool:
    """Tell whether there is a checkpoint in a folder, of whatever software."""
    try:
        entries = storage.entries(folder)
    except (CheckpointNotFoundError, StorageError):
        return False
    return bool(looks_like(sorted(base_name(entry.name) for entry in entries))[0] or _part_names(storage, folder))


def _holds_steps(storage: Storage, folder: str) -> bool:
    """Tell whether a folder named by a number is a run directory itself, with checkpoints in its steps."""
    try:
        entries = storage.entries(folder)
    except (CheckpointNotFoundError, StorageError):
        return False
    if fills_folder({base_name(entry.name): entry.nbytes for entry in entries if not entry.is_dir}):
        return False
    steps = in_step_order(_names_of_folders(entries))
    inside = (_below(step, part) for step in steps for part in _part_names(storage, _below(folder, step)))
    return is_run_of(base_name(folder), inside)


def _part_names(storage: Storage, folder: str) -> list[str]:
    try:
        return [part.name for part in find_parts(Location(storage.below(folder), None))]
    except (CheckpointNotFoundError, StorageError):
        return []


def _folders(storage: Storage, folder: str) -> list[str]:
    try:
        return _names_of_folders(storage.entries(folder))
    except (CheckpointNotFoundError, StorageError):
        if not folder:
            raise
        return []


def _names_of_folders(entries: Iterable[DirEntry]) -> list[str]:
    # A link names a step that is elsewhere, or another one of this run: a pointer, not a step.
    names = [base_name(entry.name) for entry in entries if entry.is_dir and not entry.is_link]
    return [name for name in names if not name.startswith(".")]
