"""Does the nested path of an entry give its name? Names are paths joined with dots."""

from __future__ import annotations

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding


def path_problems(checkpoint: Checkpoint) -> list[Finding]:
    """Return entries whose path and name disagree, or that have no path where others do, as one finding each."""
    if not checkpoint.format.paths_apart:
        return []
    wrong = [
        entry.fqn
        for entry in checkpoint.values()
        if entry.path is not None and ".".join(map(str, entry.path)) != entry.fqn
    ]
    problems = []
    if wrong:
        message = f"the nested paths of {_named(wrong)} do not give their names; a conversion would put them elsewhere"
        problems.append(Finding.of("path-differs", message, fqn=wrong[0]))
    without = [entry.fqn for entry in checkpoint.values() if entry.path is None]
    if without and len(without) < len(checkpoint):
        message = f"{_named(without)} have no nested path, though others do; a conversion keeps their flat names"
        problems.append(Finding.of("path-missing", message, fqn=without[0]))
    return problems


def _named(fqns: list[str]) -> str:
    return repr(fqns[0]) if len(fqns) == 1 else f"{len(fqns):,} entries (the first {fqns[0]!r})"
