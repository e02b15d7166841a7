"""Write a graph of stand-ins as a pickle that loads equal: the other half of `inert`.

Everything that may be shared is put into the memo, as Python's pickler does, so identity and cycles are kept and what
reads that pickler's output in bulk reads this too. Nothing is imported and nothing called, however deep the graph is
nested. Knows opcodes and stand-ins, and nothing of what the names mean.

Source: the opcodes of CPython's `pickletools`; torch 2.13, `_weights_only_unpickler.py`, for those torch.load knows.
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from dcptool.errors import MetadataError, UnsafePickleError
from dcptool.pickles.standins import Global, Node, PersistentId, Printed, call, ref

PROTOCOLS = (2, 4)
MAX_REPEATED = 100_000
"""Values written again because a tuple or a call contains itself; every pickler writes some of them twice."""
_BATCH = 1000
"""Values per APPENDS, pairs per SETITEMS: a reader holds that many on its stack."""
_NEW, _OPEN = -1, -2
"""In place of a memo index: not written yet, being written but not in the memo before its parts are."""
_SMALL = [b"K%c" % number for number in range(256)]  # BININT1
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3

_Parts = Iterator[Any] | None
"""What of a value is still to be written; None if all of it was."""


def emit(root: Any, protocol: int = 2) -> bytes:
    """Write a graph of stand-ins and plain values as one pickle.

    Names that moved are written where every Python 3 finds them: `pathlib._local` as `pathlib`, in protocol 4 also
    those of Python 2. What protocol 2 or 4 has no opcode for (bytes, sets, bytearrays, complex numbers, keyword
    arguments of an instance, names inside classes) becomes a call that gives it, as pickle writes one.

    Args:
        root: what `inert.load` gave without functions of the reader's own, or a graph built with `ref`, `call` and
            `new`. Equal strings and equal names are written once, everything else by identity.
        protocol: 2 for what torch.save writes and torch.load(weights_only=True) reads, 4 for `.metadata` (no frames).

    Returns:
        The pickle, from PROTO to STOP.

    Raises:
        TypeError: something in the graph is neither a stand-in nor a plain value.
        ValueError: no such protocol.
        MetadataError: a name or a string cannot be written in this protocol.
        UnsafePickleError: tuples or calls contain themselves so often, or so directly, that it would not end.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"pickles are written in protocol 2 or 4, not {protocol!r}")
    return _Writer(protocol).write(root)


