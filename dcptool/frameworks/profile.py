"""What a profile may say of a trainer's steps, and what it makes of one: which files belong to it, and which it lacks.

Knows names and sizes, and asks for what single small values say; whether a file is what it should be
`checks.side_files` looks at.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.frameworks.values import MAX_RANKS

RANK = "{rank}"
MAX_DIGITS = 8
"""No rank has a longer number."""
_PLACE = re.compile(r"\{(\w+)\}")
Places = Mapping[str, Sequence[str]]
"""What the words in braces of a file's name may be: `rank` → "0", "1", …"""


class SavedStep(NamedTuple):
    """A step as a profile sees it.

    Attributes:
        name: of its folder.
        files: bytes of every file in it, by name relative to it.
        parts: its checkpoints that opened, by their place in it ("" = the folder itself).
        value: returns what the pickle of a file holds, as stand-ins; None for what cannot be read. See `values.reader`.
    """

    name: str
    files: Mapping[str, int]
    parts: Mapping[str, Checkpoint]
    value: Callable[[str], Any] = lambda name: None

    @property
    def n_ranks(self) -> int:
        """The most ranks that saved a part of it; 1 where no file tells."""
        return max((part.world_size or 1 for part in self.parts.values()), default=1)

    @property
    def folders(self) -> set[str]:
        """Names of the folders right below it that hold files."""
        return {name.partition("/")[0] for name in self.files if "/" in name}

    def has(self, name: str) -> bool:
        """Tell whether a file is there, or for a name that ends with a slash a folder with files."""
        return name[:-1] in self.folders if name.endswith("/") else name in self.files


class Follow(str, Enum):
    """What becomes of a file of a step when a job goes on with another number of ranks."""

    CARRY = "as it is"
    RESHARD = "resharded"
    PER_RANK = "each rank its own; ranks that are new have none"
    STALE = "not: it would be wrong"
    FIXED = "not: as many ranks must load it as saved it"


class Extra(NamedTuple):
    """A further file that a trainer may leave.

    Attributes:
        pattern: of its name.
        holds: what is in it, for messages.
        follows: what becomes of it with another number of ranks.
        regular: a job that keeps one has it in each of its steps, under the same name, and cannot load a step without.
    """

    pattern: str
    holds: str
    follows: Follow = Follow.CARRY
    regular: bool = False


class Needed(NamedTuple):
    """Something a step has beside others: a file, one per rank, or the folder of a part.

    Attributes:
        names: alternatives, one of which is enough; `{rank}` stands for each rank, other words in braces for what the
            profile's `places` give, a slash at the end for a folder.
        holds: what is in it, for messages.
        resumes: a step saved for its weights alone lacks it, and all others so marked; else each step has it.
        unless: an entry that holds the same instead.
        given: a file or folder without which it need not be there.
        fixed: only as many ranks as saved it can load it.
        anew: a rank that finds none goes on, and begins anew what is in it.
    """

    names: tuple[str, ...]
    holds: str
    resumes: bool = False
    unless: str = ""
    given: str = ""
    fixed: bool = False
    anew: bool = False

    def follows(self, form: str) -> Follow:
        """Return what becomes of the files of one of its names with another number of ranks."""
        if self.fixed:
            return Follow.FIXED
        if form.endswith("/"):
            return Follow.RESHARD
        return Follow.PER_RANK if RANK in form else Follow.CARRY

    def missing(self, step: SavedStep, places: Places) -> list[str]:
        """Return what of it is not there: names, filled in; nothing if it is, or has no need to be."""
        if self.given and not step.has(self.given):
            return []
        if self.unless and any(self.unless in part for part in step.parts.values()):
            return []
        wanted = [expanded(form, places) for form in self.names]
        in_folders = any(step.parts)
        lacking = [(names, [name for name in names if not step.has(name)]) for names in wanted]

        def fits(found: tuple[list[str], list[str]]) -> tuple[bool, int, bool]:
            names, gone = found
            return len(gone) == len(names), len(gone), names[0].endswith("/") is not in_folders

        return [] if any(not gone for _, gone in lacking) else min(lacking, key=fits)[1]

    def is_absent(self, step: SavedStep, places: Places) -> bool:
        """Tell whether nothing at all of it is there."""
        return not any(step.has(name) for form in self.names for name in expanded(form, places))

    def rank_of(self, name: str) -> int | None:
        """Return whose a file is, of which each rank has one; None for one of no rank."""
        found = (pattern_of(form).fullmatch(name) for form in self.names if RANK in form)
        return next((int(match[1]) for match in found if match and len(match[1]) < MAX_DIGITS), None)

    def of_first_rank(self) -> tuple[str, str] | None:
        """Return the names of rank 0's file beside others and where there is no other rank; None if they are one."""
        several = [form for form in self.names if RANK in form]
        alone = [form for form in self.names if RANK not in form and self.rank_of(form) is None]
        return (several[0].replace(RANK, "0"), alone[0]) if several and alone else None

    def matches(self, name: str) -> bool:
        """Tell whether a file is, or is one of, this."""
        return any(pattern_of(form).fullmatch(name) for form in self.names)


