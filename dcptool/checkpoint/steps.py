"""Names of numbered checkpoint directories, and which entries of a folder are such steps. Reads nothing.

Known names are those of torchtitan, Megatron, DeepSpeed, Trainer, verl, Lightning, NeMo, composer, torchtune and bare
numbers. A name must match whole: `step_500.tmp`, `tmp_step_500` or `old_500` are somebody's work in progress and left
alone. Of folders whose names are none of these, those of one pattern may be steps: `common_pattern`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_MAX_DIGITS = 18
_WORDS = re.compile(
    r"(?:epoch[_=](?P<epoch>\d+)[-_])?(?:global_?step|step|iter|checkpoint)[-_=]?(?P<step>\d+)(?:\.ckpt)?"
    r"|ep(?P<epoch2>\d+)-ba(?P<batch>\d+)"
    r"|(?:dist_)?epoch[-_]?(?P<epoch3>\d+)"
    r"|hpc_ckpt_(?P<hpc>\d+)\.ckpt"
    r"|(?P<release>release)"
    r"|(?P<bare>\d+)"
)
_VALUE = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|-?inf"
_PAIR = rf"[A-Za-z_][\w.]*=(?:{_VALUE})"
_PAIRS = re.compile(
    rf"(?:.+--|[^=]+-(?=.*\.ckpt$))?(?P<pairs>{_PAIR}(?:-{_PAIR})*)(?:-last)?(?:-v(?P<version>\d+))?(?:\.ckpt)?"
)
"""Lightning's and NeMo's names: metrics and counters, a name before, and `-vK` where the name was taken already."""
_ONE_PAIR = re.compile(rf"([A-Za-z_][\w.]*)=({_VALUE})")
_COUNTERS = ("step", "global_step", "consumed_samples", "epoch")
"""Keys whose value numbers a step; the first that is there does."""
_RARE = re.compile(r"release|(?:dist_)?epoch[-_]?\d+")
_IN_WORK = re.compile(
    r"(?i)(?:.*[-_.])?(?:tmp|temp|old|bak|backup|copy|partial|incomplete|unfinished|broken|corrupt|deleted)(?:[-_.\d].*)?"
    r"|\..*"
)
_COPY = re.compile(r"(?:global_?step|step|iter|checkpoint|epoch|ep)[-_=]?\d+[-_.].+")
"""What somebody made of a known step: `checkpoint-2-ws3`."""
_NO_STEPS = re.compile(
    r"(?i)rank|seed|fold|version|run|job|trial|node|host|part|shard|stage|expert|layer|group"
    r"|(?:^|[-_.])(?:tp|pp|dp|cp|ep|ws|world|gpus?)(?:[-_.=]|$)"
)
"""What else is numbered: parts of a checkpoint, jobs, copies for another number of ranks."""
_OF_STEPS = re.compile(r"(?i)step|iter|epoch|ckpt|checkpoint|snapshot")
_STANDS_ALONE = re.compile(rf"(?:.*(?:[-_=.@]|{_OF_STEPS.pattern[4:]}))?", re.IGNORECASE)
"""What may stand before the number: it is none of a name such as `llama2` or `fsdp2`."""


class _Name(NamedTuple):
    """What a step's name says: its epoch, the number of the step in it, the number it stands for, its version."""

    epoch: int
    step: int
    number: int
    version: int = 0


def _read(name: str) -> _Name | None:
    """Return what a name says, None if it is no step's."""
    match = _WORDS.fullmatch(name)
    if match:
        if any(digits and digits.isdigit() and len(digits) > _MAX_DIGITS for digits in match.groups()):
            return None
        epoch = int(match["epoch"] or match["epoch2"] or match["epoch3"] or 0)
        step = int(match["step"] or match["batch"] or match["hpc"] or match["bare"] or 0)
        return _Name(epoch, step, epoch if match["epoch3"] else step)
    match = _PAIRS.fullmatch(name)
    if match is None or _IN_WORK.fullmatch(name):
        return None
    pairs = dict(_ONE_PAIR.findall(match["pairs"]))
    counts = {key: _whole(pairs[key]) for key in _COUNTERS if key in pairs}
    version = int(match["version"] or 0) if len(match["version"] or "") <= _MAX_DIGITS else None
    known = [count for count in counts.values() if count is not None]
    if len(known) < len(counts) or not known or version is None:
        return None
    steps = [count for key, count in counts.items() if key != "epoch" and count is not None]
    return _Name(counts.get("epoch") or 0, (steps or [0])[0], known[0], version)


