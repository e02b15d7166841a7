"""Compare two checkpoints of any formats and layouts, or a live state dict with one: what `dcptool diff` shows.

Names, kinds, shapes and dtypes first, then the values of all that both have, in constant memory. What differs is
returned as frozen values; nothing is raised for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.selection import select, with_inner
from dcptool.checks.copies import apart_notes
from dcptool.copying.pool import Pool
from dcptool.formats.detect import found_below, open_checkpoint
from dcptool.ops.diff import live
from dcptool.ops.diff.objects import ObjectOutcome, compare_objects
from dcptool.ops.diff.outline import (
    are_comparable,
    known_entries,
    layout_differences,
    lone_entries,
    metadata_problems,
    outer_differences,
    outline,
    prefix_notes,
    side_of,
    subset_note,
    unmatched_notes,
)
from dcptool.ops.diff.pairing import Pairing, likely_renames, lone, pair
from dcptool.ops.diff.results import Difference, DiffOptions, DiffReport, Known, Rename, Side
from dcptool.ops.diff.sides import Access
from dcptool.ops.diff.values import TensorOutcome, ValueComparison
from dcptool.storage import Progress

__all__ = ["DiffOptions", "DiffReport", "compare", "compare_checkpoints"]
DEFAULTS = DiffOptions()
LIVE = "(live)"


def compare(
    a: Checkpoint | Mapping[str, Any] | str | os.PathLike[str],
    b: Checkpoint | str | os.PathLike[str],
    options: DiffOptions = DEFAULTS,
    *,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare two checkpoints, or a live state dict with a checkpoint before it is loaded.

    Args:
        a: an open checkpoint, the path or URL of one, or a state dict as `torch.distributed.checkpoint.save` takes it:
            nested dicts of tensors, DTensors and other values. Of a state dict names, kinds, shapes and dtypes are
            compared, no values; it is flattened as torch does, and torch is not imported.
        b: an open checkpoint, or the path or URL of one.
        options: see `DiffOptions`.
        progress: told the bytes of A's values as they are compared.

    Returns:
        All differences at once. What is only in A is missing from B for a load, what is only in B unexpected.

    Raises:
        DcptoolError: one of them does not open, nothing is selected, or names collide.

    Example:
        >>> report = dcptool.compare({"model": model.state_dict()}, "ckpt/step_500")
        >>> report.equal, report.only_in_a, report.differences
    """
    theirs, notes = _opened(b, "B")
    if isinstance(a, Mapping) and not isinstance(a, Checkpoint):
        report = _compare_live(live.known_entries(a), theirs, options)
    else:
        ours, more = _opened(a, "A")
        report = compare_checkpoints(ours, theirs, options, progress)
        notes = (*more, *notes)
    return report._replace(notes=(*notes, *report.notes))


def _opened(side: Checkpoint | str | os.PathLike[str], name: str) -> tuple[Checkpoint, tuple[Finding, ...]]:
    """Open a side; note which checkpoint that is if a folder above it was named."""
    if isinstance(side, Checkpoint):
        return side, ()
    checkpoint = open_checkpoint(side)
    found = found_below(side, checkpoint)
    return checkpoint, tuple(Finding.of("found-below", f"{name}: {message}") for message in found)


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    options: DiffOptions = DEFAULTS,
    progress: Progress | None = None,
    names: Mapping[str, str] | None = None,
) -> DiffReport:
    """Compare two open checkpoints of any formats and layouts.

    Values are read in boxes of at most 4 MiB, `options.threads` at a time: memory does not grow with the checkpoints. A
    stored record whose values differ has its CRC32 checked; what is damaged is in `unreadable`, and the rest compared.

    Args:
        a, b: the checkpoints.
        options: see `DiffOptions`.
        progress: told the bytes of A's values as they are compared.
        names: fqn in A → name of its counterpart in B, where a conversion changed it.

    Raises:
        LayoutError: nothing is selected, or stripping a prefix makes names collide.
    """
    (keys_a, exclude_a), (keys_b, exclude_b) = (with_inner(side, options.keys, options.exclude) for side in (a, b))
    keys, exclude = (*keys_a, *keys_b), (*exclude_a, *exclude_b)
    options = options._replace(keys=tuple(dict.fromkeys(keys)), exclude=tuple(dict.fromkeys(exclude)))
    a, b = a.flat, b.flat
    known = known_entries(a), known_entries(b)
    paired, renames = _paired(*known, a, options, names or {})
    renamed = [(x, y) for x, y in renames if x.kind == "tensor"]
    tensors = [(x, y) for x, y in paired.both if are_comparable(x, y)]
    objects = [(x, y) for x, y in paired.both if x.kind == y.kind == "object"]
    readers = Access("A", a), Access("B", b)
    with Pool(options.threads) as pool:
        comparison = ValueComparison(*readers, options, pool, progress)
        of_tensors = comparison.run([(a.tensors[x.fqn], b.tensors[y.fqn]) for x, y in tensors])
        of_renamed = comparison.run([(a.tensors[x.fqn], b.tensors[y.fqn]) for x, y in renamed])
        pairs = ((a.objects[x.fqn], b.objects[y.fqn]) for x, y in objects)
        of_objects = [found for _, found in pool.run(lambda pair: compare_objects(*readers, *pair), pairs)]
    unreadable = [
        *(finding for outcome in of_tensors for finding in outcome.unreadable),
        *(finding for outcome in of_objects for finding in outcome.unreadable),
    ]
    inner = {
        **{x.fqn: _of_tensor(x, y, outcome) for (x, y), outcome in zip(tensors, of_tensors, strict=True)},
        **{x.fqn: _of_object(x, y, outcome) for (x, y), outcome in zip(objects, of_objects, strict=True)},
    }
    layouts = layout_differences(a, b, paired) if options.layout else {}
    same_values = {
        x.fqn: outcome.values is None and not outcome.unreadable
        for (x, _), outcome in zip(renamed, of_renamed, strict=True)
    }
    only = lone_entries(paired.only_in_a, b, a), lone_entries(paired.only_in_b, a, b)
    report = outline(side_of(a), side_of(b), paired, *only)._replace(
        nbytes=sum(a.tensors[x.fqn].nbytes for x, _ in tensors),
        renames=tuple(Rename(x.fqn, y.fqn, same_values.get(x.fqn)) for x, y in renames),
        differences=tuple(_all_differences(paired, inner, layouts)),
        n_within=sum(outcome.is_within for outcome in of_tensors),
        unreadable=(
            *unreadable,
            *metadata_problems("A", a, options, unreadable),
            *metadata_problems("B", b, options, unreadable),
        ),
    )
    notes = (*report.notes, *subset_note(report), *_option_notes(*known, options))
    return report._replace(notes=(*notes, *_apart("A", a, known[0]), *_apart("B", b, known[1])))


