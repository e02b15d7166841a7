"""What is resharded if nobody says, and where the output goes if nobody says."""

from __future__ import annotations

import os
import re

from dcptool.checkpoint.steps import step_number
from dcptool.errors import CheckpointNotFoundError, DcptoolError, LayoutError
from dcptool.formats.detect import find_parts
from dcptool.formats.table import FORMATS, fills_folder
from dcptool.ops.latest import find_latest
from dcptool.ops.sources import StepSource
from dcptool.runs.directory import is_run_of
from dcptool.storage import base_name, is_url, locate


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


def in_a_run(source: StepSource, target: str) -> list[str]:
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


def _holds_steps(run: str, without: str) -> bool:
    try:
        entries = locate(run).storage.entries()
    except DcptoolError:
        return False
    return any(entry.is_dir and entry.name != without and step_number(entry.name) is not None for entry in entries)
