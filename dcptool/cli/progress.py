"""A bar of bytes on stderr: only on a terminal, only when the work takes over a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dcptool.cli import options


class Bar:
    """A bar that is called with the bytes as they are done."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __call__(self, nbytes: int) -> None:
        self._shown.update(nbytes)

    def expect(self, nbytes: int) -> None:
        """Add to the bytes that are to be done, for a percentage and the time that is left."""
        self._shown.total = (self._shown.total or 0) + nbytes
        self._shown.refresh()


@contextmanager
def bar(wanted: bool = True) -> Iterator[Bar | None]:
    """Yield what is to be told the bytes as they are done; None where there is nobody to look at a bar."""
    if not wanted or options.is_quiet() or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread of its own
    with tqdm(unit="B", unit_scale=True, delay=1, leave=False, file=sys.stderr) as shown:
        yield Bar(shown)
