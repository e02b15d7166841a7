"""Read long runs of equal records of a `.metadata` pickle at once, into columns, without an object per record.

A million chunks are a million chunk records and a million pairs of index and place records, each 40 to 100 bytes of
opcodes that differ in a few numbers. The inert machine offers the first record of what may be a run; from the way
that one is written a regular expression for all like it is made, and the run is matched, counted and taken apart by
the `re` module. A record that is written in any other way ends the run and goes through the machine opcode by opcode,
so nothing depends on a match.

Source: what CPython's pickle writes for torch's ChunkStorageMetadata, MetadataIndex and _StorageInfo, protocol 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

from dcptool.model import Ints
from dcptool.pickles.machine import Taken
from dcptool.pickles.standins import Global
from dcptool.regions import Box

MIN_RECORDS = 4
"""A shorter run is not worth its regular expression."""
BULK_NBYTES = 1 << 18
"""In a smaller pickle looking for runs costs more than it saves."""
MAX_KEPT = 100_000
"""Different sizes that are kept by how they are written."""
MAX_MISSES = 200
"""Records in a row that begin no run, after which no more are looked at."""
MAX_COMPILED = 64
"""Regular expressions per pickle; torch's pickles need a few, one for each number of dimensions."""

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J...[\x00-\x7f]|\x8a(?:\x05.{4}|\x06.{5}|\x07.{6}|\x08.{7})[\x00-\x7f])"
_TEXT = rb"\x8c.[ -~]*\x94"
_NEW = rb"\)\x81\x94\}\x94\("  # an instance without arguments, and the dict of its state
_SIZE_END = rb"\x94\x85\x94R\x94"
_TUPLE = rb"(?:I\x85|I{2}\x86|I{3}\x87|\(I{4,8}t)".replace(b"I", _INT)
_SIZE = rb"(?:" + _GET + _TUPLE + _SIZE_END + rb")"
_EMPTY_SIZE = rb"(?:" + _GET + rb"\)\x85\x94R\x94)"
_VALUE = rb"(?:" + _SIZE + rb"|" + _EMPTY_SIZE + rb"|" + _TEXT + rb"|" + _INT + rb"|" + _GET + rb"|N)"
_RECORD = _NEW + rb"((?:" + _GET + _VALUE + rb"){2,5})ub"

Memo = Callable[[int], Any]


class ChunkRun:
    """Chunks of one tensor, of one ndim: offsets and sizes of each, in elements."""

    __slots__ = ("boxes", "ndim")

    def __init__(self, ndim: int, boxes: list[Box]) -> None:
        self.ndim, self.boxes = ndim, boxes


ItemRow = tuple[Ints | None, str, int, int, tuple[str, ...]]
"""Where one chunk or object is: its offsets (None: an object), and the fields of an Extent."""


class ItemRun:
    """Places of chunks and objects: the fqn and the row of each, and the names of all files."""

    __slots__ = ("files", "fqns", "rows")

    def __init__(self, fqns: list[str], rows: Sequence[ItemRow], files: set[str]) -> None:
        self.fqns, self.rows, self.files = fqns, rows, files


