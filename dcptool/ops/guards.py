"""What must hold of a source before it is read, and of output before it gets its name: one for all that rewrite."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, errors, state_of
from dcptool.checkpoint.kinds import Effect
from dcptool.checkpoint.selection import Selection, selects
from dcptool.checks.check import check, shown_by_metadata
from dcptool.checks.copies import apart_notes
from dcptool.copying.checking import settle
from dcptool.copying.engine import CopyReport
from dcptool.copying.outputs import OutputFile
from dcptool.copying.pool import Pool
from dcptool.copying.publishing import Target, leftovers
from dcptool.errors import ItemError, LayoutError, StorageError, UnsafePickleError, UnsupportedError
from dcptool.formats.dcp.format import rank_name
from dcptool.formats.detect import open_checkpoint
from dcptool.ops.diff.objects import compare_objects
from dcptool.ops.diff.results import DiffOptions
from dcptool.ops.diff.sides import Access
from dcptool.ops.diff.values import ValueComparison
from dcptool.storage import is_url, join, locate
from dcptool.words import cut_lines, listed

MAX_LISTED = 20
MAX_STEPS = 2
LEAVES_OUT = "--skip-corrupt leaves such entries out."
ANOTHER_STEP = "Copy the files again from where they were saved, or take another step."


def require_sound(
    checkpoint: Checkpoint,
    selection: Selection,
    keys: Sequence[str],
    exclude: Sequence[str],
    *,
    skip_corrupt: bool = False,
    trust: bool = False,
    hint: str = "",
) -> None:
    """Refuse a source whose metadata or files show that what is selected is not all there.

    Args:
        checkpoint: the source.
        selection: what is wanted of it.
        keys, exclude: what that was selected by.
        skip_corrupt: what missing and short files held was left out already.
        trust: what runs code when it is loaded is no reason to refuse.
        hint: what the user can do, the last line of the message; that of --skip-corrupt is left out where that is
            refused too.

    Raises:
        ItemError: something is missing; the message lists what.
    """
    names = {tensor.entry.fqn for tensor in selection.tensors} | {item.entry.fqn for item in selection.objects}
    files = {name for tensor in selection.tensors for name in tensor.entry.chunks.files()}
    files |= {item.entry.item.file for item in selection.objects if item.entry.item}

    def can_be_left_out(finding: Finding) -> bool:
        return bool(finding.fqn) or finding.traits.of_file

    def matters(finding: Finding) -> bool:
        if trust and finding.traits.effect is Effect.UNSAFE:
            return False
        if finding.fqn in checkpoint:
            return finding.fqn in names
        if skip_corrupt and can_be_left_out(finding):
            return False
        if finding.fqn:  # a tensor that should be there
            return selects(finding.fqn, keys, exclude)
        return finding.file not in checkpoint.usage or finding.file in files

    found = [finding for finding in errors(check(checkpoint).findings) if matters(finding)]
    if found:
        can_skip = hint != LEAVES_OUT or all(map(can_be_left_out, found))
        raise ItemError(damaged(checkpoint, found, hint if can_skip else ""))


def require_no_part(path: str, checkpoint: Checkpoint, what: str) -> None:
    """Refuse to replace a file of a checkpoint, such as a shard beside the index that was opened.

    Args:
        path: of the output.
        checkpoint: what is read.
        what: it is called in the message.

    Raises:
        UnsupportedError: the path is one of its files.
    """
    if is_url(path) or not os.path.lexists(path):
        return
    ours = os.path.realpath(path)
    if any(os.path.realpath(join(checkpoint.root, name)) == ours for name in (*checkpoint.usage, checkpoint.name)):
        raise UnsupportedError(f"{path} belongs to the {what} {checkpoint.path}; choose another place")


_WHAT = {
    "other": "cannot be read here",
    "incomplete": "is not whole",
    "unreadable": "could not be read",
    "unsafe": "runs code when it is loaded",
}
_HINTS = {"other": "", "unreadable": "", "unsafe": "--trust takes it all the same."}
"""In place of leaving something out."""


def damaged(checkpoint: Checkpoint, found: Sequence[Finding], hint: str) -> str:
    """Say that a source is damaged and nothing was written: what was found, and what to do.

    What is only of a form that cannot be read here is not damaged, and nothing to be left out.
    """
    state = state_of(found)
    what = _WHAT.get(state, "is damaged")
    steps = dict.fromkeys(finding.next_step for finding in found if finding.next_step)
    lines = [
        f"{checkpoint.path} {what}, nothing was written:",
        *cut_lines([finding.message for finding in found], MAX_LISTED),
    ]
    return "\n".join(filter(None, [*lines, *list(steps)[:MAX_STEPS], _HINTS.get(state, hint)]))


def require_safe(checkpoint: Checkpoint, selection: Selection) -> None:
    """Refuse to carry objects, and tensors made of tensors, whose pickles run code when they are loaded; all are read.

    Raises:
        UnsafePickleError: names them.
    """
    unsafe = {item.entry.fqn: checkpoint.source.unsafe.get(item.entry.fqn) for item in selection.in_order}
    lines = [f"{fqn!r} calls or names {listed(names, MAX_STEPS)}" for fqn, names in unsafe.items() if names]
    if lines:
        first = next(fqn for fqn, names in unsafe.items() if names)
        raise UnsafePickleError(
            "\n".join([f"{checkpoint.path} holds what runs code when it is loaded:", *cut_lines(lines, MAX_LISTED)]),
            next_step=f"Nothing was written; --exclude {first!r} leaves it out, --trust takes it all the same.",
        )


def of_rank(path: str, rank: int | None) -> str:
    """Return the path that opens a checkpoint as one rank saved it, of those in which each kept metadata of its own.

    Args:
        path: of the checkpoint.
        rank: which; None for all of them together, as it is.

    Raises:
        LayoutError: it has no metadata of that rank.
        CheckpointNotFoundError, StorageError: nothing is there, or it cannot be looked at.
    """
    if rank is None:
        return path
    location = locate(path)
    if location.file is not None or location.storage.size(rank_name(rank)) is None:
        raise LayoutError(
            f"--rank {rank}: {path} has no {rank_name(rank)}",
            next_step="Only saves with use_collectives=False have metadata of each rank; leave --rank out.",
        )
    return join(path.rstrip("/"), rank_name(rank))


def require_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse a source that somebody wrote to while it was read: half of it may be of another save.

    Raises:
        StorageError: names a file that changed.
        CheckpointNotFoundError: it is gone.
    """
    changed = checkpoint.changed()
    if changed:
        message = f"{checkpoint.path}: {changed} changed while it was read, nothing was written"
        raise StorageError(message, next_step="Somebody saves there: run this again when that is done.")


