"""Stream tensors of a checkpoint into output files: the one engine behind every conversion. Knows no format.

A file is written front to back, part by part. A tensor is read in bands, row-major pieces of at most BAND_NBYTES, by
threads that run ahead of the one that writes; of each band every file that is written at the time takes its share.
Memory is bounded by the bands in flight, whatever the size of a tensor or a chunk. Every record of the source that is
read has its CRC32 checked; what does not check is collected, not raised, so that all of it can be told.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import NamedTuple

from dcptool.checkpoint.boxes import ChunkIndex
from dcptool.checkpoint.casting import Loss
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding
from dcptool.copying.checking import PartlyRead, SourceChecks, settle
from dcptool.copying.dequantizing import DequantizingReader
from dcptool.copying.outputs import Fill, OutputFile
from dcptool.copying.pool import ahead_of
from dcptool.copying.reading import BAND_NBYTES, Band, RecordReader, TensorReader
from dcptool.copying.schedule import HandOut, Move, WriteBytes, schedule
from dcptool.copying.writing import OpenFile
from dcptool.errors import DcptoolError
from dcptool.storage import Creator, Progress

BANDS_PER_THREAD = 2
INLINE_NBYTES = 128 << 10
"""A smaller band is read by the thread that writes it: handing it over costs more than reading it."""
MAX_INDEXES = 64


def memory_nbytes(n_groups: int, threads: int) -> int:
    """Return the bytes of all bands that are held at the same time when so many groups of files are written."""
    n_writers = _n_writers(n_groups, threads)
    return (n_writers * (_n_ahead(n_writers, threads) + 1) + threads) * BAND_NBYTES


def _n_writers(n_groups: int, threads: int) -> int:
    return min(threads, max(n_groups, 1))


def _n_ahead(n_writers: int, threads: int) -> int:
    """Return how many moves each writer is read ahead for: all writers share BANDS_PER_THREAD bands per thread."""
    return max(1, threads * BANDS_PER_THREAD // n_writers - 1)


class CopyReport(NamedTuple):
    """What was copied.

    Attributes:
        nbytes: written to all files.
        failures: what of the source was found damaged on the way; zeros stand in its place.
        partly_read: records that are still to be checked, with `settle`; empty unless others share them.
        unproven: fqns of tensors with values that are stored without a checksum.
        lost: what casts lost, by fqn of the tensor.
    """

    nbytes: int
    failures: tuple[Finding, ...]
    partly_read: tuple[PartlyRead, ...] = ()
    unproven: frozenset[str] = frozenset()
    lost: Mapping[str, Loss] = {}


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
        source: an open checkpoint; inner tensors of its tensors made of tensors can be read under their names.
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
    source, n_writers = source.flat, _n_writers(len(files), threads)
    checks, stop = SourceChecks(), threading.Event()
    with _Readers(source, threads, _n_ahead(n_writers, threads), checks) as readers:
        groups = [_GroupWriter(group, readers, stop, progress, shared) for group in files]
        nbytes = _write_all(groups, target, n_writers, stop)
    partly_read = tuple(found for group in groups for found in group.partly_read)
    return CopyReport(nbytes, checks.failures, partly_read, frozenset(checks.unproven), checks.lost)


def _write_all(groups: Sequence[_GroupWriter], target: Creator, n_writers: int, stop: threading.Event) -> int:
    """Write groups, several at the same time, and return their bytes; the first error stops all others."""
    with ThreadPoolExecutor(n_writers, "write") as writers:
        done = [writers.submit(group.write, target) for group in groups]
        try:
            for future in wait(done, return_when=FIRST_EXCEPTION).done:
                future.result()  # the first error, before the others are told to stop
        except BaseException:
            stop.set()
            writers.shutdown(cancel_futures=True)
            raise
    return sum(future.result() for future in done)


class _AnotherFailed(Exception):
    """Another writer has failed, whose error is the one that is raised."""


class _GroupWriter:
    """Writes the files of one group side by side, on one thread.

    Attributes:
        partly_read: records that are still to be checked once all groups are written, if others share them.
    """

    def __init__(
        self,
        files: Sequence[OutputFile],
        readers: _Readers,
        stop: threading.Event,
        progress: Progress | None,
        shared: bool,
    ) -> None:
        self._files, self._readers, self._stop = files, readers, stop
        self._progress, self._shared = progress, shared
        self.partly_read: list[PartlyRead] = []

    def write(self, target: Creator) -> int:
        """Create the files in `target`, write and finish them; return their bytes. After an error none is left."""
        opened: list[OpenFile] = []
        try:
            for file in self._files:
                opened.append(OpenFile(file, target))
            for move, data in self._readers.ahead(self._readers.schedule(opened)):
                self._make(move, data)
            self._finish(opened)
        except BaseException:
            for begun in opened:
                begun.sink.abort()
            raise
        return sum(written.nbytes for written in opened)

    def _make(self, move: Move, data: Future[memoryview] | None) -> None:
        """Make one move; `data` are the bytes of its band, if they are read ahead."""
        if self._stop.is_set():
            raise _AnotherFailed
        if isinstance(move, WriteBytes):
            move.file.write_bytes(move.part)
        elif isinstance(move, HandOut):
            self._hand_out(move, data.result() if data else self._readers.read(move.band))
        else:
            for file in move.files:
                file.end_part()
            self.partly_read += self._readers.checks.end(move.reader)

    def _hand_out(self, move: HandOut, data: memoryview) -> None:
        for index, share in move.band.shares(data):
            move.files[index].write_share(share)
            if self._progress:
                self._progress(len(share))
        self._readers.give_back(data)

    def _finish(self, files: Sequence[OpenFile]) -> None:
        for file in files:
            file.require_complete()
        if self.partly_read and not self._shared:
            self._readers.checks.add(settle(self._readers.source, self.partly_read, 1))
            self.partly_read = []
        for file in files:
            if not self._readers.checks.failures:
                file.sink.finish()
            else:  # good for nothing: on an object store finishing would give it its name
                file.sink.abort()


class _Readers:
    """Threads that read bands, ahead of the writers they all share.

    Args:
        source: the checkpoint.
        threads: how many.
        n_ahead: how many moves each writer is read ahead for.
        checks: told what cannot be read.
    """

    def __init__(self, source: Checkpoint, threads: int, n_ahead: int, checks: SourceChecks) -> None:
        self.source, self._n_ahead, self.checks = source, n_ahead, checks
        self._order = {fqn: index for index, fqn in enumerate(source.entries)}
        self._threads = ThreadPoolExecutor(threads, "read")
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # The last few are kept, for all boxes of a tensor come together.
        self._index = lru_cache(MAX_INDEXES)(lambda fqn: ChunkIndex(source.tensors[fqn].chunks))

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def schedule(self, files: Sequence[OpenFile]) -> Iterator[Move]:
        """Return the moves that make files of one group."""
        return schedule(files, self._order, self._tensor_reader, partial(RecordReader, self.source.source))

    def ahead(self, moves: Iterable[Move]) -> Iterator[tuple[Move, Future[memoryview] | None]]:
        """Return moves in order, with bands of later ones read meanwhile, across the borders of parts."""

        def begin(move: Move) -> Future[memoryview] | None:
            if isinstance(move, HandOut) and move.band.nbytes > INLINE_NBYTES:
                return self._threads.submit(self.read, move.band)
            return None

        return ahead_of(moves, begin, self._n_ahead)

    def read(self, band: Band) -> memoryview:
        """Read a band into a buffer, which is to be given back; zeros stand in place of what cannot be read."""
        try:
            out = self._buffers.get_nowait()[: band.nbytes]
        except queue.Empty:
            out = memoryview(bytearray(BAND_NBYTES))[: band.nbytes]
        try:
            band.reader.read(band, out)
        except DcptoolError as error:
            self.checks.fail(error, band.reader.where)
            out[:] = bytes(len(out))
        return out

    def give_back(self, data: memoryview) -> None:
        """Let the buffer behind a band's bytes be used again."""
        whole = data.obj
        if isinstance(whole, bytearray):
            self._buffers.put(memoryview(whole))

    def _tensor_reader(self, fills: Sequence[Fill]) -> TensorReader:
        entry = self.source.tensors[fills[0].fqn]
        recipe = self.source.recipes.get(entry.fqn)
        if recipe:
            return DequantizingReader(self.source.source, entry, fills, recipe, self.checks.fail)
        with self._lock:  # an index is made once
            chunks = self._index(entry.fqn)
        return TensorReader(self.source.source, entry, fills, chunks, self.checks.fail)
