"""`verify --load`: what the installed torch can load of real, damaged and hostile checkpoints."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checkpoint.findings import Severity  # noqa: E402
from dcptool.errors import DcptoolError, StorageError, UnsupportedError  # noqa: E402
from dcptool.ops.verify import torch_load  # noqa: E402
from dcptool.ops.verify.torch_load import load_with_torch  # noqa: E402
from dcptool.ops.verify.torch_reader import far_corner  # noqa: E402
from tests.conftest import WHOLE, part, run  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402

CANNOT_READ_METADATA = {"fsspec_t222", *(["py313_t2130"] if sys.version_info < (3, 13) else [])}
CANNOT_LOAD = {"mesh2d_strided_uneven", "w_no_collectives", "w_safetensors"}
LOADABLE = [
    part
    for part in WHOLE
    if part.name not in CANNOT_READ_METADATA | CANNOT_LOAD
    and not part.about["name"].startswith(("hf_", "legacy_stream"))
]


def edit_metadata(folder: Path, edit: Callable[[Any], None]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def failed(report: torch_load.LoadReport) -> set[str | None]:
    assert {finding.severity for finding in report.findings} <= {Severity.ERROR}
    assert {finding.kind for finding in report.findings} <= {"torch-cannot-load"}
    assert all("\n" not in finding.message for finding in report.findings)
    return {finding.fqn for finding in report.findings}


@pytest.fixture
def allocated(monkeypatch):
    """The bytes of the float32 tensors torch.empty gave: of those alive [now, at most], and of each.

    The process group uses it too, for the bytes it sends, and torch.load for tensors of no elements.
    """
    live, each = [0, 0], []
    empty = torch.empty

    def counted(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        nbytes = tensor.numel() * tensor.itemsize
        if tensor.dtype is torch.float32 and nbytes:
            live[0] += nbytes
            live[1] = max(live)
            weakref.finalize(tensor, lambda: live.__setitem__(0, live[0] - nbytes))
            each.append(nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    return live, each


@pytest.mark.parametrize("part", LOADABLE, ids=lambda part: part.name)
def test_torch_loads_real_checkpoints(part):
    nbytes = [found["nbytes"] for found in part.expected.values() if found["kind"] == "tensor"]
    n_objects = len(part.expected) - len(nbytes)
    report = load_with_torch(dcptool.open(part.path), trust=True)
    assert report == (torch.__version__, len(nbytes), n_objects, 0, sum(nbytes), ())


@pytest.mark.parametrize("name", ["dtypes_keys_t2130", "mesh2d_fsdp_tp", "hsdp", "fsdp1_t222_flat", "w_zstd"])
def test_torch_loads_real_checkpoints_an_element_of_each_chunk_at_a_time(name):
    checkpoint = dcptool.open(part(name).path)
    nbytes = sum(entry.nbytes for entry in checkpoint.tensors.values())
    report = load_with_torch(checkpoint, max_nbytes=1)
    assert report[1:] == (len(checkpoint.tensors), 0, len(checkpoint.objects), nbytes, ())


@pytest.mark.parametrize("step", ["step_200", "step_300"])
@pytest.mark.parametrize("max_nbytes", [1 << 20, 64])
def test_damaged_tensors_are_named(step, max_nbytes):
    checkpoint = dcptool.open(part(f"run_crashed/ckpt/{step}").path)
    broken = set()
    for fqn in checkpoint.tensors:
        try:
            checkpoint.read(fqn)
        except DcptoolError:
            broken.add(fqn)
    report = load_with_torch(checkpoint, max_nbytes=max_nbytes)
    assert failed(report) == broken != set()
    assert report.n_tensors == len(checkpoint.tensors) - len(broken)
    assert report.nbytes == sum(entry.nbytes for fqn, entry in checkpoint.tensors.items() if fqn not in broken)


def test_damaged_objects_are_named():
    checkpoint = dcptool.open(part("run_crashed/ckpt/step_200").path)
    broken = {fqn for fqn, entry in checkpoint.objects.items() if entry.item.file == "__1_0.distcp"}
    report = load_with_torch(checkpoint, trust=True)
    assert failed(report) >= broken != set()
    assert report.n_objects == len(checkpoint.objects) - len(broken)
    assert [finding.fqn for finding in report.findings] == [fqn for fqn in checkpoint if fqn in failed(report)]


@pytest.mark.parametrize("max_nbytes", [1 << 20, 16])
def test_boxes_that_disagree_with_the_data_are_reported(max_nbytes):
    report = load_with_torch(dcptool.open(part("mesh2d_strided_uneven").path), max_nbytes=max_nbytes)
    assert failed(report) == {"col.weight", "col.bias"}
    assert report.n_tensors == 3


def test_safetensors_serialization_cannot_be_read_back():
    checkpoint = dcptool.open(part("w_safetensors").path)
    report = load_with_torch(checkpoint)
    assert failed(report) == set(checkpoint.tensors)
    assert "Unsupported operand" in report.findings[0].message  # not torch's advice to load it without safety
    assert report[1:5] == (0, 0, 0, 0)


@pytest.mark.parametrize("name", sorted(CANNOT_READ_METADATA))
def test_metadata_torch_cannot_read_is_one_finding(name):
    (finding,) = load_with_torch(dcptool.open(part(name).path), trust=True).findings
    assert (finding.kind, finding.file) == ("torch-cannot-read-metadata", ".metadata")
    assert torch.__version__ in finding.message


def test_rank_local_metadata_is_one_finding():
    report = load_with_torch(dcptool.open(part("w_no_collectives").path))
    assert [finding.severity for finding in report.findings] == [Severity.WARNING]  # it is not damaged
    assert "rank-local metadata" in report.findings[0].message
    assert "torch loads it only at the same number of ranks" in report.findings[0].message
    assert report[1:5] == (0, 0, 3, 0)


class Evil:
    """Makes a folder and prints when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return exec, (f"import os; os.mkdir({self.path!r}); print('ran')",)


