"""Device meshes and placements as users write them, and the boxes they give: what each rank holds of a tensor.

Every mesh dimension that shards cuts what the ones before it left into ceil-sized parts, as torch.chunk does; ranks
without elements hold an empty box at the tensor's end. This is what FSDP2 over tensor parallelism really holds.

Source: torch 2.13, distributed/tensor/placement_types.py and _utils.py, for the boxes and where empty ones are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import Box, chunk_of
from dcptool.errors import LayoutError

MAX_RANKS = 1 << 20
_NAME = r"[A-Za-z_]\w*"
_CUT = re.compile(rf"({_NAME}(?:\+{_NAME})*):(-?\d{{1,3}})")


class Mesh(NamedTuple):
    """A device mesh: names and sizes of its dimensions, the outermost first; ranks are row-major over it."""

    names: tuple[str, ...]
    sizes: Ints

    @property
    def n_ranks(self) -> int:
        """How many ranks it has."""
        return prod(self.sizes)

    def coordinates(self) -> Iterator[Ints]:
        """Yield the place of each rank, in rank order."""
        return itertools.product(*map(range, self.sizes))


class MeshCut(NamedTuple):
    """One step of a placement: these mesh dimensions, folded into one row-major, cut this dimension of the tensor."""

    mesh_dims: tuple[str, ...]
    dim: int


class Placement(NamedTuple):
    """How tensors with certain names are placed: a glob on whole fqns, and the cuts in order of application.

    Mesh dimensions that are not named replicate.
    """

    glob: str
    cuts: tuple[MeshCut, ...]

    def matches(self, fqn: str) -> bool:
        """Tell whether it is for a tensor of that name."""
        return fqn == self.glob or fnmatchcase(fqn, self.glob)


def parse_mesh(text: str) -> Mesh:
    """Read `dp=6,tp=8`.

    Raises:
        LayoutError: it is no list of names and sizes.
    """
    names, sizes = [], []
    for part in text.split(","):
        match = re.fullmatch(rf"\s*({_NAME})\s*=\s*(\d{{1,7}})\s*", part)
        if not match or int(match[2]) < 1:
            raise LayoutError(f"--mesh {text}: {part.strip()!r} is no mesh dimension; write --mesh dp=6,tp=8")
        names.append(match[1])
        sizes.append(int(match[2]))
    if len(set(names)) < len(names):
        raise LayoutError(f"--mesh {text}: a name comes twice")
    if prod(sizes) > MAX_RANKS:
        raise LayoutError(f"--mesh {text}: {prod(sizes):,} ranks are more than the {MAX_RANKS:,} dcptool lays out")
    return Mesh(tuple(names), tuple(sizes))


def parse_placement(text: str, mesh: Mesh) -> Placement:
    """Read `GLOB=tp:1,dp:0`; `GLOB=` replicates.

    Raises:
        LayoutError: it is no placement on this mesh.
    """
    glob, equals, rest = text.rpartition("=")
    if not equals or not glob:
        raise LayoutError(f"--placement {text}: write GLOB=DIM:N, such as '*.weight=tp:1,dp:0'")
    cuts = []
    for part in filter(None, rest.replace(" ", "").split(",")):
        match = _CUT.fullmatch(part)
        if not match:
            raise LayoutError(f"--placement {text}: {part!r} is no cut; write tp:1 or dp+cp:0")
        cuts.append(MeshCut(tuple(match[1].split("+")), int(match[2])))
    used = [name for cut in cuts for name in cut.mesh_dims]
    unknown = [name for name in used if name not in mesh.names]
    if unknown:
        raise LayoutError(f"--placement {text}: the mesh has no dimension {unknown[0]!r}, only {', '.join(mesh.names)}")
    if len(set(used)) < len(used):
        raise LayoutError(f"--placement {text}: a mesh dimension cuts twice")
    return Placement(glob, tuple(cuts))


def boxes_of(shape: Ints, mesh: Mesh, cuts: Sequence[MeshCut]) -> list[Box]:
    """Return the box that each rank holds, in rank order.

    Args:
        shape: of the tensor, in elements.
        mesh: the ranks.
        cuts: in order of application; their dimensions are inside the shape.
    """
    held: dict[Ints, Box] = {}
    place = {name: index for index, name in enumerate(mesh.names)}
    used = [[place[name] for name in cut.mesh_dims] for cut in cuts]
    boxes = []
    for coordinate in mesh.coordinates():
        parts = tuple(_folded(coordinate, mesh.sizes, dims) for dims in used)
        if parts not in held:
            counts = [prod(mesh.sizes[index] for index in dims) for dims in used]
            held[parts] = _box(shape, [cut.dim for cut in cuts], counts, parts)
        boxes.append(held[parts])
    return boxes


def _folded(coordinate: Ints, sizes: Ints, dims: Sequence[int]) -> int:
    """Return the row-major index over some mesh dimensions, in the order they are named."""
    index = 0
    for dim in dims:
        index = index * sizes[dim] + coordinate[dim]
    return index


def _box(shape: Ints, dims: Sequence[int], counts: Sequence[int], parts: Ints) -> Box:
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, count, part in zip(dims, counts, parts, strict=True):
        start, size = chunk_of(sizes[dim], count, part)
        offsets[dim] += start
        sizes[dim] = size
    ends = [offset if size else end for offset, size, end in zip(offsets, sizes, shape, strict=True)]
    cut = set(dims)
    return tuple(end if dim in cut else 0 for dim, end in enumerate(ends)), tuple(sizes)


def mislabelled(shape: Ints, mesh: Mesh, cuts: Sequence[MeshCut]) -> MeshCut | None:
    """Return the cut for which torch's DTensor names other boxes than it holds, None if there is none.

    Where an inner mesh dimension cuts before an outer one on the same dimension (FSDP2 over tensor parallelism),
    DTensor takes the outer one as strided, and the inner one as a plain cut of what that leaves. Where the parts are
    not equally long this is another cut than the one that was made, and stock torch fails to load it.

    Source: torch 2.13, distributed/tensor/_utils.py, _compute_local_shape_and_global_offset.
    """
    place = {name: index for index, name in enumerate(mesh.names)}
    for first, second in itertools.combinations(cuts, 2):
        if first.dim != second.dim or place[first.mesh_dims[-1]] < place[second.mesh_dims[0]]:
            continue
        inner, outer = (prod(mesh.sizes[place[name]] for name in cut.mesh_dims) for cut in (first, second))
        if _differs(shape[first.dim], inner, outer):
            return first
    return None


def _differs(size: int, inner: int, outer: int) -> bool:
    """Tell whether a strided cut into `outer` parts, then a plain one into `inner`, gives other boxes than nesting."""
    if size % (inner * outer) == 0:
        return False
    for part in range(outer):
        held = []
        for index in range(inner):
            start, length = chunk_of(size, inner, index)
            inside, nbytes = chunk_of(length, outer, part)
            held.append((start + inside, nbytes))
        total = sum(length for _, length in held)
        for index, (start, length) in enumerate(held):
            first, count = chunk_of(total, inner, index)
            if count != length or (count and _at(held, first) != start):
                return True
    return False


def _at(held: Sequence[tuple[int, int]], index: int) -> int:
    """Return the element at a place of runs put together."""
    for start, length in held:
        if index < length:
            return start + index
        index -= length
    return -1
