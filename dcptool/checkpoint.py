"""A checkpoint of any format: a mapping from fqn to tensors, cut into chunks, and objects. Knows no format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dcptool import dtypes
from dcptool.chunks import Chunks, ChunkTable, FileUse
from dcptool.errors import DcptoolError, ItemError, LayoutError, UnsupportedError
from dcptool.fill import fill, numpy_empty
from dcptool.findings import Finding
from dcptool.model import Chunk, Examined, Extent, Ints, Payload, Record
from dcptool.regions import Box, first_gap, index_in, intersect, volume
from dcptool.storage import Storage, join

if TYPE_CHECKING:
    import numpy as np
    import torch

MAX_COMPARED = 10_000
"""Names that a misspelt one is compared with."""


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        fqn: fully qualified name, the key in the flat state dict.
        dtype: torch's name without prefix.
        shape: of the whole tensor, in elements.
        path: nested position the fqn was flattened from; None where the format does not record it.
        chunks: the boxes it is stored as.
        replicas: further stored copies of some of these boxes.
    """

    fqn: str
    dtype: str
    shape: Ints
    path: tuple[str | int, ...] | None
    chunks: Chunks
    replicas: Sequence[Chunk] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor's values; 0 for a dtype this dcptool does not know."""
        dtype = dtypes.BY_NAME.get(self.dtype)
        return volume(self.shape) * dtype.itemsize if dtype else 0


class ObjectEntry(NamedTuple):
    """One entry of a checkpoint that is no tensor: fqn, nested path, and the item that holds its pickle."""

    fqn: str
    path: tuple[str | int, ...] | None
    item: Extent | None


Entry = TensorEntry | ObjectEntry


