"""A checkpoint of any format: a mapping from fqn to tensors, cut into chunks, and objects. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from dcptool.checkpoint.boxes import BoxReader, ChunkIndex, payload_of
from dcptool.checkpoint.chunks import ChunkTable, FileUse
from dcptool.checkpoint.entries import Entry, ObjectEntry, Source, TensorEntry
from dcptool.checkpoint.extents import Chunk, Payload, Record, place_words
from dcptool.checkpoint.fill import numpy_empty
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.format import USUAL, Format, Variant
from dcptool.checkpoint.regions import Box, first_gap, index_in, volume
from dcptool.checkpoint.scaled import Recipe, as_values, recipes_of
from dcptool.checkpoint.subclasses import Subclass, find, flat_entries
from dcptool.errors import DcptoolError, LayoutError, UnsupportedError
from dcptool.storage import DirEntry, Storage, join
from dcptool.words import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import torch


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, Entry]):
    """What one checkpoint holds; opening it reads the metadata only.

    Attributes:
        root: path or URL of the folder the files are in.
        name: what was opened inside `root`: "" for the folder, else a file's name.
        format: the on-disk format, a value; its `name` is "dcp", "torch_save", …
        flavour: which software's variant of the format, such as "torch DCP".
        evidence: what that is concluded from, one short phrase each.
        entries: fqn → entry, in the order of the metadata.
        files: name → size in bytes of every file next to the metadata, referenced or not.
        table: the columns behind all chunks.
        problems: what is wrong with the metadata itself; the rest of it is usable. Missing files show in `summarize`.
        extra: what the format's records hold beyond dcptool's model, by attribute name.
        save_id: the writer's identifier of the save, None where there is none.
        requires_grad: fqns of tensors that were saved as trained parameters, where the format tells.
        variant: what the software that wrote it does of its own.
        version: of the metadata, None where it tells none.
        planner_data: what the saver's planner left in the metadata, with stand-ins for what is no plain value.
        known_subclasses: the tensors made of tensors, None if they are still to be found; see `subclasses`.
        recipes: how values of tensors follow from what is stored, by fqn; see `dequantized`.
        seen: the listing of `root` just before the metadata was read, to tell later whether somebody wrote there since.
    """

    root: str
    name: str
    format: Format
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
    variant: Variant = USUAL
    version: str | None = None
    planner_data: Any = None
    seen: tuple[DirEntry, ...] = ()
    known_subclasses: Mapping[str, Subclass] | None = None
    recipes: Mapping[str, Recipe] = field(default_factory=dict)

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
    def subclasses(self) -> Mapping[str, Subclass]:
        """The tensors that are made of tensors, such as torchao's, by fqn; reads the headers of some items."""
        return find(self) if self.known_subclasses is None else self.known_subclasses

    @cached_property
    def flat(self) -> Checkpoint:
        """The same checkpoint with inner tensors in the place of the tensors that are made of them."""
        if not any(subclass.inner for subclass in self.subclasses.values()):
            return self
        rest = {fqn: subclass for fqn, subclass in self.subclasses.items() if not subclass.inner}
        return replace(self, entries=flat_entries(self), known_subclasses=rest)

    def dequantized(self, dtype: str) -> Checkpoint:
        """Return the same checkpoint with quantised tensors as the values they stand for, without their scales.

        Args:
            dtype: of `scaled.FLOATS`, what they are computed in.
        """
        found, scales = recipes_of(self.entries, self.subclasses)
        entries: dict[str, Entry] = {fqn: entry for fqn, entry in self.entries.items() if fqn not in scales}
        for fqn, recipe in found.items():
            entries[fqn] = as_values(self.tensors[fqn], recipe, dtype)
        rest = {fqn: subclass for fqn, subclass in self.subclasses.items() if fqn not in found}
        return replace(self, entries=entries, known_subclasses=rest, recipes=found)

    @cached_property
    def world_size(self) -> int | None:
        """How many ranks saved it, None if its files do not tell."""
        return self.format.world_size(self.usage, self.files)

    @cached_property
    def usage(self) -> Mapping[str, FileUse]:
        """For each file the metadata names, how its items use it, in order of first use."""
        usage = self.table.usage()
        rest = [chunk.item for tensor in self.tensors.values() for chunk in tensor.replicas]
        rest += [item for entry in self.objects.values() for item in (entry.item, *entry.replicas)]
        for item in rest:
            if item:
                use = usage.get(item.file, FileUse(0, 0, 0))
                usage[item.file] = FileUse(use.items + 1, use.nbytes + item.nbytes, max(use.end, item.span[1]))
        return usage

    @property
    def own_files(self) -> set[str]:
        """The files that it is made of, where the format knows them those of ranks that had nothing to save too."""
        return {*self.usage, *(self.files if self.format.boxes_in_files else ())}

    def changed(self) -> str:
        """Return a file of it that came, went or was written since its metadata was read; "" if none did.

        Raises:
            CheckpointNotFoundError, StorageError: the folder cannot be listed.
        """
        if len(self.seen) == 1 and self.name:
            return self.name * (self.storage.entry(self.name) != self.seen[0])
        before, now = ({entry.name: entry for entry in listing} for listing in (self.seen, self.storage.entries()))
        ours = {*self.usage, *filter(self.format.is_metadata, {**before, **now})}
        return next((name for name in sorted(ours) if before.get(name) != now.get(name)), "")

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
        reader, parts = BoxReader(self.source, entry), list(ChunkIndex(entry.chunks).touching(region))
        if sum(volume(common[1]) for _, common in parts) < volume(region[1]) or len(parts) > 1:
            gap = first_gap(region, [common for _, common in parts])
            if gap:
                raise LayoutError(
                    f"{self.path}: {fqn!r}: no chunk holds the {list(gap[1])} elements at {list(gap[0])}; "
                    "what the checkpoint does not hold cannot be read"
                )
        out = self._named(entry, None, numpy_empty, region[1], entry.dtype)
        for index, common in parts:
            self._named(entry, entry.chunks[index], reader.fill, index, common, out[index_in(region, common)])
        return out

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
        return self._named(entry, None, self.source.graph, entry)

    def payload(self, entry: TensorEntry, chunk: Chunk) -> Payload:
        """Find the payload of one chunk and check that it is the box the metadata says.

        Raises:
            LayoutError: the metadata names no place for it.
            ItemError: dtype or shape stored there differ, or it cannot be understood.
        """
        return self._named(entry, chunk, payload_of, self.source, entry, chunk)

    def _tensor(self, fqn: str) -> TensorEntry:
        entry = self.entries.get(fqn)
        if isinstance(entry, TensorEntry):
            return entry
        inner = self.flat.entries.get(fqn) if entry is None else None
        if isinstance(inner, TensorEntry):
            return inner
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

    def _named(self, entry: Entry, chunk: Chunk | None, function: Callable[..., T], *args: Any) -> T:
        """Call, adding the file, the fqn and the chunk to what an error says."""
        try:
            return function(*args)
        except DcptoolError as error:
            item = chunk.item if chunk else getattr(entry, "item", None)
            what = error.message.removeprefix(f"{join(self.root, item.file) if item else self.path}: ")
            place = place_words(item, entry.fqn, chunk.offsets if chunk else (), self.root if item else self.path)
            raise error.saying(f"{place}: {what}") from error
