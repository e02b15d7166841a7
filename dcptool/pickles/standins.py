"""What a pickle is loaded into instead of what it names.

Every name becomes a `Global`, every call or instance a `Node` that remembers how it was made, every persistent id a
`PersistentId`; numbers, strings and containers are themselves.
"""

from __future__ import annotations

import _compat_pickle
import functools
from collections.abc import Callable, Iterable
from typing import Any

_MAX_CALLS = 8
"""Calls of calls that a name is looked for behind."""
MOVED = {**_compat_pickle.IMPORT_MAPPING, "pathlib._local": "pathlib", "exceptions": "builtins"}
"""Modules under the names that older or newer Pythons give them."""


class Global:
    """Stand-in for an imported name; one per distinct name of a pickle."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __repr__(self) -> str:
        return qualified_name(self)


class Node:
    """Stand-in for the result of a call, or for an instance.

    Attributes:
        function: a `Global`, or the node that was called.
        args, kwargs: what it was called with.
        called: True for `function(*args)`, False for `function.__new__(function, *args)`.
        state: what BUILD was given, None if it was not.
        items: (key, value) pairs set on it, None if none were.
        appended: values appended to it, None if none were.
        dropped: calls made on it whose results were dropped, as those of state setters are; None if none were.
    """

    __slots__ = ("appended", "args", "called", "dropped", "function", "items", "kwargs", "state")

    def __init__(
        self, function: Any, args: tuple[Any, ...], called: bool, kwargs: dict[str, Any] | None = None
    ) -> None:
        self.function, self.args, self.called, self.kwargs = function, args, called, kwargs
        self.state: Any = None
        self.items: list[tuple[Any, Any]] | None = None
        self.appended: list[Any] | None = None
        self.dropped: list[Node] | None = None

    def __repr__(self) -> str:
        return f"<{qualified_name(self)}>"


class PersistentId:
    """Stand-in for an object kept outside the pickle; torch's storages are these."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Printed:
    """A value whose opcodes somebody else writes: for a million records alike, one by one would be slow.

    Attributes:
        parts: names and strings that the opcodes fetch; they are put into the memo before.
        write: gets what gives the opcode that fetches each part, and returns the opcodes that leave the value on the
            stack, with MEMOIZE wherever a pickler writes it, and how often that is. Protocol 4 only.
    """

    __slots__ = ("parts", "write")

    def __init__(
        self, parts: Iterable[Global | str], write: Callable[[Callable[[Any], bytes]], tuple[bytes, int]]
    ) -> None:
        self.parts, self.write = parts, write


@functools.lru_cache(1024)
def ref(name: str) -> Global:
    """Return the stand-in for the name `module.name`, split at the last dot."""
    return Global(*name.rsplit(".", 1))


def call(name: str, *args: Any) -> Node:
    """Return the stand-in for the result of calling `module.name` with these arguments."""
    return Node(ref(name), args, True)


def new(name: str, state: Any = None) -> Node:
    """Return the stand-in for an instance of the class `module.name`.

    Args:
        name: the class, split at the last dot.
        state: its attributes as a dict, or what its `__setstate__` takes; None for none.
    """
    node = Node(ref(name), (), False)
    node.state = state
    return node


def qualified_name(value: Any) -> str:
    """Return `module.name` of a `Global`, or of the function behind a node; a type's own name for the rest.

    Names that moved are given where they live today: `__builtin__` is `builtins`, `pathlib._local` is `pathlib`.
    """
    for _ in range(_MAX_CALLS):
        if not isinstance(value, Node):
            break
        value = value.function
    if isinstance(value, Global):
        return f"{MOVED.get(value.module, value.module)}.{value.name}"
    return type(value).__name__


def brief(value: Any) -> str:
    """Return what an undecoded value is, in few characters and in little time whatever it holds."""
    if isinstance(value, str | bytes):
        return repr(value[:80]) + ("…" if len(value) > 80 else "")
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() <= 64):
        return repr(value)
    return f"a {qualified_name(value)}"
