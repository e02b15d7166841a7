"""Walk the data files of a checkpoint without metadata beside those of a sibling: is it the same sequence of items?

Each item of the sibling is where its metadata says. The other's begin where the one before ends: nothing else tells.
Kinds, dtypes, shapes, strides and lengths of storages must be equal item by item, and no byte may be left over.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.extents import Extent, Payload
from dcptool.checkpoint.fill import crc32
from dcptool.checkpoint.items import FileItems, Placed, name_of
from dcptool.errors import DcptoolError, ItemError, LayoutError, UnsupportedError
from dcptool.formats.safetensors.header import read_header
from dcptool.formats.torch_save.items import payload_of
from dcptool.formats.torch_save.zip import Read, TorchZip
from dcptool.formats.torch_save.zip_scan import zip_at_start
from dcptool.pickles import inert
from dcptool.pickles.standins import qualified_name
from dcptool.pickles.tensors import TensorView, tensor_view
from dcptool.storage import Storage, join
from dcptool.storage.window import Window
from dcptool.words import plural

ANOTHER = "Only a step of the same run, saved by as many ranks with the same layout, can stand in: name another one."
CUT = "It is cut short, or of another layout: copy it again from where it was saved, or resume from another step."
_KEPT_NBYTES = 4096


class Match(NamedTuple):
    """A file whose items are those of the sibling's file of that name.

    Attributes:
        name: of the file.
        nbytes: its length.
        names: of its items, in order; the last stands for all tensors of a safetensors blob, if it ends with one.
        old_offsets: where they begin in the sibling's file.
        offsets: where they begin here; one more for the end.
        has_blob: whether it ends with a safetensors blob.
        n_items: how many there are, those in the blob included.
    """

    name: str
    nbytes: int
    names: tuple[str, ...]
    old_offsets: tuple[int, ...]
    offsets: tuple[int, ...]
    has_blob: bool
    n_items: int

    def moves(self) -> dict[tuple[str, int], tuple[int, int | None]]:
        """Return the new place of each item; see `formats.dcp.relocate`."""
        lengths: list[int | None] = [end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False)]
        if self.has_blob:  # its tensors share one place, and lengths are those of their values
            lengths[-1] = None
        places = zip(self.old_offsets, self.offsets, lengths, strict=False)
        return {(self.name, old): (new, length) for old, new, length in places}


class _ItemKind(NamedTuple):
    """What an item is: of a tensor its payload, of an object the class of its value."""

    payload: Payload | None
    class_name: str

    @property
    def traits(self) -> tuple[Any, ...]:
        """What must be equal in the sibling."""
        if self.payload is None:
            return (self.class_name,)
        record, *rest = self.payload
        return (record.nbytes, *rest)


def match_file(sibling: Checkpoint, by_file: FileItems | None, storage: Storage, name: str) -> Match:
    """Match a file of a checkpoint without metadata with the file of the same name of its sibling.

    Args:
        sibling: an open checkpoint.
        by_file: its items by file; None if it has none in this file.
        storage: the folder of the other.
        name: of the file, which is in both.

    Raises:
        LayoutError: items differ in number, order, kind, dtype, shape or strides; names the first.
        ItemError: a file is cut short, overwritten or damaged.
        UnsupportedError: items are compressed.
    """
    return _Walk(sibling, by_file, storage, name).run()


class _Walk:
    """The way through one file and the sibling's, item by item."""

    def __init__(self, sibling: Checkpoint, by_file: FileItems | None, storage: Storage, name: str) -> None:
        self._name, self._by_file = name, by_file
        self._theirs, self._ours = Window(sibling.storage), Window(storage)
        self._their_path, self._path = join(sibling.path, name), join(storage.root, name)
        self._their_nbytes = sibling.storage.size(name) or 0
        self._nbytes = storage.size(name) or 0

    def run(self) -> Match:
        starts, ends = self._by_file.spans(self._name) if self._by_file else (array("q"), array("q"))
        names: list[str] = []
        old_offsets: list[int] = []
        offsets = [0]
        has_blob, there = False, 0
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            placed = self._placed(index)
            if placed.item.transforms:
                codecs = ", ".join(placed.item.transforms)
                raise UnsupportedError(
                    f"{self._their_path}: items went through {codecs}; where one ends cannot be told without metadata"
                )
            self._require_filled(start, there)
            names.append(name_of(placed))
            old_offsets.append(start)
            if self._is_blob(placed):
                self._match_blob(start, offsets[-1], starts[-1])
                offsets.append(self._nbytes)
                has_blob, there = True, self._their_nbytes
                break
            offsets.append(offsets[-1] + self._match_item(placed, index, offsets[-1], end - start))
            there = end
        self._require_filled(self._their_nbytes, there)
        if offsets[-1] != self._nbytes:
            raise LayoutError(
                f"{self._path} goes on with {plural(self._nbytes - offsets[-1], 'byte')} at byte {offsets[-1]:,}, "
                f"where {self._their_path} ends after {len(names):,} items",
                next_step=ANOTHER,
            )
        columns = tuple(names), tuple(old_offsets), tuple(offsets)
        return Match(self._name, self._nbytes, *columns, has_blob, len(starts))

    def _placed(self, index: int) -> Placed:
        if self._by_file is None:
            raise IndexError(index)
        return self._by_file.item(self._name, index)

    def _require_filled(self, start: int, end: int) -> None:
        """Refuse a sibling in which items do not lie back to back: what is between them is not known."""
        if start != end:
            raise LayoutError(
                f"{self._their_path}: its metadata names nothing for bytes {min(start, end):,}–{max(start, end):,}, or "
                f"two things",
                next_step=ANOTHER,
            )

    def _match_item(self, placed: Placed, index: int, position: int, likely_nbytes: int) -> int:
        """Return the length of our item at a position, which must be like the sibling's."""
        which = f"item {index + 1:,}, in {self._their_path} {name_of(placed)}"
        item = placed.item
        try:
            archive = TorchZip(_reads(self._theirs, self._name, item.byte_offset), item.nbytes)
            archive.records(item)
            theirs = _kind_of(archive, item)
        except DcptoolError as error:
            raise ItemError(f"{self._their_path}: {name_of(placed)}: {error.message}", next_step=ANOTHER) from error
        if (theirs.payload is None) != (placed.chunk is None):
            raise ItemError(f"{self._their_path}: {name_of(placed)} is {_words(theirs)}", next_step=ANOTHER)
        left = self._nbytes - position
        if not left:
            end = f"ends at byte {position:,}" if position else "is empty"
            raise LayoutError(f"{self._path} {end}, before {which}", next_step=CUT)
        try:
            archive = zip_at_start(_reads(self._ours, self._name, position), left, likely_nbytes)
            ours = _kind_of(archive, Extent(self._name, position, archive.nbytes))
        except UnsupportedError:
            raise
        except DcptoolError as error:
            raise ItemError(f"{self._path}, byte {position:,}: {which}: {error.message}", next_step=_DAMAGED) from error
        if ours.traits != theirs.traits:
            raise LayoutError(
                f"{self._path}, byte {position:,}: {which}, is {_words(ours, theirs)} here and "
                f"{_words(theirs, ours)} there",
                next_step=ANOTHER,
            )
        return archive.nbytes

    def _is_blob(self, placed: Placed) -> bool:
        """Tell whether an item of the sibling is in a safetensors blob: a length, then a JSON object."""
        start = self._theirs.read(self._name, placed.item.byte_offset, min(9, placed.item.nbytes))
        if start.startswith(b"PK\x03\x04") or placed.chunk is None:
            return False
        start = self._theirs.read(
            self._name, placed.item.byte_offset, min(9, self._their_nbytes - placed.item.byte_offset)
        )
        return start[8:] == b"{"

    def _match_blob(self, their_start: int, start: int, last_start: int) -> None:
        """Match safetensors blobs that fill the files from here on: equal headers, which have names, equal lengths."""
        nbytes = self._their_nbytes - their_start
        if last_start != their_start or self._nbytes - start != nbytes:
            raise LayoutError(
                f"{self._path} has {plural(self._nbytes - start, 'byte')} from byte {start:,} on, {self._their_path} a "
                f"safetensors blob of {nbytes:,}",
                next_step=CUT if self._nbytes - start < nbytes else ANOTHER,
            )
        if self._header(self._theirs, their_start, nbytes) != self._header(self._ours, start, nbytes):
            raise LayoutError(
                f"{self._path}, byte {start:,}: the header of the safetensors blob is not that of {self._their_path}: "
                f"other tensors, dtypes, shapes or places",
                next_step=ANOTHER,
            )

    def _header(self, window: Window, start: int, nbytes: int) -> tuple[Any, ...]:
        """Return what a blob's header says: its text may have the same in another order."""
        try:
            header = read_header(_reads(window, self._name, start), nbytes)
        except DcptoolError as error:
            raise ItemError(
                f"{join(window.root, self._name)}, byte {start:,}: {error.message}", next_step=ANOTHER
            ) from error
        return header.tensors, header.saved_offsets, header.data_offset


