"""What a loaded pickle says about tensors: storage, dtype, shape, strides. Reads no payload bytes.

Source: torch 2.13, `_utils.py` (`_rebuild_tensor_v2`, `_rebuild_tensor_v3`, `_rebuild_parameter`, and the forms that
are only named here), `_tensor.py` (`_rebuild_from_type_v2`) and `serialization.py` (`persistent_id` of storages).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import contiguous_strides, is_contiguous, span, volume
from dcptool.errors import DcptoolError, ItemError
from dcptool.pickles.standins import Global, Node, PersistentId, qualified_name

MAX_NDIM = 64

PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_TENSORS = {
    "torch._utils._rebuild_tensor": 4,
    "torch._utils._rebuild_tensor_v2": 6,
    "torch._utils._rebuild_tensor_v3": 7,
}
_FORMS = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device, as a numpy array",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
}
_TYPED = {"torch._tensor._rebuild_from_type_v2": 1, "torch._utils._rebuild_wrapper_subclass": 0}
"""Calls that make a tensor of a class → which of their arguments is the class."""
_NO_TENSORS = ("torch.", "builtins.", "collections.", "numpy.", "copyreg.")
_MAX_WRAPPERS = 8
"""Calls around the one that rebuilds a tensor: parameter, subclass."""


class TensorView(NamedTuple):
    """A tensor as a view of a storage, as a pickle describes it.

    Attributes:
        storage: key of the storage, the N of the zip member `data/N`.
        storage_nbytes: length of that storage in bytes, as the pickle says.
        dtype: torch's name without prefix.
        shape, strides, storage_offset: in elements.
        conj, neg: the values are the conjugate, the negative of the stored ones.
    """

    storage: str
    storage_nbytes: int
    dtype: str
    shape: Ints
    strides: Ints
    storage_offset: int
    conj: bool
    neg: bool


def tensor_view(node: Any) -> TensorView | None:
    """Return the view a node describes, None if the node is no dense tensor.

    Raises:
        ItemError: it says it is a tensor, but sizes, strides and storage do not fit together.
    """
    for _ in range(_MAX_WRAPPERS):
        if not isinstance(node, Node) or not node.called:
            return None
        name = qualified_name(node.function)
        if name in PARAMETERS and node.args:
            node = node.args[0]
        elif name == "torch._tensor._rebuild_from_type_v2" and len(node.args) == 4:
            function, _, arguments, _ = node.args  # a subclass of Tensor, or a tensor with attributes
            if not isinstance(function, Global) or not isinstance(arguments, tuple):
                return None
            node = Node(function, arguments, True)
        elif name in _TENSORS and len(node.args) >= _TENSORS[name]:
            return _rebuilt(name, node.args)
        else:
            return None
    return None


def part_of(view: TensorView, first: int, shape: Ints) -> TensorView:
    """Return a contiguous part of a contiguous view: `shape` elements, row-major, from its element `first` on.

    Raises:
        ItemError: it does not lie in the view, or the view is strided.
    """
    if not is_contiguous(view.shape, view.strides):
        raise ItemError(
            f"a tensor that should be contiguous has shape {list(view.shape)} and strides {list(view.strides)}"
        )
    if first < 0 or first + volume(shape) > volume(view.shape):
        raise ItemError(f"elements {first:,} to {first + volume(shape):,} are wanted of {volume(view.shape):,}")
    strides, start = contiguous_strides(shape), view.storage_offset + first
    return view._replace(shape=shape, strides=strides, storage_offset=start)


def foreign_tensor(node: Any) -> str:
    """Return what a node is, if it is a tensor of a form or class that `tensor_view` does not look into; "" if not.

    torch's own forms (quantised, sparse, …), subclasses with tensors inside, as torchao's and DTensor, and what a
    subclass with a pickled form of its own makes of tensors it is given.
    """
    for _ in range(_MAX_WRAPPERS):
        if not isinstance(node, Node) or not node.called:
            return ""
        name = qualified_name(node.function)
        if name in PARAMETERS and node.args:
            node = node.args[0]
        elif name in _FORMS:
            return _FORMS[name]
        elif name in _TYPED and len(node.args) > _TYPED[name]:
            return _of_class(node)
        elif not name.startswith(_NO_TENSORS) and any(map(is_tensor, node.args)):
            return f"a {name}"
        else:
            return ""
    return ""


def _of_class(node: Node) -> str:
    """Return what a call makes that is given the class of a tensor; "" if that is a tensor like any."""
    name = qualified_name(node.function)
    kind = node.args[_TYPED[name]]
    if name in _TYPED and isinstance(kind, Global) and qualified_name(kind) != "torch.Tensor":
        return f"a {qualified_name(kind)}"
    function = node.args[0]
    return _FORMS.get(qualified_name(function), "") if isinstance(function, Global) else ""


def is_tensor(node: Any) -> bool:
    """Tell whether a node is a dense tensor, be it one that makes no sense."""
    try:
        return tensor_view(node) is not None
    except DcptoolError:
        return True


def _rebuilt(name: str, args: tuple[Any, ...]) -> TensorView:
    first = 7 if name.endswith("_v3") else 6
    dtype = dtype_of(args[6]) if first == 7 else ""
    return storage_view(args[0], args[1], args[2], args[3], dtype, args[first] if len(args) > first else None)


def storage_view(
    storage: Any, storage_offset: Any, shape: Any, strides: Any, dtype: str = "", flags: Any = None
) -> TensorView:
    """Return the view of a storage that a pickle describes.

    Args:
        storage: what stands for it.
        storage_offset, shape, strides: as the pickle gives them.
        dtype: torch's name; "" for that of the storage.
        flags: whether values are conjugated or negated, if the pickle tells.

    Raises:
        ItemError: they do not fit together.
    """
    if not isinstance(storage, PersistentId) or not isinstance(storage.value, tuple) or len(storage.value) < 5:
        raise ItemError("its pickle names no storage")
    tag, storage_class, key, _, length = storage.value[:5]
    if not dtype:
        kind = dtypes.BY_STORAGE.get(getattr(storage_class, "name", ""))
        if kind is None:
            raise ItemError(f"its pickle names an unknown storage type {qualified_name(storage_class)}")
        dtype = kind.name
    itemsize = dtypes.lookup(dtype).itemsize
    untyped = getattr(storage_class, "name", "") == "UntypedStorage"
    shape, strides = ints_of(shape), ints_of(strides)
    if tag != "storage" or not isinstance(key, str) or not _is_count(length) or not _is_count(storage_offset):
        raise ItemError("its pickle describes its storage in an unknown way")
    if len(shape) != len(strides):
        raise ItemError(f"its pickle gives {len(shape)} sizes but {len(strides)} strides")
    storage_nbytes = length if untyped else length * itemsize
    if (storage_offset + span(shape, strides)) * itemsize > storage_nbytes and 0 not in shape:
        raise ItemError(f"shape {list(shape)} with strides {list(strides)} does not fit its storage")
    flags = flags if isinstance(flags, dict) else {}
    conj, neg = flags.get("conj") is True, flags.get("neg") is True
    return TensorView(key, storage_nbytes, dtype, shape, strides, storage_offset, conj, neg)


def dtype_of(value: Any) -> str:
    """Return torch's name of a dtype without prefix."""
    name = qualified_name(value)
    if not isinstance(value, Global) or not name.startswith("torch."):
        raise ItemError(f"its pickle gives {name} as dtype")
    return name.removeprefix("torch.")


def ints_of(value: Any) -> Ints:
    """Read a shape, strides or offsets: a tuple, or a `torch.Size` of one.

    Raises:
        ItemError: it is none.
    """
    if isinstance(value, Node) and qualified_name(value) == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_NDIM or not all(map(_is_count, value)):
        raise ItemError("its pickle gives no valid shape or strides")
    return tuple(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def tensors_in(root: Any) -> Iterator[TensorView]:
    """Yield every dense tensor in a graph of stand-ins, each node once; none that makes no sense."""
    todo = [root]
    seen: dict[int, Any] = {}  # holds what it knows by identity: that must live
    while todo:
        value = todo.pop()
        if not isinstance(value, dict | list | tuple | set | frozenset | Node) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            todo += [*value, *value.values()]
        elif not isinstance(value, Node):
            todo += value
        elif not is_tensor(value):
            todo += [value.args, value.kwargs, value.state, value.items, value.appended, value.dropped, value.function]
        elif view := _sensible(value):
            yield view


def _sensible(node: Node) -> TensorView | None:
    try:
        return tensor_view(node)
    except DcptoolError:
        return None