class Bulk:
    """Takes runs out of one pickle; see `take`."""

    def __init__(self, data: bytes, min_records: int = MIN_RECORDS) -> None:
        self._data = data
        self._min_records = min_records
        self._compiled: dict[bytes, re.Pattern[bytes]] = {}
        self._misses: dict[str, int] = {}
        # Compiled here, not when the module is imported: most checkpoints are too small to need them.
        self._field = re.compile(rb"(" + _GET + rb")(" + _VALUE + rb")", re.DOTALL)
        self._record = re.compile(_RECORD, re.DOTALL)
        self._next = re.compile(rb"(" + _GET + rb")" + _RECORD, re.DOTALL)
        self._int = re.compile(_INT, re.DOTALL)
        self._sizes = _Sizes(self._int)
        self._any = _AnySize(self._int, self._sizes.same)
        self._numbers = _Numbers()
        self._offset_key = b""
        self._texts: dict[bytes, str] = {}

    def take(self, position: int, function: Any, memo: Memo, n_memo: int) -> Taken | None:
        """Take the run that begins at `position`, where an instance of `function` is about to be made.

        Args:
            position: of the EMPTY_TUPLE of NEWOBJ, in bytes.
            function: what is on top of the stack.
            memo: the memo so far.
            n_memo: its length.

        Returns:
            The run, or None if this is none.
        """
        if not isinstance(function, Global) or len(self._compiled) >= MAX_COMPILED:
            return None
        if (
            self._misses.get(function.name, 0) > MAX_MISSES
        ):  # tensors in few chunks each: looking costs more than it saves
            return None
        taken = None
        try:
            if function.name == "ChunkStorageMetadata":
                taken = self._chunks(position, function, memo)
            elif function.name == "MetadataIndex":
                taken = self._items(position, function, memo, n_memo)
        except LookupError:
            pass
        self._misses[function.name] = 0 if taken else self._misses.get(function.name, 0) + 1
        return taken

    def _chunks(self, position: int, function: Global, memo: Memo) -> Taken | None:
        record = self._record.match(self._data, position)
        fields = self._field.findall(record[1]) if record else []
        if [memo(_slot(key)) for key, _ in fields] != ["offsets", "sizes"]:
            return None
        pattern, ndims = _NEW, []
        for key, value in fields:
            part, ndim = self._size_pattern(value, memo)
            pattern += re.escape(key) + part
            ndims.append(ndim)
        token = self._class_token(position, function, memo)
        if ndims[0] != ndims[1] or not ndims[0] or not token:
            return None
        rows, end = self._rows(position, pattern + rb"ub", re.escape(token))
        if not rows:
            return None
        size = self._sizes.__getitem__
        boxes = [(size(offsets), size(sizes)) for offsets, sizes in rows]
        self._sizes.trim()
        return Taken([ChunkRun(ndims[0], boxes)], end, 8 * len(rows), _no_text)

    def _items(self, position: int, function: Global, memo: Memo, n_memo: int) -> Taken | None:
        index = self._record.match(self._data, position)
        place = self._next.match(self._data, index.end()) if index else None
        token = self._class_token(position, function, memo)
        if not index or not place or not token or getattr(memo(_slot(place[1])), "name", "") != "_StorageInfo":
            return None
        fields, places = self._fields(index[1], memo), self._fields(place[2], memo)
        if fields[-1][0] == "offset":
            self._offset_key = fields[-1][1]
            if fields[-1][2] != b"N":
                self._size_pattern(fields[-1][2], memo)
        elif self._offset_key:  # the index of an object, which has no offset; those of chunks may follow
            fields.append(("offset", self._offset_key, b""))
        pattern = _NEW
        kinds = {"fqn": _captured(_TEXT, _GET), "index": rb"(?:" + _INT + rb"|N)"}
        for name, key, _ in fields:
            field = re.escape(key)
            pattern += rb"(?:" + field + self._any_size() + rb")?" if name == "offset" else field + kinds[name]
        pattern += rb"ub" + re.escape(place[1]) + _NEW
        for name, key, _ in places:
            kinds = {"relative_path": _captured(_TEXT, _GET), "transform_descriptors": rb"N"}
            pattern += re.escape(key) + kinds.get(name, rb"(" + _INT + rb")")
        order = [name for name, *_ in fields + places if name not in ("index", "transform_descriptors")]
        expected = ["fqn", "length", "offset", "offset", "relative_path"]
        if sorted(order) != expected or fields[0][0] != "fqn" or places[0][0] != "relative_path":
            return None
        rows, end = self._rows(position, pattern + rb"ub", re.escape(token))
        if not rows:
            return None
        # "offset" is the chunk's in the first record and a byte offset in the second.
        columns = list(zip(*rows, strict=True))
        first = {name: columns[order.index(name)] for name in ("fqn", "offset", "relative_path", "length")}
        starts = columns[len(order) - 1 - order[::-1].index("offset")]
        return self._item_run(first, starts, memo, n_memo, end)

    def _fields(self, record: bytes, memo: Memo) -> list[tuple[str, bytes, bytes]]:
        """Return name, key opcode and value opcodes of each field of a record."""
        fields = [(memo(_slot(key)), key, value) for key, value in self._field.findall(record)]
        if not all(isinstance(name, str) for name, *_ in fields):
            raise LookupError(record)
        return fields

    def _item_run(
        self,
        first: dict[str, tuple[bytes, ...]],
        starts: tuple[bytes, ...],
        memo: Memo,
        n_memo: int,
        end: int,
    ) -> Taken | None:
        names, files = first["fqn"], first["relative_path"]
        sizes = [self._any[text] for text in first["offset"]]
        literals = [list(map(0x8C.__eq__, map(itemgetter(0), tokens))) for tokens in (names, files)]
        total = 4 * len(names) + sum(size[1] for size in sizes) + sum(literals[0]) + sum(literals[1])

        def text_at(slot: int) -> str:
            """Return the text a memo entry of this run holds, counted from the run's first entry."""
            start = 0
            for row in range(len(names)):
                # In the order of opcodes: index, its dict, [fqn], those of the offset, place, its dict, [file].
                after = start + 4 + sizes[row][1] + literals[0][row] + literals[1][row]
                if slot < after:
                    if literals[0][row] and slot == start + 2:
                        return _text(names[row])
                    if literals[1][row] and slot == after - 1:
                        return _text(files[row])
                    break
                start = after
            raise LookupError(slot)

        for token in {*names, *files} - self._texts.keys():
            if token[0] == 0x8C:
                self._texts[token] = _text(token)
                continue
            slot = _slot(token)
            value = memo(slot) if slot < n_memo else text_at(slot - n_memo)
            if not isinstance(value, str):
                raise LookupError(slot)
            self._texts[token] = value
        text = self._texts.__getitem__
        numbers = partial(map, self._numbers.__getitem__)
        offsets = map(itemgetter(0), sizes)
        places = list(map(text, files))
        rows = list(zip(offsets, places, numbers(starts), numbers(first["length"]), repeat(()), strict=False))
        self._any.trim()
        self._numbers.trim()
        return Taken([ItemRun(list(map(text, names)), rows, set(places)), None], end, total, text_at)

    def _rows(self, position: int, record: bytes, token: bytes) -> tuple[list[Any], int]:
        """Return the captured groups of all records of a run, and its end; no rows if it is short."""
        pattern = self._compiled.get(token + record)
        if pattern is None:
            run = rb"%s(?:%s%s)*" % (_uncaptured(record), token, _uncaptured(record))
            pattern = self._compiled[token + record] = re.compile(record, re.DOTALL)
            self._compiled[b"run" + token + record] = re.compile(run, re.DOTALL)
        run_match = self._compiled[b"run" + token + record].match(self._data, position)
        if not run_match:
            return [], position
        rows = pattern.findall(self._data, position, run_match.end())
        return (rows, run_match.end()) if len(rows) >= self._min_records else ([], position)

    def _size_pattern(self, value: bytes, memo: Memo) -> tuple[bytes, int]:
        """Return the pattern of a torch.Size written as `value` is, with its numbers captured, and its ndim."""
        token = value[: 2 if value[0] == 0x68 else 5]
        function = memo(_slot(token)) if token[0] in b"hj" else None
        ndim = len(self._int.findall(value[len(token) :]))
        if not isinstance(function, Global) or (function.module, function.name) != ("torch", "Size"):
            raise LookupError(token)
        self._any.token = token
        head, tail = (rb"", (rb"\x85", rb"\x86", rb"\x87")[ndim - 1]) if 1 <= ndim <= 3 else (rb"\(", rb"t")
        if not ndim:
            raise LookupError(token)
        return re.escape(token) + head + rb"((?:%s){%d})" % (_INT, ndim) + tail + _SIZE_END, ndim

    def _any_size(self) -> bytes:
        """Return the pattern of None or of a torch.Size of any ndim, captured as written."""
        token = re.escape(self._any.token)
        if not token:
            return rb"(N)"
        return rb"(N|" + token + rb"(?:" + _TUPLE + _SIZE_END + rb"|\)\x85\x94R\x94))"

    def _class_token(self, position: int, function: Global, memo: Memo) -> bytes | None:
        """Return the opcode before `position`, if it fetches `function` from the memo."""
        data = self._data
        for token in (data[position - 2 : position], data[position - 5 : position]):
            if token[:1] == (b"h" if len(token) == 2 else b"j"):
                try:
                    if memo(_slot(token)) is function:
                        return token
                except LookupError:
                    continue
        return None


