"""Load one checkpoint into the state of a job, on all ranks together; or only see whether it could be.

Objects are read first: they tell how what a fresh job does not have yet is put together. Then all tensors are loaded in
place, those into memory of their own for which the job has no tensor of that shape.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.errors import DcptoolError, LayoutError, TrainingError
from dcptool.formats.detect import open_checkpoint
from dcptool.training.fit import Demands, LoadList, fit, is_alike
from dcptool.training.objects import ObjectLoader
from dcptool.training.optimizers import loading
from dcptool.training.rank_local import PREFIX, Flat
from dcptool.training.ranks import Ranks, sendable
from dcptool.training.reader import Reader
from dcptool.training.state import CLASSES, MODEL, OPTIM, UNSTARTED, JobState, TrainState
from dcptool.training.tree import Path, flatten, nested, unpack
from dcptool.words import listed, of_numbers, plural

logger = logging.getLogger("dcptool.training")
_OF_RANK = re.compile(r"(.+)\.rank(\d+)$")


class PerRank(NamedTuple):
    """What became of one kind of per-rank state.

    Attributes:
        name: as given to `TrainState`, or as found; of a value that was kept per rank by itself, its own name.
        saved: ranks that have one in the checkpoint.
        restored: ranks that got theirs back.
        missing: ranks of today that found none, and keep what they have; of a value that was kept by itself, they get
            that of the lowest rank that saved it.
        unused: ranks of the checkpoint whose state nobody took.
    """

    name: str
    saved: tuple[int, ...]
    restored: tuple[int, ...]
    missing: tuple[int, ...]
    unused: tuple[int, ...]


class Loaded(NamedTuple):
    """What became of a load: of state that differs between ranks, and differences that were let pass."""

    per_rank: tuple[PerRank, ...]
    ignored: tuple[str, ...]


def load(checkpoint: Checkpoint, state: JobState, objects: ObjectLoader, ranks: Ranks, strict: bool) -> Loaded:
    """Load a checkpoint into the state of a job.

    Raises:
        TrainingError: it does not fit, or cannot be loaded; the optimizer is what it was.
    """

    def here() -> tuple[dict[str, Any], Flat]:
        tree = state.tree(apart=True)
        return tree, Flat(*flatten(tree))

    try:
        tree, own = ranks.agree("the state of this job", here)
        wanted, ignored = fit(checkpoint, _demands(checkpoint, state, own), ranks, strict)
    except TrainingError as error:
        error.untouched = True
        raise
    values = _loaded(checkpoint, own, wanted, objects, ranks)
    values |= {name: own.values[name] for name in wanted.kept}
    paths = {**own.paths, **wanted.paths}
    _add_unstarted(values, paths, own, wanted)
    made = nested(values, paths)
    _add_empty(made, tree)
    with loading(state.optimizers):
        ranks.agree("taking its state over", lambda: state.load_state_dict(made, strict=strict))
    return Loaded(_per_rank(checkpoint, wanted, tuple(state.per_rank), ranks), tuple(ignored))


def load_model(checkpoint: Checkpoint, state: TrainState, objects: ObjectLoader, ranks: Ranks) -> None:
    """Load the weights of the model alone; errors as of `load`."""
    own = ranks.agree("the model's state", lambda: Flat(*flatten({MODEL: state.model_tree()})))
    open_at = state.opener(own, False)
    demands = Demands(own, lambda path: open_at(path) if path[0] == MODEL else 0, ignored=_is_no_weight)
    wanted, _ = fit(checkpoint, demands, ranks, True)
    values = _loaded(checkpoint, own, wanted, objects, ranks)
    ranks.agree("taking it over", lambda: state.load_model(nested(values, wanted.paths)[MODEL]))


class Saving(NamedTuple):
    """A state that is being saved.

    Attributes:
        state: whose it is.
        own: it.
        written: what this rank writes of it.
        is_new: whether names or kinds are not those of the save before: then it is seen whether it could be restored.
    """

    state: JobState
    own: Flat
    written: Flat
    is_new: bool


def require_restorable(path: str, own: Flat, state: JobState, objects: ObjectLoader, ranks: Ranks) -> None:
    """Restore without loading a tensor: what would not come back into the state that was saved is an error now.

    Args:
        path: of what was saved.
        own: the state, as it was saved.
        state: whose it is.
        objects: decodes objects.
        ranks: all of them.

    Raises:
        TrainingError: it does not fit, an object cannot be decoded, or a container not be put together.
    """
    try:
        checkpoint = ranks.agree("opening it", lambda: open_checkpoint(path))
        wanted, _ = fit(checkpoint, _demands(checkpoint, state, own), ranks, True)
        ranks.agree("putting it together", lambda: _put_together(checkpoint, own, wanted, objects))
    except TrainingError as error:
        raise error.saying(f"{path} was not marked, for it could not be restored: {error.message}") from error


def _put_together(checkpoint: Checkpoint, own: Flat, wanted: LoadList, objects: ObjectLoader) -> None:
    """Decode all objects, and put together what they describe."""
    found = _objects(checkpoint, wanted, objects)
    values = {name: found.get(name, own.values.get(name)) for name in wanted.names}
    unpack(nested(values, wanted.paths))


def _demands(checkpoint: Checkpoint, state: JobState, own: Flat) -> Demands:
    mine = {name for name in own.values if own.paths[name][0] in state.per_rank}
    saved, here = _classes(checkpoint, CLASSES), own.values.get(CLASSES)
    optional = frozenset({*mine, UNSTARTED, CLASSES})
    other = (
        f"saved with {' and '.join(saved)}, here it is {' and '.join(here)}" if saved and here and saved != here else ""
    )
    return Demands(
        own, state.opener(own, saved == here), optional, partial(_is_of_rank, checkpoint), state.frozen, other
    )


def _classes(checkpoint: Checkpoint, name: str) -> list[str] | None:
    """Return the classes of the optimizers that were saved, None if they are not known; executes nothing."""
    try:
        found = checkpoint.value(name) if name in checkpoint else None
    except DcptoolError:
        return None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None


def _is_no_weight(name: str) -> bool:
    return not name.startswith(f"{MODEL}.")


def _is_of_rank(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether an entry is an object that belongs to one rank."""
    return name not in checkpoint.tensors and _OF_RANK.match(name) is not None


