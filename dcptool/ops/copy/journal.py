"""Which files of a copy are at its target already: kept up to date while it goes on, read when it goes on again.

Beside a local copy it is a file that only grows, locked while somebody copies there. In an object store, which cannot
append, it is a small object that is written anew, not more often than every few seconds once it has grown.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import IO, Any, NamedTuple, Protocol

from dcptool.errors import StorageError
from dcptool.storage import DirEntry, Storage, is_inside
from dcptool.storage.base import translated

SCHEMA = 1
STORE_NAME = ".dcptool-copy.json"
STORE_NAMES = re.compile(r"\.dcptool-copy-[0-9]+\.json")
"""Of the journals of further processes."""
_SMALL_NBYTES = 64 << 10
_EVERY_SECONDS = 3.0
_MAX_NBYTES = 256 << 20


class Moved(NamedTuple):
    """A file that has been copied.

    Attributes:
        nbytes: of it.
        mtime, version: of the source's file when that was copied; see `DirEntry`.
        sha256: of its bytes as they passed.
        stored: what the target's store calls its content, None where it calls it nothing.
        n_records: how many CRC32s in it were compared.
    """

    nbytes: int
    mtime: float | None
    version: str | None
    sha256: str
    stored: str | None = None
    n_records: int = 0

    def is_of(self, entry: DirEntry) -> bool:
        """Tell whether the source's file is the one that was copied."""
        return (self.nbytes, self.mtime, self.version) == (entry.nbytes, entry.mtime, entry.version)


class Journal(Protocol):
    """What is known of a copy; `source` is what it is a copy of, None if nothing is known."""

    source: str | None
    moved: dict[str, Moved]

    def begin(self, source: str) -> None:
        """Begin anew, with nothing copied."""

    def add(self, name: str, moved: Moved) -> None:
        """Note that a file has been copied, on any thread."""

    def add_all(self, moved: Mapping[str, Moved]) -> None:
        """Note several, and make that last."""

    def save(self) -> None:
        """Make what was noted last."""

    def remove(self) -> None:
        """Remove it: the copy is complete, or given up."""

    def close(self) -> None:
        """Let others copy there."""


def absorb(journal: Journal, others: Iterable[Journal]) -> None:
    """Take over what the other processes of an earlier copy noted of the same source, and remove what they wrote."""
    for other in others:
        if journal.source is not None and other.source == journal.source:
            journal.add_all(other.moved)
        other.remove()


def _read(lines: Mapping[str, Any]) -> dict[str, Moved]:
    found = {}
    for name, fields in lines.items():
        with suppress(TypeError):
            moved = Moved(**fields)
            if is_inside(name) and isinstance(moved.nbytes, int) and isinstance(moved.sha256, str):
                found[name] = moved
    return found


class LocalJournal:
    """A file of lines, one for each file that was copied; what a kill left of the last one is not counted."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.source: str | None = None
        self.moved: dict[str, Moved] = {}
        self._lock = threading.Lock()
        self._file = self._locked()
        with translated(path, StorageError):
            self._load(self._file.read())

    def _locked(self) -> IO[bytes]:
        """Open the file, and be the only one who has."""
        while True:
            with translated(self.path, StorageError, writes=True):
                file = open(self.path, "a+b")  # noqa: SIM115  (open as long as the copy goes on)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.close()
                message = f"{self.path}: somebody else copies to this place just now"
                raise StorageError(message, next_step="Wait for that, or name another place.") from error
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    file.seek(0)
                    return file
            file.close()  # whoever had it has finished meanwhile, and removed it

    def _load(self, data: bytes) -> None:
        lines = {}
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if isinstance(fields, dict) and fields.get("schema") == SCHEMA:
                self.source = str(fields.get("source"))
            elif isinstance(fields, dict):
                lines[str(fields.pop("name", ""))] = fields
        self.moved = _read(lines) if self.source is not None else {}
        if data and not data.endswith(b"\n"):
            self._append(b"\n")

    def begin(self, source: str) -> None:
        self.source, self.moved = source, {}
        with translated(self.path, StorageError, writes=True):
            self._file.truncate(0)
        self._append(json.dumps({"schema": SCHEMA, "source": source}).encode() + b"\n")

    def add(self, name: str, moved: Moved) -> None:
        with self._lock:
            self.moved[name] = moved
            self._append(json.dumps({"name": name, **moved._asdict()}).encode() + b"\n")

    def add_all(self, moved: Mapping[str, Moved]) -> None:
        for name, one in moved.items():
            self.add(name, one)

    def _append(self, line: bytes) -> None:
        with translated(self.path, StorageError, writes=True):
            self._file.write(line)
            self._file.flush()

    def save(self) -> None:
        """Each line was written at once."""

    def remove(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class StoreJournal:
    """An object in the folder that is copied to, which listings of a step pass over."""

    def __init__(self, storage: Storage, name: str = STORE_NAME) -> None:
        self._storage, self._name = storage, name
        self.source: str | None = None
        self.moved: dict[str, Moved] = {}
        self._lock = threading.Lock()
        self._nbytes, self._saved, self._dirty = 0, 0.0, False
        nbytes = storage.size(name)
        if nbytes is not None and nbytes <= _MAX_NBYTES:
            self._load(storage.read(name, 0, nbytes))

    def _load(self, data: bytes) -> None:
        with suppress(ValueError, TypeError, AttributeError):
            fields = json.loads(data)
            if fields["schema"] == SCHEMA:
                self.source, self.moved = str(fields["source"]), _read(fields["files"])

    def begin(self, source: str) -> None:
        self.source, self.moved = source, {}
        self._write()

    def add(self, name: str, moved: Moved) -> None:
        with self._lock:
            self.moved[name] = moved
            self._dirty = True
            if self._nbytes < _SMALL_NBYTES or time.monotonic() - self._saved > _EVERY_SECONDS:
                self._write()

    def add_all(self, moved: Mapping[str, Moved]) -> None:
        with self._lock:
            self.moved.update(moved)
            self._write()

    def save(self) -> None:
        with self._lock:
            if self._dirty:
                self._write()

    def _write(self) -> None:
        files = {name: moved._asdict() for name, moved in self.moved.items()}
        data = json.dumps({"schema": SCHEMA, "source": self.source, "files": files}).encode()
        self._storage.write(self._name, data)
        self._nbytes, self._saved, self._dirty = len(data), time.monotonic(), False

    def remove(self) -> None:
        self._storage.delete(self._name)

    def close(self) -> None:
        """Nothing is held."""
