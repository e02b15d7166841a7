"""Quantised tensors in a conversion: as they are, as what is inside them, or as the values they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.scaled import FLOATS
from dcptool.checkpoint.selection import Renaming, Selection, select, with_inner
from dcptool.errors import LayoutError, UnsupportedError
from dcptool.formats.torch_save.made import Made
from dcptool.words import plural


def chosen(
    checkpoint: Checkpoint,
    keys: Sequence[str],
    exclude: Sequence[str],
    renaming: Renaming,
    without: Set[str],
    flatten: bool,
    dequantize: str | None,
) -> tuple[Checkpoint, Selection]:
    """Select of a checkpoint, and return it as it is to be read: with values, or inner tensors, of quantised tensors.

    Args:
        checkpoint: as it was opened.
        keys, exclude, renaming, without: as of `select`.
        flatten: put inner tensors in the place of tensors made of them.
        dequantize: the dtype of values; None to keep tensors as they are.

    Raises:
        LayoutError: the inner tensors of one cannot be joined; and as `select`.
        UnsupportedError: there are no values of that dtype.
    """
    if dequantize:
        checkpoint = _dequantized(checkpoint, dequantize)
    if not flatten:
        selection = select(checkpoint, keys, exclude, renaming, without)
    else:
        selection = _flattened(checkpoint, keys, exclude, renaming, without)
        checkpoint = checkpoint.flat
    values = [item.name for item in selection.tensors if item.entry.fqn in checkpoint.recipes]
    if values:
        note = f"{plural(len(values), 'tensor')} dequantised, such as {values[0]!r}"
        selection = selection._replace(notes=(note, *selection.notes))
    return checkpoint, selection


def require_some_dequantised(path: str, read: Iterable[Checkpoint]) -> None:
    """Refuse a conversion to values of what holds nothing quantised.

    Args:
        path: of the source.
        read: its checkpoints, as they are to be read.

    Raises:
        UnsupportedError: there is nothing to do.
    """
    if not any(checkpoint.recipes for checkpoint in read):
        raise UnsupportedError(
            f"{path} holds nothing that --dequantize knows: int8 and float8 tensors of torchao, float8 weights with a "
            "weight_scale_inv of blocks of 128 × 128, and MXFP4 as _blocks with _scales",
            next_step="Leave it out to convert tensors as they are.",
        )


def _dequantized(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    if dtype not in FLOATS:
        raise UnsupportedError(f"--dequantize {dtype}: choose one of {', '.join(FLOATS)}")
    found, made = checkpoint.dequantized(dtype), Made(checkpoint)
    for fqn in found.recipes.keys() & checkpoint.subclasses.keys():
        for inner in checkpoint.subclasses[fqn].inner:
            made.require_alike(checkpoint.subclasses[fqn], inner)
    return found


def _flattened(
    checkpoint: Checkpoint, keys: Sequence[str], exclude: Sequence[str], renaming: Renaming, without: Set[str]
) -> Selection:
    """Select of a checkpoint with inner tensors in the place of those made of them."""
    flat, made = checkpoint.flat, Made(checkpoint)
    selection = select(flat, *with_inner(checkpoint, keys, exclude), renaming, without)
    names = {item.entry.fqn for item in selection.in_order}
    lost: set[str] = set()
    for fqn, subclass in checkpoint.subclasses.items():
        if fqn in names:  # still there: it has no inner tensors
            raise LayoutError(f"--flatten-subclasses: {subclass.problem}")
        taken = [inner for inner in subclass.inner if inner.fqn in names]
        if taken and "zero_point" in subclass.piece.attributes:
            raise LayoutError(
                f"--flatten-subclasses: {fqn!r} is {subclass.piece.kind} with one scale, which is no tensor: its "
                "integers alone would be written",
                next_step=f"Leave it out with --exclude {fqn!r}; --to torch and --to dcp take it as it is.",
            )
        lost |= {name for name in subclass.piece.attributes if taken}
        for inner in taken:
            made.require_alike(subclass, inner)
    if not lost:
        return selection
    note = f"what is no tensor in tensors made of tensors is left out: {', '.join(sorted(lost))}"
    return selection._replace(notes=(*selection.notes, note))
