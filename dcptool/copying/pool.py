"""Call a function on threads, a few calls ahead of whoever takes the results in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast

MAX_THREADS = 8
"""Where nobody asked for a number: more do not make a disk faster, and each holds buffers of its own."""
_AHEAD_PER_THREAD = 4

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def default_threads() -> int:
    """Return how many work at the same time if nobody says."""
    return min(os.cpu_count() or 1, MAX_THREADS)


def per_thread(make: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function that makes something once in each thread, when it is first asked for there."""
    local = threading.local()

    def get() -> Result:
        if not hasattr(local, "made"):
            local.made = make()
        return cast(Result, local.made)

    return get


class Pool:
    """Threads that call functions; a context manager, which drops what has not begun when it is left.

    Args:
        threads: how many; None for the number of processors, at most MAX_THREADS.
    """

    def __init__(self, threads: int | None) -> None:
        self.n_threads = threads or default_threads()
        self._executor = ThreadPoolExecutor(self.n_threads, "pool")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def run(
        self, function: Callable[[Argument], Result], arguments: Iterable[Argument]
    ) -> Iterator[tuple[Argument, Result]]:
        """Yield each argument with its result, in order; arguments are taken from their source as needed."""
        ahead: deque[tuple[Argument, Future[Result]]] = deque()
        for argument in arguments:
            ahead.append((argument, self._executor.submit(function, argument)))
            if len(ahead) > self.n_threads * _AHEAD_PER_THREAD:
                done, future = ahead.popleft()
                yield done, future.result()
        while ahead:
            done, future = ahead.popleft()
            yield done, future.result()
