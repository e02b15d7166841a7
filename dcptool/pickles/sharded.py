"""What a loaded pickle says of tensors that are cut over ranks: the boxes of the rank whose it is; reads no payload.

Source: torch 2.13, distributed/tensor/_utils.py (`_compute_local_shape_and_global_offset`), placement_types.py,
device_mesh.py and distributed/_shard/sharded_tensor/api.py (`__getstate__`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import chunk_of
from dcptool.errors import ItemError, UnsupportedError
from dcptool.pickles.standins import Global, Node, qualified_name
from dcptool.pickles.tensors import PARAMETERS, TensorView, ints_of, tensor_view

MAX_RUNS = 1 << 16
"""Runs of rows that one rank holds of a tensor, and sizes of a mesh: more are a lie."""
_DTENSORS = {
    "torch.distributed.tensor.DTensor",
    "torch.distributed._tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
}
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_MAX_WRAPPERS = 8
Run = tuple[int, int]
"""First element and length."""


class Sharded(NamedTuple):
    """One rank's part of a tensor.

    Attributes:
        dtype: torch's name without prefix.
        shape: of the whole tensor.
        pieces: for each box that the rank holds its offsets, and the view that it is; none if it holds nothing.
        rank: whose part it is, by its place among those that hold the tensor; None where nothing tells.
        n_ranks: how many hold the tensor.
    """

    dtype: str
    shape: Ints
    pieces: tuple[tuple[Ints, TensorView], ...]
    rank: int | None
    n_ranks: int


def sharded_tensor(node: Any) -> Sharded | None:
    """Return what a node says of one rank's part of a tensor; None if it is no DTensor and no ShardedTensor.

    None too for one whose local tensor is of a class of its own.

    Raises:
        ItemError: what it says does not fit together.
        UnsupportedError: it cannot be told which values these are.
    """
    found = _wrapped(node)
    if found is None:
        return None
    kind, arguments, state = found
    if len(arguments) < 3:
        raise ItemError("its pickle gives no shape of the whole tensor")
    shape = ints_of(arguments[2])
    return _of_shards(shape, arguments[1], state) if kind == _SHARDED_TENSOR else _of_dtensor(shape, state)


def _wrapped(node: Any) -> tuple[str, tuple[Any, ...], Any] | None:
    """Return class, arguments and state of a tensor that is cut, None of anything else."""
    for _ in range(_MAX_WRAPPERS):
        if not isinstance(node, Node) or not node.called:
            return None
        name = qualified_name(node.function)
        if name not in PARAMETERS or not node.args:
            break
        node = node.args[0]
    if name != "torch._tensor._rebuild_from_type_v2" or len(node.args) != 4:
        return None
    function, kind, arguments, state = node.args
    if not isinstance(function, Global) or not isinstance(kind, Global) or not isinstance(arguments, tuple):
        return None
    named = qualified_name(kind)
    if qualified_name(function) != "torch._utils._rebuild_wrapper_subclass":
        return None
    return (named, arguments, state) if named in _DTENSORS or named == _SHARDED_TENSOR else None


def _attributes(value: Any) -> Mapping[Any, Any]:
    """Return the attributes that a pickle sets: a dict, or the second of a pair for a class with slots."""
    state = value.state if isinstance(value, Node) else value
    parts = state if isinstance(state, tuple) else (state,)
    return {key: item for part in parts if isinstance(part, dict) for key, item in part.items()}


def _of_dtensor(shape: Ints, state: Any) -> Sharded | None:
    attributes = _attributes(state)
    local, spec = attributes.get("_local_tensor"), _attributes(attributes.get("_spec"))
    view = tensor_view(local)
    if view is None:
        return None
    meta = spec.get("tensor_meta")
    if isinstance(meta, Node) and meta.args and ints_of(meta.args[0]) != shape:
        raise ItemError(f"it is of shape {list(shape)} by its class and {list(ints_of(meta.args[0]))} by its spec")
    mesh = _attributes(spec.get("mesh"))
    sizes = _mesh_sizes(mesh)
    place = mesh.get("_coordinate_on_dim")
    if place is None and "_coordinate_on_dim" in mesh:
        return Sharded(view.dtype, shape, (), None, prod(sizes))  # the rank is not of the mesh
    coordinate = ints_of(place)
    placements = spec.get("placements")
    if not isinstance(placements, tuple | list) or not len(coordinate) == len(sizes) == len(placements):
        raise ItemError("its mesh, its placements and the rank's place do not have the same number of dimensions")
    if any(at >= size for at, size in zip(coordinate, sizes, strict=True)):
        raise ItemError(f"the rank's place {list(coordinate)} is not on a mesh of {list(sizes)}")
    cuts = _cuts(placements, coordinate, sizes, len(shape))
    runs = [_runs(size, cuts.get(dim, ()), _order_of(spec, dim)) for dim, size in enumerate(shape)]
    expected = tuple(sum(length for _, length in found) for found in runs)
    if view.shape != expected:
        raise ItemError(f"the rank holds {list(view.shape)} where its placements make {list(expected)}")
    return Sharded(view.dtype, shape, _pieces(view, shape, runs), _index(coordinate, sizes), prod(sizes))


class _MeshPart(NamedTuple):
    """One mesh dimension that cuts a dimension of a tensor; `split` is a strided cut's factor, 1 of a plain one."""

    mesh_dim: int
    part: int
    n_parts: int
    split: int


