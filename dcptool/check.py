"""Look at one checkpoint and return what is wrong with it, as findings. Reads no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dcptool.checkpoint import Checkpoint
from dcptool.chunks import FileUse
from dcptool.findings import Finding, Severity
from dcptool.formats.dcp.reader import data_file_rank
from dcptool.placements import is_grid
from dcptool.regions import first_gap, intersect, volume

MAX_SWEPT = 50_000
"""Chunks of an irregular tensor that are looked through for holes."""
_GET_FILES = "Copy the files of all nodes here, or resume from another step."


def file_problems(checkpoint: Checkpoint) -> list[Finding]:
    """Return what a listing shows: referenced files that are missing or shorter than the metadata says."""
    usage = checkpoint.usage
    total = sum(use.nbytes for use in usage.values()) or 1
    missing: list[str] = []
    problems = []
    for name, use in sorted(usage.items()):
        nbytes = checkpoint.files.get(name)
        if nbytes is None and "/" in name:
            nbytes = checkpoint.storage.size(name)
        if nbytes is None:
            missing.append(name)
        elif nbytes < use.end:
            lost = _lost([use], total)
            message = f"{name} is cut short: {nbytes:,} bytes of at least {use.end:,}; it should hold {lost}"
            span = (nbytes, use.end)
            problems.append(Finding("short-file", Severity.ERROR, message, name, byte_range=span, next_step=_GET_FILES))
    problems += _leftovers(checkpoint, usage)
    if missing:
        ranks = {rank for name in missing if (rank := data_file_rank(name)) is not None}
        names = missing[0] if len(missing) == 1 else f"{len(missing)} of {len(usage)} files"
        whose = f" (rank{'s' * (len(ranks) > 1)} {_ranges(ranks)})" if ranks else ""
        verb = "is missing: it held" if len(missing) == 1 else "are missing: they held"
        message = f"{names}{whose} {verb} {_lost([usage[name] for name in missing], total)}"
        where = missing[0] if len(missing) == 1 else None
        problems.insert(0, Finding("missing-file", Severity.ERROR, message, where, next_step=_GET_FILES))
    return problems


def cover_problems(checkpoint: Checkpoint, layouts: Mapping[str, str]) -> list[Finding]:
    """Return the tensors whose chunks leave holes or overlap; a whole tensor or a regular grid does neither.

    Args:
        checkpoint: an open checkpoint.
        layouts: fqn → `placements.layout` of its tensors.
    """
    problems = []
    for fqn, entry in checkpoint.tensors.items():
        if not volume(entry.shape) or is_grid(layouts[fqn]):
            continue
        boxes = list(entry.chunks.boxes())
        origin = (0,) * len(entry.shape)
        gap = first_gap((origin, entry.shape), boxes) if len(boxes) <= MAX_SWEPT else None
        if gap:
            message = f"{fqn!r}: no chunk holds the {list(gap[1])} elements at {list(gap[0])} of {list(entry.shape)}"
            problems.append(Finding("hole", Severity.ERROR, message, None, fqn, *gap))
        common = (intersect((origin, entry.shape), box) for box in boxes)
        if sum(volume(box[1]) for box in common if box) > volume(entry.shape) - (volume(gap[1]) if gap else 0):
            message = f"{fqn!r}: chunks overlap; which of them counts is not defined"
            problems.append(Finding("overlap", Severity.ERROR, message, None, fqn))
    return problems


def _leftovers(checkpoint: Checkpoint, usage: Mapping[str, FileUse]) -> list[Finding]:
    """Note data files with content that the metadata does not name; empty ones are those of idle ranks."""
    left = sorted(
        name
        for name, nbytes in checkpoint.files.items()
        if nbytes and name not in usage and data_file_rank(name) is not None
    )
    if not left:
        return []
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    nbytes = sum(checkpoint.files[name] for name in left)
    message = f"{left[0]}{more} ({nbytes:,} bytes) are not named by the metadata: left by an older or wider save"
    return [Finding("leftover-files", Severity.NOTE, message, left[0])]


def _lost(uses: Sequence[FileUse], total: int) -> str:
    items, nbytes = sum(use.items for use in uses), sum(use.nbytes for use in uses)
    return f"{items:,} item{'s' * (items != 1)}, {nbytes / total:.0%} of the bytes"


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: `0–3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)


def state_of(problems: Iterable[Finding]) -> str:
    """Return "complete", "incomplete" (files missing or short) or "damaged" (anything else wrong)."""
    kinds = {problem.kind for problem in problems if problem.severity is Severity.ERROR}
    if not kinds:
        return "complete"
    return "incomplete" if kinds <= {"missing-file", "short-file", "rank-metadata-missing"} else "damaged"