def test_objects_are_executed_only_with_trust(tmp_path, capfd):
    dcp.save({"w": torch.ones(2), "x": Evil(tmp_path / "ran"), "n": 3}, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = dcptool.open(tmp_path / "c")
    assert load_with_torch(checkpoint)[1:] == (1, 0, 2, 8, ())
    assert not (tmp_path / "ran").exists()
    assert load_with_torch(checkpoint, trust=True)[1:] == (1, 2, 0, 8, ())
    assert (tmp_path / "ran").exists()
    report = load_with_torch(checkpoint, trust=True)  # now mkdir fails
    assert failed(report) == {"x"}
    assert "FileExistsError" in report.findings[0].message
    assert report.n_objects == 1
    assert capfd.readouterr() == ("", "")


def test_metadata_that_names_more_than_dcp_writes_is_given_to_torch_only_with_trust(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = tmp_path / "c" / ".metadata"
    path = str(tmp_path / "ran").encode()
    call = b"cos\nmkdir\n(X" + len(path).to_bytes(4, "little") + path + b"tR0"  # and drop the result
    file.write_bytes(b"\x80\x04" + call + file.read_bytes()[2:])
    checkpoint = dcptool.open(tmp_path / "c")
    (finding,) = load_with_torch(checkpoint).findings
    assert (finding.kind, finding.severity) == ("unsafe-metadata", Severity.ERROR)
    assert "os.mkdir" in finding.message
    assert not (tmp_path / "ran").exists()
    assert load_with_torch(checkpoint, trust=True)[1:] == (1, 0, 0, 8, ())
    assert (tmp_path / "ran").exists()


def test_code_in_the_item_of_a_tensor_is_not_executed_even_with_trust(tmp_path):
    dcp.save({"w": torch.ones(2), "x": Evil(tmp_path / "ran")}, checkpoint_id=tmp_path / "c", no_dist=True)

    def swap(metadata):
        items = {index.fqn: index for index in metadata.storage_data}
        metadata.storage_data[items["w"]] = metadata.storage_data.pop(items["x"])
        del metadata.state_dict_metadata["x"]

    edit_metadata(tmp_path / "c", swap)
    report = load_with_torch(dcptool.open(tmp_path / "c"), trust=True)
    assert failed(report) == {"w"}
    assert "exec" in report.findings[0].message
    assert not (tmp_path / "ran").exists()


def test_files_outside_the_folder_are_not_given_to_torch(tmp_path):
    dcp.save({"w": torch.ones(2), "v": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    shutil.copy(tmp_path / "c" / "__0_0.distcp", tmp_path / "outside")

    def move(metadata):
        next(info for index, info in metadata.storage_data.items() if index.fqn == "w").relative_path = "../outside"

    edit_metadata(tmp_path / "c", move)
    report = load_with_torch(dcptool.open(tmp_path / "c"))
    assert failed(report) == {"w"}
    assert "outside the checkpoint" in report.findings[0].message
    assert report.n_tensors == 1


@pytest.mark.parametrize("max_nbytes", [1 << 20, 8])
def test_a_shape_that_is_not_the_stored_one_is_named(tmp_path, max_nbytes):
    dcp.save({f"w{i}": torch.ones(5) for i in range(9)}, checkpoint_id=tmp_path / "c", no_dist=True)

    def grow(metadata):
        record = metadata.state_dict_metadata["w4"]
        record.size = torch.Size([6])
        record.chunks[0] = ChunkStorageMetadata(torch.Size([0]), torch.Size([6]))

    edit_metadata(tmp_path / "c", grow)
    report = load_with_torch(dcptool.open(tmp_path / "c"), max_nbytes=max_nbytes)
    assert failed(report) == {"w4"}
    assert (report.n_tensors, report.nbytes) == (8, 160)


def test_torch_casts_a_dtype_that_is_not_the_stored_one_without_a_word(tmp_path):
    dcp.save({"w": torch.ones(5)}, checkpoint_id=tmp_path / "c", no_dist=True)

    def narrow(metadata):
        metadata.state_dict_metadata["w"].properties.dtype = torch.bfloat16

    edit_metadata(tmp_path / "c", narrow)
    assert load_with_torch(dcptool.open(tmp_path / "c"))[1:] == (1, 0, 0, 10, ())


def test_a_place_the_metadata_lacks_is_named(tmp_path):
    dcp.save({"w": torch.ones(5), "n": 1}, checkpoint_id=tmp_path / "c", no_dist=True)
    edit_metadata(tmp_path / "c", lambda metadata: metadata.storage_data.clear())
    report = load_with_torch(dcptool.open(tmp_path / "c"), trust=True)
    assert failed(report) == {"w", "n"}
    assert "KeyError" in report.findings[0].message


@pytest.mark.parametrize(("max_nbytes", "largest"), [(1 << 20, 256 << 10), (40_000, 16 << 10), (4096, 4096), (10, 8)])
def test_a_large_tensor_is_loaded_in_pieces(tmp_path, allocated, max_nbytes, largest):
    whole = torch.arange(64 * 1024, dtype=torch.float32).reshape(1024, 64)  # 256 KiB in 16 chunks
    save(tmp_path / "c", *({"w": Shard.of(whole, rank, 16)} for rank in range(16)))
    live, each = allocated
    live[:], each[:], steps = [0, 0], [], []
    report = load_with_torch(dcptool.open(tmp_path / "c"), max_nbytes=max_nbytes, progress=steps.append)
    assert report[1:] == (1, 0, 0, 256 << 10, ())
    assert sum(steps) == 256 << 10
    assert max(each) == live[1] == largest <= max_nbytes
    assert len(each) == (1 if max_nbytes > 256 << 10 else 16)


def test_many_tensors_are_loaded_a_few_at_a_time(tmp_path, allocated):
    dcp.save({f"w{i}": torch.ones(1024) for i in range(20)}, checkpoint_id=tmp_path / "c", no_dist=True)
    live, _ = allocated
    live[:], steps = [0, 0], []
    report = load_with_torch(dcptool.open(tmp_path / "c"), max_nbytes=3 * 4096, progress=steps.append)
    assert report[1:3] == (20, 0)
    assert (sum(steps), report.nbytes) == (20 * 4096, 20 * 4096)
    assert live[1] == 3 * 4096


def test_chunks_land_where_they_belong(monkeypatch):
    checkpoint = dcptool.open(part("mesh2d_fsdp_tp").path)
    landed = []
    copy = torch.Tensor.copy_

    def noted(target, source):
        landed.append(copy(target, source).clone())
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    load_with_torch(checkpoint, max_nbytes=8)
    expected = []
    for entry in checkpoint.tensors.values():
        boxes = entry.chunks.boxes() if entry.nbytes > 8 else []
        expected += [checkpoint.read_torch(entry.fqn, *far_corner(box, 2)) for box in boxes if 0 not in box[1]]
    assert len(expected) > 20
    for tensor in expected:
        assert any(torch.equal(tensor, found) for found in landed)


def test_the_metadata_is_read_once_and_plans_are_bounded(tmp_path, monkeypatch):
    whole = torch.arange(40.0)
    save(tmp_path / "c", *({"w": Shard.of(whole, rank, 10), f"v{rank}": torch.ones(1)} for rank in range(10)))
    calls = {"read_metadata": 0, "read_data": 0}

    def count(name):
        function = getattr(dcp.FileSystemReader, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(dcp.FileSystemReader, name, counted)

    count("read_metadata")
    count("read_data")
    monkeypatch.setattr(torch_load, "MAX_READS", 4)
    assert load_with_torch(dcptool.open(tmp_path / "c"))[1:] == (11, 0, 0, 200, ())
    assert calls == {"read_metadata": 1, "read_data": 3 + 3}


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_get_through_and_the_group_is_gone(monkeypatch, interrupt):
    def interrupted(*args, **kwargs):
        raise interrupt

    monkeypatch.setattr(torch, "load", interrupted)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "as it was")
    with pytest.raises(interrupt):
        load_with_torch(dcptool.open(part("w_nodist").path))
    assert not dist.is_initialized()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "as it was"


class Odd(Exception):
    """Cannot be pickled, so it does not survive torch's way through the process group."""

    def __init__(self, what: str, where: object) -> None:
        super().__init__(what)


def test_the_reason_is_torchs_own_whatever_it_raises(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def fail(*args, **kwargs):
        raise Odd("the thing. More words", lambda: 0)

    monkeypatch.setattr(torch, "load", fail)
    report = load_with_torch(dcptool.open(part("w_nodist").path))
    assert failed(report) == {"w", "nested.b"}
    assert report.findings[0].message.endswith(": Odd: the thing")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_what_torch_cannot_load_at_all_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"no DCP directory, which dcp\.load is for; safetensors' load"):
        load_with_torch(dcptool.open(part("hf_sharded").path))
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")
    with pytest.raises(UnsupportedError, match=r"torch\.load loads it"):
        load_with_torch(dcptool.open(tmp_path / "m.pt"))
    import fsspec

    fsspec.filesystem("memory").put(str(part("w_nodist").path), "/torch_load/c", recursive=True)
    with pytest.raises(UnsupportedError, match="copy it to one first"):
        load_with_torch(dcptool.open("memory://torch_load/c"))
    folder = shutil.copytree(part("w_nodist").path, tmp_path / "c")
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    with pytest.raises(StorageError, match="not a regular file"):
        load_with_torch(dcptool.open(folder))


def test_torch_is_missing_too_old_or_busy(tmp_path, monkeypatch):
    checkpoint = dcptool.open(part("w_nodist").path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(UnsupportedError, match=r"pip install 'dcptool\[torch\]'"):
            load_with_torch(checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.5.1+cu121")
        with pytest.raises(UnsupportedError, match="CVE-2025-32434"):
            load_with_torch(checkpoint)
        assert load_with_torch(checkpoint, trust=True)[1:3] == (2, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match="a process group already"):
            load_with_torch(checkpoint)
    finally:
        dist.destroy_process_group()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(UnsupportedError, match="cannot form a gloo process group: ZeroDivisionError"):
            load_with_torch(checkpoint)


def test_a_far_corner_is_as_large_as_may_be_and_ends_where_the_box_ends():
    assert far_corner(((), ()), 1) == ((), ())
    assert far_corner(((2, 3), (4, 5)), 20) == ((2, 3), (4, 5))
    assert far_corner(((2, 3), (4, 5)), 19) == ((3, 3), (3, 5))
    assert far_corner(((2, 3), (4, 5)), 4) == ((5, 4), (1, 4))
    for limit in range(1, 70):
        offsets, sizes = far_corner(((1, 0, 7), (4, 3, 5)), limit)
        assert 1 <= math.prod(sizes) <= limit
        assert [a + n for a, n in zip(offsets, sizes, strict=True)] == [5, 3, 12]


def test_rank_local_metadata_is_no_damage_to_load():
    done = run("verify", "--load", "fixtures/foreign/w_no_collectives")
    assert done.returncode == 0
    assert "state    complete" in done.stdout
    assert "warning: rank-local metadata" in done.stdout
    assert "torch loads it only at the same number of ranks" in done.stdout
