"""The last save of a job that has been told to end within some seconds: whether there is time for it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

from dcptool.errors import TrainingError
from dcptool.training.ranks import Ranks

logger = logging.getLogger("dcptool.training")
_REMEMBERED = 3
"""Saves whose seconds say how long the next one takes: the longest of them."""


def seconds_of(within: float | timedelta | None) -> float | None:
    """Return the seconds in which a job must end.

    Raises:
        ValueError: they are not more than 0.
    """
    seconds = within.total_seconds() if isinstance(within, timedelta) else within
    if seconds is not None and not seconds > 0:
        raise ValueError("stop_within must be more than 0")
    return seconds


class LastSave:
    """Decides, for all ranks alike, whether a job that must end saves once more.

    A save that is on its way is finished first, as it is further than any that begins now. Another one follows if it
    is likely to be done in time. If none was on its way there is nothing to lose, and it is tried.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._end: float | None = None
        self._took: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def is_due(self) -> bool:
        """Whether the job must end: the next save is the last."""
        return self._end is not None

    def is_in(self, left: list[float]) -> None:
        """Take note of how many seconds are left on the ranks that were told, the same list on all ranks."""
        if left:
            self._end = time.monotonic() + min(left)

    def took(self, seconds: float) -> None:
        """Take note of how long it took to write and mark a state."""
        self._took.append(seconds)

    def finished_instead(self, step: int, uploading: Future[str] | None, wait: Callable[[], None]) -> str | None:
        """Finish the save on its way, if it is time for the last one, and tell whether it has to do; on all ranks.

        Args:
            step: that is to be saved.
            uploading: the save before it, if it was in the background.
            wait: waits for that; raises TrainingError if it failed.

        Returns:
            Its path if there is no time for another one; None if there is.
        """
        if not self.is_due:
            return None
        on_its_way = uploading if uploading is not None and not uploading.done() else None
        try:
            wait()
        except TrainingError as error:
            logger.error("%s; saving step %d instead", error, step)

        def decide() -> str | None:
            left = (self._end or 0.0) - time.monotonic()
            needed = max(self._took, default=0.0)
            if needed <= left:
                return None
            said = f"a save takes about {needed:.1f} s, and {max(left, 0.0):.1f} s are left"
            if on_its_way is None or on_its_way.exception() is not None:
                logger.warning("step %d may not be saved in time: %s", step, said)
                return None
            path = on_its_way.result()
            logger.warning("step %d is not saved: %s. The save before it was finished: %s", step, said, path)
            return path

        return self._ranks.on_first("the last save was not decided on", decide)
