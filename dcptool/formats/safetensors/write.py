"""Lay out safetensors files: one, or shards with a HuggingFace index. Plans bytes; writes and reads nothing.

Source: the safetensors format (a length, a JSON header, the values); huggingface_hub's names of shards and its index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.selection import SelectedTensor
from dcptool.copying.outputs import Fill, Literal, OutputFile
from dcptool.errors import UnsupportedError

INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8


def require_supported(tensors: Sequence[SelectedTensor]) -> None:
    """Refuse dtypes that safetensors has no code for.

    Raises:
        UnsupportedError: names the tensors.
    """
    wrong = [tensor for tensor in tensors if dtypes.lookup(tensor.dtype).safetensors is None]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        listed = ", ".join(f"{tensor.name!r} ({tensor.dtype})" for tensor in wrong[:3])
        hint = " ".join(f"--exclude {tensor.entry.fqn!r}" for tensor in wrong[:3])
        raise UnsupportedError(f"safetensors cannot hold {listed}{more}\nLeave them out ({hint}), or use --to torch.")


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
