"""What is found out about a file while its bytes pass, front to back: digests, and every CRC32 stored in it.

Headers of items are read from the piece that is passing; of an item that lies over its end, from the storage.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence

from dcptool.checkpoint.entries import Source
from dcptool.checkpoint.extents import Record
from dcptool.checkpoint.fill import crc32
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.items import Placed
from dcptool.checks.items import about
from dcptool.checks.zips import damaged_record, opened
from dcptool.errors import ItemError, MetadataError, UnsupportedError
from dcptool.formats.digests import SHA256, Digesting
from dcptool.ops.copy.survey import ItemsOfFile
from dcptool.ops.verify.vouched import Claim
from dcptool.storage import Storage
from dcptool.storage.stream import stream
from dcptool.storage.through import Through
from dcptool.storage.window import Window

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_AGAIN = "Copy this file again from where it was saved, or take another step."


class _Passing(Through):
    """A storage of which the piece of a file that is passing is read from memory."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._file, self._start, self._piece = "", 0, memoryview(b"")

    def show(self, file: str, start: int, piece: memoryview) -> None:
        """Serve reads of these bytes of a file from here, until the next are shown."""
        self._file, self._start, self._piece = file, start, piece

    def _shown(self, name: str, byte_offset: int, nbytes: int) -> memoryview | None:
        at = byte_offset - self._start
        inside = name == self._file and at >= 0 and at + nbytes <= len(self._piece)
        return self._piece[at : at + nbytes] if inside else None

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        there = self._shown(name, byte_offset, len(out))
        if there is None:
            self._storage.read_into(name, byte_offset, out)
        else:
            out[:] = there

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        there = self._shown(name, byte_offset, nbytes)
        return self._storage.read(name, byte_offset, nbytes) if there is None else bytes(there)


class _StoredSum:
    """A run of bytes of a file with the CRC32 it should have; `placed`: what it belongs to, None beside checkpoints."""

    __slots__ = ("end", "name", "placed", "start", "value", "wanted")

    def __init__(self, start: int, nbytes: int, name: str, wanted: int, placed: Placed | None) -> None:
        self.start, self.end, self.name, self.wanted, self.placed = start, start + nbytes, name, wanted, placed
        self.value = 0

    def look(self, at: int, piece: memoryview) -> bool:
        """Take what of a piece at this offset is of it; return whether that was all."""
        first, last = max(self.start - at, 0), self.end - at
        self.value = crc32(piece[first:last], self.value)
        return last <= len(piece)


class _Items:
    """The items of one checkpoint in a file, in the order of their bytes."""

    def __init__(self, held: ItemsOfFile) -> None:
        self._held = held
        self._passing = _Passing(held.checkpoint.storage)
        self._source: Source = held.checkpoint.source.over(Window(self._passing))
        self._starts, self._ends = held.items.spans(held.name)
        self._next = 0
        self._seen: set[object] = set()
        self.findings: list[Finding] = []
        self.n_records = 0

    def begun(self, at: int, piece: memoryview) -> list[_StoredSum]:
        """Return the records with a checksum of the items that begin in a piece at this offset."""
        self._passing.show(self._held.name, at, piece)
        found: list[_StoredSum] = []
        while self._next < len(self._starts) and self._starts[self._next] < at + len(piece):
            placed = self._held.items.item(self._held.name, self._next)
            self._next += 1
            if self._is_new(placed):
                found += self._records(placed)
        return found

    def _is_new(self, placed: Placed) -> bool:
        """Tell whether an item was not looked at before: each tensor of a `.pt` has all its records."""
        if self._held.checkpoint.format.items_apart or placed.item not in self._seen:
            self._seen.add(placed.item)
            return True
        return False

    def _records(self, placed: Placed) -> list[_StoredSum]:
        try:
            records = self._source.examine(placed.entry, placed.chunk, placed.item).records
            told = [record for record in records if record.crc32 is not None]
            if placed.item.transforms:
                for record in told:
                    self._unpack(placed, record)
                return []
        except UnsupportedError:  # nothing is known of it, and it is carried as it is
            return []
        except (ItemError, MetadataError) as error:
            self.findings.append(about(placed, "damaged-item", error.message))
            return []
        self.n_records += len(told)
        base = placed.item.byte_offset
        return [_StoredSum(base + one.byte_offset, one.nbytes, one.name, one.crc32 or 0, placed) for one in told]

    def _unpack(self, placed: Placed, record: Record) -> None:
        """Check a record that the file holds compressed."""
        buffer = memoryview(bytearray(min(record.nbytes, self._passing.piece_nbytes)))
        value = 0
        for start in range(0, record.nbytes, len(buffer) or 1):
            piece = buffer[: record.nbytes - start]
            self._source.read_into(record, start, piece)
            value = crc32(piece, value)
        self.n_records += 1
        if value != record.crc32:
            self.findings.append(_wrong_crc(placed, record.name, value, record.crc32 or 0))


