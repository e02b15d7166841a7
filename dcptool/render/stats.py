"""Statistics of tensors as a table and as JSON."""

from __future__ import annotations

import math
from typing import Any

from dcptool.ops.inspect.stats import VALUES, StatsReport, TensorStats
from dcptool.render.text import MIN_NAME_WIDTH, table
from dcptool.words import plural, shown

_COUNTS = ("n_values", "n_nan", "n_inf", "n_zero")
_WHAT = ("tensor", "dtype", "shape")
_NUMBERS = ("min", "max", "mean", "std", "norm")


def stats_text(report: StatsReport, width: int) -> str:
    """Return a row per tensor; where a terminal is too narrow, its name stands on a line above the numbers."""
    tensors = report.tensors
    if not tensors:
        return ""
    headers = [*_NUMBERS, "zeros", "NaN", "Inf"]
    numbers = [_cells(tensor) for tensor in tensors]
    what = [
        [shown(tensor.fqn), shown(tensor.dtype), "×".join(map(str, tensor.shape)) or "scalar"] for tensor in tensors
    ]
    rows = [[*head, *cells] for head, cells in zip(what, numbers, strict=True)]
    without = table([*_WHAT[1:], *headers], [row[1:] for row in rows], range(2, 2 + len(headers)))
    room = width - max(map(len, without.splitlines())) - 2
    if room >= min(MIN_NAME_WIDTH, max(len(name) for name, *_ in what)):
        text = table([*_WHAT, *headers], rows, range(3, 3 + len(headers)), width)
    else:
        head, rule, *lines = table(headers, numbers, right=range(len(headers))).splitlines()
        pairs = ("\n".join(["  ".join(words), line]) for words, line in zip(what, lines, strict=True))
        text = "\n".join([head, rule, *pairs])
    return "\n\n".join([text, *_legend(tensors)])


def stats_json(stats: TensorStats) -> dict[str, Any]:
    """Return the statistics of one tensor as plain data; numbers that JSON cannot say are text."""
    if stats.problem:
        return {"problem": stats.problem}
    fields = stats._asdict()
    return {
        "measured": stats.measured,
        **{name: fields[name] for name in _COUNTS},
        **{name: _finite(fields[name]) for name in _NUMBERS},
        "problem": None,
    }


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)


def _cells(stats: TensorStats) -> list[str]:
    if stats.problem:
        return ["?"] * (len(_NUMBERS) + 3)
    fields = stats._asdict()
    return [*(number(fields[name]) for name in _NUMBERS), _share(stats), f"{stats.n_nan:,}", f"{stats.n_inf:,}"]


def number(value: float | None) -> str:
    """Return a number with four significant digits, an exponent without what it does not need.

    >>> number(0.000012345), number(-1234.5), number(16777216), number(3), number(None)
    ('1.234e-5', '-1234', '1.678e7', '3', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, int) and abs(value) < 100_000:
        return str(value)
    try:
        text = f"{value:.4g}"
    except OverflowError:  # an integer beyond float64 cannot be here, but one that rounds to it can
        text = str(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def _share(stats: TensorStats) -> str:
    """Return how many values are zero: none, all, or a share that is rounded to neither."""
    if not stats.n_zero or stats.n_zero == stats.n_values:
        return "all" if stats.n_zero else "0"
    share = 100 * stats.n_zero / stats.n_values
    return "<0.1%" if share < 0.1 else ">99.9%" if share > 99.9 else f"{share:.1f}%"


def _legend(tensors: tuple[TensorStats, ...]) -> list[str]:
    """Say what is not plain from the table: what numbers are of, and that NaN is left out of them."""
    lines = []
    for measured in dict.fromkeys(tensor.measured for tensor in tensors if tensor.measured != VALUES):
        lines.append(
            "complex: numbers are of magnitudes"
            if measured == "magnitudes"
            else "float4: numbers are of the unpacked values, two for each element, before any scale"
        )
    bad = [tensor for tensor in tensors if tensor.n_nan or tensor.n_inf]
    failed = [tensor for tensor in tensors if tensor.problem]
    if bad:
        lines.append("NaN and infinities are left out of the other numbers")
    elif len(failed) < len(tensors):
        lines.append(f"no NaN and no infinity in {plural(len(tensors) - len(failed), 'tensor')}")
    return ["\n".join(lines)] if lines else []
