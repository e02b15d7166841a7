"""The verdict on one folder that should be a checkpoint: which state it is in, and why.

A folder may be one checkpoint, or hold several parts that belong together (model and optimizer, actor and critic); it
is as good as the worst of them, and has one marker for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from dcptool.checkpoint import Checkpoint
from dcptool.checks import INCOMPLETE_KINDS, CheckReport, Level, check
from dcptool.checks.items import Progress, Tally
from dcptool.errors import CheckpointNotFoundError, DcptoolError, StorageError, UnsupportedError
from dcptool.findings import Finding, Severity
from dcptool.formats.detect import find_parts, not_a_checkpoint, open_part
from dcptool.marker import NAME, NEGATIVE_SUFFIX, Marker, marker_problems, negative_marker, read_marker, sha256
from dcptool.steps import step_number
from dcptool.storage import Entry, Location, join, locate, walk
from dcptool.summary import world_size

GRACE_SECONDS = 3600.0
UNMARKED_KINDS = frozenset({"stale-marker", "bad-marker", "no-marker"})


class State(str, Enum):
    """What may be done with a checkpoint."""

    COMPLETE = "complete"
    UNMARKED = "unmarked"
    """Whole as far as was looked, but it should have a valid marker and has none."""
    INCOMPLETE = "incomplete"
    """Something is not there: the metadata, a file, the end of a file, a part."""
    DAMAGED = "damaged"
    """Something that is there is wrong."""
    IN_PROGRESS = "in-progress"
    """It is being written."""
    OTHER = "other"
    """It is no checkpoint dcptool checks."""


class Rules(NamedTuple):
    """What is asked of a checkpoint.

    Attributes:
        level: how closely to look.
        marker: name of the marker's file.
        require_marker: whether a whole checkpoint without a valid marker is unmarked.
        require: parts that must be there, names relative to the folder.
        grace: seconds in which a folder without metadata counts as being written.
        also: further folders that hold other parts of the same save.
        threads: how many read at the same time, None for the number of processors.
    """

    level: Level = Level.METADATA
    marker: str = NAME
    require_marker: bool = False
    require: tuple[str, ...] = ()
    grace: float = GRACE_SECONDS
    also: tuple[str, ...] = ()
    threads: int | None = None


DEFAULT_RULES = Rules()


class PartReport(NamedTuple):
    """One checkpoint in a folder: its place there ("" = the folder itself), what it is, its counts, its save's id."""

    name: str
    format: str
    flavour: str
    world_size: int | None
    n_tensors: int
    n_objects: int
    save_id: str | None


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
        """The worst finding in one line, "" if there is none worse than a note."""
        worst = next((finding for finding in self.findings if finding.severity is not Severity.NOTE), None)
        return worst.message if worst else ""


def judge(path: str | os.PathLike[str], rules: Rules = DEFAULT_RULES, progress: Progress | None = None) -> Verdict:
    """Judge one folder, or one file.

    Args:
        path: local path or URL.
        rules: what is asked.
        progress: told the number of bytes as they are read.

    Raises:
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: it cannot be listed.
    """
    location = locate(path, rules.also)
    listing = _listing(location)
    files = {name: entry.nbytes for name, entry in listing.items()}
    marker, problems = read_marker(location.storage, files, rules.marker)
    if marker:
        problems += marker_problems(marker, location.storage, files)
    problems_of_marker = list(problems)
    parts, found, tally, other = _check_parts(location, listing, rules, progress)
    problems += found
    if marker and marker.sha256 and rules.level >= Level.DEEP:
        problems += _checksum_problems(marker, location, files)
    problems += [_missing_part(name) for name in rules.require if not _is_there(name, files)]
    valid = marker is not None and not problems_of_marker
    if valid and marker and marker.writer:  # it vouches for names, sizes and metadata; file times are no hint then
        problems = [problem for problem in problems if problem.kind != "mixed-times"]
    if rules.require_marker and marker is None and not any(p.kind in UNMARKED_KINDS for p in problems):
        message = f"there is no marker {rules.marker}"
        problems.append(Finding("no-marker", Severity.ERROR, message, next_step=f"dcptool mark {location.path}"))
    written = max((entry.mtime for entry in listing.values() if entry.mtime is not None), default=None)
    state = State.OTHER if other else _state(problems)
    sign = _sign_of_writing(location, listing, problems, rules, written if marker is None else None)
    if sign and not other:
        state = State.IN_PROGRESS
    name = location.path.rstrip("/").rpartition("/")[2]
    order = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
    problems.sort(key=lambda finding: order[finding.severity])
    return Verdict(
        location.path,
        name,
        step_number(name),
        state,
        marker,
        tuple(parts),
        tuple(problems if sign is None else [sign, *problems]),
        len(files),
        sum(files.values()),
        written,
        rules.level,
        tally,
    )


def _listing(location: Location) -> dict[str, Entry]:
    if location.file is not None:
        found = [entry for entry in location.storage.entries() if entry.name == location.file]
        return {entry.name: entry for entry in found}
    return {entry.name: entry for entry in walk(location.storage)}


