"""Bring what a load plan asks for from a checkpoint to a planner: one item after the other, the next ones read ahead.

A planner may hand out the same memory for every item, and copy it away when the item is committed. So nothing is asked
of it before the item before is done; what is read ahead goes into memory of our own, of bounded size, and an item that
is too large for that is read by all threads at once, straight into the planner's tensor.
"""

from __future__ import annotations

import io
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, ObjectEntry, Source, TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent, Ints, Payload, Record, place_words
from dcptool.checkpoint.fill import ReadInto, RecordCheck, fill
from dcptool.checkpoint.regions import is_contiguous, volume
from dcptool.errors import DcptoolError, ItemError, LayoutError, UnsupportedError
from dcptool.formats.dcp.format import DCP
from dcptool.formats.dcp.items import undo_transforms
from dcptool.formats.torch_save.graphs import TAIL, Keys, ObjectGraph, rekey
from dcptool.pickles.emit import emit
from dcptool.storage import Storage, join
from dcptool.storage.window import Window
from dcptool.training.as_metadata import ItemPlace

_SMALL_NBYTES = 1 << 20
"""An item up to this length is read at once, its headers and its bytes together; and it is always read ahead."""
_AHEAD_NBYTES = 32 << 20
"""Longest item that is read ahead where only a part of it is wanted, or several parts."""
_HELD_NBYTES = 64 << 20
"""Bytes read ahead, all together."""
_AHEAD_PER_THREAD = 8
_BAND_NBYTES = 1 << 20
"""What a thread takes at once of an item that several read together."""
_DECODED_NBYTES = 64 << 20
"""A compressed chunk may always have this many bytes once it is not."""
_MAX_OBJECT_NBYTES = 1 << 30
"""Most bytes of a compressed object once it is not."""

Result = TypeVar("Result")


class Asked(NamedTuple):
    """A stored item, and what is wanted of it: boxes of a tensor's chunk, or an object.

    `held` is how many bytes of memory it takes to read it ahead, 0 if it is not.
    """

    entry: Entry
    chunk: Chunk | None
    items: tuple[ReadItem, ...]
    held: int


class _Found(NamedTuple):
    """What was read of an item.

    Attributes:
        payload: of a chunk, and what reads it; None for an object, and for what torch decoded.
        data: the bytes of the payload's record, or of an object; None of what is not read ahead.
        decoded: what torch made of the item.
    """

    payload: tuple[Payload, ReadInto] | None = None
    data: memoryview | None = None
    decoded: torch.Tensor | None = None


def group(checkpoint: Checkpoint, found: Iterable[tuple[ItemPlace, ReadItem]]) -> list[Asked]:
    """Put together what is wanted of the same item, in the order of files and, in a file, of the plan."""
    files: dict[str, dict[tuple[str, int | None], list[tuple[ItemPlace, ReadItem]]]] = {}
    for place, item in found:
        files.setdefault(place.relative_path, {}).setdefault((place.fqn, place.chunk), []).append((place, item))
    return [_wanted(checkpoint, found) for together in files.values() for found in together.values()]


def _wanted(checkpoint: Checkpoint, found: Sequence[tuple[ItemPlace, ReadItem]]) -> Asked:
    place, items = found[0][0], tuple(item for _, item in found)
    entry = checkpoint.entries[place.fqn]
    if not isinstance(entry, TensorEntry) or place.chunk is None:
        return Asked(entry, None, items, place.length if checkpoint.format.items_apart else 0)
    chunk = entry.chunks[place.chunk]
    nbytes = _nbytes(entry, chunk)
    whole = len(items) == 1 and tuple(items[0].lengths) == chunk.sizes
    ahead = nbytes <= (_SMALL_NBYTES if whole else _AHEAD_NBYTES) or bool(chunk.item and chunk.item.transforms)
    return Asked(entry, chunk, items, nbytes if ahead else 0)


def _nbytes(entry: TensorEntry, chunk: Chunk) -> int:
    return volume(chunk.sizes) * dtypes.lookup(entry.dtype).itemsize


