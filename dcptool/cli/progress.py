"""A bar of bytes on stderr: only on a terminal, only when the work takes over a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dcptool.cli import options


@contextmanager
def bar(wanted: bool = True) -> Iterator[Callable[[int], None] | None]:
    """Yield what is to be told the bytes as they are done; None where there is nobody to look at a bar."""
    if not wanted or options.is_quiet() or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread of its own
    with tqdm(unit="B", unit_scale=True, delay=1, leave=False, file=sys.stderr) as shown:
        yield lambda nbytes: shown.update(nbytes) and None
