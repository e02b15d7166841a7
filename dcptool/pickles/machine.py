"""The machine that runs the opcodes of a pickle on stand-ins.

It is Python's, not the C unpickler: that one allocates what a memo index says (7 bytes ask for 4 GB), what a length
says before anything is read, and hashes tuples however deep they are nested, which overflows the C stack. Here no
value is larger than the bytes that describe it, and a key is measured before it is hashed.

Source: the opcodes of CPython's `pickletools`, protocols 0 to 5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

from dcptool.errors import MetadataError, UnsafePickleError
from dcptool.pickles.calls import Calls
from dcptool.pickles.opcodes import COUNTED, FIXED, TEXT
from dcptool.pickles.standins import Global, Node, PersistentId

MAX_KEY_DEPTH = 200
"""Tuples inside tuples, in a dict key or set member. torch's own pickles use one."""
MAX_LONG_KEYS = 1000
"""Dict keys and set members that are numbers of more than 64 bits."""
_INSTANCE = b"\x81\x94}\x94("  # NEWOBJ, and its state begun: EMPTY_DICT, MARK


class Taken(NamedTuple):
    """What a run of records was taken for.

    Attributes:
        values: what it leaves on the stack in place of the class of its first instance.
        end: the byte after it.
        n_memo: the memo entries it makes.
        memo_at: gives one of them, counted from the run's first; LookupError if it was not kept.
    """

    values: list[Any]
    end: int
    n_memo: int
    memo_at: Callable[[int], Any]


Take = Callable[[int, Any, Callable[[int], Any], int], Taken | None]
"""Offered the place of an instance's arguments, its class, the memo and the memo's length: takes a run, or not."""


class NotKeptError(Exception):
    """A memo entry is wanted that lies in a run that was taken, and was not kept."""


_IN_RUN = Global("", "memo entry of a run")
_UNSET = Global("", "memo entry that was never set")


