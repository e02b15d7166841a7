"""Find the first difference between two values, or two graphs of stand-ins, without executing anything.

Types count (1, 1.0 and True differ), floats are compared bit for bit; neither the order of keys counts nor whether two
places share one object. Knows nothing of where the values come from: what a tensor or a storage in them holds is asked
of the caller.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from dcptool.errors import DcptoolError, UnsupportedError
from dcptool.pickles import plain
from dcptool.pickles.standins import Global, Node, PersistentId, qualified_name
from dcptool.pickles.tensors import TensorView, tensor_view

MAX_STEPS = 2_000_000
"""Pairs of values that are compared."""
MAX_SHOWN = 60
_UNORDERED = ("builtins.set", "builtins.frozenset")

_Pairs = list[tuple[Any, Any, str]]


class Unequal(NamedTuple):
    """The first difference: its place inside both, "" for the whole, and what is there on each side, in few words."""

    where: str
    a: str
    b: str


class Contents(NamedTuple):
    """Tells whether two tensors of one dtype and shape, and two storages, of the two sides hold the same bytes."""

    same_tensor: Callable[[TensorView, TensorView], bool]
    same_storage: Callable[[Any, Any], bool]


def first_unequal(a: Any, b: Any, contents: Contents) -> Unequal | None:
    """Return the first difference between two decoded values, or two graphs; None if they are equal.

    Args:
        a, b: both what `pickles.plain.decode` gave, or both what `pickles.inert.load` gave.
        contents: compares what lies outside the graphs.

    Raises:
        UnsupportedError: they are too large to be compared.
    """
    todo: _Pairs = [(a, b, "")]
    seen: dict[tuple[int, int], tuple[Any, Any]] = {}  # holds what it knows by identity: that must live
    for _ in range(MAX_STEPS):
        if not todo:
            return None
        a, b, where = todo.pop()
        if (id(a), id(b)) in seen:
            continue
        pairs = _parts(a, b, where, contents)
        if isinstance(pairs, Unequal):
            return pairs
        if pairs:
            seen[id(a), id(b)] = a, b
            todo += reversed(pairs)
    raise UnsupportedError(f"it holds more than {MAX_STEPS:,} values")


def brief(value: Any) -> str:
    """Return a value in at most MAX_SHOWN characters."""
    text = _BRIEF.repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = MAX_SHOWN


def _parts(a: Any, b: Any, where: str, contents: Contents) -> _Pairs | Unequal:
    """Compare two values themselves; return the pairs inside them that are still to be compared."""
    if isinstance(a, Global | PersistentId | Node) or isinstance(b, Global | PersistentId | Node):
        return _stand_in_parts(a, b, where, contents)
    if type(a) is not type(b):
        return _unequal(a, b, where)
    if isinstance(a, dict):
        return _dict_parts(a, b, where)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return Unequal(where, f"{len(a)} values", f"{len(b)} values")
        return [(x, y, f"{where}[{index}]") for index, (x, y) in enumerate(zip(a, b, strict=True))]
    if isinstance(a, plain.Array):
        if (a.class_name, a.dtype, a.shape) != (b.class_name, b.dtype, b.shape):
            return _unequal(a, b, where)
        return [(a.values, b.values, where)]
    if isinstance(a, float | complex):
        return [] if _float_bits(a) == _float_bits(b) else _unequal(a, b, where)
    if isinstance(a, plain.Opaque):
        return [] if a.class_name == b.class_name else _unequal(a, b, where)
    return [] if a == b else _unequal(a, b, where)


def _dict_parts(a: dict[Any, Any], b: dict[Any, Any], where: str) -> _Pairs | Unequal:
    if not all(_is_atom(key) for key in (*a, *b)):  # stand-ins are equal by identity only: go by order
        return [(list(a.items()), list(b.items()), where)]
    places = {(type(key), key): key for key in b}
    for key in a:
        if (type(key), key) not in places:
            return Unequal(f"{where}[{brief(key)}]", "there", "missing")
        del places[type(key), key]
    for key in places.values():
        return Unequal(f"{where}[{brief(key)}]", "missing", "there")
    return [(value, b[key], f"{where}[{brief(key)}]") for key, value in a.items()]


def _stand_in_parts(a: Any, b: Any, where: str, contents: Contents) -> _Pairs | Unequal:
    if isinstance(a, Global) and isinstance(b, Global):
        return [] if _name(a) == _name(b) else Unequal(where, _name(a), _name(b))
    if isinstance(a, PersistentId) and isinstance(b, PersistentId):
        return [] if contents.same_storage(a.value, b.value) else Unequal(where, "storage", "another storage")
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return Unequal(where, _words(a), _words(b))
    views = _view(a), _view(b)
    if views[0] and views[1]:
        words = [f"tensor {view.dtype} {list(view.shape)}" for view in views if view]
        if words[0] != words[1]:
            return Unequal(where, words[0], words[1])
        same = contents.same_tensor(views[0], views[1])
        return [] if same else Unequal(where, words[0], f"{words[1]} of other values")
    if _name(a) != _name(b) or a.called != b.called:
        return Unequal(where, _words(a), _words(b))
    if _name(a) in _UNORDERED:
        decoded = plain.decode(a), plain.decode(b)
        if plain.is_plain(decoded[0]) and plain.is_plain(decoded[1]):
            return [(decoded[0], decoded[1], where)]

    def pairs(*names: str) -> _Pairs:
        return [(getattr(a, name), getattr(b, name), where) for name in names]

    items = (_items(a), _items(b), where)
    return [*pairs("function", "args", "kwargs"), items, *pairs("appended", "state", "dropped")]


def _items(node: Node) -> Any:
    """Return the items of a node as a dict, where their keys can be."""
    if node.items and all(_is_atom(key) for key, _ in node.items):
        return dict(node.items)
    return node.items


def _is_atom(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_atom, value))
    return isinstance(value, str | bytes | int | float | plain.Named | None)


def _view(node: Node) -> TensorView | None:
    try:
        return tensor_view(node)
    except DcptoolError:
        return None


def _name(value: Any) -> str:
    """Return a qualified name, numpy's as before its version 2 moved it."""
    return qualified_name(value).replace("numpy._core.", "numpy.core.")


def _words(value: Any) -> str:
    return f"<{_name(value)}>" if isinstance(value, Global | Node | PersistentId) else brief(value)


def _unequal(a: Any, b: Any, where: str) -> Unequal:
    shown = brief(a), brief(b)
    if shown[0] == shown[1]:  # 1 and another type's 1, or a difference past what is shown
        names = plain.class_name(a), plain.class_name(b)
        shown = (f"{names[0]} {shown[0]}", f"{names[1]} {shown[1]}" + (" (another)" if names[0] == names[1] else ""))
    return Unequal(where, *shown)


def _float_bits(value: complex) -> bytes:
    return struct.pack("<dd", value.real, value.imag)
