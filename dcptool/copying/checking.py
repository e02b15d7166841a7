"""What is found out about the source's records while they are copied: each is checked once, whoever reads it.

What does not check is collected, not raised, so that all of it can be told. Moves no bytes but those of records that
have to be read once more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, NamedTuple

from dcptool.checkpoint.boxes import record_problem
from dcptool.checkpoint.casting import NO_LOSS, Loss
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Record, place_words, whereabouts
from dcptool.checkpoint.fill import Piece, RecordCheck
from dcptool.checkpoint.findings import Finding, cannot_be_read
from dcptool.copying.reading import PartReader, TensorReader, Where
from dcptool.errors import DcptoolError, ItemError, StorageError, UnsupportedError


class PartlyRead(NamedTuple):
    """A record of which only parts were read: its tensor, the index of its chunk there, and what was seen of it."""

    fqn: str
    chunk_index: int
    record: Record
    pieces: tuple[Piece, ...]


class SourceChecks:
    """What is known of the source so far; several threads add to it.

    Attributes:
        unproven: fqns of tensors with values that are stored without a checksum.
        lost: what casts lost, by fqn.
    """

    def __init__(self) -> None:
        self.unproven: set[str] = set()
        self.lost: dict[str, Loss] = {}
        self._failures: dict[tuple[Any, ...], Finding] = {}
        self._lock = threading.Lock()

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What was found damaged, each place once."""
        with self._lock:
            return tuple(self._failures.values())

    def fail(self, error: DcptoolError, where: Where) -> None:
        """Note that something stored is damaged, or of a form that cannot be read here."""
        self.add([damaged_item(error, where)])

    def add(self, failures: Iterable[Finding]) -> None:
        """Note what was found damaged; what is known of a place already stays."""
        with self._lock:
            for finding in failures:
                self._failures.setdefault((finding.fqn, finding.file, finding.byte_range), finding)

    def end(self, reader: PartReader) -> list[PartlyRead]:
        """Check what a reader has read, all of whose bands were read; return the records that it read parts of."""
        if isinstance(reader, TensorReader):
            return self._end_tensor(reader)
        if message := reader.check.problem():
            self.fail(ItemError(message), reader.where)
        return []

    def _end_tensor(self, reader: TensorReader) -> list[PartlyRead]:
        if any(reader.lost):
            with self._lock:
                self.lost[reader.entry.fqn] = self.lost.get(reader.entry.fqn, NO_LOSS).plus(reader.lost)
        return [found for stored in reader.sources for found in self._end_stored(stored)]

    def _end_stored(self, reader: TensorReader) -> list[PartlyRead]:
        fqn, partly_read = reader.entry.fqn, []
        for index, check in reader.checks():
            record = check.record
            if record.crc32 is None and record.nbytes:
                self.unproven.add(fqn)
            elif not check.is_whole():
                partly_read.append(PartlyRead(fqn, index, record, tuple(check.pieces)))
            elif message := check.problem():
                self.fail(ItemError(message), (fqn, reader.entry.chunks[index], record))
        return partly_read


def settle(source: Checkpoint, partly_read: Sequence[PartlyRead], threads: int) -> tuple[Finding, ...]:
    """Check records of which several read a part: from all pieces together, else by reading each once more.

    Args:
        source: the checkpoint they are of.
        partly_read: of all reports.
        threads: how many records are read at the same time.

    Returns:
        What is damaged.
    """
    sharing: dict[Record, list[PartlyRead]] = {}  # tensors of a `.pt` file may be views of one record
    for found in partly_read:
        sharing.setdefault(found.record, []).append(found)

    def check(record: Record) -> list[Finding]:
        joined = RecordCheck(record, [piece for found in sharing[record] for piece in found.pieces])
        message = joined.problem() if joined.is_whole() else record_problem(source.source, record)
        return [_damage(source, found, message) for found in sharing[record]] if message else []

    with ThreadPoolExecutor(threads, "settle") as pool:
        return tuple(chain.from_iterable(pool.map(check, sharing)))


def _damage(source: Checkpoint, found: PartlyRead, message: str) -> Finding:
    entry = source.flat.entries.get(found.fqn)  # what is dequantised is not there under its own name
    chunk = entry.chunks[found.chunk_index] if isinstance(entry, TensorEntry) else None
    return damaged_item(ItemError(message), (found.fqn, chunk, found.record))


def damaged_item(error: DcptoolError, where: Where) -> Finding:
    """Return the finding that something stored is damaged, of a form that cannot be read here, or not given out."""
    fqn, chunk, record = where
    item = chunk.item if chunk else record.item if record else None
    place = place_words(item, fqn, chunk.offsets if chunk else ())
    message = f"{place}: {error.message}" if place else error.message
    at = whereabouts(item, fqn, chunk)
    if isinstance(error, StorageError):
        return cannot_be_read(error, *at, message=message)
    if isinstance(error, UnsupportedError):
        return Finding.of("unsupported-item", message, *at, error.next_step)
    return Finding.of("damaged-item", message, *at)
