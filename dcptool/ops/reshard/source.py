"""Which checkpoints are resharded, and where the output goes: a step with all its parts, or one checkpoint alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.steps import step_number
from dcptool.errors import CheckpointNotFoundError, DcptoolError, LayoutError, SeveralCheckpointsError, UnsupportedError
from dcptool.formats.dcp.format import DCP, metadata_rank
from dcptool.formats.detect import find_parts, open_at, open_part
from dcptool.formats.table import FORMATS, fills_folder
from dcptool.frameworks.profile import Follow
from dcptool.ops.following import FoundStep, fixed_message, left_notes, opened_parts, step_around, step_of
from dcptool.ops.latest import find_latest
from dcptool.runs.activity import list_files
from dcptool.runs.directory import is_run_of
from dcptool.runs.pointers import MAX_POINTER_NBYTES
from dcptool.storage import Location, base_name, is_url, join, locate
from dcptool.words import shown

MAX_LISTED = 20


class ReshardSource(NamedTuple):
    """What is resharded.

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


def open_source(path: str, also: Sequence[str] = ()) -> ReshardSource:
    """Open what a path names: all checkpoints of a step, or one checkpoint.

    Raises:
        CheckpointNotFoundError: there is none, or the path is of several that are no step.
        UnsupportedError: it is a step of files that only as many ranks as saved it can load.
    """
    location = locate(path, also)
    if location.file is not None:
        checkpoint = open_part(location, "")
        if metadata_rank(location.file) is None:
            return ReshardSource(checkpoint.path, {"": checkpoint})
        folder = Location(location.storage, None)  # of a checkpoint as one of its ranks saved it
        return ReshardSource(folder.path, {"": checkpoint}, "", step_of(folder, {"": checkpoint}, list_files(folder)))
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


def _open_step(location: Location, folder: str) -> ReshardSource:
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
    return ReshardSource(location.path, parts, folder, step, around)


def _alone(checkpoint: Checkpoint) -> ReshardSource:
    """Return a checkpoint of a format in which one process saves: what is beside it stays."""
    location = locate(checkpoint.root)
    listing = list_files(location) if checkpoint.format.name != "torch_save" else {}
    step = step_of(location, {"": checkpoint}, listing)
    return ReshardSource(checkpoint.path, {"": checkpoint}, notes=tuple(left_notes(step, [""])))


def _require_not_fixed(location: Location) -> None:
    step = step_of(location, {}, list_files(location))
    fixed = [name for name in step.listing if step.follows(name) is Follow.FIXED]
    if fixed:
        raise UnsupportedError(
            f"{fixed_message(step, fixed)}: dcptool cannot reshard it",
            next_step="Resume on as many ranks as saved it, or use what its trainer has to convert it.",
        )


def source_here() -> tuple[str, tuple[str, ...]]:
    """Return the checkpoint in the current folder, or the newest complete one of the run in or below it, and notes.

    Raises:
        CheckpointNotFoundError: there is none, or it is not clear which.
    """
    here = os.getcwd()
    names = [part.name for part in find_parts(locate(here))]
    if names and not is_run_of(base_name(here), names) and ("" not in names or _fills(here)):
        return here, (f"the source is the checkpoint in the current folder, {here}",)
    found = find_latest(here)
    if found.path is None:
        why = found.problem or f"{found.run}: no step is complete; dcptool verify {found.run} says why"
        raise CheckpointNotFoundError(
            why, next_step="Name the checkpoint to reshard: dcptool reshard --world-size N SRC"
        )
    passed = [
        f"{verdict.name} is {verdict.state.value} and was passed over: {verdict.reason}" for verdict in found.skipped
    ]
    warned = [finding.message for finding in (*found.warnings, *found.pointers)]
    return found.path, (f"the source is the newest complete step, {found.path}", *passed, *warned)


def _fills(folder: str) -> bool:
    return fills_folder({entry.name: entry.nbytes for entry in locate(folder).storage.entries()})


