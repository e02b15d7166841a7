"""Which step of a run is the best, as its trainer recorded it: in a step's own files, or by a link beside the steps.

Nothing of a pickle is executed; what cannot be read is a finding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.errors import DcptoolError
from dcptool.frameworks.profile import Value
from dcptool.frameworks.table import PROFILES
from dcptool.frameworks.values import found_at, read_value
from dcptool.runs.directory import Run
from dcptool.runs.pointers import is_best, read_pointers
from dcptool.storage import Storage, base_name, locate


class Best(NamedTuple):
    """What is recorded of the best steps.

    Attributes:
        named: name of a step of the run → what says that it is the best.
        problems: records that cannot be read; they may name any step.
        n_read: how many could be, and say which step is the best, or that none is yet.
    """

    named: Mapping[str, str]
    problems: tuple[Finding, ...]
    n_read: int = 0


def best_steps(run: Run) -> Best:
    """Return the steps of a run that are recorded as the best, by a link or by the newest step that has a record.

    Raises:
        CheckpointNotFoundError, StorageError: the run directory cannot be listed.
    """
    storage = locate(run.path).storage
    named = {
        target: f"the link {link} leads to it"
        for link, target in read_pointers(run).named.items()
        if is_best(link) and target in run.steps
    }
    problems: list[Finding] = []
    n_read = 0
    for step in reversed(run.steps):
        paths, wrong, n_here = _recorded(storage, step)
        problems += wrong
        n_read += n_here
        if paths:
            named = {**{best: f"the best by {record}" for best, record in _in_run(paths, run).items()}, **named}
            break
    return Best(named, tuple(problems), n_read)


def _recorded(storage: Storage, step: str) -> tuple[dict[str, str], list[Finding], int]:
    """Return the paths that a step's files name, with the file each; what is wrong with files; how many were read."""
    records = {profile.best for profile in PROFILES if profile.best}
    try:
        sizes = {base_name(entry.name): entry.nbytes for entry in storage.entries(step) if not entry.is_dir}
    except DcptoolError:  # gone, or what judging it says
        return {}, [], 0
    found: dict[str, str] = {}
    problems = []
    for record in sorted(record for record in records if record.file in sizes):
        try:
            paths = _paths(storage, step, record, sizes[record.file])
        except (DcptoolError, ValueError, RecursionError) as error:
            message = f"{step}/{record.file}, which records the best step, cannot be read: {error}"
            problems.append(Finding.of("unreadable-best", message, f"{step}/{record.file}"))
        else:
            found.update(dict.fromkeys(paths, f"{step}/{record.file}"))
    n_there = sum(record.file in sizes for record in records)
    return found, problems, n_there - len(problems)


def _paths(storage: Storage, step: str, record: Value, nbytes: int) -> list[str]:
    value = read_value(storage, f"{step}/{record.file}", nbytes)
    return [path for path in found_at(value, record.keys) if isinstance(path, str)]


def _in_run(paths: Mapping[str, str], run: Run) -> dict[str, str]:
    """Return the steps of this run that paths lead to or into; paths are of the machine that trained."""
    found = {}
    for path, record in paths.items():
        names = [name for name in re.split(r"[/\\]", path) if name in run.steps]
        found.update(dict.fromkeys(names[-1:], record))
    return found