def _check_parts(
    location: Location, listing: Mapping[str, Entry], rules: Rules, progress: Progress | None
) -> tuple[list[PartReport], list[Finding], Tally, bool]:
    """Open and check every part of a folder; also return whether this is no checkpoint at all."""
    reports, problems, tally = [], [], Tally()
    if not listing:
        message = f"{location.path} is empty: the save never wrote anything"
        return [], [Finding("empty", Severity.ERROR, message)], tally, False
    names = [""] if location.file is not None else [part.name for part in find_parts(location)]
    if not names:
        return [], [Finding("not-a-checkpoint", Severity.ERROR, not_a_checkpoint(location))], tally, True
    for name in names:
        try:
            checkpoint = open_part(location, name)
            report = _check(checkpoint, name, listing, rules, progress)
        except CheckpointNotFoundError as error:
            problems.append(_unopened("no-metadata", location, name, error))
        except UnsupportedError as error:
            finding = _unopened("unsupported", location, name, error)
            if len(names) == 1:
                return [], [finding], tally, True
            problems.append(finding)
        except StorageError as error:
            problems.append(_unopened("unreadable", location, name, error))
        except DcptoolError as error:
            problems.append(_unopened("bad-metadata", location, name, error))
        else:
            n_tensors = len(checkpoint.tensors)
            sizes = (world_size(checkpoint), n_tensors, len(checkpoint) - n_tensors)
            reports.append(PartReport(name, checkpoint.format, checkpoint.flavour, *sizes, checkpoint.save_id))
            problems += [_inside(name, finding) for finding in report.findings]
            tally = tally.plus(report.tally)
    return reports, problems, tally, False


def _check(
    checkpoint: Checkpoint, name: str, listing: Mapping[str, Entry], rules: Rules, progress: Progress | None
) -> CheckReport:
    prefix = f"{name}/" if name else ""
    times = {key.removeprefix(prefix): entry.mtime for key, entry in listing.items() if key.startswith(prefix)}
    written = {key: mtime for key, mtime in times.items() if mtime is not None}
    return check(checkpoint, rules.level, written=written, threads=rules.threads, progress=progress)


def _unopened(kind: str, location: Location, name: str, error: DcptoolError) -> Finding:
    path = join(location.path, name)
    message, _, step = str(error).removeprefix(f"{path}: ").partition("\n")
    return Finding(kind, Severity.ERROR, f"{name}: {message}" if name else message, name or None, next_step=step)


def _inside(part: str, finding: Finding) -> Finding:
    """Return a finding of a part as one of the folder that holds it."""
    if not part:
        return finding
    file = f"{part}/{finding.file}" if finding.file else part
    return finding._replace(file=file, message=f"{part}: {finding.message}")


def _checksum_problems(marker: Marker, location: Location, files: Mapping[str, int]) -> list[Finding]:
    """Compare every file that the marker has a SHA-256 of, with one read of each."""
    problems = []
    for name, digest in marker.sha256.items():
        if name in files and sha256(location.storage, name, files[name]) != digest:
            message = f"{name} is not what was marked: its SHA-256 differs from the one in {marker.name}"
            problems.append(Finding("changed-file", Severity.ERROR, message, name))
    return problems


def _missing_part(name: str) -> Finding:
    return Finding("missing-part", Severity.ERROR, f"the part {name} is missing", name)


def _is_there(name: str, files: Mapping[str, int]) -> bool:
    return any(file == name or file.startswith(f"{name.rstrip('/')}/") for file in files)


def _state(problems: Sequence[Finding]) -> State:
    kinds = {problem.kind for problem in problems if problem.severity is Severity.ERROR}
    if not kinds:
        return State.COMPLETE
    if kinds <= UNMARKED_KINDS:
        return State.UNMARKED
    return State.INCOMPLETE if kinds <= INCOMPLETE_KINDS | UNMARKED_KINDS else State.DAMAGED


def _sign_of_writing(
    location: Location,
    before: Mapping[str, Entry],
    problems: Sequence[Finding],
    rules: Rules,
    written: float | None,
) -> Finding | None:
    """Return what tells that somebody is writing there now."""
    negative = negative_marker(before)
    if negative is None and location.file is None and _exists(location.path + NEGATIVE_SUFFIX):
        negative = f"{location.path}{NEGATIVE_SUFFIX}"
    if negative:
        return Finding("being-written", Severity.WARNING, f"{negative} says that it is being written", negative)
    after = _listing(location)
    if after != before:
        changed = sorted({*before.items()} ^ {*after.items()})[0][0]
        return Finding("being-written", Severity.WARNING, f"{changed} changed while it was looked at", changed)
    if any(problem.kind in ("no-metadata", "empty") for problem in problems) and written is not None:
        age = time.time() - written
        if age < rules.grace:
            message = f"no metadata yet, and a file was written {max(age, 0):,.0f} s ago: perhaps still being saved"
            return Finding("being-written", Severity.WARNING, message)
    return None


def _exists(path: str) -> bool:
    try:
        locate(path)
    except DcptoolError:
        return False
    return True
