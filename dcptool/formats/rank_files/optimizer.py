"""Which parameter each number in the state of an optimizer is: torch numbers them, group by group, in their order.

Source: torch 2.13, optim/optimizer.py, `state_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.extents import Ints


class Parameter(NamedTuple):
    """A tensor of a model that may be a parameter; two with one `place` are one that is tied."""

    fqn: str
    shape: Ints
    place: object


def names_of(
    parameters: Sequence[Parameter], groups: Sequence[Sequence[int]], shapes: Mapping[int, Ints]
) -> dict[int, str] | None:
    """Return which parameter each number of an optimizer is; None where that is not certain.

    Args:
        parameters: of the model in its order.
        groups: numbers of the parameters of each of the optimizer's groups.
        shapes: of parameters by number, where their state tells.
    """
    by_place: dict[object, Parameter] = {}
    for parameter in parameters:
        by_place.setdefault(parameter.place, parameter)
    once = list(by_place.values())
    numbers = [number for group in groups for number in group]
    if len(set(numbers)) < len(numbers):
        return None
    if len(groups) == 1 and len(numbers) == len(once):
        names = {number: parameter.fqn for number, parameter in zip(numbers, once, strict=True)}
    else:
        found = _by_shape(once, groups, shapes)
        if found is None:
            return None
        names = found
    known = {parameter.fqn: parameter.shape for parameter in once}
    fits = all(number in names and known[names[number]] == shape for number, shape in shapes.items())
    return names if fits else None


def _by_shape(
    parameters: Sequence[Parameter], groups: Sequence[Sequence[int]], shapes: Mapping[int, Ints]
) -> dict[int, str] | None:
    """Tell by shapes: all parameters of one shape are in one group, in their order, or none of them is trained."""
    if any(number not in shapes for group in groups for number in group):
        return None
    wanted = Counter(shapes[number] for group in groups for number in group)
    if any(
        shapes[number] in {shapes[other] for other in after}
        for at, group in enumerate(groups)
        for after in groups[at + 1 :]
        for number in group
    ):
        return None
    there = Counter(parameter.shape for parameter in parameters)
    if any(there[shape] != count for shape, count in wanted.items()):
        return None
    left: dict[Ints, list[str]] = {}
    for parameter in parameters:
        left.setdefault(parameter.shape, []).append(parameter.fqn)
    order = {shape: iter(fqns) for shape, fqns in left.items()}
    return {number: next(order[shapes[number]]) for group in groups for number in group}
