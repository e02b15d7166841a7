"""Where a copy grows, and how it gets its name; where one that was killed goes on.

Locally a temporary folder beside the target, whose name follows from the target's path, so that it is found again. In
an object store names are final at once: `_SAVING` comes first and says that nothing there is whole, what makes a
checkpoint complete comes last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from glob import escape, glob
from hashlib import sha256 as new_sha256
from typing import Protocol

from dcptool.copying.publishing import DISCARD_ATTEMPTS, Target
from dcptool.errors import CheckpointNotFoundError, DcptoolError, OutputExistsError, StorageError
from dcptool.formats.digests import sha256
from dcptool.formats.marker import SAVING
from dcptool.ops.copy.journal import STORE_NAME, STORE_NAMES, Journal, LocalJournal, Moved, StoreJournal, absorb
from dcptool.storage import DirEntry, FsspecStorage, LocalStorage, Storage, is_url, join, storage_at, walk
from dcptool.storage.local import sync
from dcptool.storage.parts import PartSink, create_parts
from dcptool.words import listed

_TOKEN = ".dcptool-token"
_SAYS_SAVING = b"dcptool copy is writing this step\n"


class CopyPlace(Protocol):
    """Where a copy is written.

    Attributes:
        storage: where its files are created.
        path: where they will be.
        written: where they are before that.
        journal: what is known of it.
    """

    path: str
    written: str
    journal: Journal

    @property
    def storage(self) -> Storage:
        """See above."""

    def begin(self, source: str, names: Collection[str], token: str = "") -> None:
        """Make it ready for the files of these names of a source; what is of another one is removed.

        Args:
            source: path or URL.
            names: of all its files, and of the marker.
            token: by which further processes find that they see the same place; "" if there are none.

        Raises:
            OutputExistsError: there is something else.
            StorageError: it cannot be made ready.
        """

    def join(self, source: str, known: Mapping[str, Moved], token: str) -> None:
        """Make it ready for a further process, which is told what the first one knows, and its token.

        Raises:
            StorageError: this process does not see what the first one does.
        """

    def joined(self) -> None:
        """Take away what further processes needed to find it."""

    def kept(self, name: str, entry: DirEntry) -> Moved | None:
        """Return what is known of a file that was copied before, if it can be proven to be there; else None."""

    def sink(self, name: str, entry: DirEntry, part: int) -> PartSink:
        """Begin a file that is like this one of the source."""

    def require_all(self, moved: Mapping[str, Moved]) -> None:
        """Refuse what is written if it is not these files, as long as they should be, and nothing else.

        Raises:
            StorageError: names one that is not as it should be.
        """

    def publish(self, overwrite: bool) -> None:
        """Give it its name, and remove what was needed for that; the files that make it complete are there.

        Raises:
            StorageError, OutputExistsError: it cannot get its name.
        """

    def discard(self) -> None:
        """Remove all of it. Never raises."""


def place_at(path: str, rank: int = 0) -> CopyPlace:
    """Return the place of a copy with this path or URL; `rank`: of this process among those that copy there.

    Raises:
        StorageError: somebody else copies there, or it cannot be looked at.
    """
    return StorePlace(path.rstrip("/"), rank) if is_url(path) else LocalPlace(path.rstrip("/") or path, rank)


def unfinished_at(path: str) -> tuple[str, str]:
    """Return the paths of the temporary folder and the journal of a copy to a local path."""
    absolute = os.path.abspath(path)
    name = f".dcptool-{new_sha256(absolute.encode(errors='surrogateescape')).hexdigest()[:8]}"
    folder = os.path.dirname(path) or "."
    return os.path.join(folder, f"{name}.tmp"), os.path.join(folder, f"{name}.journal")


def _journals_beside(journal: str) -> list[str]:
    """Return the paths of the journals of further processes; `journal`: of the first one."""
    return sorted(glob(f"{escape(journal)}-*[0-9]"))


def tidy(path: str) -> None:
    """Remove what a copy that was killed after it had got its name left at, or beside, a path. Never raises."""
    with suppress(DcptoolError):
        if is_url(path):
            storage = storage_at(path.rstrip("/"))
            for name in (STORE_NAME, *_further(storage)):
                if storage.size(name) is not None:
                    storage.delete(name)
        elif any(map(os.path.lexists, unfinished_at(path.rstrip("/") or path))):
            LocalPlace(path.rstrip("/") or path).discard()


class LocalPlace:
    """A folder on a file system; see `CopyPlace`."""

    def __init__(self, path: str, rank: int = 0) -> None:
        self.path = path
        self.written, journal = unfinished_at(path)
        self._first = journal
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        except OSError as error:
            raise StorageError(f"{os.path.dirname(path)}: {error.strerror or error}") from error
        self.journal: Journal = LocalJournal(f"{journal}-{rank}" if rank else journal)
        self.storage: Storage = LocalStorage(self.written)

    def begin(self, source: str, names: Collection[str], token: str = "") -> None:
        absorb(self.journal, map(LocalJournal, _journals_beside(self._first)))
        if self.journal.source != source:
            self._remove()
            self.journal.begin(source)
        try:
            os.makedirs(self.written, exist_ok=True)
            for folder, _, files in os.walk(self.written):
                for file in files:
                    path = os.path.join(folder, file)
                    if os.path.relpath(path, self.written) not in names:
                        os.unlink(path)
        except OSError as error:
            raise StorageError(f"{self.written}: {error.strerror or error}") from error
        if token:
            self.storage.write(_TOKEN, token.encode())

    def join(self, source: str, known: Mapping[str, Moved], token: str) -> None:
        _require_shared(self, _TOKEN, token.encode())
        self.journal.begin(source)
        self.journal.moved.update(known)

    def joined(self) -> None:
        self.storage.delete(_TOKEN)

    def kept(self, name: str, entry: DirEntry) -> Moved | None:
        moved = self.journal.moved.get(name)
        if moved is None or not moved.is_of(entry):
            return None
        try:
            there = self.storage.size(name) == moved.nbytes
            return moved if there and sha256(self.storage, name, moved.nbytes) == moved.sha256 else None
        except DcptoolError:
            return None

    def sink(self, name: str, entry: DirEntry, part: int) -> PartSink:
        return create_parts(self.storage, name, entry.nbytes, part, entry.mtime)

    def require_all(self, moved: Mapping[str, Moved]) -> None:
        _require(self.written, {entry.name: entry for entry in walk(self.storage)}, moved)

    def publish(self, overwrite: bool) -> None:
        try:
            for folder, _, _ in os.walk(self.written):
                sync(folder)
        except OSError as error:
            raise StorageError(f"{self.written}: {error.strerror or error}") from error
        Target(self.storage, self.path, False, self.written).publish(overwrite)
        self._remove_journals()

    def discard(self) -> None:
        self._remove()
        self._remove_journals()

    def _remove_journals(self) -> None:
        for path in _journals_beside(self._first):
            with suppress(OSError):
                os.unlink(path)
        self.journal.remove()

    def _remove(self) -> None:
        for _ in range(DISCARD_ATTEMPTS):
            if not os.path.isdir(self.written):
                return
            shutil.rmtree(self.written, ignore_errors=True)


class StorePlace:
    """A prefix of an object store; see `CopyPlace`."""

    def __init__(self, path: str, rank: int = 0) -> None:
        self.path = self.written = path
        self.storage: FsspecStorage = storage_at(path)
        self.journal: Journal = StoreJournal(self.storage, f".dcptool-copy-{rank}.json" if rank else STORE_NAME)
        self._there: dict[str, DirEntry] = {}
        self._names: tuple[str, ...] = ()

    def begin(self, source: str, names: Collection[str], token: str = "") -> None:
        absorb(self.journal, (StoreJournal(self.storage, name) for name in _further(self.storage)))
        self._there = self._listing()
        ours = {*self.journal.moved, *names, SAVING} if self.journal.source is not None else set()
        others = sorted(self._there.keys() - ours)
        if others:
            message = f"{self.path} is there already: {listed(others, 3)}"
            raise OutputExistsError(f"{message}; an object store has no rename, so name another place")
        if self.journal.source not in (None, source):
            message = f"{self.path} holds an unfinished copy of {self.journal.source}"
            raise OutputExistsError(message, next_step="Finish that one, delete it, or name another place.")
        if self.journal.source is None:
            self.journal.begin(source)
        self._names = tuple(names)
        self.storage.abort_uploads()
        self.storage.write(SAVING, _SAYS_SAVING + token.encode())
        for name in self._there.keys() - {*names, SAVING}:
            self.storage.delete(name)

    def join(self, source: str, known: Mapping[str, Moved], token: str) -> None:
        _require_shared(self, SAVING, _SAYS_SAVING + token.encode())
        self._there = self._listing()
        self.journal.begin(source)
        self.journal.moved.update(known)

    def joined(self) -> None:
        """What they looked at stays until the copy is complete."""

    def _listing(self) -> dict[str, DirEntry]:
        try:
            return {entry.name: entry for entry in walk(self.storage)}
        except CheckpointNotFoundError:
            return {}

    def kept(self, name: str, entry: DirEntry) -> Moved | None:
        moved, there = self.journal.moved.get(name), self._there.get(name)
        if moved is None or there is None or not moved.is_of(entry) or there.nbytes != moved.nbytes:
            return None
        if moved.stored is not None and there.version is not None:
            return moved if _same_version(moved.stored, there.version) else None
        try:
            return moved if sha256(self.storage, name, moved.nbytes) == moved.sha256 else None
        except DcptoolError:
            return None

    def sink(self, name: str, entry: DirEntry, part: int) -> PartSink:
        return create_parts(self.storage, name, entry.nbytes, part)

    def require_all(self, moved: Mapping[str, Moved]) -> None:
        there = self._listing()
        there.pop(SAVING, None)
        _require(self.path, there, moved)

    def publish(self, overwrite: bool) -> None:
        self.storage.delete(SAVING)
        for name in _further(self.storage):
            self.storage.delete(name)
        self.journal.remove()

    def discard(self) -> None:
        with suppress(DcptoolError):
            self.storage.abort_uploads()
        further: list[str] = []
        with suppress(DcptoolError):
            further = _further(self.storage)
        for name in (*self._names, *further, STORE_NAME, SAVING):
            with suppress(DcptoolError):
                self.storage.delete(name)


def _further(storage: Storage) -> list[str]:
    """Return the names of the journals of further processes."""
    try:
        return [entry.name for entry in storage.entries() if STORE_NAMES.fullmatch(entry.name)]
    except CheckpointNotFoundError:
        return []


def _require_shared(place: CopyPlace, name: str, content: bytes) -> None:
    """Refuse a place where another process does not see what the first one wrote there."""
    nbytes = place.storage.size(name)
    if nbytes != len(content) or place.storage.read(name, 0, nbytes) != content:
        message = f"{place.path}: what rank 0 writes there is not seen by all"
        raise StorageError(message, next_step="The target must be on storage that all processes share.")


def _same_version(one: str, other: str) -> bool:
    return one.strip('"') == other.strip('"')


def _require(path: str, there: Mapping[str, DirEntry], moved: Mapping[str, Moved]) -> None:
    """Refuse a listing that is not of these files; see `CopyPlace.require_all`."""
    for name in sorted(there.keys() ^ moved.keys()):
        what = "is not there any more" if name in moved else "is no file of this copy"
        raise StorageError(f"{join(path, name)} {what}: somebody else writes there", next_step=_AGAIN)
    for name, file in moved.items():
        found = there[name]
        versions = (file.stored, found.version)
        if found.nbytes != file.nbytes or (None not in versions and not _same_version(*map(str, versions))):
            raise StorageError(
                f"{join(path, name)} is not what was copied: somebody else writes there", next_step=_AGAIN
            )


_AGAIN = "Run it again when nobody does, or name another place."
