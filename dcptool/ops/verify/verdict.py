"""The verdict on one folder that should be a checkpoint: which state it is in, and why. Values; decides nothing."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, cannot_be_read
from dcptool.checkpoint.kinds import Effect, Severity
from dcptool.checkpoint.steps import step_number
from dcptool.checks.check import Level
from dcptool.checks.items import Tally
from dcptool.checks.side_files import FilePattern, SideFiles
from dcptool.checks.split import Split, alone
from dcptool.checks.steps import Resume
from dcptool.errors import (
    StorageError,
)
from dcptool.formats.marker import NAME, Marker
from dcptool.storage import base_name

GRACE_SECONDS = 3600.0
MADE_HERE = ("convert", "reshard", "rescue")
"""Who writes markers of checkpoints that no trainer saved: what one needs beside is not missing from them."""


class State(str, Enum):
    """What may be done with a checkpoint."""

    COMPLETE = "complete"
    UNMARKED = "unmarked"
    """Whole as far as was looked, but it should have a valid marker and has none."""
    INCOMPLETE = "incomplete"
    """Something is not there: the metadata, a file, the end of a file, a part."""
    DAMAGED = "damaged"
    """Something that is there is wrong."""
    UNREADABLE = "unreadable"
    """The file system or object store would not give something out; nothing is known to be wrong."""
    UNSAFE = "unsafe"
    """Loading it with torch would run code that is no part of reading values."""
    IN_PROGRESS = "in-progress"
    """It is being written."""
    OTHER = "other"
    """It is no checkpoint dcptool checks, or nothing is known to be wrong, but items cannot be looked into here."""


class VerifyOptions(NamedTuple):
    """What is asked of a checkpoint.

    Attributes:
        level: how closely to look.
        marker: name of the marker's file.
        require_marker: whether a whole checkpoint without a valid marker is unmarked.
        require: parts that must be there, names relative to the folder.
        grace: seconds in which a folder without metadata counts as being written.
        also: further folders that hold other parts of the same save.
        threads: how many read at the same time, None for the number of processors.
        by: "number" or "time" to order the steps of a run by these alone; None for the order that markers tell.
        finite: whether a step with tensors that hold NaN or infinities is to be told; every byte is read for it.
        split: how the reading of items and files is split; see `checks.split`.
    """

    level: Level = Level.METADATA
    marker: str = NAME
    require_marker: bool = False
    require: tuple[str, ...] = ()
    grace: float = GRACE_SECONDS
    also: tuple[str, ...] = ()
    threads: int | None = None
    by: str | None = None
    finite: bool = False
    split: Split = alone

    @property
    def depth(self) -> Level:
        """How closely is looked: as `level` says, or at every byte if values are asked for."""
        return Level.DEEP if self.finite else self.level


DEFAULTS = VerifyOptions()


class PartReport(NamedTuple):
    """One checkpoint in a folder: its place there ("" = the folder itself), what it is, its counts, its save's id."""

    name: str
    format: str
    flavour: str
    world_size: int | None
    n_tensors: int
    n_objects: int
    save_id: str | None


class ManifestReport(NamedTuple):
    """A manifest beside a checkpoint: how many files it lists, and how many of them were compared with it."""

    name: str
    algorithm: str
    n_files: int
    n_compared: int


class Verdict(NamedTuple):
    """The verdict on one folder.

    Attributes:
        path: as a user would type it.
        name: its last part.
        step: the number its name stands for, None if it is no step's name.
        state: see `State`.
        marker: the marker that is there, valid or not; None if there is none or it cannot be read.
        parts: the checkpoints in it that opened.
        findings: everything found, errors first; file names are relative to the folder.
        n_files, nbytes: of all files in it, in bytes.
        written: when the newest of them was written, seconds since the epoch; None if unknown.
        level: how closely was looked.
        tally: items and bytes looked at.
        resume: whether a job can go on from it, by what its trainer needs.
        groups: first parts of the names of its entries.
        side_files: files beside the checkpoints in it.
        patterns: of the names of such files, to compare with other steps.
        finite: whether all values of its tensors are finite numbers; None if that was not asked, or not all were seen.
        not_finite: names of tensors with values that are not, "PART: FQN" of those in a part.
        manifests: those of other software in it that could be read.
    """

    path: str
    name: str
    step: int | None
    state: State
    marker: Marker | None
    parts: tuple[PartReport, ...]
    findings: tuple[Finding, ...]
    n_files: int
    nbytes: int
    written: float | None
    level: Level
    tally: Tally
    resume: Resume = Resume()
    groups: tuple[str, ...] = ()
    side_files: SideFiles = SideFiles()
    patterns: frozenset[FilePattern] = frozenset()
    finite: bool | None = None
    not_finite: tuple[str, ...] = ()
    manifests: tuple[ManifestReport, ...] = ()

    @property
    def resumable(self) -> bool | None:
        """Whether a job can go on from it, as far as its trainer's files tell; None where nothing does."""
        return self.resume.resumable if self.whole else False

    @property
    def world_size(self) -> int | None:
        """The most ranks that saved a part of it, None if that is not known."""
        return max((part.world_size for part in self.parts if part.world_size), default=None)

    @property
    def n_entries(self) -> int | None:
        """Tensors and objects of all parts that opened, None if none did."""
        return sum(part.n_tensors + part.n_objects for part in self.parts) if self.parts else None

    @property
    def whole(self) -> bool:
        """Whether nothing is missing or wrong as far as was looked, marked or not."""
        return self.state in (State.COMPLETE, State.UNMARKED)

    @property
    def reason(self) -> str:
        """The worst finding in one line, that it is being written or unsafe before all others; "" if all are notes."""
        telling = [finding for finding in self.findings if finding.severity is not Severity.NOTE]
        if self.state is State.IN_PROGRESS:
            telling.sort(key=lambda finding: finding.kind != "being-written")
        elif self.state is State.UNSAFE:
            telling.sort(key=lambda finding: finding.traits.effect is not Effect.UNSAFE)
        worst = telling[0] if telling else None
        return worst.message if worst else ""


def unreadable(path: str, error: StorageError, level: Level) -> Verdict:
    """Return the verdict on a step that cannot even be listed."""
    name = base_name(path)
    finding = cannot_be_read(error)
    return Verdict(path, name, step_number(name), State.UNREADABLE, None, (), (finding,), 0, 0, None, level, Tally())