def require_proven(checkpoint: Checkpoint, reports: Sequence[CopyReport], threads: int, hint: str) -> None:
    """Refuse a source that changed or is damaged; check the records that several processes read parts of.

    Args:
        checkpoint: the source.
        reports: of all who copied from it.
        threads: how many records are read at the same time.
        hint: what the user can do, the last line of the message.

    Raises:
        ItemError: names tensors, files and bytes.
        StorageError: somebody wrote to it meanwhile.
    """
    require_unchanged(checkpoint)
    partly_read = [found for report in reports for found in report.partly_read]
    found = chain(*(report.failures for report in reports), settle(checkpoint, partly_read, threads))
    failures: dict[Any, Finding] = {}
    for finding in found:
        failures.setdefault((finding.fqn, finding.file, finding.byte_range), finding)
    if failures:
        raise ItemError(damaged(checkpoint, list(failures.values()), hint))


def require_same(place: Target, files: Sequence[OutputFile], selection: Selection, part: str = "") -> None:
    """Open what was written: its shapes, dtypes and lengths must be what was meant, and nothing of it missing or wrong.

    Args:
        place: where it is.
        files: that were written.
        selection: what is in them.
        part: where the checkpoint is below the place.

    Raises:
        ItemError: they are not.
    """
    written = open_checkpoint(join(place.written, part) if part else place.written)
    meant = Counter((tensor.dtype, tensor.entry.shape) for tensor in selection.tensors)
    found = Counter((entry.dtype, entry.shape) for entry in written.tensors.values())
    different = [file.name for file in place.named(files) if place.storage.size(file.name) != file.nbytes]
    told = (found for found in errors(shown_by_metadata(written)) if found.traits.effect is not Effect.UNSAFE)
    wrong = [finding.message for finding in told]
    # Objects of a `.pt` file may hold tensors too.
    if meant - found or different or wrong:
        what = [*(meant - found), *(different or wrong)][:3]
        raise ItemError(f"what was written does not open as what was meant: {what}; this is a bug")


