"""Copies to, from and between object stores: markers last, nothing that looks complete before."""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from pathlib import Path

import fsspec
import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import ItemError, OutputExistsError, StorageError
from dcptool.ops.copy.copy import copy_steps
from dcptool.ops.copy.step import CopyOptions
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.storage.remote import FsspecStorage
from tests.conftest import FOREIGN, OLD, run
from tests.damage import flip_byte

SOURCE = FOREIGN / "xver_t2130"
pytestmark = pytest.mark.torchfree
S3_MIN_PART = 5 << 20


@pytest.fixture
def step(tmp_path) -> Path:
    folder = Path(shutil.copytree(SOURCE, tmp_path / "run" / "step_1"))
    (folder / "data").mkdir()
    (folder / "data" / "order.txt").write_text("3 1 2")
    (folder / "empty").touch()
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    return folder


@pytest.fixture(params=["s3", "memory"])
def url(request) -> str:
    """A place in an object store that takes parts in any order, and in one that takes bytes front to back only."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_url')}/step_1"
    return f"memory://{uuid.uuid4().hex}/run/step_1"


def store_contents(url: str) -> dict[str, bytes]:
    filesystem, path = fsspec.url_to_fs(url)
    filesystem.invalidate_cache()
    found = filesystem.find(path, withdirs=False)
    return {name[name.index(path.strip("/")) + len(path.strip("/")) + 1 :]: filesystem.cat_file(name) for name in found}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_there_and_back(step, tmp_path, url):
    done = copy_steps(step, url)
    assert done.good
    assert done.path == url
    copied = store_contents(url)
    assert copied.keys() == {*contents(step), "_COMPLETE"}  # neither _SAVING nor a journal is left
    marker = copied.pop("_COMPLETE")
    assert copied == contents(step)
    assert dcptool.verify(url, VerifyOptions(Level.DEEP)).verdicts[0].state is State.COMPLETE
    back = copy_steps(url, tmp_path / "back")
    assert contents(tmp_path / "back") == {**contents(step), "_COMPLETE": marker}
    assert back.steps[0].n_checked == done.steps[0].n_checked
    other = f"{url}-other"
    copy_steps(url, other)
    assert store_contents(other) == {**copied, "_COMPLETE": marker}
    assert copy_steps(step, url).steps[0].state == "there"


def test_large_files_go_in_parts(tmp_path, s3_url, monkeypatch):
    """A file of three parts and a bit, uploaded by several requests, and read back by several."""
    monkeypatch.setattr("dcptool.storage.parts.REMOTE_PART_NBYTES", S3_MIN_PART)
    step = Path(shutil.copytree(SOURCE, tmp_path / "step_1"))
    (step / "large.bin").write_bytes(os.urandom(3 * S3_MIN_PART + 12345))
    seen: list[tuple[str, int]] = []
    original = FsspecStorage.call_s3

    def call_s3(self, method, name, **more):
        seen.append((method, len(more.get("Body", b""))))
        return original(self, method, name, **more)

    monkeypatch.setattr(FsspecStorage, "call_s3", call_s3)
    done = copy_steps(step, f"{s3_url}/step_1", CopyOptions(threads=3))
    assert sorted(n for method, n in seen if method == "upload_part") == [12345, *[S3_MIN_PART] * 3]
    assert done.steps[0].memory_nbytes == 8 * S3_MIN_PART + 3 * S3_MIN_PART
    copy_steps(f"{s3_url}/step_1", tmp_path / "back")
    assert (tmp_path / "back" / "large.bin").read_bytes() == (step / "large.bin").read_bytes()


def test_what_makes_it_complete_comes_last(step, s3_url, monkeypatch):
    """At every moment before the marker the place is incomplete to whoever looks, and says so."""
    url = f"{s3_url}/step_1"
    order: list[str] = []
    states = []
    lock = threading.Lock()
    original = FsspecStorage.call_s3

    def call_s3(self, method, name, **more):
        result = original(self, method, name, **more)
        with lock:
            order.append(name)
            if len(order) % 3 == 1 or name == ".metadata":
                states.append(dcptool.verify(url).verdicts[0].state)
        return result

    monkeypatch.setattr(FsspecStorage, "call_s3", call_s3)
    written = []
    write = FsspecStorage.write
    monkeypatch.setattr(
        FsspecStorage, "write", lambda self, name, data: (written.append((name, len(order))), write(self, name, data))
    )
    copy_steps(step, url)
    assert order[-1] == ".metadata"
    assert written[-1] == ("_COMPLETE", len(order))
    assert written[1] == ("_SAVING", 0)
    assert len(states) > 2
    assert {*states} <= {State.INCOMPLETE, State.IN_PROGRESS}


def test_damage_leaves_nothing(step, url):
    payload = dcptool.open(step)
    entry = next(entry for entry in payload.tensors.values() if len(entry.chunks))
    record = payload.payload(entry, entry.chunks[0]).record
    flip_byte(step / record.item.file, record.item.byte_offset + record.byte_offset)
    with pytest.raises(ItemError, match="CRC32"):
        copy_steps(step, url)
    assert store_contents(url) == {}


def test_something_else_is_there(step, url):
    filesystem, path = fsspec.url_to_fs(url)
    filesystem.pipe_file(f"{path}/notes.txt", b"mine")
    for _ in range(2):
        with pytest.raises(OutputExistsError, match="is there already"):
            copy_steps(step, url)
    assert store_contents(url) == {"notes.txt": b"mine"}


def test_somebody_else_writes_there_meanwhile(step, url):
    filesystem, path = fsspec.url_to_fs(url)
    with pytest.raises(StorageError, match=r"notes\.txt is no file of this copy"):
        copy_steps(step, url, progress=lambda n: filesystem.pipe_file(f"{path}/notes.txt", b"mine"))
    there = store_contents(url)
    assert "_COMPLETE" not in there
    assert ".metadata" not in there
    assert "_SAVING" in there
    filesystem.rm_file(f"{path}/notes.txt")
    assert copy_steps(step, url).good


def test_a_file_is_replaced_there_meanwhile(step, s3_url, monkeypatch):
    """Of the same length, which only what the store calls its content tells."""
    url = f"{s3_url}/step_1"
    filesystem, path = fsspec.url_to_fs(url)
    before = dcptool.ops.copy.step._Copying._publish

    def publish(self, place):
        filesystem.pipe_file(f"{path}/data/order.txt", b"1 2 3")
        before(self, place)

    monkeypatch.setattr("dcptool.ops.copy.step._Copying._publish", publish)
    with pytest.raises(StorageError, match=r"data/order\.txt is not what was copied"):
        copy_steps(step, url)
    assert "_COMPLETE" not in store_contents(url)


def test_another_source_is_not_mixed_in(step, tmp_path, url):
    filesystem, path = fsspec.url_to_fs(url)
    with pytest.raises(StorageError):
        copy_steps(step, url, progress=lambda n: filesystem.pipe_file(f"{path}/notes.txt", b"mine"))
    filesystem.rm_file(f"{path}/notes.txt")
    other = Path(shutil.copytree(FOREIGN / "ddp", tmp_path / "other"))
    with pytest.raises(OutputExistsError, match=r"is there already|holds an unfinished copy of"):
        copy_steps(other, url)
    assert copy_steps(step, url).good


def test_a_run_and_json(step, s3_url):
    done = run("copy", "--json", step.parent, f"{s3_url}/archive")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["is_run"]
    assert [found["state"] for found in document["steps"]] == ["copied"]
    assert dcptool.find_latest(f"{s3_url}/archive").path == f"{s3_url}/archive/step_1"


def test_a_place_without_a_name(step, s3_url):
    with pytest.raises(StorageError, match="names no folder in an object store"):
        copy_steps(step, "s3://")
