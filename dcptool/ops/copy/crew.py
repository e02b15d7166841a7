"""Who copies a step: one process, or several that each send what they see, and come to one end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Crew(Protocol):
    """All of a copy's processes call the same of these in the same order; errors are raised on all of them.

    Attributes:
        rank: of this process.
        size: how many they are.
    """

    rank: int
    size: int

    def decide(self, act: Callable[[], T]) -> T:
        """Do something on rank 0, which can read every file meanwhile; return what it gives."""

    def each(self, part: Callable[[], T]) -> list[T]:
        """Do a part in every process; return what all of them give, by rank."""

    def learn(self, look: Callable[[], object]) -> None:
        """Look, in every process, at what only some of them have; what is read for that is small."""

    def sends(self, name: str) -> bool:
        """Tell whether it is this process that sends a file."""

    def require_going(self) -> None:
        """Raise if another process failed."""


class Alone:
    """The crew of a copy by one process."""

    rank = 0
    size = 1

    def decide(self, act: Callable[[], T]) -> T:
        return act()

    def each(self, part: Callable[[], T]) -> list[T]:
        return [part()]

    def learn(self, look: Callable[[], object]) -> None:
        look()

    def sends(self, name: str) -> bool:
        return True

    def require_going(self) -> None:
        """There is no other."""


ALONE = Alone()
