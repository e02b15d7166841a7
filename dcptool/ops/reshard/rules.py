"""What each of N ranks would hold of every entry of a checkpoint: the rules that turn one layout into another.

Decided by the boxes that are stored and by what the user says, never by values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Extent, Ints
from dcptool.checkpoint.families import PER_RANK
from dcptool.checkpoint.layouts import Layout, is_stacked, layout
from dcptool.checkpoint.regions import Box, volume
from dcptool.checkpoint.selection import SelectedObject, SelectedTensor, Selection
from dcptool.errors import LayoutError
from dcptool.ops.reshard.assign import Held, Holding
from dcptool.ops.reshard.mesh import Mesh, MeshCut, Placement, boxes_of, mislabelled
from dcptool.words import cut_lines, endings

MAX_LISTED = 10


class WantedLayout(NamedTuple):
    """The layout that is wanted.

    Attributes:
        n_ranks: how many ranks.
        mesh: what they form, None for a plain row.
        placements: what is sharded on the mesh, the first that matches wins.
        like: a checkpoint whose layout is taken over.
        repack: keep boxes, spread them over files in their order.
    """

    n_ranks: int
    mesh: Mesh | None = None
    placements: tuple[Placement, ...] = ()
    like: Checkpoint | None = None
    repack: bool = False


class LayoutRules:
    """Applies a wanted layout to the entries of one selection, and remembers what is worth telling."""

    def __init__(self, source: Checkpoint, selection: Selection, wanted: WantedLayout) -> None:
        self._source, self._selection, self._wanted = source, selection, wanted
        self._n_ranks = wanted.n_ranks
        self._everywhere = range(wanted.n_ranks)
        self._source_ranks = source.world_size or 1
        self._alike: dict[tuple[object, ...], Sequence[Holding]] = {}
        self._followed = _Parameters(selection, wanted.placements)
        self.kept: dict[str, Layout] = {}
        """Tensors whose boxes are kept for want of a rule: name → layout."""
        self.unplaced: list[str] = []
        """Tensors of a mesh that no placement matches."""

    def held(self) -> list[Held]:
        """Return what the ranks hold of every selected entry, in order.

        Raises:
            LayoutError: what is wanted cannot be done; names the tensor.
        """
        items = self._selection.in_order
        if self._wanted.repack:
            return _repacked(self._source, items, self._n_ranks)
        like = self._wanted.like
        if like is not None:
            order = {fqn: index for index, fqn in enumerate(like)}
            items = tuple(sorted(items, key=lambda item: order.get(item.name, len(order))))
            _require_alike(items, like)
        return [self._held(item) for item in items]

    def _held(self, item: SelectedTensor | SelectedObject) -> Held:
        like = self._wanted.like
        if like is not None and item.name in like:
            return _as_in(like, item)
        if isinstance(item, SelectedObject):
            return Held(item.name, 1, [Holding(None, self._ranks_of_object(item.name))])
        shape = item.entry.shape
        weight = volume(shape) * dtypes.lookup(item.dtype).itemsize
        if not shape:
            return Held(item.name, weight, [Holding(((), ()), self._everywhere)])
        placement = self._followed.placement(item)
        if placement is not None and self._wanted.mesh:
            return Held(item.name, weight, self._on_mesh(item.name, shape, self._wanted.mesh, placement))
        if self._wanted.placements:
            self.unplaced.append(item.name)
        dim = self._sharded_dim(item)
        if dim is None:
            boxes = list(item.entry.chunks.boxes())
            if len(boxes) > 1:
                self.kept[item.name] = layout(shape, item.entry.chunks)
            weight = weight if len(boxes) <= 1 else weight // len(boxes)
            return Held(item.name, weight, [Holding(box, self._everywhere) for box in _distinct(boxes)])
        row = Mesh(("ranks",), (self._n_ranks,))
        return Held(item.name, weight, self._holdings(shape, row, (MeshCut(("ranks",), dim),)))

    def _ranks_of_object(self, name: str) -> Sequence[int]:
        """Return who may hold an object: what names a rank belongs to that one, or to some other if it is no more."""
        match = PER_RANK.search(name)
        if match is None:
            return self._everywhere
        return (int(match[2]) % self._n_ranks,)

    def _sharded_dim(self, item: SelectedTensor) -> int | None:
        """Return the dimension that a tensor is, and stays, sharded along; None to keep its boxes."""
        if self._source_ranks == 1 or self._source.format.cuts_flat:
            return 0
        chunks = item.entry.chunks
        rank_of = self._source.format.rank_of
        ranks = [rank_of(chunk.item.file) for chunk in chunks if chunk.item and 0 not in chunk.sizes]
        if len(set(ranks)) < len(ranks) and None not in ranks:
            return None
        return layout(item.entry.shape, chunks, stacked=is_stacked(self._source, item.entry.fqn)).sharded_dim

    def _on_mesh(self, name: str, shape: Ints, mesh: Mesh, placement: Placement) -> Sequence[Holding]:
        cuts = tuple(cut._replace(dim=cut.dim + len(shape) if cut.dim < 0 else cut.dim) for cut in placement.cuts)
        outside = next((cut for cut in cuts if not 0 <= cut.dim < len(shape)), None)
        if outside:
            raise LayoutError(
                f"{name!r} has shape {list(shape)} and no dimension {outside.dim} that {'+'.join(outside.mesh_dims)} "
                f"could cut; give it a --placement of its own before {placement.glob!r}"
            )
        wrong = mislabelled(shape, mesh, cuts)
        if wrong:
            raise LayoutError(
                f"{name!r}: {shape[wrong.dim]} elements of dimension {wrong.dim} do not divide over "
                f"{'+'.join(wrong.mesh_dims)} and what cuts them again; torch's DTensor mislabels such shards and does "
                "not load them.",
                next_step="Place this tensor otherwise, or choose another mesh.",
            )
        return self._holdings(shape, mesh, cuts)

    def _holdings(self, shape: Ints, mesh: Mesh, cuts: Sequence[MeshCut]) -> Sequence[Holding]:
        """Return the distinct boxes of all ranks with who holds them; tensors of one shape share them."""
        key = (shape, mesh, tuple(cuts))
        if key not in self._alike:
            holders: dict[Ints, tuple[Box, list[int]]] = {}
            for rank, box in enumerate(boxes_of(shape, mesh, cuts)):
                holders.setdefault(box[0], (box, []))[1].append(rank)
            self._alike[key] = [Holding(box, tuple(ranks)) for box, ranks in holders.values()]
        return self._alike[key]


class _Parameters:
    """Finds the placement of a tensor: its own, or that of the parameter it is optimizer state of."""

    def __init__(self, selection: Selection, placements: Sequence[Placement]) -> None:
        self._placements = placements
        self._tails: dict[str, SelectedTensor | None] = {}
        for item in selection.tensors if placements else ():
            for tail in endings(item.name):
                self._tails[tail] = None if tail in self._tails else item

    def placement(self, item: SelectedTensor) -> Placement | None:
        own = self._matching(item.name)
        if own is not None:
            return own
        followed = self._parameter(item)
        return self._matching(followed.name) if followed else None

    def _matching(self, name: str) -> Placement | None:
        return next((placement for placement in self._placements if placement.matches(name)), None)

    def _parameter(self, item: SelectedTensor) -> SelectedTensor | None:
        """Return the tensor of the same shape that a part of the path, else the longest part of the name, names."""
        parts = item.name.split(".")
        named = [part for part in item.path or () if isinstance(part, str)]
        named += [".".join(parts[start:-1]) for start in range(1, len(parts) - 1)]
        for name in named:
            found = self._tails.get(name)
            if found and found is not item and found.entry.shape == item.entry.shape:
                return found
        return None


def _distinct(boxes: Sequence[Box]) -> list[Box]:
    """Return boxes with different offsets, full ones before empty ones of the same offsets."""
    found: dict[Ints, Box] = {}
    for box in boxes:
        if box[0] not in found or 0 in found[box[0]][1]:
            found[box[0]] = box
    return list(found.values())


def _require_alike(items: Sequence[SelectedTensor | SelectedObject], like: Checkpoint) -> None:
    """Refuse a layout that is of other tensors.

    Raises:
        LayoutError: names the tensors whose shape is another there.
    """
    different = []
    for item in items:
        other = like.get(item.name)
        if other is None:
            continue
        if isinstance(item, SelectedTensor) != isinstance(other, TensorEntry):
            different.append(f"{item.name!r} is a tensor in one and an object in the other")
        elif isinstance(item, SelectedTensor) and isinstance(other, TensorEntry) and item.entry.shape != other.shape:
            different.append(f"{item.name!r} has shape {list(item.entry.shape)}, there {list(other.shape)}")
    if different:
        lines = "\n".join(cut_lines(different, MAX_LISTED))
        raise LayoutError(f"--like {like.path} is of another model:\n{lines}")


def _as_in(like: Checkpoint, item: SelectedTensor | SelectedObject) -> Held:
    """Take over boxes and ranks of an entry."""
    other = like[item.name]
    if not isinstance(other, TensorEntry):
        return Held(item.name, 1, [Holding(None, (_rank_in(like, other.item),))])
    holdings = [Holding(chunk[:2], (_rank_in(like, chunk.item),)) for chunk in other.chunks]
    return Held(item.name, other.nbytes, holdings)


def _repacked(source: Checkpoint, items: Sequence[SelectedTensor | SelectedObject], n_files: int) -> list[Held]:
    """Keep all boxes; spread them over files in the order of ranks and places, about as many bytes in each."""
    stored: list[tuple[tuple[int, str, int], int, Box | None]] = []
    for position, item in enumerate(items):
        if isinstance(item, SelectedObject):
            stored.append((_place(source, item.entry.item), position, None))
        else:
            stored += ((_place(source, chunk.item), position, chunk[:2]) for chunk in item.entry.chunks)
    stored.sort(key=lambda place: place[:2])
    total = sum(_nbytes(items[position], box) for _, position, box in stored) or 1
    holdings: list[list[Holding]] = [[] for _ in items]
    done = 0
    for _, position, box in stored:
        nbytes = _nbytes(items[position], box)
        holdings[position].append(Holding(box, (min((done + nbytes // 2) * n_files // total, n_files - 1),)))
        done += nbytes
    return [Held(item.name, 1, found) for item, found in zip(items, holdings, strict=True)]


def _rank_in(checkpoint: Checkpoint, item: Extent | None) -> int:
    """Return the rank that wrote an item; 0 where nothing tells."""
    return (checkpoint.format.rank_of(item.file) or 0) if item else 0


def _place(checkpoint: Checkpoint, item: Extent | None) -> tuple[int, str, int]:
    return (_rank_in(checkpoint, item), item.file, item.byte_offset) if item else (0, "", 0)


def _nbytes(item: SelectedTensor | SelectedObject, box: Box | None) -> int:
    if isinstance(item, SelectedTensor) and box:
        return volume(box[1]) * dtypes.lookup(item.dtype).itemsize
    return item.entry.item.nbytes if isinstance(item, SelectedObject) and item.entry.item else 0


def mesh_hint(kept: Mapping[str, Layout], n_ranks: int) -> tuple[str, list[str]]:
    """Say which --mesh would cut tensors of two sharded dimensions as that many ranks do, and which it would.

    Args:
        kept: name → layout of tensors whose boxes are kept.
        n_ranks: how many ranks there shall be.

    Returns:
        The options, "" if none would; and the names of the tensors that are sharded along these dimensions.
    """
    alike: dict[tuple[int, int, int], list[str]] = {}
    for name, found in kept.items():
        if len(found.shards) != 2 or found.n_layers is not None:
            continue
        outer, inner = found.shards
        if n_ranks % inner.n_parts == 0:
            alike.setdefault((inner.n_parts, inner.dim, outer.dim), []).append(name)
    if not alike:
        return "", []
    (count, inner_dim, outer_dim), names = max(alike.items(), key=lambda item: len(item[1]))
    return f"--mesh dp={n_ranks // count},tp={count} --placement 'GLOB=tp:{inner_dim},dp:{outer_dim}'", names
