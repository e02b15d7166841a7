"""Find the checkpoint to resume from: the newest step that is whole, whatever names and pointers say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from dcptool.errors import CheckpointNotFoundError, DcptoolError
from dcptool.findings import Finding, Severity
from dcptool.formats.detect import find_parts
from dcptool.marker import read_marker
from dcptool.runs import Run, find_run
from dcptool.steps import step_number
from dcptool.storage import Location, Storage, join, locate
from dcptool.verdict import DEFAULT_RULES, Rules, State, Verdict, judge
from dcptool.verification import missing_parts, without_marker

POINTERS = (
    "latest",
    "latest_checkpointed_iteration.txt",
    "latest_checkpoint",
    "latest_step",
    "last",
    "last.ckpt",
    "latest-rank0.pt",
)
"""Files and links in a run directory in which trainers keep the name or the number of the newest step."""
MAX_POINTER_NBYTES = 4096
MAX_SIBLINGS = 3
"""Older steps whose listing is compared with that of a candidate."""


class Step(NamedTuple):
    """A numbered checkpoint directory: its number, its name in the run directory, its path."""

    number: int
    name: str
    path: str


class Latest(NamedTuple):
    """The answer.

    Attributes:
        run: path of the run directory.
        verdict: on the newest complete step; None if there is none.
        skipped: verdicts on the newer ones, newest first.
        pointers: what pointer files and links say that is not so.
    """

    run: str
    verdict: Verdict | None
    skipped: tuple[Verdict, ...]
    pointers: tuple[Finding, ...]

    @property
    def path(self) -> str | None:
        """Path of the newest complete step, None if there is none."""
        return self.verdict.path if self.verdict else None


def find_steps(run_dir: str | os.PathLike[str]) -> tuple[Step, ...]:
    """List the steps of a run directory, lowest first, by their names alone.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no step in it.
        StorageError: it cannot be listed.
    """
    run = _run(locate(run_dir))
    return tuple(Step(step_number(name) or 0, name, join(run.path, name)) for name in run.steps)


def find_latest(run_dir: str | os.PathLike[str], rules: Rules = DEFAULT_RULES) -> Latest:
    """Find the newest complete step of a run directory, newest first.

    Every step is judged by what is in it. Of steps older than the answer at most the markers and the listings are read.

    Args:
        run_dir: local path or URL.
        rules: how closely to look, and what is asked; see `Rules`.

    Returns:
        The newest complete step, why newer ones were passed over, and what pointers say that is not so.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no step in it.
        StorageError: it cannot be listed.
    """
    location = locate(run_dir)
    run = _run(location)
    storage = location.storage.below(run.folder) if run.folder else location.storage
    skipped: list[Verdict] = []
    answer: Verdict | None = None
    newest_first = run.steps[::-1]
    for position, name in enumerate(newest_first):
        try:
            verdict = _judge_in_run(run, storage, name, newest_first[position + 1 :], rules)
        except CheckpointNotFoundError:  # deleted meanwhile
            continue
        if verdict.state is State.COMPLETE:
            answer = verdict
            break
        skipped.append(verdict)
    pointers = pointer_problems(storage, answer.step if answer else None)
    return Latest(run.path, answer, tuple(skipped), tuple(pointers))


def _run(location: Location) -> Run:
    run = find_run(location) if location.file is None else None
    if run is None:
        raise CheckpointNotFoundError(
            f"{location.path} is no run directory: it holds no steps (step_500, checkpoint-500, iter_0000500, …)"
        )
    return run


def _judge_in_run(run: Run, storage: Storage, name: str, older: Sequence[str], rules: Rules) -> Verdict:
    verdict = judge(join(run.path, name), rules)
    if verdict.state is not State.COMPLETE:
        return verdict
    siblings = [[part.name for part in find_parts(Location(storage.below(o), None))] for o in older[:MAX_SIBLINGS]]
    lacking = missing_parts(verdict, [parts for parts in siblings if parts])
    if lacking:
        return verdict._replace(state=State.INCOMPLETE, findings=(*lacking, *verdict.findings))
    if verdict.marker is None:
        for other in older:
            if _has_saved_marker(storage.below(other), rules.marker):
                return without_marker(verdict, other)
    return verdict


def _has_saved_marker(storage: Storage, name: str) -> bool:
    """Tell whether a step has a marker that a save wrote; one by hand says nothing of other steps."""
    try:
        files = {entry.name: entry.nbytes for entry in storage.entries() if not entry.is_dir}
        marker, _ = read_marker(storage, files, name)
    except DcptoolError:
        return False
    return marker is not None and marker.writer in ("save", None)


def pointer_problems(storage: Storage, newest: int | None) -> list[Finding]:
    """Return what the pointers in a run directory say that is not so.

    Args:
        storage: the run directory.
        newest: number of the newest complete step, None if there is none.
    """
    problems = []
    for name, target in read_pointers(storage).items():
        number = step_number(target)
        there = _exists(storage, target)
        if not there:
            message = f"the pointer {name} names {target}, which is not there"
            problems.append(Finding("dangling-pointer", Severity.WARNING, message, name))
        elif number is not None and number != newest:
            older = newest is not None and number < newest
            what = "older than the newest complete step" if older else "which is not complete"
            message = f"the pointer {name} names {target}, {what}; it was not followed"
            kind = "stale-pointer" if older else "wrong-pointer"
            problems.append(Finding(kind, Severity.WARNING, message, name))
    return problems


def read_pointers(storage: Storage) -> dict[str, str]:
    """Return the pointers of a run directory: name → the step's directory it names.

    Text files hold a path, a name or a number; links are followed one level.
    """
    entries = {entry.name: entry for entry in storage.entries()}
    steps = {step_number(name): name for name, entry in entries.items() if entry.is_dir and not entry.is_link}
    said = {name: target for name, target in storage.links().items() if step_number(name) is None}
    for name in POINTERS:
        if name in entries and not entries[name].is_dir and name not in said:
            nbytes = min(entries[name].nbytes, MAX_POINTER_NBYTES)
            said[name] = storage.read(name, 0, nbytes).decode("utf-8", "replace").strip()
    found = {}
    for name, text in sorted(said.items()):
        target = text.rstrip("/").rpartition("/")[2]
        number = step_number(target)
        if number is not None:  # else it is no pointer to a step
            found[name] = steps.get(number, target) if target not in entries else target
    return found


def _exists(storage: Storage, name: str) -> bool:
    try:
        storage.entries(name)
    except DcptoolError:
        return storage.size(name) is not None
    return True
