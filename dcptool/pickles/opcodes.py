"""The arguments of pickle opcodes that carry a value: how long they are and what value they are.

Source: CPython's `pickletools`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from dcptool.pickles.standins import PersistentId


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _quoted(line: bytes) -> str:
    """Decode the argument of STRING, a quoted string of Python 2."""
    line = line.strip()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a string has no quotes")
    return line[1:-1].decode("unicode_escape")


def _integer(line: bytes) -> int | bool:
    """Decode the argument of INT, which also says True and False."""
    return line == b"01" if line in (b"00", b"01") else _of_any_base(line)


def _of_any_base(line: bytes) -> int:
    """Decode a number as C does: in hexadecimal after 0x, in octal after 0."""
    try:
        return int(line, 0)
    except ValueError:
        return int(line, 8)


_Make = Callable[[bytes], Any]
COUNTED: dict[int, tuple[int, _Make]] = {  # opcode → width of the length that follows, what to make of the bytes
    0x58: (4, _text), 0x8D: (8, _text),  # BINUNICODE, BINUNICODE8
    0x43: (1, bytes), 0x42: (4, bytes), 0x8E: (8, bytes), 0x96: (8, bytearray),  # …BINBYTES…, BYTEARRAY8
    0x55: (1, _text), 0x54: (4, _text),  # SHORT_BINSTRING, BINSTRING
    0x8A: (1, _long), 0x8B: (4, _long),  # LONG1, LONG4
}  # fmt: skip
FIXED: dict[int, tuple[int, _Make]] = {  # opcode → width of its argument, what to make of it
    0x4A: (4, _long),  # BININT
    0x47: (8, lambda data: struct.unpack(">d", data)[0]),  # BINFLOAT
    0x88: (0, lambda data: True),  # NEWTRUE
}
TEXT: dict[int, _Make] = {
    ord("I"): _integer,
    ord("F"): float,
    ord("L"): lambda line: _of_any_base(line.rstrip(b"L")),
    ord("V"): lambda line: line.decode("raw-unicode-escape"),
    ord("S"): _quoted,
    ord("P"): lambda line: PersistentId(line.decode()),
}
