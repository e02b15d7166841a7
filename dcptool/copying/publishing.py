"""Where output is put: under a temporary name until it is complete, then under its own, at once.

Locally a temporary sibling whose name does not hold the target's (trainers' clean-up matches loosely), renamed at the
end. An object store has no rename: there the names are final, and what makes a checkpoint complete is written last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dcptool.copying.outputs import OutputFile
from dcptool.errors import CheckpointNotFoundError, DcptoolError, OutputExistsError, StorageError, UnsupportedError
from dcptool.storage import LocalStorage, Storage, is_temporary, is_url, join, locate, storage_at
from dcptool.storage.local import sync_folder

DISCARD_ATTEMPTS = 5


class Target:
    """A place for output that is about to be written.

    Attributes:
        storage: where files are to be created.
        path: where they will be once published.
        is_file: whether the output is one file.
    """

    def __init__(self, storage: Storage, path: str, is_file: bool, temporary: str) -> None:
        self.storage, self.path, self.is_file, self._temporary = storage, path, is_file, temporary
        self._names: set[str] = set()

    def named(self, files: Sequence[OutputFile]) -> list[OutputFile]:
        """Return files under the names they are written under."""
        if self.is_file:
            name = os.path.basename(self._temporary or self.path)
            files = [file._replace(name=name) for file in files]
        self._names.update(file.name for file in files)
        return list(files)

    def note(self, names: Iterable[str]) -> None:
        """Take note of files that others made here, to be removed with the rest."""
        self._names.update(names)

    @property
    def written(self) -> str:
        """Path of what has been written so far."""
        return self._temporary or self.path

    def publish(self, overwrite: bool) -> None:
        """Give the output its name; what was there before is replaced at this moment, and not earlier.

        Raises:
            StorageError, OutputExistsError: it cannot be renamed; what was there before is unchanged.
        """
        if not self._temporary:
            return
        try:
            if self.is_file:
                if not overwrite and os.path.lexists(self.path):
                    raise OutputExistsError(f"{self.path} is there already")
                os.replace(self._temporary, self.path)
            else:
                self._swap(overwrite)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror or error}") from error
        sync_folder(os.path.dirname(self.path))

    def _swap(self, overwrite: bool) -> None:
        sync_folder(self._temporary)
        is_link = os.path.islink(self.path)
        if not os.path.lexists(self.path) or not (is_link or os.listdir(self.path)):
            os.rename(self._temporary, self.path)
            return
        if not overwrite:
            raise OutputExistsError(f"{self.path} is there already")
        old = temporary_beside(self.path)
        try:
            os.rename(self.path, old)
            os.rename(self._temporary, self.path)
        except BaseException:  # Ctrl-C between the two included
            if os.path.lexists(old) and not os.path.lexists(self.path):
                os.rename(old, self.path)
            raise
        if is_link:
            os.unlink(old)  # the link is what is replaced, never what it leads to
        else:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what has been written. Never raises."""
        with suppress(OSError):
            if self._temporary and self.is_file:
                os.unlink(self._temporary)
        for _ in range(DISCARD_ATTEMPTS):
            if not self._temporary or not os.path.isdir(self._temporary):
                break
            shutil.rmtree(self._temporary, ignore_errors=True)  # another process may still be removing its own
        for name in () if self._temporary else self._names:
            with suppress(DcptoolError):
                self.storage.delete(name)


@contextmanager
def prepare(path: str, is_file: bool, nbytes: int, overwrite: bool | None, source: str) -> Iterator[Target]:
    """Prepare a place for output; what was written is removed if the body raises.

    Args:
        path: local path or URL where the output shall be.
        is_file: whether it is one file, else a folder.
        nbytes: how much will be written.
        overwrite: whether output that is there already may be replaced; None where nobody can ask for that.
        source: path of what is read, which the output must not touch.

    Raises:
        OutputExistsError: there is something already.
        StorageError: there is not enough space, or no such place.
        UnsupportedError: the target is the source, in it, or around it.
    """
    path = require_place(path, is_file, nbytes, overwrite, (source,))
    target = _remote(path, is_file) if is_url(path) else _local(path, is_file)
    try:
        yield target
    except BaseException:
        target.discard()
        raise


