"""Who is told what a member does: the bytes it moves, where output grows, which files it makes.

What is told is all that somebody outside knows when members are lost, so a file is told before its bytes are written;
it is enough to remove what they leave.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dcptool.errors import DcptoolError
from dcptool.storage import Creator, Progress, Sink, is_temporary, storage_at


class Audience:
    """Who is told what a member does; this one remembers what was made, and passes the bytes on.

    Args:
        progress: told the bytes.

    Attributes:
        names: of the files that were made in an object store.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.names: list[str] = []
        self._progress = progress

    def progress(self, nbytes: int) -> None:
        """Take note of bytes that were moved."""
        if self._progress:
            self._progress(nbytes)

    def writing(self, path: str, sealing: Sequence[str]) -> None:
        """Take note, on rank 0, of where output is put until it is published.

        Args:
            path: of a temporary folder, or URL of the final one.
            sealing: names of the files that make it look complete: to be removed before all others.
        """

    def made(self, name: str) -> None:
        """Take note of a file in an object store that is about to be made, under its final name."""
        self.names.append(name)

    def published(self) -> None:
        """Take note, on rank 0, that the output is complete and has its name."""


class NotedStorage:
    """A storage for new files that tells an audience which were made."""

    def __init__(self, storage: Creator, audience: Audience) -> None:
        self._storage, self._audience = storage, audience

    def create(self, name: str) -> Sink:
        """Begin a file."""
        sink = self._storage.create(name)
        self._audience.made(name)
        return sink


class UnfinishedOutput:
    """What has to be removed if the members end without a result.

    Attributes:
        path: where output grows, "" if nothing is to be removed.
        published: whether it has its name already.
    """

    def __init__(self) -> None:
        self.path, self.published = "", False
        self._sealing: tuple[str, ...] = ()
        self._made: list[str] = []

    def note(self, kind: str, value: Any) -> None:
        """Take note of what a member told its audience: the method's name, and what it was given."""
        if kind == "writing":
            self.path, self._sealing = value
        elif kind == "made":
            self._made.append(value)
        elif kind == "published":
            self.path, self.published = "", True

    def remove(self) -> None:
        """Remove a temporary folder whole, of an object store what was made there. Never raises."""
        if is_temporary(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.path and self._made:
            storage = storage_at(self.path)
            # What makes it complete goes first, so that nothing half removed looks whole.
            for name in sorted(self._made, key=lambda name: name not in self._sealing):
                with suppress(DcptoolError):
                    storage.delete(name)
