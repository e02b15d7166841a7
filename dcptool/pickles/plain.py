"""Turn a loaded pickle into Python values a person can read; whatever is not plain becomes an `Opaque`.

Plain are numbers, strings, bytes, None, containers, sets, OrderedDict, Counter, torch.Size, dtypes, devices, paths,
small tensors, numpy scalars and arrays. No class of a checkpoint is ever imported.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import span
from dcptool.errors import DcptoolError, ItemError, UnsupportedError
from dcptool.pickles.standins import Global, Node, PersistentId, qualified_name
from dcptool.pickles.tensors import TensorView, tensor_view

MAX_DEPTH = 60
MAX_VALUES = 100_000
"""Values decoded from one object: shared references are followed each time, so a small pickle can stand for many."""
MAX_ELEMENTS = 1_000
"""Elements of a tensor or array that are unpacked for display."""

MAX_INT_BITS = 10_000
"""Longer numbers are shown as what they are, not digit by digit: Python refuses to print them."""
MAX_SPAN = 64 * MAX_ELEMENTS
"""Elements from the first to the last of a strided tensor that is unpacked."""

ReadView = Callable[[TensorView], bytes]


class Opaque:
    """A value that is not plain: its class is known, its content is not looked at."""

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name

    def __repr__(self) -> str:
        return f"<{self.class_name}>"


class Named:
    """A plain value of a torch or path type, shown as that type's own repr would show it."""

    def __init__(self, class_name: str, text: str) -> None:
        self.class_name = class_name
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and (self.class_name, self.text) == (other.class_name, other.text)

    def __hash__(self) -> int:
        return hash(self.text)


class Size(tuple[int, ...]):
    """A torch.Size."""

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


class Array:
    """A tensor or numpy array inside an object.

    Attributes:
        class_name: `torch.Tensor` or `numpy.ndarray`.
        dtype: torch's or numpy's name of the element type.
        shape: dimensions, in elements.
        values: all elements in row-major order, None when there are more than MAX_ELEMENTS.
    """

    def __init__(self, class_name: str, dtype: str, shape: Ints, values: list[Any] | None) -> None:
        self.class_name, self.dtype, self.shape, self.values = class_name, dtype, shape, values

    def nested(self) -> Any:
        """Return the elements as nested lists, a bare number for zero dimensions; None if not unpacked."""
        if self.values is None:
            return None
        values = self.values
        for size in reversed(self.shape[1:]):
            values = [values[i : i + size] for i in range(0, len(values), size)] if size else []
        if 0 in self.shape:
            values = []
        return values if self.shape else values[0]

    def __repr__(self) -> str:
        name = self.class_name.rpartition(".")[2].lower()
        if self.values is None:
            return f"{name}(shape={list(self.shape)}, dtype={self.dtype})"
        suffix = f", shape={list(self.shape)}" if 0 in self.shape else ""
        return f"{name}({self.nested()!r}{suffix}, dtype={self.dtype})"


def decode(root: Any, read_view: ReadView | None = None) -> Any:
    """Return the readable form of a loaded pickle.

    Args:
        root: what `inert.load` gave.
        read_view: returns a tensor's bytes from its first element to its last; without it tensors show shape and
            dtype only.

    Returns:
        Python values, with `Size`, `Named`, `Array` and `Opaque` where Python has none of its own.

    Raises:
        ItemError: the object stands for more than MAX_VALUES values or is nested more than MAX_DEPTH deep.
    """
    return _Decoder(read_view).value(root, 0)


