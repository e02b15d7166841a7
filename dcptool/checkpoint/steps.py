"""Names of numbered checkpoint directories, and which entries of a folder are such steps. Reads nothing.

Known names are those of torchtitan, Megatron, DeepSpeed, Trainer, verl, Lightning, composer and bare numbers. A name
must match whole: `step_500.tmp`, `tmp_step_500` or `old_500` are somebody's work in progress and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_STEP = re.compile(
    r"(?:epoch[_=](?P<epoch>\d{1,18})[-_])?(?:global_?step|step|iter|checkpoint)[-_=]?(?P<step>\d+)(?:\.ckpt)?"
    r"|ep(?P<epoch2>\d{1,18})-ba(?P<batch>\d+)"
    r"|(?P<bare>\d+)"
)


def step_number(name: str) -> int | None:
    """Return the step a directory name stands for, None if it is no such name.

    >>> step_number("iter_0000500"), step_number("epoch=1-step=500.ckpt"), step_number("step_500.tmp")
    (500, 500, None)
    """
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    digits = match["step"] or match["batch"] or match["bare"]
    return int(digits) if len(digits) <= 18 else None


def step_order(name: str) -> tuple[int, int, str]:
    """Return what steps are sorted by: epoch (0 where the name has none), step, name.

    >>> step_order("epoch_2_step_100") > step_order("epoch_1_step_500")
    True
    """
    match = _STEP.fullmatch(name)
    epoch = (match["epoch"] or match["epoch2"]) if match else None
    return int(epoch or 0), step_number(name) or 0, name


def in_step_order(names: Iterable[str]) -> list[str]:
    """Return the names that are steps, lowest first; see `step_order`."""
    return sorted((name for name in names if step_number(name) is not None), key=step_order)
