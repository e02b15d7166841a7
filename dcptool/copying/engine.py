"""Stream tensors of a checkpoint into output files: the one engine behind every conversion. Knows no format.

A file is written front to back, part by part. A tensor is read in bands, row-major pieces of at most BAND_NBYTES, by
threads that run ahead of the one that writes; of each band every file that is written at the time takes its share.
Memory is bounded by the bands in flight, whatever the size of a tensor or a chunk. Every record of the source that is
read has its CRC32 checked; what does not check is collected, not raised, so that all of it can be told.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, NamedTuple

from dcptool.checkpoint.boxes import ChunkIndex, check_whole
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Record
from dcptool.checkpoint.fill import Piece, RecordCheck, crc32
from dcptool.checkpoint.findings import Finding, problem_and_step
from dcptool.checkpoint.kinds import Severity
from dcptool.copying.outputs import Fill, Literal, OutputFile
from dcptool.copying.reading import BAND_NBYTES, Band, TensorReader, Where
from dcptool.copying.schedule import Begin, Bytes, Carried, End, Output, Run, Share, Step, schedule
from dcptool.errors import DcptoolError, UnsupportedError
from dcptool.storage import Creator, Progress

MAX_THREADS = 8
"""By itself: more do not make a disk faster, and each holds bands in memory."""
BANDS_PER_THREAD = 2
INLINE_NBYTES = 128 << 10
"""A smaller band is read by the thread that writes it: handing it over costs more than reading it."""
MAX_INDEXES = 64


def default_threads() -> int:
    """Return how many bands are read at the same time if nobody says."""
    return min(os.cpu_count() or 1, MAX_THREADS)


def memory_nbytes(n_groups: int, threads: int) -> int:
    """Return the bytes of all bands that are held at the same time when so many groups of files are written."""
    n_writers = min(threads, max(n_groups, 1))
    return (n_writers * (_n_ahead(n_writers, threads) + 1) + threads) * BAND_NBYTES


def _n_ahead(n_writers: int, threads: int) -> int:
    """Return how many steps each writer is read ahead for: all writers share BANDS_PER_THREAD bands per thread."""
    return max(1, threads * BANDS_PER_THREAD // n_writers - 1)


class PartlyRead(NamedTuple):
    """A record of which only parts were read: its tensor, the index of its chunk there, and what was seen of it."""

    fqn: str
    chunk_index: int
    record: Record
    pieces: tuple[Piece, ...]


class CopyReport(NamedTuple):
    """What was copied.

    Attributes:
        nbytes: written to all files.
        failures: what of the source was found damaged on the way; zeros stand in its place.
        partly_read: records that are still to be checked, with `settle`; empty unless others share them.
        unproven: fqns of tensors with values that are stored without a checksum.
    """

    nbytes: int
    failures: tuple[Finding, ...]
    partly_read: tuple[PartlyRead, ...] = ()
    unproven: frozenset[str] = frozenset()


def copy(
    source: Checkpoint,
    files: Sequence[Sequence[OutputFile]],
    target: Creator,
    threads: int,
    progress: Progress | None = None,
    shared: bool = False,
) -> CopyReport:
    """Write files from a checkpoint.

    Args:
        source: an open checkpoint.
        files: what to write, in groups: the files of one group are written side by side and take what they need from
            one reading of a tensor; groups are written at the same time. Names are relative to `target`.
        target: where nothing of these names is yet.
        threads: how many bands are read, and groups written, at the same time.
        progress: told the bytes as they are written; what it raises stops everything.
        shared: other groups, here or elsewhere, read parts of the same records; whoever has the reports of all must
            `settle` what is left over.

    Returns:
        What was written. If there are failures, the output is good for nothing.

    Raises:
        StorageError: the target cannot be written; files that were begun are removed.
    """
    with _Engine(source, target, threads, progress, shared) as engine:
        return engine.run(files)


def settle(source: Checkpoint, partly_read: Sequence[PartlyRead], threads: int) -> tuple[Finding, ...]:
    """Check records of which several read a part: from all pieces together, else by reading each once more.

    Args:
        source: the checkpoint they are of.
        partly_read: of all reports.
        threads: how many records are read at the same time.

    Returns:
        What is damaged.
    """
    sharing: dict[Record, list[PartlyRead]] = {}  # tensors of a `.pt` file may be views of one record
    for found in partly_read:
        sharing.setdefault(found.record, []).append(found)

    def check(record: Record) -> list[Finding]:
        joined = RecordCheck(record, [piece for found in sharing[record] for piece in found.pieces])
        message = joined.problem() if joined.is_whole() else _read_whole(source, record)
        return [_damage(source, found, message) for found in sharing[record]] if message else []

    with ThreadPoolExecutor(threads, "settle") as pool:
        return tuple(chain.from_iterable(pool.map(check, sharing)))


def _read_whole(source: Checkpoint, record: Record) -> str:
    try:
        return check_whole(source.source, record)
    except DcptoolError as error:
        return str(error)


def _damage(source: Checkpoint, found: PartlyRead, message: str) -> Finding:
    entry = source.entries[found.fqn]
    chunk = entry.chunks[found.chunk_index] if isinstance(entry, TensorEntry) else None
    return damaged_item(message, (found.fqn, chunk, found.record))


def damaged_item(message: str, where: Where, unsupported: bool = False) -> Finding:
    """Return the finding that something stored is damaged, or of a form that cannot be read here."""
    step = ""
    if unsupported:
        message, step = problem_and_step(message)
    fqn, chunk, record = where
    item = chunk.item if chunk else record.item if record else None
    span = (item.byte_offset, item.byte_offset + item.nbytes) if item else None
    place = f"{item.file}, bytes {span[0]:,}–{span[1]:,}: " if item and span else ""
    at = f" at {list(chunk.offsets)}" if chunk and chunk.offsets else ""
    name = f"{fqn!r}{at}: " if fqn else ""
    return Finding(
        "unsupported-item" if unsupported else "damaged-item",
        Severity.ERROR,
        f"{place}{name}{message}",
        item.file if item else None,
        fqn or None,
        chunk.offsets if chunk else None,
        chunk.sizes if chunk else None,
        span,
        step,
    )


class _Stopped(Exception):
    """Another writer has failed, whose error is the one that is raised."""


class _Engine:
    def __init__(
        self, source: Checkpoint, target: Creator, threads: int, progress: Progress | None, shared: bool
    ) -> None:
        self._source, self._target, self._shared = source, target, shared
        self._progress = progress or (lambda nbytes: None)
        self._readers = ThreadPoolExecutor(threads, "read")
        self._threads = self._n_ahead = threads
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._indexes: dict[str, ChunkIndex] = {}
        self._failures: dict[tuple[Any, ...], Finding] = {}
        self._partly_read: list[PartlyRead] = []
        self._unproven: set[str] = set()
        self._stop = threading.Event()
        self._order = {fqn: index for index, fqn in enumerate(source.entries)}

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._readers.shutdown(cancel_futures=True)

    def run(self, groups: Sequence[Sequence[OutputFile]]) -> CopyReport:
        n_writers = min(self._threads, max(len(groups), 1))
        self._n_ahead = _n_ahead(n_writers, self._threads)
        with ThreadPoolExecutor(n_writers, "write") as writers:
            done = [writers.submit(self._write_group, group) for group in groups]
            try:
                for future in wait(done, return_when=FIRST_EXCEPTION).done:
                    future.result()  # the first error, before the others are told to stop
            except BaseException:
                self._stop.set()
                writers.shutdown(cancel_futures=True)
                raise
        written = sum(future.result() for future in done)
        failures, partly_read = tuple(self._failures.values()), tuple(self._partly_read)
        return CopyReport(written, failures, partly_read, frozenset(self._unproven))

    def _write_group(self, files: Sequence[OutputFile]) -> int:
        outputs: list[Output] = []
        partly_read: list[PartlyRead] = []
        try:
            for file in files:
                outputs.append(Output(file, self._target.create(file.name)))
            self._write_parts(outputs, partly_read)
            for output in outputs:
                output.require_complete()
            if self._shared:
                self._partly_read += partly_read
            else:
                self._note_all(settle(self._source, partly_read, 1) if partly_read else ())
            for output in outputs:
                if self._failures:  # good for nothing: on an object store finishing would give it its name
                    output.sink.abort()
                else:
                    output.sink.finish()
        except BaseException:
            for output in outputs:
                output.sink.abort()
            raise
        return sum(output.written for output in outputs)

    def _write_parts(self, outputs: Sequence[Output], partly_read: list[PartlyRead]) -> None:
        """Write all parts in order, with bands read ahead across the borders of parts."""
        ahead: list[tuple[Step, Future[memoryview] | None]] = []
        for step in schedule(outputs, self._order, self._reader):
            future = None
            if isinstance(step, Share | Carried) and step.source.nbytes > INLINE_NBYTES:
                future = self._readers.submit(self._read, step.source)
            ahead.append((step, future))
            if len(ahead) > self._n_ahead:
                self._write_step(*ahead.pop(0), partly_read)
        for step, future in ahead:
            self._write_step(step, future, partly_read)

    def _write_step(self, step: Step, future: Future[memoryview] | None, partly_read: list[PartlyRead]) -> None:
        if self._stop.is_set():
            raise _Stopped
        if isinstance(step, Bytes):
            output, part = step
            output.write(part.data if isinstance(part, Literal) else part.make(output.crcs))
        elif isinstance(step, Begin):
            for output in step.outputs:
                output.crcs.append(0)
        elif isinstance(step, Share | Carried):
            data = future.result() if future else self._read(step.source)
            for output, share in step.shares(data):
                output.crcs[-1] = crc32(share, output.crcs[-1])
                output.write(share)
                self._progress(len(share))
            self._give_back(data)
        else:
            self._finish_checks(step, partly_read)

    def _reader(self, fills: Sequence[Fill]) -> TensorReader:
        return TensorReader(self._source, fills, self._index(fills[0].fqn), self._fail)

    def _index(self, fqn: str) -> ChunkIndex:
        """Return the chunks of a tensor in order; the last few are kept, for all its boxes come together."""
        with self._lock:
            found = self._indexes.get(fqn)
            if found is None:
                if len(self._indexes) >= MAX_INDEXES:
                    self._indexes.pop(next(iter(self._indexes)))
                found = self._indexes[fqn] = ChunkIndex(self._source.entries[fqn])
        return found

    def _read(self, step: Band | Run) -> memoryview:
        buffer = self._take()
        out = buffer[: step.nbytes]
        try:
            if isinstance(step, Band):
                step.reader.read(step, out)
            else:
                self._source.source.read_into(step.record, step.start, out)
                step.check.update(step.start, out)
        except DcptoolError as error:
            self._fail(str(error), step.where, isinstance(error, UnsupportedError))
            out[:] = bytes(len(out))
        return out

    def _finish_checks(self, end: End, partly_read: list[PartlyRead]) -> None:
        if end.check:
            message = end.check.problem()
            if message:
                self._fail(message, ("", None, end.check.record))
            return
        if end.reader is None:
            return
        fqn = end.reader.entry.fqn
        for index, check in end.reader.checks():
            if check.record.crc32 is None and check.record.nbytes:
                self._unproven.add(fqn)
            elif not check.is_whole():
                partly_read.append(PartlyRead(fqn, index, check.record, tuple(check.pieces)))
            elif message := check.problem():
                self._fail(message, (fqn, end.reader.entry.chunks[index], check.record))

    def _fail(self, message: str, where: Where, unsupported: bool = False) -> None:
        self._note_all([damaged_item(message, where, unsupported)])

    def _note_all(self, failures: Sequence[Finding]) -> None:
        with self._lock:
            for finding in failures:
                self._failures.setdefault((finding.fqn, finding.file, finding.byte_range), finding)

    def _take(self) -> memoryview:
        try:
            return self._buffers.get_nowait()
        except queue.Empty:
            return memoryview(bytearray(BAND_NBYTES))

    def _give_back(self, data: memoryview) -> None:
        whole = data.obj
        if isinstance(whole, bytearray):
            self._buffers.put(memoryview(whole))
