"""Where items lie in their files: beyond the end, or one over another. Works on columns; reads nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent, whereabouts
from dcptool.checkpoint.findings import Finding, cannot_be_read, foreign_tensors
from dcptool.checkpoint.items import FileItems, Placed, name_of
from dcptool.checkpoint.subclasses import QUANTISED_DTYPES, odd_chunks
from dcptool.errors import DcptoolError, StorageError

MAX_PER_FILE = 20
"""Overlaps named for one file."""
MAX_LOOKED_AT = 64
"""Tensors with such an item that are looked at; the others are taken for like them."""


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
    and tensors of a class whose inner tensors are not found are noted.
    """
    if not checkpoint.format.items_apart:
        return []
    problems = []
    foreign: dict[str, str] = {}
    n_looked_at, last = 0, _ItemLook()
    for entry in checkpoint.tensors.values():
        short, near = odd_chunks(checkpoint, entry)
        quantised = list(entry.chunks[:1]) if entry.dtype.startswith(QUANTISED_DTYPES) else []
        odd = quantised or short or near
        if not odd:
            continue
        found = last if short or quantised else _ItemLook()
        if n_looked_at < MAX_LOOKED_AT:
            n_looked_at += 1
            found = last = _look_at(checkpoint, entry, odd[0])
        if found.foreign and not found.is_known:
            foreign[entry.fqn] = found.foreign
        elif short and not found.foreign:
            problems.append(_short_item(entry, short[0], len(short)))
    for held in checkpoint.objects.values():
        if held.item and not held.item.nbytes:
            message = f"{held.fqn!r}: its item in {held.item.file} has no bytes, too few for any object"
            problems.append(Finding.of("short-item", message, *whereabouts(held.item, held.fqn, None)))
    return [*problems, *foreign_tensors(foreign)]


class _ItemLook(NamedTuple):
    """What an item is: of which class, if that is no plain tensor, and whether its inner tensors are known."""

    foreign: str = ""
    is_known: bool = False


def _look_at(checkpoint: Checkpoint, entry: TensorEntry, chunk: Chunk) -> _ItemLook:
    if not chunk.item:
        return _ItemLook()
    try:
        found = checkpoint.source.examine(entry, chunk, chunk.item)
    except DcptoolError:
        return _ItemLook()  # which --records tells of it
    return _ItemLook(found.foreign, bool(found.inner))


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
