"""Look into items: does each hold what the metadata says (level `records`), are its bytes unchanged (`deep`), and is
what they mean a finite number?

Files are read front to back, small items together, by several threads. Knows no format: a source examines an item.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Event
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import ObjectEntry, TensorEntry, require_box
from dcptool.checkpoint.extents import Examined, Extent, Payload, Record, place_words, whereabouts
from dcptool.checkpoint.fill import crc32
from dcptool.checkpoint.findings import LOOK_AGAIN, Finding, how_to_load, unsafe_pickle
from dcptool.checkpoint.items import FileItems, Placed, name_of
from dcptool.checkpoint.kinds import Effect
from dcptool.checks.finite import (
    WIDEST_NBYTES,
    Elements,
    Found,
    RecordValues,
    lies_over_itself,
    look_at_box,
    merged,
    views_inside,
)
from dcptool.checks.split import Split, alone
from dcptool.errors import DcptoolError, ItemError, RunsCodeError, StorageError, UnsupportedError
from dcptool.storage import Progress
from dcptool.storage.window import Window

HEADERS_NBYTES = 64 << 10
"""Where only headers are wanted, items up to this length are read together."""
RANGE_NBYTES = 64 << 20
"""A thread takes so many bytes of a file at a time."""
MAX_PER_FILE = 1_000
"""Findings of one file that are told one by one."""
_MORE = {
    Effect.UNREAD: ("unsupported-item", "cannot be looked into"),
    Effect.UNREADABLE: ("unreadable", "cannot be read"),
}
"""By the effect of findings that are only counted: their kind, and what is said."""


class Tally(NamedTuple):
    """What was looked at: items, those whose writer stored no checksum, bytes read, and items that were not looked at.

    These are in files that cannot be read, damaged, or of a form that cannot be read here; no other number has them.
    """

    n_items: int = 0
    n_unverifiable: int = 0
    unverifiable_nbytes: int = 0
    nbytes: int = 0
    n_unread: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class ItemReport(NamedTuple):
    """What a look into items shows: what is wrong, what was looked at, and what is not finite, if that was asked."""

    problems: list[Finding]
    tally: Tally
    not_finite: Found


class Depth(NamedTuple):
    """How items are looked into.

    Attributes:
        deep: whether bytes are read and checksums checked, not only headers.
        finite: with `deep`, whether the values are looked at.
    """

    deep: bool = False
    finite: bool = False


class ItemRange(NamedTuple):
    """Items of one file, by index from `first` up to, but not including, `last`; byte `nbytes` is the file's end."""

    file: str
    nbytes: int
    first: int
    last: int


def item_problems(
    checkpoint: Checkpoint,
    by_file: FileItems,
    wanted: Depth,
    threads: int,
    progress: Progress | None = None,
    split: Split = alone,
) -> ItemReport:
    """Examine every item; if it is wanted, read every byte of it, check every checksum and look at every value.

    Args:
        checkpoint: an open checkpoint.
        by_file: its items by file.
        wanted: how closely to look.
        threads: how many read at the same time.
        progress: told the bytes as they are read.
        split: does the work on pieces of files, here or in several processes.

    Returns:
        What is wrong, in the order of files and bytes, and the rest; see `ItemReport`.
    """
    from concurrent.futures import ThreadPoolExecutor

    ranges = list(_ranges(checkpoint, by_file))
    stop = Event()

    def run(items: ItemRange) -> ItemReport:
        return _Scan(checkpoint, by_file, wanted, progress, stop).run(items)

    def run_all(mine: Sequence[ItemRange]) -> list[ItemReport]:
        with ThreadPoolExecutor(threads) as pool:
            try:
                return list(pool.map(run, mine))
            except BaseException:  # Ctrl-C: what runs ends at its next piece, what waits does not begin
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    done = split(run_all, ranges)
    tally = Tally()
    by_name: dict[str, list[Finding]] = {}
    for items, looked in zip(ranges, done, strict=True):
        tally = tally.plus(looked.tally)
        by_name.setdefault(items.file, []).extend(looked.problems)
    problems = [finding for found in by_name.values() for finding in found[:MAX_PER_FILE]]
    untold = [(file, finding) for file, found in by_name.items() for finding in found[MAX_PER_FILE:]]
    counts = Counter((file, finding.traits.effect) for file, finding in untold)
    for (file, effect), count in counts.items():
        kind, what = _MORE.get(effect, ("damaged-item", "are damaged"))
        problems.append(Finding.of(kind, f"{count:,} more items of {file} {what}", file))
    return ItemReport(problems, tally, merged(looked.not_finite for looked in done))