def _apart(name: str, checkpoint: Checkpoint, known: Sequence[Known]) -> tuple[Finding, ...]:
    """Note what ranks saved of their own on a side, of which only one rank's was compared."""
    notes = apart_notes(checkpoint, {entry.fqn for entry in known})
    return tuple(Finding.of("replicas-differ", f"{name}: {note}", severity=Severity.NOTE) for note in notes)


def _all_differences(
    paired: Pairing, inner: Mapping[str, Difference | None], layouts: Mapping[str, Difference]
) -> Iterator[Difference]:
    """Yield all differences in the order of A; what was found on the inside says more than what the metadata tells."""
    for x, y in paired.both:
        within = inner.get(x.fqn)
        yield from [within] if within else outer_differences(x, y)
        if x.fqn in layouts:
            yield layouts[x.fqn]


def _of_tensor(x: Known, y: Known, outcome: TensorOutcome) -> Difference | None:
    if x.dtype != y.dtype:
        return Difference("dtype", x.fqn, y.fqn, x.dtype, y.dtype, values=outcome.values)
    return Difference("values", x.fqn, y.fqn, x.dtype, y.dtype, values=outcome.values) if outcome.values else None


def _of_object(x: Known, y: Known, outcome: ObjectOutcome) -> Difference | None:
    if outcome.unequal is None:
        return None
    return Difference("object", x.fqn, y.fqn, outcome.unequal.a, outcome.unequal.b, outcome.unequal.where)


def _compare_live(known: Sequence[Known], b: Checkpoint, options: DiffOptions) -> DiffReport:
    theirs = known_entries(b)
    paired, renames = _paired(known, theirs, b, options, {})
    n_tensors = sum(entry.kind == "tensor" for entry in known)
    side = Side(LIVE, "live", "live state dict", n_tensors, len(known) - n_tensors, 0)
    only = lone_entries(paired.only_in_a, b), tuple(map(lone, paired.only_in_b))
    report = outline(side, side_of(b), paired, *only)._replace(
        renames=tuple(Rename(x.fqn, y.fqn, None) for x, y in renames),
        differences=tuple(difference for x, y in paired.both for difference in outer_differences(x, y)),
        unreadable=tuple(metadata_problems("B", b, options, ())),
        values_compared=False,
    )
    return report._replace(notes=(*report.notes, *subset_note(report), *_option_notes(known, theirs, options)))


def _option_notes(a: Sequence[Known], b: Sequence[Known], options: DiffOptions) -> tuple[Finding, ...]:
    return (*prefix_notes(a, b, options), *unmatched_notes(a, b, options))


def _paired(
    a: Sequence[Known], b: Sequence[Known], checkpoint: Checkpoint, options: DiffOptions, names: Mapping[str, str]
) -> tuple[Pairing, list[tuple[Known, Known]]]:
    """Pair the entries of both sides, and those that are only on one but probably renamed.

    Raises:
        LayoutError: no entry of either side is selected; the message lists what there is in the checkpoint.
    """
    paired = pair(a, b, options, names)
    if (options.keys or options.exclude) and not (paired.both or paired.only_in_a or paired.only_in_b):
        select(checkpoint, options.keys, options.exclude)
    return paired, likely_renames(paired.only_in_a, paired.only_in_b)
