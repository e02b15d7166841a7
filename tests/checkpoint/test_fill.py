"""Boxes of strided payloads against numpy; how many bytes are read for them; CRCs."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcptool.checkpoint import fill as fill_module
from dcptool.checkpoint.extents import Extent, Payload, Record
from dcptool.checkpoint.fill import RecordCheck, fill
from dcptool.checkpoint.regions import span
from dcptool.errors import ItemError


class Bytes:
    """A record in memory that counts what is read of it."""

    def __init__(self, data: bytes, crc32: int | None = None) -> None:
        self.data = data
        self.record = Record(Extent("f", 0, len(data)), 0, len(data), "data/0", crc32)
        self.nbytes_read = 0
        self.reads = 0

    def read_into(self, record: Record, byte_offset: int, out: memoryview) -> None:
        assert record is self.record
        assert byte_offset >= 0
        assert byte_offset + len(out) <= len(self.data)
        self.nbytes_read += len(out)
        self.reads += 1
        out[:] = self.data[byte_offset : byte_offset + len(out)]


@st.composite
def strided_boxes(draw):
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(0, 4)) for _ in range(ndim))
    strides = tuple(draw(st.sampled_from([0, 1, 2, 3, 5, 8, 20])) for _ in range(ndim))
    start = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - a)) for size, a in zip(shape, start, strict=True))
    return shape, strides, draw(st.integers(0, 3)), start, sizes, draw(st.sampled_from([8, 64, 1 << 20]))


@given(strided_boxes())
def test_any_box_of_any_strides_equals_numpys(case):
    shape, strides, storage_offset, start, sizes, window = case
    stored = np.arange(storage_offset + span(shape, strides) + 3, dtype="<i2")
    source = Bytes(stored.tobytes(), zlib.crc32(stored.tobytes()))
    payload = Payload(source.record, "int16", shape, strides, storage_offset)
    view = np.lib.stride_tricks.as_strided(stored[storage_offset:], shape, [2 * stride for stride in strides])
    expected = view[(*(slice(a, a + n) for a, n in zip(start, sizes, strict=True)), ...)]
    out = np.full(sizes, -1, "<i2")
    small = fill_module.WINDOW_NBYTES, fill_module.SMALL_NBYTES
    fill_module.WINDOW_NBYTES, fill_module.SMALL_NBYTES = window, window // 4
    try:
        fill(payload, source.read_into, start, out)
    finally:
        fill_module.WINDOW_NBYTES, fill_module.SMALL_NBYTES = small
    assert (out == expected).all()


@pytest.mark.parametrize("strides", [(1000, 1), (1, 1000)])
def test_a_flipped_bit_is_found_whenever_the_record_is_read_whole(strides):
    data = np.arange(1_000_000, dtype="<f4").tobytes()
    source = Bytes(data[:-1] + b"\x01", zlib.crc32(data))
    payload = Payload(source.record, "float32", (1000, 1000), strides)
    with pytest.raises(ItemError, match="bytes were changed since they were saved"):
        fill(payload, source.read_into, (0, 0), np.empty((1000, 1000), "<f4"))
    fill(payload, source.read_into, (0, 0), np.empty((10, 10), "<f4"))  # a part proves nothing, and is given


def test_conjugate_and_negative_are_undone():
    stored = np.array([1 + 2j, 3 - 4j], "<c8")
    source = Bytes(stored.tobytes())
    out = np.empty(2, "<c8")
    fill(Payload(source.record, "complex64", (2,), (1,), 0, True, False), source.read_into, (0,), out)
    assert out.tolist() == stored.conj().tolist()
    fill(Payload(source.record, "complex64", (2,), (1,), 0, True, True), source.read_into, (0,), out)
    assert out.tolist() == (-stored.conj()).tolist()
    half = np.dtype([("real", "<f2"), ("imag", "<f2")])
    pairs = np.array([(1, 2), (3, -4)], half)
    source = Bytes(pairs.tobytes())
    out = np.empty(2, half)
    fill(Payload(source.record, "complex32", (2,), (1,), 0, True, False), source.read_into, (0,), out)
    assert out["imag"].tolist() == [-2, 4]


def test_a_column_does_not_read_the_whole_and_a_row_reads_only_itself():
    rows, columns = 4096, 4096
    source = Bytes(bytes(rows * columns))
    payload = Payload(source.record, "uint8", (rows, columns), (columns, 1))
    fill(payload, source.read_into, (17, 0), np.empty((1, columns), np.uint8))
    assert source.nbytes_read == columns
    source.nbytes_read = 0
    fill(payload, source.read_into, (0, 0), np.empty((64, 1), np.uint8))
    assert source.nbytes_read <= 64 * columns


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5), st.randoms())
def test_a_record_is_checked_from_pieces_in_any_order(data, cuts, random):
    cuts = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [(start, memoryview(data[start:end])) for start, end in itertools.pairwise(cuts)]
    random.shuffle(pieces)
    for stored, wanted in ((zlib.crc32(data), ""), (zlib.crc32(data) ^ 1, "bytes were changed"), (None, "")):
        check = RecordCheck(Bytes(data, stored).record)
        for start, piece in pieces:
            check.update(start, piece)
        assert check.problem().startswith(wanted)
        assert check.problem_if_whole() == check.problem()
    if len(pieces) > 1:  # of a part nothing can be said, and of one read twice neither
        for wrong in (pieces[1:], [*pieces[1:], pieces[1], pieces[0], pieces[1]]):
            check = RecordCheck(Bytes(data, 1).record)
            for start, piece in wrong:
                check.update(start, piece)
            whole = len(wrong) > len(pieces)
            assert bool(check.problem_if_whole()) == (whole and not check.problem().startswith("not all"))
            assert check.problem()


def test_what_is_remembered_of_a_record_is_bounded(monkeypatch):
    """Pieces that follow one another become one; of too many scattered ones nothing can be said."""
    monkeypatch.setattr(fill_module, "MAX_PIECES", 10)
    data = memoryview(bytes(range(200)))
    check = RecordCheck(Bytes(bytes(data), zlib.crc32(data)).record)
    for start in range(0, 200, 2):
        check.update(start, data[start : start + 2])
    assert len(check.pieces) == 1
    assert check.is_whole()
    assert check.problem() == ""
    scattered = RecordCheck(check.record)
    for start in [*range(0, 200, 4), *range(2, 200, 4)]:
        scattered.update(start, data[start : start + 2])
    assert len(scattered.pieces) == 10
    assert not scattered.is_whole()
    assert scattered.problem_if_whole() == ""
