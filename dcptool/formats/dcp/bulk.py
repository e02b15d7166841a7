"""Read long runs of equal records of a `.metadata` pickle at once, into columns, without an object per record.

A million chunks are a million chunk records and a million pairs of index and place records, each 40 to 100 bytes of
opcodes that differ in a few numbers. The inert machine offers the first record of what may be a run; from the way
that one is written a regular expression for all like it is made, and the run is matched, counted and taken apart by
the `re` module. A record that is written in any other way ends the run and goes through the machine opcode by opcode,
so nothing depends on a match. Here are the places of items; `tensor_runs` has the tensors.

Source: what CPython's pickle writes for torch's MetadataIndex and _StorageInfo, protocol 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

from dcptool.checkpoint.extents import Ints
from dcptool.formats.dcp import tokens
from dcptool.formats.dcp.tensor_runs import TensorRuns, is_size
from dcptool.formats.dcp.tokens import GET, INT, NEW, SIZE, TEXT, slot, uncaptured
from dcptool.pickles.machine import Taken
from dcptool.pickles.standins import Global

MIN_RECORDS = 4
"""A shorter run is not worth its regular expression."""
BULK_NBYTES = 1 << 18
"""In a smaller pickle looking for runs costs more than it saves."""
MAX_MISSES = 200
"""Records in a row that begin no run, after which no more are looked at."""
MAX_COMPILED = 64
"""Regular expressions per pickle; torch's pickles need a few, one for each number of dimensions."""

_VALUE = rb"(?:" + SIZE + rb"|" + TEXT + rb"|" + INT + rb"|" + GET + rb"|N)"
_RECORD = NEW + rb"((?:" + GET + _VALUE + rb"){2,5})ub"

