"""What of a checkpoint is damaged and may be left out, found by reading all of it."""

from __future__ import annotations

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import ObjectEntry
from dcptool.checkpoint.extents import Extent, place_words
from dcptool.checkpoint.findings import Finding, errors
from dcptool.checkpoint.kinds import Effect
from dcptool.checkpoint.selection import selects
from dcptool.checks.check import Level, check
from dcptool.errors import ItemError
from dcptool.ops.guards import damaged
from dcptool.ops.sources import Wish


def corrupt_entries(checkpoint: Checkpoint, threads: int | None) -> list[Finding]:
    """Return what is damaged, and what files held that are missing or cut short."""
    report = check(checkpoint, Level.DEEP, threads=threads)
    unread = (Effect.UNREAD, Effect.UNREADABLE)  # which is refused when it is read
    found = [finding for finding in errors(report.findings) if finding.traits.effect not in unread]
    named = {finding.fqn for finding in found}
    there = {name: checkpoint.storage.size(name) for name in checkpoint.usage}
    short = {name for name, use in checkpoint.usage.items() if (there[name] or 0) < use.end}

    def is_lost(item: Extent | None) -> bool:
        return item is not None and item.file in short and item.span[1] > (there[item.file] or 0)

    for fqn, entry in checkpoint.items() if short else ():
        if fqn in named:
            continue
        if isinstance(entry, ObjectEntry):
            items = iter([entry.item])
        else:
            items = iter(()) if short.isdisjoint(entry.chunks.files()) else (chunk.item for chunk in entry.chunks)
        lost = next(filter(is_lost, items), None)
        if lost:
            why = "is missing" if there[lost.file] is None else f"ends at byte {there[lost.file]:,}"
            message = f"{fqn!r} is stored in {place_words(lost)}; that file {why}"
            found.append(Finding.of("lost-entry", message, lost.file, fqn))
    return found


def require_some_left(checkpoint: Checkpoint, found: list[Finding], wish: Wish) -> None:
    """Refuse a source of which nothing that is wanted is undamaged.

    Raises:
        ItemError: names what is damaged.
    """
    bad = {finding.fqn for finding in found if finding.fqn}
    if found and not any(fqn not in bad and selects(fqn, wish.keys, wish.exclude) for fqn in checkpoint):
        causes = [finding for finding in found if finding.kind != "lost-entry"] or found
        raise ItemError(damaged(checkpoint, causes, "Nothing undamaged is left to convert."))
