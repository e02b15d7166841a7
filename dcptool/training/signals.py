"""Signals that tell a job to stop, and how much time it has left then. Knows one process and no saves."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

logger = logging.getLogger("dcptool.training")


class StopSignals:
    """Takes note of the first of some signals, until it is closed; the handlers there were before are called too.

    Args:
        signals: which.
        within: seconds after the first in which the job must have ended; None if nobody said.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], within: float | None) -> None:
        self._within = within
        self._since: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            if signals:
                logger.warning("no signal is listened to: the manager was not made in the main thread")
            return
        for number in signals:
            self._before[number] = signal.signal(number, self._on_signal)

    @property
    def told(self) -> bool:
        """Whether one has come."""
        return self._since is not None

    @property
    def numbers(self) -> tuple[signal.Signals, ...]:
        """What is listened to."""
        return tuple(self._before)

    def seconds_left(self) -> float | None:
        """Return how long the job may still take, less than 0 once it is over; None if no end is known."""
        if self._since is None or self._within is None:
            return None
        return self._within - (time.monotonic() - self._since)

    def close(self) -> None:
        """Put the handlers back that there were before."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:  # no lock: the handler may interrupt itself
            self._since = time.monotonic()
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
