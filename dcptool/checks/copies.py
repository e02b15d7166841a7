"""Where a part of a tensor is stored twice: do the two copies hold the same values?

Replicas come from ranks that each kept their own metadata; overlaps from chunks that share elements. Which one a
loader takes is not defined, so that only equal ones are harmless.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from dcptool.checkpoint.boxes import fill_box
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.cover import Overlap
from dcptool.checkpoint.entries import ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent, Ints
from dcptool.checkpoint.fill import numpy_empty
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import Box, cut_box
from dcptool.errors import DcptoolError, UnsupportedError
from dcptool.formats.dcp.format import metadata_rank, rank_metadata
from dcptool.storage import join
from dcptool.words import listed, plural

MAX_NAMED = 5
BAND_ELEMENTS = 1 << 20
"""Elements of each copy in memory at once."""


def replica_problems(checkpoint: Checkpoint) -> list[Finding]:
    """Compare every replica with the chunk it repeats, bit by bit; differences are warnings."""
    problems = []
    for fqn, entry in checkpoint.tensors.items():
        kept = {(chunk.offsets, chunk.sizes): chunk for chunk in entry.chunks} if entry.replicas else {}
        for replica in entry.replicas:
            first = kept.get((replica.offsets, replica.sizes))
            if not first or not first.item or not replica.item:
                continue
            try:
                same = equal(checkpoint, entry, first, replica, (replica.offsets, replica.sizes))
            except DcptoolError:  # the items' own checks say why
                continue
            if not same:
                problems.append(_differs(fqn, first.item, replica.item, replica.offsets, replica.sizes))
    for fqn, found in checkpoint.objects.items():
        for item in found.replicas:
            if found.item and _objects_differ(checkpoint, found, item):
                problems.append(_differs(fqn, found.item, item))
    return problems


def _differs(fqn: str, first: Extent, other: Extent, *box: Ints) -> Finding:
    message = f"{fqn!r} differs between {first.file} and {other.file}; the first is read"
    step = "Each rank saved its own value under this name; dcp.load on as many ranks gives each its own."
    return Finding.of("replicas-differ", message, other.file, fqn, *box, next_step=step)


def saved_apart(checkpoint: Checkpoint) -> list[str]:
    """Return the entries of which ranks saved values of their own, by the checksums of what is stored if there are any.

    What cannot be read is taken as equal: other checks say what is wrong with it.
    """
    found = []
    for fqn, entry in checkpoint.entries.items():
        if isinstance(entry, TensorEntry):
            kept = {(chunk.offsets, chunk.sizes): chunk for chunk in entry.chunks} if entry.replicas else {}
            pairs = ((kept.get((other.offsets, other.sizes)), other) for other in entry.replicas)
            differ = any(first is None or _chunks_differ(checkpoint, entry, first, other) for first, other in pairs)
        else:
            differ = any(_objects_differ(checkpoint, entry, item) for item in entry.replicas)
        found += [fqn] if differ else []
    return found


def apart_notes(checkpoint: Checkpoint, names: Container[str]) -> list[str]:
    """Say which of some entries differ between ranks that each saved its own, of which one is taken."""
    apart = [fqn for fqn in saved_apart(checkpoint) if fqn in names]
    if not apart:
        return []
    note = f"of {plural(len(apart), 'entry')} each rank saved its own, and they differ: {_named(apart)}; "
    note += f"those of one rank are taken, {_which(checkpoint)}"
    for name in rank_metadata(checkpoint.files)[-1:]:
        note += f"; name a rank's metadata to take its own, such as {join(checkpoint.root, name)}"
    return [note]


def require_one_rank(checkpoint: Checkpoint, names: Container[str]) -> None:
    """Refuse entries that differ between ranks that each saved its own, unless one rank's metadata was named.

    Raises:
        UnsupportedError: names them.
    """
    if metadata_rank(checkpoint.name) is not None:
        return
    apart = [fqn for fqn in saved_apart(checkpoint) if fqn in names]
    if apart:
        taken = "--rank 0 takes those of rank 0, " if rank_metadata(checkpoint.files) else ""
        raise UnsupportedError(
            f"{checkpoint.path}: of {plural(len(apart), 'entry')} each rank saved its own, and they differ: "
            f"{_named(apart)}",
            next_step=f"{taken}--exclude {apart[0]!r} leaves them out.",
        )


def _named(apart: list[str]) -> str:
    return listed(list(map(repr, apart)), MAX_NAMED)


def _which(checkpoint: Checkpoint) -> str:
    rank = metadata_rank(checkpoint.name)
    return "the lowest that has them" if rank is None else f"rank {rank} where it has them"


def _chunks_differ(checkpoint: Checkpoint, entry: TensorEntry, first: Chunk, other: Chunk) -> bool:
    try:
        payloads = [checkpoint.payload(entry, chunk) for chunk in (first, other)]
        sums = {(*payload[1:], payload.record.nbytes, payload.record.crc32) for payload in payloads}
        if len(sums) == 1 and payloads[0].record.crc32 is not None:
            return False
        if all(payload.record.crc32 is not None and checkpoint.format.items_apart for payload in payloads):
            return True  # else values may be equal that are parts of storages which are not
        return not equal(checkpoint, entry, first, other, (first.offsets, first.sizes))
    except DcptoolError:
        return False


def _objects_differ(checkpoint: Checkpoint, entry: ObjectEntry, other: Extent) -> bool:
    """Tell whether the pickles of two objects, or the storages in them, have different checksums."""
    try:
        sums = [
            {
                (record.name, record.nbytes, record.crc32)
                for record in checkpoint.source.examine(entry, None, item).records
            }
            for item in (entry.item, other)
            if item
        ]
    except DcptoolError:
        return False
    return len(sums) == 2 and sums[0] != sums[1]


def overlap_verdict(checkpoint: Checkpoint, entry: TensorEntry, overlaps: Iterable[Overlap]) -> str:
    """Return what comparing the shared elements of overlapping chunks shows: "equal", "different" or "unknown"."""
    for overlap in overlaps:
        first, second = entry.chunks[overlap.first], entry.chunks[overlap.second]
        try:
            if not equal(checkpoint, entry, first, second, (overlap.offsets, overlap.sizes)):
                return "different"
        except DcptoolError:
            return "unknown"
    return "equal"


def equal(checkpoint: Checkpoint, entry: TensorEntry, first: Chunk, second: Chunk, box: Box) -> bool:
    """Tell whether two chunks hold the same bits in a box of the tensor that lies in both.

    Raises:
        DcptoolError: one of them cannot be read.
    """
    payloads = [(chunk.offsets, checkpoint.payload(entry, chunk)) for chunk in (first, second)]
    for band in cut_box(box, BAND_ELEMENTS):
        copies = []
        for offsets, payload in payloads:
            out = numpy_empty(band[1], entry.dtype)
            fill_box(checkpoint.source, payload, offsets, band, out)
            copies.append(out.tobytes())
        if copies[0] != copies[1]:
            return False
    return True
