"""The form of a `.pt` file before torch 1.6: pickles one after the other, then the bytes of each storage.

Source: torch 2.13, serialization.py, `_legacy_save` and `_legacy_load`; torch/csrc/generic/serialization.cpp for a
storage: its length in elements, as eight bytes, and its values. There are no checksums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Extent, Record
from dcptool.errors import ItemError, MetadataError, UnsupportedError
from dcptool.formats.torch_save.graphs import persistent_ids
from dcptool.formats.torch_save.zip import Member, TorchZip
from dcptool.pickles import inert
from dcptool.pickles.calls import Calls
from dcptool.pickles.standins import Global

Read = Callable[[int, int], bytes]

_FIRST_NBYTES, _MAX_NBYTES = 1 << 20, 1 << 30
"""How much is read at first to find the pickles in, and at most."""
_LENGTH_NBYTES = 8
_PROTOCOL = 1001
_QUANTISED = {"QInt8": 1, "QUInt8": 1, "QInt32": 4, "QUInt4x2": 1, "QUInt2x4": 1}
"""Bytes of an element of torch's quantised storages."""


class LegacyStream:
    """The pickles of such a file, and where its storages are; of these the lengths are read and nothing else.

    Args:
        read: returns bytes of the file.
        nbytes: its length.
        calls: filled with what its pickles would have imported and called.

    Attributes:
        nbytes: its length.
        members: its storages, by the names that they have in a zip: `data/<key>`.
        root: what its object is, as stand-ins.
        pickle_nbytes: length of the pickles together.

    Raises:
        MetadataError: a pickle is damaged or cut short.
        ItemError: a storage does not end in the file, or is another than the pickle says.
    """

    n_following = 0

    def __init__(self, read: Read, nbytes: int, calls: Calls) -> None:
        self.nbytes, self._source = nbytes, read
        pickles, self.pickle_nbytes = _pickles(read, nbytes, calls)
        _, protocol, system, self.root, keys = pickles
        if protocol != _PROTOCOL or not isinstance(system, dict) or not isinstance(keys, list):
            raise ItemError("it begins like a file of torch.save before 1.6, and does not go on like one")
        self._is_little = system.get("little_endian") is not False
        self.members = self._storages(keys)

    def read(self, byte_offset: int, nbytes: int) -> bytes:
        """Return bytes of the file."""
        return self._source(byte_offset, nbytes)

    def member(self, name: str) -> Member:
        """Return a storage by name.

        Raises:
            ItemError: there is none.
        """
        if name not in self.members:
            raise ItemError(f"it has no storage {name.removeprefix('data/')!r}")
        return self.members[name]

    def data_offset(self, member: Member) -> int:
        """Return where the bytes of a storage begin."""
        return member.header_offset + _LENGTH_NBYTES

    def content(self, name: str, limit: int) -> bytes:
        """Return all bytes of a small storage.

        Raises:
            ItemError: there is none, or it is longer than `limit` bytes.
        """
        member = self.member(name)
        if member.nbytes > limit:
            raise ItemError(f"storage {name!r} has {member.nbytes:,} bytes, more than the {limit:,} it may have")
        return self.read(self.data_offset(member), member.nbytes)

    def records(self, item: Extent) -> tuple[Record, ...]:
        """Return all storages as records of `item`, the whole file."""
        return tuple(
            Record(item, self.data_offset(member), member.nbytes, member.name, None) for member in self.members.values()
        )

    def require_little_endian(self) -> None:
        """Refuse payloads written on a big-endian machine."""
        if not self._is_little:
            raise UnsupportedError("its payload is not little-endian; load and save it with torch once")

    def _storages(self, keys: list[Any]) -> dict[str, Member]:
        sizes = _itemsizes(self.root)
        position = self.pickle_nbytes
        members: dict[str, Member] = {}
        for key in keys:
            name = f"data/{key}"
            if not isinstance(key, str) or key not in sizes or name in members:
                raise ItemError(f"it lists a storage {str(key)[:40]!r}, which its pickle does not name")
            if position + _LENGTH_NBYTES > self.nbytes:
                raise ItemError(f"it is cut short: it ends at byte {self.nbytes:,}, before storage {key!r}")
            length = int.from_bytes(self.read(position, _LENGTH_NBYTES), "little")
            nbytes = length * sizes[key]
            end = position + _LENGTH_NBYTES + nbytes
            if end > self.nbytes:
                raise ItemError(f"it is cut short: storage {key!r} ends at byte {end:,}, the file at {self.nbytes:,}")
            members[name] = Member(name, name, position, nbytes, None, True)
            position = end
        return members


Archive = TorchZip | LegacyStream
"""What a file of torch.save is."""


def _pickles(read: Read, nbytes: int, calls: Calls) -> tuple[list[Any], int]:
    """Return the five pickles a file begins with and the byte after them; no more is read of it than that takes."""
    wanted = min(nbytes, _FIRST_NBYTES)
    while True:
        data = read(0, wanted)
        try:
            return inert.load_stream(data, calls)
        except MetadataError:
            if wanted == min(nbytes, _MAX_NBYTES):
                raise
        wanted = min(nbytes, _MAX_NBYTES, 8 * wanted)


def _itemsizes(root: Any) -> dict[str, int]:
    """Return by key how many bytes an element of each storage in a graph has.

    Raises:
        ItemError: a storage is described in a way that torch does not.
        UnsupportedError: it is a view of another one, as torch wrote before 0.4.
    """
    sizes: dict[str, int] = {}
    for found in persistent_ids(root):
        value = found.value
        if not isinstance(value, tuple) or len(value) < 5 or value[0] != "storage" or not isinstance(value[2], str):
            raise ItemError("its pickle describes a storage in an unknown way")
        if len(value) > 5 and value[5] is not None:
            raise UnsupportedError("its storages are views of others, as torch wrote before 0.4; load and save it once")
        size = _itemsize(value[1])
        if sizes.setdefault(value[2], size) != size:
            raise ItemError(f"its pickle gives storage {value[2]!r} two types")
    return sizes


def _itemsize(kind: Any) -> int:
    name = kind.name if isinstance(kind, Global) else ""
    quantised = _QUANTISED.get(name.removesuffix("Storage"))
    if quantised:
        return quantised
    if name not in dtypes.BY_STORAGE:
        raise ItemError(f"its pickle names an unknown storage type {name!r}")
    return dtypes.BY_STORAGE[name].itemsize
