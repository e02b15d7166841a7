"""In which order the steps of a run were saved: by the numbers in markers, else by those in names; what times say.

A run that goes back to an older step saves lower numbers later. Markers of saves have a number that only grows; without
them the step's own number decides, for copying a run changes all times.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.steps import in_step_order
from dcptool.copying.pool import Pool
from dcptool.errors import DcptoolError
from dcptool.formats.marker import NAME, Marker, is_of_save, marked_as, read_marker
from dcptool.formats.table import is_metadata, is_own_name
from dcptool.runs.counters import order_of_counted
from dcptool.runs.directory import Run
from dcptool.storage import DirEntry, Storage, is_url, locate, parent
from dcptool.words import listed, span

BY = ("number", "time")
"""What can be asked for instead of the order that markers and names tell."""
APART_SECONDS = 60.0
"""Saves this far apart in time, the wrong way round, are said to contradict their numbers."""
_FEW = 16
"""Steps that are looked at one after the other: threads would take longer to start."""


class Save(NamedTuple):
    """When a step was saved.

    Attributes:
        name: of the step.
        number: of the save in its run, from 1 on; 0 where no marker of a save tells.
        written: when a name in its folder last came or went, or, where order by time was asked for or a marker was
            added later, its newest file was written; in seconds since the epoch, None if unknown.
        resumed_from: the step that the job which saved it had gone on from, None where no marker of a save tells.
        of_save: whether a marker shows that saves of this run write markers; None where only another software's may.
    """

    name: str
    number: int
    written: float | None
    resumed_from: int | None = None
    of_save: bool | None = None


def in_order(run: Run, marker: str = NAME, by: str | None = None, storage: Storage | None = None) -> tuple[Save, ...]:
    """Return the steps of a run, the one saved first first.

    Args:
        run: the run directory.
        marker: name of the markers' files.
        by: "number" or "time" to go by the steps' numbers, or by time, alone.
        storage: of the run directory, where it is in several halves.
    """
    storage = storage or locate(run.path).storage
    if len(run.steps) <= _FEW and not is_url(run.path):
        saves = [_save(storage, name, marker, by == "time") for name in run.steps]
    else:
        with Pool(None) as pool:
            looked = pool.run(lambda name: _save(storage, name, marker, by == "time"), run.steps)
            saves = [save for _, save in looked]
    if by == "time":
        saves.sort(key=lambda save: save.written or 0.0)
    elif by is None and any(save.number for save in saves):
        saves = _by_number_of_save(saves)
    elif by is None and (counted := order_of_counted(run)):
        saves.sort(key=lambda save: counted.index(save.name))
    return tuple(saves)


def next_number(step: str, marker: str = NAME) -> int:
    """Return a number for the save of a step, higher than those of all others in its run.

    Args:
        step: path or URL of the step's folder.
        marker: name of the markers' files.
    """
    storage = locate(parent(step) if is_url(step) else os.path.dirname(os.path.abspath(step))).storage
    folders = [entry.name for entry in storage.entries() if entry.is_dir and not entry.is_link]
    found = (marked_as(storage.below(name), marker) for name in in_step_order(folders))
    return 1 + max((one.number for one in found if one and one.number), default=0)


def _by_number_of_save(saves: Sequence[Save]) -> list[Save]:
    """Return steps in the order of their saves; one without a number comes after the one whose step is next below it.

    So a save that was killed before its marker stands where the job was.
    """
    numbers: dict[str, int] = {}
    below = 0
    for save in saves:
        below = numbers[save.name] = save.number or below
    return sorted(saves, key=lambda save: numbers[save.name])


def _save(storage: Storage, name: str, marker: str, exact: bool) -> Save:
    folder = storage.below(name)
    touched = folder.written()
    if touched is None:
        return _save_in_store(folder, name, marker)
    found = marked_as(folder, marker)
    written = _newest_file(folder, marker) if exact or (found and found.writer != "save") else touched
    return _as_marked(name, found, written, is_of_save(found) if found else None)


def _save_in_store(folder: Storage, name: str, marker: str) -> Save:
    """Look at a step where every question is a request: one listing answers all."""
    try:
        entries = folder.entries()
    except DcptoolError:
        return Save(name, 0, None)
    found, _ = read_marker(folder, {entry.name: entry.nbytes for entry in entries if not entry.is_dir}, marker)
    return _as_marked(name, found, _newest_of(entries, marker), is_of_save(found))


def _as_marked(name: str, marker: Marker | None, written: float | None, of_save: bool | None) -> Save:
    if marker is None:
        return Save(name, 0, written, of_save=of_save)
    return Save(name, marker.number or 0, written, marker.resumed_from, of_save)


def _newest_file(folder: Storage, marker: str) -> float | None:
    """Return when the newest file of a step was written."""
    try:
        return _newest_of(folder.entries(), marker) or folder.written()
    except DcptoolError:
        return None


def _newest_of(entries: Iterable[DirEntry], marker: str) -> float | None:
    """Return when the newest file of a listing was written; a marker may have been written by hand, later.

    Of the checkpoint's own files, if there are any: results of an evaluation are put beside them long after a save.
    """
    files = [e for e in entries if e.mtime is not None and e.name not in (marker, NAME) and not e.is_link]
    own = [e for e in files if is_own_name(e.name) or is_metadata(e.name)]
    return max((e.mtime for e in own or files if e.mtime is not None), default=None)


class Later(NamedTuple):
    """A step that stands before the newest, and was written so many seconds after it by what times say."""

    name: str
    newest: str
    seconds: float

    @property
    def contradiction(self) -> Finding:
        """The finding that says so."""
        message = f"{self.name} was written {span(self.seconds)} after {self.newest}, which has the higher number"
        step = "If the job went back to it: --by time; if files were copied since: --by number."
        return Finding.of("order-unclear", message, self.name, next_step=step)


def later_by_time(run: Run, saves: Sequence[Save], newest: str, marker: str = NAME) -> list[Later]:
    """Return steps that stand before the newest, and were written after it by what times say, the last one first.

    Args:
        run: the run directory.
        saves: its steps in their order, as `in_order` returns them.
        newest: name of one of them; of those after it nothing is said.
        marker: name of the markers' files.
    """
    at = next(index for index, save in enumerate(saves) if save.name == newest)
    storage = locate(run.path).storage
    # A copy of the run, or a file added to this step, makes its folder younger than the save.
    last = _newest_file(storage.below(newest), marker) or saves[at].written
    if last is None:
        return []
    before = [save for save in saves[:at] if not (save.number and saves[at].number)]
    candidates = [save.name for save in before if (save.written or 0.0) > last + APART_SECONDS]
    apart = {name: (_newest_file(storage.below(name), marker) or 0.0) - last for name in candidates}
    later = [Later(name, newest, seconds) for name, seconds in apart.items() if seconds > APART_SECONDS]
    return sorted(later, key=lambda found: found.seconds, reverse=True)


def left_branch(run: Run, saves: Sequence[Save]) -> list[str]:
    """Return the steps that were saved before the job went back to an older one, and lie beyond that.

    Args:
        run: the run directory.
        saves: its steps in their order, as `in_order` returns them.
    """
    left: list[str] = []
    bound: float = math.inf
    back_to: int | None = None
    for save in reversed([save for save in saves if save.number]):
        step = run.number(save.name) or 0
        if step >= bound or (back_to is not None and step > back_to and save.resumed_from != back_to):
            left.append(save.name)
        else:
            bound, back_to = step, save.resumed_from if save.resumed_from is not None else back_to
    return left[::-1]


def branch_note(run: Run, saves: Sequence[Save]) -> list[Finding]:
    """Return the note that some steps are of a branch which the job has left, none if there are none."""
    left = left_branch(run, saves)
    if not left:
        return []
    which = f"{listed(left, 3)} {'is' if len(left) == 1 else 'are'}"
    message = f"{which} of a branch that was left: the job went back to an older step and saved others since"
    return [Finding.of("other-branch", message, left[0])]
