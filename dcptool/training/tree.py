"""A state as torch.distributed.checkpoint can keep it, and back: what was saved comes back as it was.

DCP looks into dicts and lists only: it turns integer keys into text, drops empty dicts, loads lists of dicts as dicts,
and puts a tuple with tensors into one pickle. What it keeps is left as it is, under the names it gives. Anything else
becomes a dict of its tensors with one object `_structure`: the containers without tensors, and where these belong.

Source: torch 2.13, distributed/checkpoint/_traverse.py, _nested_dict.py.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dcptool.ops.diff.live import is_entered, leaves

STRUCTURE = "_structure"
"""Name of the object that says how the tensors beside it belong together."""
Path = tuple[str | int, ...]
_Keys = tuple[Any, ...]


def pack(value: Any) -> Any:
    """Return a state as nested dicts and lists that DCP keeps exactly; tensors are the same, all else is copied."""
    if torch.is_tensor(value):
        return value
    if isinstance(value, Mapping):
        return {key: pack(part) for key, part in value.items()} if _is_kept(value) else _structured(value)
    if isinstance(value, list | tuple) and (is_entered(value) or has_tensors(value)):
        return [pack(part) for part in value] if type(value) is list and is_entered(value) else _structured(value)
    return copy.deepcopy(value)


def unpack(packed: Any) -> Any:
    """Return the state of which `pack` made this; containers it left as they are come back as dict and list.

    Raises:
        ValueError: a `_structure` does not fit the tensors beside it.
    """
    if isinstance(packed, dict):
        if STRUCTURE in packed:
            return _rebuilt(packed)
        return {key: unpack(part) for key, part in packed.items()}
    if isinstance(packed, list) and is_entered(packed):
        return [unpack(part) for part in packed]
    return packed


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the leaves of a packed tree by the names that DCP gives them, and the path of each in the tree.

    Dicts that are empty are left out, as DCP does.

    Raises:
        ValueError: two would have one name.
    """
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, value in leaves((), tree):
        fqn = ".".join(map(str, path))
        if fqn in values:
            raise ValueError(f"two values of the state would be named {fqn!r}: {paths[fqn]} and {path}")
        values[fqn], paths[fqn] = value, path
    return values, paths


def nested(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the packed tree whose leaves have these values and paths."""
    root = _Branch()
    for fqn, value in values.items():
        place, path = root, paths[fqn]
        for key in path[:-1]:
            place = place.setdefault(key, _Branch())
        place[path[-1]] = value
    made: dict[str, Any] = _with_lists(root)
    return made


def _with_lists(value: Any) -> Any:
    """Return nested dicts with those of indices made lists; only `nested` makes dicts with keys that are integers."""
    if not isinstance(value, _Branch):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    return [parts[index] for index in sorted(parts)] if parts and all(type(key) is int for key in parts) else parts


class _Branch(dict[Any, Any]):
    """A dict that `nested` made; values that are dicts are no branches of the tree."""


def _is_kept(value: Mapping[Any, Any]) -> bool:
    """Tell whether DCP keeps a mapping as it is: not empty, of names none of which looks like another's."""
    if type(value) not in (dict, OrderedDict) or not value or STRUCTURE in value:
        return False
    if not all(type(key) is str for key in value):
        return False
    dotted = [key for key in value if "." in key]
    return not any(key[:at] in value for key in dotted for at, sign in enumerate(key) if sign == ".")


def has_tensors(value: Any) -> bool:
    """Tell whether there are tensors in nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_tensors, value))
    return isinstance(value, torch.Tensor)


def _structured(value: Any) -> dict[str, Any]:
    found: list[tuple[_Keys, torch.Tensor]] = []
    skeleton = _skeleton(value, (), found)
    names: dict[str, _Keys] = {}
    tensors = {}
    for path, tensor in found:
        name = ".".join(map(str, path))
        while name in names or name == STRUCTURE:
            name += "_"
        names[name], tensors[name] = path, tensor
    return {STRUCTURE: (skeleton, tuple((path, name) for name, path in names.items())), **tensors}


def _skeleton(value: Any, path: _Keys, found: list[tuple[_Keys, torch.Tensor]]) -> Any:
    """Return a copy of a value with None in place of tensors, which are collected."""
    if torch.is_tensor(value):
        found.append((path, value))
        return None
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, part in value.items():
            made[key] = _skeleton(part, (*path, key), found)
        return made
    if isinstance(value, list | tuple):
        return _like(value, [_skeleton(part, (*path, index), found) for index, part in enumerate(value)])
    return copy.deepcopy(value)


def _like(value: Sequence[Any], parts: list[Any]) -> Any:
    """Return a list or tuple of the same kind with other parts."""
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = parts
        return made
    kind: Any = type(value)
    return kind(*parts) if hasattr(value, "_fields") else kind(parts)


def _rebuilt(packed: dict[str, Any]) -> Any:
    structure = packed[STRUCTURE]
    if not (isinstance(structure, tuple) and len(structure) == 2):
        raise ValueError(f"{STRUCTURE} is {type(structure).__name__}, not what dcptool.training saves")
    skeleton, places = structure
    try:
        return _filled(skeleton, [(path, packed[name]) for path, name in places])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{STRUCTURE} does not fit the tensors beside it: {error!r}") from error


def _filled(skeleton: Any, tensors: Sequence[tuple[_Keys, Any]]) -> Any:
    """Put tensors back where they belong; tuples are made anew."""
    if any(not path for path, _ in tensors):
        return tensors[0][1]
    by_key: dict[Any, list[tuple[_Keys, Any]]] = {}
    for path, tensor in tensors:
        by_key.setdefault(path[0], []).append((path[1:], tensor))
    if isinstance(skeleton, dict):
        made = copy.copy(skeleton)
        for key, inner in by_key.items():
            made[key] = _filled(skeleton[key], inner)
        return made
    parts = list(skeleton)
    for key, inner in by_key.items():
        parts[key] = _filled(parts[key], inner)
    return _like(skeleton, parts) if by_key else skeleton
