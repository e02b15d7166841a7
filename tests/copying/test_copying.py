"""The engine by itself, into memory: who shares a reading, what is checked, how far ahead of the writer it gets."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest

import dcptool
from dcptool.copying import reading
from dcptool.copying.checking import settle
from dcptool.copying.engine import copy
from dcptool.copying.outputs import Closing, Fill, Literal, OutputFile, Verbatim
from tests.conftest import FOREIGN

FQN = "model.emb.weight"


class Memory:
    """A place for files that keeps them in memory, and notes what became of each."""

    def __init__(self) -> None:
        self.files: dict[str, MemorySink] = {}

    def create(self, name):
        self.files[name] = MemorySink()
        return self.files[name]


class MemorySink:
    def __init__(self) -> None:
        self.data, self.state = bytearray(), "open"

    def write(self, data):
        self.data += data

    def finish(self):
        self.state = "finished"

    def abort(self):
        self.state = "aborted"


class Counted:
    """A source that counts the bytes of records that are read."""

    def __init__(self, source) -> None:
        self._source, self.nbytes = source, 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read_into(self, record, byte_offset, out):
        self.nbytes += len(out)
        self._source.read_into(record, byte_offset, out)


@pytest.fixture
def source():
    checkpoint = dcptool.open(FOREIGN / "xver_t2130")
    return replace(checkpoint, source=Counted(checkpoint.source))


def rows(first, last):
    return Fill(FQN, (first, 0), (last - first, 9), "float32", (last - first) * 9 * 4)


def first_record(checkpoint):
    entry = checkpoint.tensors[FQN]
    return checkpoint.payload(entry, entry.chunks[0]).record


def crcs_so_far(n_parts):
    return Closing(4 * n_parts, lambda crcs: b"".join(crc.to_bytes(4, "little") for crc in crcs))


@pytest.mark.torchfree
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("band_nbytes", [reading.BAND_NBYTES, 100])
def test_files_of_a_group_share_one_reading(source, monkeypatch, threads, band_nbytes):
    monkeypatch.setattr(reading, "BAND_NBYTES", band_nbytes)
    whole, record = dcptool.open(FOREIGN / "xver_t2130").read(FQN), first_record(source)
    one = (Literal(b"head"), rows(0, 15), crcs_so_far(1), Literal(b"tail"))
    other = (Verbatim(record), rows(15, 37), crcs_so_far(2))
    files = [OutputFile(name, sum(part.nbytes for part in parts), parts) for name, parts in (("1", one), ("2", other))]
    target = Memory()
    report = copy(source, [files], target, threads)
    upper, carried, lower = whole[:15].tobytes(), whole[:10].tobytes(), whole[15:].tobytes()
    crcs = [zlib.crc32(data).to_bytes(4, "little") for data in (upper, carried, lower)]
    assert bytes(target.files["1"].data) == b"head" + upper + crcs[0] + b"tail"
    assert bytes(target.files["2"].data) == carried + lower + crcs[1] + crcs[2]
    assert {sink.state for sink in target.files.values()} == {"finished"}
    assert report == (sum(file.nbytes for file in files), (), (), frozenset(), {})
    assert source.source.nbytes == whole.nbytes + len(carried)


@pytest.mark.torchfree
def test_a_record_read_in_parts_is_checked_once_by_whoever_has_all_reports(source):
    reports = [
        copy(source, [[OutputFile("f", part.nbytes, (part,))]], Memory(), 1, shared=True)
        for part in (rows(0, 4), rows(4, 10))
    ]
    partly_read = [found for report in reports for found in report.partly_read]
    assert [(found.fqn, found.chunk_index) for found in partly_read] == [(FQN, 0)] * 2
    before = source.source.nbytes
    assert settle(source, partly_read, 1) == ()
    assert source.source.nbytes == before  # the pieces are all of it
    assert settle(source, partly_read[:1], 1) == ()
    assert source.source.nbytes == before + 10 * 9 * 4  # there is a piece missing
    wrong = [found._replace(record=found.record._replace(crc32=found.record.crc32 ^ 1)) for found in partly_read]
    assert {finding.kind for finding in settle(source, wrong, 1)} == {"damaged-item"}


@pytest.mark.torchfree
def test_a_part_alone_is_settled_at_once(source):
    part = rows(0, 4)
    report = copy(source, [[OutputFile("f", part.nbytes, (part,))]], Memory(), 1)
    assert report.partly_read == ()
    assert source.source.nbytes == (4 + 10) * 9 * 4


@pytest.mark.torchfree
def test_what_is_damaged_is_told_and_not_finished(source):
    record = first_record(source)
    part = Verbatim(record._replace(crc32=record.crc32 ^ 1))
    target = Memory()
    report = copy(source, [[OutputFile("f", part.nbytes, (part,))]], target, 1)
    assert [finding.kind for finding in report.failures] == ["damaged-item"]
    assert target.files["f"].state == "aborted"


@pytest.mark.torchfree
@pytest.mark.parametrize(("threads", "n_ahead"), [(1, 1), (4, 7)])
def test_no_more_parts_are_taken_than_are_read_ahead(source, threads, n_ahead):
    taken, most = [], [0]

    def parts():
        for index in range(50):
            taken.append(index)
            most[0] = max(most[0], len(taken) - len(target.files["f"].data))
            yield Literal(b"x")

    target = Memory()
    copy(source, [[OutputFile("f", 50, parts())]], target, threads)
    assert most == [n_ahead + 1]


@pytest.mark.torchfree
def test_a_band_is_handed_out_by_columns_too(source):
    whole = dcptool.open(FOREIGN / "xver_t2130").read(FQN)
    parts = [Fill(FQN, (0, first), (37, 3), "bfloat16", 37 * 3 * 2) for first in (0, 3, 6)]
    target = Memory()
    copy(source, [[OutputFile(str(index), part.nbytes, (part,)) for index, part in enumerate(parts)]], target, 1)
    import ml_dtypes

    found = [np.frombuffer(target.files[str(i)].data, ml_dtypes.bfloat16).reshape(37, 3) for i in range(3)]
    assert (np.concatenate(found, axis=1) == whole.astype(ml_dtypes.bfloat16)).all()
    assert source.source.nbytes == whole.nbytes
