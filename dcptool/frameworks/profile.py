"""What a profile may say of a trainer's steps, and what it makes of one: which files belong to it, and which it lacks.

Knows names and sizes only; whether a file is what it should be `checks.side_files` looks at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint

RANK = "{rank}"


class SavedStep(NamedTuple):
    """A step as a profile sees it.

    Attributes:
        name: of its folder.
        files: bytes of every file in it, by name relative to it.
        parts: its checkpoints that opened, by their place in it ("" = the folder itself).
    """

    name: str
    files: Mapping[str, int]
    parts: Mapping[str, Checkpoint]

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


class Needed(NamedTuple):
    """Something a step has beside others: a file, one per rank, or the folder of a part.

    Attributes:
        names: alternatives, one of which is enough; `{rank}` stands for each rank, a slash at the end for a folder.
        holds: what is in it, for messages.
        resumes: a step saved for its weights alone lacks it, and all others so marked; else each step has it.
        unless: an entry that holds the same instead.
        given: a file or folder without which it need not be there.
    """

    names: tuple[str, ...]
    holds: str
    resumes: bool = False
    unless: str = ""
    given: str = ""

    def missing(self, step: SavedStep) -> list[str]:
        """Return what of it is not there: names, with ranks filled in; nothing if it is, or has no need to be."""
        if self.given and not step.has(self.given):
            return []
        if self.unless and any(self.unless in part for part in step.parts.values()):
            return []
        lacking = [[name for name in expanded(form, step.n_ranks) if not step.has(name)] for form in self.names]
        in_folders = any(step.parts)

        def fits(names: list[str]) -> tuple[int, bool]:
            return len(names), names[0].endswith("/") is not in_folders

        return [] if any(not names for names in lacking) else min(lacking, key=fits)

    def is_absent(self, step: SavedStep) -> bool:
        """Tell whether nothing at all of it is there."""
        return not any(step.has(name) for form in self.names for name in expanded(form, step.n_ranks))

    def matches(self, name: str) -> bool:
        """Tell whether a file is, or is one of, this."""
        return any(re.fullmatch(re.escape(form).replace(re.escape(RANK), r"\d+"), name) for form in self.names)


class Profile(NamedTuple):
    """What a step of one trainer consists of.

    Attributes:
        name: of the trainer.
        source: where this is from: package, version, files.
        recognises: tells a step of it.
        needed: what each step has beside the parts that are found by themselves.
        groups: first parts of the names of entries that only a step one can resume from has.
        extras: further files it may leave: pattern of the name → what is in it.
    """

    name: str
    source: str
    recognises: Callable[[SavedStep], bool]
    needed: tuple[Needed, ...] = ()
    groups: tuple[str, ...] = ()
    extras: tuple[tuple[str, str], ...] = ()

    def holds(self, name: str) -> str:
        """Return what a file of the step holds; "" for one that is not known."""
        known = [needed.holds for needed in self.needed if needed.matches(name)]
        known += [holds for pattern, holds in self.extras if re.fullmatch(pattern, name)]
        return known[0] if known else ""

    def missing(self, step: SavedStep) -> list[tuple[str, str]]:
        """Return what should be in a step and is not, as (name, what it holds)."""
        wanted = [needed for needed in self.needed if not (needed.resumes and self._is_for_weights(step))]
        return [(name, needed.holds) for needed in wanted for name in needed.missing(step)]

    def lacks(self, step: SavedStep) -> list[str]:
        """Return what a step that was saved for its weights alone lacks for a resume, in words; nothing of others."""
        found = [needed.holds for needed in self.needed if needed.resumes] if self._is_for_weights(step) else []
        parts = {part for checkpoint in step.parts.values() for fqn in checkpoint for part in fqn.split(".")}
        return found + [group for group in self.groups if group not in parts]

    def _is_for_weights(self, step: SavedStep) -> bool:
        return all(needed.is_absent(step) for needed in self.needed if needed.resumes)


def expanded(form: str, n_ranks: int) -> list[str]:
    """Return the names that a form stands for."""
    return [form.replace(RANK, str(rank)) for rank in range(n_ranks)] if RANK in form else [form]


def any_of(*patterns: str) -> Callable[[Collection[str]], bool]:
    """Return what tells whether some name matches one of the patterns whole."""
    pattern = re.compile("|".join(f"(?:{one})" for one in patterns))
    return lambda names: any(map(pattern.fullmatch, names))
