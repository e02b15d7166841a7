"""A folder, or a key prefix, behind an fsspec URL."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.storage.base import DirEntry, join, patient, too_short, translated

_PART_NBYTES = 32 << 20
"""Bytes of one part of an upload; S3 takes 10,000 of them, so 320 GB a file."""

_DELETE_ATTEMPTS = 3


def _may_pass(error: StorageError) -> bool:
    """Tell whether a store may answer otherwise in a moment: it is throttled, or a connection broke; not what it is."""
    return error.__cause__ is not None


patiently = patient(_may_pass)


class FsspecStorage:
    """A folder or key prefix behind an fsspec URL, such as `s3://bucket/run/step_500`."""

    piece_nbytes = 8 << 20
    """Every read is a request."""

    def __init__(self, filesystem: Any, root: str, path: str) -> None:
        self.root = root
        self._filesystem = filesystem
        self._base = path.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _url(self, name: str) -> str:
        return join(self.root, name)

    @patiently
    def entries(self, folder: str = "") -> list[DirEntry]:
        path = self._path(folder)
        with translated(self._url(folder)):
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
            nbytes = 0 if is_dir else int(item["size"] or 0)
            told = (None, None) if is_dir else (_written_at(item), _version_of(item))
            entries[name] = DirEntry(name, nbytes, is_dir, False, *told)
        return sorted(entries.values())

    @patiently
    def entry(self, name: str) -> DirEntry | None:
        try:
            with translated(self._url(name)):
                found = self._filesystem.info(self._path(name))
        except CheckpointNotFoundError:
            return None
        if found["type"] == "directory":
            return None
        if found["size"] is None:
            raise StorageError(f"{self._url(name)}: the server does not say how long it is; download it first")
        return DirEntry(name, int(found["size"]), False, False, _written_at(found), _version_of(found))

    def size(self, name: str) -> int | None:
        found = self.entry(name)
        return found.nbytes if found else None

    @patiently
    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        url = self._url(name)
        if nbytes == 0:
            return b""
        with translated(url, StorageError):
            try:
                data = bytes(self._filesystem.cat_file(self._path(name), start=byte_offset, end=byte_offset + nbytes))
            except (ValueError, IndexError):  # how some stores answer a range that starts past the end
                data = b""
        if len(data) > nbytes:
            raise StorageError(f"{url}: the server sends the whole file where a part is asked for; download it first")
        if len(data) < nbytes:
            raise too_short(url, byte_offset, nbytes, byte_offset + len(data)) from EOFError("the answer ends early")
        return data

    def read_into(self, name: str, byte_offset: int, out: memoryview) -> None:
        out[:] = self.read(name, byte_offset, len(out))

    def links(self) -> dict[str, str]:
        return {}

    def target(self, name: str) -> str:
        return self._path(name)

    def written(self) -> float | None:
        return None

    def below(self, folder: str) -> FsspecStorage:
        return FsspecStorage(self._filesystem, join(self.root, folder), self._path(folder))

    def write(self, name: str, data: bytes) -> None:
        with translated(self._url(name), StorageError, writes=True):
            self._filesystem.pipe_file(self._path(name), data)

    def write_if(self, name: str, data: bytes, version: str | None) -> bool:
        """Write a small object if what is there is of this version; None: if nothing is there.

        S3 decides that itself, other stores where fsspec's file system can ask for it (`mode="create"`). Elsewhere a
        look just before decides, and of two who write at once, both may be told yes.

        Returns:
            Whether it was written.

        Raises:
            StorageError: it cannot be written.
        """
        there = self.entry(name)
        if (there is None) != (version is None) or (there and version not in ("", there.version)):
            return False
        with translated(self._url(name), StorageError, writes=True):
            for condition in (*_conditions(self._filesystem, version), {}):
                try:
                    self._filesystem.pipe_file(self._path(name), data, **condition)
                    return True
                except Exception as error:
                    if isinstance(error, FileExistsError | FileNotFoundError) or _said(error) in _NOT_SO:
                        return False
                    if not condition or _said(error) not in _NOT_KNOWN:
                        raise
        return False

    def create(self, name: str) -> RemoteSink:
        with translated(self._url(name), StorageError, writes=True):
            if self._filesystem.exists(self._path(name)):
                raise StorageError(f"{self._url(name)} is there already")
            self._filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            opened = self._filesystem.open(self._path(name), "wb", block_size=_PART_NBYTES, autocommit=False)
        return RemoteSink(self._url(name), opened)

    @property
    def is_s3(self) -> bool:
        """Whether it is S3, or speaks as it does, by way of s3fs."""
        return _is_s3(self._filesystem)

    def call_s3(self, method: str, name: str, **more: Any) -> dict[str, Any]:
        """Make a request of S3's own about an object.

        Args:
            method: as botocore calls it, such as `upload_part`.
            name: of the object.
            more: further arguments of the request.

        Raises:
            StorageError: it failed.
        """
        with translated(self._url(name), StorageError, writes=True):
            bucket, key, _ = self._filesystem.split_path(self._path(name))
            done: dict[str, Any] = self._filesystem.call_s3(method, Bucket=bucket, Key=key, **more)
        return done

    def abort_uploads(self) -> None:
        """Give up uploads in parts below this folder that nobody finishes any more: a store keeps, and bills, them.

        Raises:
            StorageError: they cannot be listed or given up.
        """
        if not self.is_s3:
            return
        with translated(self.root, StorageError, writes=True):
            bucket, prefix, _ = self._filesystem.split_path(self._base)
            found = self._filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for upload in found.get("Uploads") or ():
                told = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._filesystem.call_s3("abort_multipart_upload", **told)

    def delete(self, name: str) -> None:
        with suppress(CheckpointNotFoundError), translated(self._url(name), writes=True):
            self._filesystem.rm_file(self._path(name))

    def delete_folder(self, name: str) -> None:
        for _ in range(_DELETE_ATTEMPTS):
            with suppress(CheckpointNotFoundError), translated(self._url(name), writes=True):
                self._filesystem.invalidate_cache()
                self._filesystem.rm(self._path(name), recursive=True)
            with translated(self._url(name), writes=True):
                self._filesystem.invalidate_cache()
                if not self._filesystem.exists(self._path(name)):
                    return
        raise StorageError(f"{self._url(name)} is still there after {_DELETE_ATTEMPTS} deletions")

    def close(self) -> None:
        """Nothing is held open: every read is a request of its own."""


class RemoteSink:
    """A new object: uploaded in parts, and there only once all of them are."""

    def __init__(self, url: str, opened: Any) -> None:
        self._url, self._opened = url, opened

    def write(self, data: bytes | memoryview) -> None:
        with translated(self._url, StorageError, writes=True):
            self._opened.write(bytes(data))

    def finish(self) -> None:
        with translated(self._url, StorageError, writes=True):
            self._opened.close()
            self._opened.commit()

    def abort(self) -> None:
        with suppress(Exception):
            self._opened.close()
        with suppress(Exception):
            self._opened.discard()


_NOT_SO = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_NOT_KNOWN = ("NotImplemented", "501", "ParamValidationError")
"""What stores, and old libraries for them, say of a condition that they know nothing of."""


def _conditions(filesystem: Any, version: str | None) -> list[dict[str, str]]:
    """Return how to have a store look for itself, as arguments of `pipe_file`; none where it cannot be asked."""
    if _is_s3(filesystem):
        return [{"IfMatch": version}] if version else [{"IfNoneMatch": "*"}] if version is None else []
    takes_mode = "mode" in inspect.signature(filesystem.pipe_file).parameters
    return [{"mode": "create"}] if version is None and takes_mode else []


def _is_s3(filesystem: Any) -> bool:
    protocols = filesystem.protocol
    return "s3" in ((protocols,) if isinstance(protocols, str) else protocols)


def _said(error: Exception) -> str:
    """Return the code of a store's error, else the name of its class."""
    cause = error.__cause__ or error
    response = getattr(cause, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else type(cause).__name__


def _version_of(item: dict[str, Any]) -> str | None:
    """Return what tells one content of an object from another, as far as a file system of fsspec tells."""
    return next((str(item[key]) for key in ("ETag", "etag", "generation", "VersionId") if item.get(key)), None)


def _written_at(item: dict[str, Any]) -> float | None:
    """Return when a file was written, as far as a file system of fsspec tells; each has a word of its own."""
    from datetime import datetime

    found = next((item[key] for key in ("LastModified", "mtime", "updated", "created") if item.get(key)), None)
    if isinstance(found, str):
        with suppress(ValueError):
            found = datetime.fromisoformat(found.replace("Z", "+00:00"))
    if isinstance(found, datetime):
        return found.timestamp()
    return float(found) if isinstance(found, int | float) else None
