"""The verdict on one folder that should be a checkpoint: which state it is in, and why.

A folder may be one checkpoint, or hold several parts that belong together (model and optimizer, actor and critic); it
is as good as the worst of them, and has one marker for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, cannot_be_read, inside, state_of, unsafe_pickle, worst_first
from dcptool.checkpoint.kinds import Effect, Severity
from dcptool.checkpoint.steps import step_number
from dcptool.checks.check import CheckReport, Level, check
from dcptool.checks.items import Tally
from dcptool.checks.side_files import SideFiles, look_at, patterns_of
from dcptool.checks.steps import Resume, is_known, not_read, resume_of
from dcptool.errors import (
    CheckpointNotFoundError,
    DcptoolError,
    MetadataError,
    RunsCodeError,
    StorageError,
    UnsupportedError,
)
from dcptool.formats.detect import find_parts, not_a_checkpoint, open_part
from dcptool.formats.marker import NAME, Marker, checksum_problems, marker_problems, read_marker
from dcptool.formats.table import beside, is_metadata
from dcptool.frameworks.profile import SavedStep
from dcptool.frameworks.values import reader
from dcptool.runs.activity import folders_of, last_written, list_files, sign_of_writing
from dcptool.runs.directory import find_runs, is_run_of, listed
from dcptool.storage import DirEntry, Location, Progress, base_name, join, locate

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
    """

    level: Level = Level.METADATA
    marker: str = NAME
    require_marker: bool = False
    require: tuple[str, ...] = ()
    grace: float = GRACE_SECONDS
    also: tuple[str, ...] = ()
    threads: int | None = None
    by: str | None = None


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
        patterns: names of such files, with the numbers in them taken out, to compare with other steps.
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
    patterns: frozenset[str] = frozenset()

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
        """The worst finding in one line, that it is being written before all others; "" if all are notes."""
        telling = [finding for finding in self.findings if finding.severity is not Severity.NOTE]
        if self.state is State.IN_PROGRESS:
            telling.sort(key=lambda finding: finding.kind != "being-written")
        worst = telling[0] if telling else None
        return worst.message if worst else ""