def ranks_of_parts(step: SavedStep) -> Places:
    """Return the ranks that saved a part of a step, as its checkpoints' files tell."""
    return {"rank": numbered(step.n_ranks)}


class Value(NamedTuple):
    """A value in a file of a step: the file, and the keys that lead to it, `*` for every one."""

    file: str
    keys: tuple[str, ...]


class Profile(NamedTuple):
    """What a step of one trainer consists of.

    Attributes:
        name: of the trainer.
        source: where this is from: package, version, files.
        recognises: tells a step of it.
        needed: what each step has beside the parts that are found by themselves.
        groups: first parts of the names of entries that only a step one can resume from has.
        extras: further files it may leave.
        places: what the words in braces are in a step; by default its ranks.
        last_written: the file of a step that comes after all others; "" where none does.
        best: where a step keeps the path of the best one so far; None where none does.
        counter: pattern of names whose number counts saves, and begins anew when a job goes on.
        progress: what tells the order of such steps, as it only grows.
        taken: pattern of names in a run directory that it takes for steps of its own, and what it does; None: none.
        tracker: the file in a run directory by which it finds its newest step, by number; "" where it lists the folder.
        elsewhere: what it does on another number of data-parallel ranks, and must be told; "" where it just goes on.
    """

    name: str
    source: str
    recognises: Callable[[SavedStep], bool]
    needed: tuple[Needed, ...] = ()
    groups: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    places: Callable[[SavedStep], Places] = ranks_of_parts
    last_written: str = ""
    best: Value | None = None
    counter: str = ""
    progress: Value | None = None
    taken: tuple[str, str] | None = None
    tracker: str = ""
    elsewhere: str = ""

    def holds(self, name: str) -> str:
        """Return what a file of the step holds; "" for one that is not known."""
        known = [needed.holds for needed in self.needed if needed.matches(name)]
        known += [extra.holds for extra in self.extras if re.fullmatch(extra.pattern, name)]
        return known[0] if known else ""

    def follows(self, name: str) -> Follow | None:
        """Return what becomes of a file, or of the folder of a part, with another number of ranks; None if unknown."""
        forms = ((needed, form) for needed in self.needed for form in needed.names if pattern_of(form).fullmatch(name))
        known = [needed.follows(form) for needed, form in forms]
        known += [extra.follows for extra in self.extras if re.fullmatch(extra.pattern, name)]
        return known[0] if known else None

    def rank_of(self, name: str) -> int | None:
        """Return whose a file is, of which each rank has one: by the last number in the name of a further file."""
        known = (rank for needed in self.needed if (rank := needed.rank_of(name)) is not None)
        extra = next((extra for extra in self.extras if re.fullmatch(extra.pattern, name)), None)
        last = re.findall(r"\d+", name)[-1:] if extra and extra.follows is Follow.PER_RANK else []
        return next(known, int(last[0]) if last and len(last[0]) < MAX_DIGITS else None)

    def name_with(self, n_ranks: int, name: str) -> str:
        """Return the name that a file has in a step of so many ranks: some trainers give it another if there is one."""
        for pair in filter(None, (needed.of_first_rank() for needed in self.needed)):
            if name in pair:
                return pair[0] if n_ranks > 1 else pair[1]
        return name

    def needs(self, name: str) -> bool:
        """Tell whether a file is one that each step has, or each that can be resumed from."""
        return any(needed.matches(name) for needed in self.needed)

    def is_regular(self, name: str) -> bool:
        """Tell whether a file is one that either all steps of a job have or none."""
        return any(extra.regular and re.fullmatch(extra.pattern, name) for extra in self.extras)

    def missing(self, step: SavedStep) -> list[tuple[str, str]]:
        """Return what should be in a step and is not, as (name, what it holds)."""
        places = self.places(step)
        for_weights = self._is_for_weights(step, places)
        wanted = [needed for needed in self.needed if not (needed.resumes and for_weights)]
        return [(name, needed.holds) for needed in wanted for name in needed.missing(step, places)]

    def goes_on_without(self, name: str) -> bool:
        """Tell whether a rank that does not find a file goes on, and begins anew what is in it."""
        return any(needed.anew and needed.matches(name) for needed in self.needed)

    def lacks(self, step: SavedStep) -> list[str]:
        """Return what a step that was saved for its weights alone lacks for a resume, in words; nothing of others."""
        for_weights = self._is_for_weights(step, self.places(step))
        found = [needed.holds for needed in self.needed if needed.resumes and for_weights]
        parts = {part for checkpoint in step.parts.values() for fqn in checkpoint for part in fqn.split(".")}
        return found + [group for group in self.groups if group not in parts]

    def _is_for_weights(self, step: SavedStep, places: Places) -> bool:
        return all(needed.is_absent(step, places) for needed in self.needed if needed.resumes)


