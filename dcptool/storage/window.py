"""Reads of small neighbours in a file, made one read of the file."""

from __future__ import annotations

from dcptool.storage.base import Entry, Storage


class Window:
    """A storage that serves reads from one piece of a file that is in memory; for one thread."""

    def __init__(self, storage: Storage) -> None:
        self.root = storage.root
        self.piece_nbytes = storage.piece_nbytes
        self._storage = storage
        self._piece: tuple[str, int, int, memoryview] = ("", 0, 0, memoryview(b""))

    def load(self, file: str, start: int, end: int) -> memoryview:
        """Read a piece of a file and keep it until the next."""
        buffer = memoryview(bytearray(end - start))
        self._storage.read_into(file, start, buffer)
        self._piece = file, start, end, buffer
        return buffer

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        piece = self._piece
        if piece[0] == name and piece[1] <= byte_offset and byte_offset + len(out) <= piece[2]:
            start = byte_offset - piece[1]
            out[:] = piece[3][start : start + len(out)]
        else:
            self._storage.read_into(name, byte_offset, out)

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        piece = self._piece
        if piece[0] == name and piece[1] <= byte_offset and byte_offset + nbytes <= piece[2]:
            start = byte_offset - piece[1]
            return bytes(piece[3][start : start + nbytes])
        return self._storage.read(name, byte_offset, nbytes)

    def size(self, name: str) -> int | None:
        return self._storage.size(name)

    def entries(self, folder: str = "") -> list[Entry]:
        return self._storage.entries(folder)

    def links(self) -> dict[str, str]:
        return self._storage.links()

    def below(self, folder: str) -> Storage:
        return self._storage.below(folder)

    def write(self, name: str, data: bytes) -> None:
        self._storage.write(name, data)

    def delete(self, name: str) -> None:
        self._storage.delete(name)

    def delete_folder(self, name: str) -> None:
        self._storage.delete_folder(name)

    def close(self) -> None:
        self._storage.close()
