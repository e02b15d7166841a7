"""Copy a box of one payload into an array: read, view as strided, undo conj and neg, assign, check the CRC.

Knows payloads and bytes, no format and no tensor names. No mmap: a file cut short under a map kills the process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints, Payload, Record
from dcptool.checkpoint.regions import is_contiguous, span
from dcptool.errors import ItemError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ReadInto = Callable[[Record, int, memoryview], None]
"""Fill a buffer with a record's bytes from a byte offset (inside the record) on."""

WINDOW_NBYTES = 8 << 20
"""Most bytes held between file and array."""
SMALL_NBYTES = 256 << 10
"""A window this small is read in one go even where most of it is not wanted."""
MAX_PIECES = 1 << 16
"""Pieces of one record that are remembered; one that is read in more of them has to be read once more to be checked."""

Update = Callable[[int, memoryview], None]
"""Told every run of bytes that is read of a record, and its byte offset in it."""


def fill(payload: Payload, read_into: ReadInto, start: Ints, out: Array, update: Update | None = None) -> None:
    """Copy the box of a payload that begins at `start` and has `out`'s shape into `out`.

    Only the bytes between wanted elements that lie close together are read besides the wanted ones. When that was
    every byte of the record, each once, its CRC32 is checked.

    Args:
        payload: where the elements are; its record lies wholly inside the file.
        read_into: gives the record's bytes.
        start: first element of the box in the payload, per dimension.
        out: array of the payload's numpy dtype, any strides.
        update: takes over the checking: told what is read instead.

    Raises:
        ItemError: the record's bytes do not have the stored CRC32.
    """
    itemsize, check = out.dtype.itemsize, RecordCheck(payload.record)
    told = update or check.update
    first = payload.storage_offset + sum(index * step for index, step in zip(start, payload.strides, strict=True))
    # Widest stride first: windows are then cut, and read, in the order of the file.
    order = sorted(range(out.ndim), key=lambda dim: -payload.strides[dim])
    strides = tuple(payload.strides[dim] for dim in order)
    for at, part in _windows(first, out.transpose(order), strides) if out.size else ():
        told(at * itemsize, _read_window(payload.record, read_into, at, part, strides))
    problem = "" if update else check.problem_if_whole()
    if problem:
        raise ItemError(problem)
    _undo_views(payload, out)


def _windows(first: int, out: Array, strides: Ints) -> Iterator[tuple[int, Array]]:
    """Cut an array into parts whose elements lie close together in the record; yield where each begins there."""
    nbytes = span(out.shape, strides) * out.dtype.itemsize
    if nbytes <= WINDOW_NBYTES and (nbytes <= SMALL_NBYTES or out.nbytes * 4 >= nbytes):
        yield first, out
        return
    dim = next(dim for dim, size in enumerate(out.shape) if size > 1 and strides[dim])
    half, before = out.shape[dim] // 2, (slice(None),) * dim
    lower, upper = (*before, slice(half)), (*before, slice(half, None))
    yield from _windows(first, out[lower], strides)
    yield from _windows(first + half * strides[dim], out[upper], strides)


def _read_window(record: Record, read_into: ReadInto, first: int, out: Array, strides: Ints) -> memoryview:
    """Fill an array from element `first` of a record on; return the bytes from its first to its last element."""
    import numpy as np

    itemsize = out.dtype.itemsize
    if out.flags.c_contiguous and is_contiguous(out.shape, strides):
        window = out.reshape(-1).view(np.uint8).data
        read_into(record, first * itemsize, window)
        return window
    window = memoryview(bytearray(span(out.shape, strides) * itemsize))
    read_into(record, first * itemsize, window)
    # Not as_strided: it rebuilds the dtype from its text, which ml_dtypes' float8_e5m2 does not survive.
    out[...] = np.ndarray(out.shape, out.dtype, buffer=window, strides=[step * itemsize for step in strides])
    return window


def _undo_views(payload: Payload, out: Array) -> None:
    """Turn stored values into those that are meant, where what was saved is a conjugate or a negative of them."""
    import numpy as np

    parts = [out[name] for name in out.dtype.names] if out.dtype.names else [out]
    if payload.conj and out.dtype.names:
        np.negative(parts[1], out=parts[1])
    elif payload.conj:
        np.conjugate(out, out=out)
    for part in parts if payload.neg else ():
        np.negative(part, out=part)


class Piece(NamedTuple):
    """A run of bytes that was read of a record: its place there, its length in bytes, its CRC32."""

    byte_offset: int
    nbytes: int
    crc32: int


class RecordCheck:
    """The CRC32 of a record from pieces that come in any order, overlapping or not."""

    def __init__(self, record: Record, pieces: Sequence[Piece] = ()) -> None:
        self.record = record
        self.pieces = list(pieces)
        self._lock = threading.Lock()

    def update(self, byte_offset: int, data: memoryview) -> None:
        """Take note of the bytes at an offset inside the record; from several threads."""
        if self.record.crc32 is None:
            return
        value = crc32(data)
        with self._lock:
            last = self.pieces[-1] if self.pieces else None
            if last and last.byte_offset + last.nbytes == byte_offset:
                value = _zlib().crc32_combine(last.crc32, value, len(data))
                self.pieces[-1] = Piece(last.byte_offset, last.nbytes + len(data), value)
            elif len(self.pieces) < MAX_PIECES:
                self.pieces.append(Piece(byte_offset, len(data), value))

    def is_whole(self) -> bool:
        """Tell whether there is nothing left to read to know: pieces make up the record, or it has no checksum."""
        return self.record.crc32 is None or self._joined() is not None

    def problem(self) -> str:
        """Say what is wrong with the record, "" if nothing is, or the writer stored no checksum."""
        record = self.record
        if record.crc32 is None:
            return ""
        value = self._joined()
        if value is None:
            return f"only parts of record {record.name} were read"
        if value != record.crc32:
            return (
                f"bytes were changed since they were saved: record {record.name} has CRC32 {value:08x}, "
                f"stored is {record.crc32:08x}"
            )
        return ""

    def problem_if_whole(self) -> str:
        """Say what is wrong if every byte was read; of a part nothing can be said."""
        return self.problem() if self.is_whole() else ""

    def _joined(self) -> int | None:
        """Return the CRC32 of all bytes from pieces that follow one another, None if no such pieces are there."""
        reached = {0: 0}
        for start, nbytes, value in sorted(self.pieces):
            if start in reached:
                reached.setdefault(start + nbytes, _zlib().crc32_combine(reached[start], value, nbytes))
        return reached.get(self.record.nbytes)


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC32 of `data`, continuing from `value`; zlib's polynomial, several times its speed."""
    result: int = _zlib().crc32(data, value)
    return result


@functools.cache
def _zlib() -> Any:
    from zlib_ng import zlib_ng

    return zlib_ng


def numpy_empty(shape: Ints, dtype: str) -> Array:
    """Return an uninitialised array in the numpy form of a torch dtype.

    Raises:
        ItemError: it does not fit into memory.
    """
    import numpy as np

    try:
        return np.empty(shape, dtypes.numpy_dtype(dtype))
    except (MemoryError, ValueError):
        raise ItemError(f"shape {list(shape)} of {dtype} does not fit into memory; read a part of it") from None
