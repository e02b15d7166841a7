"""Lay out the zip that torch.save writes, before the CRC32 of its payloads is known: sizes are exact in advance.

Members whose bytes are known have their CRC32 in their header; those that are streamed have it in a descriptor behind
them and in the directory. Payloads begin at multiples of 64 bytes. Sizes of 4 GiB and more are zip64.

Source: PKWARE APPNOTE 6.3.10; torch 2.13, caffe2/serialize/inline_container.cc, for the alignment, the padding in the
extra field and the names of records.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from dcptool.checkpoint.fill import crc32
from dcptool.copying.outputs import Closing, Fill, Literal, Part, Verbatim

ALIGNMENT = 64
FOLDER = "archive"
_WIDE = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_CRC32 = struct.Struct("<L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_DATE = 0x0021
"""1980-01-01, the first day a zip can name: output does not depend on when it was made."""
_STREAMED, _UTF8 = 1 << 3, 1 << 11


class NewMember(NamedTuple):
    """A record of a zip: its name without the archive's folder, and its bytes."""

    name: str
    part: Literal | Fill | Verbatim


class _PlacedMember(NamedTuple):
    """A member with where its header is, and which of the file's streamed parts it is, -1 for a literal."""

    member: NewMember
    header_offset: int
    slot: int


def lay_out_zip(members: Sequence[NewMember], first_slot: int = 0) -> tuple[list[Part], int]:
    """Lay out one zip.

    Args:
        members: its records in order.
        first_slot: how many streamed parts (Fill, Verbatim) stand before this zip in its file.

    Returns:
        The parts, and their bytes together.
    """
    parts: list[Part] = []
    placed: list[_PlacedMember] = []
    position, slot = 0, first_slot
    for member in members:
        is_literal = isinstance(member.part, Literal)
        header = _local_header(member, position)
        placed.append(_PlacedMember(member, position, -1 if is_literal else slot))
        parts += [Literal(header), member.part]
        position += len(header) + member.part.nbytes
        if not is_literal:
            descriptor = _descriptor(member.part.nbytes, slot)
            parts.append(descriptor)
            position += descriptor.nbytes
            slot += 1
    closing = _directory(placed, position)
    return [*parts, closing], position + closing.nbytes


class Template(NamedTuple):
    """A zip with one streamed record, as bytes around it: all zips with records of these sizes are made from one.

    Attributes:
        head: all before the record's bytes.
        tail: all behind them, with zeros in place of its CRC32.
        checksums: byte offsets in `tail` where that CRC32 belongs.
    """

    head: bytes
    tail: bytes
    checksums: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all but the record."""
        return len(self.head) + len(self.tail)

    def closing(self, slot: int) -> Closing:
        """Return what follows the record, which is the streamed part `slot` of its file."""

        def make(crcs: Sequence[int]) -> bytes:
            tail = bytearray(self.tail)
            for position in self.checksums:
                _CRC32.pack_into(tail, position, crcs[slot])
            return bytes(tail)

        return Closing(len(self.tail), make)


def template(members: Sequence[NewMember]) -> Template:
    """Lay out a zip with exactly one streamed record, the bytes of all others being known."""
    parts, _ = lay_out_zip(members)
    at = next(index for index, part in enumerate(parts) if isinstance(part, Fill | Verbatim))
    zeros, ones = (
        b"".join(part.make([crc]) if isinstance(part, Closing) else part.data for part in parts[at + 1 :])  # type: ignore[union-attr]
        for crc in (0, _WIDE)
    )
    differing = [index for index, (a, b) in enumerate(zip(zeros, ones, strict=True)) if a != b]
    head = b"".join(part.data for part in parts[:at] if isinstance(part, Literal))
    return Template(head, zeros, tuple(differing[:: _CRC32.size]))


def _local_header(member: NewMember, position: int) -> bytes:
    """Return a local header that ends where the payload may begin."""
    name = f"{FOLDER}/{member.name}".encode()
    nbytes = member.part.nbytes
    wide = struct.pack("<2H2Q", 1, 16, 0, 0) if _is_wide(nbytes) else b""
    start = position + _LOCAL.size + len(name) + len(wide)
    padding = -start % ALIGNMENT
    if 0 < padding < 4:
        padding += ALIGNMENT
    extra = wide + (b"FB" + struct.pack("<H", padding - 4) + b"Z" * (padding - 4) if padding else b"")
    flags, checksum, size = _STREAMED | _UTF8, 0, 0
    if isinstance(member.part, Literal):
        flags, checksum, size = _UTF8, crc32(member.part.data), nbytes
    elif wide:
        size = _WIDE
    version = 45 if wide else 20
    head = _LOCAL.pack(b"PK\3\4", version, flags, 0, 0, _DATE, checksum, size, size, len(name), len(extra))
    return head + name + extra


def _descriptor(nbytes: int, slot: int) -> Closing:
    form = struct.Struct("<4sL2Q" if _is_wide(nbytes) else "<4s3L")

    def make(crcs: Sequence[int]) -> bytes:
        return form.pack(b"PK\7\x08", crcs[slot], nbytes, nbytes)

    return Closing(form.size, make)


def _directory(placed: Sequence[_PlacedMember], position: int) -> Closing:
    def make(crcs: Sequence[int]) -> bytes:
        entries = b"".join(_central(found, crcs) for found in placed)
        return entries + _end(len(placed), len(entries), position)

    nbytes = sum(_central_nbytes(found) for found in placed)
    return Closing(nbytes + len(_end(len(placed), nbytes, position)), make)


def _central_nbytes(found: _PlacedMember) -> int:
    """Return the length of a member's entry in the directory."""
    nbytes = found.member.part.nbytes
    n_wide = 2 * _is_wide(nbytes) + _is_wide(found.header_offset)
    return _CENTRAL.size + len(f"{FOLDER}/{found.member.name}".encode()) + (4 + 8 * n_wide if n_wide else 0)


def _central(found: _PlacedMember, crcs: Sequence[int]) -> bytes:
    member, header_offset, slot = found
    name = f"{FOLDER}/{member.name}".encode()
    nbytes = member.part.nbytes
    checksum = crcs[slot] if slot >= 0 else crc32(member.part.data) if isinstance(member.part, Literal) else 0
    wide = [value for value in (nbytes, nbytes, header_offset) if value >= _WIDE]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, offset = min(nbytes, _WIDE), min(header_offset, _WIDE)
    flags = _UTF8 | (_STREAMED if slot >= 0 else 0)
    version = 45 if wide or _is_wide(nbytes) else 20
    fields = (version, version, flags, 0, 0, _DATE, checksum, size, size, len(name), len(extra), 0, 0, 0, 0, offset)
    return _CENTRAL.pack(b"PK\1\2", *fields) + name + extra


def _end(count: int, nbytes: int, position: int) -> bytes:
    wide = b""
    if count >= 0xFFFF or nbytes >= _WIDE or position >= _WIDE:
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, nbytes, position)
        wide = end64 + _LOCATOR64.pack(b"PK\6\7", 0, position + nbytes, 1)
    short = min(count, 0xFFFF)
    return wide + _END.pack(b"PK\5\6", 0, 0, short, short, min(nbytes, _WIDE), min(position, _WIDE), 0)


def _is_wide(nbytes: int) -> bool:
    return nbytes >= _WIDE
