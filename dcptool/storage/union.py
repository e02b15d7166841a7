"""Several folders as one: the halves of a save that nodes wrote to disks of their own."""

from __future__ import annotations

from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.storage.base import DirEntry, Sink, Storage, join


class UnionStorage:
    """The files of several folders under the root of the first; for reading only.

    A name may be in several of them if its bytes are the same.
    """

    def __init__(self, storages: tuple[Storage, ...]) -> None:
        self.root = storages[0].root
        self.piece_nbytes = storages[0].piece_nbytes
        self._storages = storages
        self._owners: dict[str, Storage] = {}

    def entries(self, folder: str = "") -> list[DirEntry]:
        found: dict[str, DirEntry] = {}
        missing: list[CheckpointNotFoundError] = []
        for storage in self._storages:
            try:
                entries = storage.entries(folder)
            except CheckpointNotFoundError as error:
                missing.append(error)
                continue
            for entry in entries:
                if not entry.is_dir and entry.name in found:
                    self._require_same(entry, found[entry.name], storage)
                elif entry.name not in found:
                    found[entry.name] = entry
                    self._owners[entry.name] = storage
        if len(missing) == len(self._storages):
            raise missing[0]
        return sorted(found.values())

    def entry(self, name: str) -> DirEntry | None:
        return self._owner(name).entry(name)

    def size(self, name: str) -> int | None:
        return self._owner(name).size(name)

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        self._owner(name).read_into(name, byte_offset, out)

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        return self._owner(name).read(name, byte_offset, nbytes)

    def links(self) -> dict[str, str]:
        return self._storages[0].links()

    def target(self, name: str) -> str:
        return self._owner(name).target(name)

    def written(self) -> float | None:
        return max((time for storage in self._storages if (time := storage.written()) is not None), default=None)

    def below(self, folder: str) -> UnionStorage:
        return UnionStorage(tuple(storage.below(folder) for storage in self._storages))

    def write(self, name: str, data: bytes) -> None:
        raise StorageError(f"{join(self.root, name)}: several folders are read as one; nothing is written there")

    def create(self, name: str) -> Sink:
        raise StorageError(f"{join(self.root, name)}: several folders are read as one; nothing is written there")

    def delete(self, name: str) -> None:
        raise StorageError(f"{join(self.root, name)}: several folders are read as one; nothing is deleted there")

    def delete_folder(self, name: str) -> None:
        self.delete(name)

    def close(self) -> None:
        for storage in self._storages:
            storage.close()

    def _owner(self, name: str) -> Storage:
        if name not in self._owners:
            there = (storage for storage in self._storages if storage.size(name) is not None)
            self._owners[name] = next(there, self._storages[0])
        return self._owners[name]

    def _require_same(self, entry: DirEntry, first: DirEntry, storage: Storage) -> None:
        owner = self._owners[entry.name]
        piece = self.piece_nbytes
        same = entry.nbytes == first.nbytes and all(
            owner.read(entry.name, at, min(piece, entry.nbytes - at))
            == storage.read(entry.name, at, min(piece, entry.nbytes - at))
            for at in range(0, entry.nbytes, piece)
        )
        if not same:
            paths = f"{join(owner.root, entry.name)} and {join(storage.root, entry.name)}"
            raise StorageError(f"{paths} differ: these folders are not halves of one save")
