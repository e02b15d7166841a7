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
from hashlib import sha256 as new_sha256
from typing import Protocol

from dcptool.copying.publishing import DISCARD_ATTEMPTS, Target
from dcptool.errors import CheckpointNotFoundError, DcptoolError, OutputExistsError, StorageError
from dcptool.formats.digests import sha256
from dcptool.formats.marker import SAVING
from dcptool.ops.copy.journal import STORE_NAME, Journal, LocalJournal, Moved, StoreJournal
from dcptool.storage import DirEntry, FsspecStorage, LocalStorage, Storage, is_url, join, storage_at, walk
from dcptool.storage.local import sync
from dcptool.storage.parts import PartSink, create_parts
from dcptool.words import listed

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

    def begin(self, source: str, names: Collection[str]) -> None:
        """Make it ready for the files of these names of a source; what is of another one is removed.

        Raises:
            OutputExistsError: there is something else.
            StorageError: it cannot be made ready.
        """

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


def place_at(path: str) -> CopyPlace:
    """Return the place of a copy with this path or URL.

    Raises:
        StorageError: somebody else copies there, or it cannot be looked at.
    """
    return StorePlace(path.rstrip("/")) if is_url(path) else LocalPlace(path.rstrip("/") or path)


def unfinished_at(path: str) -> tuple[str, str]:
    """Return the paths of the temporary folder and the journal of a copy to a local path."""
    absolute = os.path.abspath(path)
    name = f".dcptool-{new_sha256(absolute.encode(errors='surrogateescape')).hexdigest()[:8]}"
    folder = os.path.dirname(path) or "."
    return os.path.join(folder, f"{name}.tmp"), os.path.join(folder, f"{name}.journal")


def tidy(path: str) -> None:
    """Remove what a copy that was killed after it had got its name left at, or beside, a path. Never raises."""
    with suppress(DcptoolError):
        if is_url(path):
            storage = storage_at(path.rstrip("/"))
            if storage.size(STORE_NAME) is not None:
                storage.delete(STORE_NAME)
        elif any(map(os.path.lexists, unfinished_at(path.rstrip("/") or path))):
            LocalPlace(path.rstrip("/") or path).discard()


class LocalPlace:
    """A folder on a file system; see `CopyPlace`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.written, journal = unfinished_at(path)
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        except OSError as error:
            raise StorageError(f"{os.path.dirname(path)}: {error.strerror or error}") from error
        self.journal: Journal = LocalJournal(journal)
        self.storage: Storage = LocalStorage(self.written)

    def begin(self, source: str, names: Collection[str]) -> None:
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
        self.journal.remove()

    def discard(self) -> None:
        self._remove()
        self.journal.remove()

    def _remove(self) -> None:
        for _ in range(DISCARD_ATTEMPTS):
            if not os.path.isdir(self.written):
                return
            shutil.rmtree(self.written, ignore_errors=True)


class StorePlace:
    """A prefix of an object store; see `CopyPlace`."""

    def __init__(self, path: str) -> None:
        self.path = self.written = path
        self.storage: FsspecStorage = storage_at(path)
        self.journal: Journal = StoreJournal(self.storage)
        self._there: dict[str, DirEntry] = {}
        self._names: tuple[str, ...] = ()

    def begin(self, source: str, names: Collection[str]) -> None:
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
        self.storage.write(SAVING, _SAYS_SAVING)
        for name in self._there.keys() - {*names, SAVING}:
            self.storage.delete(name)

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
        self.journal.remove()

    def discard(self) -> None:
        with suppress(DcptoolError):
            self.storage.abort_uploads()
        for name in (*self._names, STORE_NAME, SAVING):
            with suppress(DcptoolError):
                self.storage.delete(name)


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
