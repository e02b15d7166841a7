"""Lay out a `.pt` file: one zip, one pickle that nests tensors and objects as the source's paths say, one record each.

Source: torch 2.13, `distributed/checkpoint/_nested_dict.py` and `_traverse.py` (`set_element`) for how paths nest.
"""

from __future__ import annotations

from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.selection import Path, SelectedObject, SelectedTensor, Selection
from dcptool.copying.outputs import Fill, LaidOut, Literal, Merged, OutputFile, Verbatim, Wanted
from dcptool.errors import LayoutError
from dcptool.formats.torch_save.graphs import TAIL, Keys, ObjectGraph, rekey, tensor_node
from dcptool.formats.torch_save.made import Made
from dcptool.formats.torch_save.zip_write import NewMember, lay_out_zip
from dcptool.pickles.emit import emit

MAX_LIST = 1 << 24
"""Longest list a path may ask for, and most places that are filled up in all lists together."""


def lay_out(checkpoint: Checkpoint, selection: Selection, wanted: Wanted) -> LaidOut:
    """Lay out a selection in one file; errors as of `one_file`."""
    is_flat = all(item.path is None for item in selection.in_order)
    notes = ("the source records no nesting: names are kept flat",) if is_flat and wanted.nesting == "auto" else ()
    name = wanted.path.rpartition("/")[2]
    file = one_file(checkpoint, name, selection, wanted.nesting == "flat", wanted.merged)
    return LaidOut((file,), True, len(selection.objects), (), notes)


def one_file(
    checkpoint: Checkpoint, name: str, selection: Selection, flat: bool, merged: Merged | None = None
) -> OutputFile:
    """Lay out the file.

    Args:
        checkpoint: the source, whose objects are carried.
        name: of the file.
        selection: what goes in; nested by path unless `flat`.
        flat: one dict of names.
        merged: what stands beside it at the top.

    Raises:
        LayoutError: two paths cannot be nested into one structure.
        ItemError: an object of the source is damaged.
    """
    keys, made = Keys(), Made(checkpoint)
    paths = [(item.name,) if flat or item.path is None else item.path for item in selection.in_order]
    value: Any
    root: Any = [] if paths and all(path and isinstance(path[0], int) for path in paths) else {}
    n_filled = 0
    fills: list[tuple[str, Fill]] = []
    for item, path in zip(selection.in_order, paths, strict=True):
        if isinstance(item, SelectedTensor) and item.entry.fqn in made:
            whole = (0,) * len(item.entry.shape), item.entry.shape
            value, anew = made.node(item.entry, whole, keys)
            fills += anew.items()
        elif isinstance(item, SelectedTensor):
            key = keys.fresh()
            fills.append((key, _fill(item)))
            value = tensor_node(item.dtype, item.entry.shape, key)
        else:
            value = _carried(checkpoint, item, keys)
        if not path and len(paths) == 1:  # the source is one value, no dict: so is this
            root = value
            break
        n_filled += _set(root, path or (item.name,), value, item.name)
        if n_filled > MAX_LIST:
            raise LayoutError(f"{item.name!r}: lists would be mostly empty; --nesting flat keeps flat names")
    if merged and isinstance(root, dict):
        root.update(rekey(ObjectGraph(merged.root, dict(merged.storages)), keys))
    streamed: dict[str, Fill | Verbatim] = {key: Verbatim(record) for key, record in keys.records.items()}
    streamed |= dict(fills)
    members = [NewMember("data.pkl", Literal(emit(root, 2)))]
    members += [NewMember(f"data/{key}", streamed[key]) for key in sorted(streamed, key=int)]
    members += [NewMember(tail, Literal(content)) for tail, content in TAIL]
    parts, nbytes = lay_out_zip(members)
    return OutputFile(name, nbytes, parts)


def _fill(tensor: SelectedTensor) -> Fill:
    shape = tensor.entry.shape
    return Fill(tensor.entry.fqn, (0,) * len(shape), shape, tensor.dtype, tensor.nbytes)


def _carried(checkpoint: Checkpoint, item: SelectedObject, keys: Keys) -> Any:
    return rekey(ObjectGraph(*checkpoint.graph(item.entry)), keys)


def _set(root: Any, path: Path, value: Any, name: str) -> int:
    """Put a value at a path; strings are keys of dicts, numbers are places in lists, which are made as needed.

    Returns:
        How many other places of lists had to be filled up for it.
    """
    here: Any = root
    n_filled = 0
    for part, following in zip(path, [*path[1:], None], strict=True):
        fresh: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(part, int) != isinstance(here, list) or (isinstance(part, int) and not 0 <= part < MAX_LIST):
            raise LayoutError(f"{name!r} does not nest with the others at {part!r}; --nesting flat keeps flat names")
        if isinstance(part, int):
            n_filled += max(0, part - len(here))
            here += [None] * (part + 1 - len(here))  # as torch fills what is not selected
        there = here[part] if isinstance(part, int) else here.get(part)
        if there is None:
            here[part] = there = fresh
        elif following is None or not isinstance(there, dict | list):
            raise LayoutError(f"{name!r} is in the place of another entry; --nesting flat keeps flat names")
        here = there
    return n_filled
