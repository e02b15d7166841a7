"""How work on many things is split: all of it here, or among processes that each look at the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Split(Protocol):
    """Does work on things wherever it is done, and returns what it gave of each, here."""

    def __call__(self, work: Callable[[Sequence[T]], Sequence[R]], things: Sequence[T]) -> list[R]:
        """Return what the work gives, in the order of the things; they are the same in all processes.

        Args:
            work: given some of the things, returns what it gives of each, in order; it can be pickled.
            things: to work on.
        """


def alone(work: Callable[[Sequence[T]], Sequence[R]], things: Sequence[T]) -> list[R]:
    """Do all of it here."""
    return list(work(things))
