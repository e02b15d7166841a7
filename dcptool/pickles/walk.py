"""What the opcodes of a pickle import, by walking over them: for pickles that the machine cannot run to their end.

Source: CPython's `pickletools`.
"""

from __future__ import annotations

from collections.abc import Iterator

_LINES = b"IFLSVPgp"
_COUNTS = dict.fromkeys(b"U\x8cC\x8a", 1) | dict.fromkeys(b"TXB\x8b", 4) | dict.fromkeys(b"\x8d\x8e\x96", 8)
"""Opcodes with a length before their argument: the bytes of the length."""
_WIDTHS = dict.fromkeys(b"(.012NQR)]}abdelostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", 0) | {
    ord("J"): 4, ord("K"): 1, ord("M"): 2, ord("G"): 8, ord("h"): 1, ord("j"): 4, ord("q"): 1, ord("r"): 4,
    0x82: 1, 0x83: 2, 0x84: 4, 0x80: 1, 0x95: 8,
}  # fmt: skip
_TEXTS = b"XUVST\x8c\x8d"


def imports(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield what the opcodes of a pickle import, by their lengths alone: no stack, and no value is made.

    Of STACK_GLOBAL the last two strings are taken for its arguments.
    """
    strings = [b"", b""]
    memo: dict[int, bytes] = {}
    position = 0
    while position < len(data):
        opcode = data[position]
        argument, end = _argument(data, position + 1)
        if opcode in b"ci":
            last, end = _line(data, end)
            yield argument.decode("utf-8", "replace"), last.decode("utf-8", "replace")
        elif opcode in _TEXTS:
            strings = [strings[1], argument.strip(b"'\"")]
        elif opcode in b"pqr\x94":
            memo[len(memo) if opcode == 0x94 else _index(opcode, argument)] = strings[1]
        elif opcode in b"ghj":
            strings = [strings[1], memo.get(_index(opcode, argument), b"")]
        elif opcode == 0x93:
            yield strings[0].decode("utf-8", "replace"), strings[1].decode("utf-8", "replace")
        if opcode == 0x2E or end < 0:
            break
        position = end


def _argument(data: bytes, start: int) -> tuple[bytes, int]:
    """Return the argument of the opcode before a byte, without the length before it, and its end; -1 for no opcode."""
    opcode = data[start - 1]
    if opcode in _LINES or opcode in b"ci":
        return _line(data, start)
    count = _COUNTS.get(opcode, 0)
    nbytes = int.from_bytes(data[start : start + count], "little") if count else _WIDTHS.get(opcode, -1)
    if nbytes < 0:
        return b"", -1
    return data[start + count : start + count + nbytes], start + count + nbytes


def _line(data: bytes, start: int) -> tuple[bytes, int]:
    end = data.find(b"\n", start)
    return (data[start:end], end + 1) if end >= 0 else (b"", -1)


def _index(opcode: int, argument: bytes) -> int:
    if opcode in b"gp":
        return int(argument) if argument.strip().isdigit() and len(argument) < 20 else -1
    return int.from_bytes(argument, "little")
