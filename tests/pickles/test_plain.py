"""Readable values of pickled objects."""

from __future__ import annotations

import collections
import os
import pathlib
import pickle

import numpy as np
import pytest

from dcptool.errors import ItemError
from dcptool.pickles import inert, plain

pytestmark = pytest.mark.torchfree


def decoded(value, protocol=2):
    return plain.decode(inert.load(pickle.dumps(value, protocol)))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**80), 2.5, 1j, "ü\n", b"\x00\xff", bytearray(b"ab"), [], {}, (), (1, [2, {"a": None}]),
        {1, 2}, frozenset({"a"}), collections.OrderedDict(z=1, a=[2]), collections.Counter("aab"),
        {(1, 2): "tuple key", None: 0},
    ],
    ids=repr,
)  # fmt: skip
def test_plain_python_values_come_back(value, protocol):
    result = decoded(value, protocol)
    assert result == value
    assert type(result) is type(value)
    assert plain.is_plain(result)


def test_paths_show_as_themselves_wherever_they_were_written():
    assert repr(decoded(pathlib.PurePosixPath("/data/x y"))) == "PurePosixPath('/data/x y')"
    assert repr(decoded(pathlib.PurePosixPath("a/b"))) == "PurePosixPath('a/b')"
    written_by_313 = b"\x80\x04\x8c\x0epathlib._local\x94\x8c\tPosixPath\x94\x93\x94\x8c\x01/\x8c\x01d\x86R."
    value = plain.decode(inert.load(written_by_313))
    assert (repr(value), plain.class_name(value)) == ("PosixPath('/d')", "pathlib.PosixPath")


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8", "bool", "complex128"])
def test_numpy_scalars_and_arrays(dtype):
    array = np.array([[1, 0, 1], [0, 1, 1]], dtype)
    result = decoded(array)
    assert (result.dtype, result.shape, result.nested()) == (dtype, (2, 3), array.tolist())
    assert plain.class_name(result) == "numpy.ndarray"
    assert decoded(array[0, 0]) == array[0, 0].item()
    assert decoded(np.zeros((0, 2))).nested() == []
    assert decoded(np.zeros(5000)).values is None


def test_foreign_classes_are_named_and_never_made():
    class Evil:
        def __reduce__(self):
            return (os.system, ("exit 1",))

    value = decoded({"a": Evil(), "b": slice(1, 2)})
    assert plain.class_name(value["a"]) == f"{os.system.__module__}.system"
    assert not plain.is_plain(value)
    assert plain.to_json(value) is None


def test_cycles_end():
    loop: list = [1]
    loop.append(loop)
    value = decoded(loop)
    assert value[0] == 1
    assert isinstance(value[1], plain.Opaque)


def test_shared_references_that_multiply_are_refused():
    value = [0]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(ItemError, match="more than 100,000 values"):
        decoded(value)


def test_deep_nesting_is_refused():
    data = b"\x80\x04" + b"]" * 500 + b"a" * 499 + b"."
    with pytest.raises(ItemError, match="levels deep"):
        plain.decode(inert.load(data))


def test_json_never_holds_what_json_cannot_say():
    for value in (float("nan"), b"x", plain.Opaque("a.B"), {1}, {1: 2}, ({1: 0}, 3), {"a": [float("inf")]}):
        assert plain.to_json(value) is None
    assert plain.to_json({"t": (1, 2), "n": None, "s": plain.Size((2,))}) == {"t": [1, 2], "n": None, "s": [2]}
