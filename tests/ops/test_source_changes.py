"""A checkpoint that is overwritten while it is read is half of one save and half of another: nothing is made of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import dcptool
from dcptool.errors import StorageError
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State
from tests.conftest import FOREIGN, OLD

SOURCE = FOREIGN / "xver_t2130"


@pytest.fixture
def step(tmp_path):
    folder = Path(shutil.copytree(SOURCE, tmp_path / "step_1"))
    for file in folder.iterdir():
        os.utime(file, (OLD, OLD))
    return folder


def rewritten(folder, file: str) -> None:
    """Put another save's file of the same size in place, as an overwrite does."""
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data)


def during(monkeypatch, module, function: str, act) -> None:
    """Do something once a function of a module has done its work."""
    original = getattr(module, function)

    def wrapped(*args, **more):
        result = original(*args, **more)
        act()
        return result

    monkeypatch.setattr(module, function, wrapped)


@pytest.mark.torchfree
@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_k_convert(step, tmp_path, monkeypatch, file, to):
    import dcptool.ops.convert.member as module

    during(monkeypatch, module, "copy", lambda: rewritten(step, file))
    with pytest.raises(StorageError, match=f"{file} changed while it was read, nothing was written"):
        dcptool.convert(step, tmp_path / "out", to)
    assert sorted(os.listdir(tmp_path)) == ["step_1"]


@pytest.mark.torchfree
def test_k_convert_of_a_file(step, tmp_path, monkeypatch):
    import dcptool.ops.convert.member as module

    dcptool.convert(step, tmp_path / "a.pt", "torch")
    os.utime(tmp_path / "a.pt", (OLD, OLD))
    (tmp_path / "b.pt").write_bytes(b"beside it, nobody minds")
    during(monkeypatch, module, "copy", lambda: os.utime(tmp_path / "b.pt"))
    dcptool.convert(tmp_path / "a.pt", tmp_path / "c", "dcp")
    during(monkeypatch, module, "copy", lambda: os.utime(tmp_path / "a.pt"))
    with pytest.raises(StorageError, match=r"a\.pt changed while it was read"):
        dcptool.convert(tmp_path / "a.pt", tmp_path / "d", "dcp")
    assert not (tmp_path / "d").exists()


@pytest.mark.torchfree
def test_a_file_that_belongs_to_nobody_may_come_meanwhile(step, tmp_path, monkeypatch):
    import dcptool.ops.convert.member as module

    during(monkeypatch, module, "copy", lambda: (step / "log.txt").write_text("x"))
    assert dcptool.convert(step, tmp_path / "out.pt", "torch").published


def test_k_reshard(step, tmp_path, monkeypatch):
    import dcptool.ops.reshard.member as module

    during(monkeypatch, module, "copy", lambda: rewritten(step, "__0_0.distcp"))
    with pytest.raises(StorageError, match=r"__0_0\.distcp changed while it was read"):
        dcptool.reshard(step, tmp_path / "out", dcptool.ReshardOptions(world_size=2, workers=1))
    assert sorted(os.listdir(tmp_path)) == ["step_1"]


@pytest.mark.torchfree
@pytest.mark.parametrize("checksums", [False, True])
def test_k_mark(step, monkeypatch, checksums):
    import dcptool.ops.mark as module

    during(monkeypatch, module, "judge", lambda: rewritten(step, "__0_0.distcp"))
    with pytest.raises(StorageError, match="changed while it was read, not marked"):
        dcptool.mark_complete(step, checksums=checksums)
    assert not (step / "_COMPLETE").exists()


@pytest.mark.torchfree
def test_k_verify(step, monkeypatch):
    import dcptool.ops.verify.parts as module

    during(monkeypatch, module, "_check", lambda: rewritten(step, "__0_0.distcp"))
    verdict = judge(step)
    assert verdict.state is State.IN_PROGRESS
    assert "__0_0.distcp changed while it was looked at" in verdict.reason


def test_what_a_store_calls_another_version(s3_url):
    import fsspec

    filesystem = fsspec.filesystem("s3")
    filesystem.put(f"{SOURCE}/", s3_url, recursive=True)
    checkpoint = dcptool.open(s3_url)
    assert checkpoint.changed() == ""
    path = f"{s3_url}/__0_0.distcp"
    data = filesystem.cat_file(path)
    filesystem.pipe_file(path, data[:-1] + b"\x01")  # of the same length
    assert checkpoint.changed() == "__0_0.distcp"
