"""List, stat and ranged read: one suite for a local folder and memory://; what a file system can do to a reader."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
import zipfile

import fsspec
import pytest

from dcptool.errors import CheckpointNotFoundError, StorageError, UnsupportedError
from dcptool.storage import DirEntry, FsspecStorage, base_name, join, local, locate
from tests.conftest import ROOT

CONTENT = {"a.bin": bytes(range(256)) * 8, "empty": b"", "sub/b.bin": b"inside", ".metadata": b"hidden"}


@pytest.fixture(params=["local", "memory", "file"])
def root(request, tmp_path):
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}"
        filesystem, base = fsspec.url_to_fs(url)
        for name, data in CONTENT.items():
            filesystem.pipe_file(f"{base}/{name}", data)
        yield url
        filesystem.rm(base, recursive=True)
        return
    for name, data in CONTENT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    yield f"file://{tmp_path}" if request.param == "file" else str(tmp_path)


@pytest.mark.torchfree
class TestEveryStorage:
    def test_listing_is_one_level_sorted_and_relative(self, root):
        storage, file = locate(root)
        assert file is None
        expected = [DirEntry(".metadata", 6, False), DirEntry("a.bin", 2048, False), DirEntry("empty", 0, False)]
        assert [entry._replace(mtime=None, version=None) for entry in storage.entries()] == [
            *expected,
            DirEntry("sub", 0, True),
        ]
        assert [entry._replace(mtime=None, version=None) for entry in storage.entries("sub")] == [
            DirEntry("sub/b.bin", 6, False)
        ]
        assert all(abs(entry.mtime - time.time()) < 600 for entry in storage.entries() if not entry.is_dir)

    def test_ranges(self, root):
        storage = locate(root).storage
        assert storage.read("a.bin", 0, 2048) == CONTENT["a.bin"]
        assert storage.read("a.bin", 250, 10) == CONTENT["a.bin"][250:260]
        assert storage.read("sub/b.bin", 2, 3) == b"sid"
        assert storage.read("empty", 0, 0) == b""
        buffer = bytearray(5)
        storage.read_into("a.bin", 2043, memoryview(buffer))
        assert buffer == CONTENT["a.bin"][-5:]

    def test_small_files_are_written_whole_and_deleted(self, root):
        storage = locate(root).storage
        storage.write("sub/new", b"first")
        storage.write("sub/new", b"second")
        assert storage.read("sub/new", 0, 6) == b"second"
        assert [entry.name for entry in storage.entries("sub")] == ["sub/b.bin", "sub/new"]  # nothing temporary
        storage.delete("sub/new")
        storage.delete("sub/new")
        assert storage.size("sub/new") is None
        storage.delete_folder("sub")
        storage.delete_folder("sub")
        assert [entry.name for entry in storage.entries()] == [".metadata", "a.bin", "empty"]

    @pytest.mark.parametrize(("byte_offset", "nbytes"), [(2040, 9), (2048, 1), (5000, 3), (0, 1 << 40)])
    def test_a_range_beyond_the_end_is_an_error_naming_the_file(self, root, byte_offset, nbytes):
        storage = locate(root).storage
        with pytest.raises(StorageError, match=r"a\.bin ends at byte|a\.bin: "):
            storage.read("a.bin", byte_offset, nbytes)

    def test_sizes(self, root):
        storage = locate(root).storage
        assert storage.size("a.bin") == 2048
        assert storage.size("empty") == 0
        assert storage.size("sub") is None
        assert storage.size("nothing") is None

    def test_a_file_is_located_in_its_folder(self, root):
        storage, file = locate(f"{root}/sub/b.bin")
        assert file == "b.bin"
        assert storage.read(file, 0, 6) == b"inside"

    def test_nothing_there(self, root):
        with pytest.raises(CheckpointNotFoundError, match="nowhere"):
            locate(f"{root}/nowhere")
        with pytest.raises(CheckpointNotFoundError):
            locate(root).storage.entries("nowhere")
        with pytest.raises(StorageError, match="nowhere"):
            locate(root).storage.read("nowhere", 0, 1)


@pytest.mark.torchfree
def test_a_fifo_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / ".metadata")
    storage = locate(tmp_path).storage
    assert storage.size(".metadata") is None
    with pytest.raises(StorageError, match="not a regular file"):
        storage.read(".metadata", 0, 1)


@pytest.mark.torchfree
def test_many_files_do_not_use_up_descriptors(tmp_path):
    storage = locate(tmp_path).storage
    for index in range(300):
        (tmp_path / str(index)).write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    for index in range(300):
        assert storage.read(str(index), 0, 1) == b"x"
    assert len(os.listdir("/proc/self/fd")) <= before + 64
    storage.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert storage.read("7", 0, 1) == b"x"


@pytest.mark.torchfree
@pytest.mark.parametrize("path", ["x" * 5000, "a/\0b", "/dev/null/x"])
def test_impossible_paths(path):
    with pytest.raises(CheckpointNotFoundError):
        locate(path)


@pytest.mark.torchfree
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root to become somebody else")
def test_no_permission_is_said_so(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and len(folder.parts) > 2:
            folder.chmod(0o755)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / ".metadata").write_bytes(b"secret")
    (tmp_path / "ckpt" / ".metadata").chmod(0)
    code = f"""if True:
        import os, sys
        sys.path.insert(0, {str(ROOT)!r})
        import dcptool, dcptool.errors
        dcptool.open  # imported while it can be read
        os.setuid(65534)
        try:
            dcptool.open({str(tmp_path / "ckpt")!r})
        except dcptool.errors.StorageError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.splitlines()[0]
        == f"{tmp_path}/ckpt/.metadata: permission denied; it needs read access, and its folders search access"
    )


