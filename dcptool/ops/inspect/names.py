"""What the names of entries tell before somebody resumes or converts: wrappers, spellings of the optimizer, lost types.

Looks at names and paths only. A note is never an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.selection import WRAPPERS
from dcptool.words import endings, plural

_OPTIMIZER = re.compile(r"(?:^|\.)(?:optim|optimizer|optimizers|opt)\w*\.(?:.*\.)?state\.(.+)\.(\w+)$")
_EXTRA_STATE = re.compile(r"\._extra_state(?:/|$)")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_MODEL_GROUP = re.compile(r"models?|modules?|net|network")
_OPTIMIZER_GROUP = re.compile(r"opt(?:im(?:izers?)?)?")


def name_notes(checkpoint: Checkpoint) -> list[Finding]:
    """Return what the names of a checkpoint's entries tell."""
    names = list(checkpoint)
    found = [
        _common_prefix(names),
        _wrappers(names),
        *_optimizer(checkpoint),
        _integer_keys(checkpoint),
        _extra_state(names),
    ]
    return [note for note in found if note]


def note(kind: str, message: str, next_step: str = "") -> Finding:
    """Return a finding that is only worth knowing."""
    return Finding.of(kind, message, next_step=next_step)


def _common_prefix(names: Sequence[str]) -> Finding | None:
    """R08: model and optimizer below one part that all names begin with, as `app.model.`."""
    split = [name.split(".", 2) for name in names]
    if len({parts[0] for parts in split}) != 1 or any(len(parts) < 2 for parts in split):
        return None
    groups = dict.fromkeys(parts[1] for parts in split)
    model = next(filter(_MODEL_GROUP.fullmatch, groups), None)
    if model is None or not any(map(_OPTIMIZER_GROUP.fullmatch, groups)):
        return None
    prefix = f"{split[0][0]}."
    pattern = f"{prefix}{model}.*"
    return note("common-prefix", f"all names begin with {prefix!r}; --keys {pattern!r} selects the model alone")


def _wrappers(names: Sequence[str]) -> Finding | None:
    """R56: parts of names that are wrappers', not the model's."""
    counts = {part: sum(part in name.split(".") for name in names) for part in WRAPPERS}
    seen = {part: count for part, count in counts.items() if count}
    if not seen:
        return None
    listed = ", ".join(f"{part}. in {plural(count, 'entry')}" for part, count in seen.items())
    return note("wrapper-names", f"names have parts of wrappers: {listed}; a bare model does not have them")


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
        return [note("no-optimizer-state", message, "A resumed job starts with fresh moments.")]
    if all(name.isdigit() for name in covered):
        message = f"the optimizer names its state by parameter index ({len(covered):,} of them), not by parameter name"
        return [note("index-keyed-optimizer", message, "It loads only into the same parameters in the same order.")]
    weights = [name for name in tensors if not _OPTIMIZER.search(name) and name.endswith(("weight", "bias"))]
    without = [name for name in weights if covered.isdisjoint(endings(name))]
    if not weights or not without or len(without) == len(weights):
        return []
    share = f"{len(without):,} of {len(weights):,} weights and biases"
    message = f"the optimizer has no state for {share}, such as {without[0]!r}"
    return [note("partial-optimizer", message, "Expected if they are frozen.")]


def _integer_keys(checkpoint: Checkpoint) -> Finding | None:
    """R38: dict keys that look like integers; list indexes are integers in the paths, keys are text by then."""
    if not checkpoint.format.keys_as_text:
        return None
    containers: dict[tuple[str | int, ...], None] = {}
    for fqn, entry in checkpoint.items():
        path = entry.path or ()
        depth = next((i for i, part in enumerate(path) if isinstance(part, str) and _INTEGER.fullmatch(part)), None)
        if depth is None or (path[depth - 1 : depth] == ("state",) and _OPTIMIZER.search(fqn)):
            continue
        containers[path[:depth]] = None
    if not containers:
        return None
    first = ".".join(map(str, next(iter(containers))))
    where = f"under {first!r}" if first else "at top level"
    others = len(containers) - 1
    more = f" and in {plural(others, 'other place')}" if others else ""
    message = f"keys {where}{more} look like integers; DCP stores them as text"
    return note("integer-keys", message, "Whatever looks them up as integers after loading does not find them.")


def _extra_state(names: Sequence[str]) -> Finding | None:
    """R15: TransformerEngine's bookkeeping."""
    count = sum(bool(_EXTRA_STATE.search(name)) for name in names)
    if not count:
        return None
    bookkeeping = "FP8 bookkeeping that comes and goes with TransformerEngine's version"
    return note("extra-state", f"{plural(count, 'entry')} are _extra_state: {bookkeeping}")
