"""The best interval between saves, and what others lose, as text and as JSON."""

from __future__ import annotations

from typing import Any

from dcptool.ops.interval import Cadence, Choice, IntervalReport
from dcptool.render.text import table
from dcptool.words import nbytes, plural, shown

SCHEMA = 1
_NAMES = {"daly": "optimum (Daly)", "young": "optimum (Young)", "cadence": "as the run saves", "given": "--interval"}
_DAY = 86_400
_MOST_LOST = (
    "  a failure throws away up to one interval of steps; with saves in the background, 2 intervals less a step"
)


def interval_text(report: IntervalReport, cadence: Cadence | None = None) -> str:
    """Return the answer in one line, what it was concluded from, and a table of intervals."""
    best = report.choices[0]
    step = cadence.step_seconds if cadence else None
    steps = f", about {plural(_steps(best, step), 'step')}" if step else ""
    lines = [
        f"save every {duration(best.interval_seconds)} of training{steps}: "
        f"{percent(best.lost_share)} of the time is lost, {duration(best.lost_share * _DAY)} a day",
        f"  a save takes {duration(report.save_seconds)}, a restart {duration(report.restart_seconds)}; "
        f"a failure every {duration(report.mtbf_seconds)}",
    ]
    if cadence:
        lines.append(f"  {shown(cadence.path)}: {_told(cadence)}")
    lines.append(_MOST_LOST)
    headers = ["", "interval", *(["steps"] if step else []), "saving", "failures", "lost", "lost a day"]
    rows = [
        [
            _NAMES[choice.name],
            duration(choice.interval_seconds),
            *([f"{_steps(choice, step):,}"] if step else []),
            percent(choice.saving_share),
            percent(choice.failure_share),
            percent(choice.lost_share),
            duration(choice.lost_share * _DAY),
        ]
        for choice in report.choices
    ]
    return "\n".join([*lines, "", table(headers, rows, right=range(1, len(headers)))])


def _steps(choice: Choice, step_seconds: float) -> int:
    return max(1, round(choice.interval_seconds / step_seconds))


def _told(cadence: Cadence) -> str:
    markers = f"{plural(cadence.n_markers, 'marker')} of {plural(cadence.n_steps, 'step')}"
    save = "" if cadence.save_seconds is None else f", saves of {duration(cadence.save_seconds)}"
    every = "" if cadence.interval_seconds is None else f", {duration(cadence.interval_seconds)} between them"
    size = "" if cadence.nbytes is None else f"{nbytes(cadence.nbytes)} each"
    rate = "" if cadence.bytes_per_second is None else f", {nbytes(round(cadence.bytes_per_second))}/s"
    return f"{markers}{save}{f' ({size}{rate})' if save and size else ''}{every}"


def duration(seconds: float) -> str:
    """Return a length of time in its largest unit, three significant digits.

    >>> duration(0), duration(45), duration(1311), duration(10_011.6), duration(200_000)
    ('0 s', '45 s', '21.9 min', '2.78 h', '2.31 d')
    """
    for size, unit in ((_DAY, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds)} s"


def percent(share: float) -> str:
    """Return a share of 0 to 1 in percent, of small ones two decimal places.

    >>> percent(0.0), percent(0.0001), percent(0.0453), percent(0.123), percent(1.0)
    ('0%', '0.01%', '4.5%', '12.3%', '100%')
    """
    value = 100 * share
    digits = 0 if value in (0, 100) else 2 if value < 0.095 else 1
    return f"{value:.{digits}f}%"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def interval_json(report: IntervalReport, cadence: Cadence | None = None) -> dict[str, Any]:
    """Return the report as plain data; the layout is documented in docs/json.md."""
    fields = report._asdict()
    fields["choices"] = [choice._asdict() for choice in report.choices]
    return {"schema": SCHEMA, **fields, "cadence": cadence._asdict() if cadence else None}
