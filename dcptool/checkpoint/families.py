"""Names of entries that belong to one rank each, as families: one name with the rank's number left open."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

PER_RANK = re.compile(r"((?:^|[._/])(?:dp_?|local_|global_)?rank[._]?)(\d{1,9})(?=$|[._/])")


def per_rank_families(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the names that hold a rank's number: the name with an N in its place → the numbers there are."""
    families: dict[str, set[int]] = {}
    for name in names:
        match = PER_RANK.search(name)
        if match:
            pattern = f"{name[: match.start(2)]}N{name[match.end(2) :]}"
            families.setdefault(pattern, set()).add(int(match[2]))
    return families


class RankFamily(NamedTuple):
    """Entries that belong to one rank each, under one name with the rank's number left open.

    Attributes:
        form: that name; what follows the number is in it only where all entries share it.
        ranks: whose there are.
        n_entries: of all ranks.
    """

    form: str
    ranks: frozenset[int]
    n_entries: int

    @property
    def named(self) -> str:
        """The family in words: how many entries, if there are several of a rank."""
        several = self.n_entries > len(self.ranks)
        return f"{self.form} ({self.n_entries:,} entries)" if several else self.form


def per_rank_state(names: Iterable[str]) -> list[RankFamily]:
    """Return the entries that belong to one rank each, all of one data loader as one.

    >>> per_rank_state(["dl.rank0.at", "dl.rank0.seed", "dl.rank1.at", "dl.rank1.seed"])[0].named
    'dl.rankN.* (4 entries)'
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = PER_RANK.search(name)
        if match:
            found.setdefault(name[: match.start(2)], []).append((int(match[2]), name[match.end(2) :]))
    families = []
    for before, entries in found.items():
        rests = {rest for _, rest in entries}
        rest = next(iter(rests)) if len(rests) == 1 else ".*"
        families.append(RankFamily(f"{before}N{rest}", frozenset(rank for rank, _ in entries), len(entries)))
    return families


def grouped(names: Iterable[str]) -> list[str]:
    """Return names with those of single ranks as one for each family.

    >>> grouped(["step", "dl.rank0.at", "dl.rank1.at"])
    ['step', 'dl.rankN.at of 2 ranks']
    """
    families: dict[str, list[str]] = {}
    for name in names:
        match = PER_RANK.search(name)
        families.setdefault(name[: match.start(2)] if match else name, []).append(name)
    told = []
    for members in families.values():
        family = next(iter(per_rank_state(members)), None) if len(members) > 1 else None
        told.append(f"{family.named} of {len(family.ranks)} ranks" if family else members[0])
    return told
