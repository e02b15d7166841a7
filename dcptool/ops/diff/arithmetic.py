"""Compare two arrays of one shape: which elements differ, by how much, and sums that tell more about a tensor.

Arrays are those of `dtypes.numpy_dtype`, C-contiguous. Larger ones are gone through in slices, so that no temporary is
larger than a few megabytes. Knows neither files nor checkpoints.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint.numbers import SLICE, has_numbers, plain_numbers, slices
from dcptool.ops.diff.results import DiffOptions, Number

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Sums(NamedTuple):
    """Of some elements of one side: how many are finite, NaN, infinite; sum and sum of squares of the finite ones."""

    n_finite: int = 0
    n_nan: int = 0
    n_inf: int = 0
    total: complex = 0.0
    squares: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """Return the sums of both together."""
        return Sums(*map(operator.add, self, other))


class Errors(NamedTuple):
    """How the elements of a piece differ; see `results.Values` for what the numbers mean.

    `first` counts elements from the beginning of the piece. `bits_a` and `bits_b` are sums modulo 2⁶⁴ over mixed
    element bits, equal if both sides hold the same values in any order. `sums_a` and `sums_b` are of all elements.
    `rounded` tells whether the wider side rounded to the dtype of the narrower one is equal to it.
    """

    n_different: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    first: int | None = None
    first_a: Number | None = None
    first_b: Number | None = None
    bits_a: int = 0
    bits_b: int = 0
    sums_a: Sums | None = Sums()
    sums_b: Sums | None = Sums()
    rounded: bool = True


def common_dtype(a: str, b: str) -> str | None:
    """Return the dtype two dtypes are compared in, None if their values cannot be compared.

    >>> common_dtype("bfloat16", "float16"), common_dtype("int32", "int64"), common_dtype("float4_e2m1fn_x2", "uint8")
    ('float32', 'int64', None)
    """
    import numpy as np

    if a == b:
        return a
    if not (has_numbers(a) and has_numbers(b)):
        return None
    narrow = {name: "complex64" if name == "complex32" else "float32" if _is_small(name) else name for name in (a, b)}
    return str(np.promote_types(narrow[a], narrow[b]))


def same_bits(a: Array, b: Array, mask: Array) -> bool:
    """Tell whether two arrays of one dtype and shape hold the same bytes.

    Args:
        a, b: the arrays, each at the beginning of a buffer of its own.
        mask: scratch of booleans, one for every 8 bytes at least.
    """
    import numpy as np

    a, b = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    n_words = len(a) // 8
    differ = mask[:n_words]
    np.not_equal(a[: 8 * n_words].view("<u8"), b[: 8 * n_words].view("<u8"), out=differ)
    return not differ.any() and a[8 * n_words :].tobytes() == b[8 * n_words :].tobytes()


def compare_arrays(a: Array, b: Array, dtype_a: str, dtype_b: str, options: DiffOptions) -> Errors:
    """Compare two arrays element by element.

    Args:
        a, b: same shape, of `numbers.array_dtype` of these dtypes.
        dtype_a, dtype_b: torch's names; they have a `common_dtype`.
        options: tolerances; see `DiffOptions`.
    """
    errors = Errors()
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, len(a), SLICE):
        piece = _compare_slice(a[start : start + SLICE], b[start : start + SLICE], dtype_a, dtype_b, options)
        errors = merge(errors, piece._replace(first=None if piece.first is None else start + piece.first))
    return errors


def merge(a: Errors, b: Errors) -> Errors:
    """Return the errors of two pieces together; `first` is of the piece with the smaller one."""
    first = min((errors for errors in (a, b) if errors.first is not None), key=lambda e: e.first or 0, default=a)
    return Errors(
        a.n_different + b.n_different,
        _larger(a.max_abs, b.max_abs),
        _larger(a.max_rel, b.max_rel),
        first.first,
        first.first_a,
        first.first_b,
        (a.bits_a + b.bits_a) % (1 << 64),
        (a.bits_b + b.bits_b) % (1 << 64),
        a.sums_a.plus(b.sums_a) if a.sums_a and b.sums_a else None,
        a.sums_b.plus(b.sums_b) if a.sums_b and b.sums_b else None,
        a.rounded and b.rounded,
    )


def sum_up(array: Array, dtype: str) -> Sums | None:
    """Return the sums of an array's elements, None if they are no numbers."""
    import numpy as np

    if not has_numbers(dtype):
        return None
    sums = Sums()
    with np.errstate(all="ignore"):
        for piece in slices(array):
            sums = sums.plus(_sums(_wide(plain_numbers(piece))))
    return sums


def mixed_sum(array: Array) -> int:
    """Return the sum modulo 2⁶⁴ over mixed bits of the elements: equal for the same values in any order.

    Source: the constants of SplitMix64 (Steele, Lea, Flood 2014); the mix maps 64 bits one to one, as theirs does.
    """
    import numpy as np

    if array.dtype.itemsize == 16:
        low, high = array.view("<u8").reshape(-1, 2).T
        words = low + _mixed(high.copy())
    else:
        words = _bits(array).astype(np.uint64)
    return int(_mixed(words).sum(dtype=np.uint64))


def _mixed(words: Array) -> Array:
    """Mix 64-bit words in place, so that sums over them tell multisets apart."""
    import numpy as np

    shifted = np.empty_like(words)
    words += np.uint64(_GOLDEN)
    for factor in (_MIX_1, _MIX_2):
        words *= np.uint64(factor)
        np.right_shift(words, np.uint64(32), out=shifted)
        words ^= shifted
    return words


