"""Reads of small neighbours in a file, made one read of the file."""

from __future__ import annotations

from collections import deque

from dcptool.storage.base import Storage
from dcptool.storage.through import Through

_KEPT = 3
"""Reads that are kept: a piece loaded on purpose, and an item's head and tail."""
_SMALL_NBYTES = 64 << 10


class Window(Through):
    """A storage that serves reads from the last pieces of a file that were read; for one thread."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._pieces: deque[tuple[str, int, int, memoryview]] = deque(maxlen=_KEPT)

    def load(self, file: str, start: int, end: int) -> None:
        """Read a piece of a file, to serve what is read of it next."""
        buffer = memoryview(bytearray(end - start))
        self._storage.read_into(file, start, buffer)
        self.keep(file, start, buffer)

    def keep(self, file: str, start: int, data: memoryview) -> None:
        """Serve what is read next at an offset of a file from these bytes."""
        self._pieces.append((file, start, start + len(data), data))

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        end = byte_offset + len(out)
        for file, first, last, piece in self._pieces:
            if first <= byte_offset and end <= last and file == name:
                out[:] = piece[byte_offset - first : end - first]
                return
        self._storage.read_into(name, byte_offset, out)

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        end = byte_offset + nbytes
        for file, first, last, piece in self._pieces:
            if first <= byte_offset and end <= last and file == name:
                return bytes(piece[byte_offset - first : end - first])
        data = self._storage.read(name, byte_offset, nbytes)
        if nbytes <= _SMALL_NBYTES:
            self._pieces.append((name, byte_offset, end, memoryview(data)))
        return data
