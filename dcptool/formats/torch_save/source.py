"""Finds and reads the tensors and objects that lie in one `.pt` file or in several."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dcptool.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Examined, Extent, Ints, Payload, Record
from dcptool.errors import ItemError
from dcptool.formats.torch_save import items as torch_items
from dcptool.formats.torch_save.stream import Archive
from dcptool.pickles import inert, plain
from dcptool.pickles.emit import emit
from dcptool.pickles.tensors import TensorView
from dcptool.storage import Storage


class TorchSaveSource:
    """Finds and reads the tensors and objects of files of torch.save: the item of each is the whole file it is in.

    Args:
        storage: the folder the files are in.
        archives: the files by name.

    Attributes:
        views: for each chunk, by fqn, offsets in the whole tensor and file, the view of a storage that it is.
        values: the object of each fqn, as stand-ins.
    """

    def __init__(self, storage: Storage, archives: Mapping[str, Archive]) -> None:
        self._storage, self._archives = storage, archives
        self.views: dict[tuple[str, Ints, str], TensorView] = {}
        self.values: dict[str, Any] = {}
        self.unsafe: dict[str, tuple[str, ...]] = {}  # a file's pickle is one, looked at when it is opened
        self._records: dict[str, tuple[Record, ...]] = {}
        self._storages: dict[str, dict[str, Record]] = {}

    def payload(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> Payload:
        view = self.views.get((entry.fqn, chunk.offsets, item.file))
        if view is None:
            raise ItemError("no view of a storage is known for it")
        return torch_items.payload_of(view, self._archives[item.file], item)

    def examine(self, entry: Entry, chunk: Chunk | None, item: Extent) -> Examined:
        is_tensor = chunk is not None and isinstance(entry, TensorEntry)
        payload = self.payload(entry, chunk, item) if is_tensor else None  # type: ignore[arg-type]
        foreign = entry.foreign if isinstance(entry, ObjectEntry) else ""
        if item.file not in self._records:
            self._records[item.file] = self._archives[item.file].records(item)
        return Examined(payload, self._records[item.file], foreign=foreign)

    def edge_problem(self, item: Extent) -> str:
        return ""  # all headers were read when it was opened

    def graph(self, entry: ObjectEntry) -> tuple[Any, dict[str, Record]]:
        item = _item_of(entry)
        if item.file not in self._storages:
            self._storages[item.file] = torch_items.storages(self._archives[item.file], item)
        root = inert.load(emit(self.values[entry.fqn], 4))  # a copy: who asks for it may change it
        return root, self._storages[item.file]

    def over(self, storage: Storage) -> TorchSaveSource:
        other = copy.copy(self)
        other._storage = storage
        return other

    def value(self, entry: ObjectEntry) -> Any:
        if entry.foreign:
            return plain.Opaque(entry.foreign.removeprefix("a "))
        return torch_items.decoded(self.values[entry.fqn], self._archives[_item_of(entry).file])

    def read_into(self, record: Record, byte_offset: int, out: memoryview) -> None:
        self._storage.read_into(record.item.file, record.byte_offset + byte_offset, out)


def _item_of(entry: ObjectEntry) -> Extent:
    if entry.item is None:
        raise ItemError("it has no place in a file")
    return entry.item
