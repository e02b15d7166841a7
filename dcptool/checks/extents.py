"""Where items lie in their files: beyond the end, or one over another. Works on columns; reads nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import repeat
from operator import mul, sub

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent, whereabouts
from dcptool.checkpoint.findings import Finding, cannot_be_read, foreign_tensors
from dcptool.checkpoint.items import FileItems, Placed, name_of
from dcptool.errors import DcptoolError, StorageError

MAX_PER_FILE = 20
"""Overlaps named for one file."""
LEAST_AROUND_NBYTES = 600
"""What torch.save puts around the values of one tensor has 1,116 bytes at the least (2.2 to 2.14), dcptool 653."""
MAX_LOOKED_AT = 64
"""Tensors with such an item that are looked at; the others are taken for like them."""
_QUANTISED = ("qint", "quint")


def extent_problems(checkpoint: Checkpoint, by_file: FileItems) -> list[Finding]:
    """Return items that lie over one another in their file; only zips and frames lie side by side."""
    if not checkpoint.format.items_apart or checkpoint.variant.shares_places:
        return []
    problems = []
    for file in by_file.files:
        starts, ends = by_file.spans(file)
        overlapping = [index for index in range(1, len(starts)) if starts[index] < ends[index - 1]]
        for index in overlapping[:MAX_PER_FILE]:
            problems.append(_overlap(file, by_file.item(file, index - 1), by_file.item(file, index)))
        if len(overlapping) > MAX_PER_FILE:
            message = f"{len(overlapping) - MAX_PER_FILE:,} more items of {file} lie over one another"
            problems.append(Finding.of("items-overlap", message, file))
    return problems


def short_items(checkpoint: Checkpoint) -> list[Finding]:
    """Return tensors with an item that has fewer bytes than the elements of its box need; compressed ones may.

    Those of a subclass may too, such as quantised ones: items too short for a plain tensor are looked at, some of them,
    and tensors of such a class are noted.
    """
    if not checkpoint.format.items_apart:
        return []
    problems = []
    foreign: dict[str, str] = {}
    n_looked_at = 0
    for entry in checkpoint.tensors.values():
        if entry.dtype.startswith(_QUANTISED):
            foreign[entry.fqn] = "a quantised tensor"
            continue
        short, near = _short_chunks(checkpoint, entry)
        what = ""
        if (short or near) and n_looked_at < MAX_LOOKED_AT:
            n_looked_at += 1
            what = _foreign(checkpoint, entry, (short or near)[0])
        elif short and len(foreign) >= MAX_LOOKED_AT:
            what = next(reversed(foreign.values()))
        if what:
            foreign[entry.fqn] = what
        elif short:
            problems.append(_short_item(entry, short[0], len(short)))
    for found in checkpoint.objects.values():
        if found.item and not found.item.nbytes:
            message = f"{found.fqn!r}: its item in {found.item.file} has no bytes, too few for any object"
            problems.append(Finding.of("short-item", message, *whereabouts(found.item, found.fqn, None)))
    return [*problems, *foreign_tensors(foreign)]


def _short_chunks(checkpoint: Checkpoint, entry: TensorEntry) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks whose items are shorter than their values, and those that are a little longer."""
    dtype = dtypes.BY_NAME.get(entry.dtype)
    if dtype is None:
        return [], []
    rows = slice(entry.chunks.first_row, entry.chunks.first_row + len(entry.chunks))
    lacking = list(map(sub, _needed_nbytes(entry, dtype.itemsize), checkpoint.table.byte_length[rows]))
    least = 0 if checkpoint.variant.shares_places else -LEAST_AROUND_NBYTES
    if not lacking or max(lacking) <= least:
        return [], []
    found = [(nbytes, entry.chunks[index]) for index, nbytes in enumerate(lacking) if nbytes > least]
    plain = [(nbytes, chunk) for nbytes, chunk in found if chunk.item and not chunk.item.transforms]
    return [chunk for nbytes, chunk in plain if nbytes > 0], [chunk for nbytes, chunk in plain if nbytes <= 0]


def _foreign(checkpoint: Checkpoint, entry: TensorEntry, chunk: Chunk) -> str:
    """Return what the item of a chunk is, if that is a tensor of a class that is not looked into; "" if not."""
    try:
        return checkpoint.source.examine(entry, chunk, chunk.item).foreign if chunk.item else ""
    except DcptoolError:
        return ""  # which --records tells of it


def _needed_nbytes(entry: TensorEntry, itemsize: int) -> Iterable[int]:
    """Return the bytes of each chunk's elements, column by column."""
    needed: Iterable[int] = repeat(itemsize, len(entry.chunks))
    for dim in range(len(entry.shape)):
        needed = map(mul, needed, entry.chunks.column(dim)[1])
    return needed


def _short_item(entry: TensorEntry, chunk: Chunk, count: int) -> Finding:
    item = chunk.item or Extent("", 0, 0)
    more = f", and {count - 1:,} more of its items are too short" if count > 1 else ""
    message = f"{entry.fqn!r}: its item in {item.file} at byte {item.byte_offset:,} has {item.nbytes:,} bytes, "
    message += f"too few for {entry.dtype} {list(chunk.sizes)}{more}"
    return Finding.of("short-item", message, *whereabouts(item, entry.fqn, chunk))


def edge_problems(checkpoint: Checkpoint, by_file: FileItems, known: Collection[str | None]) -> list[Finding]:
    """Return files that a few bytes at their first and last tensor show to be wrong.

    A file of another save under this metadata mostly shows here, unless its items happen to lie in the same places.
    Files in `known` have been found wrong before.
    """
    problems = []
    for file in sorted(set(by_file.files).difference(known)):
        nbytes = checkpoint.files.get(file, 0)
        _, ends = by_file.spans(file)
        there = [index for index in (0, len(ends) - 1) if ends[index] <= nbytes]
        for placed in dict.fromkeys(by_file.item(file, index) for index in there):
            try:
                wrong = checkpoint.source.edge_problem(placed.item) if placed.chunk is not None else ""
            except StorageError as error:
                problems.append(cannot_be_read(error, file))
                break
            if wrong and placed.chunk is not None:
                message = f"{file}: {name_of(placed)}: {wrong}"
                where = (file, placed.entry.fqn, placed.chunk.offsets, None, placed.item.span)
                problems.append(Finding.of("misplaced-item", message, *where))
                break
    return problems


def _overlap(file: str, first: Placed, second: Placed) -> Finding:
    start = second.item.byte_offset
    message = f"items of {name_of(first)} and {name_of(second)} lie over one another in {file} at byte {start:,}"
    span = (start, min(first.item.span[1], start + second.item.nbytes))
    offsets = second.chunk.offsets if second.chunk else None
    return Finding.of("items-overlap", message, file, second.entry.fqn, offsets, None, span)
