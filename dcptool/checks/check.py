"""Look at one checkpoint and return everything that is wrong with it, as findings.

Three levels, each with all of the one before: `METADATA` reads the metadata, lists the folder and looks at a few bytes
of a file; `RECORDS` reads the headers of every item; `DEEP` reads every byte and checks every checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.cover import Cover, cover
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.findings import Finding, errors, worst_first
from dcptool.checkpoint.items import FileItems
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.regions import volume
from dcptool.checks.copies import overlap_verdict, replica_problems
from dcptool.checks.extents import edge_problems, extent_problems, short_items
from dcptool.checks.families import family_problems
from dcptool.checks.files import file_problems, mixed_times
from dcptool.checks.finite import NotFinite, not_finite_problems
from dcptool.checks.items import Depth, ItemReport, Tally, item_problems
from dcptool.checks.paths import path_problems
from dcptool.checks.split import Split, alone
from dcptool.errors import LayoutError
from dcptool.storage import Progress

_TAKES_BOXES = frozenset({"missing-file", "short-file", "bad-file", "bad-partition"})
"""Findings on files that explain holes where boxes are in files only."""


class Level(IntEnum):
    """How closely a checkpoint is looked at; each level includes the ones before."""

    METADATA = 0
    RECORDS = 1
    DEEP = 2


class CheckReport(NamedTuple):
    """What a check found.

    Attributes:
        findings: all of them, errors first.
        level: how closely was looked.
        tally: items and bytes looked at; zeros at level METADATA.
        not_finite: fqn → what of it is NaN or infinite, in the order of the metadata, if that was asked.
    """

    findings: tuple[Finding, ...]
    level: Level
    tally: Tally
    not_finite: Mapping[str, NotFinite] = MappingProxyType({})

    @property
    def good(self) -> bool:
        """Whether nothing is missing or wrong as far as was looked."""
        return not errors(self.findings)


def check(
    checkpoint: Checkpoint,
    level: Level = Level.METADATA,
    *,
    finite: bool = False,
    written: Mapping[str, float] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    split: Split = alone,
) -> CheckReport:
    """Check one open checkpoint.

    Args:
        checkpoint: see `dcptool.open`.
        level: how closely to look.
        finite: whether tensors that hold NaN or infinities are errors; every byte is read then, whatever the level.
        written: file name → when it was last written, seconds since the epoch, to see files of two saves.
        threads: how many read at the same time; default: the number of processors.
        progress: told the number of bytes as they are read.
        split: does the work on items, here or in several processes.

    Returns:
        All findings. An undamaged checkpoint has no errors; what no level can prove is said as notes.

    Raises:
        StorageError: the storage itself fails (a damaged file is a finding).
    """
    by_file = FileItems(checkpoint)
    level = Level.DEEP if finite else level
    problems = shown_by_metadata(checkpoint, by_file, deep=level >= Level.DEEP)
    if level is Level.METADATA:
        problems += edge_problems(checkpoint, by_file, {problem.file for problem in errors(problems)})
    if written is not None and checkpoint.format.saved_by_ranks:
        problems += mixed_times(checkpoint, written, list(filter(checkpoint.format.is_metadata, checkpoint.files)))
    looked = ItemReport([], Tally(), {})
    if level >= Level.RECORDS:
        problems = [problem for problem in problems if problem.kind != "unsupported-item"]  # which is told of each
        wanted = Depth(level >= Level.DEEP, finite)
        looked = item_problems(checkpoint, by_file, wanted, threads or os.cpu_count() or 1, progress, split)
        problems += looked.problems
    if level >= Level.DEEP:
        problems += replica_problems(checkpoint)
        problems += _unverifiable(looked.tally)
    in_order = dict.fromkeys([*(fqn for fqn in checkpoint if fqn in looked.not_finite), *looked.not_finite])
    not_finite = {fqn: looked.not_finite[fqn] for fqn in in_order}  # inner tensors have names of their own
    problems += not_finite_problems(not_finite)
    return CheckReport(tuple(worst_first(problems)), level, looked.tally, not_finite)


def shown_by_metadata(
    checkpoint: Checkpoint, by_file: FileItems | None = None, known_exact: Iterable[str] = (), deep: bool = False
) -> list[Finding]:
    """Return what the metadata and the listing of the folder show, without reading data: every command's view.

    Args:
        checkpoint: an open checkpoint.
        by_file: its items by file, if somebody has sorted them already.
        known_exact, deep: as in `cover_problems`.
    """
    by_file = by_file or FileItems(checkpoint)
    problems = [
        *checkpoint.problems,
        *file_problems(checkpoint, by_file),
        *extent_problems(checkpoint, by_file),
        *short_items(checkpoint),
        *cover_problems(checkpoint, known_exact, deep),
        *path_problems(checkpoint),
        *family_problems(checkpoint),
        *_unprovable(checkpoint),
    ]
    kinds = {problem.kind for problem in problems}
    if "one-rank" in kinds or (checkpoint.format.boxes_in_files and kinds & _TAKES_BOXES):
        problems = [problem for problem in problems if problem.kind != "hole"]  # what those files held
    return problems


def cover_problems(checkpoint: Checkpoint, known_exact: Iterable[str] = (), deep: bool = False) -> list[Finding]:
    """Return the tensors whose chunks leave holes or overlap.

    Args:
        checkpoint: an open checkpoint.
        known_exact: fqns of tensors that are known to be covered exactly.
        deep: whether the values of overlapping chunks are compared.
    """
    exact = frozenset(known_exact)
    problems = []
    for fqn, entry in checkpoint.tensors.items():
        if fqn in exact:
            continue
        try:
            found = cover(entry.shape, entry.chunks)
        except LayoutError as error:
            problems.append(Finding.of("cover-unknown", f"{fqn!r}: {error}", None, fqn))
            continue
        if found.n_missing:
            problems.append(_hole(entry, found))
        if found.n_overlapping:
            problems.append(_overlap(checkpoint, entry, found, deep))
    return problems


def _hole(entry: TensorEntry, found: Cover) -> Finding:
    offsets, sizes = found.gaps[0]
    n_elements = volume(entry.shape)
    message = f"{entry.fqn!r}: no chunk holds {found.n_missing:,} of its {n_elements:,} elements"
    message += f" ({found.n_missing / n_elements:.0%}), the first at {list(offsets)} sizes {list(sizes)}"
    step = "torch fills such holes with whatever is in memory; resume from another step."
    return Finding.of("hole", message, None, entry.fqn, offsets, sizes, next_step=step)


def _overlap(checkpoint: Checkpoint, entry: TensorEntry, found: Cover, deep: bool) -> Finding:
    first = found.overlaps[0]
    boxes = [list(entry.chunks.box(index)[0]) for index in (first.first, first.second)]
    message = (
        f"{entry.fqn!r}: chunks overlap in {found.n_overlapping:,} elements, the first at {boxes[0]} and {boxes[1]}"
    )
    verdict = overlap_verdict(checkpoint, entry, found.overlaps) if deep else "unknown"
    words = {"equal": "they hold the same values there", "different": "they hold different values there"}
    message += f"; {words.get(verdict, 'which of them counts is not defined')}"
    severity = Severity.WARNING if verdict == "equal" else Severity.ERROR
    return Finding.of("overlap", message, None, entry.fqn, first.offsets, first.sizes, severity=severity)


def _unprovable(checkpoint: Checkpoint) -> list[Finding]:
    """Say what an opened checkpoint leaves open at every level."""
    if not len(checkpoint):
        message = "nothing was saved: it holds no tensor and no object"
        return [Finding.of("nothing-saved", message, next_step="Was the state dict empty?")]
    if checkpoint.variant.open_shapes:
        message = "whether files of further shards are missing cannot be told: the format does not record whole shapes"
        step = "dcptool mark, run when they are all there, makes a loss visible."
        return [Finding.of("last-shards-unknown", message, next_step=step)]
    return []


def _unverifiable(tally: Tally) -> list[Finding]:
    if not tally.n_unverifiable:
        return []
    share = "all" if tally.n_unverifiable == tally.n_items else f"{tally.n_unverifiable:,} of {tally.n_items:,}"
    what = "the one item is" if tally.n_items == 1 else f"{share} items are"
    message = f"{what} stored without checksums ({tally.unverifiable_nbytes:,} bytes): not verifiable"
    step = "What is there was read; whether it is what was saved only a marker with checksums can tell."
    return [Finding.of("not-verifiable", message, next_step=step)]
