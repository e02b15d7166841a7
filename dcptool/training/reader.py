"""A storage reader for `dcp.load` that executes no pickle of the metadata and checks every CRC32 while it loads.

Knows torch's protocol of a load: plans, read items, targets. How items are stored the open checkpoint knows.

Source: torch 2.13, distributed/checkpoint/storage.py (StorageReader), filesystem.py (FileSystemReader).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent, Ints, Payload, Record, place_words
from dcptool.checkpoint.fill import RecordCheck, fill
from dcptool.checkpoint.regions import is_contiguous, volume
from dcptool.copying.pool import MAX_THREADS, Pool
from dcptool.errors import DcptoolError, ItemError, LayoutError, UnsupportedError
from dcptool.formats.dcp.items import undo_transforms
from dcptool.formats.detect import open_checkpoint
from dcptool.storage import join
from dcptool.storage.window import Window

_PIECE_NBYTES = 1 << 20
_SMALL_NBYTES = 1 << 20
"""An item up to this length is read at once, its headers and its bytes together."""
_MAX_OBJECT_NBYTES = 1 << 30
"""Most bytes of a compressed object once it is not."""

_Place = tuple[str, Ints | None]
"""Where a read item finds its stored item: fqn, and the chunk's offsets; None for an object."""


class Reader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint for `torch.distributed.checkpoint.load`.

    The values are those `FileSystemReader` gives. Besides, `.metadata` is read without executing a pickle, rank-local
    metadata too; the CRC32 of every record of which anything is loaded is checked, and a read that leaves the
    checkpoint's folder is refused. Objects are unpickled by torch's planner, as always.

    Args:
        path: local path or fsspec URL of the checkpoint, or an open one.
        threads: how many items are read at the same time; None for this rank's share of the processors.

    Example:
        >>> dcp.load(state_dict, storage_reader=Reader("ckpt/step_500"))
    """

    def __init__(self, path: str | os.PathLike[str] | Checkpoint, *, threads: int | None = None) -> None:
        super().__init__()
        self._checkpoint = path if isinstance(path, Checkpoint) else None
        self._path = path.path if isinstance(path, Checkpoint) else os.fspath(path)
        self._threads = threads or min(MAX_THREADS, max(1, (os.cpu_count() or 1) // _local_ranks()))
        self._chunks: dict[_Place, int] = {}

    @property
    def checkpoint_id(self) -> str:
        """The path or URL that is read."""
        return self._path

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, opened when it is first needed.

        Raises:
            DcptoolError: it cannot be opened.
        """
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self._path)
        return self._checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read; read from another place next, if one is given."""
        if checkpoint_id is not None:
            self._path, self._checkpoint = os.fspath(checkpoint_id), None
        self._chunks = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this could be the place of a checkpoint: any path, any URL."""
        return bool(os.fspath(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """Return torch's metadata, made from what dcptool reads without executing it."""
        entries = self.checkpoint.entries
        places = {}
        for fqn, entry in entries.items():
            offsets = entry.chunks.boxes() if isinstance(entry, TensorEntry) else [(None, None)]
            places.update({_index(fqn, start): (fqn, start) for start, _ in offsets})
        return Metadata(
            {fqn: _storage_metadata(entry) for fqn, entry in entries.items()},
            {fqn: entry.path for fqn, entry in entries.items() if entry.path is not None} or None,
            places,
            StorageMeta(checkpoint_id=self._path, save_id=self.checkpoint.save_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Find the chunks of the checkpoint by their offsets; of several at one place one that is not empty."""
        self._chunks = {}
        for fqn, entry in self.checkpoint.tensors.items():
            for index, (offsets, sizes) in enumerate(entry.chunks.boxes()):
                if volume(sizes) or (fqn, offsets) not in self._chunks:
                    self._chunks[fqn, offsets] = index

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants into its tensors.

        Raises:
            ItemError: a stored item is damaged; the message names file, fqn and byte range.
            StorageError: a file is missing, unreadable or too short.
        """
        items: dict[_Place, list[ReadItem]] = {}
        for read_item in plan.items:
            offset = read_item.storage_index.offset if read_item.type is LoadItemType.TENSOR else None
            place = read_item.storage_index.fqn, None if offset is None else tuple(offset)
            items.setdefault(place, []).append(read_item)
        targets = []
        for (fqn, offsets), wanted in items.items():
            if offsets is None:
                self._load_object(fqn, wanted, planner)
            else:
                found = [(item, planner.resolve_tensor(item).detach()) for item in wanted]
                targets.append(((fqn, offsets), found))
        try:
            _for_all(targets, self._load_chunk, self._threads)
        finally:
            self.checkpoint.storage.close()
        for _, found in targets:
            for read_item, target in found:
                planner.commit_tensor(read_item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load_object(self, fqn: str, wanted: Iterable[ReadItem], planner: LoadPlanner) -> None:
        entry = self.checkpoint[fqn]
        item = getattr(entry, "item", None)
        if item is None:
            raise ItemError(f"{self._path}: {fqn!r}: the metadata has no place for it")
        data = self._named(entry, item, _item_bytes, self.checkpoint, entry, item)
        for read_item in wanted:
            planner.load_bytes(read_item, io.BytesIO(data))

    def _load_chunk(self, item: tuple[_Place, list[tuple[ReadItem, torch.Tensor]]]) -> None:
        (fqn, offsets), found = item
        entry = self.checkpoint.tensors[fqn]
        index = self._chunks.get((fqn, offsets))
        if index is None:
            raise LayoutError(f"{self._path}: {fqn!r}: the metadata has no chunk at {list(offsets or ())}")
        chunk = entry.chunks[index]
        boxes = [(tuple(read_item.storage_offsets), target) for read_item, target in found]
        self._named(entry, chunk.item, _load_boxes, self.checkpoint, entry, chunk, boxes)

    def _named(self, entry: Entry, item: Extent | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call; an error says which file, which bytes and which entry it is about."""
        try:
            return function(*arguments)
        except DcptoolError as error:
            place = join(self.checkpoint.root, item.file) if item else self._path
            what = error.message.removeprefix(f"{place}: ")
            where = place_words(item, entry.fqn, (), self.checkpoint.root if item else self._path)
            raise error.saying(what if place in what else f"{where}: {what}") from error


def _local_ranks() -> int:
    """Return how many ranks run on this machine, as torchrun tells."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _index(fqn: str, offsets: Ints | None) -> MetadataIndex:
    return MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))


def _storage_metadata(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(entry, TensorEntry):
        return BytesStorageMetadata()
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise UnsupportedError(f"{entry.fqn!r}: torch {torch.__version__} has no dtype {entry.dtype}")
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)) for start, sizes in entry.chunks.boxes()]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks)


def _for_all(items: list[Any], function: Callable[[Any], None], threads: int) -> None:
    """Call for each item, on several threads; the first error stops what has not begun."""
    if threads == 1 or len(items) < 2:
        for item in items:
            function(item)
        return
    with Pool(threads) as pool:
        for _ in pool.run(function, items):
            pass


def _load_boxes(
    checkpoint: Checkpoint, entry: TensorEntry, chunk: Chunk, boxes: list[tuple[Ints, torch.Tensor]]
) -> None:
    """Copy boxes of one stored chunk into tensors: (first element of the box in the chunk, target of its shape)."""
    boxes = [(start, target) for start, target in boxes if target.numel()]
    if not boxes:
        return
    source = checkpoint.source
    if chunk.item and chunk.item.nbytes <= _SMALL_NBYTES and not chunk.item.transforms:
        window = Window(checkpoint.storage)
        window.load(chunk.item.file, *chunk.item.span)
        source = source.over(window)
    if chunk.item is None:
        raise LayoutError("the metadata has no place for it")
    payload = source.payload(entry, chunk, chunk.item)
    if payload.shape != chunk.sizes:
        raise ItemError(f"stored is {list(payload.shape)}, the metadata says {list(chunk.sizes)}: of another save")
    if len(boxes) == 1 and _is_whole(payload, boxes[0][1]):
        _fill_target(payload, source.read_into, boxes[0][0], boxes[0][1])
        return
    # torch too reads a chunk whole of which a part is wanted; without that no CRC can be checked.
    record = _read_record(payload.record, source.read_into)

    def from_memory(_: Record, byte_offset: int, out: memoryview) -> None:
        out[:] = record[byte_offset : byte_offset + len(out)]

    for start, target in boxes:
        _fill_target(payload, from_memory, start, target, lambda byte_offset, data: None)


def _is_whole(payload: Payload, target: torch.Tensor) -> bool:
    """Tell whether a target takes all of a record in its order, so that `fill` checks its CRC32."""
    itemsize = dtypes.lookup(payload.dtype).itemsize
    return (
        tuple(target.shape) == payload.shape
        and payload.storage_offset == 0
        and is_contiguous(payload.shape, payload.strides)
        and volume(payload.shape) * itemsize == payload.record.nbytes
    )


def _fill_target(
    payload: Payload,
    read_into: Callable[[Record, int, memoryview], None],
    start: Ints,
    target: torch.Tensor,
    update: Callable[[int, memoryview], None] | None = None,
) -> None:
    """Fill a tensor with a box of a payload, through memory of its own where its dtype or device are others."""
    dtype = getattr(torch, payload.dtype)
    direct = target.dtype is dtype and target.device.type == "cpu" and target.is_contiguous()
    direct = direct and not (target.is_conj() or target.is_neg()) and type(target) is torch.Tensor
    out = target if direct else torch.empty(target.shape, dtype=dtype)
    flat = out.view(-1).view(torch.uint8).numpy()
    array = flat.view(dtypes.numpy_dtype(payload.dtype)).reshape(tuple(out.shape))
    fill(payload, read_into, start, array, update)
    if not direct:
        target.copy_(out)


def _read_record(record: Record, read_into: Callable[[Record, int, memoryview], None]) -> memoryview:
    """Return the bytes of a record, checked.

    Raises:
        ItemError: they do not have the stored CRC32.
    """
    data = np.empty(record.nbytes, np.uint8).data
    check = RecordCheck(record)
    for start in range(0, record.nbytes, _PIECE_NBYTES):
        piece = data[start : start + _PIECE_NBYTES]
        read_into(record, start, piece)
        check.update(start, piece)
    problem = check.problem()
    if problem:
        raise ItemError(problem)
    return data


def _item_bytes(checkpoint: Checkpoint, entry: Entry, item: Extent) -> bytes:
    """Return the bytes of an object's item, every record of it checked, with its transforms undone."""
    source = checkpoint.source.over(Window(checkpoint.storage))
    for record in source.examine(entry, None, item).records:
        _read_record(record, source.read_into)
    stored = checkpoint.storage.read(item.file, item.byte_offset, item.nbytes)
    return undo_transforms(stored, item.transforms, _MAX_OBJECT_NBYTES) if item.transforms else stored
