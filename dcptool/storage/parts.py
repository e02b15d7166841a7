"""New files that are written in parts, several of them at the same time."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from typing import Any, Protocol

from dcptool.errors import StorageError
from dcptool.storage.base import Sink, Storage, join, translated
from dcptool.storage.local import WRITEBACK_NBYTES, LocalStorage, NewFile, begin_writeback
from dcptool.storage.remote import FsspecStorage

LOCAL_PART_NBYTES = 1 << 20
"""What is larger leaves a processor's cache between reading, hashing and writing."""
REMOTE_PART_NBYTES = 32 << 20
MAX_PARTS = 10_000
"""More than so many parts S3 does not take of one object."""


class PartSink(Protocol):
    """A new file that is written in parts of one length, the last one shorter, on any thread.

    `again`: whether a part whose writing failed may be written once more.
    """

    again: bool

    def write_part(self, index: int, data: memoryview) -> None:
        """Write the part of an index; each is written once, and begun in order.

        Raises:
            StorageError: it cannot be written.
        """

    def finish(self) -> str | None:
        """Make all of it last, and return what the store calls this content; errors as `write_part`."""

    def abort(self) -> None:
        """Give up; what was written is removed. Never raises."""


def part_nbytes(nbytes: int, remote: bool) -> int:
    """Return the length of the parts of a file of so many bytes; `remote`: whether each is a request."""
    if not remote:
        return LOCAL_PART_NBYTES
    return max(REMOTE_PART_NBYTES, -(-nbytes // MAX_PARTS + (1 << 20) - 1) >> 20 << 20)


def create_parts(storage: Storage, name: str, nbytes: int, part: int, mtime: float | None = None) -> PartSink:
    """Begin a new file in place of one of that name.

    Args:
        storage: where.
        name: of the file.
        nbytes: of the whole file.
        part: bytes of each part but the last.
        mtime: when it shall have been written, where that can be set; seconds since the epoch.

    Raises:
        StorageError: it cannot be created.
    """
    if isinstance(storage, LocalStorage):
        return _LocalParts(os.path.join(storage.root, name), part, mtime)
    if isinstance(storage, FsspecStorage) and storage.is_s3:
        return _S3Parts(storage, name, nbytes > part)
    storage.delete(name)
    return _InOrder(storage.create(name), join(storage.root, name))


class _LocalParts(NewFile):
    again = True

    def __init__(self, path: str, part: int, mtime: float | None) -> None:
        self._part, self._mtime = part, mtime
        with translated(path, StorageError, writes=True):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with suppress(FileNotFoundError):
                os.unlink(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        super().__init__(path, descriptor)

    def write_part(self, index: int, data: memoryview) -> None:
        start = index * self._part
        done = 0
        with translated(self._path, StorageError, writes=True):
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], start + done)
        end = start + done
        if end // WRITEBACK_NBYTES > start // WRITEBACK_NBYTES:
            begin_writeback(self._descriptor, max(end - WRITEBACK_NBYTES, 0), WRITEBACK_NBYTES)

    def _complete(self) -> None:
        if self._mtime is not None:
            os.utime(self._descriptor, (self._mtime, self._mtime))


class _S3Parts:
    """An object of S3: one request for a small one, else an upload in parts."""

    again = True

    def __init__(self, storage: FsspecStorage, name: str, several: bool) -> None:
        self._storage, self._name = storage, name
        self._tags: dict[int, str] = {}
        self._upload = str(storage.call_s3("create_multipart_upload", name)["UploadId"]) if several else ""
        self._version: str | None = None

    def write_part(self, index: int, data: memoryview) -> None:
        if not self._upload:
            self._put(bytes(data))
            return
        more = {"PartNumber": index + 1, "UploadId": self._upload, "Body": bytes(data)}
        self._tags[index] = str(self._storage.call_s3("upload_part", self._name, **more)["ETag"])

    def _put(self, data: bytes) -> None:
        self._version = str(self._storage.call_s3("put_object", self._name, Body=data)["ETag"])

    def finish(self) -> str | None:
        if self._upload:
            parts = [{"PartNumber": index + 1, "ETag": tag} for index, tag in sorted(self._tags.items())]
            more: dict[str, Any] = {"UploadId": self._upload, "MultipartUpload": {"Parts": parts}}
            try:
                self._version = str(self._storage.call_s3("complete_multipart_upload", self._name, **more)["ETag"])
            except StorageError as error:
                if not error.gone or not self._is_there():
                    raise
        elif self._version is None:  # no part: no byte
            self._put(b"")
        return self._version

    def _is_there(self) -> bool:
        """Tell whether the object is what these parts make: an answer was lost, and the request made once more."""
        tags = [self._tags[index].strip('"') for index in sorted(self._tags)]
        try:
            whole = hashlib.md5(bytes.fromhex("".join(tags)), usedforsecurity=False).hexdigest()
        except ValueError:  # a store whose tags are no MD5
            return False
        found = self._storage.entry(self._name)
        self._version = found.version if found else None
        return bool(self._version) and str(self._version).strip('"') == f"{whole}-{len(tags)}"

    def abort(self) -> None:
        if self._upload:
            with suppress(StorageError):
                self._storage.call_s3("abort_multipart_upload", self._name, UploadId=self._upload)


class _InOrder:
    """A file of a store that takes its bytes front to back only: parts wait for those before them."""

    again = False

    def __init__(self, sink: Sink, path: str) -> None:
        self._sink, self._path = sink, path
        self._next = 0
        self._failed = False
        self._turn = threading.Condition()

    def write_part(self, index: int, data: memoryview) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._next == index or self._failed)
            if self._failed:
                raise StorageError(f"{self._path}: what stands before could not be written")
            try:
                self._sink.write(data)
            except BaseException:
                self._failed = True
                raise
            finally:
                self._next += 1
                self._turn.notify_all()

    def finish(self) -> None:
        self._sink.finish()

    def abort(self) -> None:
        self._sink.abort()
