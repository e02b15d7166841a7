"""What is compared with what: one function per row, returning both commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import checkpoints

READ_METADATA = (
    "import sys; from torch.distributed.checkpoint import FileSystemReader; "
    "FileSystemReader(sys.argv[1]).read_metadata()"
)


class Row(NamedTuple):
    """One comparison.

    Attributes:
        what, against: in words.
        goal_seconds, goal_nbytes: the ratio ours/theirs to reach, None where there is no goal.
        commands: makes the checkpoint in a cache folder, returns our command and theirs.
    """

    what: str
    against: str
    goal_seconds: float | None
    goal_nbytes: float | None
    commands: Callable[[Path], tuple[list[str], list[str]]]


def _inspect(path: Path, *options: str) -> tuple[list[str], list[str]]:
    ours = [sys.executable, "-m", "dcptool", "inspect", str(path), *options]
    return ours, [sys.executable, "-c", READ_METADATA, str(path)]


def _inspect_chunks(n_tensors: int, n_ranks: int) -> Callable[[Path], tuple[list[str], list[str]]]:
    return lambda cache: _inspect(checkpoints.make("chunks", cache, n_tensors, n_ranks))


def _verify_deep(mib: int) -> Callable[[Path], tuple[list[str], list[str]]]:
    def commands(cache: Path) -> tuple[list[str], list[str]]:
        path = checkpoints.make("model", cache, mib, 0)
        ours = [sys.executable, "-m", "dcptool", "verify", "--deep", str(path)]
        return ours, ["sh", "-c", f"cat {path}/*.distcp > /dev/null"]

    return commands


PEER = "read_metadata() in a fresh process"
ROWS = {
    "inspect-small": Row(
        "inspect, 4 ranks", PEER, 1 / 15, None, lambda cache: _inspect(checkpoints.make("small", cache))
    ),
    "inspect-10k": Row("inspect, 10 k chunks", PEER, None, None, _inspect_chunks(100, 100)),
    "inspect-100k": Row("inspect, 100 k chunks", PEER, None, None, _inspect_chunks(400, 250)),
    "inspect-1m": Row("inspect, 1 M chunks", PEER, 0.4, 0.55, _inspect_chunks(1000, 1000)),
    "verify-deep-1g": Row("verify --deep, 1 GiB", "cat", 2.0, None, _verify_deep(1024)),
    "verify-deep-4g": Row("verify --deep, 4 GiB", "cat", 2.0, None, _verify_deep(4096)),
    "inspect-10k-tensors": Row("inspect, 10 k tensors", PEER, None, None, _inspect_chunks(10_000, 2)),
}
