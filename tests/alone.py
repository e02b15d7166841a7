"""Reshard in this process: a group of one, without torch and without a fork, for tests that are about the layout."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from dcptool.groups.audience import Audience
from dcptool.ops.reshard.member import reshard_member
from dcptool.ops.reshard.reshard import Resharded, ReshardOptions


class Alone:
    """The group that has no other member."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.failed = threading.Event()

    def share(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def fail(self) -> None:
        self.failed.set()

    def halt(self) -> None:
        self.failed.set()


def reshard_alone(source: Path, target: Path, **options: Any) -> Resharded:
    """Reshard as the only member of a group."""
    began = time.perf_counter()
    return reshard_member(Alone(), Audience(), str(source), str(target), ReshardOptions(**options), began)  # type: ignore[arg-type]
