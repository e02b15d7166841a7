"""Tensors made of tensors: what a piece of one holds, and which boxes of its inner tensors a box of it is.

Knows classes by name, numbers only; imports and reads nothing. Of a class that is not listed here nothing is known but
what a piece holds: such a tensor is taken as it is stored, never cut anew.

Source: torchao 0.18 (`quantization/quantize_/workflows`, `optim/subclass_{8bit,4bit,fp8}.py`) for inner tensors; torch
2.13, `_utils.py` (`_rebuild_qtensor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import Box, volume
from dcptool.errors import ItemError

QUANTISED = "a quantised tensor"
INTEGERS, SCALES, ZERO_POINTS = "int_repr", "scales", "zero_points"
"""Inner tensors of a quantised tensor of torch; the last two only where each channel has its own."""


class TensorPiece(NamedTuple):
    """What one item holds of a tensor made of tensors.

    Attributes:
        kind: its class with an article, `a torchao.quantization.Int8Tensor`.
        dtype, shape: what it takes itself for.
        inner: name → dtype and shape of each inner tensor.
        attributes: what else its class keeps, as far as that is numbers, text and lists of them.
    """

    kind: str
    dtype: str
    shape: Ints
    inner: Mapping[str, tuple[str, Ints]]
    attributes: Mapping[str, Any]


class Blocks(NamedTuple):
    """An inner tensor whose dimensions follow those of the outer one.

    Attributes:
        axes: of each of its dimensions which outer one it follows, and how many outer elements one of its own stands
            for; 0 for all of them.
    """

    axes: tuple[tuple[int, int], ...]


class FlatRun(NamedTuple):
    """A flat inner tensor: each of its elements stands for `per` outer ones, in row-major order."""

    per: int


class Whole(NamedTuple):
    """An inner tensor that is the same whatever part of the outer one is meant."""


Cut = Blocks | FlatRun | Whole


class _ClassRule(NamedTuple):
    """How inner tensors of a class are found in boxes: by name, of the outer shape, scales of blocks, flat, whole."""

    same: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


_BLOCKWISE = _ClassRule(same=("qdata",), blocks=("scale", "zero_point"))
_RULES = {
    "Int8Tensor": _BLOCKWISE,
    "Float8Tensor": _BLOCKWISE,
    "IntxUnpackedToInt8Tensor": _BLOCKWISE,
    "OptimState8bit": _ClassRule(same=("codes",), flat=("scale",), whole=("qmap",)),
    "OptimState4bit": _ClassRule(flat=("codes", "scale"), whole=("qmap",)),
    "OptimStateFp8": _ClassRule(same=("codes",), flat=("scale",)),
    "NF4Tensor": _ClassRule(
        flat=("quantized_data", "quantized_scalers", "quantization_factor"), whole=("scaler_mean", "nf4")
    ),
}
"""By the last part of the name of torchao's classes."""
FOLLOWING_SHAPE = ("block_size", "_shape", "n_blocks")
"""Attributes of these classes that are others for a box of other sizes; see `fitted`."""


def rule_name(kind: str) -> str:
    """Return the name under which a class has a rule here, "" if it has none."""
    if kind == QUANTISED:
        return kind
    package, last = kind.removeprefix("a ").partition(".")[0], kind.rpartition(".")[2]
    return last if package == "torchao" and last in _RULES else ""


def cuts_of(piece: TensorPiece) -> Mapping[str, Cut] | None:
    """Return how each inner tensor of a piece follows the outer one; None if that is not known of its class.

    Raises:
        ItemError: the shapes of inner tensors do not fit that of the outer one.
    """
    name = rule_name(piece.kind)
    if not name:
        return None
    if name == QUANTISED:
        return _channels(piece)
    rule = _RULES[name]
    known = {*rule.same, *rule.blocks, *rule.flat, *rule.whole}
    if not known.issuperset(piece.inner):
        return None
    cuts: dict[str, Cut] = {}
    for inner, (_, shape) in piece.inner.items():
        if inner in rule.whole:
            cuts[inner] = Whole()
        elif inner in rule.flat:
            cuts[inner] = _run(piece, inner, shape)
        else:
            cuts[inner] = _blocks(piece, inner, shape, inner in rule.same)
    return cuts