def _compare_slice(a: Array, b: Array, dtype_a: str, dtype_b: str, options: DiffOptions) -> Errors:
    import numpy as np

    if dtype_a == dtype_b:
        different, rounded = _bits(a) != _bits(b), True
        if different.ndim > 1:
            different = different.any(axis=1)
    else:
        different, rounded = np.ones(len(a), bool), _rounds(a, b)
    if not has_numbers(dtype_a):
        first = int(different.argmax()) if different.any() else None
        bits = mixed_sum(a), mixed_sum(b)
        return Errors(int(different.sum()), None, None, first, None, None, *bits, None, None)
    with np.errstate(all="ignore"):
        errors = _compare_numbers(plain_numbers(a), plain_numbers(b), different, dtype_a != dtype_b, options)
    if dtype_a == dtype_b:
        errors = errors._replace(bits_a=mixed_sum(a), bits_b=mixed_sum(b))
    return errors._replace(rounded=rounded)


def _compare_numbers(a: Array, b: Array, different: Array, is_cast: bool, options: DiffOptions) -> Errors:
    """Compare numbers where `different` says that they may differ; it is changed."""
    import numpy as np

    wide_a, wide_b = _wide(a), _wide(b)
    sums_a, sums_b = _sums(wide_a), _sums(wide_b)
    distance = _distance(a, b, wide_a, wide_b)
    if is_cast:
        different &= (a != b) | (np.signbit(_real(a)) != np.signbit(_real(b)))
    if options.is_tolerant:
        close = (distance <= options.atol + options.rtol * np.abs(wide_b)) & np.isfinite(wide_b)
        different &= ~((a == b) | close)
    if (options.nan_equal or is_cast) and sums_a.n_nan and sums_b.n_nan:
        different &= ~(np.isnan(a) & np.isnan(b))
    n_different = int(different.sum())
    if not n_different:
        return Errors(sums_a=sums_a, sums_b=sums_b)
    scale = np.maximum(np.abs(wide_a), np.abs(wide_b))
    if not sums_a.n_finite == sums_b.n_finite == len(a):
        finite = np.isfinite(wide_a) & np.isfinite(wide_b)
        distance, scale = distance[finite], scale[finite]
    max_abs = max_rel = None
    if len(distance):
        max_abs = distance.max().item()
        max_abs = int(max_abs) if a.dtype.kind in "iu" and b.dtype.kind in "iu" else max_abs
        max_rel = float(np.fmax.reduce(distance / scale, initial=0.0))  # 0 / 0, of two zeros, is NaN: left out
    first = int(different.argmax())
    return Errors(n_different, max_abs, max_rel, first, a[first].item(), b[first].item(), sums_a=sums_a, sums_b=sums_b)


def _distance(a: Array, b: Array, wide_a: Array, wide_b: Array) -> Array:
    """Return |a - b|: in float64, which is exact for all integers but those of 64 bits, and these exactly."""
    import numpy as np

    if a.dtype == b.dtype and a.dtype.kind in "iu" and a.dtype.itemsize == 8:
        exact: Array = np.maximum(a, b).view("<u8") - np.minimum(a, b).view("<u8")
        return exact
    distance: Array = np.abs(wide_a - wide_b)
    return distance


def _wide(array: Array) -> Array:
    return array.astype("<c16" if array.dtype.kind == "c" else "<f8")


def _real(array: Array) -> Array:
    return array.real if array.dtype.kind == "c" else array.astype("<f8")


def _is_small(name: str) -> bool:
    return name.startswith(("bfloat16", "float8"))


def _rounds(a: Array, b: Array) -> bool:
    """Tell whether the wider of two arrays, rounded to the dtype of the other, has the other's bits; NaN is NaN."""
    import numpy as np

    wide, narrow = (a, b) if a.dtype.itemsize > b.dtype.itemsize else (b, a)
    if wide.dtype.itemsize == narrow.dtype.itemsize or wide.dtype.names or narrow.dtype.names:
        return False
    with np.errstate(all="ignore"):
        rounded = wide.astype(narrow.dtype)
        same = (_bits(rounded) == _bits(narrow)).reshape(len(a), -1).all(axis=1)
        if not same.all():
            same |= np.isnan(plain_numbers(rounded)) & np.isnan(plain_numbers(narrow))
    return bool(same.all())


def _sums(wide: Array) -> Sums:
    """Return the sums of numbers in float64 or complex128."""
    import numpy as np

    finite = np.isfinite(wide)
    kept = wide if finite.all() else wide[finite]
    n_nan = int(np.isnan(wide).sum()) if len(kept) < len(wide) else 0
    squares = float((kept.real * kept.real).sum())  # no dot product: threads of a BLAS would fight those we have
    if kept.dtype.kind == "c":
        squares += float((kept.imag * kept.imag).sum())
    return Sums(len(kept), n_nan, len(wide) - len(kept) - n_nan, kept.sum().item(), squares)


def _bits(array: Array) -> Array:
    """Return the elements of a one-dimensional array as unsigned integers; pairs of them for 16-byte elements."""
    itemsize = array.dtype.itemsize
    return array.view("<u8").reshape(-1, 2) if itemsize == 16 else array.view(f"<u{itemsize}")


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)
