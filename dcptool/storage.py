"""Where the bytes are: list, stat and ranged read under one root, on a local disk or behind any fsspec URL.

Knows no checkpoint format. Names are relative to the root, with forward slashes. Foreign errors become
`StorageError` here and nowhere else. fsspec is imported only for a path that is a URL.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from dcptool.errors import CheckpointNotFoundError, DcptoolError, StorageError, UnsupportedError

_OPEN_FILES = 64
_URL_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


class Entry(NamedTuple):
    """One name in a listing: a file with its size in bytes, or a folder (nbytes 0); either may be a symbolic link."""

    name: str
    nbytes: int
    is_dir: bool
    is_link: bool = False


class Storage(Protocol):
    """Read access to the files under `root`."""

    root: str

    def entries(self, folder: str = "") -> list[Entry]:
        """List a folder, not its subfolders, sorted by name; names are relative to the root.

        Raises:
            CheckpointNotFoundError: there is no such folder.
            StorageError: it cannot be listed.
        """

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None if there is no such file."""

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        """Fill `out` (bytes, writable) with the file's bytes from `byte_offset` on.

        Raises:
            StorageError: the file is missing, unreadable or ends before that many bytes.
        """

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes of a file; errors as in `read_into`. The caller bounds `nbytes`."""

    def close(self) -> None:
        """Give back open files; the storage can be used again afterwards."""


class LocalStorage:
    """A folder of the local (or mounted shared) file system."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    def entries(self, folder: str = "") -> list[Entry]:
        path = self._path(folder)
        entries = []
        with _translated(path), os.scandir(path) as found:
            for item in found:
                name = f"{folder}/{item.name}" if folder else item.name
                try:
                    is_dir = item.is_dir()
                    entries.append(Entry(name, 0 if is_dir else item.stat().st_size, is_dir, item.is_symlink()))
                except OSError:  # a dangling or looping link, or gone since the listing
                    continue
        return sorted(entries)

    def size(self, name: str) -> int | None:
        try:
            with _translated(self._path(name)):
                found = os.stat(self._path(name))
        except CheckpointNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Lend a descriptor; up to _OPEN_FILES stay open between reads."""
        with self._lock:
            descriptor = self._files.pop(name, -1)
        if descriptor < 0:
            # O_NONBLOCK: a FIFO in place of a data file must not hang the tool.
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise StorageError(f"{self._path(name)} is not a regular file")
        try:
            yield descriptor
        finally:
            with self._lock:
                if name in self._files or len(self._files) >= _OPEN_FILES:
                    spare = descriptor
                    if name not in self._files:
                        _, spare = self._files.popitem(last=False)
                        self._files[name] = descriptor
                    os.close(spare)
                else:
                    self._files[name] = descriptor

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        path = self._path(name)
        done = 0
        with _translated(path, StorageError), self._open(name) as descriptor:
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], byte_offset + done)
                if count == 0:
                    raise _too_short(path, byte_offset, len(out), os.fstat(descriptor).st_size)
                done += count

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        path = self._path(name)
        with _translated(path, StorageError), self._open(name) as descriptor:
            if nbytes > 1 << 20:  # do not allocate what a short file cannot give
                nbytes_there = os.fstat(descriptor).st_size
                if byte_offset + nbytes > nbytes_there:
                    raise _too_short(path, byte_offset, nbytes, nbytes_there)
            pieces = []
            while nbytes:
                piece = os.pread(descriptor, nbytes, byte_offset)
                if not piece:
                    raise _too_short(path, byte_offset, nbytes, os.fstat(descriptor).st_size)
                pieces.append(piece)
                byte_offset += len(piece)
                nbytes -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()


class FsspecStorage:
    """A folder or key prefix behind an fsspec URL, such as `s3://bucket/run/step_500`."""

    def __init__(self, filesystem: Any, root: str, path: str) -> None:
        self.root = root
        self._filesystem = filesystem
        self._base = path.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _shown(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def entries(self, folder: str = "") -> list[Entry]:
        path = self._path(folder)
        with _translated(self._shown(folder)):
            self._filesystem.invalidate_cache()  # somebody else may be writing there
            found = self._filesystem.ls(path, detail=True)
        entries = {}
        for item in found:
            base = str(item["name"]).rstrip("/").rsplit("/", 1)[-1]
            is_dir = item["type"] == "directory"
            # An object store may list the folder itself, as the empty object that marks it.
            if str(item["name"]).strip("/") == path.strip("/"):
                continue
            name = f"{folder}/{base}" if folder else base
            entries[name] = Entry(name, 0 if is_dir else int(item["size"] or 0), is_dir)
        return sorted(entries.values())

    def size(self, name: str) -> int | None:
        try:
            with _translated(self._shown(name)):
                found = self._filesystem.info(self._path(name))
        except CheckpointNotFoundError:
            return None
        return None if found["type"] == "directory" else int(found["size"])

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        shown = self._shown(name)
        if nbytes == 0:
            return b""
        with _translated(shown, StorageError):
            try:
                data = bytes(self._filesystem.cat_file(self._path(name), start=byte_offset, end=byte_offset + nbytes))
            except (ValueError, IndexError):  # how some stores answer a range that starts past the end
                data = b""
        if len(data) != nbytes:
            raise _too_short(shown, byte_offset, nbytes, byte_offset + len(data))
        return data

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        out[:] = self.read(name, byte_offset, len(out))

    def close(self) -> None:
        """Nothing is held open: every read is a request of its own."""


class Location(NamedTuple):
    """A user's path: the storage that holds it and, if it is a file, its name in there."""

    storage: Storage
    file: str | None


