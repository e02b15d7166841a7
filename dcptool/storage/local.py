"""A folder of the local, or of a mounted shared, file system."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress

from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.storage.base import DirEntry, patient, too_short, translated

_OPEN_FILES = 64
_GATHERED_NBYTES = 256 << 10
"""Headers and directories between payloads are some hundred bytes each."""
WRITEBACK_NBYTES = 8 << 20
"""After so many bytes the disk is told to begin; else it stands still until the system has gathered gigabytes."""
_DELETE_ATTEMPTS = 20


_PASSING = {errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN}
"""What a mounted file system says of a server that may be back in a moment."""


def _may_pass(error: StorageError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _PASSING


_patiently = patient(_may_pass)


class LocalStorage:
    """A folder of the local (or mounted shared) file system."""

    piece_nbytes = 1 << 20
    """Enough to make the work around a read small; what is larger leaves a processor's cache before it is looked at."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    @_patiently
    def entries(self, folder: str = "") -> list[DirEntry]:
        path = self._path(folder)
        entries = []
        with translated(path), os.scandir(path) as found:
            for item in found:
                name = f"{folder}/{item.name}" if folder else item.name
                try:
                    is_dir, is_link = item.is_dir(), item.is_symlink()
                    there = None if is_dir else item.stat()
                except OSError as error:  # a dangling or looping link, or gone since the listing
                    if item.is_symlink() or isinstance(error, FileNotFoundError):
                        continue
                    raise
                size, mtime = (there.st_size, there.st_mtime) if there else (0, None)
                entries.append(DirEntry(name, size, is_dir, is_link, mtime))
        return sorted(entries)

    @_patiently
    def entry(self, name: str) -> DirEntry | None:
        try:
            with translated(self._path(name)):
                found = os.stat(self._path(name))
        except CheckpointNotFoundError:
            return None
        return DirEntry(name, found.st_size, False, False, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def size(self, name: str) -> int | None:
        found = self.entry(name)
        return found.nbytes if found else None

    def _lend(self, name: str) -> int:
        """Return a descriptor to read from, which is nobody else's until it is given back."""
        with self._lock:
            descriptor = self._files.pop(name, -1)
        if descriptor < 0:
            # O_NONBLOCK: a FIFO in place of a data file must not hang the tool.
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise StorageError(f"{self._path(name)} is not a regular file")
        return descriptor

    def _take_back(self, name: str, descriptor: int) -> None:
        """Keep a descriptor for the next read of its file, up to _OPEN_FILES in all."""
        with self._lock:
            spare = self._files.pop(name, -1)
            self._files[name] = descriptor
            if len(self._files) > _OPEN_FILES:
                _, spare = self._files.popitem(last=False)
            if spare >= 0:
                os.close(spare)

    @_patiently
    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        path = self._path(name)
        done = 0
        with translated(path, StorageError):
            descriptor = self._lend(name)
            try:
                while done < len(out):
                    count = os.preadv(descriptor, [out[done:]], byte_offset + done)
                    if count == 0:
                        raise too_short(path, byte_offset, len(out), os.fstat(descriptor).st_size)
                    done += count
            finally:
                self._take_back(name, descriptor)

    @_patiently
    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        path = self._path(name)
        with translated(path, StorageError):
            descriptor = self._lend(name)
            try:
                if nbytes > 1 << 20:  # do not allocate what a short file cannot give
                    nbytes_there = os.fstat(descriptor).st_size
                    if byte_offset + nbytes > nbytes_there:
                        raise too_short(path, byte_offset, nbytes, nbytes_there)
                pieces = []
                while nbytes:
                    piece = os.pread(descriptor, nbytes, byte_offset)
                    if not piece:
                        raise too_short(path, byte_offset, nbytes, os.fstat(descriptor).st_size)
                    pieces.append(piece)
                    byte_offset += len(piece)
                    nbytes -= len(piece)
            finally:
                self._take_back(name, descriptor)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def links(self) -> dict[str, str]:
        with translated(self.root), os.scandir(self.root) as found:
            return {item.name: os.readlink(item.path) for item in found if item.is_symlink()}

    def target(self, name: str) -> str:
        return os.path.realpath(self._path(name))

    def written(self) -> float | None:
        with suppress(OSError):
            return os.stat(self.root).st_mtime
        return None

    def below(self, folder: str) -> LocalStorage:
        return LocalStorage(self._path(folder))

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        # Not a name like the step's: trainers' clean-up matches loosely.
        temporary = os.path.join(os.path.dirname(path), f".dcptool-{os.urandom(4).hex()}.tmp")
        with translated(path, StorageError, writes=True):
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            sync_folder(os.path.dirname(path))

    def create(self, name: str) -> LocalSink:
        path = self._path(name)
        with translated(path, StorageError, writes=True):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            return LocalSink(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def delete(self, name: str) -> None:
        with suppress(CheckpointNotFoundError), translated(self._path(name), writes=True):
            os.unlink(self._path(name))
            sync_folder(os.path.dirname(self._path(name)))

    def delete_folder(self, name: str) -> None:
        import shutil

        path = self._path(name)
        if os.path.islink(path):
            raise StorageError(f"{path} is a link; what it points at is not deleted")
        with translated(path, StorageError, writes=True):
            for _ in range(_DELETE_ATTEMPTS):
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    # Somebody else deletes, or still writes, there: what is gone or new meanwhile must not stop it.
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                        raise
                if not os.path.lexists(path):
                    return
        raise StorageError(f"{path} is still there after {_DELETE_ATTEMPTS} deletions: somebody writes there")

    def close(self) -> None:
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_lock"):  # a signal may have come in the middle of __init__
            self.close()


class NewFile:
    """A new local file that is open, until it is finished or given up."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def _complete(self) -> None:
        """Do what is left before the file is synced."""

    def finish(self) -> None:
        with translated(self._path, StorageError, writes=True):
            try:
                self._complete()
                os.fsync(self._descriptor)
            finally:
                self._close()

    def abort(self) -> None:
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        """Close once: by a second time the number may be another thread's file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LocalSink(NewFile):
    """A new local file; small writes are gathered, and the disk writes while there is more to come."""

    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._gathered = bytearray()
        self._written = self._begun = 0

    def write(self, data: bytes | memoryview) -> None:
        if len(self._gathered) + len(data) <= _GATHERED_NBYTES:
            self._gathered += data
            return
        self._flush()
        self._write(memoryview(data))

    def _flush(self) -> None:
        self._write(memoryview(bytes(self._gathered)))
        self._gathered.clear()

    def _write(self, rest: memoryview) -> None:
        with translated(self._path, StorageError, writes=True):
            while rest:
                count = os.write(self._descriptor, rest)
                rest = rest[count:]
                self._written += count
        if self._written - self._begun >= WRITEBACK_NBYTES:
            begin_writeback(self._descriptor, self._begun, self._written - self._begun)
            self._begun = self._written

    def _complete(self) -> None:
        self._flush()


def begin_writeback(descriptor: int, start: int, nbytes: int) -> None:
    """Have the system write a range to the disk, and do not wait for it; `fsync` later finds little left to do.

    Linux begins to write dirty pages that are said not to be needed, and forgets only those that are clean. Elsewhere
    nothing may happen.
    """
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)


def sync_folder(path: str) -> None:
    """Make a rename or a deletion in a folder last through a power cut, where the system can."""
    with suppress(OSError):
        sync(path or ".")


def sync(path: str) -> None:
    """Make what was written to a file or folder last through a power cut; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
