"""Files and links in which trainers keep the name or the number of a step. Checked, never followed.

They lie in a run directory or, where the steps have a folder of their own (`exp/checkpoints/`), beside that folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.steps import step_number
from dcptool.errors import DcptoolError
from dcptool.runs.activity import exists
from dcptool.runs.directory import Run
from dcptool.storage import Storage, base_name, is_url, locate

POINTERS = (
    "latest",
    "latest_checkpointed_iteration.txt",
    "latest_checkpoint",
    "latest_step",
    "last",
    "last.ckpt",
    "latest-rank0.pt",
)
MAX_POINTER_NBYTES = 4096
_BEST = re.compile(r"best([-_.].*)?")
_WRAPPERS = ("checkpoint", "checkpoints", "ckpt", "ckpts")
"""Names of folders that hold the steps of the run above them."""


class Pointers(NamedTuple):
    """What pointers say.

    Attributes:
        named: path of a pointer, relative to the run directory → the name of the step it names, there or not.
        problems: pointers that cannot be read.
    """

    named: Mapping[str, str]
    problems: tuple[Finding, ...]


def read_pointers(run: Run) -> Pointers:
    """Read the pointers of a run: text files with a path, a name or a number, and links to a step or into one.

    Raises:
        CheckpointNotFoundError, StorageError: the run directory cannot be listed.
    """
    storage = locate(run.path).storage
    named: dict[str, str] = {}
    problems: list[Finding] = []
    for prefix, folder in [("", storage), *_folders_above(run)]:
        links = folder.links()
        for name, said in {**_texts(folder, prefix, links, problems), **links}.items():
            target = _step_named(said, run)
            if name in links:
                target = _step_led_to(folder.target(name), storage, run) or target
            if target:
                named[prefix + name] = target
    return Pointers(dict(sorted(named.items())), tuple(problems))


def is_best(name: str) -> bool:
    """Tell whether a link names the best step, not the newest."""
    return bool(_BEST.fullmatch(base_name(name)))


def pointer_problems(steps: Sequence[str], pointers: Pointers, newest: str | None) -> list[Finding]:
    """Return what pointers say that is not so.

    Args:
        steps: of the run directory, the one saved first first.
        pointers: of it.
        newest: name of the newest complete step, None if there is none.
    """
    problems = list(pointers.problems)
    for name, target in pointers.named.items():
        if step_number(base_name(name)) is not None:  # a link that is named like a step: another name for one
            continue
        if target not in steps:
            message = f"the pointer {name} names {target}, which is not there"
            problems.append(Finding.of("dangling-pointer", message, name))
        elif target != newest and not is_best(name):
            older = newest is not None and steps.index(target) < steps.index(newest)
            what = "older than the newest complete step" if older else "which is not complete"
            message = f"the pointer {name} names {target}, {what}; it was not followed"
            kind = "stale-pointer" if older else "wrong-pointer"
            problems.append(Finding.of(kind, message, name))
    return problems


def _folders_above(run: Run) -> list[tuple[str, Storage]]:
    """Return the folders that the steps' own folder lies in: (`../`, its storage), …"""
    depth = len(run.folder.split("/")) if run.folder else int(base_name(run.path) in _WRAPPERS)
    path = run.path if is_url(run.path) else os.path.abspath(run.path)
    found = []
    for above in range(1, depth + 1):
        path = path.rpartition("/")[0]
        if "::" not in path and exists(path):
            found.append(("../" * above, locate(path).storage))
    return found


def _texts(storage: Storage, prefix: str, links: Mapping[str, str], problems: list[Finding]) -> dict[str, str]:
    """Return what the pointer files in a folder say, by name; of one that cannot be read, add a finding."""
    said = {}
    for entry in storage.entries():
        if entry.name not in POINTERS or entry.is_dir or entry.name in links:
            continue
        try:
            data = storage.read(entry.name, 0, min(entry.nbytes, MAX_POINTER_NBYTES))
        except DcptoolError as error:
            message = f"the pointer {prefix}{entry.name} cannot be read: {error}"
            problems.append(Finding.of("unreadable-pointer", message, prefix + entry.name))
            continue
        said[entry.name] = data.decode("utf-8", "replace").strip()
    return said


def _step_named(said: str, run: Run) -> str:
    """Return the step of this run that a path or a number names, "" if it names none.

    The last part of a path that is a step of this run counts; else its last part, if it is a step's name at all.
    """
    names = [name for name in said.split("/") if name]
    inside = next((name for name in reversed(names) if name in run.steps), "")
    if inside or not names or step_number(names[-1]) is None:
        return inside
    if names[-1].isdigit():
        alike = [name for name in run.steps if run.number(name) == int(names[-1])]
        return alike[-1] if alike else names[-1]
    return names[-1]


def _step_led_to(path: str, storage: Storage, run: Run) -> str:
    """Return the step of this run in which a path lies, "" if in none."""
    first = path.removeprefix(storage.target("") + "/").partition("/")[0]
    return first if first in run.steps else ""
