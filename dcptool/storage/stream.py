"""A stored file as Python's file objects are, for libraries that want one."""

from __future__ import annotations

import io
import os
from typing import Any

from dcptool.storage.base import Storage


class _Ranged(io.RawIOBase):
    """Reads by ranges, and keeps nothing."""

    def __init__(self, storage: Storage, name: str, nbytes: int) -> None:
        self._storage, self._name, self._nbytes, self._position = storage, name, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning of the file")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(min(len(buffer), self._nbytes - self._position), 0)
        buffer[:wanted] = self._storage.read(self._name, self._position, wanted) if wanted else b""
        self._position += wanted
        return wanted


def stream(storage: Storage, name: str, nbytes: int, buffer_nbytes: int = 64 << 10) -> io.BufferedReader:
    """Return a file of a folder as a file object, which reads `buffer_nbytes` at least each time."""
    return io.BufferedReader(_Ranged(storage, name, nbytes), buffer_nbytes)
