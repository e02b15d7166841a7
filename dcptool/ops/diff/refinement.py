"""The common refinement of two layouts: boxes that lie inside one chunk of each. Reads nothing.

It is every non-empty intersection of a chunk of one with a chunk of the other, cut into row-major pieces. Where chunks
of a side overlap, pieces are of the whole tensor, to be put together from its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from dcptool.checkpoint.boxes import ChunkIndex
from dcptool.checkpoint.chunks import Chunks
from dcptool.checkpoint.regions import Box, cut_box, first_gap, volume
from dcptool.ops.diff.sides import SideReader, UnreadableError

_BATCH_LENGTH = 8


class CommonBox(NamedTuple):
    """A box of both tensors that is read at once, and the indexes of the chunks it lies in; -1 for several."""

    box: Box
    chunk_a: int
    chunk_b: int

    @property
    def n_elements(self) -> int:
        """How many elements it has."""
        return volume(self.box[1])


class BoxBatch(NamedTuple):
    """Boxes that one thread reads one after the other; `is_whole`: together they are one chunk of both sides."""

    boxes: Sequence[CommonBox]
    is_whole: bool


def cut(a: SideReader, b: SideReader, max_elements: int) -> Iterator[BoxBatch]:
    """Yield batches of boxes that together are the whole tensor, each element once; none of a tensor without elements.

    Args:
        a, b: two tensors of one shape.
        max_elements: of one box.

    Raises:
        UnreadableError: a part of the tensor is in no chunk of one side.
    """
    shape = a.entry.shape
    if 0 in shape:
        return
    exact = [_is_exact(side) for side in (a, b)]
    if not all(exact):
        for side in (a, b):
            side.require_all_there()
        yield from _batches(((0,) * len(shape), shape), -1, -1, max_elements, False)
        return
    boxes = a.entry.chunks, b.entry.chunks
    for index_a, index_b, box in refinement(*boxes):
        is_one = boxes[0].box(index_a) == boxes[1].box(index_b)
        batches = _batches(box, index_a, index_b, max_elements, is_one)
        if volume(box[1]) > _BATCH_LENGTH * max_elements and not (a.is_there(index_a) and b.is_there(index_b)):
            batches = islice(batches, 1)  # whose reading says why; metadata may say any size
        yield from batches


def _batches(box: Box, index_a: int, index_b: int, max_elements: int, is_one: bool) -> Iterator[BoxBatch]:
    """Cut a box into smaller ones; `is_one`: it is one chunk of both sides."""
    boxes = (CommonBox(piece, index_a, index_b) for piece in cut_box(box, max_elements))
    is_first = True
    while batch := tuple(islice(boxes, _BATCH_LENGTH)):
        yield BoxBatch(batch, is_one and is_first and sum(common.n_elements for common in batch) == volume(box[1]))
        is_first = False


def _is_exact(side: SideReader) -> bool:
    """Tell whether chunks cover their tensor without overlapping.

    Raises:
        UnreadableError: they leave a part of it out.
    """
    shape, chunks = side.entry.shape, side.entry.chunks
    boxes = list(chunks.boxes())
    gap = first_gap(((0,) * len(shape), shape), boxes)
    if gap:
        message = f"no chunk holds the {list(gap[1])} elements at {list(gap[0])}"
        raise UnreadableError(message, side.access, side.entry)
    return sum(volume(sizes) for _, sizes in boxes) == volume(shape)


def refinement(a: Chunks, b: Chunks) -> Iterator[tuple[int, int, Box]]:
    """Yield (index of a's chunk, index of b's chunk, box) for all that share elements, in the order of a's chunks.

    Chunks of b are looked up by their place along the dimension that is cut most, so the work for any grid is about as
    much as there are boxes.
    """
    where = {box: index for index, box in enumerate(b.boxes())}
    lookup: ChunkIndex | None = None
    for index, box in enumerate(a.boxes()):
        if box in where and volume(box[1]):
            yield index, where[box], box
            continue
        lookup = lookup or ChunkIndex(b)
        for found, common in lookup.touching(box):
            yield index, found, common
