"""Results that are kept: `docs/speed.json`, from which the tables in the documentation are written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import Run, Side
from benchmarks.rows import ROWS


class Result(NamedTuple):
    """Both sides of a row, measured.

    Attributes:
        row: its name in ROWS.
        medium: of the cache folder, "disk" or "memory" (tmpfs).
        date: ISO.
        machine: processors, architecture, versions of Python and torch.
        ours, theirs: all counted runs.
    """

    row: str
    medium: str
    date: str
    machine: str
    ours: Side
    theirs: Side

    @property
    def ratio(self) -> float:
        """Our median time over theirs."""
        return self.ours.seconds / self.theirs.seconds

    @property
    def ratios(self) -> tuple[float, float]:
        """The smallest and the largest ratio of two runs next to each other."""
        found = [a.seconds / b.seconds for a, b in zip(self.ours.runs, self.theirs.runs, strict=True)]
        return min(found), max(found)


def measured(row: str, cache: Path, ours: Side, theirs: Side) -> Result:
    """Return what has just been measured, with where and when."""
    machine = (
        f"{os.cpu_count()} processors, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {metadata.version('torch').partition('+')[0]}"
    )
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return Result(row, _medium(cache), today.isoformat(), machine, ours, theirs)


def _medium(folder: Path) -> str:
    """Tell whether a folder is on a disk or in memory."""
    path = str(folder.resolve())
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(point, kind) for point, kind in mounts if f"{path}/".startswith(f"{point.rstrip('/')}/")]
    return "memory" if max(inside, key=lambda mount: len(mount[0]))[1] in ("tmpfs", "ramfs") else "disk"


def load(path: Path) -> list[Result]:
    """Read results; none where there is no file."""
    if not path.exists():
        return []
    return [
        Result(**{**found, "ours": _side(found["ours"]), "theirs": _side(found["theirs"])})
        for found in json.loads(path.read_text())
    ]


def save(path: Path, new: Iterable[Result]) -> None:
    """Write results, new ones in the place of older ones of the same row and medium."""
    found = {(result.row, result.medium): result for result in (*load(path), *new)}
    order = {name: index for index, name in enumerate(ROWS)}
    every = sorted(found.values(), key=lambda result: (order.get(result.row, -1), result.medium))
    documents = [
        {**result._asdict(), "ours": _document(result.ours), "theirs": _document(result.theirs)} for result in every
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, documents)) + "\n]\n")


def _side(found: dict[str, Any]) -> Side:
    return Side(tuple(Run(*run) for run in found["runs"]))


def _document(side: Side) -> dict[str, Any]:
    return {"runs": [[round(run.seconds, 3), run.nbytes] for run in side.runs]}


HEADERS = ("work", "dcptool", "against", "theirs", "ratio", "goal", "memory", "theirs", "ratio", "goal")


def cells(result: Result) -> list[str]:
    """Return one line of a table, in the order of HEADERS."""
    row = ROWS[result.row]
    low, high = result.ratios
    return [
        row.what + (", in memory" if result.medium == "memory" else ""),
        _seconds(result.ours),
        row.against,
        _seconds(result.theirs),
        f"{result.ratio:.3f} ({low:.3f}–{high:.3f})",
        "" if row.goal_seconds is None else f"≤ {row.goal_seconds:.3f}",
        f"{result.ours.nbytes / 1e6:,.0f} MB",
        f"{result.theirs.nbytes / 1e6:,.0f} MB",
        f"{result.ours.nbytes / result.theirs.nbytes:.2f}",
        "" if row.goal_nbytes is None else f"≤ {row.goal_nbytes:.2f}",
    ]


def _seconds(side: Side) -> str:
    return f"{side.seconds:.{2 if side.seconds >= 0.1 else 3}f} s"


def markdown(results: Sequence[Result]) -> str:
    """Return results as a table for the documentation."""
    lines = [HEADERS, ["---"] * len(HEADERS), *map(cells, results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def how(results: Sequence[Result]) -> str:
    """Say on what machine, when and how often results were measured."""
    machines = sorted({result.machine for result in results})
    dates = sorted({result.date for result in results})
    counts = sorted({len(result.ours.runs) for result in results})
    runs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{'; '.join(machines)}; {when}; medians of {runs} runs"


def put(text: str, results: Sequence[Result]) -> str:
    """Return a text with its table of results, and what says how they were measured, replaced by these."""
    table = re.compile(r"\| work \|.*?\n\n[^\n]*processors[^\n]*\n", re.DOTALL)
    return table.sub(lambda _: f"{markdown(results)}\n{how(results)}.\n", text, count=1)