def class_name(value: Any) -> str:
    """Return the class of a decoded value as `module.name`, without module for Python's own types."""
    if isinstance(value, Opaque | Named | Array):
        return value.class_name
    if isinstance(value, Size):
        return "torch.Size"
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def is_plain(value: Any) -> bool:
    """Tell whether a decoded value holds nothing opaque."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    return not isinstance(value, Opaque)


def to_json(value: Any) -> Any:
    """Return a decoded value for JSON; None where JSON cannot say all of it (then class and repr must serve).

    Tuples and sizes become lists; names of dtypes, devices and paths become text.
    """
    try:
        return _jsonable(value)
    except TypeError:
        return None


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    if isinstance(value, Named):
        return value.text
    if isinstance(value, Array) and value.values is not None:
        return _jsonable(value.nested())
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _jsonable(item) for key, item in value.items()}
    raise TypeError(class_name(value))


class _Decoder:
    def __init__(self, read_view: ReadView | None) -> None:
        self.read_view = read_view
        self.open: set[int] = set()
        self.count = 0

    def value(self, item: Any, depth: int) -> Any:
        """Decode anything, counting."""
        self.count += 1
        if self.count > MAX_VALUES:
            raise ItemError(f"it stands for more than {MAX_VALUES:,} values")
        if item is None or isinstance(item, bool | int | float | complex | str | bytes | bytearray):
            self.count += len(item) // 1000 if isinstance(item, str | bytes | bytearray) else 0
            if isinstance(item, int) and item.bit_length() > MAX_INT_BITS:
                return Named("int", f"<int of {item.bit_length():,} bits>")
            return item
        if depth > MAX_DEPTH:
            raise ItemError(f"it is nested more than {MAX_DEPTH} levels deep")
        if id(item) in self.open:
            return Opaque("cycle")
        self.open.add(id(item))
        try:
            return self._container(item, depth + 1)
        finally:
            self.open.discard(id(item))

    def _container(self, item: Any, depth: int) -> Any:
        if isinstance(item, Global):
            name = qualified_name(item)
            dtype = name.removeprefix("torch.")
            return Named("torch.dtype", name) if name.startswith("torch.") and dtype in dtypes.BY_NAME else Opaque(name)
        if isinstance(item, Node):
            return self._node(item, depth)
        if isinstance(item, list | tuple):
            return type(item)(self.value(part, depth) for part in item)
        if isinstance(item, set | frozenset):
            return type(item)(self._key(part, depth) for part in item)
        if isinstance(item, dict):
            return self._mapping(item.items(), depth)
        if isinstance(item, PersistentId):
            return Opaque("torch.Storage")
        return Opaque(type(item).__name__)

    def _mapping(self, items: Any, depth: int) -> dict[Any, Any]:
        # A key that decodes to something unhashable can only come from a damaged pickle.
        return {self._key(key, depth): self.value(part, depth) for key, part in items}

    def _key(self, key: Any, depth: int) -> Any:
        decoded = self.value(key, depth)
        try:
            hash(decoded)
        except TypeError:
            return Opaque(class_name(decoded))
        return decoded

    def _node(self, node: Node, depth: int) -> Any:
        try:
            view = tensor_view(node)
        except DcptoolError:
            return Opaque("torch.Tensor")
        if view is not None:
            return self._tensor(view)
        name = qualified_name(node.function)
        build = _CALLS.get(name)
        if build is None or not isinstance(node.function, Global) or node.kwargs:
            return Opaque(name if isinstance(node.function, Global) else f"{name}(…)")
        args = [self.value(arg, depth) for arg in node.args]
        try:
            made = build(self, node, args, depth)
        except (ItemError, RecursionError):
            raise
        except Exception:  # arguments no pickler would have written
            return Opaque(name)
        return made

    def _tensor(self, view: TensorView) -> Array:
        values = None
        if self.read_view and prod(view.shape) <= MAX_ELEMENTS and span(view.shape, view.strides) <= MAX_SPAN:
            try:
                stored = dtypes.unpack(view.dtype, self.read_view(view))
            except UnsupportedError:
                stored = None
            values = None if stored is None else _strided(stored, view)
        return Array("torch.Tensor", view.dtype, view.shape, values)

    # What follows builds the value of one understood call; args are decoded already.

    def _ordered(self, node: Node, args: list[Any], depth: int) -> Any:
        made = OrderedDict(args[0] if args else ())
        made.update(self._mapping(node.items or (), depth))
        return made

    def _counter(self, node: Node, args: list[Any], depth: int) -> Any:
        return Counter(args[0] if args else {})

    def _default(self, node: Node, args: list[Any], depth: int) -> Any:
        return self._mapping(node.items or (), depth)

    def _array(self, node: Node, args: list[Any], depth: int) -> Any:
        _, shape, dtype, fortran, data = node.state
        dtype_name, code = _numpy_type(dtype)
        shape = tuple(int(size) for size in shape)
        data = self.value(data, depth)
        count = prod(shape)
        if fortran or code is None or count > MAX_ELEMENTS or not isinstance(data, bytes | list):
            return Array("numpy.ndarray", dtype_name, shape, None)
        values = data if isinstance(data, list) else dtypes.unpack(code, data)
        return Array("numpy.ndarray", dtype_name, shape, values if len(values) == count else None)

    def _scalar(self, node: Node, args: list[Any], depth: int) -> Any:
        dtype_name, code = _numpy_type(node.args[0])
        data = args[1]
        if code is None or not isinstance(data, bytes):
            return Opaque(f"numpy.{dtype_name}")
        return dtypes.unpack(code, data)[0]


def _strided(stored: list[Any], view: TensorView) -> list[Any]:
    """Pick the elements of a strided view in row-major order, and undo conj and neg."""
    places = [0]
    for size, stride in zip(view.shape, view.strides, strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    values = [stored[place] for place in places]
    if view.conj:
        values = [value.conjugate() for value in values]
    return [-value for value in values] if view.neg else values


def _numpy_type(node: Any) -> tuple[str, str | None]:
    """Return a pickled numpy dtype's name and the torch name of the same little-endian type, if there is one."""
    code = node.args[0]
    if node.state is not None and node.state[1] == ">" and code not in ("b1", "i1", "u1"):
        return f">{code}", None
    kind = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}.get(code[0], "")
    name = "bool" if kind == "bool" else f"{kind}{8 * int(code[1:])}" if kind else str(code)
    return name, name if name in dtypes.BY_NAME else None


