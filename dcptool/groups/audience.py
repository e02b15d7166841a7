"""Who is told what a member does: the bytes it moves, where output grows, which files it makes.

What is told is all that somebody outside knows when members are lost, so a file is told before its bytes are written.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcptool.storage import Creator, Progress, Sink


class Audience:
    """Who is told what a member does; this one remembers what was made, and passes nothing on.

    Attributes:
        names: of the files that were made in an object store.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def progress(self, nbytes: int) -> None:
        """Take note of bytes that were moved."""

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


class ProgressAudience(Audience):
    """Passes the bytes on, and nothing else."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress

    def progress(self, nbytes: int) -> None:
        if self._progress:
            self._progress(nbytes)


class NotedStorage:
    """A storage for new files that tells an audience which were made."""

    def __init__(self, storage: Creator, audience: Audience) -> None:
        self._storage, self._audience = storage, audience

    def create(self, name: str) -> Sink:
        """Begin a file."""
        sink = self._storage.create(name)
        self._audience.made(name)
        return sink
