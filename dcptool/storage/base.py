"""What a storage is: a listing, ranged reads, small writes and deletes under one root. Knows no checkpoint format.

Names are relative to the root, with forward slashes. Foreign errors become `StorageError` in `translated` and nowhere
else.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from dcptool.errors import CheckpointNotFoundError, DcptoolError, StorageError

Progress = Callable[[int], None]
"""Told how many more bytes were read, or written."""


class DirEntry(NamedTuple):
    """One name in a listing: a file with its size in bytes, or a folder (nbytes 0); either may be a symbolic link.

    `mtime` is when a file was last written, in seconds since the epoch; None for folders and where it is not known.
    `version` is what an object store calls this content of the object; None elsewhere.
    """

    name: str
    nbytes: int
    is_dir: bool
    is_link: bool = False
    mtime: float | None = None
    version: str | None = None


class Sink(Protocol):
    """A new file that is written front to back; on an object store it is not there until it is finished."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            StorageError: they cannot be written, for example because the disk is full.
        """

    def finish(self) -> None:
        """Make all of it last; errors as `write`."""

    def abort(self) -> None:
        """Give up; what was written is removed. Never raises."""


class Creator(Protocol):
    """Where new files can be made."""

    def create(self, name: str) -> Sink:
        """Begin a new file, with the folders above it.

        Raises:
            StorageError: it cannot be created, or is there already.
        """


def write_pieces(target: Creator, name: str, pieces: Iterable[bytes]) -> None:
    """Write a new file of these pieces; after an error nothing is left of it.

    Raises:
        StorageError: it cannot be written.
    """
    sink = target.create(name)
    try:
        for piece in pieces:
            sink.write(piece)
        sink.finish()
    except BaseException:
        sink.abort()
        raise


class Storage(Creator, Protocol):
    """The files under `root`. Reading never changes anything; what writes says so in its name.

    `piece_nbytes` is how many bytes are best read at once when a whole file is wanted.
    """

    root: str
    piece_nbytes: int

    def entries(self, folder: str = "") -> list[DirEntry]:
        """List a folder, not its subfolders, sorted by name; names are relative to the root.

        Raises:
            CheckpointNotFoundError: there is no such folder.
            StorageError: it cannot be listed.
        """

    def entry(self, name: str) -> DirEntry | None:
        """Return what a listing says of a file, but whether it is a link; None if there is no such file.

        Raises:
            StorageError: it cannot be looked at.
        """

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None if there is no such file; errors as in `entry`."""

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        """Fill `out` (bytes, writable) with the file's bytes from `byte_offset` on.

        Raises:
            StorageError: the file is missing, unreadable or ends before that many bytes.
        """

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes of a file; errors as in `read_into`. The caller bounds `nbytes`."""

    def links(self) -> dict[str, str]:
        """Return the symbolic links at the root, dangling ones too: name → what they say; none on object stores."""

    def target(self, name: str) -> str:
        """Return where a name leads once all links are followed, as a path; without links its own."""

    def written(self) -> float | None:
        """Return when a name was last added to or removed from the root, seconds since the epoch; None if unknown."""

    def below(self, folder: str) -> Storage:
        """Return the storage of a folder in this one, there or not."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole, replacing one of that name; nobody ever sees a part of it.

        Raises:
            StorageError: it cannot be written; what was there before is unchanged.
        """

    def delete(self, name: str) -> None:
        """Delete a file; one that is gone already is fine.

        Raises:
            StorageError: it cannot be deleted.
        """

    def delete_folder(self, name: str) -> None:
        """Delete a folder below the root and all in it, following no link; gone already is fine.

        Raises:
            StorageError: something in it cannot be deleted; the rest of it may be gone.
        """

    def close(self) -> None:
        """Give back open files; the storage can be used again afterwards."""


MAX_WALK_DEPTH = 8


def walk(storage: Storage) -> list[DirEntry]:
    """List all files at and below the root; neither links to folders nor dcptool's own temporary files.

    A folder that vanishes meanwhile is left out.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: a folder cannot be listed.
    """
    files: list[DirEntry] = []
    level = [""]
    for _ in range(MAX_WALK_DEPTH):
        deeper: list[str] = []
        for folder in level:
            try:
                entries = storage.entries(folder)
            except CheckpointNotFoundError:
                if not folder:
                    raise
                continue
            kept = [entry for entry in entries if not is_temporary(entry.name)]
            files += [entry for entry in kept if not entry.is_dir]
            deeper += [entry.name for entry in kept if entry.is_dir and not entry.is_link]
        level = deeper
    return files


def is_temporary(name: str) -> bool:
    """Tell whether a name is that of something dcptool is writing, or was when it was killed."""
    return name.rpartition("/")[2].startswith(".dcptool-")


def base_name(path: str) -> str:
    """Return the last part of a path, a URL or a name; of `.` and the like that of the folder they stand for."""
    name = _links(path)[1].rstrip("/").rpartition("/")[2]
    return os.path.basename(os.path.abspath(path)) if name in ("", ".", "..") and "://" not in path else name


def join(root: str, name: str) -> str:
    """Return the path or URL of a name under a root, as a user would type it."""
    if not name:
        return root
    before, root, after = _links(root)
    if before or after:
        return f"{before}{join(root, name)}{after}"
    if root.endswith("://"):
        return root + name
    return name if root == "." else f"{root.rstrip('/')}/{name}"


def parent(url: str) -> str:
    """Return the URL of the folder that a file is in."""
    before, link, after = _links(url)
    scheme, slashes, path = link.rpartition("://")
    return f"{before}{scheme}{slashes}{path.rpartition('/')[0]}{after}"


def _links(url: str) -> tuple[str, str, str]:
    """Return what stands before the link of a chained URL that has the path, it, and what stands behind it.

    It is the first one with a path; those before it, such as a cache, have none.
    """
    links = url.split("::")
    at = next((index for index, link in enumerate(links) if "://" in link), len(links) - 1)
    return "".join(f"{link}::" for link in links[:at]), links[at], "".join(f"::{link}" for link in links[at + 1 :])


_ASK = "Give yourself access (chmod, a policy of the store), or ask the owner."


class translated:
    """Turn what a file system may raise into dcptool's errors, naming the path; `missing` if nothing is there.

    With `writes` what is inside creates, changes or deletes.
    """

    __slots__ = ("_missing", "_path", "_writes")

    def __init__(
        self, path: str, missing: type[DcptoolError] = CheckpointNotFoundError, *, writes: bool = False
    ) -> None:
        self._path, self._missing, self._writes = path, missing, writes

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise what an error becomes; return if it stays as it is."""
        path = self._path
        if isinstance(error, StorageError | CheckpointNotFoundError) or not isinstance(error, Exception):
            return
        if isinstance(error, FileNotFoundError):
            raise self._gone(f"{path}: no such file or directory") from error
        if isinstance(error, NotADirectoryError):
            raise self._gone(f"{path}: a part of this path is a file, not a folder") from error
        if isinstance(error, PermissionError):
            need = "it needs read access, and its folders search access"
            if self._writes:
                need = "its folder needs write access"
            raise StorageError(f"{path}: permission denied; {need}", next_step=_ASK) from error
        if isinstance(error, ValueError | ImportError):
            return  # a malformed URL or a missing library: the caller knows what to say
        if isinstance(error, OSError):
            if error.errno == errno.ENAMETOOLONG:
                raise CheckpointNotFoundError(f"{path[:80]}…: the name is too long to exist") from error
            raise StorageError(f"{path}: {error.strerror or error}") from error
        raise StorageError(f"{path}: {type(error).__name__}: {error}") from error  # cloud libraries' own classes

    def _gone(self, message: str) -> DcptoolError:
        return gone(message) if self._missing is StorageError else self._missing(message)


