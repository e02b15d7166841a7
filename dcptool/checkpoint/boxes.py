"""Read boxes of one tensor out of its chunks: which chunks a box lies in, what each holds, and the copy.

The one way from a wanted box to its bytes; who wants several chunks at once, checks or threads decides for itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.entries import Source, TensorEntry, require_box
from dcptool.checkpoint.extents import Chunk, Ints, Payload, Record
from dcptool.checkpoint.fill import RecordCheck, Update, fill
from dcptool.checkpoint.regions import Box, intersect, volume
from dcptool.errors import DcptoolError, LayoutError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

NO_PLACE = "the metadata has no place for it"
_PIECE_NBYTES = 1 << 20
MAX_REPEATED_NBYTES = 1 << 30
MAX_TIMES = 1000
"""A tensor of more bytes that are a thousand times those stored is an expanded one, and not read element by element."""


class ChunkIndex:
    """The chunks of a tensor by their place along the dimension in which they begin at most different places."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        columns = [chunks.column(dim) for dim in range(chunks.ndim)]
        self._dim = max(range(chunks.ndim), key=lambda dim: len(set(columns[dim][0])), default=0)
        starts, sizes = columns[self._dim] if columns else ([0] * len(chunks), [1] * len(chunks))
        self._ordered = sorted(zip(starts, range(len(starts)), strict=True))
        self._longest = max(sizes, default=0)

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the index of each chunk that shares elements with a box, in order, and what they share."""
        start, size = (box[0][self._dim], box[1][self._dim]) if box[0] else (0, 1)
        first = bisect_left(self._ordered, (start - self._longest + 1, -1))
        last = bisect_right(self._ordered, (start + size - 1, 1 << 62))
        for index in sorted(index for _, index in self._ordered[first:last]):
            common = intersect(box, self._chunks.box(index))
            if common:
                yield index, common


class BoxReader:
    """Copies boxes out of the chunks of one tensor, from several threads; what a chunk holds is found out once.

    Args:
        source: of the checkpoint.
        entry: the tensor.
        find: finds what a chunk holds and checks it; default: `payload_of`, whose errors name neither file nor tensor.
    """

    def __init__(
        self, source: Source, entry: TensorEntry, find: Callable[[TensorEntry, Chunk], Payload] | None = None
    ) -> None:
        self.entry, self._source = entry, source
        self._find = find or partial(payload_of, source)
        self._payloads: dict[int, Payload] = {}

    def payload(self, index: int) -> Payload:
        """Return what a chunk holds, which is the box that the metadata says.

        Raises:
            LayoutError: the metadata names no place for it.
            ItemError, StorageError, UnsupportedError: it cannot be understood, or holds something else.
        """
        found = self._payloads.get(index)
        if found is None:  # two threads may both look; setdefault, one operation, keeps what the first found
            found = self._payloads.setdefault(index, self._find(self.entry, self.entry.chunks[index]))
        return found

    def fill(self, index: int, box: Box, out: np.ndarray[Any, Any], update: Update | None = None) -> None:
        """Copy a box that lies in a chunk into an array of its sizes; `update` and errors as of `fill.fill`."""
        fill_box(self._source, self.payload(index), self.entry.chunks.box(index)[0], box, out, update)

    def forget(self) -> None:
        """Forget what chunks hold, to be found out again if it is needed."""
        self._payloads.clear()


def payload_of(source: Source, entry: TensorEntry, chunk: Chunk) -> Payload:
    """Find the payload of a chunk and check that it is the box the metadata says.

    Raises:
        LayoutError: the metadata names no place for it.
        ItemError: dtype or shape stored there differ, or it cannot be understood.
        UnsupportedError: it is no plain tensor, or its values are a few that are repeated without end.
    """
    if chunk.item is None:
        raise LayoutError(NO_PLACE)
    payload = source.payload(entry, chunk, chunk.item)
    require_box(payload, entry, chunk)
    require_stored(payload)
    return payload


def require_stored(payload: Payload) -> None:
    """Refuse a view that repeats its few elements without end: reading it would take as long as writing them out.

    Raises:
        UnsupportedError: it stands for far more bytes than are stored.
    """
    nbytes = volume(payload.shape) * dtypes.lookup(payload.dtype).itemsize
    if nbytes > MAX_REPEATED_NBYTES and nbytes > MAX_TIMES * payload.record.nbytes:
        stored = payload.record.nbytes
        raise UnsupportedError(
            f"its {nbytes:,} bytes are {stored:,} stored ones, repeated; torch.load reads it as that"
        )


def fill_box(
    source: Source, payload: Payload, offsets: Ints, box: Box, out: np.ndarray[Any, Any], update: Update | None = None
) -> None:
    """Copy a box of a tensor out of the payload of the chunk at `offsets`, which holds it, into an array."""
    start = tuple(a - b for a, b in zip(box[0], offsets, strict=True))
    fill(payload, source.read_into, start, out, update)


def record_problem(source: Source, record: Record) -> str:
    """Say what is wrong with a record, that it cannot be read included; "" if nothing is."""
    try:
        return check_whole(source, record)
    except DcptoolError as error:
        return str(error)


def check_whole(source: Source, record: Record) -> str:
    """Read all of a record and say what is wrong with it, "" if nothing is."""
    check = RecordCheck(record)
    buffer = memoryview(bytearray(min(_PIECE_NBYTES, record.nbytes)))
    for start in range(0, record.nbytes, max(len(buffer), 1)):
        piece = buffer[: record.nbytes - start]
        source.read_into(record, start, piece)
        check.update(start, piece)
    return check.problem()
