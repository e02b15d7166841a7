"""All that a training job has to save, as one `Stateful`: under the same names whatever the parallelism.

Knows how a state becomes a nested dict for torch.distributed.checkpoint and back; nothing of paths or saves.

    model.<fqn>                 parameters and buffers
    optim.state.<fqn>.<name>    what the optimizers keep for each parameter; optim.param_groups.<i>.<name>
    optim_classes               of the optimizers
    optim_unstarted             FQNs whose optimizer state is only zeros because they were never stepped
    scheduler, <extra>          one object each, or, where the state holds tensors, an entry for each of them
    <per-rank name>.rank<r>     one object per rank
    rank_local.rank<r>.<name>   what of the above rank r has other values of; see `rank_local`

Source: torch 2.13, distributed/checkpoint/state_dict.py, stateful.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from dcptool.training.optimizers import filled, loading
from dcptool.training.rank_local import PREFIX, Flat
from dcptool.training.tree import Path, has_tensors, pack, unpack

MODEL, OPTIM, UNSTARTED, SCHEDULER = "model", "optim", "optim_unstarted", "scheduler"
CLASSES = "optim_classes"
_TAKEN = (MODEL, OPTIM, UNSTARTED, CLASSES, SCHEDULER, PREFIX)


class Stateful(Protocol):
    """Anything that gives its state as a dict and takes it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""


class JobState(Protocol):
    """What a manager saves and restores: a `TrainState`, or any state dict as a `PlainState`.

    Attributes:
        optimizers: that change tensors of it with their steps.
        per_rank: by name what is different on each rank.
        frozen: names of the model's parameters that are not trained.
    """

    optimizers: tuple[Optimizer, ...]
    per_rank: dict[str, Stateful]

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the model's parameters that are not trained."""

    def tree(self, *, apart: bool = False) -> dict[str, Any]:
        """Return the state as nested dicts that DCP keeps as they are; see `TrainState.tree`."""

    def opener(self, own: Flat, same_optimizers: bool) -> Callable[[Path], int]:
        """Return what tells where a checkpoint may have something else than there is now; see `TrainState.opener`."""

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Take over a state of the form that `tree` returns."""


class TrainState:
    """Model, optimizer and everything else of a training job, a `Stateful` for torch.distributed.checkpoint.

    The names in a checkpoint are fully qualified names of the model's parameters, the same for a plain model, DDP,
    FSDP2 and tensor parallelism, so that a job may come back in another shape. Asking for the state changes nothing:
    an optimizer that has taken no step keeps no state, and one that could not be loaded is what it was.

    Args:
        model: the model, wrapped or not.
        optimizer: of the model's parameters; or several.
        scheduler: of the learning rate.
        per_rank: by name what is different on each rank, such as the data loader and `RandomState()`. It is saved under
            `<name>.rank<r>` and goes back to the rank of the same number, if there is one.
        **extra: by name further stateful things, the same on all ranks.

    Raises:
        TypeError: something has no `state_dict` and `load_state_dict`.
        ValueError: a name is taken.

    Example:
        >>> state = TrainState(model, optimizer, scheduler, progress=progress, per_rank={"loader": loader})
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Stateful | None = None,
        *,
        per_rank: Mapping[str, Stateful] | None = None,
        **extra: Stateful,
    ) -> None:
        self.model = model
        self.optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
        self.shared: dict[str, Stateful] = {**({SCHEDULER: scheduler} if scheduler is not None else {}), **extra}
        self.per_rank = dict(per_rank or {})
        for name in (*extra, *self.per_rank):
            if name in _TAKEN or (name in self.per_rank and name in self.shared):
                raise ValueError(f"the name {name!r} is taken: name it otherwise")
        for name, value in {**self.shared, **self.per_rank}.items():
            if not _is_stateful(value):
                raise TypeError(f"{name} ({type(value).__name__}) has no state_dict() and load_state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts; tensors are the live ones."""
        return self.tree()

    def tree(self, *, apart: bool = False) -> dict[str, Any]:
        """Return the state as nested dicts.

        Args:
            apart: the optimizer's tensors are copies, so that loading into them and failing changes nothing.
        """
        with filled(self.optimizers) as added:
            optim: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizers)
            blank = {id(values) for values in added} | {id(value) for values in added for value in values.values()}
            unstarted = []
            for fqn, values in optim.get("state", {}).items():
                if id(values) in blank or any(torch.is_tensor(v) and id(v) in blank for v in values.values()):
                    unstarted.append(fqn)
                elif apart:
                    optim["state"][fqn] = _apart(values)
        classes = [type(optimizer).__qualname__ for optimizer in self.optimizers]
        optim["state"] = {fqn: pack(values) if values else {} for fqn, values in optim.get("state", {}).items()}
        optim["param_groups"] = pack(optim.get("param_groups", []))
        state: dict[str, Any] = {MODEL: self.model_tree(), OPTIM: optim}
        state |= {CLASSES: classes, UNSTARTED: sorted(unstarted)}
        state |= {name: _packed(value.state_dict()) for name, value in self.shared.items()}
        for name, value in self.per_rank.items():
            state[name] = {rank_key(current_rank()): (copy.deepcopy(value.state_dict()),)}
        return state

    def model_tree(self) -> dict[str, Any]:
        """Return the model's state alone, packed; tensors are the live ones."""
        return {fqn: pack(value) for fqn, value in get_model_state_dict(self.model).items()}

    def opener(self, own: Flat, same_optimizers: bool) -> Callable[[Path], int]:
        """Return what tells where a checkpoint may have something else than there is now, and it is taken over.

        That is what a fresh object has not made yet: an extra and a module's extra state, which come as they were, and
        what optimizers of the same classes keep for a parameter of this model besides what they keep now.

        Args:
            own: this state.
            same_optimizers: whether the checkpoint is of optimizers of the same classes.

        Returns:
            Of a path in the packed state, how many parts of it name what comes whole; 0 where nothing else may be.
        """
        extra_states = {
            path[1]
            for name, path in own.paths.items()
            if path[0] == MODEL and not _is_parameter(path, own.values[name])
        }
        stepped = {path[2] for path in own.paths.values() if path[0] == OPTIM and len(path) > 3}
        known = set(own.paths.values())

        def open_at(path: Path) -> int:
            if path[0] == MODEL:
                return 2 if len(path) > 1 and path[1] in extra_states else 0
            if path[0] == OPTIM:
                is_more = len(path) > 3 and path[2] in stepped and path not in known
                return len(path) if same_optimizers and is_more else 0
            return 1 if path[0] in self.shared else 0

        return open_at

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained, as the model itself has them."""
        return frozenset(name for name, parameter in self.model.named_parameters() if not parameter.requires_grad)

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Take over a state of the form that `state_dict` returns.

        What is per rank may be missing. If anything fails, the optimizer is what it was before.

        Args:
            state_dict: the state.
            strict: everything else must be there.
        """
        unstarted = set(state_dict.get(UNSTARTED) or ())
        optim = unpack(state_dict.get(OPTIM) or {"state": {}, "param_groups": []})
        states = optim.get("state", {})
        optim["state"] = {fqn: {} if fqn in unstarted else values for fqn, values in states.items()}
        with loading(self.optimizers):
            set_state_dict(
                self.model,
                self.optimizers,
                model_state_dict=unpack(state_dict.get(MODEL) or {}),
                optim_state_dict=optim,
                options=StateDictOptions(strict=strict),
            )
            for name, value in self.shared.items():
                if strict or name in state_dict:
                    value.load_state_dict(_unpacked(state_dict[name]))
            for name, value in self.per_rank.items():
                mine = state_dict.get(name, {}).get(rank_key(current_rank()))
                if mine is not None:
                    value.load_state_dict(_unpacked(mine))

    def load_model(self, model_tree: dict[str, Any]) -> None:
        """Take over a model's state of the form that `model_tree` returns; nothing else changes."""
        set_model_state_dict(self.model, unpack(model_tree))


