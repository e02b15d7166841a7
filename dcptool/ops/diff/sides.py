"""The two sides of a comparison: what several threads read of each, and what cannot be read. Compares nothing.

Checksums are looked at only where values differ: of equal bytes none has to be known.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from dcptool.checkpoint.boxes import BoxReader, ChunkIndex, check_whole
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent, Record, place_words, whereabouts
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.numbers import array_dtype
from dcptool.checkpoint.regions import Box, index_in, volume
from dcptool.checks.files import GET_LFS_FILES, is_lfs_pointer
from dcptool.errors import DcptoolError, ItemError

if TYPE_CHECKING:
    import numpy as np

MAX_TRUSTED_NBYTES = 1 << 30
"""Of a larger tensor whose chunks overlap all are looked at first: it may be far larger than what is stored."""


class Access:
    """A checkpoint that several threads read.

    Attributes:
        name: of the side in messages.
        checkpoint: the checkpoint.
        lock: for items that are decompressed.
    """

    def __init__(self, name: str, checkpoint: Checkpoint) -> None:
        self.name, self.checkpoint = name, checkpoint
        self.lock = threading.Lock()
        self._problems: dict[Record, str] = {}
        self._locks: defaultdict[Record, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def problem(self, record: Record) -> str:
        """Say what is wrong with a record, "" if nothing is; it is read once however many tensors of a `.pt` share it.

        Raises:
            DcptoolError: it cannot be read.
        """
        if record.crc32 is None:
            return ""
        with self._lock:
            lock = self._locks[record]
        with lock:  # others wait for the thread that reads it
            if record not in self._problems:
                self._problems[record] = check_whole(self.checkpoint.source, record)
            return self._problems[record]

    def forget(self, records: Iterable[Record]) -> None:
        """Forget records that no other tensor has: in a DCP every chunk has one of its own."""
        if self.checkpoint.format.items_apart:
            for record in records:
                self._problems.pop(record, None)
                self._locks.pop(record, None)


class UnreadableError(ItemError):
    """A chunk of a tensor, or an object, of one side cannot be read; the message says which and why."""

    def __init__(self, message: str, access: Access, entry: Entry, chunk: Chunk | None = None) -> None:
        item = chunk.item if chunk else entry.item if isinstance(entry, ObjectEntry) else None
        offsets = chunk.offsets if chunk else ()
        if place_words(None, entry.fqn, offsets) not in message:  # else the checkpoint said it, with the file
            message = f"{place_words(item, entry.fqn, offsets)}: {message}"
        super().__init__(f"{access.name}: {message}")
        self.access, self.entry, self.chunk, self.item = access, entry, chunk, item

    def finding(self, n_more: int = 0) -> Finding:
        """Return it as a finding; `n_more` chunks of the same tensor cannot be read either."""
        item, checkpoint = self.item, self.access.checkpoint
        message, step = str(self), f"dcptool verify --deep {checkpoint.path}"
        if item and is_lfs_pointer(checkpoint, item.file):
            message = f"{self.access.name}: {self.entry.fqn!r}: {item.file} is a Git LFS pointer, not the file itself"
            step = GET_LFS_FILES
        more = f" ({n_more:,} more of its chunks cannot be read)" if n_more else ""
        return Finding.of(
            "unreadable", f"{message}{more}", *whereabouts(item, self.entry.fqn, self.chunk), next_step=step
        )


@contextmanager
def unreadable(access: Access, entry: Entry, chunk: Chunk | None = None) -> Iterator[None]:
    """Turn errors of reading into `UnreadableError` with the entry's name and place."""
    try:
        yield
    except UnreadableError:
        raise
    except DcptoolError as error:
        raise UnreadableError(str(error), access, entry, chunk) from error


