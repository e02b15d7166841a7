"""A file that is being written front to back, part by part. Knows what it is made of, not where that comes from."""

from __future__ import annotations

from dcptool.checkpoint.fill import crc32
from dcptool.copying.outputs import Closing, Literal, OutputFile
from dcptool.errors import LayoutError
from dcptool.storage import Creator


class OpenFile:
    """A file that is being written, and the CRC32 of each Fill and Verbatim of it so far.

    Args:
        file: what it is to be made of.
        target: where it is created.

    Attributes:
        sink: where it grows; to be finished or aborted.
        nbytes: written so far.

    Raises:
        StorageError: it cannot be created.
    """

    def __init__(self, file: OutputFile, target: Creator) -> None:
        self.file, self.sink = file, target.create(file.name)
        self.nbytes = 0
        self._crcs: list[int] = []
        self._crc = 0

    def write_bytes(self, part: Literal | Closing) -> None:
        """Append bytes that are known, or that follow from the parts before."""
        self._append(part.data if isinstance(part, Literal) else part.make(self._crcs))

    def write_share(self, share: memoryview) -> None:
        """Append further bytes of the Fill or Verbatim that is being written."""
        self._crc = crc32(share, self._crc)
        self._append(share)

    def end_part(self) -> None:
        """Note that the Fill or Verbatim that is being written is complete."""
        self._crcs.append(self._crc)
        self._crc = 0

    def require_complete(self) -> None:
        """Check that as many bytes were written as were planned.

        Raises:
            LayoutError: they were not.
        """
        if self.nbytes != self.file.nbytes:
            raise LayoutError(f"{self.file.name} has {self.nbytes:,} bytes, planned were {self.file.nbytes:,}")

    def _append(self, data: bytes | memoryview) -> None:
        self.sink.write(data)
        self.nbytes += len(data)