def require_equal(source: Checkpoint, written: Checkpoint, selection: Selection, threads: int) -> None:
    """Compare every tensor that was not cast, and every object, with what it was made from.

    Raises:
        ItemError: one of them differs; names it.
    """
    source_inner = {fqn: found.inner for fqn, found in source.subclasses.items()}
    sides = Access("A", source), Access("B", written)
    stored = [item for item in selection.tensors if item.entry.fqn not in source.recipes]
    tensors = [item for item in stored if item.dtype == item.entry.dtype and item.name in written.tensors]
    objects = [item for item in selection.objects if item.name in written.objects]
    named = [
        (item.name if part is item.entry else f"{item.name}.{part.inner}", part)
        for item in tensors
        for part in source_inner.get(item.entry.fqn, (item.entry,))
    ]
    with Pool(threads) as pool:
        comparison = ValueComparison(*sides, DiffOptions(), pool, None)
        outcomes = comparison.run([(entry, written.flat.tensors[name]) for name, entry in named])
        pairs = ((item.entry, written.objects[item.name]) for item in objects)
        found = [outcome for _, outcome in pool.run(lambda pair: compare_objects(*sides, *pair), pairs)]
    wrong = [
        name
        for (name, _), outcome in zip(named, outcomes, strict=True)
        if outcome.values is not None or outcome.unreadable
    ]
    wrong += [item.name for item, got in zip(objects, found, strict=True) if got.unequal or got.unreadable]
    if wrong:
        raise ItemError(f"the output differs from the source in {len(wrong):,} entries, the first {wrong[0]!r}")


def source_notes(checkpoint: Checkpoint, selection: Selection, unproven: Collection[str] = ()) -> list[str]:
    """Say of which entries of a source there are several, and what of it could not be checked.

    Args:
        checkpoint: the source.
        selection: what was taken of it.
        unproven: fqns of tensors that are stored without checksums.
    """
    told = []
    names = {item.entry.fqn: item.name for item in selection.in_order}
    told += apart_notes(checkpoint, names)
    doubled = next((one for one in checkpoint.problems if one.kind == "duplicate-name" and one.fqn in names), None)
    if doubled and doubled.fqn:
        told.append(f"{doubled.message}: {names[doubled.fqn]!r}")
    told += [one.message for one in checkpoint.problems if one.kind == "copies-left-out"]
    if unproven:
        n_all = len(selection.tensors)
        which = f"all {n_all:,}" if len(unproven) == n_all else f"{len(unproven):,} of {n_all:,}"
        told.append(
            f"{which} tensors are stored without checksums, such as {min(unproven)!r}: that their bytes are what was "
            "saved is not proven"
        )
    return told


def leftover_notes(path: str) -> list[str]:
    """Name temporary output that an earlier run left beside a path."""
    what = "is temporary output of a run that was killed, or still works; if none does, delete it"
    return [f"{left} {what}" for left in leftovers(path)[:1]]