def _cuts(placements: Sequence[Any], coordinate: Ints, sizes: Ints, ndim: int) -> dict[int, list[_MeshPart]]:
    """Return what cuts each dimension of the tensor, in the order of the mesh."""
    cuts: dict[int, list[_MeshPart]] = {}
    for mesh_dim, placement in enumerate(placements):
        name = qualified_name(placement)
        kind = name.rpartition(".")[2] if name.startswith("torch.distributed.") else ""
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise UnsupportedError(f"a DTensor placed as {kind or name}: what one rank has is no value of it")
        attributes = _attributes(placement)
        dim, split = attributes.get("dim"), attributes.get("split_factor", 1)
        if type(dim) is not int or not -ndim <= dim < ndim or type(split) is not int or not 0 < split <= MAX_RUNS:
            raise ItemError(f"it is cut along dimension {dim!r} of {ndim}")
        split = split if kind == "_StridedShard" else 1
        cuts.setdefault(dim % ndim, []).append(_MeshPart(mesh_dim, coordinate[mesh_dim], sizes[mesh_dim], split))
    return cuts


def _order_of(spec: Mapping[Any, Any], dim: int) -> Ints:
    """Return the order in which mesh dimensions cut a dimension, where the spec says it; empty if not."""
    entries = spec.get("shard_order")
    for entry in entries if isinstance(entries, tuple) else ():
        if isinstance(entry, Node) and len(entry.args) == 2 and entry.args[0] == dim:
            return ints_of(entry.args[1])
    return ()


def _runs(size: int, cuts: Sequence[_MeshPart], order: Ints) -> list[Run]:
    """Return the runs of elements that a rank holds along one dimension, as torch cuts it.

    Raises:
        UnsupportedError: torch holds other elements than its placements say.
    """
    if not any(cut.split > 1 for cut in cuts):
        place = {mesh_dim: index for index, mesh_dim in enumerate(order)}
        runs = [(0, size)]
        for cut in sorted(cuts, key=lambda cut: place.get(cut.mesh_dim, cut.mesh_dim)):
            runs = _kept(runs, cut)
        return runs
    runs = [(0, size)]
    for cut in cuts:
        runs = _kept(runs, cut)
    nested = [(0, size)]
    for cut in reversed(cuts):  # FSDP2 over tensor parallelism: the inner mesh dimension cuts first
        nested = _kept(nested, cut._replace(split=1))
    if len(cuts) > 1 and runs != nested:
        raise UnsupportedError(
            "a DTensor that FSDP2 and tensor parallelism cut along one dimension into unequal parts: "
            "torch names other elements than it holds"
        )
    return runs


def _kept(runs: list[Run], cut: _MeshPart) -> list[Run]:
    """Return what one cut leaves of runs put together; a strided one takes a part of each of `split` parts."""
    total = sum(length for _, length in runs)
    kept: list[Run] = []
    for index in range(min(cut.split, max(total, 1))):
        first, length = chunk_of(total, cut.split, index)
        start, count = chunk_of(length, cut.n_parts, cut.part)
        kept += _slice(runs, first + start, count)
    merged: list[Run] = []
    for start, length in kept:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _slice(runs: Iterable[Run], first: int, count: int) -> list[Run]:
    found = []
    for start, length in runs:
        taken = min(length - first, count)
        if taken > 0 and first >= 0:
            found.append((start + first, taken))
            count -= taken
            first = 0
        else:
            first = max(first - length, 0) if first >= 0 else first
    return found