class Source(Protocol):
    """What a format's reader gives a checkpoint to get at its bytes."""

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

    def over(self, storage: Storage) -> Source:
        """Return the same source reading from another storage of the same files."""

    def value(self, entry: ObjectEntry) -> Any:
        """Decode an object for display; see `pickles.plain`."""

    def read_into(self, record: Record, byte_offset: int, out: memoryview) -> None:
        """Fill `out` with a record's bytes from `byte_offset` (inside the record) on."""


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, Entry]):
    """What one checkpoint holds; opening it reads the metadata only.

    Attributes:
        root: path or URL of the folder the files are in.
        name: what was opened inside `root`: "" for the folder, else a file's name.
        format: "dcp", "torch_save" or "safetensors".
        flavour: which software's variant of the format, such as "torch DCP".
        evidence: what that is concluded from, one short phrase each.
        entries: fqn → entry, in the order of the metadata.
        files: name → size in bytes of every file next to the metadata, referenced or not.
        table: the columns behind all chunks.
        problems: what is wrong with the metadata itself; the rest of it is usable. Missing files show in `summarize`.
        extra: what the format's records hold beyond dcptool's model, by attribute name.
        save_id: the writer's identifier of the save, None where there is none.
        requires_grad: fqns of tensors that were saved as trained parameters, where the format tells.
    """

    root: str
    name: str
    format: str
    flavour: str
    evidence: tuple[str, ...]
    entries: Mapping[str, Entry]
    files: Mapping[str, int]
    table: ChunkTable
    storage: Storage
    source: Source
    problems: tuple[Finding, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    save_id: str | None = None
    requires_grad: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """Path or URL of the checkpoint as a user would type it."""
        return join(self.root, self.name)

    def __getitem__(self, fqn: str) -> Entry:
        return self.entries[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r}: {self.flavour}, {len(self)} entries>"

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """The tensors alone, in order."""
        return {fqn: entry for fqn, entry in self.entries.items() if isinstance(entry, TensorEntry)}

    @cached_property
    def objects(self) -> Mapping[str, ObjectEntry]:
        """The objects alone, in order."""
        return {fqn: entry for fqn, entry in self.entries.items() if isinstance(entry, ObjectEntry)}

    @cached_property
    def usage(self) -> Mapping[str, FileUse]:
        """For each file the metadata names, how its items use it, in order of first use."""
        usage = self.table.usage()
        rest = [chunk.item for tensor in self.tensors.values() for chunk in tensor.replicas]
        for item in [*rest, *(entry.item for entry in self.objects.values())]:
            if item:
                use = usage.get(item.file, FileUse(0, 0, 0))
                end = max(use.end, item.byte_offset + item.nbytes)
                usage[item.file] = FileUse(use.items + 1, use.nbytes + item.nbytes, end)
        return usage

    def read(
        self, fqn: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Read a tensor, or a box of it, into a new numpy array.

        Reads the wanted bytes only, from as many chunks as they lie in. The CRC32 of every record that is read
        whole is checked.

        Args:
            fqn: name of a tensor.
            offsets: first element per dimension; default: the tensor's beginning.
            sizes: elements per dimension; default: up to the tensor's end.

        Returns:
            A C-contiguous array of that box. bfloat16 and float8 types are ml_dtypes' types of that name,
            complex32 a structure of two float16 (`real`, `imag`), float4_e2m1fn_x2 uint8 with two values a byte.

        Raises:
            LayoutError: no such tensor, a box outside it, or a part of the box that no chunk holds.
            ItemError: a stored chunk is damaged or is not what the metadata says.
            StorageError: a file is missing, unreadable or too short.
            UnsupportedError: a dtype without array form, or a stream transform whose codec is not installed.
        """
        entry = self._tensor(fqn)
        region = self._region(entry, offsets, sizes)
        parts = list(self._overlapping(entry, region))
        if sum(volume(common[1]) for _, common in parts) < volume(region[1]) or len(parts) > 1:
            gap = first_gap(region, [common for _, common in parts])
            if gap:
                raise LayoutError(
                    f"{self.path}: {fqn!r}: no chunk holds the {list(gap[1])} elements at {list(gap[0])}; "
                    "what the checkpoint does not hold cannot be read"
                )
        out = self._named(entry, None, numpy_empty, region[1], entry.dtype)
        for chunk, common in parts:
            payload = self.payload(entry, chunk)
            here = tuple(a - b for a, b in zip(common[0], chunk.offsets, strict=True))
            self._named(entry, chunk, fill, payload, self.source.read_into, here, out[index_in(region, common)])
        result: np.ndarray[Any, Any] = out
        return result

    def read_torch(
        self, fqn: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Read a tensor, or a box of it, into a new CPU torch.Tensor of its own dtype; arguments and errors as `read`.

        Raises:
            UnsupportedError: torch is not installed, or has no such dtype.
        """
        import numpy as np

        try:
            import torch
        except ImportError:
            raise UnsupportedError("read_torch needs torch: pip install 'dcptool[torch]'") from None
        name = self._tensor(fqn).dtype
        dtype = getattr(torch, name, None)
        if dtype is None:
            raise UnsupportedError(f"{self.path}: {fqn!r}: torch {torch.__version__} has no dtype {name}; use read()")
        array = self.read(fqn, offsets, sizes)
        if array.size == 0:
            return torch.empty(array.shape, dtype=dtype)
        return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)

    def value(self, fqn: str) -> Any:
        """Decode an object without executing its pickle; see `pickles.plain` for what comes back.

        Raises:
            LayoutError: no such object.
            ItemError, StorageError, MetadataError: it cannot be read.
        """
        entry = self.entries.get(fqn)
        if isinstance(entry, TensorEntry):
            raise LayoutError(f"{self.path}: {fqn!r} is a tensor, not an object; use read()")
        if entry is None:
            raise LayoutError(f"{self.path} has no object {fqn!r}{did_you_mean(fqn, self.entries)}")
        return self._named(entry, None, self.source.value, entry)

    def graph(self, entry: ObjectEntry) -> tuple[Any, dict[str, Record]]:
        """Return an object's unpickled form, inert, and the records of the storages in it.

        Raises:
            ItemError, StorageError, MetadataError, UnsupportedError: it cannot be read.
        """
        found: tuple[Any, dict[str, Record]] = self._named(entry, None, self.source.graph, entry)
        return found

    def payload(self, entry: TensorEntry, chunk: Chunk) -> Payload:
        """Find the payload of one chunk and check that it is the box the metadata says.

        Raises:
            LayoutError: the metadata names no place for it.
            ItemError: dtype or shape stored there differ, or it cannot be understood.
        """
        if chunk.item is None:
            raise LayoutError(
                f"{self.path}: {entry.fqn!r}: the metadata has no place for the chunk at {list(chunk.offsets)}"
            )
        payload: Payload = self._named(entry, chunk, self.source.payload, entry, chunk, chunk.item)
        self._named(entry, chunk, require_box, payload, entry, chunk)
        return payload

    def _tensor(self, fqn: str) -> TensorEntry:
        entry = self.entries.get(fqn)
        if isinstance(entry, TensorEntry):
            return entry
        if entry is not None:
            raise LayoutError(f"{self.path}: {fqn!r} is an object, not a tensor; use value()")
        raise LayoutError(f"{self.path} has no tensor {fqn!r}{did_you_mean(fqn, self.entries)}")

    def _region(self, entry: TensorEntry, offsets: Sequence[int] | None, sizes: Sequence[int] | None) -> Box:
        shape = entry.shape
        start = tuple(offsets) if offsets is not None else (0,) * len(shape)
        if len(start) != len(shape):
            raise LayoutError(f"{entry.fqn!r} has {len(shape)} dimensions, offsets {list(start)} have {len(start)}")
        size = tuple(sizes) if sizes is not None else tuple(n - a for n, a in zip(shape, start, strict=True))
        if len(size) != len(shape):
            raise LayoutError(f"{entry.fqn!r} has {len(shape)} dimensions, sizes {list(size)} have {len(size)}")
        if any(a < 0 or b < 0 or a + b > n for a, b, n in zip(start, size, shape, strict=True)):
            raise LayoutError(
                f"{entry.fqn!r} has shape {list(shape)}; offsets {list(start)}, sizes {list(size)} leave it"
            )
        return start, size

    @staticmethod
    def _overlapping(entry: TensorEntry, region: Box) -> Iterator[tuple[Chunk, Box]]:
        for index, box in enumerate(entry.chunks.boxes()):
            common = intersect(region, box)
            if common:
                yield entry.chunks[index], common

    def _named(self, entry: Entry, chunk: Chunk | None, function: Any, *args: Any) -> Any:
        """Call, adding the file, the fqn and the chunk to what an error says."""
        try:
            return function(*args)
        except DcptoolError as error:
            item = chunk.item if chunk else getattr(entry, "item", None)
            place = join(self.root, item.file) if item else self.path
            where = f", bytes {item.byte_offset}–{item.byte_offset + item.nbytes}" if item else ""
            at = f" chunk at {list(chunk.offsets)}" if chunk and chunk.offsets else ""
            what = str(error).removeprefix(f"{place}: ")
            raise type(error)(f"{place}{where}: {entry.fqn!r}{at}: {what}") from error


def require_box(payload: Payload, entry: TensorEntry, chunk: Chunk) -> None:
    """Check that a payload is the box of the tensor that the metadata says.

    Raises:
        ItemError: its dtype or shape is another.
    """
    if payload.dtype != entry.dtype or payload.shape != chunk.sizes:
        raise ItemError(
            f"it should be {entry.dtype} {list(chunk.sizes)}, stored is {payload.dtype} {list(payload.shape)}; "
            "metadata and data are not of the same save"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on a name that is not there: the known one most like it; "" if none is.

    >>> did_you_mean("modle", ["model", "optim"]), did_you_mean("modle", ["optim"])
    ("; did you mean 'model'?", '')
    """
    close = closest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like one that is not there, "" if none is like it."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(islice(known, MAX_COMPARED)), 1)
    return close[0] if close else ""