def _loaded(checkpoint: Checkpoint, own: Flat, wanted: LoadList, objects: ObjectLoader, ranks: Ranks) -> dict[str, Any]:
    """Load what a rank takes, and return it by its names in the state."""
    found = ranks.agree("loading it", lambda: _objects(checkpoint, wanted, objects))
    targets = ranks.agree("loading it", lambda: _targets(checkpoint, own, wanted))
    tensors: dict[str, Any] = {wanted.names[name]: target for name, target in targets.items()}
    planner = sendable(
        DefaultLoadPlanner, "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes"
    )(flatten_state_dict=False)
    reader = sendable(Reader, "read_metadata", "set_up_storage_reader", "read_data")(checkpoint)
    ranks.agree(
        "loading it", lambda: dcp.load(tensors, storage_reader=reader, planner=planner, process_group=ranks.group)
    )
    return {**found, **targets}


def _objects(checkpoint: Checkpoint, wanted: LoadList, objects: ObjectLoader) -> dict[str, Any]:
    names = {fqn: name for name, fqn in wanted.names.items() if fqn not in checkpoint.tensors}
    return {names[fqn]: value for fqn, value in objects.load(checkpoint, names).items()}


def _targets(checkpoint: Checkpoint, own: Flat, wanted: LoadList) -> dict[str, torch.Tensor]:
    """Return the tensors to load into: those of the job, or new ones where it has none for this alone."""
    model = {
        name: value for name, value in own.values.items() if name.startswith(f"{MODEL}.") and torch.is_tensor(value)
    }
    targets: dict[str, torch.Tensor] = {}
    used: set[int] = set()
    for name, fqn in wanted.names.items():
        entry = checkpoint.tensors.get(fqn)
        if entry is None:
            continue
        mine, path = own.values.get(name), wanted.paths[name]
        if is_alike(mine, entry) and (id(mine) not in used or path[0] in (MODEL, OPTIM)):
            targets[name] = mine
            used.add(id(mine))
        else:  # one that was another's too before may be one of its own now
            targets[name] = _new(entry, path, mine, model)
    return targets


