"""Compare objects of two checkpoints without executing their pickles: by value where both are plain, else as graphs.

Two items of the same bytes are equal without being looked into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint.entries import ObjectEntry
from dcptool.checkpoint.extents import Extent, Ints, Payload, Record
from dcptool.checkpoint.fill import fill
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.numbers import array_dtype
from dcptool.checkpoint.regions import cut_box, volume
from dcptool.errors import ItemError
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.ops.diff.graphs import Contents, Unequal, brief, first_unequal
from dcptool.ops.diff.sides import Access, UnreadableError, unreadable
from dcptool.pickles import plain
from dcptool.pickles.tensors import TensorView
from dcptool.storage import Storage

if TYPE_CHECKING:
    import numpy as np

MAX_PICKLE_NBYTES = 32 << 20
"""A pickle longer than this is compared by its bytes alone."""
_PIECE_NBYTES = 1 << 20


class ObjectOutcome(NamedTuple):
    """How two objects differ, None if they do not; and what of them cannot be read."""

    unequal: Unequal | None
    unreadable: tuple[Finding, ...]


def compare_objects(a: Access, b: Access, entry_a: ObjectEntry, entry_b: ObjectEntry) -> ObjectOutcome:
    """Compare one object of two checkpoints."""
    one, other = _Stored(a, entry_a), _Stored(b, entry_b)
    try:
        with unreadable(a, entry_a):  # what both together are too large for
            return ObjectOutcome(_first_unequal(one, other), ())
    except UnreadableError as error:
        return ObjectOutcome(None, (error.finding(),))


def _first_unequal(a: _Stored, b: _Stored) -> Unequal | None:
    contents = Contents(
        lambda x, y: _same_payloads(a, b, a.payload(x), b.payload(y)),
        lambda x, y: _same_storages(a, b, x, y),
    )
    if _same_items(a, b):
        return None
    values = [a.value, b.value]
    if all(map(_is_conclusive, values)):
        return _whole(values, first_unequal(a.value, b.value, contents))
    return _whole(values, first_unequal(a.graph[0], b.graph[0], contents))


def _whole(values: list[Any], unequal: Unequal | None) -> Unequal | None:
    """Show short plain values as a whole: the place inside them tells less."""
    if unequal is None or not unequal.where or not all(map(_is_conclusive, values)):
        return unequal
    shown = [brief(value) for value in values]
    is_short = all("…" not in text and "..." not in text for text in shown)
    return Unequal(unequal.where, *shown) if is_short and shown[0] != shown[1] else unequal


def _is_conclusive(value: Any) -> bool:
    """Tell whether a decoded value is plain and holds all there is to compare."""
    if isinstance(value, dict):
        return all(_is_conclusive(key) and _is_conclusive(part) for key, part in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_conclusive, value))
    if isinstance(value, plain.Array):
        return value.values is not None
    if isinstance(value, plain.Named):  # a very long int is one that shows its length alone
        return value.class_name != "int"
    return not isinstance(value, plain.Opaque | _Unknown)


class _Unknown:
    """In place of a value that is too large to be decoded."""


class _Stored:
    """An object of one side, and ways to get at it; what fails raises `UnreadableError`."""

    def __init__(self, access: Access, entry: ObjectEntry) -> None:
        self.access, self.entry = access, entry
        self._source, self._storage = access.checkpoint.source, access.checkpoint.storage

    @property
    def item(self) -> Extent:
        """Where it is stored."""
        if self.entry.item is None:
            raise UnreadableError("the metadata has no place for it", self.access, self.entry)
        return self.entry.item

    @cached_property
    def value(self) -> Any:
        """The decoded value; an `_Unknown` where it is too large, or damaged, which its graph will show."""
        try:
            with self._reading():
                return self.access.checkpoint.value(self.entry.fqn)
        except UnreadableError:
            return _Unknown()

    @cached_property
    def graph(self) -> tuple[Any, dict[str, Record]]:
        """The loaded pickle, and the records of the storages in it."""
        with self._reading():
            if self.access.checkpoint.format.items_apart and not self.item.transforms:
                pickled = TorchZip(partial(_read, self._storage, self.item), self.item.nbytes).member("data.pkl")
                if pickled.nbytes > MAX_PICKLE_NBYTES:
                    raise ItemError(f"its pickle of {pickled.nbytes:,} bytes is too large to compare")
            return self._source.graph(self.entry)

    def payload(self, view: TensorView) -> Payload:
        """Return where a tensor in the graph is."""
        record = self.storage(view.storage)
        return Payload(record, view.dtype, view.shape, view.strides, view.storage_offset, view.conj, view.neg)

    def storage(self, key: Any) -> Record:
        """Return the bytes of a storage that the graph names by this key."""
        record = self.graph[1].get(str(key))
        if record is None:
            raise UnreadableError(f"its zip has no storage {key!r}", self.access, self.entry)
        return record

    def fill(self, payload: Payload, offsets: Ints, out: np.ndarray[Any, Any]) -> None:
        """Fill an array with a box of a payload."""
        with self._reading():
            fill(payload, self._source.read_into, offsets, out)

    def bytes_at(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the item as stored."""
        with self._reading():
            return _read(self._storage, self.item, start, nbytes)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name errors; let one thread at a time at what decompresses an item and keeps the result."""
        lock = self.access.lock if self.item.transforms else nullcontext()
        with unreadable(self.access, self.entry), lock:
            yield


def _read(storage: Storage, item: Extent, start: int, nbytes: int) -> bytes:
    return storage.read(item.file, item.byte_offset + start, nbytes)


def _same_items(a: _Stored, b: _Stored) -> bool:
    """Tell whether both are the same bytes in a DCP file; of a `.pt` file an item is all of it."""
    if not (a.access.checkpoint.format.items_apart and b.access.checkpoint.format.items_apart):
        return False
    if (a.item.nbytes, a.item.transforms) != (b.item.nbytes, b.item.transforms):
        return False
    for start in range(0, a.item.nbytes, _PIECE_NBYTES):
        nbytes = min(_PIECE_NBYTES, a.item.nbytes - start)
        if a.bytes_at(start, nbytes) != b.bytes_at(start, nbytes):
            return False
    return True


def _same_payloads(a: _Stored, b: _Stored, one: Payload, other: Payload) -> bool:
    """Tell whether two tensors of one dtype and shape hold the same bits."""
    import numpy as np

    dtype = array_dtype(one.dtype)
    whole = ((0,) * len(one.shape), one.shape)
    for offsets, sizes in cut_box(whole, _PIECE_NBYTES // dtype.itemsize):
        arrays = np.empty(sizes, dtype), np.empty(sizes, dtype)
        a.fill(one, offsets, arrays[0])
        b.fill(other, offsets, arrays[1])
        if arrays[0].tobytes() != arrays[1].tobytes():
            return False
    return True


def _same_storages(a: _Stored, b: _Stored, one: Any, other: Any) -> bool:
    """Tell whether two persistent ids, ("storage", class, key, location, elements), are storages of the same bytes."""
    if not all(isinstance(value, tuple) and len(value) >= 5 for value in (one, other)):
        return bool(one == other)
    if (repr(one[1]), one[4]) != (repr(other[1]), other[4]):
        return False
    records = a.storage(one[2]), b.storage(other[2])
    if records[0].nbytes != records[1].nbytes:
        return False
    flat = [Payload(record, "uint8", (record.nbytes,), (1,)) for record in records]
    return volume(flat[0].shape) == 0 or _same_payloads(a, b, *flat)
