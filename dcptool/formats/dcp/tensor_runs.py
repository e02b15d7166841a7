"""Read the records of tensors of a `.metadata` pickle at once: type, shape and boxes, without an object per record.

A tensor's record is some 50 opcodes, and 25 more for each chunk. All of them but the first of its kind are written
alike; such a record is matched as a whole and taken apart by the `re` module. Pickle cuts its output into frames of
64 KiB, so that a tensor of many chunks has a frame's head somewhere inside; then what can be read at once are the runs
of chunks between. What is written in any other way is left to the machine.

Source: what CPython's pickle writes for torch's TensorStorageMetadata and its parts, protocol 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import Box
from dcptool.formats.dcp import tokens
from dcptool.formats.dcp.tokens import GET, NEW, NUMBERS, TEXT, memo_entries, size_of, slot, uncaptured
from dcptool.pickles.machine import Taken
from dcptool.pickles.standins import Global, Node

_HEAD = (  # properties, their class, dtype, layout, memory format; size, and torch.Size; chunks
    NEW
    + rb"(%(G)s)(%(G)s)\)\x81\x94\((%(G)s)(%(G)s)([\x88\x89])(%(G)s)[\x88\x89]t\x94b(%(G)s)(%(G)s)(%(A)s)(%(G)s)\]\x94"
    % {b"G": GET, b"A": NUMBERS}
)
_CHUNK = rb"\(?(%(G)s)%(N)s(%(G)s)(%(G)s)(%(A)s)(%(G)s)(%(G)s)(?:%(A)s)ub" % {
    b"G": GET,
    b"N": NEW,
    b"A": NUMBERS,
}
_KEYS = ("properties", "size", "chunks")
_BOX_KEYS = ("offsets", "sizes")
_MEMORY_FORMATS = range(4)


class TensorRow:
    """One tensor: torch's name of its dtype, its shape, its boxes, and whether it is a parameter that is trained."""

    __slots__ = ("boxes", "dtype", "requires_grad", "shape")

    def __init__(self, dtype: Global, shape: Ints, boxes: list[Box], requires_grad: bool) -> None:
        self.dtype, self.shape, self.boxes, self.requires_grad = dtype, shape, boxes, requires_grad


class ChunkRun:
    """Chunks of one tensor that follow one another: the boxes."""

    __slots__ = ("boxes",)

    def __init__(self, boxes: list[Box]) -> None:
        self.boxes = boxes


class _ChunkPatterns(NamedTuple):
    """What matches one chunk of some ndim, with its offsets and sizes; a run of them; the rest of a tensor's record."""

    one: re.Pattern[bytes]
    run: re.Pattern[bytes]
    rest: re.Pattern[bytes]


