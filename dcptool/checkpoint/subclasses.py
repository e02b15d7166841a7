"""The tensors of a checkpoint that are made of tensors, and the checkpoint with their inner tensors in their places.

A DCP's metadata does not tell: it gives such a tensor the dtype and shape that it takes itself for. Its items do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import mul, sub
from typing import Any, NamedTuple, Protocol

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.entries import Entry, Source, StoredPiece, TensorEntry
from dcptool.checkpoint.extents import Chunk, Ints
from dcptool.checkpoint.format import Format, Variant
from dcptool.checkpoint.pieces import (
    FOLLOWING_SHAPE,
    Blocks,
    Cut,
    FlatRun,
    TensorPiece,
    cuts_of,
    inner_box,
    whole_shape,
)
from dcptool.checkpoint.regions import Box, is_contiguous, volume
from dcptool.errors import DcptoolError, LayoutError, UnsupportedError

LEAST_AROUND_NBYTES = 600
"""What torch.save puts around the values of one tensor has 1,116 bytes at the least (2.2 to 2.14), dcptool 653."""
MAX_COMPARED_NBYTES = 1 << 20
"""Of the scales of one piece that are compared with those of others."""
MAX_LOOKED_AT = 256
"""Items that are looked at to find tensors made of tensors."""
QUANTISED_DTYPES = ("qint", "quint")


class Holder(Protocol):
    """What of a checkpoint is looked at here; see `Checkpoint`."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...
    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...
    @property
    def table(self) -> ChunkTable: ...
    @property
    def source(self) -> Source: ...
    @property
    def format(self) -> Format: ...
    @property
    def variant(self) -> Variant: ...
    @property
    def subclasses(self) -> Mapping[str, Subclass]: ...


class Subclass(NamedTuple):
    """A tensor made of tensors.

    Attributes:
        entry: the tensor as the metadata has it.
        piece: what its first item holds.
        inner: its inner tensors, each whole, under `<fqn>.<name>`; none if pieces of them cannot be joined.
        cuts: how they follow boxes of the tensor; None if that is not known of its class.
        problem: why there are no inner tensors, else "".
    """

    entry: TensorEntry
    piece: TensorPiece
    inner: tuple[TensorEntry, ...] = ()
    cuts: Mapping[str, Cut] | None = None
    problem: str = ""

    def box(self, inner: TensorEntry, box: Box) -> Box:
        """Return which box of an inner tensor a box of the tensor is.

        Raises:
            LayoutError: the class is not known, or a block of it would be cut.
        """
        fqn = self.entry.fqn
        if self.cuts is None or self.problem:
            why = self.problem or f"{fqn!r} is {self.piece.kind}, of which dcptool makes no other pieces"
            raise LayoutError(why, next_step="It can be carried as it is stored, in the same boxes.")
        cut, stored = self.cuts[inner.inner], self.piece.inner[inner.inner][1]
        found = inner_box(cut, self.entry.shape, box, stored)
        if found is None:
            raise LayoutError(
                f"{fqn!r} is {self.piece.kind}: the box at {list(box[0])} sizes {list(box[1])} would cut a block that "
                f"one element of its {inner.inner} is for",
                next_step="Choose a number of ranks, or a placement, that cuts between blocks.",
            )
        return found


def odd_chunks(checkpoint: Holder, entry: TensorEntry) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks whose items are shorter than their values, and those that are a little longer."""
    dtype = dtypes.BY_NAME.get(entry.dtype)
    if dtype is None:
        return [], []
    rows = slice(entry.chunks.first_row, entry.chunks.first_row + len(entry.chunks))
    lacking = list(map(sub, _needed_nbytes(entry, dtype.itemsize), checkpoint.table.byte_length[rows]))
    least = 0 if checkpoint.variant.shares_places else -LEAST_AROUND_NBYTES
    if not lacking or max(lacking) <= least:
        return [], []
    found = [(nbytes, entry.chunks[index]) for index, nbytes in enumerate(lacking) if nbytes > least]
    plain = [(nbytes, chunk) for nbytes, chunk in found if chunk.item and not chunk.item.transforms]
    return [chunk for nbytes, chunk in plain if nbytes > 0], [chunk for nbytes, chunk in plain if nbytes <= 0]


def _needed_nbytes(entry: TensorEntry, itemsize: int) -> Iterable[int]:
    """Return the bytes of each chunk's elements, column by column."""
    needed: Iterable[int] = repeat(itemsize, len(entry.chunks))
    for dim in range(len(entry.shape)):
        needed = map(mul, needed, entry.chunks.column(dim)[1])
    return needed


