"""Decide whether a pickle may be handed to the C unpickler.

With every name replaced by a stand-in (see `inert`) a pickle can still hurt its reader in four ways:
* a memo index says how large the memo must be: 7 bytes can ask for 4 GB;
* a length says how much to allocate before anything is read;
* tuples nested 100,000 deep overflow the C stack when they are hashed, as dict keys or set members are;
* tuples that hold the same tuple twice, thirty levels deep, take hours to hash: their hash is not cached.

So the opcodes are walked once, keeping of every stack slot and memo entry only what hashing it would cost and how
deep it would go. No value is built, and nothing the walk lets through costs more than a small multiple of its bytes.
Where the walk is laxer than the unpickler (an underflowing stack, a bad name), the unpickler itself stops safely.

Source: the opcode table of CPython's `pickletools`.
"""

from __future__ import annotations

from typing import NoReturn

from dcptool.errors import MetadataError, UnsafePickleError

MAX_TUPLE_DEPTH = 200
"""Tuples inside tuples. torch's own pickles use three."""
MIN_MEMO = 1 << 16
"""A memo index below this is always fine, whatever the length of the pickle."""

# Weight of a stack slot: None for anything that hashes in one step, else (steps to hash it, tuple depth).
_Weight = tuple[int, int] | None

_COUNTED = {  # opcode → length of the byte count that follows it; then that many bytes
    **dict.fromkeys(b"U\x8cC\x8a", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_FIXED = {  # opcode → bytes of argument of fixed length, pushing one value
    **dict.fromkeys(b"N\x88\x89])}\x8f", 0),
    ord("K"): 1,
    ord("M"): 2,
    ord("J"): 4,
    ord("G"): 8,
}
_LINES = {**dict.fromkeys(b"IFSVLP", 1), **dict.fromkeys(b"ci", 2)}  # text arguments: number of lines
_POPS = {ord("a"): 1, ord("s"): 2, ord("b"): 1}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_REDUCERS = {ord("R"): 1, 0x81: 1, 0x92: 2, 0x93: 1, ord("Q"): 0}  # net pops; the new top hashes in one step
_TO_MARK = {ord("e"), ord("u"), 0x90}


def screen(data: bytes) -> int:
    """Walk a pickle and return where it ends (one past STOP), in bytes.

    Raises:
        UnsafePickleError: reading it would exhaust memory, the stack or time.
        MetadataError: it is cut short or is no pickle; the message gives the byte.
    """
    try:
        return _Walk(data).run()
    except IndexError:
        raise MetadataError(f"the pickle is cut short: it ends at byte {len(data)} without a STOP") from None


class _Walk:
    """One pass over the opcodes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[_Weight] = []
        self.marks: list[int] = []
        self.memo: dict[int, _Weight] = {}
        self.memo_size = 0
        self.puts = False
        # Each tuple is hashed a few times at most; far more steps means shared tuples that multiply.
        self.budget = 16 * len(data) + 100_000

    def run(self) -> int:
        data, stack, memo = self.data, self.stack, self.memo
        fixed, tuples, end = _FIXED, _TUPLES, len(data)
        position = 0
        while True:
            opcode = data[position]
            position += 1
            if opcode == 0x94:  # MEMOIZE
                top = stack[-1]
                if top:
                    memo[self.memo_size] = top
                self.memo_size += 1
            elif opcode == 0x68:  # BINGET
                stack.append(memo.get(data[position]))
                position += 1
            elif opcode in fixed:
                stack.append(None)
                position += fixed[opcode]
            elif opcode == 0x6A:  # LONG_BINGET
                stack.append(memo.get(int.from_bytes(data[position : position + 4], "little")))
                position += 4
            elif opcode in tuples:
                self.position = position
                self._tuple(tuples[opcode])
            elif opcode == 0x28:  # MARK
                self.marks.append(len(stack))
            elif opcode in _REDUCERS:
                self._pop(_REDUCERS[opcode] + 1)
                stack.append(None)
            elif opcode == 0x74:  # TUPLE
                self.position = position
                self._tuple(len(stack) - self._mark())
            elif opcode in _POPS:
                self.position = position
                if opcode == 0x73:
                    self._hash(stack[-2:])
                self._pop(_POPS[opcode])
            elif opcode in _TO_MARK:  # APPENDS, SETITEMS, ADDITEMS
                self.position = position
                mark = self._mark()
                if opcode != 0x65:
                    self._hash(stack[mark:])
                del stack[mark:]
            elif opcode in _COUNTED:
                width = _COUNTED[opcode]
                count = int.from_bytes(data[position : position + width], "little")
                position += width + count
                if position > end:
                    raise MetadataError(f"the pickle is cut short: it ends at byte {end}, its text at {position}")
                stack.append((1 + count // 8, 1) if opcode == 0x8B else None)  # a long integer hashes digit by digit
            elif opcode == 0x2E:  # STOP
                if self.puts and self.memo_size:
                    self._refuse("it mixes two ways to number its memo, which no pickler does", MetadataError)
                return position
            else:
                self.position = position
                self._rare(opcode)
                position = self.position

    def _rare(self, opcode: int) -> None:
        """Opcodes that torch's own pickles hardly use: text arguments, PUT, old protocols."""
        data, stack = self.data, self.stack
        if opcode == 0x80:  # PROTO
            self.position += 1
            if data[self.position - 1] > 5:
                self._refuse(f"protocol {data[self.position - 1]} does not exist", MetadataError)
        elif opcode == 0x95:  # FRAME
            self.position += 8
        elif opcode in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            width = 1 if opcode == 0x71 else 4
            self._put(int.from_bytes(data[self.position : self.position + width], "little"))
            self.position += width
        elif opcode == 0x70:  # PUT
            self._put(self._number())
        elif opcode == 0x67:  # GET
            stack.append(self.memo.get(self._number()))
        elif opcode in _LINES:
            for _ in range(_LINES[opcode]):
                self._line()
            if opcode == ord("i"):  # INST takes its arguments from the mark on
                del stack[self._mark() :]
            stack.append(None)
        elif opcode in b"ldo\x91":  # LIST, DICT, OBJ, FROZENSET
            mark = self._mark()
            if opcode in b"d\x91":
                self._hash(stack[mark:])
            del stack[mark:]
            stack.append(None)
        elif opcode == 0x30:  # POP, which also pops a mark
            if self.marks and self.marks[-1] == len(stack):
                self.marks.pop()
            else:
                self._pop(1)
        elif opcode == 0x31:  # POP_MARK
            del stack[self._mark() :]
        elif opcode == 0x32:  # DUP
            stack.append(stack[-1])
        elif opcode in b"\x82\x83\x84":
            self._refuse("it uses the extension registry, which names code outside the file")
        elif opcode in b"\x97\x98":
            self._refuse("it wants out-of-band buffers, which a file cannot have", MetadataError)
        else:
            self._refuse(f"0x{opcode:02x} is no pickle opcode", MetadataError)

    def _tuple(self, count: int) -> None:
        stack = self.stack
        items = stack[len(stack) - count :]
        if len(items) < count:
            raise IndexError
        del stack[len(stack) - count :]
        heavy = [item for item in items if item]
        steps, depth = 1 + count, 1
        if heavy:
            steps += sum(item[0] for item in heavy)
            depth += max(item[1] for item in heavy)
            if depth > MAX_TUPLE_DEPTH:
                self._refuse(f"tuples are nested more than {MAX_TUPLE_DEPTH} deep")
        stack.append((min(steps, 1 << 62), depth))

    def _hash(self, items: list[_Weight]) -> None:
        for item in items:
            if item:
                self.budget -= item[0]
        if self.budget < 0:
            self._refuse("shared tuples multiply beyond what can be hashed")

    def _pop(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        del self.stack[len(self.stack) - count :]

    def _mark(self) -> int:
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise IndexError
        return mark

    def _put(self, index: int) -> None:
        if not 0 <= index < max(MIN_MEMO, len(self.data)):
            self._refuse(f"memo index {index} is larger than the pickle could need")
        self.memo[index] = self.stack[-1]
        self.puts = True

    def _line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise IndexError
        line, self.position = self.data[self.position : end], end + 1
        return line

    def _number(self) -> int:
        line = self._line()
        if not line.isdigit() or len(line) > 18:
            self._refuse(f"memo index {line[:20]!r} is no number", MetadataError)
        return int(line)

    def _refuse(self, why: str, error: type[MetadataError] = UnsafePickleError) -> NoReturn:
        raise error(f"the pickle was not read: {why} (byte {self.position})")