class TensorRuns:
    """Takes runs of tensors out of one pickle; see `Bulk.take`."""

    def __init__(self, data: bytes, sizes: tokens.Sizes) -> None:
        self._data, self._sizes = data, sizes
        self._head = re.compile(_HEAD, re.DOTALL)
        self._sample = re.compile(_CHUNK, re.DOTALL)
        self._next: dict[bytes, re.Pattern[bytes]] = {}
        self._known: set[tuple[bytes, ...]] = set()
        self._dtypes: dict[bytes, Global] = {}
        self._chunks: dict[int, _ChunkPatterns] = {}

    def take(self, position: int, token: bytes, memo: Callable[[int], Any]) -> Taken | None:
        """Take the tensors from `position` on, where the first one's instance is about to be made.

        Args:
            position: of the EMPTY_TUPLE of NEWOBJ, in bytes.
            token: the opcode that fetches the class.
            memo: the memo so far.
        """
        following = self._next.get(token)
        if following is None:
            following = self._next[token] = re.compile(rb"(%s)%s" % (TEXT, re.escape(token)), re.DOTALL)
        values: list[Any] = []
        names: dict[int, str] = {}
        end, n_memo = position, 0
        key: re.Match[bytes] | None = None
        while row := self._row(position, memo):
            if key:
                names[n_memo] = tokens.text(key[1])
                values.append(names[n_memo])
                n_memo += 1
            tensor, end, n_made = row
            values.append(tensor)
            n_memo += n_made
            key = following.match(self._data, end)
            if not key or key[1][1] != len(key[1]) - 3:
                break
            position = key.end()
        self._sizes.trim()
        return Taken(values, end, n_memo, names.__getitem__) if values else None

    def _row(self, position: int, memo: Callable[[int], Any]) -> tuple[TensorRow, int, int] | None:
        """Return the tensor at a position, the byte after it, and how many memo entries it makes."""
        head = self._head.match(self._data, position)
        if not head:
            return None
        fixed = head.group(1, 2, 4, 6, 7, 8, 10)
        if fixed not in self._known and not self._is_sound(fixed, memo):
            return None
        dtype = self._dtypes.get(head[3])
        if dtype is None:
            found = memo(slot(head[3]))
            if not isinstance(found, Global):
                return None
            dtype = self._dtypes[head[3]] = found
        shape = self._sizes[head[9]]
        patterns = self._patterns(len(shape), head.end(), memo)
        rest = patterns.rest.match(self._data, head.end()) if patterns else None
        if not patterns or not rest:
            return None
        boxes = self._boxes(patterns, head.end(), rest.end())
        # Made are: the tensor, its fields; its properties, their state; its size; the list; the chunks.
        n_made = 5 + memo_entries(len(shape)) + len(boxes) * _memo_entries_of_chunk(len(shape))
        return TensorRow(dtype, shape, boxes, head[5] == b"\x88"), rest.end(), n_made

    def take_chunks(self, position: int, token: bytes, memo: Callable[[int], Any]) -> Taken | None:
        """Take the chunks from `position` on; arguments as in `take`."""
        start = position - len(token)
        sample = self._sample.match(self._data, start)
        if not sample:
            return None
        ndim = len(self._sizes[sample[4]])
        patterns = self._patterns(ndim, start, memo)
        run = patterns.run.match(self._data, start) if patterns else None
        if not patterns or not run:
            return None
        boxes = self._boxes(patterns, start, run.end())
        self._sizes.trim()
        return Taken([ChunkRun(boxes)], run.end(), len(boxes) * _memo_entries_of_chunk(ndim), _nothing_kept)

    def _boxes(self, patterns: _ChunkPatterns, start: int, end: int) -> list[Box]:
        size = self._sizes.__getitem__
        return [(size(offsets), size(sizes)) for offsets, sizes in patterns.one.findall(self._data, start, end)]

    def _is_sound(self, fixed: tuple[bytes, ...], memo: Callable[[int], Any]) -> bool:
        """Tell whether what is fetched is what these places of a tensor's record should hold; remember it if so."""
        properties, kind, layout, memory_format, shape, size, chunks = (memo(slot(token)) for token in fixed)
        sound = (
            (properties, shape, chunks) == _KEYS
            and isinstance(kind, Global)
            and kind.name == "TensorProperties"
            and is_size(size)
            and is_dense(layout, memory_format)
        )
        if sound:
            self._known.add(fixed)
        return sound

    def _patterns(self, ndim: int, position: int, memo: Callable[[int], Any]) -> _ChunkPatterns | None:
        """Return what matches chunks of this many dimensions, learnt from how the first one is written."""
        if ndim in self._chunks:
            return self._chunks[ndim]
        sample = self._sample.match(self._data, position)
        if not sample:
            return None
        kind, offsets, size, sizes, same = (memo(slot(sample[index])) for index in (1, 2, 3, 5, 6))
        if not isinstance(kind, Global) or kind.name != "ChunkStorageMetadata" or (offsets, sizes) != _BOX_KEYS:
            return None
        if not is_size(size) or size is not same:
            return None
        fixed = (re.escape(sample[1]), NEW, re.escape(sample[2]), re.escape(sample[5]))
        first, second = size_of(sample[3], ndim), size_of(sample[6], ndim)
        one = rb"%s%s%s%s%s%sub" % (*fixed[:3], first, fixed[3], second)
        many = uncaptured(one)
        # Lists are written a thousand members at a time; a single one has no mark.
        forms = one, rb"(?:%s)+" % many, rb"(?:\((?:%s)+e)*(?:%sa)?ub" % (many, many)
        self._chunks[ndim] = _ChunkPatterns(*(re.compile(form, re.DOTALL) for form in forms))
        return self._chunks[ndim]


def _memo_entries_of_chunk(ndim: int) -> int:
    """Return how many memo entries a chunk makes: itself, its fields, two sizes."""
    return 2 + 2 * memo_entries(ndim)


def is_size(value: Any) -> bool:
    """Tell whether a stand-in is that of torch.Size."""
    return isinstance(value, Global) and (value.module, value.name) == ("torch", "Size")


def is_dense(layout: Any, memory_format: Any) -> bool:
    """Tell whether the stand-ins of two tensor properties are what torch writes for a tensor that is not sparse."""
    return (
        isinstance(layout, Node)
        and layout.args == ("torch.strided",)
        and isinstance(memory_format, Node)
        and len(memory_format.args) == 1
        and memory_format.args[0] in _MEMORY_FORMATS
    )


def _nothing_kept(index: int) -> Any:
    raise LookupError(index)