def gone(message: str) -> StorageError:
    """Return the error that something is not there, or not all of it."""
    error = StorageError(message)
    error.gone = True
    return error


PATIENCE = (0.3, 1.5)
"""Seconds to wait before what a file system refused is asked for again, and again."""
PATIENT_SECONDS = 3.0

_Ask = TypeVar("_Ask", bound=Callable[..., Any])


def patient(may_pass: Callable[[StorageError], bool]) -> Callable[[_Ask], _Ask]:
    """Return what makes a reading function ask again, after a while, if it failed for a reason that may pass."""

    def made_patient(ask: _Ask) -> _Ask:
        @functools.wraps(ask)
        def again(*args: Any, **more: Any) -> Any:
            for seconds in PATIENCE:
                began = time.monotonic()
                try:
                    return ask(*args, **more)
                except StorageError as error:
                    # One that took long has been asked again by the library behind it.
                    if not may_pass(error) or time.monotonic() - began > PATIENT_SECONDS:
                        raise
                time.sleep(seconds)
            return ask(*args, **more)

        return again  # type: ignore[return-value]

    return made_patient


def too_short(path: str, byte_offset: int, nbytes: int, end: int) -> StorageError:
    return gone(f"{path} ends at byte {end}, but bytes {byte_offset}–{byte_offset + nbytes} are needed")


def is_inside(file: str) -> bool:
    """Tell whether a relative path stays inside the folder it is relative to, on any operating system."""
    parts = file.replace("\\", "/").split("/")
    return bool(file) and "\0" not in file and parts[0] != "" and ".." not in parts and not parts[0].endswith(":")