def _ranges(checkpoint: Checkpoint, by_file: FileItems) -> Iterator[ItemRange]:
    for file in sorted(by_file.files):
        nbytes = checkpoint.files.get(file)
        if nbytes is None:
            nbytes = checkpoint.storage.size(file)
        if nbytes is None:  # missing, which is said elsewhere
            continue
        starts, _ = by_file.spans(file)
        first = 0
        for index, start in enumerate(starts):
            if start - starts[first] >= RANGE_NBYTES:
                yield ItemRange(file, nbytes, first, index)
                first = index
        yield ItemRange(file, nbytes, first, len(starts))


class _Scan:
    """One thread's way through one range of items."""

    def __init__(
        self, checkpoint: Checkpoint, by_file: FileItems, wanted: Depth, progress: Progress | None, stop: Event
    ) -> None:
        self._stop = stop
        self._checkpoint, self._by_file, self._wanted = checkpoint, by_file, wanted
        self._window = Window(checkpoint.storage)
        self._source = checkpoint.source.over(self._window)
        self._progress = progress or (lambda nbytes: None)
        piece = checkpoint.storage.piece_nbytes
        self._together = piece if wanted.deep else HEADERS_NBYTES
        whole = max(piece // WIDEST_NBYTES, 1) * WIDEST_NBYTES  # no element lies in two pieces
        self._buffer = memoryview(bytearray(whole if wanted.deep else 0))
        self._seen: set[_Place] = set()
        self._read_whole: set[Extent] = set()
        self._views: dict[_Place, list[Elements]] = {}
        self._examined: dict[int, Examined] = {}
        self._not_finite: Found = {}
        self.problems: list[Finding] = []
        self._tally = Tally()

    def run(self, items: ItemRange) -> ItemReport:
        starts, ends = (column[items.first : items.last] for column in self._by_file.spans(items.file))
        there = [index for index, end in enumerate(ends) if end <= items.nbytes]  # others are cut off, said elsewhere
        if self._wanted.finite and not self._checkpoint.format.items_apart:
            self._examine_all(items, there)
        position = 0
        while position < len(there) and not self._stop.is_set():
            index = there[position]
            last = position + 1
            while last < len(there) and ends[there[last]] - starts[index] <= self._together:
                last += 1
            if ends[index] - starts[index] <= self._together:
                end = max(ends[there[at]] for at in range(position, last))
                with suppress(DcptoolError):  # its items will say so, each by itself
                    self._window.load(items.file, starts[index], end)
            for at in there[position:last]:
                placed = self._by_file.item(items.file, items.first + at)
                try:
                    looked = self._look_at(placed, self._examined.pop(at, None))
                except DcptoolError as error:
                    looked = Tally(n_unread=1)
                    self._tell(placed, error)
                self._tally = self._tally.plus(looked)
            position = last
        return ItemReport(self.problems, self._tally, self._not_finite)

    def _examine_all(self, items: ItemRange, there: Sequence[int]) -> None:
        """Find what all tensors use of each record, before one that several use is read."""
        for at in there:
            placed = self._by_file.item(items.file, items.first + at)
            with suppress(DcptoolError):  # which will be raised once more, and told
                self._examined[at] = self._examine(placed)

    def _examine(self, placed: Placed) -> Examined:
        examined = self._source.examine(placed.entry, placed.chunk, placed.item)
        if self._wanted.finite:
            self._note_views(placed, examined)
        return examined

    def _note_views(self, placed: Placed, examined: Examined) -> None:
        """Take note of what an item's tensors use of its records; what lies over itself is looked at here and now."""
        entry, chunk, payload = placed.entry, placed.chunk, examined.payload
        views: Sequence[Elements] = ()
        if chunk and payload and not _misfit(placed, payload):
            views = [Elements(entry.fqn, chunk.offsets, payload)]
        elif isinstance(entry, ObjectEntry) and any(record.name.startswith("data/") for record in examined.records):
            views = views_inside(self._source, entry)
        views = [view for view in views if view.can_be_not_finite]
        apart = [view for view in views if not lies_over_itself(view.payload)]
        for view in views if len(apart) < len(views) else ():
            if lies_over_itself(view.payload):
                look_at_box(self._source, view, self._not_finite)
        for view in apart:
            self._views.setdefault(_place(view.payload.record), []).append(view)

    def _look_at(self, placed: Placed, examined: Examined | None) -> Tally:
        chunk = placed.chunk
        payload, records, unsafe, foreign = examined or self._examine(placed)
        for finding in unsafe_pickle(unsafe, "its pickle"):
            self._add(finding.kind, placed, finding.message, finding.next_step)
        if foreign:
            message = f"not proven: it is {foreign}, which dcptool does not look into"
            self._add("unsupported-item", placed, message, how_to_load(foreign))
        again = placed.item in self._read_whole  # each tensor of a `.pt` has all its records
        unsure = all(record.crc32 is None for record in records if record.nbytes)
        nbytes = sum(record.nbytes for record in records) if unsure and not again else 0
        n_read = sum(self._read(placed, record) for record in records) if self._wanted.deep and not again else 0
        if not self._checkpoint.format.items_apart:
            self._read_whole.add(placed.item)
        misfit = _misfit(placed, payload) if payload and chunk else ""
        if misfit:
            self._add("wrong-item", placed, misfit, _TWO_SAVES)
        return Tally(1, int(unsure), nbytes, n_read)

    def _read(self, placed: Placed, record: Record) -> int:
        """Read a record once, check its CRC32 and look at its values; return the bytes read."""
        place = _place(record)
        if place in self._seen:  # tensors of a `.pt` share storages
            return 0
        if not self._checkpoint.format.items_apart:
            self._seen.add(place)
        views = self._views.pop(place, ())
        values = RecordValues(views, self._not_finite) if views else None
        value = 0
        for start in range(0, record.nbytes, len(self._buffer)):
            if self._stop.is_set():
                return 0
            piece = self._buffer[: record.nbytes - start]
            self._source.read_into(record, start, piece)
            value = crc32(piece, value)
            if values:
                values.look(start, piece)
            self._progress(len(piece))
        if record.crc32 is not None and value != record.crc32:
            message = f"record {record.name} has CRC32 {value:08x}, stored is {record.crc32:08x}: bytes were changed"
            self._add("wrong-crc", placed, message)
        return record.nbytes

    def _tell(self, placed: Placed, error: DcptoolError) -> None:
        """Make a finding of what was raised about an item."""
        if isinstance(error, RunsCodeError):
            for finding in unsafe_pickle(error.names, "its pickle"):
                self._add(finding.kind, placed, f"{finding.message}; {error.message}", finding.next_step)
        elif isinstance(error, UnsupportedError):
            self._add("unsupported-item", placed, error.message, error.next_step or _UNKNOWN)
        else:
            unreadable = isinstance(error, StorageError)
            kind, step = ("unreadable", error.next_step or LOOK_AGAIN) if unreadable else ("damaged-item", "")
            self._add(kind, placed, error.message, step)

    def _add(self, kind: str, placed: Placed, message: str, step: str = "") -> None:
        self.problems.append(about(placed, kind, message, step))


def about(placed: Placed, kind: str, message: str, step: str = "") -> Finding:
    """Return a finding about an item, which says where it is."""
    item = placed.item
    text = f"{place_words(item)}: {name_of(placed)}: {message.removeprefix(f'{item.file}: ')}"
    return Finding.of(kind, text, *whereabouts(item, placed.entry.fqn, placed.chunk), step or _AGAIN)


_Place = tuple[int, int, int]


def _place(record: Record) -> _Place:
    """Return what tells the records of a file apart."""
    return record.item.byte_offset, record.byte_offset, record.nbytes


def _misfit(placed: Placed, payload: Payload) -> str:
    """Say why a payload is not the box of the tensor that the metadata says, "" if it is."""
    try:
        if isinstance(placed.entry, TensorEntry) and placed.chunk:
            require_box(payload, placed.entry, placed.chunk)
    except ItemError as error:
        return error.message
    return ""


_TWO_SAVES = (
    "Or torch itself named uneven shards of FSDP × TP wrongly (rows not divisible by tp); it cannot load them either."
)
_UNKNOWN = "Nothing is known of it; dcptool verify --load shows whether torch loads it."
_AGAIN = "Copy this file again from where it was saved, or resume from another step."