class SideReader:
    """Reads boxes of one tensor of one side into arrays, from several threads."""

    def __init__(self, access: Access, entry: TensorEntry) -> None:
        self.access, self.entry = access, entry
        self._boxes = BoxReader(access.checkpoint.source, entry, access.checkpoint.payload)
        self._index: ChunkIndex | None = None
        self._checked: set[Record] = set()

    def read(self, box: Box, index: int, buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Read the elements of a box.

        Args:
            box: offsets and sizes, in elements of the whole tensor.
            index: of the chunk that holds all of it, -1 to look.
            buffer: bytes; what is returned lies at their beginning.

        Returns:
            A C-contiguous array of the box's sizes, of the dtype's `array_dtype`.

        Raises:
            UnreadableError: a chunk is missing, damaged or not what the metadata says.
        """
        dtype = array_dtype(self.entry.dtype)
        out = buffer[: volume(box[1]) * dtype.itemsize].view(dtype).reshape(box[1])
        for found, common in self._parts(box, index):
            chunk = self.entry.chunks[found]
            with unreadable(self.access, self.entry, chunk), self._lock(chunk):
                # Checksums are looked at where values differ, see `require_undamaged`: equal bytes need none.
                self._boxes.fill(found, common, out[index_in(box, common)], lambda *_: None)
        return out

    def is_there(self, index: int) -> bool:
        """Tell whether what is stored for a chunk is the box that the metadata says."""
        chunk = self.entry.chunks[index]
        try:
            with self._lock(chunk):
                self._boxes.payload(index)
        except DcptoolError:
            return False
        return True

    def require_all_there(self) -> None:
        """Look at every chunk of a tensor that may be larger than what is stored of it.

        Raises:
            UnreadableError: one of them is missing, damaged or not what the metadata says.
        """
        chunks = self.entry.chunks
        if self.entry.nbytes <= MAX_TRUSTED_NBYTES:
            return
        for index, chunk in enumerate(chunks):
            with unreadable(self.access, self.entry, chunk), self._lock(chunk):
                self._boxes.payload(index)

    def is_zip(self, index: int, chunk: Chunk) -> bool:
        """Tell whether a chunk is an item of its own, header and all; then the same bytes elsewhere are the same chunk.

        Raises:
            UnreadableError: it is damaged or not what the metadata says.
        """
        if not self.access.checkpoint.format.items_apart or chunk.item is None or chunk.item.transforms:
            return False
        with unreadable(self.access, self.entry, chunk):
            return self._boxes.payload(index).record.item == chunk.item

    def pieces(self, chunk: Chunk, item: Extent, buffer: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the bytes of a chunk's item as stored, as many at a time as the buffer holds."""
        storage = self.access.checkpoint.storage
        for start in range(0, item.nbytes, len(buffer)):
            piece = buffer[: item.nbytes - start]
            with unreadable(self.access, self.entry, chunk):
                storage.read_into(item.file, item.byte_offset + start, piece.data)
            yield piece

    def require_undamaged(self, box: Box, index: int) -> None:
        """Read the records behind a box whole and check their CRC32s; each is read once.

        Raises:
            UnreadableError: one of them is wrong: what differs there was not saved so.
        """
        for found, _ in self._parts(box, index):
            chunk = self.entry.chunks[found]
            with unreadable(self.access, self.entry, chunk), self._lock(chunk):
                record = self._boxes.payload(found).record
                self._checked.add(record)
                problem = self.access.problem(record)
            if problem:
                raise UnreadableError(problem, self.access, self.entry, chunk)

    def release(self) -> None:
        """Forget what was found out about chunks, to be found out again if it is needed."""
        self._boxes.forget()
        self._index = None
        self.access.forget(self._checked)
        self._checked.clear()

    def _parts(self, box: Box, index: int) -> Iterable[tuple[int, Box]]:
        if index >= 0:
            return [(index, box)]
        chunks = self._index = self._index or ChunkIndex(self.entry.chunks)
        return chunks.touching(box)

    def _lock(self, chunk: Chunk) -> AbstractContextManager[Any]:
        """Let one thread at a time at what decompresses an item and keeps the result."""
        return self.access.lock if chunk.item and chunk.item.transforms else nullcontext()