def _whole(value: str) -> int | None:
    """Return a counter's value, None if it is none; consumed samples are printed as 2400.0."""
    digits = value.removesuffix(".0")
    return int(digits) if digits.isdigit() and len(digits) <= _MAX_DIGITS else None


def step_number(name: str) -> int | None:
    """Return the step a directory name stands for, None if it is no such name.

    >>> step_number("iter_0000500"), step_number("epoch=1-step=500.ckpt"), step_number("step_500.tmp")
    (500, 500, None)
    """
    read = _read(name)
    return read.number if read else None


def step_order(name: str) -> tuple[int, int, int, tuple[str | int, ...]]:
    """Return what steps are sorted by: epoch (0 where the name has none), step, version, name with its numbers.

    >>> step_order("epoch_2_step_100") > step_order("epoch_1_step_500")
    True
    """
    read = _read(name) or _Name(0, 0, 0)
    return read.epoch, read.step, read.version, _natural(name)


def _natural(name: str) -> tuple[str | int, ...]:
    """Return a name cut so that the numbers in it compare as numbers: text and numbers take turns."""
    return tuple(int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d{1,18})", name)))


def in_step_order(names: Iterable[str]) -> list[str]:
    """Return the names that are steps, lowest first; see `step_order`."""
    return sorted((name for name in names if step_number(name) is not None), key=step_order)


def is_rare(name: str) -> bool:
    """Tell whether a step's name is one that other folders have too: one counts only with a checkpoint in it."""
    return _RARE.fullmatch(name) is not None


class Pattern(NamedTuple):
    """Names that differ in one number only: what stands before and after it."""

    before: str
    after: str

    def number(self, name: str) -> int | None:
        """Return the number in a name, None if it does not fit."""
        fits = name.startswith(self.before) and name.endswith(self.after)
        digits = name[len(self.before) : len(name) - len(self.after)] if fits else ""
        return int(digits) if digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS else None

    @property
    def is_of_steps(self) -> bool:
        """Whether a word in it is one that names steps."""
        return _OF_STEPS.search(self.before + self.after) is not None

    def __str__(self) -> str:
        return f"{self.before}N{self.after}"


def common_pattern(names: Iterable[str]) -> Pattern | None:
    """Return the one pattern of names that may be steps nobody has a name for; None where there is none, or a choice.

    At least two names differ in one number and in nothing else. Numbers that only count from 0 or 1, as parts of one
    checkpoint are counted, are steps only where a word in the name says so; sizes (`llama-7b`) never are.

    >>> str(common_pattern(["weights-at-100", "weights-at-200", "logs"]))
    'weights-at-N'
    """
    alike: dict[str, list[list[str]]] = {}
    for name in names:
        if not (_IN_WORK.fullmatch(name) or _COPY.fullmatch(name)):
            alike.setdefault(re.sub(r"\d+", "N", name), []).append(re.split(r"(\d+)", name))
    found = [pattern for cut in alike.values() if (pattern := _one_differs(cut))]
    return found[0] if len(found) == 1 else None


def _one_differs(cut: list[list[str]]) -> Pattern | None:
    """Return the pattern of names, cut at their numbers, of which one number differs and nothing else."""
    differs = [at for at, column in enumerate(zip(*cut, strict=True)) if len(set(column)) > 1]
    if len(differs) != 1:
        return None
    at, first = differs[0], cut[0]
    pattern = Pattern("".join(first[:at]), "".join(first[at + 1 :]))
    numbers = {pattern.number("".join(name)) for name in cut}
    whole = {number for number in numbers if number is not None}
    return pattern if whole == numbers and _may_be_steps(pattern, whole) else None


def _may_be_steps(pattern: Pattern, numbers: set[int]) -> bool:
    if _NO_STEPS.search(pattern.before + pattern.after) or pattern.after[:1].isalpha():
        return False
    return _STANDS_ALONE.fullmatch(pattern.before) is not None and (pattern.is_of_steps or max(numbers) > len(numbers))