class Delivery:
    """Brings items to a planner, on the thread that asks; others read ahead.

    Args:
        checkpoint: what is read.
        planner: gives the tensors, and takes objects.
        threads: how many read.
        registry: of torch's extensions, for stream transforms that dcptool does not know.
        trust: whether torch may decode what dcptool does not look into.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        planner: LoadPlanner,
        threads: int,
        registry: ExtensionRegistry | None,
        trust: bool,
    ) -> None:
        self._checkpoint, self._planner = checkpoint, planner
        self._threads, self._registry, self._trust = threads, registry, trust
        self._executor: ThreadPoolExecutor | None = None

    def run(self, wanted: Sequence[Asked]) -> None:
        """Bring all of it.

        Raises:
            ItemError: a stored item is damaged; the message names file, fqn and byte range.
            LayoutError: a tensor of the planner has another shape than what it is for.
            StorageError: a file is missing, unreadable or too short.
            UnsupportedError: an item is of a form, or went through a transform, that is not known.
        """
        self._executor = ThreadPoolExecutor(self._threads, "reader") if self._threads > 1 else None
        try:
            for one, get in self._ahead(wanted):
                found = get()
                self._named(one, partial(self._hand_over, one, found))
        finally:
            if self._executor:
                self._executor.shutdown(cancel_futures=True)

    def _ahead(self, wanted: Iterable[Asked]) -> Iterator[tuple[Asked, Callable[[], _Found]]]:
        """Yield items in order with what gives what was read of them; some after it are being read meanwhile."""
        waiting: deque[tuple[Asked, Callable[[], _Found]]] = deque()
        held = 0
        for one in wanted:
            while waiting and (held + one.held > _HELD_NBYTES or len(waiting) > _AHEAD_PER_THREAD * self._threads):
                held -= waiting[0][0].held
                yield waiting.popleft()
            look = partial(self._named, one, partial(self._look, one))
            waiting.append((one, self._executor.submit(look).result if self._executor else look))
            held += one.held
        yield from waiting

    def _named(self, one: Asked, function: Callable[[], Result]) -> Result:
        """Call; an error says which file, which bytes and which entry it is about."""
        try:
            return function()
        except DcptoolError as error:
            checkpoint = self._checkpoint
            item = one.chunk.item if one.chunk else getattr(one.entry, "item", None)
            place = join(checkpoint.root, item.file) if item else checkpoint.path
            what = error.message.removeprefix(f"{place}: ")
            where = place_words(item, one.entry.fqn, (), checkpoint.root if item else checkpoint.path)
            raise error.saying(what if place in what else f"{where}: {what}") from error

    def _look(self, one: Asked) -> _Found:
        """Read the headers of an item and, if it is read ahead, its bytes; on any thread."""
        if not isinstance(one.entry, TensorEntry) or one.chunk is None:
            return _Found(data=memoryview(self._object_bytes(one.entry)))
        item = one.chunk.item
        if item is None:
            if all(0 in read_item.lengths for read_item in one.items):
                return _Found()
            raise LayoutError("the metadata has no place for it")
        storage, item = self._opened(item, max(4 * _nbytes(one.entry, one.chunk), _DECODED_NBYTES))
        source, chunk = self._checkpoint.source.over(storage), one.chunk._replace(item=item)
        try:
            payload = source.payload(one.entry, chunk, item)
        except UnsupportedError as error:
            return self._foreign(source, one.entry, chunk, storage, error)
        if payload.shape != chunk.sizes:
            raise ItemError(f"stored is {list(payload.shape)}, the metadata says {list(chunk.sizes)}: of another save")
        return _Found((payload, source.read_into), _read(payload.record, source.read_into) if one.held else None)

    def _opened(self, item: Extent, limit: int) -> tuple[Storage, Extent]:
        """Return where to read an item: from memory, if it is a small one of many in a file or was transformed."""
        storage = self._checkpoint.storage
        window = Window(storage)
        if item.transforms:
            data = self._undone(storage.read(*item[:3]), item.transforms, limit)
            window.keep(item.file, 0, memoryview(data))
            return window, Extent(item.file, 0, len(data))
        if self._checkpoint.format is not DCP or item.nbytes > _SMALL_NBYTES:
            return storage, item
        if item.span[1] <= self._checkpoint.files.get(item.file, 0):  # else what reads it says what is wrong
            window.load(item.file, *item.span)
        return window, item

    def _undone(self, stored: bytes, transforms: tuple[str, ...], limit: int) -> bytes:
        """Undo transforms, those of others than dcptool as torch's reader does."""
        if self._registry is None or all(name.partition("/")[0] == "stream.zstd" for name in transforms):
            try:
                return undo_transforms(stored, transforms, limit)
            except UnsupportedError as error:
                known = "Reader(path, registry) takes the ExtensionRegistry of torch that knows it."
                raise error.saying(error.message, next_step=known if "unknown" in error.message else None) from error
        undo = _StorageReaderTransforms(self._registry).transform_load_stream
        try:
            return bytes(undo(None, transforms, io.BytesIO(stored)).read(-1))
        except Exception as error:
            raise UnsupportedError(f"its transforms {', '.join(transforms)} could not be undone: {error}") from error

    def _foreign(
        self, source: Source, entry: TensorEntry, chunk: Chunk, storage: Storage, error: UnsupportedError
    ) -> _Found:
        """Return what torch makes of an item that dcptool does not look into, as torch's reader does."""
        item = chunk.item
        examined = source.examine(entry, chunk, item) if item else None
        if not item or not examined or not examined.foreign:
            raise error
        if not self._trust:
            raise error.saying(error.message, next_step="Reader(path, trust=True) lets torch decode such items.")
        for record in examined.records:
            _read(record, source.read_into)
        try:
            stored = io.BytesIO(storage.read(*item[:3]))
            return _Found(decoded=torch.load(stored, map_location="cpu", weights_only=True))
        except Exception as failed:
            said = str(failed).strip().partition("\n")[0]
            raise UnsupportedError(f"{error.message}, nor does torch: {said}") from failed

    def _object_bytes(self, entry: Entry) -> bytes:
        """Return an object as torch.save writes it, every record of it checked."""
        if not isinstance(entry, ObjectEntry) or entry.item is None:
            raise ItemError("the metadata has no place for it")
        if not self._checkpoint.format.items_apart:  # it shares a pickle with all else
            return self._extracted(entry)
        storage, item = self._opened(entry.item, _MAX_OBJECT_NBYTES)
        source = self._checkpoint.source.over(storage)
        for record in source.examine(entry, None, item).records:
            _read(record, source.read_into)
        return storage.read(*item[:3])

    def _extracted(self, entry: ObjectEntry) -> bytes:
        """Return one object of a `.pt` file as a file of its own; nothing of it is executed."""
        keys = Keys()
        root = rekey(ObjectGraph(*self._checkpoint.graph(entry)), keys)
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("archive/data.pkl", emit(root, 2))
            for key, record in keys.records.items():
                archive.writestr(f"archive/data/{key}", _read(record, self._checkpoint.source.read_into))
            for name, content in TAIL:
                archive.writestr(f"archive/{name}", content)
        return out.getvalue()

    def _hand_over(self, one: Asked, found: _Found) -> None:
        """Give the planner what was read, one thing after the other."""
        if one.chunk is None:
            for item in one.items:
                self._planner.load_bytes(item, io.BytesIO(found.data or b""))
            return
        for item in one.items:
            target = self._planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise LayoutError(f"the planner's tensor is {list(target.shape)}, for values of {list(item.lengths)}")
            if found.decoded is not None:
                target.copy_(_narrowed(found.decoded, item))
            elif found.payload and target.numel():
                found = self._fill(found, found.payload, item, target, len(one.items) == 1)
            self._planner.commit_tensor(item, target)

    def _fill(
        self, found: _Found, stored: tuple[Payload, ReadInto], item: ReadItem, target: torch.Tensor, only: bool
    ) -> _Found:
        """Fill a tensor, reading the record now if it was not read ahead; return what is known of the item then."""
        payload, read_into = stored
        data = found.data
        if data is None:
            memory = _memory(payload, target) if only else None
            data = np.empty(payload.record.nbytes, np.uint8).data if memory is None else memory
            # torch too reads a chunk whole of which a part is wanted; without that no CRC can be checked.
            self._read_together(payload.record, read_into, data)
            if memory is not None:
                return found
        _copy(payload, data, tuple(item.storage_offsets), target)
        return found._replace(data=data)

    def _read_together(self, record: Record, read_into: ReadInto, out: memoryview) -> None:
        """Read a record on all threads, and check it."""
        check = RecordCheck(record)
        piece = self._checkpoint.storage.piece_nbytes
        band = max(_BAND_NBYTES, piece)
        starts = iter(range(0, record.nbytes, band))  # one for all threads: each takes the next

        def work() -> None:
            for start in starts:
                _read_run(check, read_into, start, out[start : start + band], piece)

        more = min(self._threads, -(-record.nbytes // band)) - 1
        helpers = [self._executor.submit(work) for _ in range(more)] if self._executor else []
        try:
            work()
        finally:
            helpers = [helper for helper in helpers if not helper.cancel()]
            wait(helpers)
        for helper in helpers:
            helper.result()
        _require_sound(check)


def _read(record: Record, read_into: ReadInto) -> memoryview:
    """Return the bytes of a record, checked; on this thread.

    Raises:
        ItemError: they do not have the stored CRC32.
    """
    data = np.empty(record.nbytes, np.uint8).data
    check = RecordCheck(record)
    _read_run(check, read_into, 0, data, _SMALL_NBYTES)
    _require_sound(check)
    return data


def _read_run(check: RecordCheck, read_into: ReadInto, start: int, out: memoryview, piece_nbytes: int) -> None:
    """Read a run of a record that begins at `start`, in pieces that are still in the cache when they are checked."""
    for at in range(0, len(out), piece_nbytes):
        piece = out[at : at + piece_nbytes]
        read_into(check.record, start + at, piece)
        check.update(start + at, piece)


def _require_sound(check: RecordCheck) -> None:
    problem = check.problem()
    if problem:
        raise ItemError(problem)


def _narrowed(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    """Return the box of a tensor that is wanted; a tensor that is wanted whole is not touched."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if (start, length) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _memory(payload: Payload, target: torch.Tensor) -> memoryview | None:
    """Return the memory of a tensor, if what belongs there are the bytes of the record as they are."""
    itemsize = dtypes.lookup(payload.dtype).itemsize
    whole = (
        tuple(target.shape) == payload.shape
        and payload.storage_offset == 0
        and is_contiguous(payload.shape, payload.strides)
        and volume(payload.shape) * itemsize == payload.record.nbytes
        and not (payload.conj or payload.neg)
    )
    return _bytes_of(target) if whole and _is_plain(target, payload.dtype) else None


def _is_plain(target: torch.Tensor, dtype: str) -> bool:
    """Tell whether a tensor's memory holds its values in order, in that dtype, and can be written."""
    if target.dtype is not getattr(torch, dtype) or target.device.type != "cpu" or type(target) is not torch.Tensor:
        return False
    return target.is_contiguous() and not (target.is_conj() or target.is_neg())


def _bytes_of(target: torch.Tensor) -> memoryview:
    data: memoryview = target.view(-1).view(torch.uint8).numpy().data
    return data


def _copy(payload: Payload, data: memoryview, start: Ints, target: torch.Tensor) -> None:
    """Copy a box of a payload from its record's bytes, through memory of its own where dtype or device are others."""

    def from_memory(_: Record, byte_offset: int, out: memoryview) -> None:
        out[:] = data[byte_offset : byte_offset + len(out)]

    plain = _is_plain(target, payload.dtype)
    out = target if plain else torch.empty(target.shape, dtype=getattr(torch, payload.dtype))
    array = np.frombuffer(_bytes_of(out), dtypes.numpy_dtype(payload.dtype)).reshape(tuple(out.shape))
    fill(payload, from_memory, start, array, lambda byte_offset, read: None)
    if not plain:
        target.copy_(out)
