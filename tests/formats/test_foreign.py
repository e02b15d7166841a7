"""Everything in fixtures/foreign, read without torch, against what its producer says is in it."""

from __future__ import annotations

import ast
import hashlib
import math
import random
import re

import numpy as np
import pytest

import dcptool
from dcptool.checkpoint.kinds import Severity
from dcptool.errors import DcptoolError, ItemError, LayoutError, StorageError
from dcptool.pickles import plain
from tests.conftest import PARTS, WHOLE, part


@pytest.mark.torchfree
@pytest.mark.parametrize("part", WHOLE, ids=lambda part: part.name)
def test_tensors_have_the_expected_dtype_shape_and_bytes(part):
    checkpoint = dcptool.open(part.path)
    assert set(checkpoint) == set(part.expected)
    assert not [problem for problem in checkpoint.problems if problem.severity is not Severity.NOTE]
    for fqn, expected in part.expected.items():
        if expected["kind"] == "tensor":
            entry = checkpoint[fqn]
            got = (f"torch.{entry.dtype}", list(entry.shape), entry.nbytes)
            assert got == (expected["dtype"], expected["shape"], expected["nbytes"])
            array = checkpoint.read(fqn)
            assert hashlib.sha256(array.tobytes()).hexdigest() == expected["sha256"], fqn
        else:
            assert fqn in checkpoint.objects


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)", text)]


@pytest.mark.torchfree
@pytest.mark.parametrize("part", WHOLE, ids=lambda part: part.name)
def test_objects_show_what_they_are(part):
    checkpoint = dcptool.open(part.path)
    for fqn, expected in part.expected.items():
        if expected["kind"] != "object":
            continue
        value = checkpoint.value(fqn)
        name = expected["type"].removeprefix("builtins.").replace("pathlib._local", "pathlib")
        assert plain.class_name(value) == name
        shown = repr(value)
        if isinstance(value, plain.Opaque):
            assert name == "argparse.Namespace"
        elif name == "collections.OrderedDict":  # its repr changed in Python 3.12
            assert list(value.items()) == ast.literal_eval(expected["repr"][len("OrderedDict(") : -1])
        elif hashlib.sha256(shown.encode()).hexdigest() != expected["repr_sha256"]:
            # It holds a tensor or a foreign object, which only torch shows as torch does.
            assert "tensor(" in shown or not plain.is_plain(value)
            if "tensor(" in shown and "..." not in expected["repr"]:
                without_dtypes = re.sub(r"dtype=[\w.]+", "", shown), re.sub(r"dtype=[\w.]+", "", expected["repr"])
                ours, theirs = map(numbers, without_dtypes)
                assert ours[: len(theirs)] == theirs or len(expected["repr"]) >= 200


@pytest.mark.torchfree
def test_tensors_inside_objects_have_their_values():
    value = dcptool.open(part("w_noflatten").path).value("nested")
    assert (value["t"].dtype, value["t"].shape, value["t"].nested()) == ("int64", (4,), [0, 1, 2, 3])
    assert (value["deep"]["u"].dtype, value["deep"]["u"].nested()) == ("bfloat16", [[1.0, 1.0], [1.0, 1.0]])
    value = dcptool.open(part("xver_t2130").path).value("extra.nested.tup_with_tensor")
    assert (value[0].dtype, value[0].nested(), value[1]) == ("float16", [1.0, 1.0], "label")


@pytest.mark.parametrize("part", WHOLE, ids=lambda part: part.name)
def test_random_boxes_equal_numpys_of_the_whole(part):
    checkpoint = dcptool.open(part.path)
    rng = random.Random(0)
    for fqn, entry in checkpoint.tensors.items():
        whole = checkpoint.read(fqn)
        for _ in range(3):
            offsets = [rng.randint(0, size) for size in entry.shape]
            sizes = [rng.randint(0, size - start) for size, start in zip(entry.shape, offsets, strict=True)]
            box = (*(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True)), ...)
            got = checkpoint.read(fqn, offsets, sizes)
            assert got.shape == tuple(sizes)
            assert got.flags.c_contiguous
            assert got.tobytes() == np.ascontiguousarray(whole[box]).tobytes()


@pytest.mark.parametrize("part", [part for part in PARTS if part.damaged], ids=lambda part: part.name)
def test_damaged_parts_say_so(part):
    try:
        checkpoint = dcptool.open(part.path)
    except DcptoolError as error:
        assert "save never finished" in str(error)
        return
    wrong = list(checkpoint.problems)
    for fqn in part.expected:
        try:
            if fqn in checkpoint.tensors:
                checkpoint.read(fqn)
            elif fqn in checkpoint.objects:
                checkpoint.value(fqn)
        except (ItemError, LayoutError, StorageError) as error:
            assert fqn in str(error)
            wrong.append(error)
    assert wrong


def test_torch_mislabels_boxes_of_uneven_strided_shards_and_we_name_it():
    checkpoint = dcptool.open(part("mesh2d_strided_uneven").path)
    unreadable = set()
    for fqn in checkpoint.tensors:
        try:
            checkpoint.read(fqn)
        except (ItemError, LayoutError) as error:
            assert "metadata and data are not of the same save" in str(error) or "no chunk holds" in str(error)
            unreadable.add(fqn)
    assert {"col.weight", "col.bias"} <= unreadable


def test_rank_local_metadata_is_one_view_with_replicas_apart():
    checkpoint = dcptool.open(part("w_no_collectives").path)
    assert len(checkpoint.tensors["model.embed.weight"].chunks) == 2
    replicated = checkpoint.tensors["model.rep"]
    assert (len(replicated.chunks), len(replicated.replicas)) == (1, 1)
    assert replicated.chunks[0].item.file == "__0_0.distcp"
    assert replicated.replicas[0].item.file == "__1_0.distcp"
    assert checkpoint.read("rank_only").tobytes() != b""


def test_errors_of_the_reader_are_helpful():
    checkpoint = dcptool.open(part("ddp").path)
    fqn, entry = next((fqn, entry) for fqn, entry in checkpoint.tensors.items() if len(entry.shape) == 2)
    rows, columns = entry.shape
    with pytest.raises(LayoutError, match=re.escape(f"did you mean {fqn!r}")):
        checkpoint.read(fqn + "x")
    with pytest.raises(LayoutError, match="leave it"):
        checkpoint.read(fqn, (0, 0), (rows + 1, columns))
    with pytest.raises(LayoutError, match="2 dimensions"):
        checkpoint.read(fqn, (0,))
    with pytest.raises(LayoutError, match="is an object, not a tensor"):
        checkpoint.read(next(iter(checkpoint.objects)))
    with pytest.raises(LayoutError, match="is a tensor, not an object"):
        checkpoint.value(fqn)


def test_infinite_and_nan_are_bits_like_any():
    checkpoint = dcptool.open(part("dtypes_keys_t2130").path)
    values = [checkpoint.read(fqn) for fqn in checkpoint.tensors if fqn.startswith("dtype.float")]
    assert values
    assert all(math.prod(value.shape) == value.size for value in values)
