"""Where a part of a tensor is stored twice: do the two copies hold the same values?

Replicas come from ranks that each kept their own metadata; overlaps from chunks that share elements. Which one a
loader takes is not defined, so that only equal ones are harmless.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcptool.checkpoint.boxes import fill_box
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.cover import Overlap
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Chunk
from dcptool.checkpoint.fill import numpy_empty
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import Box, cut_box
from dcptool.errors import DcptoolError

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
                message = f"{fqn!r} differs between {first.item.file} and {replica.item.file}; the first is read"
                step = "Each rank saved its own value under this name; a resume takes one of them."
                where = (replica.item.file, fqn, replica.offsets, replica.sizes)
                problems.append(Finding.of("replicas-differ", message, *where, next_step=step))
    return problems


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