def _pieces(view: TensorView, shape: Ints, runs: Sequence[Sequence[Run]]) -> tuple[tuple[Ints, TensorView], ...]:
    """Return the boxes that runs along each dimension make, each as a view of the local tensor's storage."""
    if prod(map(len, runs)) > MAX_RUNS:
        raise UnsupportedError(f"a DTensor of which one rank holds more than {MAX_RUNS:,} boxes")
    if 0 in view.shape:  # as torch gives it: what is cut to nothing lies at the end
        starts = (found[0][0] if found else size for size, found in zip(shape, runs, strict=True))
        return ((tuple(starts), view),)
    placed = [_placed(found) for found in runs]
    pieces = []
    for box in itertools.product(*placed):
        start = view.storage_offset + sum(at * stride for (at, _, _), stride in zip(box, view.strides, strict=True))
        sizes = tuple(length for _, _, length in box)
        pieces.append((tuple(offset for _, offset, _ in box), view._replace(shape=sizes, storage_offset=start)))
    return tuple(pieces)


def _placed(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Return runs with where each begins in the local tensor: (there, in the whole, length)."""
    at, found = 0, []
    for start, length in runs:
        found.append((at, start, length))
        at += length
    return found


def _mesh_sizes(mesh: Mapping[Any, Any]) -> Ints:
    """Return the sizes of a mesh's dimensions, as versions of torch have written them."""
    layout = _attributes(mesh.get("_layout"))
    shape = layout.get("shape")
    if isinstance(layout.get("axes"), tuple):
        shape = tuple(_attributes(axis).get("shape") for axis in layout["axes"])
    if shape is None and (view := tensor_view(mesh.get("mesh"))):
        shape = view.shape
    sizes = tuple(_folded(size) for size in (shape if isinstance(shape, tuple) else (shape,)))
    if not 0 < prod(sizes) <= 1 << 32:
        raise ItemError("its pickle gives no sizes of its mesh")
    return sizes


def _folded(size: Any, depth: int = 0) -> int:
    """Return how many ranks are along one dimension of a mesh, which may be made of several."""
    if isinstance(size, tuple) and depth < 4:
        return prod(_folded(part, depth + 1) for part in size)
    return size if type(size) is int and 0 < size < 1 << 32 else 0


def _index(coordinate: Ints, sizes: Ints) -> int:
    index = 0
    for at, size in zip(coordinate, sizes, strict=True):
        index = index * size + at
    return index


def _of_shards(shape: Ints, dtype: Any, state: Any) -> Sharded | None:
    if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
        raise ItemError("its pickle gives no shards")
    if (size := _attributes(state[1]).get("size")) is None or ints_of(size) != shape:
        raise ItemError("its pickle gives another shape of the whole tensor than its class")
    pieces = []
    name = qualified_name(dtype).removeprefix("torch.")
    for shard in state[0]:
        attributes = _attributes(shard)
        metadata = _attributes(attributes.get("metadata"))
        offsets, sizes = ints_of(metadata.get("shard_offsets")), ints_of(metadata.get("shard_sizes"))
        view = tensor_view(attributes.get("tensor"))
        if view is None:
            return None
        if view.shape != sizes or view.dtype != name or not _is_inside(offsets, sizes, shape):
            raise ItemError(
                f"a shard of shape {list(view.shape)} is said to be {list(sizes)} at {list(offsets)} of {list(shape)}"
            )
        pieces.append((offsets, view))
    if name not in dtypes.BY_NAME:
        raise ItemError(f"its pickle gives {name} as dtype")
    group = _attributes(state[2])
    rank, count = group.get("global_rank"), group.get("global_world_size")
    if type(rank) is not int or type(count) is not int or not 0 <= rank < count:
        rank, count = None, 1
    return Sharded(name, shape, tuple(pieces), rank, count)


def _is_inside(offsets: Ints, sizes: Ints, shape: Ints) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True))
