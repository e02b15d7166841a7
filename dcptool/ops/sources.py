"""Which checkpoints are rewritten: a step with all its parts, or one checkpoint alone; and opening them once more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.selection import Renaming, renaming_of_part, selects
from dcptool.checkpoint.steps import step_number
from dcptool.errors import LayoutError, SeveralCheckpointsError, UnsupportedError
from dcptool.formats.dcp.format import DCP, metadata_rank
from dcptool.formats.detect import find_parts, open_at, open_checkpoint, open_part
from dcptool.frameworks.profile import Follow
from dcptool.ops.following import FoundStep, fixed_message, left_notes, opened_parts, step_around, step_of
from dcptool.runs.activity import list_files
from dcptool.runs.directory import is_run_of
from dcptool.storage import Location, base_name, join, locate

MAX_LISTED = 20


class StepSource(NamedTuple):
    """What is to be rewritten.

    Attributes:
        path: of the step, or of the one checkpoint.
        parts: what is written anew, by its place in the step; "" is the step itself.
        folder: where the step is below the path that was named.
        step: the step; None of a checkpoint whose folder is none, such as a file.
        around: the step that the checkpoint is one part of, and its place there.
        notes: worth knowing, one sentence each.
    """

    path: str
    parts: Mapping[str, Checkpoint]
    folder: str = ""
    step: FoundStep | None = None
    around: tuple[FoundStep, str] | None = None
    notes: tuple[str, ...] = ()


def open_source(path: str, also: Sequence[str] = ()) -> StepSource:
    """Open what a path names: all checkpoints of a step, or one checkpoint.

    Raises:
        CheckpointNotFoundError: there is none, or the path is of several that are no step.
        UnsupportedError: it is a step of files that only as many ranks as saved it can load.
    """
    location = locate(path, also)
    if location.file is not None:
        checkpoint = open_part(location, "")
        if metadata_rank(location.file) is None:
            return StepSource(checkpoint.path, {"": checkpoint})
        folder = Location(location.storage, None)  # of a checkpoint as one of its ranks saved it
        return StepSource(folder.path, {"": checkpoint}, "", step_of(folder, {"": checkpoint}, list_files(folder)))
    names = [part.name for part in find_parts(location, below_whole=True)]
    if not names:
        _require_not_fixed(location)
    if "" in names or not is_run_of(base_name(location.path), names):
        return _open_step(location, "") if names else _alone(open_at(location))
    steps = list(dict.fromkeys(map(_step_in, names)))
    if len(steps) > 1:
        paths = tuple(join(location.path, step) for step in steps)
        lines = "\n".join(paths[:MAX_LISTED])
        what = "checkpoints" if len(steps) == len(names) else "steps"
        message = f"{location.path} holds {len(steps)} {what}; name one:\n{lines}"
        raise SeveralCheckpointsError(message, location.path, paths)
    return _open_step(Location(location.storage.below(steps[0]), None), steps[0])


def _step_in(place: str) -> str:
    """Return where the step is that a checkpoint at a place below a run directory is of."""
    names = place.split("/")
    depth = next((depth for depth, name in enumerate(names, 1) if step_number(name) is not None), len(names))
    return "/".join(names[:depth])


def _open_step(location: Location, folder: str) -> StepSource:
    listing = list_files(location)
    opened = opened_parts(location, listing)
    parts = {name: checkpoint for name, checkpoint in opened.items() if checkpoint.format is DCP}
    if not parts:
        return _alone(open_at(location))
    if "" in parts:  # what lies below a whole checkpoint is beside it
        parts = {"": parts[""]}
    step = step_of(location, opened, listing)
    [one, *others] = parts
    if one and not others and step.profile is None and all(name.startswith(f"{one}/") for name in listing):
        inside = Location(location.storage.below(one), None)  # one checkpoint in a folder that is nothing itself
        return _open_step(inside, "/".join(filter(None, (folder, one))))
    around = step_around(parts[""]) if "" in parts else None
    return StepSource(location.path, parts, folder, step, around)


def _alone(checkpoint: Checkpoint) -> StepSource:
    """Return a checkpoint of a format in which one process saves: what is beside it stays."""
    location = locate(checkpoint.root)
    listing = list_files(location) if checkpoint.format.name != "torch_save" else {}
    step = step_of(location, {"": checkpoint}, listing)
    return StepSource(checkpoint.path, {"": checkpoint}, notes=tuple(left_notes(step, [""])))


def _require_not_fixed(location: Location) -> None:
    step = step_of(location, {}, list_files(location))
    fixed = [name for name in step.listing if step.follows(name) is Follow.FIXED]
    if fixed:
        raise UnsupportedError(
            f"{fixed_message(step, fixed)}: dcptool cannot reshard it",
            next_step="Resume on as many ranks as saved it, or use what its trainer has to convert it.",
        )


class Wish(NamedTuple):
    """What of names and globs is about one checkpoint of several."""

    keys: tuple[str, ...]
    exclude: tuple[str, ...]
    renaming: Renaming

    def of_part(self, part: Checkpoint) -> Wish:
        """Return what of it matches something of a part; all `keys` where none does."""
        keys, exclude = (
            tuple(glob for glob in globs if any(selects(fqn, (glob,), ()) for fqn in part))
            for globs in (self.keys, self.exclude)
        )
        renaming = renaming_of_part(self.renaming, part) if self.renaming.rename else self.renaming
        return Wish(keys or self.keys, exclude, renaming)

    def takes_of(self, part: Checkpoint) -> bool:
        """Tell whether anything of a part is selected, or it is empty and everything is."""
        return any(selects(fqn, self.keys, self.exclude) for fqn in part) or not (len(part) or self.keys)


def require_renamed(parts: Iterable[Checkpoint], renaming: Renaming) -> None:
    """Refuse a new name for what is in no part.

    Raises:
        LayoutError: names the first.
    """
    known = {pair for part in parts for pair in renaming_of_part(renaming, part).rename}
    lone = next((old for old, new in renaming.rename if (old, new) not in known), None)
    if lone is not None:
        raise LayoutError(f"--rename {lone}=…: no entry of any part has this name")


def open_again(path: str, also: Sequence[str], place: str) -> Checkpoint:
    """Open what another process opened: the checkpoint at a place below a path, the one there if it is ""."""
    return open_part(locate(path, also), place) if place else open_checkpoint(path, also)
