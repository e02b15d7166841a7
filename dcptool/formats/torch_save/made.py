"""Tensors made of tensors in output: carried as they are stored, or put together anew for boxes that are others.

A box that is stored is carried with its pickle and its records. Any other takes the pickle of a piece, with boxes of
the inner tensors in it, where the class is one whose inner tensors are known to follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.boxes import fill_box
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Chunk
from dcptool.checkpoint.fill import numpy_empty
from dcptool.checkpoint.pieces import Cut
from dcptool.checkpoint.regions import Box, volume
from dcptool.checkpoint.subclasses import Subclass, stored_of
from dcptool.copying.outputs import Fill
from dcptool.errors import LayoutError
from dcptool.formats.torch_save.graphs import Keys, ObjectGraph, rekey, tensor_node
from dcptool.pickles.standins import Node
from dcptool.pickles.wrapped import rebuilt

_MAX_COMPARED_NBYTES = 16 << 20
"""Of an inner tensor that several pieces each hold whole; such are scales and tables."""


class Made:
    """Gives the graphs of tensors made of tensors of one source.

    Args:
        checkpoint: the source.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._alike: dict[str, bool] = {}

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._checkpoint.subclasses

    def node(self, entry: TensorEntry, box: Box, keys: Keys) -> tuple[Any, dict[str, Fill]]:
        """Return the graph of a box of a tensor, and what its new storages hold by their keys; `keys` has the others.

        Raises:
            LayoutError: inner tensors of its class cannot be cut there; the message says why.
            ItemError, StorageError, MetadataError: an item cannot be read.
        """
        subclass = self._checkpoint.subclasses[entry.fqn]
        for chunk in entry.chunks:
            if (chunk.offsets, chunk.sizes) == box:
                stored = stored_of(self._checkpoint, entry, chunk)
                return rekey(ObjectGraph(stored.root, stored.storages), keys), {}
        return self._anew(subclass, box, keys)

    def _anew(self, subclass: Subclass, box: Box, keys: Keys) -> tuple[Any, dict[str, Fill]]:
        boxes = {inner.inner: subclass.box(inner, box) for inner in subclass.inner}  # refuses what cannot be cut
        cuts: Mapping[str, Cut] = subclass.cuts or {}
        fills: dict[str, Fill] = {}
        nodes: dict[str, Node] = {}
        for inner in subclass.inner:
            self.require_alike(subclass, inner)
            offsets, sizes = boxes[inner.inner]
            key = keys.fresh()
            nbytes = volume(sizes) * dtypes.lookup(inner.dtype).itemsize
            fills[key] = Fill(inner.fqn, offsets, sizes, inner.dtype, nbytes)
            nodes[inner.inner] = tensor_node(inner.dtype, sizes, key)
        stored = stored_of(self._checkpoint, subclass.entry, subclass.entry.chunks[0])
        return rebuilt(stored.root, stored.piece, cuts, box[1], nodes), fills

    def require_alike(self, subclass: Subclass, inner: TensorEntry) -> None:
        """Refuse to join pieces that each have a value of their own, where a joined tensor has one.

        Raises:
            LayoutError: they have.
        """
        if inner.fqn not in self._alike:
            self._alike[inner.fqn] = not inner.replicas or self._are_alike(inner)
        if not self._alike[inner.fqn]:
            raise LayoutError(
                f"{subclass.entry.fqn!r} is {subclass.piece.kind}: each of its pieces has another {inner.inner}, and "
                "a piece cut anew would have to have one",
                next_step="It can be carried as it is stored, in the same boxes.",
            )

    def _are_alike(self, inner: TensorEntry) -> bool:
        if inner.nbytes > _MAX_COMPARED_NBYTES:
            return False
        first = {(chunk.offsets, chunk.sizes): self._bytes(inner, chunk) for chunk in inner.chunks}
        return all(self._bytes(inner, copy) == first.get((copy.offsets, copy.sizes)) for copy in inner.replicas)

    def _bytes(self, inner: TensorEntry, chunk: Chunk) -> bytes:
        out = numpy_empty(chunk.sizes, inner.dtype)
        payload = self._checkpoint.payload(inner, chunk)
        fill_box(self._checkpoint.source, payload, chunk.offsets, (chunk.offsets, chunk.sizes), out)
        return bytes(out.tobytes())
