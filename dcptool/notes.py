"""Things worth knowing about a checkpoint before somebody resumes from it or converts it: what names and layouts tell.

Looks at names, paths, layouts and the files beside; reads no tensor. A note is never an error: each of these is
legitimate somewhere, and each has cost somebody a day.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dcptool.checkpoint import Checkpoint
from dcptool.findings import Finding, Severity
from dcptool.pickles.plain import Array
from dcptool.regions import volume

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "module")
"""Parts that torch.compile, activation checkpointing, FSDP1, DeepSpeed and DDP put into names."""
_OPTIMIZER = re.compile(r"(?:^|\.)(?:optim|optimizer|optimizers|opt)\w*\.(?:.*\.)?state\.(.+)\.(\w+)$")
_PER_RANK = re.compile(r"((?:^|[._/])(?:dp_?|local_|global_)?rank[._]?)(\d+)(?=$|[._/])")
_EXTRA_STATE = re.compile(r"\._extra_state(?:/|$)")
_SIDE_FILES = {
    "common.pt": "Megatron's arguments, RNG state and iteration",
    "metadata.json": "Megatron's choice of back end",
    "meta.pt": "Lightning's loops, callbacks and hyper-parameters",
    "trainer_state.json": "the transformers Trainer's progress",
    "scheduler.pt": "the learning-rate scheduler",
    "scheduler.bin": "accelerate's learning-rate scheduler",
    "latest_checkpointed_iteration.txt": "Megatron's pointer to the newest step",
}


def notes(checkpoint: Checkpoint, layouts: Mapping[str, str], values: Mapping[str, Any]) -> list[Finding]:
    """Return what is worth knowing.

    Args:
        checkpoint: an open checkpoint.
        layouts: fqn → `placements.layout` of its tensors.
        values: decoded objects by fqn, as far as they were read.
    """
    names = list(checkpoint)
    found = [
        _wrappers(names),
        *_optimizer(checkpoint),
        *_per_rank(names),
        _whole(checkpoint, layouts),
        _containers(checkpoint, values),
        _extra_state(names),
        _side_files(checkpoint),
    ]
    return [note for note in found if note]


def _note(kind: str, message: str, next_step: str = "") -> Finding:
    return Finding(kind, Severity.NOTE, message, next_step=next_step)


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"


def _wrappers(names: Sequence[str]) -> Finding | None:
    """R56: parts of names that are wrappers', not the model's."""
    counts = {part: sum(part in name.split(".") for name in names) for part in WRAPPERS}
    seen = {part: count for part, count in counts.items() if count}
    if not seen:
        return None
    listed = ", ".join(f"{part}. in {_entries(count)}" for part, count in seen.items())
    return _note("wrapper-names", f"names have parts of wrappers: {listed}; a bare model does not have them")


def _optimizer(checkpoint: Checkpoint) -> list[Finding]:
    """R35, R36: how the optimizer names its state, and whether that covers the parameters."""
    covered: set[str] = set()
    tensors = checkpoint.tensors
    for name in tensors:
        match = _OPTIMIZER.search(name)
        if match:
            covered.add(match[1])
    has_optimizer = any("param_groups" in name for name in checkpoint)
    if not covered:
        if not has_optimizer:
            return []
        message = "there are optimizer hyper-parameters but no optimizer tensors: it was saved before its first step"
        return [_note("no-optimizer-state", message, "A resumed job starts with fresh moments.")]
    if all(name.isdigit() for name in covered):
        message = f"the optimizer names its state by parameter index ({len(covered):,} of them), not by parameter name"
        return [_note("index-keyed-optimizer", message, "It loads only into the same parameters in the same order.")]
    weights = [name for name in tensors if not _OPTIMIZER.search(name) and name.endswith(("weight", "bias"))]
    without = [
        name for name in weights if not any(name == key or name.endswith(f".{key}") for key in _tails(name, covered))
    ]
    if not weights or not without or len(without) == len(weights):
        return []
    share = f"{len(without):,} of {len(weights):,} weights and biases"
    message = f"the optimizer has no state for {share}, such as {without[0]!r}"
    return [_note("partial-optimizer", message, "Expected if they are frozen.")]


def _tails(name: str, covered: set[str]) -> Iterable[str]:
    """Yield the dotted endings of a name that the optimizer has state for."""
    parts = name.split(".")
    return (tail for start in range(len(parts)) if (tail := ".".join(parts[start:])) in covered)


def _per_rank(names: Sequence[str]) -> list[Finding]:
    """R17, R18: families of entries that only one rank each has."""
    families: dict[str, set[int]] = {}
    for name in names:
        match = _PER_RANK.search(name)
        if match:
            pattern = f"{name[: match.start(2)]}N{name[match.end(2) :]}"
            families.setdefault(pattern, set()).add(int(match[2]))
    found = []
    for pattern, ranks in list(families.items())[:5]:
        missing = max(ranks) + 1 - len(ranks)
        gaps = f", {missing:,} of them missing" if missing else ""
        message = f"{pattern!r} is saved per rank, for {max(ranks) + 1:,} ranks{gaps}"
        found.append(_note("per-rank", message, "Another number of ranks finds too few or too many of them."))
    return found


def _whole(checkpoint: Checkpoint, layouts: Mapping[str, str]) -> Finding | None:
    """R29: tensors that one of many ranks stored whole, beside sharded ones."""
    larger = [fqn for fqn, entry in checkpoint.tensors.items() if volume(entry.shape) > 1]
    whole = [fqn for fqn in larger if layouts[fqn] == "whole"]
    if not whole or len(whole) == len(larger):
        return None
    message = f"{len(whole):,} of {len(larger):,} tensors are stored whole, such as {whole[0]!r}: one rank's copy"
    return _note("whole-tensors", message, "If ranks held different values under that name, the others are lost.")


def _containers(checkpoint: Checkpoint, values: Mapping[str, Any]) -> Finding | None:
    """R14: containers that torch before 2.4, or a planner that does not flatten, kept as one object."""
    kept = [fqn for fqn, value in values.items() if _is_unflattened(value)]
    if not kept or checkpoint.format != "dcp" or checkpoint.flavour.startswith("Megatron"):  # which keeps its own so
        return None
    which = f"{kept[0]!r} holds" if len(kept) == 1 else f"{_entries(len(kept))}, such as {kept[0]!r}, hold"
    message = f"{which} a whole container: torch before 2.4, or not flattened"
    return _note("unflattened", message, "torch 2.4 and later look for its members under names of their own.")


def _is_unflattened(value: Any) -> bool:
    """Tell whether torch 2.4 and later would have given the members of a value names of their own."""
    if isinstance(value, list):
        return any(isinstance(part, dict | Array) or _is_unflattened(part) for part in value)
    return isinstance(value, dict) and bool(value)


def _extra_state(names: Sequence[str]) -> Finding | None:
    """R15: TransformerEngine's bookkeeping."""
    count = sum(bool(_EXTRA_STATE.search(name)) for name in names)
    if not count:
        return None
    message = (
        f"{_entries(count)} are _extra_state: FP8 bookkeeping that comes and goes with TransformerEngine's version"
    )
    return _note("extra-state", message)


def _side_files(checkpoint: Checkpoint) -> Finding | None:
    """R50: files of a framework that belong to the checkpoint but are not part of DCP."""
    there = [f"{name} ({what})" for name, what in _SIDE_FILES.items() if name in checkpoint.files]
    return _note("side-files", f"beside it: {', '.join(there)}") if there and checkpoint.format == "dcp" else None
