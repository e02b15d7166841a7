"""Names of entries that belong to one rank each, as families: one name with the rank's number left open."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
