"""What to say of a file with one rank's parts of tensors, alone: whose it is, how much it has, where the rest is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import volume
from dcptool.pickles.sharded import Sharded
from dcptool.words import plural

_NAMED = re.compile(r".*world_size_(\d{1,7})_rank_(\d{1,7})\.pt")
_GATHER = "Gather the files of all ranks; or save whole tensors (full_tensor(), FULL_STATE_DICT), or with dcp.save."


class OneRank(NamedTuple):
    """What there is to say.

    Attributes:
        whose: "rank 3 of 8"; "" where the tensors do not tell, or are whole.
        evidence: what that is concluded from.
        problems: that the other ranks' parts are not there, if any is needed.
    """

    whose: str
    evidence: str
    problems: tuple[Finding, ...]


def of_one_rank(parts: Mapping[str, Sharded], name: str, folder: str) -> OneRank:
    """Say what a file is that holds parts of tensors.

    Args:
        parts: by fqn.
        name: of the file.
        folder: where it lies.
    """
    n_ranks = max(part.n_ranks for part in parts.values())
    ranks = Counter(part.rank for part in parts.values() if part.n_ranks == n_ranks and part.rank is not None)
    named = _NAMED.fullmatch(name)
    if named:
        whose = f"rank {int(named[2])} of {int(named[1])}"
    else:
        whose = f"rank {ranks.most_common(1)[0][0]} of {n_ranks}" if ranks else ""
    total = sum(volume(part.shape) for part in parts.values())
    held = sum(volume(view.shape) for part in parts.values() for _, view in part.pieces)
    evidence = f"{plural(len(parts), 'tensor')} cut over ranks: {share_of(held, total)} of these tensors"
    partial = next((fqn for fqn, part in parts.items() if _holds(part) < volume(part.shape)), None)
    if partial is None:
        return OneRank("", evidence, ())
    message = (
        f"{whose or 'one rank'} alone: it holds {share_of(held, total)} of {plural(len(parts), 'tensor')}, such as "
    )
    message += f"{partial!r}; the rest is in other ranks' files"
    step = f"Name the folder with the files of all ranks: {folder}" if named else _GATHER
    return OneRank(whose, evidence, (Finding.of("one-rank", message, name, partial, next_step=step),))


def _holds(part: Sharded) -> int:
    return sum(volume(view.shape) for _, view in part.pieces)


def share_of(held: int, total: int) -> str:
    """Say what part of a whole something is.

    >>> share_of(2, 16), share_of(3, 16), share_of(0, 16)
    ('1/8', '19%', 'nothing')
    """
    if not held:
        return "nothing" if total else "all"
    times = round(total / held)
    return f"1/{times}" if times > 1 and abs(total / held - times) < 0.02 * times else f"{held / total:.0%}"
