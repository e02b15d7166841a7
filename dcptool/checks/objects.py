"""Look into small objects at every level: does one run code when it is loaded. Of large ones level `records` tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, unsafe_pickle
from dcptool.checkpoint.items import Placed
from dcptool.checks.items import HEADERS_NBYTES, about
from dcptool.errors import DcptoolError, RunsCodeError
from dcptool.storage.window import Window


def small_object_problems(checkpoint: Checkpoint) -> list[Finding]:
    """Return the objects of up to `HEADERS_NBYTES` that run code when they are loaded; torch executes their pickles.

    Those that cannot be read, or are damaged, are passed over: level `records` tells of them.

    Args:
        checkpoint: an open checkpoint.
    """
    if not checkpoint.format.items_apart:  # then the pickle of all was read to open it
        return []
    problems: list[Finding] = []
    for near in _near(checkpoint):
        window = Window(checkpoint.storage)
        source = checkpoint.source.over(window)
        first, last = near[0].item, near[-1].item
        with suppress(DcptoolError):
            window.load(first.file, first.byte_offset, last.span[1])
        for placed in near:
            try:
                unsafe, more = source.examine(placed.entry, None, placed.item).unsafe, ""
            except RunsCodeError as error:
                unsafe, more = error.names, f"; {error.message}"
            except DcptoolError:
                continue
            for finding in unsafe_pickle(unsafe, "its pickle"):
                problems.append(about(placed, finding.kind, finding.message + more, finding.next_step))
    return problems


def _near(checkpoint: Checkpoint) -> Iterator[list[Placed]]:
    """Yield the small objects, those that are read together in one list."""
    items = [(item, entry) for entry in checkpoint.objects.values() for item in (entry.item, *entry.replicas) if item]
    small = sorted((pair for pair in items if pair[0].nbytes <= HEADERS_NBYTES), key=lambda pair: pair[0][:3])
    near: list[Placed] = []
    for item, entry in small:
        if near and (near[0].item.file != item.file or item.span[1] - near[0].item.byte_offset > HEADERS_NBYTES):
            yield near
            near = []
        near.append(Placed(item, entry, None))
    if near:
        yield near
