"""safetensors as a value: which files there are. Reads nothing.

Source: the Hugging Face index layout; torch 2.13, distributed/checkpoint/hf_storage.py, for `shard-RRRRR-…`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dcptool.checkpoint.format import Format

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"shard-(\d{5})-")


def shard_number(name: str) -> int | None:
    """Return the number, from 1, of a shard that DCP's HuggingFace writer wrote; None for other files."""
    match = _SHARD.match(name)
    return int(match[1]) if match else None


def is_index(name: str) -> bool:
    """Tell whether a name is that of an index."""
    return name.endswith(INDEX_SUFFIX)


def kind_of(files: Mapping[str, int]) -> str | None:
    """Say that a folder with these files holds safetensors, None if it does not."""
    return "safetensors" if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in files) else None


def is_file(name: str, start: bytes) -> bool:
    """Tell whether a file is an index, or begins like a file of tensors (a length, a JSON object) or is named so."""
    return start[8:9] == b"{" or name.endswith((SUFFIX, INDEX_SUFFIX))


def place(names: Iterable[str]) -> str:
    """Return which file names the tensors in a folder with other things: an index, else the shortest name; "" if none.

    >>> place(["notes.txt", "model-1.safetensors", "m.safetensors"])
    'm.safetensors'
    """
    ours = [name for name in names if name.endswith((INDEX_SUFFIX, SUFFIX))]
    return next(filter(is_index, ours), min(ours, key=len, default=""))


def _is_own(name: str) -> bool:
    return name.endswith((SUFFIX, INDEX_SUFFIX))


def _world_size(used: Iterable[str], files: Mapping[str, int]) -> int | None:
    return max(filter(None, map(shard_number, files)), default=None)


SAFETENSORS = Format(
    "safetensors",
    "safetensors' load_file",
    (SUFFIX,),
    is_metadata=is_index,
    is_own=_is_own,
    world_size=_world_size,
    holds_objects=False,
    boxes_in_files=True,
)
