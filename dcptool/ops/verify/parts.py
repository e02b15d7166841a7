"""The checkpoints in a folder: each opened and checked, and what it means that one does not open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, cannot_be_read, inside, unsafe_pickle, worst_first
from dcptool.checks.check import CheckReport, Level, check
from dcptool.checks.items import Tally
from dcptool.checks.objects import small_object_problems
from dcptool.errors import (
    CheckpointNotFoundError,
    DcptoolError,
    MetadataError,
    RunsCodeError,
    StorageError,
    UnsupportedError,
)
from dcptool.formats.detect import not_a_checkpoint, open_part
from dcptool.formats.table import is_metadata
from dcptool.ops.verify.verdict import PartReport, VerifyOptions
from dcptool.runs.directory import find_runs, is_run_of, listed
from dcptool.storage import DirEntry, Location, Progress, base_name, join


class FoundParts(NamedTuple):
    """What a look at the parts of a folder shows; `other`: that it is no checkpoint dcptool checks."""

    parts: tuple[PartReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    tally: Tally = Tally()
    other: bool = False
    opened: Mapping[str, Checkpoint] = MappingProxyType({})
    not_finite: tuple[str, ...] = ()


def check_parts(
    location: Location,
    names: Sequence[str],
    listing: Mapping[str, DirEntry],
    options: VerifyOptions,
    progress: Progress | None,
    opened: Checkpoint | None,
) -> FoundParts:
    """Open and check every part of a folder."""
    if not listing:
        message = f"{location.path} is empty: the save never wrote anything"
        return FoundParts((), (Finding.of("empty", message),))
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
    not_finite: list[str] = []
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
                return FoundParts((), (finding,), tally, True)
            problems.append(finding)
        else:
            used.update(file.rpartition("/")[0] for file in checkpoint.usage if not name)
            n_tensors = len(checkpoint.tensors)
            sizes = (checkpoint.world_size, n_tensors, len(checkpoint) - n_tensors)
            reports.append(PartReport(name, checkpoint.format.name, checkpoint.flavour, *sizes, checkpoint.save_id))
            problems += [inside(name, finding) for finding in report.findings]
            tally = tally.plus(report.tally)
            not_finite += [f"{name}: {fqn}" if name else fqn for fqn in report.not_finite]
            kept[name] = checkpoint
    return FoundParts(tuple(reports), tuple(problems), tally, opened=kept, not_finite=tuple(not_finite))


def _other(kind: str, message: str, step: str = "") -> FoundParts:
    return FoundParts((), (Finding.of(kind, message, next_step=step),), Tally(), True)


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
    threads, finite = options.threads, options.finite
    report = check(
        checkpoint,
        options.depth,
        finite=finite,
        written=written,
        threads=threads,
        progress=progress,
        split=options.split,
    )
    if report.level >= Level.RECORDS or not report.good:
        return report
    return report._replace(findings=tuple(worst_first([*report.findings, *small_object_problems(checkpoint)])))


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
