"""The state of optimizers, before their first step too: what it will look like, found without stepping them.

`get_state_dict` and `set_state_dict` step an optimizer that has no state yet, to make it one: its step counter moves
and weights may. Here a copy of the optimizer is stepped instead, over parameters of zeros, one at a time.

Source: torch 2.13, distributed/checkpoint/state_dict.py (`_init_optim_state`), optim/optimizer.py.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from dcptool.errors import UnsupportedError

Values = dict[str, Any]
"""What an optimizer keeps for one parameter."""
_PLACEHOLDER: Any = "dcptool"
"""A key in the state of an optimizer that shall not look as if it had none."""


@contextmanager
def filled(optimizers: Sequence[Optimizer]) -> Iterator[list[Values]]:
    """Give every parameter that can be trained a state for a while; those that have none get zeros.

    Yields:
        The states of zeros. At the end, whatever happens, each optimizer has the state it had before: the same tensors,
        untouched, in the same order.

    Raises:
        UnsupportedError: an optimizer's state cannot be found out without really stepping it.
    """
    with ExitStack() as stack:
        added: list[Values] = []
        for optimizer in optimizers:
            before = dict(optimizer.state)
            stack.callback(_reset, optimizer, before)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and not optimizer.state.get(parameter):
                        values = _blank(optimizer, group, parameter)
                        if values:
                            optimizer.state[parameter] = values
                            added.append(values)
            if (
                not optimizer.state
            ):  # it keeps none; torch would step it all the same, but not where there are gradients
                stack.enter_context(_gradient(optimizer))
        yield added


@contextmanager
def loading(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let torch load states as they are, without a step first; if that fails, each optimizer has what it had before."""
    before = [(dict(optimizer.state), [dict(group) for group in optimizer.param_groups]) for optimizer in optimizers]
    for optimizer in optimizers:
        if not optimizer.state:
            optimizer.state[_PLACEHOLDER] = {"": 0}
    try:
        with _keeping_dtypes():
            yield
    except BaseException:
        for optimizer, (state, groups) in zip(optimizers, before, strict=True):
            _reset(optimizer, state)
            optimizer.param_groups[:] = groups
        raise
    for optimizer in optimizers:  # before a parameter's first step there is nothing, not even an empty state
        for parameter in [parameter for parameter, values in optimizer.state.items() if not values]:
            del optimizer.state[parameter]
        optimizer.state.pop(_PLACEHOLDER, None)


@contextmanager
def _keeping_dtypes() -> Iterator[None]:
    """Let optimizers load their state in the dtype that it has; torch casts it to the parameter's.

    That rounds float32 moments of bfloat16 parameters, and makes numbers of the codes of 8-bit optimizers.
    """
    name = "_process_value_according_to_param_policy"
    real: Any = getattr(Optimizer, name, None)
    if real is None:
        yield
        return

    def keep(param: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = real(param, value, *args, **kwargs)
        return made if made.dtype == value.dtype else value.to(device=made.device)

    setattr(Optimizer, name, staticmethod(keep))
    try:
        yield
    finally:
        setattr(Optimizer, name, staticmethod(real))


def _reset(optimizer: Optimizer, state: dict[Any, Values]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)


def _blank(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> Values:
    """Return what an optimizer will keep for a parameter once it has been stepped, its tensors filled with zeros."""
    twin = torch.zeros_like(parameter, requires_grad=True)
    twin.grad = torch.zeros_like(twin)
    # Neither __init__ nor copy: the one needs arguments that nobody kept, the other loses attributes.
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler's wrapper, which steps the original
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": [twin]}]
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step
    try:
        step(copy)
    except Exception as error:
        name = type(optimizer).__name__
        raise UnsupportedError(
            f"{name} has no state yet, and a copy cannot be stepped over zeros ({type(error).__name__}: {error}).",
            next_step="Save after its first step; restore with an optimizer that has taken one.",
        ) from error
    values = copy.state.get(twin, {})
    return {name: torch.zeros_like(value) if torch.is_tensor(value) else value for name, value in values.items()}


@contextmanager
def _gradient(optimizer: Optimizer) -> Iterator[None]:
    """Make sure that some parameter has a gradient, which keeps torch from making a state by a step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters or any(parameter.grad is not None for parameter in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None