def _new(entry: TensorEntry, path: Path, mine: Any, model: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor for values for which the job has none: laid out as the parameter it is of, if it is of one.

    Raises:
        LayoutError: this torch has no such dtype.
    """
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"{entry.fqn!r}: torch {torch.__version__} has no dtype {entry.dtype}")
    for parameter in _parameters_in(path, model):
        if tuple(parameter.shape) == entry.shape:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = mine.device if torch.is_tensor(mine) else torch.device("cpu")
    return torch.empty(entry.shape, dtype=dtype, device=device)


def _parameters_in(path: Path, model: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the model's tensors that a path names: `ema.shadow.<fqn>`, `optim.state.<fqn>.<name>`."""
    keys = [".".join(map(str, path[start:])) for start in range(1, len(path))]
    if path[0] == OPTIM and len(path) > 3:
        keys.append(str(path[2]))
    return [model[f"{MODEL}.{key}"] for key in keys if f"{MODEL}.{key}" in model]


def _add_unstarted(values: dict[str, Any], paths: dict[str, Path], own: Flat, wanted: LoadList) -> None:
    """Add those parameters whose optimizer state is zeros here and not in the checkpoint to the ones never stepped."""
    stored = {path[2] for path in wanted.paths.values() if path[0] == OPTIM and len(path) > 3}
    not_stored = [fqn for fqn in own.values.get(UNSTARTED, ()) if fqn not in stored]
    if UNSTARTED in values or not_stored:
        values[UNSTARTED] = [*(values.get(UNSTARTED) or ()), *not_stored]
        paths[UNSTARTED] = (UNSTARTED,)


def _add_empty(made: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Add the parameters of which optimizers keep nothing, as DCP does not."""
    if isinstance(tree.get(OPTIM), dict):
        states = made.setdefault(OPTIM, {}).setdefault("state", {})
        for fqn, values in tree[OPTIM].get("state", {}).items():
            if values == {}:
                states.setdefault(fqn, {})


def _per_rank(checkpoint: Checkpoint, wanted: LoadList, names: Sequence[str], ranks: Ranks) -> tuple[PerRank, ...]:
    """Find what became of state that differs between ranks, and say it where a rank got nothing or gave nothing."""
    saved: dict[str, set[int]] = {name: set() for name in names}
    for fqn in checkpoint:
        match = _OF_RANK.match(fqn)
        if match and _is_of_rank(checkpoint, fqn) and not fqn.startswith(f"{PREFIX}."):
            saved.setdefault(match[1], set()).add(int(match[2]))
    today = set(range(ranks.world_size))
    found = [_what_became(name, of, today if name in names else set()) for name, of in saved.items()]
    for one in found:
        if one.missing or one.unused:
            _warn(ranks, f"{checkpoint.path}: {per_rank_words(one)}")
    size = checkpoint.world_size
    local = [_what_became(name, {*of, *_rest(of, size)}, today) for name, of in wanted.own.items()]
    lost = [one for one in local if one.missing or one.unused]
    if lost:
        _warn(ranks, f"{checkpoint.path}: {_local_words(lost)}")
    return (*found, *local)


def _rest(of: Iterable[int], size: int | None) -> Iterable[int]:
    """Return the ranks of a save whose value is the one that all know, those among them that had none too."""
    return set(range(size or 1 + max(of))) - set(of)


def _what_became(name: str, saved: set[int], today: set[int]) -> PerRank:
    parts = (saved, saved & today, today - saved, saved - today)
    return PerRank(name, *(tuple(sorted(part)) for part in parts))


def _warn(ranks: Ranks, message: str) -> None:
    if ranks.rank == 0:
        logger.warning("%s", message)


def per_rank_words(found: PerRank) -> str:
    """Say in one line what became of one kind of per-rank state."""
    of = partial(of_numbers, "rank")
    said = [f"the {found.name} state of {of(found.restored)} was restored" if found.restored else ""]
    said.append(f"{of(found.missing)} found no {found.name} state and keep what they have" if found.missing else "")
    said.append(f"the {found.name} state of {of(found.unused)} was not used" if found.unused else "")
    return "; ".join(filter(None, said))


def _local_words(lost: Sequence[PerRank]) -> str:
    """Say what became of values that each rank kept for itself, at another number of ranks."""
    of = partial(of_numbers, "rank")
    which = listed([one.name for one in lost], 5)
    values = plural(len(lost), "value")
    missing = sorted({rank for one in lost for rank in one.missing})
    unused = sorted({rank for one in lost for rank in one.unused})
    said = [f"{of(missing)} have none of their own and got those of the lowest rank" if missing else ""]
    said.append(f"those of {of(unused)} were not used" if unused else "")
    return f"{values} that differed between ranks ({which}): {'; '.join(filter(None, said))}"
