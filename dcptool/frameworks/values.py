"""Single values out of the files of a step, as stand-ins: nothing of a pickle is imported or called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from dcptool.errors import DcptoolError
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.pickles import inert
from dcptool.pickles.standins import Node
from dcptool.storage import Storage

_ZIP = b"PK\x03\x04"
MAX_RANKS = 1 << 17
"""Higher numbers are none of ranks, nor are more names those of one step."""
_MAX_NBYTES = 64 << 20
"""Of a pickle or a JSON file that is read for a value in it."""


def reader(storage: Storage, files: Mapping[str, int]) -> Callable[[str], Any]:
    """Return what reads the pickle of a file of torch.save, a bare pickle or JSON; it returns None for any other."""

    @cache
    def value(name: str) -> Any:
        try:
            return read_value(storage, name, files[name])
        except (DcptoolError, ValueError, RecursionError, KeyError):
            return None

    return value


def read_value(storage: Storage, name: str, nbytes: int) -> Any:
    """Read what the pickle of a file of torch.save, a bare pickle or JSON holds, as stand-ins.

    Raises:
        DcptoolError, ValueError, RecursionError: it cannot be read, or is none of these, or too large.
    """
    if name.endswith(".json"):
        return json.loads(storage.read(name, 0, _small(name, nbytes)))
    if storage.read(name, 0, min(nbytes, len(_ZIP))) == _ZIP:
        archive = TorchZip(lambda at, n: storage.read(name, at, n), nbytes)
        return inert.load(archive.content("data.pkl", _MAX_NBYTES))
    return inert.load(storage.read(name, 0, _small(name, nbytes)))


def _small(name: str, nbytes: int) -> int:
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"{name} is too large to be read for one value")
    return nbytes


def items_of(value: Any) -> dict[Any, Any]:
    """Return the members of a dict, of an ordered one, or the attributes of an instance; empty for anything else."""
    if isinstance(value, Node):
        pairs = [(key, item) for key, item in value.items or () if isinstance(key, str | int)]
        return dict(pairs) or (value.state if isinstance(value.state, dict) else {})
    return value if isinstance(value, dict) else {}


def count_of(value: Any) -> int:
    """Return a number of ranks as it is recorded; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_RANKS else 0


def found_at(value: Any, keys: Sequence[str]) -> Iterator[Any]:
    """Yield what keys lead to in nested dicts; `*` stands for every key."""
    if not keys:
        yield value
        return
    members = items_of(value)
    for key in members if keys[0] == "*" else keys[:1]:
        if key in members:
            yield from found_at(members[key], keys[1:])
