"""The zip that torch.save writes: its members, where their bytes start, their CRCs. Knows no tensors.

Used for `.pt` files and for every item of a `.distcp` file, which holds such zips back to back; offsets here count
from the zip's first byte. Only stored members are read: torch never compresses.

Source: torch 2.13, caffe2/serialize/inline_container.cc; PKWARE APPNOTE 6.3.10 for zip and zip64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dcptool.checkpoint.extents import Extent, Record
from dcptool.checkpoint.fill import crc32
from dcptool.errors import ItemError, UnsupportedError

Read = Callable[[int, int], bytes]
"""Return exactly nbytes bytes from a byte offset on."""

MAX_MEMBERS = 1 << 20
MAX_PICKLE_NBYTES = 1 << 30

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_CRC32 = struct.Struct("<L")
_CRC32_OFFSET = 16
"""Of the CRC32 in a directory's entry."""
_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED = 0x2061
"""Flags of encryption, of patches and of hidden headers: miniz takes no record that has one."""
_IS_FOLDER = 0x10
"""Of the attributes that DOS gave files: miniz reads nothing of such a record, and torch takes what memory holds."""
_NAME_CODEC = ("utf-8", "surrogateescape")
HEAD_NBYTES = 4096
"""The head of a zip holds data.pkl and the payload's local header, its tail the directory: a few hundred bytes."""
_WHOLE_NBYTES = 64 << 10
_MOST_FOLLOWING = 0xFFFF
VERSIONS = range(1, 11)
"""Versions of archives that torch reads (kMinSupportedFileFormatVersion, kMaxSupportedFileFormatVersion)."""


class Member(NamedTuple):
    """One member of a zip.

    Attributes:
        name: without the archive's folder.
        full_name: as stored.
        header_offset: where its local header is, counted from the zip's first byte.
        nbytes: its length.
        crc32: its checksum, None where the writer stored none.
        plain: whether its bytes are stored as they are, neither compressed nor encrypted.
    """

    name: str
    full_name: str
    header_offset: int
    nbytes: int
    crc32: int | None
    plain: bool


def head_nbytes(nbytes: int) -> int:
    """Return how much of a zip is read at once: all of a small one."""
    return nbytes if nbytes <= _WHOLE_NBYTES else HEAD_NBYTES


