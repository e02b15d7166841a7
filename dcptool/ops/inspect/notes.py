"""Things worth knowing about a checkpoint before somebody resumes from it or converts it: what names and layouts tell.

Looks at names, paths, layouts and the files beside; reads no tensor. A note is never an error: each of these is
legitimate somewhere, and each has cost somebody a day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.families import per_rank_families
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.layouts import Layout
from dcptool.checkpoint.regions import volume
from dcptool.frameworks.table import holds
from dcptool.ops.inspect.names import name_notes, note
from dcptool.pickles.plain import Array
from dcptool.words import plural

_OF_ONE_RANK = re.compile(r"rng|data_?loader|sampler|random", re.IGNORECASE)
_RNG_TENSOR = re.compile(r"(?:^|[._/])(?:\w+_)?rng(?:_\w+)?(?:$|[._/])", re.IGNORECASE)
_NOT_OF_ONE_RANK = re.compile(r"/shard_|_extra_state|seed$", re.IGNORECASE)


def notes(checkpoint: Checkpoint, layouts: Mapping[str, Layout], values: Mapping[str, Any]) -> list[Finding]:
    """Return what is worth knowing.

    Args:
        checkpoint: an open checkpoint.
        layouts: of its tensors, by fqn.
        values: decoded objects by fqn, as far as they were read.
    """
    world_size = checkpoint.world_size
    families = per_rank_families(list(checkpoint))
    found = [
        *name_notes(checkpoint),
        *_per_rank(families, world_size),
        _stored_once(checkpoint, world_size) if not families else None,
        _whole(checkpoint, layouts, world_size),
        _stacks(layouts),
        _containers(checkpoint, values),
        _side_files(checkpoint),
    ]
    return [found_note for found_note in found if found_note]


def _per_rank(families: Mapping[str, set[int]], world_size: int | None) -> list[Finding]:
    """R17, R18: entries that only one rank each has, and the number of ranks they imply."""
    found = []
    for pattern, ranks in list(families.items())[:5]:
        count = max(ranks) + 1
        missing = count - len(ranks)
        gaps = f", {missing:,} of them missing" if missing else ""
        message = f"{pattern!r} is saved per rank, for {plural(count, 'rank')}{gaps}"
        if world_size and count != world_size:
            message += f", but {plural(world_size, 'rank')} wrote files"
            if not missing and 1 < count < world_size and world_size % count == 0:
                message += f": data-parallel size {count:,}?"
        found.append(note("per-rank", message, "Another number of ranks finds too few or too many of them."))
    return found


def _stored_once(checkpoint: Checkpoint, world_size: int | None) -> Finding | None:
    """R17: what each rank has of its own, by its name, but is there once."""
    if not world_size or world_size < 2:
        return None
    once = [fqn for fqn in checkpoint if _is_of_one_rank(checkpoint, fqn)]
    if not once:
        return None
    which = f"{once[0]!r} is" if len(once) == 1 else f"{once[0]!r} and {plural(len(once) - 1, 'entry')} like it are"
    message = (
        f"{which} stored once, of {plural(world_size, 'rank')}: the same on all of them, or the other ranks' is lost"
    )
    return note("stored-once", message, "State of its own per rank needs a name of its own per rank.")


def _is_of_one_rank(checkpoint: Checkpoint, fqn: str) -> bool:
    """Tell whether a name looks like the state of a random generator, sampler or data loader."""
    if _NOT_OF_ONE_RANK.search(fqn):
        return False
    entry = checkpoint[fqn]
    if isinstance(entry, TensorEntry):
        return entry.dtype == "uint8" and _RNG_TENSOR.search(fqn) is not None
    return _OF_ONE_RANK.search(fqn) is not None


def _whole(checkpoint: Checkpoint, layouts: Mapping[str, Layout], world_size: int | None) -> Finding | None:
    """R29, R30: tensors that one of many ranks stored whole, and over how many ranks' files they lie."""
    larger = [fqn for fqn, entry in checkpoint.tensors.items() if volume(entry.shape) > 1]
    whole = [fqn for fqn in larger if layouts[fqn].is_whole]
    several = len(whole) < len(larger) or (world_size or 1) > 1
    if not whole or not several:
        return None
    message = f"{len(whole):,} of {len(larger):,} tensors are stored whole, such as {whole[0]!r}: one rank's copy"
    next_step = "If ranks held different values under that name, the others are lost."
    files = {file for fqn in whole for file in checkpoint.tensors[fqn].chunks.files()}
    ranks = {rank for rank in map(checkpoint.format.rank_of, files) if rank is not None}
    if len(ranks) > 1:
        message += f" each, spread over the files of {plural(len(ranks), 'rank')}"
        next_step += " The files of one rank, or of one node of several, are not enough to load them."
    return note("whole-tensors", message, next_step)


def _stacks(layouts: Mapping[str, Layout]) -> Finding | None:
    """Megatron's way to store layers: one tensor for all of them."""
    depths = sorted(depth for found in layouts.values() if (depth := found.n_layers) is not None)
    if not depths:
        return None
    layers = f"{depths[0]:,} layers" if depths[0] == depths[-1] else f"{depths[0]:,} to {depths[-1]:,} layers"
    which = f"1 tensor holds {layers}" if len(depths) == 1 else f"{len(depths):,} tensors hold {layers} each"
    return note("layer-stacks", f"{which}, stacked along dim 0 with one box per layer (Megatron)")


def _containers(checkpoint: Checkpoint, values: Mapping[str, Any]) -> Finding | None:
    """R14: containers that torch before 2.4, or a planner that does not flatten, kept as one object."""
    kept = [fqn for fqn, value in values.items() if _is_unflattened(value)]
    if not kept or checkpoint.format.holds_empty_dicts or checkpoint.variant.keeps_containers:
        return None
    which = f"{kept[0]!r} holds" if len(kept) == 1 else f"{plural(len(kept), 'entry')}, such as {kept[0]!r}, hold"
    message = f"{which} a whole container: torch before 2.4, or not flattened"
    return note("unflattened", message, "torch 2.4 and later look for its members under names of their own.")


def _is_unflattened(value: Any) -> bool:
    """Tell whether torch 2.4 and later would have given the members of a value names of their own."""
    if isinstance(value, list):
        return any(isinstance(part, dict | Array) or _is_unflattened(part) for part in value)
    return isinstance(value, dict) and bool(value)


def _side_files(checkpoint: Checkpoint) -> Finding | None:
    there = side_files(checkpoint)
    return note("side-files", f"beside it: {', '.join(there)}") if there else None


def side_files(checkpoint: Checkpoint) -> list[str]:
    """Name files of a framework that belong to the checkpoint but are no part of DCP (R50), with what they hold."""
    if not checkpoint.format.owns_folder or checkpoint.format.boxes_in_files:
        return []
    known = checkpoint.usage
    names = [name for name in checkpoint.files if name not in known and not checkpoint.format.is_metadata(name)]
    return [f"{name} ({what})" for name in names if (what := holds(name))]