class _Writer:
    """Writes one pickle. Each container gives its parts one by one to a loop, which keeps those begun on a list."""

    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.out = bytearray(b"\x80%c" % protocol)
        self.memo: dict[int, int] = {}  # by identity
        self.texts: dict[str, int] = {}
        self.names: dict[tuple[str, str], int] = {}
        self.n_memo = 0
        self.calls: dict[int, Node] = {}
        self.kept: list[Any] = []
        self.repeated = 0

    def write(self, root: Any) -> bytes:
        """Write everything."""
        out, memo, texts, text = self.out, self.memo, self.texts, self._text
        begun: list[Iterator[Any]] = [iter((root,))]
        while begun:
            for value in begun[-1]:
                kind = type(value)
                if kind is str:
                    index = texts.get(value, _NEW)
                    if index < 0:
                        text(value)
                        continue
                elif kind is int and 0 <= value < 256:
                    out += _SMALL[value]
                    continue
                else:
                    index = memo.get(id(value), _NEW)
                    if index < 0:
                        parts = self._begin(kind, value)
                        if parts is None:
                            continue
                        begun.append(parts)
                        break
                out += b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")
            else:
                begun.pop()
        out += b"."
        return bytes(out)

    def _begin(self, kind: type, value: Any) -> _Parts:
        """Write a value that is not in the memo, but for its parts."""
        begin = _BEGIN.get(kind)
        if begin is None:
            raise TypeError(f"a {kind.__name__} is neither a stand-in nor a plain value; it was not written")
        return begin(self, value)

    def _put(self) -> int:
        """Put what was written last into the memo."""
        index = self.n_memo
        self.n_memo = index + 1
        if self.protocol >= 4:
            self.out.append(0x94)  # MEMOIZE
        else:
            self.out += b"q%c" % index if index < 256 else b"r" + index.to_bytes(4, "little")
        return index

    def _get(self, index: int) -> None:
        self.out += _fetch(index)

    def _open(self, value: Any, n_parts: int) -> None:
        """Note that a value is begun which gets into the memo after its parts: they may lead to it again."""
        if id(value) in self.memo:
            self.repeated += 1 + n_parts
            if self.repeated > MAX_REPEATED:
                raise UnsafePickleError("the pickle was not written: tuples or calls contain themselves without end")
        self.memo[id(value)] = _OPEN

    def _close(self, value: Any, code: bytes, undo: bytes) -> bool:
        """Write the opcode that makes a value of its parts; or undo them if they led to it and it was made there."""
        made = self.memo[id(value)]
        if made >= 0:
            self.out += undo
            self._get(made)
            return False
        self.out += code
        self.memo[id(value)] = self._put()
        return True

    # Values without parts.

    def _text(self, value: str) -> None:
        if value in self.texts:
            self._get(self.texts[value])
            return
        data = value.encode("utf-8", "surrogatepass")
        self._counted(data, {1: 0x8C, 4: 0x58, 8: 0x8D} if self.protocol >= 4 else {4: 0x58})
        self.texts[value] = self._put()

    def _counted(self, data: bytes, opcodes: dict[int, int]) -> None:
        """Write bytes behind their length; `opcodes` gives the opcode for each width of the length, in bytes."""
        for width, opcode in opcodes.items():
            if len(data) < 1 << 8 * width:
                self.out.append(opcode)
                self.out += len(data).to_bytes(width, "little")
                self.out += data
                return
        raise MetadataError(f"a value of {len(data):,} bytes is too long for a pickle of protocol {self.protocol}")

    def _fixed(self, data: bytes) -> _Parts:
        self.out += data
        return None

    def _int(self, value: int) -> _Parts:
        if 0 <= value < 1 << 16:
            self.out += b"M" + value.to_bytes(2, "little")
        elif -1 << 31 <= value < 1 << 31:
            self.out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            nbytes = (value ^ -(value < 0)).bit_length() // 8 + 1
            self._counted(value.to_bytes(nbytes, "little", signed=True), {1: 0x8A, 4: 0x8B})
        return None

    def _bytes(self, value: bytes) -> _Parts:
        if self.protocol >= 4:
            self._counted(value, {1: 0x43, 4: 0x42, 8: 0x8E})
            self.memo[id(value)] = self._put()
            return None
        return self._call(value, "_codecs.encode", value.decode("latin-1"), "latin1")

    def _name(self, value: Global) -> _Parts:
        module, name = self._place(value)
        index = self.names.get((module, name))
        if index is not None:
            self._get(index)
        elif self.protocol >= 4:
            self._text(module)
            self._text(name)
            self.out.append(0x93)  # STACK_GLOBAL
            index = self._put()
        elif "." in name:  # protocol 2 has no name for what is inside a class
            outer, _, last = name.rpartition(".")
            return self._call(value, "__builtin__.getattr", Global(module, outer), last)
        else:
            self.out += _line(module, b"c") + _line(name)
            index = self._put()
        self.memo[id(value)] = self.names[module, name] = index
        return None

    def _place(self, value: Global) -> tuple[str, str]:
        """Return module and name where a reader of this protocol finds them; in protocol 2 it knows Python 2's."""
        module, name = value.module, value.name
        if module == "pathlib._local":
            module = "pathlib"
        if self.protocol >= 4:
            return NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
        return module, name

    # Values with parts.

    def _list(self, value: list[Any]) -> _Parts:
        self.out.append(0x5D)  # EMPTY_LIST
        self.memo[id(value)] = self._put()
        return self._batches(value, b"a", b"e") if value else None

    def _dict(self, value: dict[Any, Any]) -> _Parts:
        self.out.append(0x7D)  # EMPTY_DICT
        self.memo[id(value)] = self._put()
        return self._pairs(value.items(), len(value)) if value else None

    def _set(self, value: set[Any]) -> _Parts:
        if self.protocol < 4:
            return self._call(value, "__builtin__.set", list(value))
        self.out.append(0x8F)  # EMPTY_SET
        self.memo[id(value)] = self._put()
        return self._batches(list(value), b"", b"\x90") if value else None

    def _tuple(self, value: tuple[Any, ...]) -> _Parts:
        if value:
            return self._tuple_parts(value)
        self.out.append(0x29)  # EMPTY_TUPLE
        return None

    def _tuple_parts(self, value: tuple[Any, ...]) -> Iterator[Any]:
        count = len(value)
        self._open(value, count)
        if count > 3:
            self.out.append(0x28)  # MARK
            yield from value
            self._close(value, b"t", b"1")  # TUPLE, POP_MARK
        else:
            yield from value
            self._close(value, _TUPLES[count], b"0" * count)  # POP

    def _frozenset(self, value: frozenset[Any]) -> _Parts:
        if self.protocol < 4:
            return self._call(value, "__builtin__.frozenset", list(value))
        return self._frozenset_parts(value)

    def _frozenset_parts(self, value: frozenset[Any]) -> Iterator[Any]:
        self._open(value, len(value))
        self.out.append(0x28)  # MARK
        yield from value
        self._close(value, b"\x91", b"1")  # FROZENSET, POP_MARK

    def _node(self, node: Node) -> Iterator[Any]:
        self._open(node, 2)
        if node.called or node.kwargs is None:
            yield node.function
            yield node.args
            made = self._close(node, b"R" if node.called else b"\x81", b"00")  # REDUCE or NEWOBJ, POP
        elif self.protocol >= 4:
            yield node.function
            yield node.args
            yield node.kwargs
            made = self._close(node, b"\x92", b"000")  # NEWOBJ_EX
        else:
            parts = (ref("copyreg.__newobj_ex__"), (node.function, node.args, node.kwargs))
            self.kept.append(parts)  # what is in the memo by identity must live
            yield from parts
            made = self._close(node, b"R", b"00")
        if made:
            yield from self._content(node)

    def _content(self, node: Node) -> Iterator[Any]:
        """Give what was put into an instance after it was made, in the order pickle does it."""
        if node.appended:
            yield from self._batches(node.appended, b"a", b"e")
        if node.items:
            yield from self._pairs(node.items, len(node.items))
        if node.state is not None:
            yield node.state
            self.out.append(0x62)  # BUILD
        for dropped in node.dropped or ():
            yield dropped.function
            yield dropped.args
            self.out += b"R0"  # REDUCE, POP: not in the memo, by which `inert` knows it from undoing a tuple

    def _batches(self, values: Sequence[Any], one: bytes, many: bytes) -> Iterator[Any]:
        """Give values to be added to the container below them: a single one by `one`, if there is such an opcode."""
        for start in range(0, len(values), _BATCH):
            batch = values[start : start + _BATCH]
            if one and len(batch) == 1:
                yield batch[0]
                self.out += one
            else:
                self.out.append(0x28)  # MARK
                yield from batch
                self.out += many

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], count: int) -> Iterator[Any]:
        """Give keys and values in turn, to be set on the container below them."""
        if count == 1:
            yield from chain.from_iterable(pairs)
            self.out.append(0x73)  # SETITEM
            return
        rest = iter(pairs)
        for _ in range(0, count, _BATCH):
            self.out.append(0x28)  # MARK
            yield from chain.from_iterable(islice(rest, _BATCH))
            self.out.append(0x75)  # SETITEMS

    def _persistent(self, value: PersistentId) -> Iterator[Any]:
        # Not in the memo, as in every pickle: the reader decides which ids are one object.
        yield value.value
        self.out.append(0x51)  # BINPERSID

    def _printed(self, value: Printed) -> Iterator[Any]:
        if self.protocol < 4:
            raise TypeError("opcodes are printed in protocol 4 only")
        for part in value.parts:
            if self._index(part) is None:
                yield part
                self.out += b"0"  # POP: it was written for the memo alone
        data, n_memo = value.write(lambda part: _fetch(self._index(part) or 0))
        self.out += data
        self.n_memo += n_memo

    def _index(self, part: Any) -> int | None:
        """Return where in the memo a name or a string is, None if it is not."""
        return self.texts.get(part) if isinstance(part, str) else self.names.get(self._place(part))

    def _call(self, value: Any, name: str, *args: Any) -> Iterator[Any]:
        """Give the call that stands for a value without an opcode of its own."""
        node = self.calls.setdefault(id(value), call(name, *args))
        yield node
        self.memo[id(value)] = self.memo[id(node)]

    def _bytearray(self, value: bytearray) -> _Parts:
        if self.protocol >= 4:
            return self._call(value, "__builtin__.bytearray", bytes(value))
        return self._call(value, "__builtin__.bytearray", value.decode("latin-1"), "latin-1")


def _fetch(index: int) -> bytes:
    """Return the opcode that fetches a memo entry."""
    return b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")


def _line(text: str, opcode: bytes = b"") -> bytes:
    """Return a name as an argument of protocol 2's GLOBAL."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = b"\n"
    if b"\n" in data:
        raise MetadataError(f"the name {text[:100]!r} cannot be written in a pickle of protocol 2")
    return opcode + data + b"\n"


_BEGIN: dict[type, Callable[[_Writer, Any], _Parts]] = {
    type(None): lambda writer, value: writer._fixed(b"N"),
    bool: lambda writer, value: writer._fixed(b"\x88" if value else b"\x89"),
    int: _Writer._int,
    float: lambda writer, value: writer._fixed(struct.pack(">cd", b"G", value)),
    complex: lambda writer, value: writer._call(value, "__builtin__.complex", value.real, value.imag),
    bytes: _Writer._bytes,
    bytearray: _Writer._bytearray,
    list: _Writer._list,
    dict: _Writer._dict,
    set: _Writer._set,
    tuple: _Writer._tuple,
    frozenset: _Writer._frozenset,
    Global: _Writer._name,
    Node: _Writer._node,
    PersistentId: _Writer._persistent,
    Printed: _Writer._printed,
}