class _Sizes(dict[bytes, Ints]):
    """The numbers of a torch.Size by how they are written; few differ among millions."""

    def __init__(self, integer: re.Pattern[bytes]) -> None:
        super().__init__()
        self._integer = integer
        self.same: dict[Ints, Ints] = {}
        """Equal sizes are one object, whatever they are written as: comparing them is then a matter of identity."""

    def __missing__(self, tokens: bytes) -> Ints:
        numbers = tuple(map(_number, self._integer.findall(tokens)))
        found = self[tokens] = self.same.setdefault(numbers, numbers)
        return found

    def trim(self) -> None:
        """Forget all when there are too many to be worth keeping."""
        if len(self) > MAX_KEPT:
            self.clear()
            self.same.clear()


class _AnySize(dict[bytes, tuple[Ints | None, int]]):
    """The numbers of an offset of an index, and the memo entries it makes, by how it is written."""

    def __init__(self, integer: re.Pattern[bytes], same: dict[Ints, Ints]) -> None:
        super().__init__()
        self._integer = integer
        self._same = same
        self.token = b""
        """The opcode that fetches torch.Size."""

    def __missing__(self, text: bytes) -> tuple[Ints | None, int]:
        found: tuple[Ints | None, int] = (None, 0)
        if text not in (b"", b"N"):
            numbers = tuple(map(_number, self._integer.findall(text, len(self.token))))
            # Three entries: the numbers, the arguments, the size itself.
            found = self._same.setdefault(numbers, numbers), 3 if numbers else 2
        self[text] = found
        return found

    def trim(self) -> None:
        """Forget all when there are too many to be worth keeping."""
        if len(self) > MAX_KEPT:
            self.clear()


class _Numbers(dict[bytes, int]):
    """The values of integer opcodes; ranks write items of the same lengths to the same places."""

    def __missing__(self, token: bytes) -> int:
        found = self[token] = _number(token)
        return found

    def trim(self) -> None:
        """Forget all when there are too many to be worth keeping."""
        if len(self) > MAX_KEPT:
            self.clear()


def _captured(*kinds: bytes) -> bytes:
    return rb"(" + rb"|".join(kinds) + rb")"


def _uncaptured(pattern: bytes) -> bytes:
    """Return a pattern whose groups do not capture, which the run needs for speed."""
    return re.sub(rb"(?<!\\)\((?!\?)", rb"(?:", pattern)


def _slot(token: bytes) -> int:
    return int.from_bytes(token[1:], "little")


def _number(token: bytes) -> int:
    """Return the value of an integer opcode; LONG1 has a length before its digits, the others have not."""
    return int.from_bytes(token, "little") >> (16 if token[0] == 0x8A else 8)


def _text(token: bytes) -> str:
    if token[1] != len(token) - 3:  # the length and the text disagree: not what a pickler writes
        raise LookupError(token)
    return token[2:-1].decode("ascii")


def _no_text(slot: int) -> str:
    raise LookupError(slot)
