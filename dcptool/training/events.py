"""What a job is told of a save that is marked: its callback, and a line in its log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from dcptool.words import nbytes as words_of_nbytes

logger = logging.getLogger("dcptool.training")


class SaveResult(NamedTuple):
    """A step that is saved and marked.

    Attributes:
        step: its number.
        path: of the checkpoint.
        nbytes: bytes of all its files.
        seconds: from the call until every rank had written, of the slowest rank.
        blocked_seconds: how long training waited for it, for each rank: in the call, and in the optimizer's next step
            while the state was still being copied.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    blocked_seconds: tuple[float, ...]

    @property
    def bytes_per_second(self) -> float:
        """How fast it was saved, all ranks together."""
        return self.nbytes / self.seconds if self.seconds else 0.0


OnSave = Callable[[SaveResult], object]


def announce(result: SaveResult, on_save: OnSave | None) -> None:
    """Log a save and call the job's callback; what that raises is logged, for the step is saved all the same."""
    logger.info(
        "saved %s: %s in %.2f s (%s/s), training waited %.2f s",
        result.path,
        words_of_nbytes(result.nbytes),
        result.seconds,
        words_of_nbytes(round(result.bytes_per_second)),
        max(result.blocked_seconds),
    )
    if on_save is None:
        return
    try:
        on_save(result)
    except Exception:
        logger.exception("%s is saved, but on_save failed", result.path)