class PassingFile:
    """Everything that a file tells of itself as it passes.

    Args:
        storage: of the step.
        name, nbytes: of the file.
        held: the checkpoints with items in it.
        claims: what marker and manifests say of its digests.

    Attributes:
        findings: what is wrong with it, so far.
        n_records: how many CRC32s were compared, or will be.
        stored: what the target's store calls what was written of it.
    """

    def __init__(
        self, storage: Storage, name: str, nbytes: int, held: Sequence[ItemsOfFile], claims: Sequence[Claim]
    ) -> None:
        self._storage, self._name, self._nbytes = storage, name, nbytes
        self._claims = [claim for claim in claims if (claim.wanted.end or 0) <= nbytes]
        self._digesting = Digesting(nbytes, {SHA256, *(claim.wanted for claim in self._claims)})
        self._items = [_Items(one) for one in held]
        self._open: list[_StoredSum] = []
        self._squeezed = False
        self._findings: list[Finding] = []
        self._n_beside = 0
        self.stored: str | None = None

    @property
    def findings(self) -> list[Finding]:
        return [*(one for items in self._items for one in items.findings), *self._findings]

    @property
    def n_records(self) -> int:
        return sum(items.n_records for items in self._items) + self._n_beside

    def look(self, at: int, piece: memoryview) -> None:
        """Take the next piece, which begins at byte `at`; it is not needed afterwards.

        Raises:
            StorageError: the headers of an item that does not lie in it cannot be read.
        """
        self._digesting.look(at, piece)
        if at == 0 and not self._items and piece[:4] == _ZIP:
            self._open += self._members()
        for items in self._items:
            self._open += items.begun(at, piece)
        end = at + len(piece)
        waiting = []
        for stored in self._open:
            if stored.start >= end or not stored.look(at, piece):
                waiting.append(stored)
            elif stored.value != stored.wanted:
                self._findings.append(self._wrong(stored))
        self._open = waiting

    def sha256(self) -> str:
        """Return the SHA-256 of the file, and compare what is said of it, once all of it has passed."""
        for stored in self._open:  # of no byte, or beyond the end of the file
            if stored.value != stored.wanted:
                self._findings.append(self._wrong(stored))
        self._open = []
        found = self._digesting.found()
        for claim in self._claims:
            if found[claim.wanted] != claim.value:
                what = f"its {claim.wanted.algorithm} is another"
                message = f"{self._name} is not what {claim.by} lists: {what}"
                self._findings.append(Finding.of("changed-file", message, self._name, next_step=_AGAIN))
        if self._squeezed:
            self._unzip()
        return found[SHA256]

    def _wrong(self, stored: _StoredSum) -> Finding:
        if stored.placed:
            return _wrong_crc(stored.placed, stored.name, stored.value, stored.wanted)
        message = f"{self._name}: {stored.name} has CRC32 {stored.value:08x}, stored is {stored.wanted:08x}"
        return Finding.of("damaged-side-file", message, self._name, next_step=_AGAIN)

    def _members(self) -> list[_StoredSum]:
        """Return the records of a zip beside the checkpoints that are stored as they are."""
        found: list[_StoredSum] = []
        with stream(self._storage, self._name, self._nbytes) as file:
            archive = opened(file)
            members = archive.infolist() if archive else []
            for member in members:
                if member.compress_type != zipfile.ZIP_STORED:
                    self._squeezed = True
                    return []
                if not member.CRC:  # torch with CRC32 switched off
                    continue
                file.seek(member.header_offset)
                head = file.read(_LOCAL_HEADER.size)
                if len(head) < _LOCAL_HEADER.size or not head.startswith(_ZIP):
                    self._squeezed = True  # which says what is wrong
                    return []
                *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(head)
                start = member.header_offset + len(head) + name_nbytes + extra_nbytes
                found.append(_StoredSum(start, member.file_size, member.filename, member.CRC, None))
        self._n_beside = len(found)
        return sorted(found, key=lambda stored: stored.start)

    def _unzip(self) -> None:
        """Check a zip beside the checkpoints that is compressed: it is read once more."""
        with stream(self._storage, self._name, self._nbytes) as file:
            archive = opened(file)
            if archive is None:
                return
            wrong = damaged_record(archive)
            self._n_beside = len(archive.infolist())
        if wrong:
            message = f"{self._name} is damaged: {wrong}"
            self._findings.append(Finding.of("damaged-side-file", message, self._name, next_step=_AGAIN))


def _wrong_crc(placed: Placed, name: str, value: int, stored: int) -> Finding:
    message = f"record {name} has CRC32 {value:08x}, stored is {stored:08x}: bytes were changed"
    return about(placed, "wrong-crc", message)
