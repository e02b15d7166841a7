"""The header of a safetensors file or blob: names, dtypes, shapes, byte offsets. Reads nothing else.

Source: the safetensors format description (8 bytes little-endian length, a JSON object, the data), and torch 2.13,
distributed/checkpoint/hf_storage.py, for DCP_SHARDING_INFO.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import volume
from dcptool.errors import MetadataError, UnsupportedError
from dcptool.pickles.tensors import MAX_NDIM

MAX_HEADER_NBYTES = 100_000_000
"""The limit of the safetensors library."""
LFS_START = b"version https://git-lfs"
_FIELDS = ("__metadata__", "dtype", "shape", "data_offsets")
_OF_NO_TORCH = ("F6_E2M3", "F6_E3M2")
_DEEP = re.compile(rb"[\[{]\s*(?:[\[{]\s*){8}")


class StoredTensor(NamedTuple):
    """One tensor of a header: torch's dtype name, torch's shape, place and length in the data part in bytes."""

    dtype: str
    shape: Ints
    byte_offset: int
    nbytes: int


class Header(NamedTuple):
    """A parsed header.

    Attributes:
        tensors: by name, in order of the data.
        saved_offsets: of tensors that are a part of a larger one, its first element, per dimension.
        metadata: the free-form `__metadata__` strings.
        data_offset: where the data part begins, counted from the header's first byte.
    """

    tensors: dict[str, StoredTensor]
    saved_offsets: dict[str, Ints]
    metadata: dict[str, str]
    data_offset: int


def read_header(read: Callable[[int, int], bytes], nbytes: int) -> Header:
    """Read and check the header of a safetensors blob.

    Args:
        read: returns bytes of the blob.
        nbytes: the blob's length, header included.

    Raises:
        MetadataError: it is no safetensors data, cut short, or its header contradicts itself.
        UnsupportedError: it holds a tensor of a dtype that the library knows and torch does not.
    """
    start = read(0, min(nbytes, len(LFS_START)))
    if start == LFS_START:
        raise MetadataError("it is a Git LFS pointer, not the file itself; run `git lfs pull`")
    length = int.from_bytes(start[:8], "little") if nbytes >= 8 else 0
    if not 2 <= length <= MAX_HEADER_NBYTES:
        raise MetadataError("this is no safetensors data: its first 8 bytes are not a header length")
    if 8 + length > nbytes:
        raise MetadataError(f"the safetensors header is cut short: {8 + length} bytes needed, {nbytes} there")
    raw = read(8, length)
    if raw[:1] != b"{" or _DEEP.search(raw):
        raise MetadataError("the safetensors header is not the flat JSON object it should be")
    try:
        fields = json.loads(raw.decode(), object_pairs_hook=_object)
        "".join(fields).encode()  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        metadata = _free_form(fields.pop("__metadata__", None))
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"the safetensors header is damaged: {error}") from None
    data_nbytes = nbytes - 8 - length
    try:
        for name, field in fields.hidden:  # the library looks at all of them
            _tensor(name, field, data_nbytes)
        found = {name: _tensor(name, field, data_nbytes) for name, field in fields.items()}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, MetadataError):
            raise
        raise MetadataError(f"the safetensors header is damaged: {type(error).__name__}: {error}") from None
    tensors = dict(sorted(found.items(), key=lambda item: (item[1].byte_offset, item[1].nbytes)))
    end = 0
    for name, tensor in tensors.items():
        if tensor.byte_offset != end:
            raise MetadataError(f"tensor {name!r} begins at byte {tensor.byte_offset} of the data, not at {end}")
        end += tensor.nbytes
    if end != data_nbytes:
        raise MetadataError(f"the safetensors header describes {end} bytes of data, there are {data_nbytes}")
    return Header(tensors, _saved_offsets(metadata, tensors), metadata, 8 + length)


class _Object(dict[str, Any]):
    """A JSON object; `hidden` has those pairs whose name comes again, of which the last counts."""

    hidden: Sequence[tuple[str, Any]] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    """Return a JSON object as a dict; the library takes no field that it knows twice."""
    found = _Object(pairs)
    if len(found) < len(pairs):
        last = {name: index for index, (name, _) in enumerate(pairs)}
        found.hidden = [pair for index, pair in enumerate(pairs) if last[pair[0]] != index]
        twice = next((name for name, _ in found.hidden if name in _FIELDS), None)
        if twice:
            raise ValueError(f"{twice!r} is given twice")
    return found


def _free_form(value: Any) -> dict[str, str]:
    """Return what `__metadata__` holds, which the library takes only if all of it is text."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("__metadata__ may hold nothing but text, and the safetensors library reads nothing else")
    "".join((*value, *value.values())).encode()
    return dict(value)


def _tensor(name: str, field: Mapping[str, Any], data_nbytes: int) -> StoredTensor:
    dtype = dtypes.BY_SAFETENSORS.get(field["dtype"])
    if field["dtype"] in _OF_NO_TORCH:
        message = (
            f"tensor {name!r} has dtype {field['dtype']!r}, which torch has no name for, and dcptool does not read"
        )
        raise UnsupportedError(message, next_step="safetensors' get_slice tells its shape; what wrote it reads it.")
    if dtype is None:
        raise MetadataError(f"tensor {name!r} has dtype {field['dtype']!r}, which this dcptool does not know")
    shape, (start, end) = tuple(field["shape"]), field["data_offsets"]
    numbers = (*shape, start, end)
    if len(shape) > MAX_NDIM or not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise MetadataError(f"tensor {name!r} has no valid shape or offsets")
    if max(accumulate(shape, mul), default=0) >= 1 << 64:  # the library multiplies before it meets a 0
        raise MetadataError(f"tensor {name!r} has a shape with more elements than can be counted")
    if dtype.safetensors == "F4":  # counted in half bytes there, in pairs by torch
        if not shape or shape[-1] % 2:
            raise MetadataError(f"tensor {name!r} is F4 with an odd last dimension")
        shape = (*shape[:-1], shape[-1] // 2)
    if end - start != volume(shape) * dtype.itemsize or end > data_nbytes:
        raise MetadataError(
            f"tensor {name!r} ({dtype.name} {list(shape)}) is said to be at bytes {start}–{end} of {data_nbytes}; "
            "the file is cut short or its header is wrong"
        )
    return StoredTensor(dtype.name, shape, start, end - start)


def _saved_offsets(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Ints]:
    """Parse DCP_SHARDING_INFO: where in the whole tensor each stored part begins."""
    text = metadata.get("DCP_SHARDING_INFO")
    if not isinstance(text, str):
        return {}
    try:
        sharding = json.loads(text) if not _DEEP.search(text.encode()) else {}
        offsets = {name: tuple(sharding[name]["saved_offsets"]) for name in tensors if name in sharding}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MetadataError(f"DCP_SHARDING_INFO of the safetensors header is damaged: {error}") from None
    for name, start in offsets.items():
        valid = all(type(number) is int and 0 <= number < 1 << 62 for number in start)
        if not valid or len(start) != len(tensors[name].shape):
            raise MetadataError(f"DCP_SHARDING_INFO gives {list(start)} as offsets of {name!r}")
    return offsets
