"""The files beside a checkpoint that is converted: what of them goes with it, and what is said of the rest."""

from __future__ import annotations

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.formats.dcp.format import DCP, metadata_rank
from dcptool.ops.following import (
    NOTHING,
    OF_MODEL,
    Following,
    FoundStep,
    describes,
    describing,
    follow,
    left_notes,
    step_around,
    step_of,
)
from dcptool.ops.model_config import with_dtype
from dcptool.ops.sources import StepSource
from dcptool.runs.activity import list_files
from dcptool.storage import Location


def own_step(checkpoint: Checkpoint) -> FoundStep | None:
    """Return the folder of a checkpoint with all in it; None where one file was named."""
    if checkpoint.name and metadata_rank(checkpoint.name) is None:
        return None
    location = Location(checkpoint.storage, None)
    return step_of(location, {"": checkpoint}, list_files(location))


def files_beside(
    checkpoint: Checkpoint, own: FoundStep | None, to: str, is_file: bool, wanted: bool, dtype: str | None
) -> Following:
    """Decide what of the files beside a checkpoint goes with it.

    Args:
        checkpoint: the source.
        own: its folder, as `own_step` returns it; None if nothing beside belongs to it.
        to: format of the output: of DCP to DCP all is carried that its trainer loads, else what describes a model.
        is_file: whether the output is one file, so that nothing can lie beside.
        wanted: whether anything is to be carried; what is not is told.
        dtype: what tensors are cast to; the model's configuration then says so.
    """
    if own is None:
        return NOTHING
    around = step_around(checkpoint)
    left = left_notes(around[0], [around[1]]) if around else []
    if is_file or not wanted:
        return Following(notes=(*left_notes(own, [""]), *left))
    if to == "dcp" and checkpoint.format is DCP:
        found = follow(own, [""], None)
        found = found._replace(notes=(*found.notes, *left))
    elif around and any(name.startswith(OF_MODEL) and describes(name.removeprefix(OF_MODEL)) for name in own.listing):
        found = describing(own, [""])
        found = found._replace(notes=(*found.notes, *left))
    else:
        found = describing(around[0], [around[1]], around[1]) if around else describing(own, [""])
    return with_dtype(found, dtype) if dtype else found


def beside_parts(found: StepSource, to: str, wanted: bool, dtype: str | None) -> Following:
    """Decide what of the files beside the checkpoints of a step goes with them; arguments as of `files_beside`."""
    step = found.step
    if step is None:
        return NOTHING
    if not wanted:
        return Following(notes=tuple(left_notes(step, found.parts)))
    following = follow(step, found.parts, None) if to == "dcp" else describing(step, found.parts)
    return with_dtype(following, dtype) if dtype else following
