"""Load a pickle into a graph of stand-ins: nothing is imported, nothing is called.

Every name becomes a `Global`, every call or instance a `Node` that remembers how it was made, every persistent id a
`PersistentId`; numbers, strings and containers are themselves. Identity and cycles are kept. Which names are
*understood* is the reader's decision: it may pass stand-ins of its own for some of them.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dcptool.errors import MetadataError, UnsafePickleError
from dcptool.pickles.screen import screen

MAX_GLOBALS = 10_000
"""Distinct names in one pickle; each becomes a class. torch's own use a few dozen."""

_MOVED = {"__builtin__": "builtins", "pathlib._local": "pathlib", "exceptions": "builtins"}
_GC_PAUSE_BYTES = 1 << 16


class Global(type):
    """Stand-in for an imported name. A class, because the unpickler makes instances only of classes."""

    module: str
    name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Node:  # REDUCE
        return _call(cls, cls, args, kwargs)

    def __repr__(cls) -> str:
        return qualified_name(cls)


class Node:
    """Stand-in for the result of a call, or for an instance.

    Only what the pickle sets is kept; the rest reads as its default.

    Attributes:
        called: True for `function(*args)`, False for `function.__new__(function, *args)`.
        function: a `Global`, or the node that was called.
        args, kwargs: what it was called with.
        state: what BUILD was given, None if it was not.
        items: (key, value) pairs set on it.
        appended: values appended to it.
    """

    __slots__ = ("appended", "args", "called", "function", "items", "kwargs", "state")
    called: bool
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    items: list[tuple[Any, Any]]
    appended: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Node:  # NEWOBJ
        node = object.__new__(cls)
        if args:
            node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node

    def __getattr__(self, name: str) -> Any:
        if name == "function":
            return type(self)
        try:
            return _DEFAULTS[name]
        except KeyError:
            raise AttributeError(name) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Node:
        return _call(Node, self, args, kwargs)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.items:
            self.items = []
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        if not self.appended:
            self.appended = []
        self.appended.append(value)

    def extend(self, values: list[Any]) -> None:
        for value in values:
            self.append(value)

    add = append

    def __repr__(self) -> str:
        return f"<{qualified_name(self)}>"


_DEFAULTS: dict[str, Any] = {"called": False, "args": (), "kwargs": {}, "state": None, "items": (), "appended": ()}


def _call(cls: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    node: Node = Node.__new__(cls, *args, **kwargs)
    node.called = True
    if function is not cls:
        node.function = function
    return node


class PersistentId:
    """Stand-in for an object kept outside the pickle; torch's storages are these."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def qualified_name(value: Any) -> str:
    """Return `module.name` of a `Global`, or of the function behind a node; a type's own name for the rest.

    Names that moved are given where they live today: `__builtin__` is `builtins`, `pathlib._local` is `pathlib`.
    """
    while isinstance(value, Node):
        value = value.function
    if isinstance(value, Global):
        return f"{_MOVED.get(value.module, value.module)}.{value.name}"
    return type(value).__name__


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, understood: Mapping[str, Any], names: set[str]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._names: dict[tuple[str, str], Any] = {}
        self._seen = names
        self._understood = understood

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        found = self._names.get(key)
        if found is None:
            if len(self._names) >= MAX_GLOBALS:
                raise UnsafePickleError(f"the pickle was not read: it names more than {MAX_GLOBALS} globals")
            found = self._understood.get(f"{module}.{name}")
            if found is None:
                found = Global("Global", (Node,), {"__slots__": (), "module": module, "name": name})
            self._names[key] = found
            self._seen.add(f"{_MOVED.get(module, module)}.{name}")
        return found

    def persistent_load(self, value: Any) -> PersistentId:
        return PersistentId(value)


@contextmanager
def _collector_paused(pause: bool) -> Iterator[None]:
    """Keep the cyclic collector from walking millions of young objects again and again."""
    pause = pause and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def load(data: bytes, understood: Mapping[str, Any] | None = None, names: set[str] | None = None) -> Any:
    """Load one pickle into stand-ins.

    Args:
        data: the pickle; bytes after its STOP are ignored, as `pickle` does.
        understood: stand-ins of the caller's own, by `module.name`: a class whose instances take `__setstate__`,
            or a function to call. A function's result must hash in one step, since the screen assumes so.
        names: filled with the `module.name` of everything the pickle would have imported.

    Returns:
        The root of the graph.

    Raises:
        UnsafePickleError: reading it would exhaust memory, the stack or time.
        MetadataError: the bytes are no whole pickle.

    Source: what the unpickler accepts is CPython's `pickle`, protocols 0 to 5.
    """
    end = screen(data)
    unpickler = _Unpickler(
        data if end == len(data) else data[:end], understood or {}, names if names is not None else set()
    )
    try:
        with _collector_paused(len(data) > _GC_PAUSE_BYTES):
            return unpickler.load()
    except MetadataError:
        raise
    except MemoryError:
        raise UnsafePickleError("the pickle was not read: it needs more memory than there is") from None
    except Exception as error:  # the C unpickler raises whatever an opcode runs into
        raise MetadataError(f"the pickle is damaged: {type(error).__name__}: {error}"[:300]) from None
