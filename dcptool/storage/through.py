"""A storage through which another one is used: what stands in front of it changes where or how something is read."""

from __future__ import annotations

from dcptool.storage.base import DirEntry, Sink, Storage


class Through:
    """A storage that passes everything on to another one."""

    def __init__(self, storage: Storage) -> None:
        self.root, self.piece_nbytes = storage.root, storage.piece_nbytes
        self._storage = storage

    def _place(self, name: str) -> str:
        """Return under which name a file is there."""
        return name

    def entries(self, folder: str = "") -> list[DirEntry]:
        return self._storage.entries(folder)

    def entry(self, name: str) -> DirEntry | None:
        return self._storage.entry(self._place(name))

    def size(self, name: str) -> int | None:
        return self._storage.size(self._place(name))

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        self._storage.read_into(self._place(name), byte_offset, out)

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        return self._storage.read(self._place(name), byte_offset, nbytes)

    def links(self) -> dict[str, str]:
        return self._storage.links()

    def target(self, name: str) -> str:
        return self._storage.target(self._place(name))

    def written(self) -> float | None:
        return self._storage.written()

    def below(self, folder: str) -> Storage:
        return self._storage.below(folder)

    def write(self, name: str, data: bytes) -> None:
        self._storage.write(name, data)

    def create(self, name: str) -> Sink:
        return self._storage.create(name)

    def delete(self, name: str) -> None:
        self._storage.delete(name)

    def delete_folder(self, name: str) -> None:
        self._storage.delete_folder(name)

    def close(self) -> None:
        self._storage.close()
