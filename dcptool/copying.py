"""Stream tensors of a checkpoint into output files: the one engine behind every conversion. Knows no format.

A file is written front to back, part by part. A tensor is read in bands, row-major pieces of at most BAND_NBYTES, by
threads that run ahead of the one that writes; several files are written at the same time. Memory is bounded by the
bands in flight, whatever the size of a tensor or a chunk. Every record of the source that is read has its CRC32
checked; what does not check is collected, not raised, so that all of it can be told.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from dcptool.checkpoint import Checkpoint
from dcptool.errors import DcptoolError, LayoutError
from dcptool.fill import RecordCheck, crc32
from dcptool.findings import Finding, Severity
from dcptool.model import Closing, Fill, Literal, OutputFile, Record, Verbatim
from dcptool.reading import BAND_NBYTES, Band, ChunkIndex, TensorReader, Where
from dcptool.storage import Sink, Storage

MAX_THREADS = 8
"""By itself: more do not make a disk faster, and each holds bands in memory."""
BANDS_PER_THREAD = 2
INLINE_NBYTES = 128 << 10
"""A smaller band is read by the thread that writes it: handing it over costs more than reading it."""
MAX_INDEXES = 64

Progress = Callable[[int], None]


def default_threads() -> int:
    """Return how many bands are read at the same time if nobody says."""
    return min(os.cpu_count() or 1, MAX_THREADS)


def memory_nbytes(n_files: int, threads: int) -> int:
    """Return the bytes of all bands that are held at the same time when so many files are written."""
    n_writers = min(threads, max(n_files, 1))
    return (n_writers * (_n_ahead(n_writers, threads) + 1) + threads) * BAND_NBYTES


def _n_ahead(n_writers: int, threads: int) -> int:
    """Return how many steps each writer is read ahead for: all writers share BANDS_PER_THREAD bands per thread."""
    return max(1, threads * BANDS_PER_THREAD // n_writers - 1)


class CopyReport(NamedTuple):
    """What was copied: bytes written to all files, and what of the source was found damaged on the way."""

    nbytes: int
    failures: tuple[Finding, ...]


def copy(
    source: Checkpoint, files: Sequence[OutputFile], target: Storage, threads: int, progress: Progress | None = None
) -> CopyReport:
    """Write files from a checkpoint.

    Args:
        source: an open checkpoint.
        files: what to write; names are relative to `target`.
        target: where nothing of these names is yet.
        threads: how many bands are read at the same time.
        progress: told the bytes as they are written.

    Returns:
        What was written. Where a record of the source is damaged, zeros stand in its place, and it is in `failures`:
        the output is then good for nothing.

    Raises:
        StorageError: the target cannot be written; files that were begun are removed.
    """
    with _Engine(source, target, threads, progress) as engine:
        return engine.run(files)


class _Engine:
    def __init__(self, source: Checkpoint, target: Storage, threads: int, progress: Progress | None) -> None:
        self._source, self._target = source, target
        self._progress = progress or (lambda nbytes: None)
        self._readers = ThreadPoolExecutor(threads, "read")
        self._threads = self._n_ahead = threads
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._indexes: dict[str, ChunkIndex] = {}
        self._failures: dict[tuple[Any, ...], Finding] = {}
        self._stop = threading.Event()

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._readers.shutdown(cancel_futures=True)

    def run(self, files: Sequence[OutputFile]) -> CopyReport:
        n_writers = min(self._threads, max(len(files), 1))
        self._n_ahead = _n_ahead(n_writers, self._threads)
        with ThreadPoolExecutor(n_writers, "write") as writers:
            done = [writers.submit(self._write_file, file) for file in files]
            try:
                for future in wait(done, return_when=FIRST_EXCEPTION).done:
                    future.result()  # the first error, before the others are told to stop
            except BaseException:
                self._stop.set()
                writers.shutdown(cancel_futures=True)
                raise
        return CopyReport(sum(future.result() for future in done), tuple(self._failures.values()))

    def _write_file(self, file: OutputFile) -> int:
        sink = self._target.create(file.name)
        try:
            written = self._write_parts(file, sink)
            if written != file.nbytes:
                raise LayoutError(f"{file.name} came out as {written:,} bytes, planned were {file.nbytes:,}")
            if self._failures:  # good for nothing: on an object store finishing would give it its name
                sink.abort()
            else:
                sink.finish()
        except BaseException:
            sink.abort()
            raise
        return written

    def _write_parts(self, file: OutputFile, sink: Sink) -> int:
        """Write all parts in order, with bands read ahead across the borders of parts."""
        crcs: list[int] = []
        written = 0
        ahead: list[tuple[Any, Future[memoryview] | None]] = []
        for step in self._steps(file):
            is_large = isinstance(step, Band | _Piece) and step.nbytes > INLINE_NBYTES
            ahead.append((step, self._readers.submit(self._read, step) if is_large else None))
            if len(ahead) > self._n_ahead:
                written += self._write_step(*ahead.pop(0), crcs, sink)
        for step, future in ahead:
            written += self._write_step(step, future, crcs, sink)
        return written

    def _steps(self, file: OutputFile) -> Iterator[Any]:
        for part in file.parts:
            if isinstance(part, Fill):
                reader = TensorReader(self._source, part, self._index(part.fqn), self._fail)
                yield from reader.bands()
                yield _End(reader)
            elif isinstance(part, Verbatim):
                check = RecordCheck(part.record)
                for start in range(0, max(part.nbytes, 1), BAND_NBYTES):
                    yield _Piece(part.record, check, start, min(BAND_NBYTES, part.nbytes - start), start == 0)
                yield _End(None, check)
            else:
                yield part

    def _write_step(self, step: Any, future: Future[memoryview] | None, crcs: list[int], sink: Sink) -> int:
        if self._stop.is_set():
            raise LayoutError("stopped")
        if isinstance(step, Band | _Piece):
            data = future.result() if future else self._read(step)
            if step.is_first:
                crcs.append(0)
            crcs[-1] = crc32(data, crcs[-1])
            sink.write(data)
            self._progress(len(data))
            nbytes = len(data)
            self._give_back(data)
            return nbytes
        if isinstance(step, _End):
            self._finish_checks(step)
            return 0
        data_ = step.data if isinstance(step, Literal) else step.make(crcs)
        if isinstance(step, Closing) and len(data_) != step.nbytes:
            raise LayoutError(f"a directory came out as {len(data_)} bytes, planned were {step.nbytes}")
        sink.write(data_)
        return len(data_)

    def _index(self, fqn: str) -> ChunkIndex:
        """Return the chunks of a tensor in order; the last few are kept, for all its boxes come together."""
        with self._lock:
            found = self._indexes.get(fqn)
            if found is None:
                if len(self._indexes) >= MAX_INDEXES:
                    self._indexes.pop(next(iter(self._indexes)))
                found = self._indexes[fqn] = ChunkIndex(self._source.entries[fqn])
        return found

    def _read(self, step: Band | _Piece) -> memoryview:
        buffer = self._take()
        out = buffer[: step.nbytes]
        try:
            if isinstance(step, Band):
                step.reader.read(step, out)
            else:
                self._source.source.read_into(step.record, step.start, out)
                step.check.update(step.start, out)
        except DcptoolError as error:
            self._fail(str(error), step.where)
            out[:] = bytes(len(out))
        return out

    def _finish_checks(self, end: _End) -> None:
        checks = end.reader.checks() if end.reader else [("", None, end.check)]
        for fqn, chunk, check in checks:
            message = check.problem() if check else ""
            if message and check:
                self._fail(message, (fqn, chunk, check.record))

    def _fail(self, message: str, where: Where) -> None:
        fqn, chunk, record = where
        item = chunk.item if chunk else record.item if record else None
        span = (item.byte_offset, item.byte_offset + item.nbytes) if item else None
        place = f"{item.file}, bytes {span[0]:,}–{span[1]:,}: " if item and span else ""
        at = f" at {list(chunk.offsets)}" if chunk and chunk.offsets else ""
        name = f"{fqn!r}{at}: " if fqn else ""
        finding = Finding(
            "damaged-item",
            Severity.ERROR,
            f"{place}{name}{message}",
            item.file if item else None,
            fqn or None,
            chunk.offsets if chunk else None,
            chunk.sizes if chunk else None,
            span,
        )
        with self._lock:
            self._failures.setdefault((fqn, item, chunk.offsets if chunk else None), finding)

    def _take(self) -> memoryview:
        try:
            return self._buffers.get_nowait()
        except queue.Empty:
            return memoryview(bytearray(BAND_NBYTES))

    def _give_back(self, data: memoryview) -> None:
        whole = data.obj
        if isinstance(whole, bytearray):
            self._buffers.put(memoryview(whole))


class _Piece(NamedTuple):
    record: Record
    check: RecordCheck
    start: int
    nbytes: int
    is_first: bool

    @property
    def where(self) -> Where:
        return "", None, self.record


class _End(NamedTuple):
    reader: TensorReader | None
    check: RecordCheck | None = None