Memo = Callable[[int], Any]


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
        self._field = re.compile(rb"(" + GET + rb")(" + _VALUE + rb")", re.DOTALL)
        self._record = re.compile(_RECORD, re.DOTALL)
        self._next = re.compile(rb"(" + GET + rb")" + _RECORD, re.DOTALL)
        self._sizes = tokens.Sizes()
        self._tensors = TensorRuns(data, self._sizes)
        self._numbers = tokens.Numbers()
        self._offset_key = b""
        self._size_token = b""
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
        if self._misses.get(function.name, 0) > MAX_MISSES:
            return None
        taken = None
        try:
            token = self._class_token(position, function, memo)
            if not token:
                return None
            if function.name == "TensorStorageMetadata":
                taken = self._tensors.take(position, token, memo)
            elif function.name == "ChunkStorageMetadata":
                taken = self._tensors.take_chunks(position, token, memo)
            elif function.name == "MetadataIndex":
                taken = self._items(position, token, memo, n_memo)
        except LookupError:
            pass
        self._misses[function.name] = 0 if taken else self._misses.get(function.name, 0) + 1
        return taken

    def _items(self, position: int, token: bytes, memo: Memo, n_memo: int) -> Taken | None:
        index = self._record.match(self._data, position)
        place = self._next.match(self._data, index.end()) if index else None
        if not index or not place or getattr(memo(slot(place[1])), "name", "") != "_StorageInfo":
            return None
        fields, places = self._fields(index[1], memo), self._fields(place[2], memo)
        if fields[-1][0] == "offset":
            self._offset_key = fields[-1][1]
            if fields[-1][2] != b"N":
                self._learn_size(fields[-1][2], memo)
        elif self._offset_key:  # the index of an object, which has no offset; those of chunks may follow
            fields.append(("offset", self._offset_key, b""))
        pattern = NEW
        kinds = {"fqn": _captured(TEXT, GET), "index": rb"(?:" + INT + rb"|N)"}
        for name, key, _ in fields:
            field = re.escape(key)
            pattern += rb"(?:" + field + self._offset() + rb")?" if name == "offset" else field + kinds[name]
        pattern += rb"ub" + re.escape(place[1]) + NEW
        for name, key, _ in places:
            kinds = {"relative_path": _captured(TEXT, GET), "transform_descriptors": rb"N"}
            pattern += re.escape(key) + kinds.get(name, rb"(" + INT + rb")")
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
        fields = [(memo(slot(key)), key, value) for key, value in self._field.findall(record)]
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
        offsets = [self._sizes[text] if text else None for text in first["offset"]]
        sizes = [0 if offset is None else tokens.memo_entries(len(offset)) for offset in offsets]
        literals = [list(map(0x8C.__eq__, map(itemgetter(0), tokens))) for tokens in (names, files)]
        total = 4 * len(names) + sum(sizes) + sum(literals[0]) + sum(literals[1])

        def text_at(wanted: int) -> str:
            """Return the text a memo entry of this run holds, counted from the run's first entry."""
            start = 0
            for row in range(len(names)):
                # In the order of opcodes: index, its dict, [fqn], those of the offset, place, its dict, [file].
                after = start + 4 + sizes[row] + literals[0][row] + literals[1][row]
                if wanted < after:
                    if literals[0][row] and wanted == start + 2:
                        return tokens.text(names[row])
                    if literals[1][row] and wanted == after - 1:
                        return tokens.text(files[row])
                    break
                start = after
            raise LookupError(wanted)

        for token in {*names, *files} - self._texts.keys():
            if token[0] == 0x8C:
                self._texts[token] = tokens.text(token)
                continue
            index = slot(token)
            value = memo(index) if index < n_memo else text_at(index - n_memo)
            if not isinstance(value, str):
                raise LookupError(index)
            self._texts[token] = value
        text = self._texts.__getitem__
        numbers = partial(map, self._numbers.__getitem__)
        places = list(map(text, files))
        rows = list(zip(offsets, places, numbers(starts), numbers(first["length"]), repeat(()), strict=False))
        self._sizes.trim()
        self._numbers.trim()
        return Taken([ItemRun(list(map(text, names)), rows, set(places)), None], end, total, text_at)

    def _rows(self, position: int, record: bytes, token: bytes) -> tuple[list[Any], int]:
        """Return the captured groups of all records of a run, and its end; no rows if it is short."""
        pattern = self._compiled.get(token + record)
        if pattern is None:
            run = rb"%s(?:%s%s)*" % (uncaptured(record), token, uncaptured(record))
            pattern = self._compiled[token + record] = re.compile(record, re.DOTALL)
            self._compiled[b"run" + token + record] = re.compile(run, re.DOTALL)
        run_match = self._compiled[b"run" + token + record].match(self._data, position)
        if not run_match:
            return [], position
        rows = pattern.findall(self._data, position, run_match.end())
        return (rows, run_match.end()) if len(rows) >= self._min_records else ([], position)

    def _learn_size(self, value: bytes, memo: Memo) -> None:
        """Remember the opcode that fetches torch.Size, from how an offset is written."""
        token = value[: 2 if value[0] == 0x68 else 5]
        if token[0] not in b"hj" or not is_size(memo(slot(token))):
            raise LookupError(token)
        self._size_token = token

    def _offset(self) -> bytes:
        """Return the pattern of None or of a torch.Size of any ndim, whose numbers are captured."""
        if not self._size_token:
            return rb"N()"
        return rb"(?:N|%s(%s))" % (re.escape(self._size_token), tokens.NUMBERS)

    def _class_token(self, position: int, function: Global, memo: Memo) -> bytes | None:
        """Return the opcode before `position`, if it fetches `function` from the memo."""
        data = self._data
        for token in (data[position - 2 : position], data[position - 5 : position]):
            if token[:1] == (b"h" if len(token) == 2 else b"j"):
                try:
                    if memo(slot(token)) is function:
                        return token
                except LookupError:
                    continue
        return None


def _captured(*kinds: bytes) -> bytes:
    return rb"(" + rb"|".join(kinds) + rb")"
