"""What a listing of a checkpoint's folder shows: files missing, cut short, left over, or of two ages.

Reads nothing but the first bytes of files that look wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import FileUse
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.items import FileItems, name_of
from dcptool.errors import DcptoolError
from dcptool.formats.dcp.format import metadata_names, metadata_rank
from dcptool.formats.safetensors.header import LFS_START
from dcptool.words import listed, plural

APART_SECONDS = 60.0
"""Files written further apart than this may be of two saves; a listing alone proves nothing."""
MAX_PEEKED = 64
GET_LFS_FILES = "Run git lfs pull there."
_GET_FILES = "Copy the files of all nodes here (or name their folders with --also), or resume from another step."


def file_problems(checkpoint: Checkpoint, by_file: FileItems | None = None) -> list[Finding]:
    """Return what a listing shows: referenced files that are missing or shorter than the metadata says, leftovers.

    Args:
        checkpoint: an open checkpoint.
        by_file: its items by file, where the caller has it; made if a file turns out to be short.
    """
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
        elif is_lfs_pointer(checkpoint, name, nbytes):
            message = f"{name} is a Git LFS pointer, not the file itself"
            span = (nbytes, use.end)
            problems.append(Finding.of("lfs-pointer", message, name, byte_range=span, next_step=GET_LFS_FILES))
        elif nbytes < use.end:
            by_file = by_file or FileItems(checkpoint)
            problems.append(_short(by_file, name, nbytes, use, total))
    if missing:
        problems.insert(0, _missing(checkpoint, missing, total))
    return problems + _leftovers(checkpoint, usage)


def _short(by_file: FileItems, name: str, nbytes: int, use: FileUse, total: int) -> Finding:
    held = _lost([use], total)
    message = f"{name} is empty; it should hold {held}"
    if nbytes:
        message = f"{name} is cut short: {plural(nbytes, 'byte')} of at least {use.end:,}; it should hold {held}"
        _, ends = by_file.spans(name)
        beyond = [index for index, end in enumerate(ends) if end > nbytes]
        first = name_of(by_file.item(name, beyond[0]))
        which = f"lie beyond the end, the first {first}" if len(beyond) > 1 else f"lies beyond the end: {first}"
        message += f"; {len(beyond):,} of them {which}"
    return Finding.of("short-file", message, name, byte_range=(nbytes, use.end), next_step=_GET_FILES)


def is_lfs_pointer(checkpoint: Checkpoint, name: str, nbytes: int | None = None) -> bool:
    """Tell whether a file of a checkpoint is what Git LFS leaves in its place; `nbytes` is its length, if known."""
    if nbytes is None:
        nbytes = checkpoint.files.get(name, 0)
    return 0 < nbytes < 1024 and _starts(checkpoint, name, nbytes).startswith(LFS_START)


def _missing(checkpoint: Checkpoint, missing: Sequence[str], total: int) -> Finding:
    usage = checkpoint.usage
    ranks = {rank for name in missing if (rank := checkpoint.format.rank_of(name)) is not None}
    whose = f" (rank{'s' * (len(ranks) > 1)} {ranges(ranks)})" if ranks else ""
    names = missing[0] if len(missing) == 1 else f"{len(missing):,} of {len(usage):,} files"
    verb = "is missing: it held" if len(missing) == 1 else "are missing: they held"
    lost = _lost([usage[name] for name in missing], total)
    gone = set(missing)
    n_tensors = sum(not gone.isdisjoint(entry.chunks.files()) for entry in checkpoint.tensors.values())
    message = f"{names}{whose} {verb} {lost} of {plural(n_tensors, 'tensor')}"
    if len(missing) > 1:
        message += f"; the first is {missing[0]}"
    return Finding.of("missing-file", message, missing[0], next_step=_GET_FILES)


def _lost(uses: Sequence[FileUse], total: int) -> str:
    items, nbytes = sum(use.items for use in uses), sum(use.nbytes for use in uses)
    return f"{nbytes / total:.0%} of the bytes, {plural(items, 'item')}"


def _leftovers(checkpoint: Checkpoint, usage: Mapping[str, FileUse]) -> list[Finding]:
    """Note data files with content that the metadata does not name; empty ones are those of idle ranks.

    Where each rank has metadata of its own, files of ranks whose metadata is lost are no leftovers: it named them.
    """
    known = _ranks_with_metadata(checkpoint)
    unread = {problem.file for problem in checkpoint.problems}  # what is wrong with these is said
    left = sorted(
        name
        for name, nbytes in checkpoint.files.items()
        if nbytes
        and name not in usage
        and name not in unread
        and (rank := checkpoint.format.rank_of(name)) is not None
        and (known is None or rank in known)
    )
    if not left:
        return []
    nbytes = sum(checkpoint.files[name] for name in left)
    whole = all(_starts(checkpoint, name, checkpoint.files[name]).startswith(b"PK") for name in left[:MAX_PEEKED])
    are, they = ("is", "it") if len(left) == 1 else ("are", "they")
    holds = f"hold{'s' * (len(left) == 1)} items of" if whole else f"{are} left by"
    message = f"{listed(left, 1)} ({plural(nbytes, 'byte')}) {are} not named by the metadata"
    message += f": {they} {holds} an older or wider save"
    return [Finding.of("leftover-files", message, left[0])]


def _ranks_with_metadata(checkpoint: Checkpoint) -> set[int] | None:
    """Return the ranks whose own metadata could be read; None if one metadata file is for all."""
    ours = {name: rank for name in metadata_names(checkpoint.files) if (rank := metadata_rank(name)) is not None}
    unread = {problem.file for problem in checkpoint.problems}
    return {rank for name, rank in ours.items() if name not in unread} if ours else None


def _starts(checkpoint: Checkpoint, name: str, nbytes: int) -> bytes:
    try:
        return checkpoint.storage.read(name, 0, min(nbytes, 64))
    except DcptoolError:
        return b""


def mixed_times(checkpoint: Checkpoint, written: Mapping[str, float], metadata: Sequence[str]) -> list[Finding]:
    """Note that files fall into two groups in time, as after a crash in the middle of an overwrite.

    Args:
        checkpoint: an open checkpoint.
        written: file name → when it was last written, in seconds since the epoch.
        metadata: names of the metadata files.
    """
    data = sorted((written[name], name) for name in checkpoint.usage if name in written)
    saved = max((written[name] for name in metadata if name in written), default=None)
    if saved is None or len(data) < 2:
        return []
    gaps = [(later[0] - earlier[0], at) for at, (earlier, later) in enumerate(itertools.pairwise(data), 1)]
    gap, split = max(gaps)
    before, after = data[:split], data[split:]
    spread = max(before[-1][0] - before[0][0], after[-1][0] - after[0][0])
    if gap <= APART_SECONDS or gap < 3 * spread:
        return []
    newer = after if after[0][0] > saved + APART_SECONDS else []
    few, words = (newer, "after") if newer else (before, "before")
    others = f" and {len(few) - 1:,} more of {len(data):,} data files" if len(few) > 1 else ""
    message = f"{few[0][1]}{others} written {gap:,.0f} s {words} the others"
    message += " and after the metadata" if newer else ""
    return [Finding.of("mixed-times", f"{message}: maybe parts of two saves", few[0][1], next_step=_PROVE)]


_PROVE = "File times prove nothing by themselves (a copy changes them); only a marker with checksums does."


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: `0–3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
