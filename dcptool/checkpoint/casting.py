"""What a cast to another floating dtype does to values, and which tensors are not to be cast like the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint import dtypes

if TYPE_CHECKING:
    import numpy as np

_OPTIMIZER = re.compile(r"(?:optim|optimizer|optimiser)(?:s|_states?|_?\d+|_state_dict)?")
_MOMENTS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "momentum_buffer",
     "square_avg", "grad_avg", "acc_delta", "prev", "fp32_param")
)  # fmt: skip
"""Names of what torch's optimizers and Megatron's keep for each parameter.

Source: torch 2.13, optim/*.py; megatron-core 0.16.1, optimizer/distrib_optimizer.py.
"""
_SCALES = ("_scale_inv", "_scale", "_scales", ".scale_inv", ".scale", ".scales", "_absmax", ".absmax")
_SCALED = ("float8", "float4", "int8", "uint8")


class Loss(NamedTuple):
    """How many values of a tensor became infinite, zero or subnormal that were not, when they were cast."""

    n_infinite: int = 0
    n_zero: int = 0
    n_subnormal: int = 0

    def plus(self, other: Loss) -> Loss:
        """Return the counts of both together."""
        return Loss(*(one + more for one, more in zip(self, other, strict=True)))


NO_LOSS = Loss()
_SLICE = 1 << 15
"""Values that are looked at together: what that needs is small beside a band."""
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}
"""The bits of the exponent; float64 holds all values of the others."""
_NARROWS = {"float16": ("bfloat16", "float32", "float64"), "bfloat16": ("float32", "float64"), "float32": ("float64",)}
"""From which dtypes a value may be too large or too small for one."""


def loss_of_cast(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], stored: str, cast: str) -> Loss:
    """Count what a cast lost.

    Args:
        before: values as stored.
        after: the same after the cast.
        stored, cast: their dtypes.
    """
    found = NO_LOSS
    if stored in _NARROWS.get(cast, ()):
        old, new = before.reshape(-1), after.reshape(-1)
        for start in range(0, len(new), _SLICE):
            found = found.plus(_lost(old[start : start + _SLICE], new[start : start + _SLICE], stored, cast))
    return found


def _lost(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], stored: str, cast: str) -> Loss:
    """Count what a cast of a few values lost."""
    import numpy as np

    bits = after.view(np.uint32 if cast == "float32" else np.uint16)
    exponent = bits & _EXPONENTS[cast]
    edge = np.flatnonzero((exponent == 0) | (exponent == _EXPONENTS[cast]))
    if not len(edge):
        return NO_LOSS
    old, new = before[edge].astype(np.float64), after[edge].astype(np.float64)
    smallest = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126}[stored]
    n_infinite = np.count_nonzero(np.isinf(new) & np.isfinite(old))
    n_zero = np.count_nonzero((new == 0) & (old != 0))
    n_subnormal = np.count_nonzero((exponent[edge] == 0) & (new != 0) & (np.abs(old) >= smallest))
    return Loss(int(n_infinite), int(n_zero), int(n_subnormal))


def is_optimizer_state(fqn: str) -> bool:
    """Tell whether a tensor is what an optimizer keeps, by its name.

    >>> is_optimizer_state("optim.state.w.step"), is_optimizer_state("state.0.exp_avg"), is_optimizer_state("model.w")
    (True, True, False)
    """
    parts = fqn.split(".")
    return any(map(_OPTIMIZER.fullmatch, parts[:-1])) or not _MOMENTS.isdisjoint(parts)


def scaled(tensors: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the tensors that mean something only together with scales beside them, each with these.

    Args:
        tensors: fqn → dtype of all there are.
        names: of those asked about.
    """
    found = {}
    of_modules = {fqn.rpartition(".")[0]: fqn for fqn in tensors if "scale" in fqn.rpartition(".")[2]}
    for fqn in names:
        if tensors[fqn].startswith(_SCALED):
            beside = next((f"{fqn}{ending}" for ending in _SCALES if f"{fqn}{ending}" in tensors), None)
            if beside is None and is_small_float(tensors[fqn]):
                beside = of_modules.get(fqn.rpartition(".")[0])
            if beside and beside != fqn:
                found[fqn] = beside
    return found


def is_small_float(dtype: str) -> bool:
    """Tell whether a dtype is a floating one that is never cast, for its values are mostly scaled."""
    return dtypes.lookup(dtype).name.startswith(("float8", "float4"))
