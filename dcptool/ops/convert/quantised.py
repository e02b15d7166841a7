"""Quantised tensors in a conversion: as what is inside them, or as the values they stand for."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.recipes import FLOATS
from dcptool.checkpoint.selection import Renaming, Selection, select, with_inner
from dcptool.errors import LayoutError, UnsupportedError
from dcptool.formats.torch_save.made import Made


def dequantized(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Return the checkpoint with the values that quantised tensors stand for.

    Raises:
        UnsupportedError: nothing of it is quantised in a way that is known, or it cannot be written as that dtype.
        LayoutError: pieces of a tensor each have a scale of their own.
    """
    if dtype not in FLOATS:
        raise UnsupportedError(f"--dequantize {dtype}: choose one of {', '.join(FLOATS)}")
    found, made = checkpoint.dequantized(dtype), Made(checkpoint)
    if not found.recipes:
        raise UnsupportedError(
            f"{checkpoint.path} holds nothing that --dequantize knows: int8 and float8 tensors of torchao, float8 "
            "weights with a weight_scale_inv of blocks of 128 × 128, and MXFP4 as _blocks with _scales",
            next_step="Leave it out to convert tensors as they are.",
        )
    for fqn in found.recipes.keys() & checkpoint.subclasses.keys():
        for inner in checkpoint.subclasses[fqn].inner:
            made.require_alike(checkpoint.subclasses[fqn], inner)
    return found


def flattened(
    checkpoint: Checkpoint, keys: Sequence[str], exclude: Sequence[str], renaming: Renaming, without: Set[str]
) -> tuple[Selection, Checkpoint]:
    """Return what is selected with inner tensors in the place of those made of them, and the checkpoint that has them.

    Raises:
        LayoutError: the inner tensors of one cannot be joined.
    """
    keys, exclude = with_inner(checkpoint, keys, exclude)
    flat, made = checkpoint.flat, Made(checkpoint)
    selection = select(flat, keys, exclude, renaming, without)
    chosen = {item.entry.fqn for item in selection.in_order}
    made_of: set[str] = set()
    for fqn, subclass in checkpoint.subclasses.items():
        if fqn in chosen:  # still there: it has no inner tensors
            raise LayoutError(f"--flatten-subclasses: {subclass.problem}")
        taken = [inner for inner in subclass.inner if inner.fqn in chosen]
        if taken and "zero_point" in subclass.piece.attributes:
            raise LayoutError(
                f"--flatten-subclasses: {fqn!r} is {subclass.piece.kind} with one scale, which is no tensor: its "
                f"integers alone would be written",
                next_step=f"Leave it out with --exclude {fqn!r}; --to torch and --to dcp take it as it is.",
            )
        made_of |= {name for name in subclass.piece.attributes if taken}
        for inner in taken:
            made.require_alike(subclass, inner)
    if made_of:
        note = f"what is no tensor in tensors made of tensors is left out: {', '.join(sorted(made_of))}"
        selection = selection._replace(notes=(*selection.notes, note))
    return selection, flat
