"""What a checkpoint has under one name, a tensor or an object, and how a format's reader gets at its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.extents import Chunk, Examined, Extent, Ints, Payload, Record
from dcptool.checkpoint.pieces import TensorPiece
from dcptool.checkpoint.regions import volume
from dcptool.errors import ItemError
from dcptool.storage import Storage


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        fqn: fully qualified name, the key in the flat state dict.
        dtype: torch's name without prefix.
        shape: of the whole tensor, in elements.
        path: nested position the fqn was flattened from; None where the format does not record it.
        chunks: the boxes it is stored as.
        replicas: further stored copies of some of these boxes.
        kind: what it is, if opening tells that it is made of other tensors; see `subclasses`.
        inner: its name in the tensor that it is an inner one of, "" if it is none.
    """

    fqn: str
    dtype: str
    shape: Ints
    path: tuple[str | int, ...] | None
    chunks: Chunks
    replicas: Sequence[Chunk] = ()
    kind: str = ""
    inner: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor's values; 0 for a dtype this dcptool does not know."""
        dtype = dtypes.BY_NAME.get(self.dtype)
        return volume(self.shape) * dtype.itemsize if dtype else 0


class ObjectEntry(NamedTuple):
    """One entry of a checkpoint that is no tensor, or none whose values are found here.

    Attributes:
        fqn, path: as of a tensor.
        item: what holds its pickle.
        foreign: what it is, if it is a tensor of a form or class that is not looked into.
        replicas: what other ranks stored under the name, each for itself.
    """

    fqn: str
    path: tuple[str | int, ...] | None
    item: Extent | None
    foreign: str = ""
    replicas: tuple[Extent, ...] = ()


Entry = TensorEntry | ObjectEntry


class StoredPiece(NamedTuple):
    """What an item holds of a tensor made of tensors.

    Attributes:
        piece: what it is.
        root: its graph of stand-ins, freshly loaded.
        storages: the records of the storages in it, by key.
        unsafe: what its pickle would run, by name.
    """

    piece: TensorPiece
    root: Any
    storages: dict[str, Record]
    unsafe: tuple[str, ...] = ()


class Source(Protocol):
    """What a format's reader gives a checkpoint to get at its bytes.

    Attributes:
        unsafe: fqn → what the pickle of an object that was read so far, or of a tensor made of tensors, would run, by
            name; see `pickles.calls`.
    """

    unsafe: dict[str, tuple[str, ...]]

    def payload(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> Payload:
        """Find the payload of one chunk, stored as `item`, by reading the item's own small header."""

    def examine(self, entry: Entry, chunk: Chunk | None, item: Extent) -> Examined:
        """Read all headers of an item and check that they agree with one another.

        Args:
            entry: what the item belongs to.
            chunk: the chunk, None for an object.
            item: its place.

        Raises:
            ItemError: they do not agree, or the item is not what such an item should be.
        """

    def edge_problem(self, item: Extent) -> str:
        """Say what a few bytes show to be wrong with the item of a chunk, or with the file around it; "" if nothing."""

    def graph(self, entry: ObjectEntry) -> tuple[Any, dict[str, Record]]:
        """Return an object's graph of stand-ins, freshly loaded, and the records of the storages in it, by key."""

    def stored(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> StoredPiece | None:
        """Return what an item holds of a tensor made of tensors; None if it holds a plain tensor."""

    def over(self, storage: Storage) -> Source:
        """Return the same source reading from another storage of the same files."""

    def value(self, entry: ObjectEntry) -> Any:
        """Decode an object for display; see `pickles.plain`."""

    def read_into(self, record: Record, byte_offset: int, out: memoryview) -> None:
        """Fill `out` with a record's bytes from `byte_offset` (inside the record) on."""


def require_box(payload: Payload, entry: TensorEntry, chunk: Chunk) -> None:
    """Check that a payload is the box of the tensor that the metadata says.

    Raises:
        ItemError: its dtype or shape is another.
    """
    if payload.dtype != entry.dtype or payload.shape != chunk.sizes:
        raise ItemError(not_the_box(entry, chunk, payload.dtype, payload.shape))


def not_the_box(entry: TensorEntry, chunk: Chunk, dtype: str, shape: Ints) -> str:
    """Say that what is stored is not the box of a tensor that the metadata says."""
    return (
        f"it should be {entry.dtype} {list(chunk.sizes)}, stored is {dtype} {list(shape)}; "
        "metadata and data are not of the same save"
    )