_DAMAGED = "This checkpoint is damaged, or not of the same layout; resume from another step."


def _reads(window: Window, name: str, start: int) -> Read:
    return lambda at, nbytes: window.read(name, start + at, nbytes)


def _kind_of(archive: TorchZip, item: Extent) -> _ItemKind:
    pickled = archive.content("data.pkl")
    view, class_name = _small_kind(pickled) if len(pickled) <= _KEPT_NBYTES else _read_kind(pickled)
    return _ItemKind(payload_of(view, archive, item) if view else None, class_name)


def _read_kind(pickled: bytes) -> tuple[TensorView | None, str]:
    root = inert.load(pickled)
    return tensor_view(root), qualified_name(root)


_small_kind = functools.lru_cache(1024)(_read_kind)


def _words(kind: _ItemKind, other: _ItemKind | None = None) -> str:
    """Say what an item is; of a tensor what else differs from the other one, where dtype and shape do not."""
    if kind.payload is None:
        return f"an object ({kind.class_name})"
    payload = kind.payload
    words = f"a tensor {payload.dtype} {list(payload.shape)}"
    if other and other.payload and other.payload[1:3] == payload[1:3]:
        words += f" with strides {list(payload.strides)} from element {payload.storage_offset} of a storage of "
        words += f"{payload.record.nbytes:,} bytes"
        words += ", conjugate" * payload.conj + ", negative" * payload.neg
    return words


