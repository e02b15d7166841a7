"""Tensors whose values follow from stored integers or small floats and their scales: which, by name and class.

Computes and reads nothing.

Source: torchao 0.18 (`quantization/quant_primitives.py`, `dequantize_affine`, `_dequantize_affine_float8`); torch 2.13,
`distributed/checkpoint/quantized_hf_storage.py`, for `weight_scale_inv`, and
`_blocks` with `_scales`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import NamedTuple

from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.pieces import Blocks
from dcptool.checkpoint.subclasses import Subclass

FLOATS = ("bfloat16", "float16", "float32")
"""Dtypes that values can be computed in."""
BLOCK = 128
"""Rows and columns of a block with one scale, where its `weight_scale_inv` says no other."""
GROUP_NBYTES = 16
"""Bytes of a group of MXFP4 with one exponent, two values a byte."""
_CLASSES = {"Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"}
_FLOAT8 = re.compile(r"float8_e\dm\d\w*")


class Recipe(NamedTuple):
    """How the values of a tensor follow: (values - zero point) × scale, computed in float32.

    Attributes:
        values: what is stored, of the tensor's shape.
        scale: one for each block.
        zero_point: likewise, None if there is none.
        block: elements of a block along each dimension; 0 for all of them.
        packed: values are MXFP4: two of each byte, low bits first, with exponents as scales.
    """

    values: TensorEntry
    scale: TensorEntry
    zero_point: TensorEntry | None
    block: Ints
    packed: bool = False


def recipes_of(entries: Mapping[str, Entry], subclasses: Mapping[str, Subclass]) -> tuple[dict[str, Recipe], Set[str]]:
    """Return the recipe of each tensor that has one, by fqn, and the fqns of scales that are needed no more.

    Args:
        entries: of a checkpoint.
        subclasses: its tensors made of tensors.
    """
    found: dict[str, Recipe] = {}
    for fqn, subclass in subclasses.items():
        if recipe := _of_subclass(subclass):
            found[fqn] = recipe
    scales: set[str] = set()
    for fqn, scale in entries.items():
        weight = entries.get(fqn.removesuffix("_scale_inv")) if fqn.endswith(".weight_scale_inv") else None
        if isinstance(weight, TensorEntry) and isinstance(scale, TensorEntry) and _FLOAT8.fullmatch(weight.dtype):
            block = _block_of(weight.shape, scale.shape)
            if block:
                found[weight.fqn] = Recipe(weight, scale, None, block)
                scales.add(fqn)
        blocks = entries.get(f"{fqn.removesuffix('_scales')}_blocks") if fqn.endswith("_scales") else None
        if isinstance(blocks, TensorEntry) and isinstance(scale, TensorEntry) and _is_mxfp4(blocks, scale):
            per_group = (*(1 for _ in scale.shape[:-1]), blocks.shape[-1] * 2)
            found[blocks.fqn] = Recipe(blocks, scale, None, per_group, packed=True)
            scales.add(fqn)
    return found, scales


def as_values(entry: TensorEntry, recipe: Recipe, dtype: str) -> TensorEntry:
    """Return a tensor as the values it stands for; of packed ones the last two dimensions are one, as torch has it."""
    if not recipe.packed:
        return entry._replace(dtype=dtype, kind="")
    *outer, n_groups, n_bytes = entry.shape
    shape, table = (*outer, n_groups * n_bytes * 2), ChunkTable()
    mark = table.mark()
    table.add((0,) * len(shape), shape, entry.chunks[0].item if len(entry.chunks) else None)
    return entry._replace(dtype=dtype, shape=shape, chunks=table.chunks_since(mark, len(shape)), replicas=())


def _is_mxfp4(blocks: TensorEntry, scales: TensorEntry) -> bool:
    return (
        (blocks.dtype, scales.dtype) == ("uint8", "uint8")
        and len(blocks.shape) >= 2
        and blocks.shape[:-1] == scales.shape
        and blocks.shape[-1] == GROUP_NBYTES
    )


def _of_subclass(subclass: Subclass) -> Recipe | None:
    if subclass.piece.kind.rpartition(".")[2] not in _CLASSES or subclass.cuts is None or not subclass.inner:
        return None
    inner = {part.inner: part for part in subclass.inner}
    scale = subclass.cuts.get("scale")
    if not isinstance(scale, Blocks) or "qdata" not in inner:
        return None
    return Recipe(inner["qdata"], inner["scale"], inner.get("zero_point"), tuple(per for _, per in scale.axes))


def _block_of(shape: Ints, scale: Ints) -> Ints | None:
    """Return the block that scales are of, None where they are not of blocks of 128 × 128."""
    fits = len(shape) == len(scale) == 2 and all(-(-n // BLOCK) == m for n, m in zip(shape, scale, strict=True))
    return (BLOCK, BLOCK) if fits else None