def find(checkpoint: Holder) -> dict[str, Subclass]:
    """Return the tensors made of tensors that are known or found, by fqn; what cannot be read is left to the checks."""
    table = checkpoint.table.for_more()
    names = set(checkpoint.entries)
    found = {}
    for entry in _candidates(checkpoint):
        try:
            subclass = look_into(checkpoint, entry, table)
        except DcptoolError:
            continue
        if subclass is not None and names.isdisjoint(inner.fqn for inner in subclass.inner):
            found[entry.fqn] = subclass
    return found


def _candidates(checkpoint: Holder) -> Iterator[TensorEntry]:
    """Yield tensors that may be made of tensors: those known to be, and those with a first item as long as one's.

    What is around the values of plain tensors has few different lengths in a checkpoint: one item of each is looked at.
    """
    alike: dict[tuple[str, int, int], bool] = {}
    for entry in checkpoint.tensors.values():
        if entry.kind or entry.dtype.startswith(QUANTISED_DTYPES):
            yield entry
        elif checkpoint.format.items_apart and not checkpoint.variant.shares_places:
            chunk = next(iter(entry.chunks), None)
            dtype = dtypes.BY_NAME.get(entry.dtype)
            if chunk is None or chunk.item is None or dtype is None:
                continue
            key = entry.dtype, len(entry.shape), chunk.item.nbytes - volume(chunk.sizes) * dtype.itemsize
            if key not in alike and len(alike) < MAX_LOOKED_AT:
                alike[key] = _is_made_of_tensors(checkpoint, entry, chunk)
            if alike.get(key):
                yield entry


def _is_made_of_tensors(checkpoint: Holder, entry: TensorEntry, chunk: Chunk) -> bool:
    try:
        return chunk.item is not None and checkpoint.source.stored(entry, chunk, chunk.item) is not None
    except DcptoolError:
        return False


def look_into(checkpoint: Holder, entry: TensorEntry, table: ChunkTable) -> Subclass | None:
    """Return what a tensor is made of by what all its items hold, None if its first one is a plain tensor.

    Raises:
        ItemError, StorageError, MetadataError, UnsupportedError: an item cannot be read.
    """
    pieces: list[tuple[Chunk, TensorPiece]] = []
    for chunk in entry.chunks:
        stored = checkpoint.source.stored(entry, chunk, chunk.item) if chunk.item else None
        if stored is None and not pieces:
            return None
        if stored is None:
            return Subclass(
                entry, pieces[0][1], problem=f"{entry.fqn!r}: not all of its pieces are {pieces[0][1].kind}"
            )
        pieces.append((chunk, stored.piece))
    if not pieces:
        return None
    first = pieces[0][1]
    whole = len(pieces) == 1 and pieces[0][0].sizes == entry.shape
    cuts = _agreed([cuts_of(piece) for _, piece in pieces if volume(piece.shape)] or [cuts_of(first)])
    if cuts is not None and not whole:
        looked = {name: _by_values(checkpoint, entry, name, cut, pieces) for name, cut in cuts.items()}
        other = next((name for name, cut in looked.items() if cut is None), None)
        if other is not None:
            return Subclass(entry, first, problem=f"{entry.fqn!r} is {first.kind}: each piece has another {other}")
        cuts = {name: cut for name, cut in looked.items() if cut is not None}
    if not whole and cuts is None:
        why = f"{entry.fqn!r} is {first.kind}, of which dcptool does not know how its pieces are joined"
        return Subclass(entry, first, problem=why)
    if any(piece.kind != first.kind or set(piece.inner) != set(first.inner) for _, piece in pieces):
        return Subclass(entry, first, problem=f"{entry.fqn!r}: its pieces are not alike")
    inner = tuple(_joined(entry, name, cuts, pieces, table) for name in first.inner)
    lost = next((pieces[0][1] for found in inner if found is None), None)
    if lost:
        return Subclass(entry, first, problem=f"{entry.fqn!r}: its pieces are cut through blocks of {first.kind}")
    alike = all(numbers_alike(first.attributes, piece.attributes, FOLLOWING_SHAPE) for _, piece in pieces)
    return Subclass(entry, first, tuple(found for found in inner if found), cuts if alike else None)


def _agreed(found: Sequence[Mapping[str, Cut] | None]) -> Mapping[str, Cut] | None:
    """Return how inner tensors follow in all pieces; None if that is not known, or not the same.

    Where a piece is no longer than a block, the others tell how long blocks are.
    """
    agreed: dict[str, Cut] = {}
    for cuts in found:
        if cuts is None:
            return None
        for name, cut in cuts.items():
            known = agreed.setdefault(name, cut)
            if isinstance(cut, Blocks) and isinstance(known, Blocks):
                pairs = zip(known.axes, cut.axes, strict=True)
                agreed[name] = Blocks(tuple((dim, max(per, other)) for (dim, per), (_, other) in pairs))
            elif cut != known:
                return None
    return agreed


