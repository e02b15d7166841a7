"""The values in a pickle that torch.save wrote, by nested path, flattened as torch.distributed.checkpoint does.

Source: torch 2.13, distributed/checkpoint/_traverse.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dcptool.errors import DcptoolError, MetadataError
from dcptool.pickles import plain
from dcptool.pickles.standins import Global, Node, qualified_name
from dcptool.pickles.tensors import foreign_tensor, is_tensor

MAX_DEPTH = 60
MAX_KEY_CHARS = 10_000

Path = tuple[str | int, ...]

_SHARDED_OBJECT = re.compile(r".+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
"""Source: megatron-core 0.16.1, dist_checkpointing/mapping.py, ShardedObject.unique_key."""


def mapping_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a dict, or of one of its kin in `collections` that was not executed."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, Node) or not isinstance(value.function, Global):
        return None
    name = qualified_name(value)
    try:
        if name in ("collections.OrderedDict", "collections.defaultdict") and value.called:
            return dict(value.items or ())
        if name == "collections.Counter" and len(value.args) == 1 and isinstance(value.args[0], dict):
            return value.args[0]
        # An instance with items set on it is of a subclass of dict.
        return dict(value.items) if value.items and not value.called and not value.args else None
    except TypeError:  # a key that cannot be hashed: no pickler writes that
        return None


def key_text(key: Any) -> str:
    """Return a dict key as text: as `str` does for plain ones, else as its readable form."""
    if isinstance(key, str):
        return key
    try:
        return str(plain.decode(key))[:MAX_KEY_CHARS]
    except (DcptoolError, ValueError):
        return f"<{qualified_name(key)}>"


def leaves(root: Any, pickle_nbytes: int) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) of everything torch would not look into further.

    Raises:
        MetadataError: it is nested too deep, or is more than a pickle of that length can hold.

    Dicts are always entered, lists only if they hold a tensor, a dict or such a list; tuples never, nor what Megatron
    saves as an object. An empty dict
    is a leaf here: torch drops it when it flattens, but a reader wants to know of it.
    """
    entered: dict[int, bool] = {}

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if len(path) > MAX_DEPTH:
            raise MetadataError(f"its dicts and lists are nested more than {MAX_DEPTH} deep")
        mapping = None if _is_object(path) else mapping_of(value)
        if mapping:
            for key, part in mapping.items():
                yield from walk(part, (*path, key_text(key)))
        elif isinstance(value, list) and value and (not path or _is_entered(value, entered)) and not _is_object(path):
            for index, part in enumerate(value):
                yield from walk(part, (*path, index))
        else:
            yield path, value

    limit = 1000 + pickle_nbytes  # a value takes two bytes at the least: more of them are shared dicts that multiply
    for count, leaf in enumerate(walk(root, ())):
        if count > limit:
            raise MetadataError(f"it stands for more than {limit:,} entries")
        yield leaf


def _is_object(path: Path) -> bool:
    """Tell whether what is at a path is one of Megatron's sharded objects, which DCP keeps whole whatever is in it."""
    return bool(path) and isinstance(path[-1], str) and _SHARDED_OBJECT.fullmatch(path[-1]) is not None


def _is_entered(value: list[Any], known: dict[int, bool], depth: int = 0) -> bool:
    """Tell whether torch would look into a list; `known` holds the answers so far, by identity."""
    if id(value) in known:
        return known[id(value)]
    if depth > MAX_DEPTH:
        raise MetadataError(f"its lists are nested more than {MAX_DEPTH} deep")
    known[id(value)] = False
    known[id(value)] = any(
        mapping_of(part) is not None
        or (isinstance(part, list) and _is_entered(part, known, depth + 1))
        or (isinstance(part, Node) and (is_tensor(part) or bool(foreign_tensor(part))))
        for part in value
    )
    return known[id(value)]
