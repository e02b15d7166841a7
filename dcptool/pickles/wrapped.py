"""What a loaded pickle says about a tensor that is made of tensors: a subclass, or a quantised one. Reads no payload.

No class is imported: what torch's own functions are given to rebuild it is all that is looked at.

Source: torch 2.13, `_utils.py` (`_rebuild_wrapper_subclass`, `_rebuild_qtensor`) and `_tensor.py`
(`_rebuild_from_type_v2`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.pieces import INTEGERS, QUANTISED, SCALES, ZERO_POINTS, Cut, TensorPiece, cuts_of, fitted
from dcptool.checkpoint.regions import contiguous_strides
from dcptool.errors import ItemError
from dcptool.pickles.standins import Global, Node, call, qualified_name
from dcptool.pickles.tensors import PARAMETERS, TensorView, dtype_of, ints_of, storage_view, tensor_view

_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_QTENSOR = "torch._utils._rebuild_qtensor"
_MAX_DEPTH = 4
"""Subclasses inside subclasses that are looked into."""
_MAX_ITEMS = 64
"""Numbers of an attribute that are kept."""


class Wrapped(NamedTuple):
    """A tensor made of tensors: what it is, and its inner tensors as views of storages."""

    piece: TensorPiece
    views: Mapping[str, TensorView]


def wrapped(node: Any, depth: int = 0) -> Wrapped | None:
    """Return what a node describes if that is a tensor of which the inner tensors are in the pickle, None if not.

    Of one rank's slice of a tensor that several ranks hold nothing is returned: it is no whole tensor.

    Raises:
        ItemError: it makes no sense: shapes that do not fit, or storages too short.
    """
    node = _without_parameter(node)
    if node is None:
        return None
    name = qualified_name(node.function)
    if name == _QTENSOR and len(node.args) >= 5:
        return _checked(_quantised(node.args))
    if name != _FROM_TYPE or len(node.args) != 4 or qualified_name(node.args[0]) != _WRAPPER:
        return None
    _, _, arguments, state = node.args
    state = state_of(state)
    if not isinstance(arguments, tuple) or len(arguments) < 3 or not isinstance(arguments[0], Global) or state is None:
        return None
    kind = qualified_name(arguments[0])
    if kind.startswith("torch.distributed."):
        return None
    views, attributes = _inside(state, depth)
    if not views:
        return None
    piece = TensorPiece(f"a {kind}", dtype_of(arguments[1]), ints_of(arguments[2]), _forms(views), attributes)
    return _checked(Wrapped(piece, views))


def _without_parameter(node: Any) -> Node | None:
    for _ in range(_MAX_DEPTH):
        if not isinstance(node, Node) or not node.called:
            return None
        if qualified_name(node.function) not in PARAMETERS or not node.args:
            return node
        node = node.args[0]
    return None


def state_of(state: Any) -> dict[str, Any] | None:
    """Return the attributes that a subclass is given, which may come with those of slots; None if they are no dict."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] or {}), **state[1]} if isinstance(state[0], dict | None) else None
    return state if isinstance(state, dict) and all(isinstance(key, str) for key in state) else None


def _inside(state: Mapping[str, Any], depth: int) -> tuple[dict[str, TensorView], dict[str, Any]]:
    """Return the inner tensors among attributes, and what of the others is plain."""
    views: dict[str, TensorView] = {}
    attributes: dict[str, Any] = {}
    for name, value in state.items():
        try:
            view = tensor_view(value)
            nested = None if view or depth >= _MAX_DEPTH else wrapped(value, depth + 1)
        except ItemError as error:
            raise ItemError(f"its inner tensor {name!r}: {error.message}") from error
        if view:
            views[name] = view
        elif nested:
            views |= {f"{name}.{inner}": view for inner, view in nested.views.items()}
        elif (plain := _plain(value)) is not None:
            attributes[name] = plain
    return views, attributes


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Node) and qualified_name(value) == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return list(value) if all(isinstance(item, bool | int | float | str) for item in value) else None
    return None


def _quantised(args: tuple[Any, ...]) -> Wrapped:
    storage, storage_offset, shape, strides, parameters = args[:5]
    view = storage_view(storage, storage_offset, shape, strides)
    integers = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}.get(view.dtype)
    if integers is None or not isinstance(parameters, tuple) or not parameters:
        raise ItemError(f"it is quantised in a way that is not known, as {view.dtype}")
    views = {INTEGERS: view._replace(dtype=integers)}
    attributes: dict[str, Any] = {"qscheme": qualified_name(parameters[0])}
    if len(parameters) == 4:
        for name, value in ((SCALES, parameters[1]), (ZERO_POINTS, parameters[2])):
            found = tensor_view(value)
            if found is None:
                raise ItemError(f"its {name} are no tensor")
            views[name] = found
        attributes["axis"] = parameters[3]
    elif len(parameters) == 3:
        attributes |= {"scale": _plain(parameters[1]), "zero_point": _plain(parameters[2])}
    return Wrapped(TensorPiece(QUANTISED, view.dtype, view.shape, _forms(views), attributes), views)


def _forms(views: Mapping[str, TensorView]) -> dict[str, tuple[str, Ints]]:
    return {name: (view.dtype, view.shape) for name, view in views.items()}


def _checked(found: Wrapped) -> Wrapped:
    cuts_of(found.piece)  # raises where shapes do not fit
    return found


def rebuilt(root: Any, piece: TensorPiece, cuts: Mapping[str, Cut], shape: Ints, inner: Mapping[str, Node]) -> Any:
    """Return the graph of a box of a tensor made of tensors, after that of a piece of it.

    Args:
        root: of the piece; changed in place, and no longer that of it.
        piece: what it holds.
        cuts: how its inner tensors follow.
        shape: sizes of the box.
        inner: graph of each inner tensor in it, by name.
    """
    node = _without_parameter(root)
    if node is None:
        raise ItemError("its pickle is no call")
    if piece.kind == QUANTISED:
        storage = inner[INTEGERS].args[0]
        storage.value = (storage.value[0], node.args[0].value[1], *storage.value[2:])
        node.args = (storage, 0, shape, contiguous_strides(shape), *node.args[4:])
        return root
    function, kind, arguments, state = node.args
    attributes = {**(state_of(state) or {}), **inner}
    for name, value in fitted(cuts, piece.attributes, shape).items():
        old = attributes[name]
        if isinstance(old, Node):
            attributes[name] = call("torch.Size", tuple(value))
        else:
            attributes[name] = tuple(value) if isinstance(old, tuple) else value
    arguments = (*arguments[:2], shape, contiguous_strides(shape), 0, *arguments[5:])
    node.args = (function, kind, arguments, attributes)
    return root
