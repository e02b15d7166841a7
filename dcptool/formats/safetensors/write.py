"""Lay out safetensors files: one, or shards with a HuggingFace index. Plans bytes; writes and reads nothing.

Source: the safetensors format (a length, a JSON header, the values); huggingface_hub's names of shards and its index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.selection import SelectedObject, SelectedTensor, Selection
from dcptool.copying.outputs import Fill, LaidOut, Literal, OutputFile, Wanted
from dcptool.errors import DcptoolError, ItemError, LayoutError, UnsupportedError
from dcptool.formats.safetensors.format import SUFFIX
from dcptool.pickles import plain
from dcptool.words import listed

INDEX = "model.safetensors.index.json"
OBJECTS_FILE = "objects.json"
_ALIGNMENT = 8


def lay_out(checkpoint: Checkpoint, selection: Selection, wanted: Wanted) -> LaidOut:
    """Lay out tensors in one file, or in a folder with objects beside them as JSON.

    Raises:
        UnsupportedError: a dtype, or an object, has no form there.
        LayoutError: objects are selected and the output is one file.
    """
    tensors = selection.tensors
    require_supported(tensors)
    is_file = wanted.path.endswith(SUFFIX)
    if is_file:
        files = [one_file(wanted.path.rpartition("/")[2], tensors)]
    else:
        files = sharded(tensors, wanted.max_shard_nbytes)
    if selection.objects:
        if is_file:
            raise LayoutError(
                f"objects go into a file beside the tensors: name a folder, such as {wanted.path.removesuffix(SUFFIX)}"
            )
        files.append(_objects_file(checkpoint, selection.objects))
    last = tuple(file for file in files if file.name == INDEX)
    others = tuple(file for file in files if file.name != INDEX)
    notes = ("bytes are copied, no architecture is mapped: names and shapes are those of the source",)
    return LaidOut(others, is_file, len(selection.objects), (), notes, _open_all, last)


def keeping(path: str) -> str:
    """Say what `--objects keep` does for output at a path, and what it needs there."""
    folder = f" and a folder such as {path.removesuffix(SUFFIX)}" if path.endswith(SUFFIX) else ""
    return f"{folder} writes them beside tensors"


def require_supported(tensors: Sequence[SelectedTensor]) -> None:
    """Refuse dtypes that safetensors has no code for, and names that are no UTF-8.

    Raises:
        UnsupportedError: names the tensors.
    """
    odd = next((tensor for tensor in tensors if any("\ud800" <= char <= "\udfff" for char in tensor.name)), None)
    if odd:
        raise UnsupportedError(
            f"safetensors cannot hold the name {odd.name!a}: half a surrogate pair is no UTF-8",
            next_step="Give it another name with --rename or --add-prefix and --strip-prefix, or use --to torch.",
        )
    wrong = [tensor for tensor in tensors if dtypes.lookup(tensor.dtype).safetensors is None]
    if wrong:
        named = listed([f"{tensor.name!r} ({tensor.dtype})" for tensor in wrong], 3)
        hint = " ".join(f"--exclude {tensor.entry.fqn!r}" for tensor in wrong[:3])
        other = ", or use --to torch" if all(dtypes.lookup(tensor.dtype).numpy for tensor in wrong) else ""
        raise UnsupportedError(f"safetensors cannot hold {named}", next_step=f"Leave them out ({hint}){other}.")


def one_file(name: str, tensors: Sequence[SelectedTensor]) -> OutputFile:
    """Lay out one file; widest elements first, so that every tensor is aligned to its element."""
    ordered = sorted(tensors, key=lambda tensor: (-dtypes.lookup(tensor.dtype).itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": dtypes.lookup(tensor.dtype).safetensors,
            "shape": list(_shape(tensor)),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % _ALIGNMENT)
    head = Literal(len(text).to_bytes(8, "little") + text)
    fills = [_fill(tensor) for tensor in ordered]
    return OutputFile(name, head.nbytes + position, [head, *fills])


def sharded(tensors: Sequence[SelectedTensor], max_shard_nbytes: int) -> list[OutputFile]:
    """Lay out a folder as HuggingFace does: `model.safetensors`, or shards of at most so many bytes and their index.

    A tensor larger than that has a shard of its own.
    """
    shards: list[list[SelectedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_nbytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        return [one_file("model.safetensors", shards[0])]
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    text = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    files = [one_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    return [*files, OutputFile(INDEX, len(text), [Literal(text)])]


def _fill(tensor: SelectedTensor) -> Fill:
    entry = tensor.entry
    return Fill(entry.fqn, (0,) * len(entry.shape), entry.shape, tensor.dtype, tensor.nbytes)


def _shape(tensor: SelectedTensor) -> Ints:
    """Return the shape in the header; packed float4 counts single values there, two for each of torch's."""
    shape = tensor.entry.shape
    if tensor.dtype == "float4_e2m1fn_x2" and shape:
        return (*shape[:-1], shape[-1] * 2)
    return shape


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
            raise UnsupportedError(f"{item.entry.fqn!r} has no form in JSON: {error}", next_step=hint) from error
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
    from safetensors import SafetensorError, safe_open

    if "://" in path:
        return
    inside = [] if os.path.isfile(path) else [name for name in sorted(os.listdir(path)) if name.endswith(SUFFIX)]
    names = [os.path.join(path, name) for name in inside] or [path]  # a file has a temporary name
    for name in names:
        try:
            with safe_open(name, framework="np") as opened:
                for key in opened.keys():  # noqa: SIM118
                    opened.get_slice(key).get_shape()
        except (SafetensorError, DcptoolError) as error:
            raise ItemError(f"what was written is no safetensors file: {error}; this is a bug") from error