def expanded(form: str, places: Places) -> list[str]:
    """Return the names that a form stands for: all combinations of what its words in braces may be.

    None of more than MAX_RANKS: numbers that damage or malice made are no reason to count that far.
    """
    words = list(dict.fromkeys(_PLACE.findall(form)))
    choices = [places.get(word, ()) for word in words]
    found: list[str] = []
    if math.prod(map(len, choices)) > MAX_RANKS:
        return found
    for chosen in itertools.product(*choices):
        name = form
        for word, value in zip(words, chosen, strict=True):
            name = name.replace(f"{{{word}}}", value)
        found.append(name)
    return found


def numbered(count: int, width: int = 0) -> tuple[str, ...]:
    """Return the numbers below a count as names have them, with zeros in front up to a width."""
    return tuple(f"{number:0{width}d}" for number in range(count))


def highest(pattern: str, names: Iterable[str]) -> int:
    """Return the highest number that the first group of a pattern finds in names it fits whole, -1 if it fits none."""
    fitting = re.compile(pattern)
    found = [int(match[1]) for name in names if (match := fitting.fullmatch(name)) and match[1]]
    return max((number for number in found if number < MAX_RANKS), default=-1)


@cache
def pattern_of(form: str) -> re.Pattern[str]:
    """Return what the names match that a form stands for."""
    pieces = re.split(r"\{(\w+)\}", form)
    fixed = [re.escape(piece) for piece in pieces[::2]]
    return re.compile(
        "".join(itertools.chain(*itertools.zip_longest(fixed, map(_stands_for, pieces[1::2]), fillvalue="")))
    )


def _stands_for(word: str) -> str:
    return r"(\d+)" if word == "rank" else ".*"


def any_of(*patterns: str) -> Callable[[Collection[str]], bool]:
    """Return what tells whether some name matches one of the patterns whole."""
    pattern = re.compile("|".join(f"(?:{one})" for one in patterns))
    return lambda names: any(map(pattern.fullmatch, names))