class Proof(NamedTuple):
    """What reading a file shows.

    Attributes:
        nbytes: of records that were read.
        n_unverifiable: items without checksums.
        problems: what is damaged, one line each.
    """

    nbytes: int
    n_unverifiable: int
    problems: tuple[str, ...]


def prove_file(storage: Storage, match: Match, progress: Callable[[int], None] | None = None) -> Proof:
    """Read every record of a file that was matched, and check every CRC32."""
    window = Window(storage)
    path = join(storage.root, match.name)
    buffer = memoryview(bytearray(storage.piece_nbytes))
    total = n_unverifiable = 0
    problems: list[str] = []

    def read(start: int, nbytes: int) -> int:
        nonlocal total
        value = 0
        for at in range(0, nbytes, len(buffer)):
            piece = buffer[: nbytes - at]
            window.read_into(match.name, start + at, piece)
            value = crc32(piece, value)
            total += len(piece)
            if progress:
                progress(len(piece))
        return value

    for index, (name, start, end) in enumerate(zip(match.names, match.offsets, match.offsets[1:], strict=False)):
        where = f"{path}, bytes {start:,}–{end:,}: {name}"
        try:
            if match.has_blob and index == len(match.names) - 1:
                read(start, end - start)
                n_unverifiable += 1
                continue
            if end - start <= len(buffer):
                window.load(match.name, start, end)
            archive = TorchZip(_reads(window, match.name, start), end - start)
            records = archive.records(Extent(match.name, start, end - start))
            n_unverifiable += all(record.crc32 is None for record in records if record.nbytes)
            for record in records:
                value = read(start + record.byte_offset, record.nbytes)
                if record.crc32 is not None and value != record.crc32:
                    problems.append(
                        f"{where}: record {record.name} has CRC32 {value:08x}, stored is {record.crc32:08x}: "
                        "bytes were changed"
                    )
        except DcptoolError as error:
            problems.append(f"{where}: {error}")
    return Proof(total, n_unverifiable, tuple(problems))
