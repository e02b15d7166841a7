"""Element types against numpy and ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from dcptool.checkpoint import dtypes
from dcptool.errors import UnsupportedError

pytestmark = pytest.mark.torchfree


@pytest.mark.parametrize("name", ["bfloat16", *(name for name in dtypes.BY_NAME if name.startswith("float8"))])
def test_small_floats_unpack_as_ml_dtypes_does_for_every_bit_pattern(name):
    size = dtypes.lookup(name).itemsize
    patterns = np.arange(1 << 8 * size, dtype=f"<u{size}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = patterns.view(getattr(ml_dtypes, name)).astype(np.float64).tolist()
    for got, want in zip(dtypes.unpack(name, patterns.tobytes()), expected, strict=True):
        assert (math.isnan(got) and math.isnan(want)) or (got, math.copysign(1, got)) == (want, math.copysign(1, want))


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "int64", "int8", "uint64", "uint16", "bool"])
def test_other_numbers_unpack_as_numpy_does(name):
    values = np.array([0, 1, 1, 0, 1], dtype=name)
    assert dtypes.unpack(name, values.tobytes()) == values.tolist()


def test_complex_numbers_unpack_in_pairs():
    values = np.array([1 + 2j, -3.5j])
    assert dtypes.unpack("complex128", values.tobytes()) == values.tolist()
    assert dtypes.unpack("complex64", values.astype("complex64").tobytes()) == values.tolist()
    halves = np.array([1, 2, 0, -3.5], dtype="float16")
    assert dtypes.unpack("complex32", halves.tobytes()) == values.tolist()


@pytest.mark.parametrize("dtype", [dtype for dtype in dtypes.BY_NAME.values() if dtype.numpy], ids=lambda d: d.name)
def test_numpy_forms_have_the_size_of_the_dtype(dtype):
    assert dtypes.numpy_dtype(dtype.name).itemsize == dtype.itemsize


def test_what_has_no_array_form_is_refused_by_name():
    for name in ("quint8", "uint3", "bits16"):
        with pytest.raises(UnsupportedError, match=name):
            dtypes.numpy_dtype(name)
    with pytest.raises(UnsupportedError, match="float128"):
        dtypes.lookup("float128")
