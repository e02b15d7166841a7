"""Element types by torch's names without the `torch.` prefix, and their other spellings.

Knows sizes, numpy and safetensors names and how to unpack a few bytes into Python numbers without numpy;
knows nothing of files. numpy and ml_dtypes are imported only when an array is asked for.

Two dtypes have no numpy twin and get a documented form:
* complex32: a structured dtype with the float16 fields `real` and `imag`;
* float4_e2m1fn_x2: uint8 of torch's shape, each byte holding two packed values, low bits first.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np


class DType(NamedTuple):
    """One element type.

    Attributes:
        name: torch's name without prefix, such as `bfloat16`.
        itemsize: bytes per element.
        numpy: name of the numpy or ml_dtypes type, None where it cannot be read into an array.
        safetensors: its code in a safetensors header, None where the format cannot hold it.
        storage: torch's typed storage class that implies it in a pickle, None for newer types.
        unpack: struct code, or (exponent bits, mantissa bits, bias, flavour) of a small float.
        since: first version of torch that has it, of those that read DCP as it is written today.
    """

    name: str
    itemsize: int
    numpy: str | None = None
    safetensors: str | None = None
    storage: str | None = None
    unpack: str | tuple[int, int, int, str] | None = None
    since: tuple[int, int] = (2, 2)


_TYPES = (
    DType("float64", 8, "float64", "F64", "DoubleStorage", "d"),
    DType("float32", 4, "float32", "F32", "FloatStorage", "f"),
    DType("float16", 2, "float16", "F16", "HalfStorage", "e"),
    DType("bfloat16", 2, "bfloat16", "BF16", "BFloat16Storage", (8, 7, 127, "ieee")),
    DType("float8_e4m3fn", 1, "float8_e4m3fn", "F8_E4M3", None, (4, 3, 7, "fn")),
    DType("float8_e4m3fnuz", 1, "float8_e4m3fnuz", "F8_E4M3FNUZ", None, (4, 3, 8, "fnuz")),
    DType("float8_e5m2", 1, "float8_e5m2", "F8_E5M2", None, (5, 2, 15, "ieee")),
    DType("float8_e5m2fnuz", 1, "float8_e5m2fnuz", "F8_E5M2FNUZ", None, (5, 2, 16, "fnuz")),
    DType("float8_e8m0fnu", 1, "float8_e8m0fnu", "F8_E8M0", None, (8, 0, 127, "fnu"), (2, 7)),
    DType("float4_e2m1fn_x2", 1, "uint8", "F4", None, "B", (2, 8)),
    DType("complex128", 16, "complex128", None, "ComplexDoubleStorage", "dd"),
    DType("complex64", 8, "complex64", "C64", "ComplexFloatStorage", "ff"),
    DType("complex32", 4, "complex32", None, None, "ee"),
    DType("int64", 8, "int64", "I64", "LongStorage", "q"),
    DType("int32", 4, "int32", "I32", "IntStorage", "i"),
    DType("int16", 2, "int16", "I16", "ShortStorage", "h"),
    DType("int8", 1, "int8", "I8", "CharStorage", "b"),
    DType("uint64", 8, "uint64", "U64", None, "Q", (2, 3)),
    DType("uint32", 4, "uint32", "U32", None, "I", (2, 3)),
    DType("uint16", 2, "uint16", "U16", None, "H", (2, 3)),
    DType("uint8", 1, "uint8", "U8", "ByteStorage", "B"),
    DType("bool", 1, "bool", "BOOL", "BoolStorage", "?"),
    # Known to torch and so recognised, but torch itself cannot bring them through DCP.
    *(DType(f"{sign}int{bits}", 1) for sign in ("", "u") for bits in range(1, 8)),
    *(DType(name, 1) for name in ("quint8", "qint8", "quint4x2", "quint2x4", "bits8", "bits1x8", "bits2x4", "bits4x2")),
    DType("bits16", 2),
    DType("qint32", 4),
)
BY_NAME = {dtype.name: dtype for dtype in _TYPES}
BY_STORAGE = {dtype.storage: dtype for dtype in _TYPES if dtype.storage}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TYPES if dtype.safetensors}


def lookup(name: str) -> DType:
    """Return the dtype of that torch name.

    Raises:
        UnsupportedError: torch 2.13 has no such dtype.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise UnsupportedError(
            f"dtype {name!r} is unknown to this dcptool", next_step="a newer version may know it"
        ) from None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype in which `Checkpoint.read` gives a torch dtype, little-endian.

    Raises:
        UnsupportedError: the dtype has no array form (quantised and sub-byte types).
    """
    import numpy as np

    form = lookup(name).numpy
    if form is None:
        quantised = name.startswith(("qint", "quint"))
        step = "dcp.load into a quantised tensor reads it" if quantised else "torch cannot load it from DCP either"
        raise UnsupportedError(f"dtype {name} cannot be read into an array", next_step=step)
    if form == "complex32":
        return np.dtype([("real", "<f2"), ("imag", "<f2")])
    if form.startswith(("bfloat", "float8")):
        import ml_dtypes

        form = getattr(ml_dtypes, form)
    dtype: np.dtype[Any] = np.dtype(form)
    return dtype.newbyteorder("<") if isinstance(form, str) else dtype


def unpack(name: str, data: bytes) -> list[Any]:
    """Turn a few elements into Python numbers without numpy, for display.

    Args:
        name: torch's dtype name.
        data: whole elements, little-endian, contiguous.

    Returns:
        One number per element: int, float, bool or complex; float4 pairs stay packed bytes as ints.

    Raises:
        UnsupportedError: the dtype has no number form.
    """
    dtype = lookup(name)
    count = len(data) // dtype.itemsize
    form = dtype.unpack
    if form is None:
        raise UnsupportedError(f"values of dtype {name} cannot be shown")
    if isinstance(form, str):
        numbers = struct.unpack(f"<{count * len(form)}{form[0]}", data)
        if len(form) == 2:
            return [complex(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return list(numbers)
    code = "H" if dtype.itemsize == 2 else "B"
    return [_small_float(bits, *form) for bits in struct.unpack(f"<{count}{code}", data)]


def _small_float(bits: int, exponent_bits: int, mantissa_bits: int, bias: int, flavour: str) -> float:
    """Decode one narrow float: "ieee" has infinities, "fn" only NaN, "fnuz" no negative zero, "fnu" no sign."""
    if flavour == "fnu":
        return float("nan") if bits == 0xFF else 2.0 ** (bits - bias)
    width = exponent_bits + mantissa_bits
    sign = -1.0 if bits >> width else 1.0
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    if flavour == "fnuz" and bits == 1 << width:
        return float("nan")
    if exponent == (1 << exponent_bits) - 1:
        if flavour == "ieee":
            return sign * float("inf") if mantissa == 0 else float("nan")
        if flavour == "fn" and mantissa == (1 << mantissa_bits) - 1:
            return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