class Machine:
    """Runs the opcodes of one pickle. `position` is the byte after the opcode being run when something goes wrong."""

    def __init__(
        self, data: bytes, understood: Mapping[str, Callable[..., Any]], take: Take | None, calls: Calls
    ) -> None:
        self.data, self.take = data, take
        self.runs: list[tuple[int, Taken]] = []
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.globals: dict[tuple[str, str], Global] = {}
        self.understood, self.calls = understood, calls
        # Steps of hashing: keys are made of the pickle's own bytes, so more means shared tuples that multiply.
        self.long_keys = 0
        self.budget = 16 * len(data) + 100_000

    def run(self) -> Any:
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        push, remember, end, take = stack.append, memo.append, len(data), self.take
        # Protocol 4 numbers the memo by counting, older ones name the number; no pickler does both.
        memoize = 0x94 if data[:2] >= b"\x80\x04" else -1
        position = 0
        while True:
            opcode = data[position]
            self.position = position = position + 1
            if opcode == memoize:  # MEMOIZE
                remember(stack[-1])
            elif opcode == 0x68:  # BINGET
                value = memo[data[position]]
                push(value if value is not _IN_RUN else self._memo_at(data[position]))
                position += 1
            elif opcode == 0x6A:  # LONG_BINGET
                index = int.from_bytes(data[position : position + 4], "little")
                value = memo[index]
                push(value if value is not _IN_RUN else self._memo_at(index))
                position += 4
            elif opcode == 0x4B:  # BININT1
                push(data[position])
                position += 1
            elif opcode == 0x8C:  # SHORT_BINUNICODE
                start = position + 1
                position = start + data[position]
                if position > end:
                    self._cut()
                push(data[start:position].decode("utf-8", "surrogatepass"))
            elif opcode == 0x29:  # EMPTY_TUPLE
                if take and data.startswith(_INSTANCE, position):
                    taken = take(position - 1, stack[-1], self._memo_at, len(memo))
                    if taken:
                        self.runs.append((len(memo), taken))
                        stack[-1:] = taken.values
                        memo.extend(repeat(_IN_RUN, taken.n_memo))
                        position = taken.end
                        continue
                push(())
            elif opcode == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif opcode == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif opcode == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = self._call(stack[-1], args)
            elif opcode == 0x81:  # NEWOBJ
                args = stack.pop()
                stack[-1] = self._new(stack[-1], args)
            elif opcode == 0x7D:  # EMPTY_DICT
                push({})
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
            elif opcode == 0x75:  # SETITEMS
                items = self._pop_mark()
                self._set_items(stack[-1], items[::2], items[1::2])
            elif opcode == 0x62:  # BUILD
                state = stack.pop()
                target = stack[-1]
                if type(target) is not Node or target.state is not None:
                    target = self._changed(target)
                target.state = state
            elif opcode == 0x4D:  # BININT2
                push(data[position] | data[position + 1] << 8)
                position += 2
            elif opcode == 0x61:  # APPEND
                value = stack.pop()
                self._extend(stack[-1], [value])
            elif opcode == 0x65:  # APPENDS
                items = self._pop_mark()
                self._extend(stack[-1], items)
            elif opcode == 0x4E:  # NONE
                push(None)
            elif opcode == 0x89:  # NEWFALSE
                push(False)
            elif opcode == 0x2E:  # STOP
                return stack.pop()
            else:
                position = self._rare(opcode, position)

    def _rare(self, opcode: int, position: int) -> int:
        """Run an opcode that torch's pickles use seldom; return the position after its argument."""
        data, stack = self.data, self.stack
        push = stack.append
        if opcode in COUNTED:
            width, make = COUNTED[opcode]
            start = position + width
            position = start + int.from_bytes(data[position:start], "little")
            if position > len(data):
                self._cut()
            push(make(data[start:position]))
        elif opcode in FIXED:
            width, make = FIXED[opcode]
            if position + width > len(data):
                self._cut()
            push(make(data[position : position + width]))
            position += width
        elif opcode == 0x5D:  # EMPTY_LIST
            push([])
        elif opcode == 0x74:  # TUPLE
            push(tuple(self._pop_mark()))
        elif opcode == 0x87:  # TUPLE3
            second, last = stack[-2:]
            del stack[-2:]
            stack[-1] = (stack[-1], second, last)
        elif opcode == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            stack[-1] = self._global(stack[-1], name)
        elif opcode == 0x73:  # SETITEM
            key, value = stack[-2:]
            del stack[-2:]
            self._set_items(stack[-1], [key], [value])
        elif opcode in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            width = 1 if opcode == 0x71 else 4
            self._put(int.from_bytes(data[position : position + width], "little"))
            position += width
        elif opcode == 0x51:  # BINPERSID
            stack[-1] = PersistentId(stack[-1])
            self.calls.n_persistent += 1
        elif opcode == 0x95:  # FRAME
            position += 8
            if int.from_bytes(data[position - 8 : position], "little") > len(data) - position:
                self._cut()
        elif opcode == 0x80:  # PROTO
            if data[position] > 5:
                raise MetadataError(f"the pickle is of protocol {data[position]}, which does not exist")
            position += 1
        elif opcode == 0x92:  # NEWOBJ_EX
            args, kwargs = stack[-2:]
            del stack[-2:]
            stack[-1] = self._new(stack[-1], args, kwargs)
        else:
            position = self._old(opcode, position)
        return position

    def _old(self, opcode: int, position: int) -> int:
        """Run an opcode of protocol 0 or 1, of sets, or of the stack; return the position after its argument."""
        stack = self.stack
        push = stack.append
        if opcode in b"IFLVSPgp":
            line, position = self._line(position)
            if opcode == 0x70:  # PUT
                self._put(int(line))
            elif opcode == 0x67:  # GET
                push(self.memo[int(line) if line.isdigit() else len(self.memo)])
            else:
                push(TEXT[opcode](line))
                self.calls.n_persistent += opcode == 0x50
        elif opcode in b"ci":  # GLOBAL, INST
            module, position = self._line(position)
            name, position = self._line(position)
            found = self._global(module.decode(), name.decode())
            push(found if opcode == 0x63 else self._old_instance(found, self._pop_mark()))
        elif opcode == 0x6F:  # OBJ
            kind, *args = self._pop_mark()
            push(self._old_instance(kind, args))
        elif opcode == 0x6C:  # LIST
            push(self._pop_mark())
        elif opcode == 0x64:  # DICT
            items = self._pop_mark()
            push({})
            self._set_items(stack[-1], items[::2], items[1::2])
        elif opcode == 0x8F:  # EMPTY_SET
            push(set())
        elif opcode == 0x90:  # ADDITEMS
            items = self._pop_mark()
            self._measure(items)
            if isinstance(stack[-1], set):
                stack[-1].update(items)
            else:
                self._extend(stack[-1], items)
        elif opcode == 0x91:  # FROZENSET
            items = self._pop_mark()
            self._measure(items)
            push(frozenset(items))
        elif opcode == 0x30:  # POP, which also pops a mark
            if self.marks and self.marks[-1] == len(stack):
                self.marks.pop()
            else:
                self._drop(stack.pop(), called=self.data[position - 2] == 0x52)
        elif opcode == 0x31:  # POP_MARK
            self._pop_mark()
        elif opcode == 0x32:  # DUP
            push(stack[-1])
        elif opcode in b"\x82\x83\x84":  # EXT1, EXT2, EXT4
            push(self.calls.registered())
            position += 1 << (opcode - 0x82)
        else:
            raise MetadataError(f"the pickle is damaged at byte {position}: {opcode:#04x} is no opcode for a file")
        return position

    def _memo_at(self, index: int) -> Any:
        """Return a memo entry, also one of a run; LookupError or NotKeptError if there is none."""
        value = self.memo[index]
        if value is not _IN_RUN:
            return value
        first, taken = self.runs[bisect_right(self.runs, index, key=lambda run: run[0]) - 1]
        try:
            return taken.memo_at(index - first)
        except LookupError:
            raise NotKeptError from None

    def _put(self, index: int) -> None:
        memo = self.memo
        if self.data[:2] >= b"\x80\x04":
            raise MetadataError(f"the pickle is damaged at byte {self.position}: it numbers its memo in two ways")
        if not 0 <= index <= len(self.data):
            raise UnsafePickleError(f"the pickle was not read: memo index {index} is larger than it could need")
        memo += [_UNSET] * (index + 1 - len(memo))
        memo[index] = self.stack[-1]

    def _pop_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        if mark > len(self.stack):
            raise IndexError
        del self.stack[mark:]
        return items

    def _global(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name is no text")
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name)
        return found

    def _call(self, function: Any, args: Any) -> Any:
        self.calls.call(function, args)
        if not isinstance(args, tuple):
            raise TypeError("arguments of a call are no tuple")
        if isinstance(function, Global):
            understood = self.understood.get(f"{function.module}.{function.name}")
            if understood:
                return understood(*args)
        elif not isinstance(function, Node):
            raise TypeError(f"{type(function).__name__} is called")
        return Node(function, args, True)

    def _new(self, function: Any, args: Any, kwargs: Any = None) -> Node:
        self.calls.new(function)
        is_class = isinstance(function, Global) or (isinstance(function, Node) and function.called)
        if not is_class or not isinstance(args, tuple):
            raise TypeError("an instance is made of something that is no class")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError("keyword arguments are no dict")
        return Node(function, args, False, kwargs)

    def _old_instance(self, function: Any, args: list[Any]) -> Any:
        """Make an instance as Python 2 did: its class is called, but without arguments only `__new__` of a class is."""
        if args:
            return self._call(function, tuple(args))
        self.calls.call(function, ())
        return self._new(function, ())

    def _drop(self, value: Any, called: bool) -> None:
        """Drop a value; a call just made on what lies below it, as pickle calls state setters, is kept there."""
        below = self.stack[-1] if self.stack else None
        if called and isinstance(value, Node) and isinstance(below, Node) and value.args and value.args[0] is below:
            below.dropped = below.dropped or []
            below.dropped.append(value)

    @staticmethod
    def _node(value: Any) -> Node:
        if not isinstance(value, Node):
            raise TypeError(f"{type(value).__name__} is given a state")
        return value

    def _changed(self, value: Any) -> Node:
        """Return what is given a state, or items that its methods take, and note if that calls what it must not."""
        self.calls.change(value)
        return self._node(value)

    def _extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        else:
            node = self._changed(target)
            node.appended = node.appended or []
            node.appended += items

    def _set_items(self, target: Any, keys: list[Any], values: list[Any]) -> None:
        if len(keys) != len(values):
            raise ValueError("a key has no value")
        if isinstance(target, dict):
            self._measure(keys)
            target.update(zip(keys, values, strict=True))
        else:
            node = self._changed(target)
            node.items = node.items or []
            node.items += zip(keys, values, strict=True)

    def _measure(self, keys: list[Any]) -> None:
        """Count what hashing keys will cost before it is done; only tuples and long numbers cost more than a step."""
        for key in keys:
            if type(key) is tuple or type(key) is int:
                self._measure_one(key, 0)
        if self.budget < 0:
            raise UnsafePickleError("the pickle was not read: shared tuples multiply beyond what can be hashed")

    def _measure_one(self, key: Any, depth: int) -> None:
        if type(key) is int:
            if key.bit_length() > 64:  # such numbers can be chosen to hash alike, which makes a dict quadratic
                self.budget -= key.bit_length() >> 6
                self.long_keys += 1
                if self.long_keys > MAX_LONG_KEYS:
                    raise UnsafePickleError(f"the pickle was not read: over {MAX_LONG_KEYS} keys are huge numbers")
            return
        if depth > MAX_KEY_DEPTH:
            raise UnsafePickleError(f"the pickle was not read: a key has tuples nested more than {MAX_KEY_DEPTH} deep")
        self.budget -= len(key)
        for part in key:
            if self.budget < 0:
                return
            if type(part) is tuple or type(part) is int:
                self._measure_one(part, depth + 1)

    def _line(self, position: int) -> tuple[bytes, int]:
        end = self.data.find(b"\n", position)
        if end < 0:
            self._cut()
        return self.data[position:end], end + 1

    def _cut(self) -> NoReturn:
        raise MetadataError(f"the pickle is cut short: it ends at byte {len(self.data)}")