@pytest.mark.torchfree
def test_an_unknown_kind_of_url_names_what_to_install():
    with pytest.raises(UnsupportedError, match="nosuch"):
        locate("nosuch://bucket/run")


def test_s3_is_listed_and_read_in_ranges(s3_url):
    filesystem, base = fsspec.url_to_fs(s3_url)
    for name, data in CONTENT.items():
        filesystem.pipe_file(f"{base}/{name}", data)
    filesystem.invalidate_cache()
    suite = TestEveryStorage()
    suite.test_listing_is_one_level_sorted_and_relative(s3_url)
    suite.test_ranges(s3_url)
    suite.test_sizes(s3_url)
    suite.test_a_file_is_located_in_its_folder(s3_url)
    suite.test_nothing_there(s3_url)
    for byte_offset, nbytes in [(2040, 9), (2048, 1), (5000, 3)]:
        suite.test_a_range_beyond_the_end_is_an_error_naming_the_file(s3_url, byte_offset, nbytes)


def test_what_others_write_to_an_object_store_is_seen(s3_url):
    import dcptool
    from tests.conftest import FOREIGN

    filesystem, base = fsspec.url_to_fs(s3_url)
    for file in (FOREIGN / "w_nodist").iterdir():
        filesystem.pipe_file(f"{base}/step_1/{file.name}", file.read_bytes())
    assert [step.state for step in dcptool.summarize(s3_url).steps] == ["complete"]
    other = type(filesystem)(skip_instance_cache=True)
    for file in (FOREIGN / "w_nodist").iterdir():
        other.pipe_file(f"{base}/step_2/{file.name}", file.read_bytes())
    other.rm_file(f"{base}/step_1/__0_0.distcp")
    assert [step.state for step in dcptool.summarize(s3_url).steps] == ["incomplete", "complete"]
    assert dcptool.open(f"{s3_url}/step_2").read("w", (1, 0), (1, 5)).shape == (1, 5)


def refuse(*_):
    raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("advise", ["works", "fails", "is not there"])
def test_large_local_files_are_what_was_written_whatever_the_system_thinks_of_writing_early(
    tmp_path, monkeypatch, advise
):
    monkeypatch.setattr(local, "WRITEBACK_NBYTES", 1 << 20)
    told = []
    if advise == "works":
        real = os.posix_fadvise
        monkeypatch.setattr(os, "posix_fadvise", lambda *range_: told.append(range_[1:3]) or real(*range_))
    elif advise == "fails":
        monkeypatch.setattr(os, "posix_fadvise", refuse)
    else:
        monkeypatch.delattr(os, "posix_fadvise")
    sink = locate(str(tmp_path)).storage.create("large")
    data = os.urandom(5 << 19)
    for start in range(0, len(data), 300_000):
        sink.write(memoryview(data)[start : start + 300_000])
    sink.finish()
    assert (tmp_path / "large").read_bytes() == data
    if advise == "works":
        assert [start for start, _ in told] == [0, *(start + count for start, count in told[:-1])]
        assert told[-1][0] + told[-1][1] > len(data) - (1 << 20) - 300_000


class _PlainServer:
    """A file system as fsspec's for HTTP shows a server that knows neither lengths nor ranges."""

    def info(self, path):
        return {"name": path, "type": "file", "size": None}

    def cat_file(self, path, start, end):
        return b"all of the file, whatever was asked for"


def test_a_server_without_lengths_or_ranges_is_refused_by_name():
    storage = FsspecStorage(_PlainServer(), "http://host/run", "http://host/run")
    with pytest.raises(StorageError, match=r"^http://host/run/model\.pt: the server does not say how long it is"):
        storage.size("model.pt")
    with pytest.raises(StorageError, match=r"^http://host/run/model\.pt: the server sends the whole file"):
        storage.read("model.pt", 0, 4)


@pytest.mark.parametrize("head", ["zip://run::", "zip://run::file://", "simplecache::file://"])
def test_paths_in_chained_urls_stay_chained(head, tmp_path):
    if head.startswith("zip"):
        with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
            archive.writestr("run/model.bin", b"inside")
        folder = f"{head}{tmp_path}/run.zip"
        file = folder.replace("zip://run", "zip://run/model.bin")
    else:
        (tmp_path / "model.bin").write_bytes(b"inside")
        folder, file = f"{head}{tmp_path}", f"{head}{tmp_path}/model.bin"
    location = locate(file)
    assert (location.path, location.storage.root, location.file) == (file, folder, "model.bin")
    assert (join(folder, "model.bin"), base_name(file)) == (file, "model.bin")
    assert location.storage.read("model.bin", 1, 3) == b"nsi"
    with pytest.raises(StorageError, match=f"^{re.escape(join(folder, 'other'))}: no such file"):
        location.storage.read("other", 0, 1)


@pytest.mark.filterwarnings("error")
def test_a_storage_that_a_signal_left_half_made_is_silent(capsys):
    half = local.LocalStorage.__new__(local.LocalStorage)
    del half
    assert capsys.readouterr().err == ""
