"""How often to save: the interval that loses the least time, after Young and Daly, and what any interval loses.

Pure functions of times in seconds; only `read_cadence` looks at a run directory, and there only at markers.

Failures come at random, independent of one another, on average one per MTBF of the whole job; a failure throws away
all work since the last complete save, may come during a save or a restart too, and is followed by a restart.

Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from dcptool.formats.marker import NAME, Marker, marker_in
from dcptool.runs.directory import require_run
from dcptool.storage import locate

_MAX_EXPONENT = 700.0
"""Beyond it e to the power of it is no float; nothing is finished then anyway."""


class Choice(NamedTuple):
    """An interval and what it loses.

    Attributes:
        name: "daly", "young", "cadence" (of the run directory) or "given".
        interval_seconds: training time between the end of a save and the beginning of the next.
        saving_share: part of all time spent in saves, 0 to 1.
        failure_share: part of all time spent on restarts and on work that is done again.
        lost_share: both together: the part of all time that training does not advance.
    """

    name: str
    interval_seconds: float
    saving_share: float
    failure_share: float
    lost_share: float


class IntervalReport(NamedTuple):
    """The best interval for given times, and what others lose.

    Attributes:
        save_seconds: how long training stands still for a save.
        mtbf_seconds: mean time between failures of the whole job.
        restart_seconds: from a failure until training goes on from the last save.
        optimum_seconds: Daly's optimum: training time between two saves.
        choices: that optimum, Young's, and those that were asked for.
    """

    save_seconds: float
    mtbf_seconds: float
    restart_seconds: float
    optimum_seconds: float
    choices: tuple[Choice, ...]


class Cadence(NamedTuple):
    """How often a run saves, and how long it waits for a save, as its markers tell; None where they do not.

    Attributes:
        path: of the run directory.
        n_steps: steps in it.
        n_markers: how many have a marker that a save wrote.
        save_seconds: median of what training waited for a save; of the whole save where that is not recorded.
        interval_seconds: median training time between two saves.
        step_seconds: median training time of one step.
        nbytes: median bytes of a save.
        bytes_per_second: median of how fast one was written, in the background or not.
    """

    path: str
    n_steps: int
    n_markers: int
    save_seconds: float | None
    interval_seconds: float | None
    step_seconds: float | None
    nbytes: int | None = None
    bytes_per_second: float | None = None


def optimal_interval(
    save_seconds: float,
    mtbf_seconds: float,
    restart_seconds: float = 0.0,
    *,
    intervals: Sequence[float] = (),
    cadence_seconds: float | None = None,
) -> IntervalReport:
    """Find the interval between saves that loses the least time.

    Args:
        save_seconds: how long training stands still for a save; more than 0.
        mtbf_seconds: mean time between failures of the whole job, not of one machine; more than 0.
        restart_seconds: from a failure until training goes on from the last save; at least 0.
        intervals: others to look at, in seconds of training between two saves; each more than 0.
        cadence_seconds: the one in use, if it is to be looked at.

    Returns:
        Daly's optimum and the shares of time that it, Young's, and the others lose.

    Raises:
        ValueError: a time is no finite number in its range.

    Example:
        >>> report = optimal_interval(save_seconds=45, mtbf_seconds=10_000, restart_seconds=600)
        >>> round(report.optimum_seconds), round(report.choices[0].lost_share, 3)
        (919, 0.15)
    """
    for name, seconds in (("save_seconds", save_seconds), ("mtbf_seconds", mtbf_seconds)):
        _require(name, seconds, seconds > 0, "more than 0")
    _require("restart_seconds", restart_seconds, restart_seconds >= 0, "at least 0")
    for seconds in intervals:
        _require("intervals", seconds, seconds > 0, "more than 0")
    optimum = daly_interval(save_seconds, mtbf_seconds)
    looked_at = [("daly", optimum), ("young", young_interval(save_seconds, mtbf_seconds))]
    if cadence_seconds is not None:
        _require("cadence_seconds", cadence_seconds, cadence_seconds >= 0, "at least 0")
        looked_at.append(("cadence", cadence_seconds))
    looked_at += [("given", seconds) for seconds in intervals]
    choices = tuple(_choice(name, seconds, save_seconds, mtbf_seconds, restart_seconds) for name, seconds in looked_at)
    return IntervalReport(save_seconds, mtbf_seconds, restart_seconds, optimum, choices)


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Return Young's optimum √(2·save·MTBF), in seconds of training between two saves; good for saves far below MTBF.

    Source: Young 1974, equation for the optimum interval.
    """
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's higher-order optimum, in seconds of training between two saves.

    √(2δM)·(1 + ⅓·√(δ/2M) + ⅑·δ/2M) - δ for a save of δ below 2M, where M is the MTBF; M for longer ones.

    Source: Daly 2006, the higher-order estimate in its conclusions.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9) - save_seconds


def _choice(name: str, interval: float, save: float, mtbf: float, restart: float) -> Choice:
    """Return what an interval loses: with its save it takes M·e^(R/M)·(e^((τ+δ)/M) - 1) on average, failures included.

    Source: Daly 2006, the complete model of the wall clock time.
    """
    exponent = (interval + save) / mtbf
    if exponent + restart / mtbf > _MAX_EXPONENT:
        return Choice(name, interval, 0.0, 1.0, 1.0)
    wall = mtbf * math.exp(restart / mtbf) * math.expm1(exponent)
    useful, saving = interval / wall, save / wall
    return Choice(name, interval, saving, max(1 - useful - saving, 0.0), 1 - useful)


def _require(name: str, seconds: float, is_good: bool, wanted: str) -> None:
    if not (is_good and math.isfinite(seconds)):
        raise ValueError(f"{name} must be {wanted} and finite, not {seconds!r}")


def read_cadence(run_dir: str | os.PathLike[str], marker: str = NAME) -> Cadence:
    """Read from the markers of a run directory how often it saves and how long it waits for a save.

    Args:
        run_dir: local path or URL.
        marker: name of the markers' files. Only those that a save wrote count, as `dcptool.training` does: of others
            the time they were written says nothing of the save.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no step in it, or several run directories.
        StorageError: it cannot be listed.
    """
    run = require_run(locate(run_dir))
    storage = locate(run.path).storage
    found: list[tuple[int, Marker]] = []
    for name in run.steps:
        read = marker_in(storage.below(name), marker)
        if read and read.writer == "save":
            found.append((run.number(name) or 0, read))
    saves = [one.save_seconds if one.blocked_seconds is None else one.blocked_seconds for _, one in found]
    save = _median(seconds for seconds in saves if seconds is not None)
    sizes = [(sum(one.files.values()), one.save_seconds) for _, one in found if one.files]
    nbytes = _median(size for size, _ in sizes)
    gaps = []
    for (step, before), (later, after) in pairwise(found):
        began, ended = _time(before), _time(after)
        if began is not None and ended is not None and ended > began:
            gaps.append((max(ended - began - (save or 0.0), 0.0), later - step))
    return Cadence(
        run.path,
        len(run.steps),
        len(found),
        save,
        _median(seconds for seconds, _ in gaps),
        _median(seconds / count for seconds, count in gaps if seconds and count > 0),
        None if nbytes is None else round(nbytes),
        _median(size / seconds for size, seconds in sizes if seconds),
    )


def _time(marker: Marker) -> float | None:
    """Return when a marker was written, in seconds since the epoch; None if it does not say."""
    try:
        return datetime.fromisoformat((marker.created or "").replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
