"""Count and measure the elements of arrays: range, mean, spread, norm, zeros, what is not finite. Knows no checkpoint.

Sums are in float64. Pieces are measured apart and merged, so that the result is the same however many threads there
are; values whose squares float64 cannot hold are scaled by a power of two, which rounds nothing.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, The American Statistician 37(3), 1983, for merging mean and spread; the
correction of the two-pass algorithm is there too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint.numbers import plain_numbers, slices

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_SAFE_EXPONENT = 480
"""Values from 2⁻⁴⁸⁰ to 2⁴⁸⁰ have squares that float64 holds, and sums over 2⁶⁰ of them."""
_NOTHING = -5000
"""Exponent of what has only zeros: any other one is larger."""
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Moments(NamedTuple):
    """What was seen of some elements.

    Attributes:
        n_finite, n_nan, n_inf: how many are finite, NaN, infinite.
        n_zero: finite ones that are 0 or -0.
        low, high: smallest and largest finite one; exact for integers. None if there is none.
        mean: of the finite ones.
        spread: sum over them of (value - mean)².
        squares: sum over them of value².
        exponent: `mean` is in units of 2^exponent, `spread` and `squares` of its square.
    """

    n_finite: int = 0
    n_nan: int = 0
    n_inf: int = 0
    n_zero: int = 0
    low: float | None = None
    high: float | None = None
    mean: float = 0.0
    spread: float = 0.0
    squares: float = 0.0
    exponent: int = _NOTHING

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both together."""
        n = self.n_finite + other.n_finite
        counts = n, self.n_nan + other.n_nan, self.n_inf + other.n_inf, self.n_zero + other.n_zero
        if self.low is None or self.high is None or other.low is None or other.high is None:
            n_finite, n_nan, n_inf, n_zero = counts
            whole = other if self.low is None else self
            return whole._replace(n_finite=n_finite, n_nan=n_nan, n_inf=n_inf, n_zero=n_zero)
        exponent = max(self.exponent, other.exponent)
        mean, spread, squares = self._scaled(exponent)
        mean_other, spread_other, squares_other = other._scaled(exponent)
        step = mean_other - mean
        return Moments(
            *counts,
            min(self.low, other.low),
            max(self.high, other.high),
            mean + step * (other.n_finite / n),
            spread + spread_other + step * step * (self.n_finite / n * other.n_finite),
            squares + squares_other,
            exponent,
        )

    def _scaled(self, exponent: int) -> tuple[float, float, float]:
        down = self.exponent - exponent
        return math.ldexp(self.mean, down), math.ldexp(self.spread, 2 * down), math.ldexp(self.squares, 2 * down)

    @property
    def average(self) -> float | None:
        """Mean of the finite elements."""
        if self.low is None or self.high is None:
            return None
        return min(max(_ldexp(self.mean, self.exponent), float(self.low)), float(self.high))

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the finite elements over n - 1, as torch's; None for fewer than 2."""
        if self.n_finite < 2:
            return None
        return _ldexp(math.sqrt(self.spread / (self.n_finite - 1)), self.exponent)

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite elements."""
        return _ldexp(math.sqrt(self.squares), self.exponent)


def measure(array: Array, dtype: str) -> Moments:
    """Measure the elements of an array; of complex numbers their magnitudes, of float4 both values in each byte.

    Args:
        array: of `dtypes.numpy_dtype`, C-contiguous.
        dtype: torch's name.
    """
    import numpy as np

    table = np.array([*_FLOAT4, *(-value for value in _FLOAT4)], "<f8") if dtype.startswith("float4") else None
    found = Moments()
    with np.errstate(all="ignore"):
        for piece in slices(array):
            if table is not None:
                piece = table[np.concatenate((piece & 15, piece >> 4))]
            found = found.plus(_measure(plain_numbers(piece)))
    return found


def _measure(numbers: Array) -> Moments:
    """Measure a slice of an array that is not empty."""
    import numpy as np

    wide = np.abs(numbers.astype("<c16")) if numbers.dtype.kind == "c" else numbers.astype("<f8")
    n, n_nan, n_inf = len(wide), 0, 0
    low, high = wide.min().item(), wide.max().item()
    if not (math.isfinite(low) and math.isfinite(high)):  # a NaN makes both NaN
        finite = np.isfinite(wide)
        n_nan = int(np.count_nonzero(np.isnan(numbers)))
        wide = wide[finite]
        n_inf = n - len(wide) - n_nan
        if not len(wide):
            return Moments(0, n_nan, n_inf)
        n, low, high = len(wide), wide.min().item(), wide.max().item()
    if numbers.dtype.kind in "iu":
        low, high = numbers.min().item(), numbers.max().item()
    n_zero = n - int(np.count_nonzero(wide))
    if n_zero == n:
        return Moments(n, n_nan, n_inf, n, low, high)
    exponent = math.frexp(max(abs(low), abs(high)))[1]
    exponent = 0 if abs(exponent) <= _SAFE_EXPONENT else exponent
    if exponent:
        wide = np.ldexp(wide, -exponent)
    squares = (wide * wide).sum().item()  # no dot product: threads of a BLAS would fight those we have
    mean, spread = wide[0].item(), 0.0
    if low != high:
        mean = wide.sum().item() / n
        wide -= mean
        rest = wide.sum().item()
        wide *= wide
        spread = max(wide.sum().item() - rest * rest / n, 0.0)
        mean += rest / n
    return Moments(n, n_nan, n_inf, n_zero, low, high, mean, spread, squares, exponent)


def _ldexp(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf
