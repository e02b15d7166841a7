"""The files of a step as several processes see them, each on disks of its own or on storage that they share, as one.

Who sees what is gathered first, and so is who sends which file. What lies elsewhere is read by asking a process that
has it; what was read so for all is kept, and given to all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.storage import DirEntry, LocalStorage, Sink, Storage, is_temporary, join
from dcptool.storage.base import MAX_WALK_DEPTH
from dcptool.words import listed

PIECE_NBYTES = LocalStorage.piece_nbytes
Fetch = Callable[[int, str, int, int], bytes]
"""Reads bytes of a file as a rank sees it: rank, name, offset, count."""


class Sight(NamedTuple):
    """What one process sees of a step.

    Attributes:
        folders: what is in each folder, by its name; "" is the step's own.
        links: see `Storage.links`.
        written: see `Storage.written`.
        identities: for each file what is the same for all who see that very file, and differs between copies of it.
    """

    folders: Mapping[str, Sequence[DirEntry]]
    links: Mapping[str, str]
    written: float | None
    identities: Mapping[str, tuple[Any, ...]]

    @property
    def files(self) -> dict[str, DirEntry]:
        """Its files by name, without dcptool's own temporary ones."""
        every = (entry for entries in self.folders.values() for entry in entries)
        return {entry.name: entry for entry in every if not entry.is_dir and not is_temporary(entry.name)}


def sight_of(storage: Storage | None) -> Sight:
    """Look at all folders of a step; None: nothing is there.

    Raises:
        StorageError: a folder cannot be listed.
    """
    if storage is None:
        return Sight({}, {}, None, {})
    folders: dict[str, Sequence[DirEntry]] = {}
    level = [""]
    for _ in range(MAX_WALK_DEPTH):
        deeper: list[str] = []
        for folder in level:
            try:
                folders[folder] = storage.entries(folder)
            except CheckpointNotFoundError:  # it vanished meanwhile
                continue
            deeper += [entry.name for entry in folders[folder] if entry.is_dir and not entry.is_link]
        level = deeper
    found = Sight(folders, storage.links(), storage.written(), {})
    return found._replace(identities={name: _identity(storage, entry) for name, entry in found.files.items()})


def _identity(storage: Storage, entry: DirEntry) -> tuple[Any, ...]:
    """Return what tells a file from all others, on whatever machine: nobody can set when an inode changed."""
    if not isinstance(storage, LocalStorage):
        return storage.root, entry.nbytes, entry.mtime, entry.version
    try:
        found = os.stat(storage.target(entry.name))
    except OSError as error:
        raise StorageError(f"{join(storage.root, entry.name)}: {error.strerror or error}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


Copies = tuple[tuple[int, ...], ...]
"""Who sees the first file of a name, who another one of that name, and so on."""


def copies_of(sights: Sequence[Sight]) -> dict[str, Copies]:
    """Return for each name the ranks that see one and the same file under it, and those that see another one.

    Raises:
        StorageError: they have different lengths, or one is a folder; names the ranks.
    """
    found: dict[str, dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sight in enumerate(sights):
        for name, entry in sight.files.items():
            found[name][sight.identities[name]].append(rank)
            sizes[name][entry.nbytes].append(rank)
    for name, by_size in sizes.items():
        if len(by_size) > 1:
            raise unlike(name, {f"{nbytes:,} bytes": ranks for nbytes, ranks in by_size.items()})
    return {name: tuple(map(tuple, by_file.values())) for name, by_file in found.items()}


def unlike(name: str, ranks: Mapping[str, Sequence[int]]) -> StorageError:
    """Return the error that a name stands for different bytes; `ranks`: who has which."""
    parts = [
        f"{what} on {'rank' if len(who) == 1 else 'ranks'} {listed([str(rank) for rank in who], 8)}"
        for what, who in ranks.items()
    ]
    return StorageError(
        f"{name} differs: {', '.join(parts)}: these are not halves of one save",
        next_step="Remove what is of another save, or start this only where the step is.",
    )


def senders(copies: Mapping[str, Copies], sizes: Mapping[str, int], n_ranks: int) -> dict[str, int]:
    """Return which rank sends each file: one that sees it, and the bytes of all as alike as that allows."""
    nbytes = [0] * n_ranks
    found = {}
    for name in sorted(copies, key=lambda name: (-sizes[name], name)):
        rank = min((rank for ranks in copies[name] for rank in ranks), key=lambda rank: (nbytes[rank], rank))
        nbytes[rank] += sizes[name]
        found[name] = rank
    return found


class SpreadStorage:
    """All files under one root, for reading; see `Storage`.

    Args:
        root: path or URL, the same for all.
        own: what this process sees, None if nothing is there.
        rank: of this process.
        sights: what all of them see, by rank.
        sender: by name of a file the rank that sends it.
    """

    piece_nbytes = PIECE_NBYTES

    def __init__(
        self, root: str, own: Storage | None, rank: int, sights: Sequence[Sight], sender: Mapping[str, int]
    ) -> None:
        self.root = root
        self._prefix = ""
        self._own, self._rank, self._sender = own, rank, sender
        self._mine = frozenset(sights[rank].files)
        self._folders: dict[str, dict[str, DirEntry]] = {}
        self._links: dict[str, str] = {}
        for at, sight in enumerate(sights):
            self._links.update(sight.links)
            for folder, entries in sight.folders.items():
                here = self._folders.setdefault(folder, {})
                here.update({one.name: one for one in entries if one.is_dir or sender.get(one.name) == at})
        self._written = max((sight.written for sight in sights if sight.written is not None), default=None)
        self.shared = _Shared()

    def _name(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def entries(self, folder: str = "") -> list[DirEntry]:
        whole = self._name(folder).rstrip("/")
        if whole not in self._folders:
            raise CheckpointNotFoundError(f"{join(self.root, folder)}: no such file or directory")
        cut = len(self._prefix)
        return sorted(entry._replace(name=entry.name[cut:]) for entry in self._folders[whole].values())

    def entry(self, name: str) -> DirEntry | None:
        whole = self._name(name)
        found = self._folders.get(whole.rpartition("/")[0], {}).get(whole)
        return found._replace(name=name, is_link=False) if found and not found.is_dir else None

    def size(self, name: str) -> int | None:
        found = self.entry(name)
        return found.nbytes if found else None

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        whole = self._name(name)
        if self._own and whole in self._mine and not self.shared.recording:
            self._own.read_into(whole, byte_offset, out)
        else:
            out[:] = self.read(name, byte_offset, len(out))

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        whole = self._name(name)
        key = (whole, byte_offset, nbytes)
        if key in self.shared.reads:
            return self.shared.reads[key]
        if self._own and whole in self._mine:
            data = self._own.read(whole, byte_offset, nbytes)
        elif whole in self._sender and self.shared.fetch:
            data = self.shared.fetch(self._sender[whole], whole, byte_offset, nbytes)
        else:
            raise StorageError(f"{join(self.root, name)} is not on a disk of rank {self._rank}")
        if self.shared.recording:
            self.shared.reads[key] = data
        return data

    def links(self) -> dict[str, str]:
        return {} if self._prefix else dict(self._links)

    def target(self, name: str) -> str:
        return join(self.root, name)

    def written(self) -> float | None:
        return self._written

    def below(self, folder: str) -> SpreadStorage:
        other = copy(self)
        other.root, other._prefix = join(self.root, folder), f"{self._prefix}{folder}/"
        return other

    def write(self, name: str, data: bytes) -> None:
        raise self._read_only(name)

    def create(self, name: str) -> Sink:
        raise self._read_only(name)

    def delete(self, name: str) -> None:
        raise self._read_only(name)

    def delete_folder(self, name: str) -> None:
        raise self._read_only(name)

    def _read_only(self, name: str) -> StorageError:
        return StorageError(f"{join(self.root, name)}: several folders are read as one; nothing is changed there")

    def close(self) -> None:
        if self._own:
            self._own.close()


class _Shared:
    """What all storages of folders of one step have together.

    Attributes:
        fetch: reads what lies elsewhere; None while nobody can be asked.
        recording: whether what is read is kept for all.
        reads: what was kept, by name, offset and count.
    """

    def __init__(self) -> None:
        self.fetch: Fetch | None = None
        self.recording = False
        self.reads: dict[tuple[str, int, int], bytes] = {}
