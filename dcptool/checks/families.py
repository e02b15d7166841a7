"""Entries that come in families, of which one is missing: per-rank objects, Megatron's `shard_i_n`."""

from __future__ import annotations

import re

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.families import per_rank_families
from dcptool.checkpoint.findings import Finding

_SHARD = re.compile(r"/shard_(\d{1,9})_(\d{1,9})$")


def family_problems(checkpoint: Checkpoint) -> list[Finding]:
    """Return families of entries that have gaps."""
    return [*_rank_gaps(checkpoint), *_shard_gaps(checkpoint)]


def _rank_gaps(checkpoint: Checkpoint) -> list[Finding]:
    problems = []
    for pattern, ranks in per_rank_families(checkpoint).items():
        if 1 < len(ranks) <= max(ranks):
            first = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
            message = (
                f"{pattern!r} is there for {len(ranks):,} ranks, the last {max(ranks):,}, but not for rank {first}"
            )
            step = "A resume of that rank starts with fresh state of this kind."
            problems.append(Finding.of("family-gap", message, fqn=pattern, next_step=step))
    return problems


def _shard_gaps(checkpoint: Checkpoint) -> list[Finding]:
    """Megatron stores an object of n parts as entries `<fqn>/shard_<i>_<n>`, i from 0."""
    families: dict[tuple[str, int], set[int]] = {}
    for name in checkpoint:
        match = _SHARD.search(name)
        if match:
            families.setdefault((name[: match.start()], int(match[2])), set()).add(int(match[1]))
    problems = []
    for (name, count), parts in families.items():
        if len(parts) < count and count < 1 << 20:
            first = next(part for part in range(count) if part not in parts)
            message = f"{name!r} has {len(parts):,} of its {count:,} shards; shard_{first}_{count} is missing"
            problems.append(Finding.of("shard-gap", message, fqn=name))
    return problems