class _Found(NamedTuple):
    """What a look at the parts of a folder shows; `other`: that it is no checkpoint dcptool checks."""

    parts: tuple[PartReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    tally: Tally = Tally()
    other: bool = False
    opened: Mapping[str, Checkpoint] = MappingProxyType({})


def judge(
    path: str | os.PathLike[str],
    options: VerifyOptions = DEFAULTS,
    progress: Progress | None = None,
    opened: Checkpoint | None = None,
) -> Verdict:
    """Judge one folder, or one file.

    Args:
        path: local path or URL.
        options: what is asked.
        progress: told the number of bytes as they are read.
        opened: the checkpoint at `path` itself, if somebody has opened it already.

    Raises:
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: it cannot be listed.
    """
    location = locate(path, options.also)
    listing = list_files(location)
    files = {name: entry.nbytes for name, entry in listing.items()}
    names = [""] if location.file is not None else [part.name for part in find_parts(location, below_whole=True)]
    marker, problems = _markers(location, files, names, options)
    valid = marker is not None and not problems
    saved = SavedStep(base_name(location.path), files, {}, reader(location.storage, files))
    by_files = location.file is None and not names and is_known(saved)
    found = _Found() if by_files else _check_parts(location, names, listing, options, progress, opened)
    problems += found.findings
    saved = saved._replace(parts=found.opened)
    side_files = SideFiles()
    resume = Resume()
    if by_files or (found.opened and location.file is None):
        side_files = _look_beside(location, saved, options)
        made_here = valid and marker and marker.writer in MADE_HERE
        resume, missing = resume_of(saved, side_files.names, as_it_is=bool(made_here))
        problems += [*side_files.findings, *missing]
        problems += not_read(saved, side_files, options.level) if by_files else []
    problems += [_missing_part(name) for name in options.require if not _is_there(name, files)]
    if valid and marker and marker.writer:  # it vouches for names, sizes and metadata; file times are no hint then
        problems = [problem for problem in problems if problem.kind != "mixed-times"]
    if options.require_marker and marker is None and not _is_about_marker(problems):
        message = f"there is no marker {options.marker}"
        named = f"--marker {options.marker} " if options.marker != NAME else ""
        step = f"dcptool mark {named}{location.path}"
        problems.append(Finding.of("no-marker", message, next_step=step))
    state = State.OTHER if found.other else State(state_of(problems))
    sign = sign_of_writing(location, listing, names, problems, None if marker else options.grace)
    if sign and not found.other:
        state = State.IN_PROGRESS
    return Verdict(
        location.path,
        base_name(location.path),
        step_number(base_name(location.path)),
        state,
        marker,
        found.parts,
        tuple(worst_first([sign, *problems] if sign else problems)),
        len(files),
        sum(files.values()),
        last_written(location, listing),
        options.level,
        found.tally,
        resume,
        tuple(dict.fromkeys(fqn.partition(".")[0] for part in found.opened.values() for fqn in part)),
        side_files,
        patterns_of(files, options.marker),
    )


def _look_beside(location: Location, step: SavedStep, options: VerifyOptions) -> SideFiles:
    """Look at the files of a step that no checkpoint in it uses."""
    used = {f"{part}/{name}" if part else name for part, found in step.parts.items() for name in found.usage}
    files = {name: step.files[name] for name in beside(step.files, options.marker) if name not in used}
    return look_at(location.storage, files, options.level, options.threads)


def unreadable(path: str, error: StorageError, level: Level) -> Verdict:
    """Return the verdict on a step that cannot even be listed."""
    name = base_name(path)
    finding = cannot_be_read(error)
    return Verdict(path, name, step_number(name), State.UNREADABLE, None, (), (finding,), 0, 0, None, level, Tally())


def _markers(
    location: Location, files: Mapping[str, int], parts: Sequence[str], options: VerifyOptions
) -> tuple[Marker | None, list[Finding]]:
    """Read the markers of a folder and of its parts, and compare them with what is there.

    Returns:
        The marker of the folder; if it has none, but each of its parts has, that of the first. And what is wrong with
        any of them.
    """
    markers: dict[str, Marker] = {}
    problems: list[Finding] = []
    for folder in folders_of(parts):
        prefix = f"{folder}/" if folder else ""
        storage = location.storage.below(folder) if folder else location.storage
        there = {name.removeprefix(prefix): nbytes for name, nbytes in files.items() if name.startswith(prefix)}
        marker, wrong = read_marker(storage, there, options.marker)
        if marker:
            markers[folder] = marker._replace(name=prefix + marker.name)
            wrong += marker_problems(marker, storage, there)
            wrong += checksum_problems(marker, storage, there) if options.level >= Level.DEEP else []
        problems += [inside(folder, finding) for finding in wrong]
    covered = [next((folder for folder in folders_of([part]) if folder in markers), None) for part in parts]
    first = next((folder for folder in covered if folder is not None), None)
    if "" in markers:
        return markers[""], problems
    return (markers[first] if first is not None and None not in covered else None), problems


def _check_parts(
    location: Location,
    names: Sequence[str],
    listing: Mapping[str, DirEntry],
    options: VerifyOptions,
    progress: Progress | None,
    opened: Checkpoint | None,
) -> _Found:
    """Open and check every part of a folder."""
    if not listing:
        message = f"{location.path} is empty: the save never wrote anything"
        return _Found((), (Finding.of("empty", message),))
    if not names:
        reason = not_a_checkpoint(location)
        return _other("not-a-checkpoint", reason.message, reason.next_step)
    if "" not in names and is_run_of(base_name(location.path), names):
        runs = find_runs(location)
        message = f"{location.path} is a run directory: name a step of it"
        return _other("run-directory", listed(location.path, runs) if len(runs) > 1 else message)
    reports: list[PartReport] = []
    kept: dict[str, Checkpoint] = {}
    problems: list[Finding] = []
    tally = Tally()
    used: set[str] = set()
    for name in names:
        if name in used and not _has_metadata(listing, name):  # where the checkpoint above keeps its data files
            continue
        try:
            checkpoint = open_part(location, name) if name or opened is None else opened
            report = _check(checkpoint, name, listing, options, progress)
        except (DcptoolError, ArithmeticError, MemoryError, RecursionError) as problem:
            error = problem if isinstance(problem, DcptoolError) else MetadataError(f"no sense in it: {problem!r}")
            finding = _unopened(location, name, listing, error)
            if len(names) == 1 and finding.kind == "unsupported":
                return _Found((), (finding,), tally, True)
            problems.append(finding)
        else:
            used.update(file.rpartition("/")[0] for file in checkpoint.usage if not name)
            n_tensors = len(checkpoint.tensors)
            sizes = (checkpoint.world_size, n_tensors, len(checkpoint) - n_tensors)
            reports.append(PartReport(name, checkpoint.format.name, checkpoint.flavour, *sizes, checkpoint.save_id))
            problems += [inside(name, finding) for finding in report.findings]
            tally = tally.plus(report.tally)
            kept[name] = checkpoint
    return _Found(tuple(reports), tuple(problems), tally, opened=kept)


def _other(kind: str, message: str, step: str = "") -> _Found:
    return _Found((), (Finding.of(kind, message, next_step=step),), Tally(), True)


def _check(
    checkpoint: Checkpoint,
    name: str,
    listing: Mapping[str, DirEntry],
    options: VerifyOptions,
    progress: Progress | None,
) -> CheckReport:
    prefix = f"{name}/" if name else ""
    times = {key.removeprefix(prefix): entry.mtime for key, entry in listing.items() if key.startswith(prefix)}
    written = {key: mtime for key, mtime in times.items() if mtime is not None}
    return check(checkpoint, options.level, written=written, threads=options.threads, progress=progress)


def _unopened(location: Location, name: str, listing: Mapping[str, DirEntry], error: DcptoolError) -> Finding:
    """Return what it means that a part did not open."""
    path = join(location.path, name)
    if isinstance(error, StorageError):
        return cannot_be_read(error, name or None)
    message, step = error.message.removeprefix(f"{path}: "), error.next_step
    if name:  # which is said already
        message = message.removeprefix(f"{path}/")
    kind = "bad-metadata"
    if isinstance(error, CheckpointNotFoundError) or _is_metadata_empty(listing, name):
        kind = "no-metadata"
    elif isinstance(error, UnsupportedError):
        kind = "unsupported"
    elif isinstance(error, RunsCodeError):
        [finding] = unsafe_pickle(error.names, name or "what torch would load", name or None)
        return finding._replace(message=f"{finding.message}; {message}")
    return Finding.of(kind, f"{name}: {message}" if name else message, name or None, next_step=step)


def _has_metadata(listing: Iterable[str], folder: str) -> bool:
    return any(file.rpartition("/")[0] == folder and is_metadata(file) for file in listing)


def _is_metadata_empty(listing: Mapping[str, DirEntry], name: str) -> bool:
    """Tell whether all metadata of a part has no byte: a save that was killed as it wrote it."""
    prefix = f"{name}/" if name else ""
    direct = {key.removeprefix(prefix): entry.nbytes for key, entry in listing.items() if key.startswith(prefix)}
    metadata = [nbytes for file, nbytes in direct.items() if "/" not in file and is_metadata(file)]
    return bool(metadata) and not any(metadata)


def _is_about_marker(problems: Iterable[Finding]) -> bool:
    return any(problem.traits.effect is Effect.UNMARKED for problem in problems)


def _missing_part(name: str) -> Finding:
    return Finding.of("missing-part", f"the part {name} is missing", name)


def _is_there(name: str, files: Mapping[str, int]) -> bool:
    return any(file == name or file.startswith(f"{name.rstrip('/')}/") for file in files)
