"""Look at a run directory, and plan what is to be deleted."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from dcptool.checkpoint.findings import Finding
from dcptool.errors import CheckpointNotFoundError, StorageError, UnsupportedError
from dcptool.ops.prune.plan import PrunePlan, plan_prune
from dcptool.ops.verify.verdict import DEFAULTS, VerifyOptions
from dcptool.ops.verify.verify import verify
from dcptool.runs.best import best_steps
from dcptool.runs.directory import Run, listed, runs_at
from dcptool.runs.lease import held
from dcptool.runs.pointers import read_pointers
from dcptool.storage import Storage, locate


def make_plan(
    run_dir: str | os.PathLike[str],
    keep: int,
    options: VerifyOptions = DEFAULTS,
    *,
    archive_every: int | None = None,
    archive_to: str = "",
    include_incomplete: bool = False,
    older_than: float = 0.0,
    now: float,
) -> PrunePlan:
    """Look at a run directory and decide; arguments as `plan_prune`.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        UnsupportedError: it is no run directory, or holds several.
        StorageError: it, or a pointer in it, cannot be read.
    """
    location = locate(run_dir)
    runs = runs_at(location)
    if len(runs) != 1:
        raise UnsupportedError(listed(location.path, runs))
    run = runs[0]
    storage = locate(run.path).storage
    named, odd = names_of(run)
    report = verify(run_dir, options)
    plan = plan_prune(
        run.path,
        report.verdicts,
        keep,
        archive_every=archive_every,
        archive_to=archive_to,
        include_incomplete=include_incomplete,
        older_than=older_than,
        now=now,
        named=named,
        links={name: links_into(storage, name, run.steps) for name in run.steps},
        later=report.later,
    )
    return plan._replace(notes=(*report.notes, *odd, *held(storage)))


def names_of(run: Run) -> tuple[Mapping[str, str], Sequence[Finding]]:
    """Return which steps something names, with what does, and records of the best step that cannot be read.

    Raises:
        StorageError: a pointer, or every record of the best, cannot be read: it may name any step.
    """
    pointers = read_pointers(run)
    best = best_steps(run)
    if pointers.problems:
        raise StorageError(pointers.problems[0].message, next_step="Nothing is deleted: it may name a step.")
    if best.problems and not best.named and not best.n_read:
        raise StorageError(
            best.problems[0].message,
            next_step="Nothing is deleted: it may name an older step. Move that file away to go on.",
        )
    named = {target: f"the pointer {pointer} names it" for pointer, target in pointers.named.items()}
    return {**best.named, **named}, best.problems


def links_into(storage: Storage, step: str, steps: Collection[str]) -> set[str]:
    """Return the other steps of a run into which links in a step lead; none if it has vanished.

    Raises:
        StorageError: it cannot be listed.
    """
    root = storage.target("") + "/"
    found = set()
    waiting = [step]
    while waiting:
        folder = waiting.pop()
        try:
            entries = storage.entries(folder)
        except CheckpointNotFoundError:
            continue
        waiting += [entry.name for entry in entries if entry.is_dir and not entry.is_link]
        targets = (storage.target(entry.name) for entry in entries if entry.is_link)
        found |= {target.removeprefix(root).partition("/")[0] for target in targets if target.startswith(root)}
    return (found & set(steps)) - {step}