def _channels(piece: TensorPiece) -> Mapping[str, Cut] | None:
    """Return how a quantised tensor follows; of channels with scales of their own torch cannot load a part."""
    axis = piece.attributes.get("axis")
    cuts: dict[str, Cut] = {}
    for inner, (_, shape) in piece.inner.items():
        if inner == INTEGERS:
            cuts[inner] = _blocks(piece, inner, shape, True)
        elif type(axis) is not int or not 0 <= axis < len(piece.shape) or shape != (piece.shape[axis],):
            raise ItemError(_misfit(piece, inner, shape))
    return cuts if len(cuts) == len(piece.inner) else None


def _run(piece: TensorPiece, inner: str, shape: Ints) -> FlatRun:
    n_outer, n_inner = volume(piece.shape), volume(shape)
    if len(shape) != 1 or bool(n_outer) != bool(n_inner) or (n_inner and n_outer % n_inner):
        raise ItemError(_misfit(piece, inner, shape))
    return FlatRun(n_outer // n_inner if n_inner else 1)


def _blocks(piece: TensorPiece, inner: str, shape: Ints, is_same: bool) -> Blocks:
    block_size = piece.attributes.get("block_size")
    if is_same:
        block_size = [1] * len(piece.shape)
    elif not isinstance(block_size, list | tuple) or not all(type(size) is int and size > 0 for size in block_size):
        raise ItemError(f"its {inner} has no block_size to tell what it is of")
    if len(block_size) != len(piece.shape) or len(shape) != len(piece.shape):
        raise ItemError(_misfit(piece, inner, shape))
    axes = []
    for dim, (n_outer, n_inner, size) in enumerate(zip(piece.shape, shape, block_size, strict=True)):
        if n_inner != -(-n_outer // size):
            raise ItemError(_misfit(piece, inner, shape))
        axes.append((dim, 0 if n_outer <= size != 1 else size))
    return Blocks(tuple(axes))


def _misfit(piece: TensorPiece, inner: str, shape: Ints) -> str:
    return f"its {inner} of shape {list(shape)} does not fit {piece.kind} of shape {list(piece.shape)}"


def whole_shape(cut: Cut, shape: Ints, stored: Ints) -> Ints:
    """Return the shape of an inner tensor of a tensor of some shape, of which a piece has it in shape `stored`."""
    if isinstance(cut, Whole):
        return stored
    if isinstance(cut, FlatRun):
        return (-(-volume(shape) // cut.per),)
    return tuple(-(-shape[dim] // per) if per else min(shape[dim], 1) for dim, per in cut.axes)


def inner_box(cut: Cut, shape: Ints, box: Box, stored: Ints) -> Box | None:
    """Return which box of an inner tensor a box of the outer one is; None if the border runs through a block.

    Args:
        cut: how the inner tensor follows.
        shape: of the whole outer tensor.
        box: of it.
        stored: shape of the inner tensor where it is the same for all boxes.
    """
    if isinstance(cut, Whole):
        return (0,) * len(stored), stored
    if isinstance(cut, FlatRun):
        return _run_box(cut.per, shape, box)
    offsets, sizes = [], []
    for dim, per in cut.axes:
        start, size = box[0][dim], box[1][dim]
        end = start + size
        if per and (start % per or (end % per and end != shape[dim])):
            return None
        offsets.append(start // per if per else 0)
        sizes.append((-(-end // per) - start // per) if per else min(size, 1))
    return tuple(offsets), tuple(sizes)


def _run_box(per: int, shape: Ints, box: Box) -> Box | None:
    """Return the run of a flat inner tensor that is a box, if that is one run of elements and begins at a block."""
    offsets, sizes = box
    count = volume(sizes)
    if not count:
        return (0,), (0,)
    cut = next((dim for dim in range(len(shape)) if sizes[dim] != 1), len(shape))
    if any(sizes[dim] != shape[dim] for dim in range(cut + 1, len(shape))):
        return None
    first = sum(offset * prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    end = first + count
    if first % per or (end % per and end != volume(shape)):
        return None
    return (first // per,), (-(-end // per) - first // per,)


def fitted(cuts: Mapping[str, Cut], attributes: Mapping[str, Any], shape: Ints) -> dict[str, Any]:
    """Return those attributes that are others for a box of these sizes; lists stand for what holds several numbers."""
    found: dict[str, Any] = {}
    scale = cuts.get("scale")
    if isinstance(scale, Blocks) and isinstance(attributes.get("block_size"), list | tuple):
        found["block_size"] = [per or shape[dim] for dim, per in scale.axes]
    if "_shape" in attributes:
        found["_shape"] = list(shape)
    if type(attributes.get("n_blocks")) is int and type(attributes.get("block_size")) is int:
        found["n_blocks"] = volume(shape) // max(attributes["block_size"], 1)
    return found
