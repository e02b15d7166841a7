"""Read two tensors piece by piece, in boxes that lie inside one chunk of each. Compares nothing.

The common refinement of two layouts is every non-empty intersection of a chunk of one with a chunk of the other; it is
cut into row-major bands. Where chunks of a side overlap, bands are of the whole tensor, put together from its chunks.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint.boxes import check_whole
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Ints, Payload, Record
from dcptool.checkpoint.fill import fill
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.regions import Box, cut_box, first_gap, index_in, intersect, volume
from dcptool.checks.files import GET_LFS_FILES, is_lfs_pointer
from dcptool.errors import DcptoolError, ItemError
from dcptool.ops.diff.arithmetic import array_dtype

if TYPE_CHECKING:
    import numpy as np

MAX_BAND_NBYTES = 4 << 20
_RUN_LENGTH = 8


class Band(NamedTuple):
    """A box of both tensors that is read at once, and the indexes of the chunks it lies in; -1 for several."""

    offsets: Ints
    sizes: Ints
    chunk_a: int
    chunk_b: int


class Run(NamedTuple):
    """Bands that are read one after the other by one thread; `is_whole`: together they are one chunk of both sides."""

    bands: Sequence[Band]
    is_whole: bool


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
        self._looked_at: dict[Record, _Look] = {}
        self._looking = threading.Lock()

    def problem(self, record: Record) -> str:
        """Say what is wrong with a record, "" if nothing is; it is read once however many tensors of a `.pt` share it.

        Raises:
            DcptoolError: it cannot be read.
        """
        if record.crc32 is None:
            return ""
        with self._looking:
            look = self._looked_at.setdefault(record, _Look())
        with look.lock:
            if look.problem is None:
                look.problem = check_whole(self.checkpoint.source, record)
        return look.problem

    def forget(self, records: Iterable[Record]) -> None:
        """Forget records that no other tensor has: in a DCP every chunk has one of its own."""
        if self.checkpoint.format.items_apart:
            for record in records:
                self._looked_at.pop(record, None)


class _Look:
    """What a look at a record showed, None before it; one thread looks, others wait for it."""

    __slots__ = ("lock", "problem")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.problem: str | None = None


class UnreadableError(ItemError):
    """A chunk of a tensor, or an object, of one side cannot be read; the message says which and why."""

    def __init__(self, message: str, access: Access, entry: Entry, chunk: Chunk | None = None) -> None:
        item = chunk.item if chunk else entry.item if isinstance(entry, ObjectEntry) else None
        at = f" chunk at {list(chunk.offsets)}" if chunk and chunk.offsets else ""
        if f"{entry.fqn!r}{at}" not in message:  # else the checkpoint said it, with the file
            place = f"{item.file}, bytes {item.byte_offset:,}–{item.byte_offset + item.nbytes:,}: " if item else ""
            message = f"{place}{entry.fqn!r}{at}: {message}"
        super().__init__(f"{access.name}: {message}")
        self.access, self.entry, self.chunk, self.item = access, entry, chunk, item

    def finding(self, n_more: int = 0) -> Finding:
        """Return it as a finding; `n_more` chunks of the same tensor cannot be read either."""
        chunk, item, checkpoint = self.chunk, self.item, self.access.checkpoint
        message, step = str(self), f"dcptool verify --deep {checkpoint.path}"
        if item and is_lfs_pointer(checkpoint, item.file):
            message = f"{self.access.name}: {self.entry.fqn!r}: {item.file} is a Git LFS pointer, not the file itself"
            step = GET_LFS_FILES
        more = f" ({n_more:,} more of its chunks cannot be read)" if n_more else ""
        return Finding(
            "unreadable",
            Severity.ERROR,
            f"{message}{more}",
            item.file if item else None,
            self.entry.fqn,
            chunk.offsets if chunk else None,
            chunk.sizes if chunk else None,
            (item.byte_offset, item.byte_offset + item.nbytes) if item else None,
            next_step=step,
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
        self._payloads: dict[int, Payload] = {}
        self._checked: set[Record] = set()

    def read(self, band: Band, index: int, buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Read the elements of a band.

        Args:
            band: the box.
            index: of the chunk that holds all of it, -1 to look.
            buffer: bytes; what is returned lies at their beginning.

        Returns:
            A C-contiguous array of the band's sizes, of the dtype's `array_dtype`.

        Raises:
            UnreadableError: a chunk is missing, damaged or not what the metadata says.
        """
        dtype = array_dtype(self.entry.dtype)
        out = buffer[: volume(band.sizes) * dtype.itemsize].view(dtype).reshape(band.sizes)
        for found, common in self._parts(band, index):
            chunk = self.entry.chunks[found]
            here = tuple(a - b for a, b in zip(common[0], chunk.offsets, strict=True))
            part = out[index_in((band.offsets, band.sizes), common)]
            with unreadable(self.access, self.entry, chunk), self._lock(chunk):
                # Checksums are looked at where values differ, see `require_undamaged`: equal bytes need none.
                fill(self._payload(found, chunk), self.access.checkpoint.source.read_into, here, part, _ignore)
        return out

    def is_zip(self, index: int) -> bool:
        """Tell whether a chunk is an item of its own, header and all; then the same bytes elsewhere are the same chunk.

        Raises:
            UnreadableError: it is damaged or not what the metadata says.
        """
        chunk = self.entry.chunks[index]
        if not self.access.checkpoint.format.items_apart or chunk.item is None or chunk.item.transforms:
            return False
        with unreadable(self.access, self.entry, chunk):
            return self._payload(index, chunk).record.item == chunk.item

    def pieces(self, index: int, buffer: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the bytes of a chunk's item as stored, as many at a time as the buffer holds."""
        chunk = self.entry.chunks[index]
        if chunk.item:
            for start in range(0, chunk.item.nbytes, len(buffer)):
                piece = buffer[: chunk.item.nbytes - start]
                with unreadable(self.access, self.entry, chunk):
                    self.access.checkpoint.storage.read_into(
                        chunk.item.file, chunk.item.byte_offset + start, piece.data
                    )
                yield piece

    def item_nbytes(self, index: int) -> int:
        """Return the length of a chunk's item in bytes; 0 without one."""
        item = self.entry.chunks[index].item
        return item.nbytes if item else 0

    def require_undamaged(self, band: Band, index: int) -> None:
        """Read the records behind a band whole and check their CRC32s; each is read once.

        Raises:
            UnreadableError: one of them is wrong: what differs there was not saved so.
        """
        for found, _ in self._parts(band, index):
            chunk = self.entry.chunks[found]
            with unreadable(self.access, self.entry, chunk), self._lock(chunk):
                record = self._payload(found, chunk).record
                self._checked.add(record)
                problem = self.access.problem(record)
            if problem:
                raise UnreadableError(problem, self.access, self.entry, chunk)

    def release(self) -> None:
        """Forget what was found out about chunks, to be found out again if it is needed."""
        self._payloads.clear()
        self.access.forget(self._checked)
        self._checked.clear()

    def _parts(self, band: Band, index: int) -> Iterator[tuple[int, Box]]:
        if index >= 0:
            yield index, (band.offsets, band.sizes)
            return
        for found, box in enumerate(self.entry.chunks.boxes()):
            common = intersect((band.offsets, band.sizes), box)
            if common:
                yield found, common

    def _payload(self, index: int, chunk: Chunk) -> Payload:
        payload = self._payloads.get(index)
        if payload is None:
            payload = self._payloads[index] = self.access.checkpoint.payload(self.entry, chunk)
        return payload

    def _lock(self, chunk: Chunk) -> Any:
        """Let one thread at a time at what decompresses an item and keeps the result."""
        return self.access.lock if chunk.item and chunk.item.transforms else nullcontext()


def cut(a: SideReader, b: SideReader, max_elements: int) -> Iterator[Run]:
    """Yield runs of bands that together are the whole tensor, each element once; none of a tensor without elements.

    Args:
        a, b: two tensors of one shape.
        max_elements: of one band.

    Raises:
        UnreadableError: a part of the tensor is in no chunk of one side.
    """
    shape = a.entry.shape
    if 0 in shape:
        return
    exact = [_is_exact(side) for side in (a, b)]
    if not all(exact):
        yield from _runs(((0,) * len(shape), shape), -1, -1, max_elements, False)
        return
    boxes = a.entry.chunks, b.entry.chunks
    for index_a, index_b, box in refinement(*boxes):
        is_one = boxes[0].box(index_a) == boxes[1].box(index_b)
        yield from _runs(box, index_a, index_b, max_elements, is_one)


def _runs(box: Box, index_a: int, index_b: int, max_elements: int, is_one: bool) -> Iterator[Run]:
    """Cut a box into bands; `is_one`: it is one chunk of both sides."""
    bands = (Band(*band, index_a, index_b) for band in cut_box(box, max_elements))
    is_first = True
    while run := tuple(islice(bands, _RUN_LENGTH)):
        yield Run(run, is_one and is_first and sum(volume(band.sizes) for band in run) == volume(box[1]))
        is_first = False


def _is_exact(side: SideReader) -> bool:
    """Tell whether chunks cover their tensor without overlapping.

    Raises:
        UnreadableError: they leave a part of it out.
    """
    shape, chunks = side.entry.shape, side.entry.chunks
    boxes = list(chunks.boxes())
    gap = first_gap(((0,) * len(shape), shape), boxes)
    if gap:
        message = f"no chunk holds the {list(gap[1])} elements at {list(gap[0])}"
        raise UnreadableError(message, side.access, side.entry)
    return sum(volume(sizes) for _, sizes in boxes) == volume(shape)


def refinement(a: Chunks, b: Chunks) -> Iterator[tuple[int, int, Box]]:
    """Yield (index of a's chunk, index of b's chunk, box) for all that share elements, in the order of a's chunks.

    Chunks of b are looked up by their place along the dimension that is cut most, so the work for any grid is about as
    much as there are boxes.
    """
    where = {box: index for index, box in enumerate(b.boxes())}
    lookup: _Lookup | None = None
    for index, box in enumerate(a.boxes()):
        if box in where and volume(box[1]):
            yield index, where[box], box
            continue
        lookup = lookup or _Lookup(list(b.boxes()))
        for found, common in lookup.touching(box):
            yield index, found, common


class _Lookup:
    """Boxes sorted by their first element along the dimension in which they begin at most different places."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        ndim = len(boxes[0][0]) if boxes else 0
        self._dim = max(range(ndim), key=lambda dim: len({box[0][dim] for box in boxes}), default=-1)
        self._ordered = sorted((box[0][self._dim] if ndim else 0, index) for index, box in enumerate(boxes))
        self._longest = max((box[1][self._dim] for box in boxes), default=1) if ndim else 1

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        start, size = (box[0][self._dim], box[1][self._dim]) if self._dim >= 0 else (0, 1)
        first = bisect_left(self._ordered, (start - self._longest + 1, -1))
        last = bisect_right(self._ordered, (start + size - 1, len(self._boxes)))
        for _, index in self._ordered[first:last]:
            common = intersect(box, self._boxes[index])
            if common:
                yield index, common


def _ignore(byte_offset: int, data: memoryview) -> None:
    return None
