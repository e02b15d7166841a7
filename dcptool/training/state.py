"""All that a training job has to save, as one `Stateful`: under the same names whatever the parallelism.

Knows how a state becomes a nested dict for torch.distributed.checkpoint and back; nothing of paths or saves.

    model.<fqn>                 parameters and buffers
    optim.state.<fqn>.<name>    what the optimizers keep for each parameter; optim.param_groups.<i>.<name>
    optim_unstarted             FQNs whose optimizer state is only zeros because they were never stepped
    scheduler, <extra>          one object each, or, where the state holds tensors, an entry for each of them
    <per-rank name>.rank<r>     one object per rank

Source: torch 2.13, distributed/checkpoint/state_dict.py, stateful.py.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
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

MODEL, OPTIM, UNSTARTED, SCHEDULER = "model", "optim", "optim_unstarted", "scheduler"


class Stateful(Protocol):
    """Anything that gives its state as a dict and takes it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""


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
        taken = {MODEL, OPTIM, UNSTARTED, *self.shared}
        for name in (*extra, *self.per_rank):
            if name in (MODEL, OPTIM, UNSTARTED, SCHEDULER) or (name in self.per_rank and name in taken):
                raise ValueError(f"the name {name!r} is taken: name it otherwise")
        for name, value in {**self.shared, **self.per_rank}.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
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
            optim = get_optimizer_state_dict(self.model, self.optimizers)
            blank = {id(values) for values in added} | {id(value) for values in added for value in values.values()}
            unstarted = []
            for fqn, values in optim.get("state", {}).items():
                if id(values) in blank or any(torch.is_tensor(v) and id(v) in blank for v in values.values()):
                    unstarted.append(fqn)
                elif apart:
                    optim["state"][fqn] = {
                        name: value.detach().clone() if torch.is_tensor(value) else copy.deepcopy(value)
                        for name, value in values.items()
                    }
        state: dict[str, Any] = {MODEL: self.model_tree(), OPTIM: optim, UNSTARTED: sorted(unstarted)}
        state |= {name: _packed(value.state_dict()) for name, value in self.shared.items()}
        for name, value in self.per_rank.items():
            state[name] = {rank_key(current_rank()): (copy.deepcopy(value.state_dict()),)}
        return state

    def model_tree(self) -> dict[str, Any]:
        """Return the model's state alone, as nested dicts; tensors are the live ones."""
        found: dict[str, Any] = get_model_state_dict(self.model)
        return found

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Take over a state of the form that `state_dict` returns.

        What is per rank may be missing. If anything fails, the optimizer is what it was before.

        Args:
            state_dict: the state.
            strict: everything else must be there.
        """
        unstarted = set(state_dict.get(UNSTARTED) or ())
        optim = dict(state_dict[OPTIM])
        states = optim.get("state", {})
        optim["state"] = {fqn: {} if fqn in unstarted else values for fqn, values in states.items()}
        with loading(self.optimizers):
            set_state_dict(
                self.model,
                self.optimizers,
                model_state_dict=state_dict[MODEL],
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
        set_model_state_dict(self.model, model_tree)


def current_rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def rank_key(rank: int) -> str:
    """Return the key under which a rank's own state is kept."""
    return f"rank{rank}"


def _packed(state: dict[str, Any]) -> Any:
    """Return a state as what DCP keeps as it is: one object, unless it holds tensors.

    DCP looks into dicts, turns their integer keys into text and drops empty ones; into tuples it does not look.
    """
    return state if any(True for _ in _tensors(state)) else (copy.deepcopy(state),)


def _unpacked(value: Any) -> dict[str, Any]:
    state: dict[str, Any] = value[0] if isinstance(value, tuple) else value
    return state


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def digests_of(state: TrainState, tree: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each extra that is kept as one object; equal ones have equal digests."""
    shown = {name: repr(tree[name][0]) for name in state.shared if isinstance(tree[name], tuple)}
    without_addresses = {name: re.sub(r" at 0x[0-9a-f]+", "", text) for name, text in shown.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in without_addresses.items()}
