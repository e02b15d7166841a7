"""Files through memory, in parts: read ahead, looked at in order, written behind, several files at the same time.

Memory is bounded in one place: there are so many buffers of one part, and no more. A file whose threads hold some never
waits for another one; it goes on with those it has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import Empty, LifoQueue
from typing import NamedTuple

from dcptool.copying.pool import default_threads
from dcptool.errors import StorageError
from dcptool.ops.copy.passing import PassingFile
from dcptool.ops.copy.retrying import Retrying, may_pass
from dcptool.storage import Progress, Storage
from dcptool.storage.parts import PartSink, part_nbytes

REMOTE_THREADS = 8
"""Where requests are waited for, more of them at a time are worth it whatever the number of processors."""
_FILE_ATTEMPTS = 3


def n_threads(wanted: int | None, remote: bool) -> int:
    """Return how many read or write at the same time."""
    return wanted or (REMOTE_THREADS if remote else default_threads())


def n_buffers(threads: int) -> int:
    """Return how many parts are in memory at most: of each thread one that is read and one written, and two more."""
    return 2 * threads + 2


def memory_nbytes(threads: int, part: int, into_store: bool) -> int:
    """Return the bytes that a copy holds in parts of files at most; the body of a request to a store is a copy."""
    return n_buffers(threads) * part + (threads * part if into_store else 0)


class Stopped(StorageError):
    """Another file failed: this one was not finished."""


class _PartInMemory(NamedTuple):
    """A part of a file in memory, and the reading or writing of it that goes on."""

    start: int
    buffer: bytearray
    piece: memoryview
    done: Future[None]


@contextmanager
def _aborted(target: PartSink) -> Iterator[None]:
    """Remove what was written of a file if the body raises."""
    try:
        yield
    except BaseException:
        target.abort()
        raise


class Mover:
    """Threads and buffers for one copy; a context manager.

    Args:
        source: holds the files.
        threads: how many read or write at the same time.
        part: bytes of a part; the longest file has no more than a store takes.
        again: tries again what may pass.
        progress: told the bytes of parts as they are written, less those that are written anew.
        require_going: asked now and then, raises once all shall end.
    """

    def __init__(
        self,
        source: Storage,
        threads: int,
        part: int,
        again: Retrying,
        progress: Progress | None,
        require_going: Callable[[], None],
    ) -> None:
        self._source, self._threads, self._part = source, threads, part
        self._again, self._going = again, require_going
        self._progress = progress or (lambda nbytes: None)
        self._io = ThreadPoolExecutor(threads, "parts")
        self._files = ThreadPoolExecutor(threads, "files")
        self._buffers: LifoQueue[bytearray] = LifoQueue()
        self._left = n_buffers(threads)
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error:
            self.stop()
        self._files.shutdown(cancel_futures=True)
        self._io.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """Have all files end at their next part."""
        self._stop.set()
        self._again.stop()

    def all(self, names: Iterable[str], move: Callable[[str], None]) -> None:
        """Call a function for each file, several at the same time; the first that fails ends them all.

        Raises:
            DcptoolError: what the first one raised.
        """
        going = [self._files.submit(move, name) for name in names]
        failures: list[BaseException] = []
        for done in going:
            try:
                done.result()
            except CancelledError:  # it had not begun when another one failed
                continue
            except Stopped as error:
                failures.append(error)
            except BaseException as error:  # Ctrl-C while it is waited for, too
                failures.insert(0, error)
                self.stop()
                for other in going:
                    other.cancel()
                if not isinstance(error, Exception):
                    break
        if failures:
            raise failures[0]

    def move(
        self,
        name: str,
        nbytes: int,
        look: Callable[[], PassingFile],
        sink: Callable[[], PartSink],
        attempts: int = _FILE_ATTEMPTS,
    ) -> PassingFile:
        """Copy one file, and return what it told as it passed.

        Args:
            name, nbytes: of the file.
            look: makes what looks at its bytes.
            sink: makes where it is written.
            attempts: how often, where parts cannot be written anew.

        Returns:
            That which has seen all of it, and how the store calls what was written, in `stored`.

        Raises:
            StorageError: it could not be read or written.
        """
        told = 0

        def count(n: int) -> None:
            nonlocal told
            told += n
            self._progress(n)

        target = self._again(name, sink)
        passing = look()
        try:
            with _aborted(target):
                self._parts(name, nbytes, passing, target, count)
                passing.stored = self._again(name, target.finish) if target.again else target.finish()
            return passing
        except StorageError as error:
            self._progress(-told)
            if target.again or attempts == 1 or not may_pass(error):
                raise
        return self.move(name, nbytes, look, sink, attempts - 1)

    def look_only(self, name: str, nbytes: int, passing: PassingFile) -> None:
        """Read one file for what it tells, and write nothing."""
        self._parts(name, nbytes, passing, None, lambda n: None)

    def _parts(self, name: str, nbytes: int, passing: PassingFile, target: PartSink | None, count: Progress) -> None:
        starts = deque(range(0, nbytes, self._part))
        ahead: deque[_PartInMemory] = deque()
        behind: deque[_PartInMemory] = deque()
        at_hand: _PartInMemory | None = None
        try:
            while starts or ahead or behind:
                self._require_going(name)
                self._begin_reads(name, nbytes, starts, ahead, bool(behind))
                if ahead:
                    at_hand = ahead.popleft()
                    at_hand.done.result()
                    passing.look(at_hand.start, at_hand.piece)
                    if target:
                        writing = self._io.submit(self._write, name, target, at_hand)
                        behind.append(at_hand._replace(done=writing))
                    else:
                        self._buffers.put(at_hand.buffer)
                    at_hand = None
                while behind and (not ahead or behind[0].done.done()):
                    behind[0].done.result()
                    count(len(behind[0].piece))
                    self._buffers.put(behind.popleft().buffer)
                    if starts:
                        break
        finally:
            left = [*ahead, *behind, *([at_hand] if at_hand else [])]
            wait([part.done for part in left])
            for part in left:
                self._buffers.put(part.buffer)

    def _begin_reads(
        self,
        name: str,
        nbytes: int,
        starts: deque[int],
        ahead: deque[_PartInMemory],
        writing: bool,
    ) -> None:
        """Begin to read the next parts, as far as there are buffers; wait for one only if nothing is going on."""
        while starts and len(ahead) < self._threads:
            buffer = self._buffer(wait_for_it=not ahead and not writing)
            if buffer is None:
                return
            start = starts.popleft()
            piece = memoryview(buffer)[: min(self._part, nbytes - start)]
            ahead.append(_PartInMemory(start, buffer, piece, self._io.submit(self._read, name, start, piece)))

    def _buffer(self, wait_for_it: bool) -> bytearray | None:
        """Return a buffer, None if there is none just now."""
        try:
            return self._buffers.get_nowait()
        except Empty:
            with self._lock:
                if self._left:
                    self._left -= 1
                    return bytearray(self._part)
            return self._buffers.get() if wait_for_it else None

    def _read(self, name: str, start: int, piece: memoryview) -> None:
        self._require_going(name)
        self._again(name, lambda: self._source.read_into(name, start, piece))

    def _write(self, name: str, target: PartSink, part: _PartInMemory) -> None:
        self._require_going(name)
        index = part.start // self._part
        if target.again:
            self._again(name, lambda: target.write_part(index, part.piece))
        else:
            target.write_part(index, part.piece)

    def _require_going(self, name: str) -> None:
        if self._stop.is_set():
            raise Stopped(f"{name}: not finished")
        self._going()


def part_of(sizes: Iterable[int], remote: bool) -> int:
    """Return the bytes of a part for files of these sizes: as many as the longest needs, and a store takes."""
    longest = max(sizes, default=1)
    return max(min(part_nbytes(longest, remote), longest), 1)