def locate(path: str | os.PathLike[str]) -> Location:
    """Find what a user's path points at.

    Args:
        path: a local path or any fsspec URL; `file://` URLs are local paths.

    Returns:
        For a folder its storage; for a file the storage of its parent folder and the file's name.

    Raises:
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: it cannot be looked at.
        UnsupportedError: no library for that kind of URL is installed.
    """
    text = os.fspath(path)
    if not text:
        raise CheckpointNotFoundError("the path is empty")
    if text.startswith("file://") and "::" not in text:
        text = text.removeprefix("file://")
    if "://" in text or "::" in text:
        return _locate_url(text)
    if "\0" in text:
        raise CheckpointNotFoundError(f"{text!r} cannot be a path: it has a NUL character")
    if text.startswith("~") and not os.path.exists(text):
        text = os.path.expanduser(text)
    try:
        with _translated(text):
            found = os.stat(text)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}{_similar(text)}") from error
    if stat.S_ISDIR(found.st_mode):
        return Location(LocalStorage(text.rstrip("/") or "/"), None)
    folder, name = os.path.split(text)
    return Location(LocalStorage(folder or "."), name)


def _locate_url(url: str) -> Location:
    from fsspec.core import url_to_fs

    protocol = url.split(":", 1)[0]
    try:
        with _translated(url):
            filesystem, path = url_to_fs(url)
            filesystem.invalidate_cache()
            found = filesystem.info(path)
    except (ImportError, ValueError) as error:
        extra = _URL_EXTRAS.get(protocol)
        hint = f"pip install 'dcptool[{extra}]'" if extra else "install the fsspec implementation of that protocol"
        raise UnsupportedError(f"{url}: {error}\n{hint}") from error
    url = url if url.endswith("://") else url.rstrip("/")
    if found["type"] == "directory":
        return Location(FsspecStorage(filesystem, url, path), None)
    folder, _, name = path.rstrip("/").rpartition("/")
    return Location(FsspecStorage(filesystem, url.rpartition("/")[0], folder), name)


def _similar(path: str) -> str:
    """Return what to say about a missing path: the part of it that exists, and a name there that is like it."""
    parent, _, name = path.rstrip("/").rpartition("/")
    parent = parent or ("/" if path.startswith("/") else ".")
    if not os.path.isdir(parent):
        while parent and not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        return f"; {parent} exists" if parent not in ("", "/") else ""
    import difflib

    try:
        close = difflib.get_close_matches(name, os.listdir(parent), 1)
    except OSError:
        close = []
    return f"; did you mean {join(parent, close[0])}?" if close else ""


def join(root: str, name: str) -> str:
    """Return the path or URL of a name under a root, as a user would type it."""
    if not name:
        return root
    if "::" in root:  # a chain: the name belongs to its first link
        first, _, rest = root.partition("::")
        return f"{join(first, name)}::{rest}"
    if root.endswith("://"):
        return root + name
    return name if root == "." else f"{root.rstrip('/')}/{name}"


@contextmanager
def _translated(path: str, missing: type[DcptoolError] = CheckpointNotFoundError) -> Iterator[None]:
    """Turn what a file system may raise into dcptool's errors, naming the path; `missing` if nothing is there."""
    try:
        yield
    except (StorageError, CheckpointNotFoundError):
        raise
    except FileNotFoundError as error:
        raise missing(f"{path}: no such file or directory") from error
    except NotADirectoryError as error:
        raise missing(f"{path}: a part of this path is a file, not a folder") from error
    except PermissionError as error:
        raise StorageError(f"{path}: permission denied; it needs read access, and its folders search access") from error
    except (ValueError, ImportError):
        raise  # a malformed URL or a missing library: the caller knows what to say
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise CheckpointNotFoundError(f"{path[:80]}…: the name is too long to exist") from error
        raise StorageError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # cloud libraries raise classes of their own
        raise StorageError(f"{path}: {type(error).__name__}: {error}") from error


def _too_short(path: str, byte_offset: int, nbytes: int, end: int) -> StorageError:
    return StorageError(f"{path} ends at byte {end}, but bytes {byte_offset}–{byte_offset + nbytes} are needed")
