"""How protocol 4 writes the small values of a `.metadata`: fetches from the memo, numbers, texts, torch.Size.

Regular expressions for them, and tables that take each different spelling apart only once: a million records hold few
different numbers. Knows opcodes, and nothing of records.

Source: what CPython's pickle writes, protocol 4; torch.Size is a call with one tuple of numbers.
"""

from __future__ import annotations

import re

from dcptool.checkpoint.extents import Ints

MAX_KEPT = 100_000
"""Different sizes that are kept by how they are written."""

GET = rb"(?:h.|j....)"
INT = rb"(?:K.|M..|J...[\x00-\x7f]|\x8a(?:\x05.{4}|\x06.{5}|\x07.{6}|\x08.{7})[\x00-\x7f])"
TEXT = rb"\x8c.[ -~]*\x94"
NEW = rb"\)\x81\x94\}\x94\("
"""An instance without arguments, and the dict of its state begun."""
_SIZE_END = rb"\x94\x85\x94R\x94"
_TUPLE = rb"(?:I\x85|I{2}\x86|I{3}\x87|\(I{4,8}t)".replace(b"I", INT)
NUMBERS = rb"(?:" + _TUPLE + _SIZE_END + rb"|\)\x85\x94R\x94)"
"""The rest of a torch.Size of at most eight dimensions, after the opcode that fetches the class."""
SIZE = rb"(?:" + GET + NUMBERS + rb")"


def size_of(token: bytes, ndim: int) -> bytes:
    """Return the pattern of a torch.Size of one ndim, with its numbers captured; `token` fetches the class."""
    if not ndim:
        return re.escape(token) + rb"\)()\x85\x94R\x94"
    head, tail = (rb"", (rb"\x85", rb"\x86", rb"\x87")[ndim - 1]) if ndim <= 3 else (rb"\(", rb"t")
    return re.escape(token) + head + rb"((?:%s){%d})" % (INT, ndim) + tail + _SIZE_END


def uncaptured(pattern: bytes) -> bytes:
    """Return a pattern whose groups do not capture, which makes matching long runs faster."""
    return re.sub(rb"(?<!\\)\((?!\?)", rb"(?:", pattern)


def memo_entries(ndim: int) -> int:
    """Return how many memo entries a torch.Size makes: its numbers (not if there are none), the arguments, itself."""
    return 3 if ndim else 2


class Sizes(dict[bytes, Ints]):
    """The numbers of a torch.Size by how they are written."""

    def __init__(self) -> None:
        super().__init__()
        self._integer = re.compile(INT, re.DOTALL)
        self._same: dict[Ints, Ints] = {}

    def __missing__(self, numbers: bytes) -> Ints:
        found = tuple(map(number, self._integer.findall(numbers)))
        # Equal sizes are one object, whatever they are written as: comparing them is then a matter of identity.
        found = self[numbers] = self._same.setdefault(found, found)
        return found

    def trim(self) -> None:
        """Forget all when there are too many to be worth keeping."""
        if len(self) > MAX_KEPT:
            self.clear()
            self._same.clear()


class Numbers(dict[bytes, int]):
    """The values of integer opcodes; ranks write items of the same lengths to the same places."""

    def __missing__(self, token: bytes) -> int:
        found = self[token] = number(token)
        return found

    def trim(self) -> None:
        """Forget all when there are too many to be worth keeping."""
        if len(self) > MAX_KEPT:
            self.clear()


def slot(token: bytes) -> int:
    """Return which memo entry an opcode fetches."""
    return int.from_bytes(token[1:], "little")


def number(token: bytes) -> int:
    """Return the value of an integer opcode; LONG1 has a length before its digits, the others have not."""
    return int.from_bytes(token, "little") >> (16 if token[0] == 0x8A else 8)


def text(token: bytes) -> str:
    """Return the text of a SHORT_BINUNICODE and its MEMOIZE.

    Raises:
        LookupError: its length and its text disagree, which no pickler writes.
    """
    if token[1] != len(token) - 3:
        raise LookupError(token)
    return token[2:-1].decode("ascii")