class PlainState:
    """Any state dict as `dcp.save` takes it, under the names that this gives: for loops that have an `AppState`.

    What is loaded goes back where it came from: to `load_state_dict` of what has one, else into the dict itself.

    Args:
        values: by name anything with `state_dict` and `load_state_dict`, or tensors, nested dicts and plain values.
    """

    frozen: frozenset[str] = frozenset()

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.per_rank: dict[str, Stateful] = {}
        self.optimizers = tuple(dict.fromkeys(_optimizers_in(values.values())))

    def tree(self, *, apart: bool = False) -> dict[str, Any]:
        """Return the state as nested dicts; tensors are the live ones, also with `apart`."""
        del apart
        packed = {
            name: pack(value.state_dict() if _is_stateful(value) else value) for name, value in self._values.items()
        }
        return packed

    def opener(self, own: Flat, same_optimizers: bool) -> Callable[[Path], int]:
        """Return what tells where a checkpoint may have more than there is now: below any name of this state."""
        del own, same_optimizers
        return lambda path: len(path) if path[0] in self._values else 0

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Take over a state of the form that `tree` returns."""
        for name, value in self._values.items():
            if not strict and name not in state_dict:
                continue
            found = unpack(state_dict[name])
            if _is_stateful(value):
                value.load_state_dict(found)
            elif isinstance(value, dict) and isinstance(found, dict):
                value.clear()
                value.update(found)
            else:
                self._values[name] = found


def as_state(state: Any) -> JobState:
    """Return what a manager was given as what it saves.

    Raises:
        TypeError: it is neither a TrainState nor a dict.
    """
    if isinstance(state, TrainState):
        return state
    if isinstance(state, dict) and state and all(isinstance(name, str) for name in state):
        return PlainState(state)
    raise TypeError(
        f"pass a TrainState(model, optimizer, …), or a dict of names such as {{'app': app}}, not {type(state).__name__}"
    )


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _optimizers_in(values: Iterable[Any]) -> Iterator[Optimizer]:
    """Yield the optimizers among values, and among the attributes of what has a state."""
    for value in values:
        if isinstance(value, Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Optimizer))
        elif _is_stateful(value) and not isinstance(value, nn.Module):
            attributes = getattr(value, "__dict__", {}).values()
            yield from _optimizers_in(part for part in attributes if isinstance(part, Optimizer | list | tuple))


def current_rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def rank_key(rank: int) -> str:
    """Return the key under which a rank's own state is kept."""
    return f"rank{rank}"


def _packed(state: dict[str, Any]) -> Any:
    """Return a state as what DCP keeps as it is: one object, unless it holds tensors."""
    return pack(state) if has_tensors(state) else (copy.deepcopy(state),)


def _unpacked(value: Any) -> dict[str, Any]:
    state: dict[str, Any] = value[0] if isinstance(value, tuple) else unpack(value)
    return state


def _is_parameter(path: Path, value: Any) -> bool:
    return len(path) == 2 and torch.is_tensor(value)


def _apart(value: Any) -> Any:
    """Return a copy of what an optimizer keeps for a parameter."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _apart(part) for key, part in value.items()})
        return made
    return [_apart(part) for part in value] if type(value) is list else copy.deepcopy(value)


def require_model(state: object) -> None:
    """Refuse what has no model of its own.

    Raises:
        TypeError: says what to pass.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"pass a TrainState(model, optimizer, …), not a {type(state).__name__}")
