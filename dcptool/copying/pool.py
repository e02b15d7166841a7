"""Call a function on threads, a few calls ahead of whoever takes the results in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def ahead_of(
    items: Iterable[Argument], begin: Callable[[Argument], Result], count: int
) -> Iterator[tuple[Argument, Result]]:
    """Yield items in order, each with what was begun for it while `count` items before it were still to be taken."""
    taken: deque[tuple[Argument, Result]] = deque()
    for item in items:
        taken.append((item, begin(item)))
        if len(taken) > count:
            yield taken.popleft()
    while taken:
        yield taken.popleft()


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
        count = self.n_threads * _AHEAD_PER_THREAD
        for argument, future in ahead_of(arguments, lambda one: self._executor.submit(function, one), count):
            yield argument, future.result()
