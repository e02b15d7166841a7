"""Data files kept several times, in `copy-0/`, `copy-1/`, … below the metadata that names them without folder."""

from __future__ import annotations

import os
import shutil

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.ops.verify.verdict import State
from tests.conftest import FOREIGN, OLD, run
from tests.damage import flip_byte, truncate

SOURCE = FOREIGN / "xver_t2130"


@pytest.fixture
def copies(tmp_path):
    """A checkpoint whose data files are in two folders of copies."""
    folder = tmp_path / "run" / "step_10"
    for name in ("copy-0", "copy-1"):
        shutil.copytree(SOURCE, folder / name)
        (folder / name / ".metadata").rename(folder / ".metadata")
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    return folder


def judged(folder, level=Level.DEEP):
    (verdict,) = dcptool.verify(folder, dcptool.VerifyOptions(level=level)).verdicts
    return verdict


def test_the_reader_finds_them(copies, tmp_path):
    assert dcptool.compare(copies, SOURCE).equal
    for level in Level:
        verdict = judged(copies, level)
        assert (verdict.state, verdict.reason) == (State.COMPLETE, "")
        assert [part.name for part in verdict.parts] == [""]
        assert "data files are read from copy-0/" in [finding.message for finding in verdict.findings]
    assert dcptool.open(copies).world_size == dcptool.open(SOURCE).world_size
    assert run("latest", copies.parent).stdout.strip() == str(copies)
    for to, path in (("torch", tmp_path / "o.pt"), ("dcp", tmp_path / "o")):
        assert run("convert", "--to", to, "--check", copies, path).returncode == 0
    assert dcptool.compare(tmp_path / "o", SOURCE).equal
    assert run("mark", copies).returncode == 0
    assert judged(copies).state is State.COMPLETE


def test_the_longest_copy_counts_and_what_no_copy_has_is_missing(copies):
    name = "__1_0.distcp"
    truncate(copies / "copy-0" / name, 100)
    verdict = judged(copies)
    assert verdict.state is State.COMPLETE
    assert "data files are read from copy-0/, copy-1/" in [finding.message for finding in verdict.findings]
    (copies / "copy-0" / name).unlink()
    assert judged(copies).state is State.COMPLETE
    (copies / "copy-1" / name).unlink()
    verdict = judged(copies)
    assert verdict.state is State.INCOMPLETE
    assert verdict.reason.startswith("__1_0.distcp (rank 1) is missing")


def test_a_changed_bit_in_what_is_read_is_found(copies):
    tensors = dcptool.open(copies).tensors.values()
    item = next(chunk.item for tensor in tensors for chunk in tensor.chunks if chunk.item and 0 not in chunk.sizes)
    name = f"copy-0/{item.file}"
    flip_byte(copies / name, item.byte_offset + 70)
    assert judged(copies).state is State.DAMAGED


def test_no_copy_of_a_checkpoint_that_has_none(copies):
    """Without metadata above them they are what they look like; with files beside the metadata, these count."""
    (copies / ".metadata").rename(copies / "copy-0" / ".metadata")
    assert [part.name for part in judged(copies).parts] == ["copy-0"]
    (copies / "copy-0" / ".metadata").rename(copies / ".metadata")
    for file in (copies / "copy-0").iterdir():
        shutil.copy(file, copies)
    assert "in-copies" not in [finding.kind for finding in judged(copies).findings]


def test_torchs_own_reader_is_not_asked(copies):
    done = run("verify", "--load", copies)
    assert done.returncode == 3
    assert "copy-0/, where torch's FileSystemReader does not look" in done.stderr