def require_place(path: str, is_file: bool, nbytes: int, overwrite: bool | None, sources: Sequence[str]) -> str:
    """Refuse a place where output cannot go, before anything is read for it; nothing is changed.

    Args:
        path, is_file, nbytes, overwrite: as in `prepare`.
        sources: paths of what is read, which the output must not touch.

    Returns:
        The path, without what only means that it is local.

    Raises:
        As `prepare` does.
    """
    path = path if is_url(path) else path.removeprefix("file://")
    if not path:
        raise StorageError("the path of the output is empty")
    if "\0" in path:
        raise StorageError(f"{path!r} cannot be a path: it has a NUL character")
    for source in sources:
        _require_apart(path, source)
    if is_url(path):
        inside = path.rpartition("://")[2].strip("/")
        if not inside or (is_file and "/" not in inside):
            raise StorageError(f"{path} names no {'file in' if is_file else 'folder in'} an object store; add its name")
        _require_nothing_there(path.rstrip("/"))
    else:
        _require_replaceable(path, is_file, overwrite)
        _require_space(os.path.dirname(path.rstrip("/")) or ".", nbytes)
    return path


def _require_replaceable(path: str, is_file: bool, overwrite: bool | None) -> None:
    bare = path.rstrip("/") or path
    there = os.path.lexists(bare)
    if is_file and (os.path.isdir(bare) or path.endswith("/")):
        raise OutputExistsError(
            f"{path} is a folder; the output is one file: name it, such as {join(bare, 'model.pt')}"
        )
    if os.path.exists(bare) and not (os.path.isfile(bare) or os.path.isdir(bare)):
        raise OutputExistsError(f"{bare} is a device or a pipe, which nothing may replace; choose another place")
    if there and not is_file and not os.path.isdir(bare):
        raise OutputExistsError(f"{bare} is a file; the output is a folder: choose another name")
    if there and not overwrite and (is_file or os.path.islink(bare) or os.listdir(bare)):
        step = "--overwrite replaces it once the new one is complete" if overwrite is False else "name another place"
        raise OutputExistsError(f"{bare} is there already; {step}")


def _require_space(folder: str, nbytes: int) -> None:
    """Refuse a folder whose file system has less free than is needed; the folder itself may not be there yet."""
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder) or "."
    if not os.path.isdir(folder):
        raise StorageError(f"{folder} is no folder: nothing can be written below it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{folder} cannot be written to: no permission, or a file system mounted read-only")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}") from error
    if nbytes > free:
        raise StorageError(
            f"not enough space: {folder} has {free:,} bytes free, {nbytes:,} are needed",
            next_step="Free some, or choose a place on another disk.",
        )


def _local(path: str, is_file: bool) -> Target:
    path = path.rstrip("/") or path
    parent = os.path.dirname(path) or "."
    try:
        os.makedirs(parent, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{parent}: {error.strerror or error}") from error
    temporary = temporary_beside(path)
    storage = LocalStorage(parent) if is_file else LocalStorage(temporary)
    return Target(storage, path, is_file, temporary)


def _remote(path: str, is_file: bool) -> Target:
    path = path.rstrip("/")
    return Target(storage_at(path.rpartition("/")[0] if is_file else path), path, is_file, "")


def _require_nothing_there(path: str) -> None:
    """Refuse a place in an object store that is taken: what is there cannot be kept until the new is complete."""
    try:
        location = locate(path)
    except CheckpointNotFoundError:
        return
    if location.file is not None or location.storage.entries():
        raise OutputExistsError(f"{path} is there already; an object store has no rename, so name another place")


def _require_apart(path: str, source: str) -> None:
    """Refuse a target that is the source, lies in it, or holds it."""
    if is_url(path) != is_url(source):
        return
    ours, theirs = (text.rstrip("/") if is_url(text) else os.path.realpath(text) for text in (path, source))
    how = ""
    if ours == theirs:
        how = "is the source itself"
    elif theirs.startswith(f"{ours.rstrip('/')}/"):
        how = f"holds the source {source}"
    elif ours.startswith(f"{theirs.rstrip('/')}/") and (is_url(source) or not os.path.isfile(source)):
        how = f"lies in the source {source}"
    if how:
        raise UnsupportedError(f"{path} {how}, which is never written to; choose another place")


def temporary_beside(path: str) -> str:
    """Return a name for temporary output in the folder of a path."""
    return os.path.join(os.path.dirname(path) or ".", f".dcptool-{os.urandom(4).hex()}.tmp")


def leftovers(path: str) -> list[str]:
    """Return temporary output that earlier runs left beside a local path when they were killed."""
    parent = os.path.dirname(path.rstrip("/")) or "."
    try:
        return [] if is_url(path) else sorted(join(parent, name) for name in os.listdir(parent) if is_temporary(name))
    except OSError:
        return []