def _by_values(
    checkpoint: Holder, entry: TensorEntry, name: str, cut: Cut, pieces: Sequence[tuple[Chunk, TensorPiece]]
) -> Cut | None:
    """Return how an inner tensor follows that each piece has whole, or one element of along a cut dimension.

    That is one for all of the tensor if it is the same in all pieces, else one for as many elements as a piece has;
    None where pieces are of different lengths.
    """
    held = [found for found in pieces if volume(found[1].shape)]
    if isinstance(cut, FlatRun) or not held:
        return cut
    longest = [max(chunk.sizes[dim] for chunk, _ in held) for dim in range(len(entry.shape))]
    pairs = cut.axes if isinstance(cut, Blocks) else ()
    shared = [dim for dim, per in pairs if not per and longest[dim] < entry.shape[dim]]
    if isinstance(cut, Blocks) and not shared:
        return cut
    values = {_bytes_of(checkpoint, entry, name, *found) for found in held}
    if len(values) == 1 and None not in values:
        return cut
    if not isinstance(cut, Blocks) or any(chunk.sizes[dim] != longest[dim] for chunk, _ in held for dim in shared):
        return None
    return Blocks(tuple((dim, longest[dim] if dim in shared else per) for dim, per in cut.axes))


def _bytes_of(
    checkpoint: Holder, entry: TensorEntry, name: str, chunk: Chunk, piece: TensorPiece
) -> tuple[Ints, bytes] | None:
    """Return an inner tensor of a piece as it is stored, None if it is too large or strided."""
    dtype, shape = piece.inner[name]
    inner = TensorEntry(f"{entry.fqn}.{name}", dtype, shape, None, entry.chunks, inner=name)
    if chunk.item is None:
        return None
    found = checkpoint.source.payload(inner, chunk, chunk.item)
    itemsize = dtypes.lookup(dtype).itemsize
    out = bytearray(volume(shape) * itemsize)
    if len(out) > MAX_COMPARED_NBYTES or not is_contiguous(shape, found.strides):
        return None
    checkpoint.source.read_into(found.record, found.storage_offset * itemsize, memoryview(out))
    return shape, bytes(out)


def _joined(
    entry: TensorEntry,
    name: str,
    cuts: Mapping[str, Cut] | None,
    pieces: Sequence[tuple[Chunk, TensorPiece]],
    table: ChunkTable,
) -> TensorEntry | None:
    """Return an inner tensor as it is joined of its pieces; None where they are no boxes of it."""
    fqn, path = f"{entry.fqn}.{name}", (*entry.path, name) if entry.path is not None else None
    dtype, stored = pieces[0][1].inner[name]
    shape = stored if cuts is None else whole_shape(cuts[name], entry.shape, stored)
    mark, placed, replicas = table.mark(), set(), []
    for chunk, piece in pieces:
        box: Box | None = ((0,) * len(stored), stored)
        if cuts is not None:
            box = inner_box(cuts[name], entry.shape, (chunk.offsets, chunk.sizes), stored)
        if box is None or box[1] != piece.inner[name][1] or piece.inner[name][0] != dtype:
            return None
        if box in placed:
            replicas.append(Chunk(*box, chunk.item))
        else:
            placed.add(box)
            table.add(*box, chunk.item)
    chunks = table.chunks_since(mark, len(shape))
    return TensorEntry(fqn, dtype, shape, path, chunks, tuple(replicas), inner=name)


def flat_entries(checkpoint: Holder) -> dict[str, Entry]:
    """Return the entries of a checkpoint, inner tensors in the place of the tensors that are made of them."""
    entries: dict[str, Entry] = {}
    for fqn, entry in checkpoint.entries.items():
        subclass = checkpoint.subclasses.get(fqn)
        if subclass and subclass.inner:
            entries |= {inner.fqn: inner._replace(replicas=()) for inner in subclass.inner}
        else:
            entries[fqn] = entry
    return entries


def stored_of(checkpoint: Holder, entry: TensorEntry, chunk: Chunk) -> StoredPiece:
    """Return what an item of a tensor made of tensors holds, with its graph; it may be changed.

    Raises:
        UnsupportedError: it is none such.
        ItemError, StorageError, MetadataError: it cannot be read.
    """
    found = checkpoint.source.stored(entry, chunk, chunk.item) if chunk.item else None
    if found is None:
        raise UnsupportedError(f"{entry.fqn!r}: its item at {list(chunk.offsets)} is a plain tensor, others are not")
    return found


def numbers_alike(first: Mapping[str, Any], other: Mapping[str, Any], but: Sequence[str]) -> bool:
    """Tell whether the attributes of two pieces are the same but for those named."""
    return {k: v for k, v in first.items() if k not in but} == {k: v for k, v in other.items() if k not in but}
