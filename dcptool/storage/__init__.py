"""Where the bytes are: from a user's path, a local one or any fsspec URL, to the storage that holds it.

fsspec is imported only for a path that is a URL.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.errors import CheckpointNotFoundError, UnsupportedError
from dcptool.storage.base import (
    Creator,
    DirEntry,
    Progress,
    Sink,
    Storage,
    base_name,
    is_inside,
    is_temporary,
    join,
    parent,
    translated,
    walk,
    write_pieces,
)
from dcptool.storage.local import LocalStorage
from dcptool.storage.remote import FsspecStorage, patiently
from dcptool.storage.union import UnionStorage

__all__ = [
    "Creator",
    "DirEntry",
    "FsspecStorage",
    "LocalStorage",
    "Location",
    "Progress",
    "Sink",
    "Storage",
    "base_name",
    "is_inside",
    "is_temporary",
    "is_url",
    "join",
    "locate",
    "parent",
    "remember_options",
    "storage_at",
    "walk",
    "write_pieces",
]

_URL_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


class Location(NamedTuple):
    """A user's path: the storage that holds it and, if it is a file, its name in there."""

    storage: Storage
    file: str | None

    @property
    def path(self) -> str:
        """The path or URL as a user would type it."""
        return join(self.storage.root, self.file or "")


def locate(
    path: str | os.PathLike[str],
    also: Sequence[str | os.PathLike[str]] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Location:
    """Find what a user's path points at.

    Args:
        path: a local path or any fsspec URL; `file://` URLs are local paths.
        also: further folders whose files are taken as lying in the first, as node-local halves of one save.
        storage_options: what the fsspec file system of a URL takes, such as `anon` or `endpoint_url`.

    Returns:
        For a folder its storage; for a file the storage of its parent folder and the file's name.

    Raises:
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: it cannot be looked at.
        UnsupportedError: no library for that kind of URL is installed.
    """
    if also:
        locations = [locate(folder, (), storage_options) for folder in (path, *also)]
        file = next((location.path for location in locations if location.file is not None), None)
        if file is not None:
            raise CheckpointNotFoundError(f"{file} is a file; folders are read together, not files")
        return Location(UnionStorage(tuple(location.storage for location in locations)), None)
    text = os.fspath(path)
    if not text:
        raise CheckpointNotFoundError("the path is empty")
    if text.startswith("file://") and "::" not in text:
        text = text.removeprefix("file://")
    if is_url(text):
        return _locate_url(text, storage_options)
    if "\0" in text:
        raise CheckpointNotFoundError(f"{text!r} cannot be a path: it has a NUL character")
    if text.startswith("~") and not os.path.exists(text):
        text = os.path.expanduser(text)
    try:
        with translated(text):
            found = os.stat(text)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}{_similar(text)}") from error
    if stat.S_ISDIR(found.st_mode):
        return Location(LocalStorage(text.rstrip("/") or "/"), None)
    folder, name = os.path.split(text)
    return Location(LocalStorage(folder or "."), name)


def is_url(path: str) -> bool:
    """Tell whether a path is an fsspec URL; `file://` is a local path."""
    return "::" in path or ("://" in path and not path.startswith("file://"))


def storage_at(url: str) -> FsspecStorage:
    """Return the storage of a URL's folder, there or not, to write to it.

    Raises:
        UnsupportedError: no library for that kind of URL is installed.
    """
    filesystem, path = _filesystem(url)
    return FsspecStorage(filesystem, url.rstrip("/"), path)


_OPTIONS: dict[str, Mapping[str, Any]] = {}
"""By URL, what the file systems take of what lies below, where nothing else is said."""


def remember_options(url: str, options: Mapping[str, Any]) -> None:
    """Open what lies at a URL and below with these options from now on, whoever in this process asks for it.

    Args:
        url: of a run directory.
        options: what the fsspec file system takes, such as `anon` or `endpoint_url`.
    """
    _OPTIONS[url.rstrip("/")] = options


def _options_of(url: str) -> Mapping[str, Any]:
    known = [root for root in _OPTIONS if url == root or url.startswith(f"{root}/")]
    return _OPTIONS[max(known, key=len)] if known else {}


def _filesystem(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    options = _options_of(url) if options is None else options
    try:
        with translated(url):
            filesystem, path = url_to_fs(url, **options)
            filesystem.invalidate_cache()
    except (ImportError, ValueError) as error:
        extra = _URL_EXTRAS.get(url.split(":", 1)[0])
        hint = f"pip install 'dcptool[{extra}]'" if extra else "install the fsspec implementation of that protocol"
        raise UnsupportedError(f"{url}: {error}", next_step=hint) from error
    return filesystem, path


@patiently
def _locate_url(url: str, options: Mapping[str, Any] | None) -> Location:
    filesystem, path = _filesystem(url, options)
    try:
        with translated(url):
            found = filesystem.info(path)
    except (ImportError, ValueError) as error:
        raise UnsupportedError(f"{url}: {error}") from error
    url = url if url.endswith("://") else url.rstrip("/")
    if found["type"] == "directory":
        return Location(FsspecStorage(filesystem, url, path), None)
    folder, _, name = path.rstrip("/").rpartition("/")
    return Location(FsspecStorage(filesystem, parent(url), folder), name)


def _similar(path: str) -> str:
    """Return what to say about a missing path: the part of it that exists, and a name there that is like it."""
    folder, _, name = path.rstrip("/").rpartition("/")
    folder = folder or ("/" if path.startswith("/") else ".")
    if not os.path.isdir(folder):
        while folder and not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return f"; {folder} exists" if folder not in ("", "/") else ""
    import difflib

    try:
        close = difflib.get_close_matches(name, os.listdir(folder), 1)
    except OSError:
        close = []
    return f"; did you mean {join(folder, close[0])}?" if close else ""
