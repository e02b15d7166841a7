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
