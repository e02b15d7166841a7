"""Names of numbered checkpoint directories, and which entries of a folder are such steps. Reads nothing.

Known names are those of torchtitan, Megatron, DeepSpeed, Trainer, verl, Lightning, composer and bare numbers. A name
must match whole: `step_500.tmp`, `tmp_step_500` or `old_500` are somebody's work in progress and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_STEP = re.compile(
    r"(?:epoch[_=](?P<epoch>\d+)[-_])?(?:global_?step|step|iter|checkpoint)[-_=]?(?P<step>\d+)(?:\.ckpt)?"
    r"|ep(?P<epoch2>\d+)-ba(?P<batch>\d+)"
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


def in_step_order(names: Iterable[str]) -> list[str]:
    """Return the names that are steps, lowest first; names of one step in alphabetical order."""
    numbered = [(number, name) for name in names if (number := step_number(name)) is not None]
    return [name for _, name in sorted(numbered)]