def default_target(source: str, n_ranks: int, place: str = "") -> str:
    """Return `<RUN>-ws<N>/<STEP>` beside the run directory of a source, never in it.

    Args:
        source: path of a step, or of a checkpoint in one.
        n_ranks: of the output.
        place: of the source in its step, if that is known; else told by names.

    >>> default_target("/data/ckpt/step_500", 48), default_target("/data/ckpt/step_500/actor", 48)
    ('/data/ckpt-ws48/step_500', '/data/ckpt-ws48/step_500/actor')
    """
    path = source.rstrip("/")
    names = path.split("/")
    if not is_url(source) and ("/" not in path or {"", ".", ".."} & set(names[-2:])):
        path = os.path.abspath(source)
    place = place or _place_in_step(path)
    depth = 1 + len(place.split("/")) if place else 1
    run, *step = path.rsplit("/", depth)
    if not run or run.endswith((":", "/")) or len(step) < depth:
        raise LayoutError(f"{source} has no folder of its own beside which the output could go; name DST")
    suffix = next((end for known in FORMATS for end in known.format.suffixes if path.endswith(end)), "")
    return f"{run}-ws{n_ranks}/{'/'.join(step).removesuffix(suffix)}"


def _place_in_step(path: str) -> str:
    """Return the place of a checkpoint in the step that a folder above it is by its name; "" if none is."""
    number = step_number(base_name(path))
    for depth in (1, 2):
        above, *inside = path.rsplit("/", depth)
        name = base_name(above)
        own = None if name.isdigit() else step_number(name)
        if own is not None and number in (None, own) and len(inside) == depth:
            return "/".join(inside)
    return ""


def in_a_run(source: ReshardSource, target: str) -> list[str]:
    """Warn of an output whose name the trainer of a run takes for one of its own steps, or stumbles over."""
    step = source.around[0] if source.around else source.step
    place = source.around[1] if source.around else ""
    path = target.rstrip("/").removesuffix(f"/{place}") if place else target.rstrip("/")
    if step is None or step.profile is None or step.profile.taken is None:
        return []
    run, _, name = (path if is_url(path) else os.path.abspath(path)).rpartition("/")
    pattern, why = step.profile.taken
    if not re.fullmatch(pattern, name) or not _holds_steps(run, name):
        return []
    return [f"{path} is in a run directory of {step.profile.name}, which {why}: better beside it, or elsewhere"]


def tracked(source: ReshardSource, target: str) -> list[str]:
    """Say what a trainer that finds its newest step by a file in the run directory would not find the output by."""
    profile = source.step.profile if source.step else None
    run, _, name = (target.rstrip("/") if is_url(target) else os.path.abspath(target)).rpartition("/")
    number = step_number(name)
    if profile is None or not profile.tracker or number is None:
        return []
    wanted = name if name == "release" else str(number)
    said = _said(run, profile.tracker)
    if said == wanted:
        return []
    found = "is not there, so that it begins anew without a word" if said is None else f"names {shown(said)}"
    tracker = shown(join(run, profile.tracker))
    return [
        f"{profile.name} finds its newest step by {tracker}, which {found}: write {wanted} into it to go on from this"
    ]


def _said(folder: str, name: str) -> str | None:
    """Return the text of a small file in a folder; None if it is not there or cannot be read."""
    try:
        storage = locate(folder).storage
        nbytes = storage.size(name)
        text = None if nbytes is None else storage.read(name, 0, min(nbytes, MAX_POINTER_NBYTES))
    except DcptoolError:
        return None
    return None if text is None else text.decode(errors="replace").strip()


def _holds_steps(run: str, without: str) -> bool:
    try:
        entries = locate(run).storage.entries()
    except DcptoolError:
        return False
    return any(entry.is_dir and entry.name != without and step_number(entry.name) is not None for entry in entries)
