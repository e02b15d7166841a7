"""Lay out the output of a conversion in the format that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.selection import SelectedObject, Selection
from dcptool.copying.outputs import Literal, OutputFile
from dcptool.errors import DcptoolError, ItemError, LayoutError, UnsupportedError
from dcptool.formats.dcp import write as dcp_write
from dcptool.formats.safetensors import write as safetensors_write
from dcptool.formats.safetensors.reader import SUFFIX
from dcptool.formats.safetensors.write import INDEX
from dcptool.formats.torch_save import write as torch_save_write
from dcptool.pickles import plain

OBJECTS_FILE = "objects.json"
FORMATS = ("torch", "safetensors", "dcp")


class Layout(NamedTuple):
    """What is to be written.

    Attributes:
        files: what may be written in any order.
        is_file: whether the output is the one file, else a folder of them.
        n_objects: objects that are kept.
        skipped: fqns of those that are not.
        notes: worth knowing, one sentence each.
        validate: checks the written output at a path with a library that is not ours, where there is one.
        last: files that are written after all others, in order: what makes the output complete.
    """

    files: tuple[OutputFile, ...]
    is_file: bool
    n_objects: int
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    validate: Callable[[str], None]
    last: tuple[OutputFile, ...] = ()


def is_one_file(to: str, path: str) -> bool:
    """Tell whether output at a path is one file, else a folder.

    Raises:
        UnsupportedError: its name says another format, so that it would be taken for that later.
    """
    name = path.rpartition("/")[2].lower()
    if to == "torch" and name.endswith(SUFFIX):
        raise UnsupportedError(f"{path} ends as safetensors do, and --to torch writes a torch.save file: name it .pt")
    is_file = to == "torch" or (to == "safetensors" and path.endswith(SUFFIX))
    if not is_file and name.endswith((".pt", ".pth", ".bin", SUFFIX)):
        meant = f"{path.removesuffix(name)}{name.rpartition('.')[0]}"
        wanted = f"name it {meant}{SUFFIX}, or {meant} for a folder" if to == "safetensors" else f"name it {meant}"
        raise UnsupportedError(f"{path} has a file's name, and --to {to} would make it a folder: {wanted}")
    return is_file


def lay_out(
    checkpoint: Checkpoint,
    selection: Selection,
    to: str,
    path: str,
    objects: str | None,
    nesting: str,
    max_shard_nbytes: int,
) -> Layout:
    """Lay out a selection; arguments as in `rewrite.ConvertOptions`.

    Raises:
        UnsupportedError: the format cannot hold something that is selected.
        LayoutError: objects are selected and are an error, or are all that is selected and are left out.
    """
    objects = objects or ("skip" if to == "safetensors" else None)
    if objects == "skip" and selection.objects and not selection.tensors:
        folder = f" and a folder such as {path.removesuffix(SUFFIX)}" if path.endswith(SUFFIX) else ""
        how = (
            f"--objects keep{folder} writes them beside tensors" if to == "safetensors" else "--objects keep takes them"
        )
        raise LayoutError(
            f"no tensor is selected, only objects, such as {selection.objects[0].name!r}, which are left out\n"
            f"{how}; --keys and --exclude select."
        )
    if objects == "error" and selection.objects:
        objects_ = "1 object is" if len(selection.objects) == 1 else f"{len(selection.objects):,} objects are"
        raise LayoutError(
            f"{objects_} selected, such as {selection.objects[0].name!r}, and --objects error refuses them\n"
            "--objects skip leaves them out, --objects keep takes them; --keys and --exclude select."
        )
    if to == "safetensors":
        return _safetensors(checkpoint, selection, path, objects or "skip", max_shard_nbytes)
    kept = selection.without_objects() if objects == "skip" else selection
    skipped = tuple(item.entry.fqn for item in selection.objects) if objects == "skip" else ()
    if to == "torch":
        notes = ["the source records no nesting: names are kept flat"] if _is_flat(kept) and nesting == "auto" else []
        file = torch_save_write.one_file(checkpoint, path.rpartition("/")[2], kept, nesting == "flat")
        return Layout((file,), True, len(kept.objects), skipped, tuple(notes), _nothing_to_check)
    if to == "dcp":
        if checkpoint.format == "torch_save":
            empty = {item.entry.fqn for item in kept.objects if checkpoint.value(item.entry.fqn) == {}}
            notes = [f"{len(empty)} empty dicts are left out, as torch does"] if empty else []
            kept = kept._replace(in_order=tuple(item for item in kept.in_order if item.entry.fqn not in empty))
        else:
            notes = []
        files, last, more = dcp_write.lay_out_dcp(checkpoint, kept, path)
        return Layout(files, False, len(kept.objects), skipped, (*notes, *more), _nothing_to_check, last)
    raise UnsupportedError(f"there is no format {to!r}; there are {', '.join(FORMATS)}")


def _is_flat(selection: Selection) -> bool:
    return all(item.path is None for item in selection.in_order)


def _nothing_to_check(path: str) -> None:
    return None


def _safetensors(
    checkpoint: Checkpoint, selection: Selection, path: str, objects: str, max_shard_nbytes: int
) -> Layout:
    tensors = selection.tensors
    safetensors_write.require_supported(tensors)
    is_file = is_one_file("safetensors", path)
    if is_file:
        files = [safetensors_write.one_file(path.rpartition("/")[2], tensors)]
    else:
        files = safetensors_write.sharded(tensors, max_shard_nbytes)
    notes = ["bytes are copied, no architecture is mapped: names and shapes are those of the source"]
    n_objects, skipped = 0, tuple(item.entry.fqn for item in selection.objects)
    if objects == "keep" and selection.objects:
        if is_file:
            raise LayoutError(
                f"objects go into a file beside the tensors: name a folder, such as {path.removesuffix(SUFFIX)}"
            )
        files.append(_objects_file(checkpoint, selection.objects))
        n_objects, skipped = len(selection.objects), ()
    last = tuple(file for file in files if file.name == INDEX)
    others = tuple(file for file in files if file.name != INDEX)
    return Layout(others, is_file, n_objects, skipped, tuple(notes), _open_all, last)


def _objects_file(checkpoint: Checkpoint, objects: Sequence[SelectedObject]) -> OutputFile:
    """Return the objects as JSON; only plain values have such a form.

    Raises:
        UnsupportedError: one of them has none.
    """
    values = {}
    for item in objects:
        try:
            values[item.name] = _plain(checkpoint.value(item.entry.fqn))
        except (ValueError, UnsupportedError, ItemError) as error:
            hint = f"Leave it out with --exclude {item.entry.fqn!r}, or all with --objects skip."
            raise UnsupportedError(f"{item.entry.fqn!r} has no form in JSON: {error}\n{hint}") from error
    text = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    return OutputFile(OBJECTS_FILE, len(text), [Literal(text)])


def _plain(value: object) -> object:
    shown = plain.to_json(value)
    if shown is None and value is not None:
        raise ValueError(f"it is {value}" if isinstance(value, float) else f"it is a {type(value).__name__}")
    return shown


def _open_all(path: str) -> None:
    """Open safetensors output with the safetensors library.

    Raises:
        ItemError: it does not open.
    """
    import os

    from safetensors import SafetensorError, safe_open

    if "://" in path:
        return
    names = [path] if os.path.isfile(path) else [os.path.join(path, name) for name in sorted(os.listdir(path))]
    for name in names:
        if name.endswith((".json", ".pt")):
            continue
        try:
            with safe_open(name, framework="np") as opened:
                for key in opened.keys():  # noqa: SIM118
                    opened.get_slice(key).get_shape()
        except (SafetensorError, DcptoolError) as error:
            raise ItemError(f"what was written is no safetensors file: {error}; this is a bug") from error
