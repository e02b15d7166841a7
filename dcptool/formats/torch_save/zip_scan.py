"""Find torch.save zips that lie back to back, with nothing to tell where one ends.

A zip's length cannot be read off its beginning: torch writes sizes behind the data. So ends are looked for, and one
counts only if all bytes before it are accounted for: the first member begins at the first byte, members follow one
another, then the directory, then its end. A zip inside a payload never fits: its offsets count from its own beginning.

Source: torch 2.13, caffe2/serialize/inline_container.cc; PKWARE APPNOTE 6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain, islice

from dcptool.checkpoint.extents import Extent
from dcptool.errors import DcptoolError, ItemError
from dcptool.formats.torch_save.zip import Read, TorchZip

_START, _END = b"PK\x03\x04", b"PK\x05\x06"
_END_NBYTES, _END64_NBYTES = 22, 76
"""Of the end record; of the end record of a zip64 with its locator, which torch puts before it."""
_DESCRIPTOR_NBYTES = 24
"""Most that may lie between the bytes of a member and what follows."""
_PIECE_NBYTES = 1 << 20
_UNKNOWN = 0xFFFFFFFF
MAX_ENDS = 100_000
"""Places that look like an end and are none; a file made of such would take hours else."""


def zip_at_start(read: Read, nbytes: int, likely_nbytes: int = 0) -> TorchZip:
    """Open the zip that begins with the first of some bytes.

    Args:
        read: gives these bytes.
        nbytes: how many there are.
        likely_nbytes: a length that is tried before its end is looked for.

    Raises:
        ItemError: no whole zip begins there.
    """
    start = read(0, min(nbytes, 8))
    if not start.startswith(_START):
        raise ItemError(f"no torch.save zip begins there, but the bytes {start.hex(' ')}")
    lengths = (likely_nbytes,) if 0 < likely_nbytes <= nbytes else ()
    for length in chain(lengths, islice(_ends(read, nbytes), MAX_ENDS)):
        found = _opened(read, length)
        if found:
            return found
    raise ItemError("the zip that begins there has no end: the file is cut short or overwritten")


def _opened(read: Read, nbytes: int) -> TorchZip | None:
    """Return the zip that is all of these bytes, None if they are no such."""
    try:
        found = TorchZip(read, nbytes)
        return found if _fills(found) else None
    except (DcptoolError, struct.error):
        return None


def _fills(archive: TorchZip) -> bool:
    """Tell whether the members, the directory and its end account for every byte of a zip."""
    end = 0
    by_place = sorted((member.header_offset, member) for member in archive.members.values())
    archive.records(Extent("", 0, archive.nbytes))  # raises where headers disagree
    for header_offset, member in by_place:
        if not 0 <= header_offset - end <= (_DESCRIPTOR_NBYTES if end else 0):
            return False
        end = archive.data_offset(member) + member.nbytes
    offset, nbytes = archive.directory
    rest = archive.nbytes - offset - nbytes
    return 0 <= offset - end <= _DESCRIPTOR_NBYTES and rest in (_END_NBYTES, _END_NBYTES + _END64_NBYTES)


def _ends(read: Read, nbytes: int) -> Iterator[int]:
    """Yield lengths at which a zip may end whose directory lies right before its end."""
    for start in range(0, nbytes, _PIECE_NBYTES):
        piece = read(start, min(_PIECE_NBYTES + _END_NBYTES - 1, nbytes - start))
        at = piece.find(_END)
        while 0 <= at < _PIECE_NBYTES:
            if at + _END_NBYTES <= len(piece):
                directory_nbytes, offset, comment = struct.unpack_from("<2LH", piece, at + 12)
                before = start + at - offset - directory_nbytes
                if not comment and (before in (0, _END64_NBYTES) or _UNKNOWN in (offset, directory_nbytes)):
                    yield start + at + _END_NBYTES
            at = piece.find(_END, at + 1)