class TorchZip:
    """The directory of one zip, and the reads to get at its members.

    Args:
        read: returns bytes of the zip.
        nbytes: the zip's length.
        head: the zip's first `head_nbytes(nbytes)` bytes, where they were read already.
        padded: bytes may follow its end, as many as torch looks for it in.

    Attributes:
        nbytes: its length, with what follows its end.
        n_following: how many bytes follow its end.

    Raises:
        ItemError: it is no zip, or its directory is damaged.
    """

    def __init__(self, read: Read, nbytes: int, head: bytes | None = None, padded: bool = False) -> None:
        self.nbytes, self.n_following = nbytes, 0
        self._padded = padded
        self._source = read
        self._head = read(0, head_nbytes(nbytes)) if head is None else head
        self._tail_offset = max(len(self._head), nbytes - HEAD_NBYTES)
        self._tail = read(self._tail_offset, nbytes - self._tail_offset) if self._tail_offset < nbytes else b""
        self.directory = (0, 0)
        """Where its directory is, counted from its first byte, and how long."""
        try:
            self.members = self._directory()
        except struct.error:
            raise ItemError("the directory of its zip is damaged") from None

    def read(self, byte_offset: int, nbytes: int) -> bytes:
        """Return bytes of the zip, from what was read already where possible."""
        end = byte_offset + nbytes
        if byte_offset < 0 or end > self.nbytes:
            raise ItemError(f"its zip refers to bytes {byte_offset}–{end}, beyond its end at {self.nbytes}")
        if end <= len(self._head):
            return self._head[byte_offset:end]
        if byte_offset >= self._tail_offset:
            return self._tail[byte_offset - self._tail_offset : end - self._tail_offset]
        return self._source(byte_offset, nbytes)

    def data_offset(self, member: Member) -> int:
        """Return where a member's bytes start, counted from the zip's first byte."""
        header = _LOCAL.unpack(self.read(member.header_offset, _LOCAL.size))
        if not member.plain:
            if not header[3]:
                raise ItemError(f"the directory of its zip is damaged: it says record {member.name!r} is compressed")
            raise UnsupportedError(f"record {member.name!r} of its zip is compressed, which torch.save never does")
        if header[0] != b"PK\x03\x04" or header[3]:
            raise ItemError(f"its zip has no header for record {member.name!r} at byte {member.header_offset}")
        start: int = member.header_offset + _LOCAL.size + header[9] + header[10]
        if start + member.nbytes > self.nbytes:
            raise ItemError(f"record {member.name!r} of its zip reaches beyond the zip's end")
        return start

    def member(self, name: str) -> Member:
        """Return a member by name.

        Raises:
            ItemError: there is none; torch.save did not write this zip, or it is damaged.
        """
        try:
            return self.members[name]
        except KeyError:
            raise ItemError(f"its zip has no record {name!r}; torch.save did not write it") from None

    def content(self, name: str, limit: int = MAX_PICKLE_NBYTES) -> bytes:
        """Return all bytes of a small member, CRC checked.

        Raises:
            ItemError: it is missing, longer than `limit` bytes, or its CRC32 is wrong.
        """
        member = self.member(name)
        if member.nbytes > limit:
            raise ItemError(f"record {name!r} has {member.nbytes:,} bytes, more than the {limit:,} it may have")
        data = self.read(self.data_offset(member), member.nbytes)
        if member.crc32 is not None and crc32(data) != member.crc32:
            raise ItemError(f"bytes were changed since they were saved: record {name!r} has a wrong CRC32")
        return data

    def records(self, item: Extent) -> tuple[Record, ...]:
        """Return all members as records of `item`, after checking that each one's two headers agree.

        Raises:
            ItemError: they do not, or a member reaches beyond the zip or into another.
        """
        found = sorted((self.data_offset(member), member) for member in self.members.values())
        end = 0
        for start, member in found:
            name = self.read(member.header_offset + _LOCAL.size, len(member.full_name.encode(*_NAME_CODEC)))
            if name != member.full_name.encode(*_NAME_CODEC):
                raise ItemError(f"its zip has another name in the header of record {member.name!r}")
            if member.header_offset < end:
                raise ItemError(f"record {member.name!r} of its zip lies over another")
            end = start + member.nbytes
        return tuple(Record(item, start, member.nbytes, member.name, member.crc32) for start, member in found)

    def require_version(self) -> None:
        """Refuse an archive that torch does not read for what it says of itself.

        Raises:
            ItemError: its version is no number, or one that torch does not know, or its alignment is no number.
        """
        if ".storage_alignment" in self.members and not self.content(".storage_alignment", 64).strip().isdigit():
            raise ItemError("its zip gives no number as .storage_alignment")
        text = self.content("version", 64).strip()
        if not text.isdigit() or int(text) not in VERSIONS:
            raise ItemError(f"its zip is of version {text!r}; torch reads {VERSIONS[0]} to {VERSIONS[-1]}")

    def require_little_endian(self) -> None:
        """Refuse payloads written on a big-endian machine."""
        order = self.content("byteorder", 16) if "byteorder" in self.members else b"little"
        if order not in (b"little", b"big"):
            raise ItemError(f"its zip gives {order!r} as byteorder")
        if order == b"big":
            raise UnsupportedError("its payload is not little-endian; load and save it with torch once")

    def _directory(self) -> dict[str, Member]:
        count, offset, nbytes = self._end()
        self.directory = (offset, nbytes)
        if count > MAX_MEMBERS or nbytes < count * _CENTRAL.size:
            raise ItemError(f"the directory of its zip is damaged: {count} records in {nbytes} bytes")
        data = self.read(offset, nbytes)
        seen = _SEEN.get((count, nbytes))
        members = seen.members_of(data) if seen else None
        if members is None:
            members, at = self._parsed(data, count)
            if nbytes <= MAX_SEEN_NBYTES:
                if len(_SEEN) >= MAX_SEEN:
                    _SEEN.clear()
                _SEEN[count, nbytes] = _Seen(_without(data, at), at, tuple(members.values()))
        return members

    @staticmethod
    def _parsed(data: bytes, count: int) -> tuple[dict[str, Member], tuple[int, ...]]:
        """Return the members of a directory, and the byte offsets of their CRC32s in it."""
        found, position = [], 0
        at = []
        for _ in range(count):
            if position + _CENTRAL.size > len(data) or data[position : position + 4] != b"PK\x01\x02":
                raise ItemError("the directory of its zip is damaged")
            fields = _CENTRAL.unpack_from(data, position)
            flags, method, checksum, packed, size = fields[3], fields[4], *fields[7:10]
            name_end = position + _CENTRAL.size + fields[10]
            name = data[position + _CENTRAL.size : name_end].decode(*_NAME_CODEC)
            header = fields[16]
            if 0xFFFFFFFF in (packed, size, header):
                size, packed, header = _zip64(data[name_end : name_end + fields[11]], size, packed, header)
            if fields[13]:  # the number of a disk
                raise ItemError("the directory of its zip is damaged")
            if fields[15] & _IS_FOLDER and not name.endswith("/"):
                raise ItemError(f"the directory of its zip is damaged: it says record {name!r} is a folder")
            plain = method == 0 and not flags & _ENCRYPTED
            if plain and packed != size:
                raise ItemError(f"the directory of its zip is damaged: {name!r} has two sizes")
            found.append((name, header, size, checksum, plain))
            at.append(position + _CRC32_OFFSET)
            position = name_end + fields[11] + fields[12]
        if position != len(data):
            raise ItemError("the directory of its zip is damaged")
        # With checksums switched off torch writes 0 for all; data.pkl is never empty, so its CRC is never 0.
        checked = any(checksum for *_, checksum, _ in found)
        folder = found[0][0].partition("/")[0] + "/" if found else ""  # as torch finds it
        outside = next((name for name, *_ in found if not name.startswith(folder)), None)
        if outside is not None:
            raise ItemError(
                f"its zip has a record {outside!r} outside its folder {folder!r}, which torch does not read"
            )
        for needed in ("data.pkl", "version"):
            if not any(name == folder + needed for name, *_ in found):
                raise ItemError(f"its zip has no record {needed}; torch.save did not write it")
        members = {}
        for name, header, size, checksum, plain in found:
            short = name.removeprefix(folder)
            if short.lower() == "data.pkl" != short:
                raise ItemError(f"its zip has a record {short!r}, which torch may take for data.pkl")
            if short in members:
                raise ItemError(f"its zip has two records {short!r}")
            members[short] = Member(short, name, header, size, checksum if checked else None, plain)
        return members, tuple(at)

    def _end(self) -> tuple[int, int, int]:
        """Find the end record and return (number of members, offset, length) of the directory."""
        position, tail = self._find_end()
        _, disk, first_disk, on_disk, count, nbytes, offset, comment = _END.unpack_from(tail, position)
        self.n_following = len(tail) - position - _END.size - comment
        if self.n_following and (not self._padded or self.n_following < 0):
            raise ItemError("bytes follow the end of its zip; the file is overwritten")
        found = (count, offset, nbytes)
        if disk or first_disk or on_disk != count:
            raise ItemError(_DAMAGED_END)
        # torch writes the end of a zip64 too, whatever the size, and believes that one.
        locator = tail[position - _LOCATOR64.size : position] if position >= _LOCATOR64.size else b""
        if locator[:4] == b"PK\x06\x07":
            return self._end64(locator, found)
        if count == 0xFFFF or 0xFFFFFFFF in (nbytes, offset):
            raise ItemError("its zip should be zip64, but has no zip64 end")
        return found

    def _find_end(self) -> tuple[int, bytes]:
        """Return where in the zip's last bytes its end record is, and these bytes.

        They are looked through as torch does, by pieces from the back; it gives up where a piece would begin before the
        file does.

        Source: miniz in torch 2.13, mz_zip_reader_locate_header_sig.
        """
        start = max(0, self.nbytes - HEAD_NBYTES)
        while True:
            tail = self.read(start, self.nbytes - start)
            position = tail.rfind(b"PK\x05\x06")
            if 0 <= position <= len(tail) - _END.size:
                return position, tail
            start -= HEAD_NBYTES - 3
            if not self._padded or start < 0 or len(tail) >= _MOST_FOLLOWING + _END.size:
                raise ItemError("it does not end like a zip; the file is cut short or overwritten")

    def _end64(self, locator: bytes, found: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return what the end of a zip64 says, which must agree with the plain end as far as that can say it."""
        _, disk, position, disks = _LOCATOR64.unpack(locator)
        end = self.read(position, _END64.size)
        signature, length, _, _, this_disk, first_disk, on_disk, count, nbytes, offset = _END64.unpack(end)
        if signature != b"PK\x06\x06":
            raise ItemError("its zip should be zip64, but has no zip64 end")
        if length < _END64.size - 12:  # its signature and this length are not counted
            raise ItemError(_DAMAGED_END)
        wide = (count, offset, nbytes)
        limits = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        same = all(short in (full, limit) for short, full, limit in zip(found, wide, limits, strict=True))
        if disk or disks != 1 or this_disk or first_disk or on_disk != count or not same:
            raise ItemError(_DAMAGED_END)
        return wide


class _Seen(NamedTuple):
    """A directory that was parsed: those of chunks of one shape differ in nothing but the CRC32s.

    Attributes:
        blank: its bytes, with zeros in place of the CRC32s.
        checksums: byte offsets of these, one per member.
        members: what it says, in its order.
    """

    blank: bytes
    checksums: tuple[int, ...]
    members: tuple[Member, ...]

    def members_of(self, data: bytes) -> dict[str, Member] | None:
        """Return the members of a directory of the same length, None if it says anything else."""
        if _without(data, self.checksums) != self.blank:
            return None
        crcs = [_CRC32.unpack_from(data, at)[0] for at in self.checksums]
        checked = any(crcs)
        return {
            name: Member(name, full_name, header_offset, nbytes, crc if checked else None, plain)
            for (name, full_name, header_offset, nbytes, _, plain), crc in zip(self.members, crcs, strict=True)
        }


_SEEN: dict[tuple[int, int], _Seen] = {}
"""By number of records and length; of those that share both, the last."""
MAX_SEEN = 256
MAX_SEEN_NBYTES = 4096


def _without(data: bytes, checksums: Sequence[int]) -> bytes:
    blank = bytearray(data)
    for at in checksums:
        blank[at : at + 4] = b"\0\0\0\0"
    return bytes(blank)


_DAMAGED_END = "the end record of its zip is damaged"


def _zip64(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Take the 64-bit values that do not fit into the directory from its extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1 and position + 4 + length <= len(extra):
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            if len(values) < (size, packed, header).count(0xFFFFFFFF):
                break
            wide = [values.pop(0) if value == 0xFFFFFFFF else value for value in (size, packed, header)]
            return wide[0], wide[1], wide[2]
        position += 4 + length
    raise ItemError("a record of its zip is zip64, but its size is missing")
