"""Arrays of any dtype as numbers that numpy computes with, a slice at a time. Knows neither files nor checkpoints.

Arrays are those of `dtypes.numpy_dtype`, C-contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dcptool.checkpoint import dtypes
from dcptool.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

SLICE = 1 << 16
"""Elements that are looked at together, so that no temporary is larger than a few megabytes."""
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
_FIRST_NOT_FINITE = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}
"""By dtype: the bits, without the sign, from which on a value is infinite or NaN."""
_ONLY_NAN = {"float8_e8m0fnu": 0xFF, "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80}
"""By dtype: the bits of its one value that is not finite."""


def array_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of an array of any dtype: of plain bits where a dtype has no numbers.

    Raises:
        UnsupportedError: dtype unknown to this dcptool.
    """
    import numpy as np

    try:
        return dtypes.numpy_dtype(name)
    except UnsupportedError:
        return np.dtype(f"<u{dtypes.lookup(name).itemsize}")


def has_numbers(name: str) -> bool:
    """Tell whether elements of a dtype are numbers that numpy or ml_dtypes can compute with."""
    return dtypes.lookup(name).numpy is not None and not name.startswith("float4")


def plain_numbers(array: Array) -> Array:
    """Return an array of numbers as one of a dtype numpy itself computes with; the same values."""
    if array.dtype.names:
        parts: Array = array["real"].astype("<c8")
        parts.imag = array["imag"]
        return parts
    if array.dtype.kind == "b":
        return array.view("<u1")
    return array if array.dtype.type.__module__ == "numpy" else array.astype("<f4")


def slices(array: Array) -> Iterator[Array]:
    """Yield the elements of an array in order, SLICE at a time."""
    flat = array.reshape(-1)
    return (flat[start : start + SLICE] for start in range(0, len(flat), SLICE))


def can_be_not_finite(name: str) -> bool:
    """Tell whether a dtype has NaN or infinities; integers, bools, float4 and quantised values have neither."""
    return _PARTS.get(name, name) in _FIRST_NOT_FINITE or name in _ONLY_NAN


def not_finite(array: Array, name: str) -> Iterator[tuple[Array, Array]]:
    """Yield where elements are NaN or infinite, slice by slice: their flat indices, rising, and which are NaN.

    A complex number with a NaN in it is NaN. Slices without any are passed over by their bits: several times the speed
    of numbers, of which numpy knows only some.

    Args:
        array: of `dtypes.numpy_dtype`, C-contiguous.
        name: its dtype, one that `can_be_not_finite`.
    """
    import numpy as np

    for number, piece in enumerate(slices(array)):
        if not _any_not_finite(piece, name):
            continue
        values = plain_numbers(piece)
        places = np.flatnonzero(~np.isfinite(values))
        yield places + number * SLICE, np.isnan(values[places])


def _any_not_finite(piece: Array, name: str) -> bool:
    part = _PARTS.get(name, name)
    nbits = 8 * dtypes.lookup(part).itemsize
    bits = piece.view(f"<u{nbits // 8}")
    if part in _ONLY_NAN:
        return bool((bits == _ONLY_NAN[part]).any())
    sign = bits.dtype.type(1 << (nbits - 1))
    return bool((bits & ~sign).max() >= _FIRST_NOT_FINITE[part])
