"""What a pickle would run, were it loaded: every name it imports and every call, whether its result is used or not.

Decides by name alone. A pickle may name and make what torch's and DCP's own writers do, and what values of common
packages need. A class of the job's own is foreign: its package is imported, no more is known. Any other function, and
whatever belongs to modules that reach the system, the interpreter or other pickles, is unsafe. So is what lets pickle
call without a call: an imported module or class that is changed, an instance that is given a state twice, for its
first state may have brought a `__setstate__` of its own.

Source: CPython's pickle, for how REDUCE, INST, OBJ, NEWOBJ, BUILD and names with dots are resolved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dcptool.pickles.names import is_class, is_fine, is_nearly_written, may_be_made, may_be_new, reaches
from dcptool.pickles.standins import MOVED, Global, Node, qualified_name

LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of a stream of torch.save before 1.6."""
_GETATTR = "builtins.getattr"
_NESTING = "torch.storage._load_from_bytes"
_INDIRECT = {
    "torch._tensor._rebuild_from_type": (0, 2), "torch._tensor._rebuild_from_type_v2": (0, 2),
    "numpy.random._pickle.__generator_ctor": (1, None), "numpy.random._pickle.__randomstate_ctor": (1, None),
    "numpy.random._pickle.__bit_generator_ctor": (0, None), "copyreg._reconstructor": (1, None),
}  # fmt: skip
"""Functions that call what one of their arguments is: which, and the argument that it is given."""
_REGISTRY = Global("copyreg", "_extension_registry")
_CHECKED = frozenset({_NESTING, _GETATTR, "builtins.type", "copyreg.__newobj__", *_INDIRECT})
"""Functions whose arguments decide."""
_MEMBERS = frozenset({("zoneinfo.ZoneInfo", "_unpickle")})
"""Methods of classes that their own pickles call."""


class Calls:
    """What one pickle imports and calls; filled while it is read.

    Attributes:
        names: `module.name` of all it imports.
        n_persistent: persistent ids in it, which stand for what is outside.
        nested: what torch.save wrote before torch 1.6, as `pickle` stores tensors: more pickles, to be looked into.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.n_persistent = 0
        self._reaching: set[str] = set()
        self._unsafe: set[str] = set()
        self._harmless: set[Any] = set()
        self._made: set[Any] = set()
        self._attributes: list[Any] = []
        self.nested: list[bytes] = []

    def call(self, function: Any, args: Any) -> None:
        """Note a call, by REDUCE, INST or OBJ."""
        if function in self._harmless:
            return
        if isinstance(function, Node):  # what a call gave is called: an attribute of something, a partial
            if not _is_nested_class(function):
                self._unsafe.add(f"the result of {qualified_name(function)}")
        elif isinstance(function, Global):
            name = qualified_name(function)
            if name in _CHECKED:
                self._call_checked(name, args if isinstance(args, tuple) else ())
            elif is_fine(name):
                self._harmless.add(function)
            elif not may_be_made(name, args):
                self._unsafe.add(name)

    def new(self, function: Any) -> None:
        """Note that an instance of a class is made, by NEWOBJ or NEWOBJ_EX."""
        if function in self._made:
            return
        if isinstance(function, Node) and not _is_nested_class(function):
            self._unsafe.add(f"the result of {qualified_name(function)}")
        elif isinstance(function, Global):
            self._made.add(function)
            if not may_be_new(qualified_name(function)):
                self._unsafe.add(qualified_name(function))

    def change(self, target: Any) -> None:
        """Note that something is given a state or items that is no fresh instance; see the module."""
        if isinstance(target, Global):
            self._unsafe.add(f"a change of {qualified_name(target)}")
        elif isinstance(target, Node) and target.state is not None:
            self._unsafe.add(f"a method in the state of {qualified_name(target)}")

    def registered(self) -> Global:
        """Note a code of the extension registry, and return what stands for the name behind it, outside the file."""
        self._unsafe.add(qualified_name(_REGISTRY))
        return _REGISTRY

    def add_names(self, found: Iterable[tuple[str, str]]) -> None:
        """Note imported names, as module and name in it."""
        for module, name in found:
            module = MOVED.get(module, module)
            self.names.add(f"{module}.{name}")
            if reaches(module, name):
                self._reaching.add(f"{module}.{name}")

    @property
    def unsafe(self) -> tuple[str, ...]:
        """What runs code, by name, sorted."""
        return tuple(sorted((self._reaching - self._enum_getattr()) | self._unsafe))

    @property
    def certain(self) -> tuple[str, ...]:
        """What runs code though the bytes are damaged: a changed byte would not have made it of what writers write."""
        return certain(self.unsafe)

    def _enum_getattr(self) -> set[str]:
        """Return the name of getattr if it only gets members of classes, as enums are pickled in some Pythons."""
        return {_GETATTR} if self._attributes and all(map(_is_member, self._attributes)) else set()

    def _call_checked(self, name: str, args: tuple[Any, ...]) -> None:
        if name == _GETATTR:
            self._attributes.append(args)
        elif name == _NESTING:
            data = _plain_bytes(args[0]) if len(args) == 1 else None
            if data is None or not data.startswith(LEGACY_MAGIC):  # torch writes no other
                self._unsafe.add(name)
            else:
                self.nested.append(data)
        elif name == "builtins.type":
            if len(args) != 1:  # which makes a class, with methods as it likes
                self._unsafe.add(name)
        elif name == "copyreg.__newobj__":
            self.new(args[0] if args else None)
        else:
            function, given = _INDIRECT[name]
            if function < len(args) and isinstance(args[function], Global | Node):
                is_made = isinstance(args[function], Node) and name.endswith("bit_generator_ctor")
                if not is_made:
                    self.call(args[function], args[given] if given is not None and given < len(args) else args)


def certain(names: Iterable[str]) -> tuple[str, ...]:
    """Return those names of what runs code that are no damage to what writers write."""
    return tuple(name for name in names if name != qualified_name(_REGISTRY) and not is_nearly_written(name))


def _is_nested_class(node: Node) -> bool:
    """Tell whether a node is `Outer.Inner`, as protocols before 4 spell it, or a method that a class pickles."""
    if qualified_name(node.function) != _GETATTR or isinstance(node.function, Node) or len(node.args) != 2:
        return False
    owner, name = node.args
    if isinstance(owner, Node):
        return isinstance(name, str) and is_class(f".{name}") and _is_nested_class(owner)
    return _is_member(node.args) and (is_class(f".{name}") or (qualified_name(owner), name) in _MEMBERS)


def _plain_bytes(value: Any) -> bytes | None:
    """Return bytes, also as protocols before 3 spell them: text that is encoded as Latin-1."""
    if isinstance(value, Node) and qualified_name(value.function) == "_codecs.encode" and len(value.args) == 2:
        text, encoding = value.args
        if isinstance(text, str) and encoding == "latin1":
            return text.encode("latin1", "replace")
    return value if isinstance(value, bytes) else None


def _is_member(args: Any) -> bool:
    """Tell whether arguments of getattr name a member of a class: (class, "NAME")."""
    if not (isinstance(args, tuple) and len(args) == 2 and isinstance(args[1], str)):
        return False
    owner = args[0]
    if isinstance(owner, Node):
        return _is_nested_class(owner) and not args[1].startswith("__")
    if not isinstance(owner, Global):
        return False
    return is_class(qualified_name(owner)) and not reaches(owner.module, owner.name) and not args[1].startswith("__")