def _path(name: str) -> Callable[..., Named]:
    kind = name.rpartition(".")[2]

    def build(decoder: _Decoder, node: Node, args: list[str], depth: int) -> Named:
        separator = "\\" if "Windows" in kind else "/"
        head, *rest = args or ["."]
        text = head + separator.join(rest) if head == "/" else separator.join([head, *rest])
        return Named(name, f"{kind}({text!r})")

    return build


def _device(decoder: _Decoder, node: Node, args: list[Any], depth: int) -> Named:
    kind, *index = str(args[0]).split(":") if len(args) == 1 else args
    suffix = f", index={int(index[0])}" if index and index[0] is not None else ""
    return Named("torch.device", f"device(type={kind!r}{suffix})")


def _encoded(decoder: _Decoder, node: Node, args: list[Any], depth: int) -> bytes:
    text, encoding = args
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError(encoding)
    encoded: bytes = text.encode(encoding)
    return encoded


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _Decoder._ordered,
    "collections.Counter": _Decoder._counter,
    "collections.defaultdict": _Decoder._default,
    "builtins.dict": lambda d, node, args, depth: {**dict(*args), **d._mapping(node.items or (), depth)},
    "builtins.set": lambda d, node, args, depth: set(*args),
    "builtins.frozenset": lambda d, node, args, depth: frozenset(*args),
    "builtins.bytes": lambda d, node, args, depth: (
        bytes(args[0]) if args and isinstance(args[0], bytes | list) else b""
    ),
    "builtins.bytearray": lambda d, node, args, depth: bytearray(args[0] if isinstance(args[0], bytes) else b""),
    "builtins.complex": lambda d, node, args, depth: complex(*args),
    "builtins.slice": lambda d, node, args, depth: Named("slice", f"slice{tuple(args)!r}"),
    "builtins.xrange": lambda d, node, args, depth: Named("range", f"range({', '.join(map(repr, args))})"),
    "builtins.range": lambda d, node, args, depth: Named("range", f"range({', '.join(map(repr, args))})"),
    "_codecs.encode": _encoded,
    "torch.Size": lambda d, node, args, depth: Size(*args),
    "torch.device": _device,
    "numpy.core.multiarray._reconstruct": _Decoder._array,
    "numpy._core.multiarray._reconstruct": _Decoder._array,
    "numpy.core.multiarray.scalar": _Decoder._scalar,
    "numpy._core.multiarray.scalar": _Decoder._scalar,
    **{
        f"pathlib.{name}": _path(f"pathlib.{name}")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    },
}
