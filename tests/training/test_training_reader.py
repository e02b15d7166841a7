"""`training.Reader` beside torch's FileSystemReader: the same values, without its pickles, with every CRC checked."""

from __future__ import annotations

import os
import pickle
import shutil

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader  # noqa: E402

import dcptool  # noqa: E402
from dcptool.training import Reader  # noqa: E402
from tests import damage  # noqa: E402
from tests.conftest import part  # noqa: E402
from tests.ops.verify.test_torch_load import LOADABLE  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402


def blank(checkpoint, fill):
    """A state dict of a checkpoint's tensors and objects under their flat names, filled with something else."""
    state = {}
    for fqn, entry in checkpoint.items():
        tensor = fqn in checkpoint.tensors
        state[fqn] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) if tensor else None
        if tensor and state[fqn].numel():
            state[fqn].view(-1).view(torch.uint8).fill_(fill)
    return state


def load(state, reader):
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


def bits(value):
    return bytes(value.contiguous().view(-1).view(torch.uint8).numpy()) if value.numel() else b""


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for fqn, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert bits(ours[fqn]) == bits(value), fqn
        else:
            assert type(ours[fqn]) is type(value), fqn
            assert " at 0x" in repr(value) or repr(ours[fqn]) == repr(value), fqn


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("part", LOADABLE, ids=lambda part: part.name)
def test_the_values_are_those_of_torch(part):
    checkpoint = dcptool.open(part.path)
    ours, theirs = blank(checkpoint, 0x11), blank(checkpoint, 0x22)
    load(ours, Reader(part.path))
    load(theirs, FileSystemReader(part.path))
    assert_same(ours, theirs)


def test_any_box_of_any_layout_has_the_same_values(tmp_path):
    whole = torch.randn(11, 7, generator=torch.Generator().manual_seed(0))
    states = [
        {"rows": Shard.of(whole, rank, 3), "columns": Shard.of(whole.to(torch.bfloat16), rank, 3, dim=1),
         "turned": whole.t(), "one": torch.tensor(3.5), "none": torch.empty(0, 4)}
        for rank in range(3)
    ]  # fmt: skip
    path = save(tmp_path / "step_1", *states)
    for count in (1, 2, 4):
        for rank in range(count):
            loaded = []
            for reader in (Reader(path, threads=2), FileSystemReader(path)):
                wanted = {
                    "rows": Shard.of(torch.zeros(11, 7), rank, count, dim=1),
                    "columns": Shard.of(torch.zeros(11, 7, dtype=torch.bfloat16), rank, count),
                    "turned": torch.zeros(7, 11).t().contiguous().t(),
                    "one": torch.tensor(0, dtype=torch.float64),  # cast, as torch casts
                    "none": torch.empty(0, 4),
                }
                planner = ShardPlanner(wanted)
                dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
                loaded.append({name: value.as_subclass(torch.Tensor) for name, value in wanted.items()})
            assert_same(*loaded)
            assert torch.equal(loaded[0]["turned"], whole.t())
            assert loaded[0]["rows"].abs().sum() > 0


class ShardPlanner(DefaultLoadPlanner):
    """Loads parts of tensors as a rank of a job would, without the job."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted = wanted

    def create_local_plan(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        items = []
        for fqn, tensor in self.wanted.items():
            offsets = getattr(tensor, "offsets", (0,) * tensor.ndim)
            chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
            items += create_read_items_for_chunk_list(fqn, self.metadata.state_dict_metadata[fqn], [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index):
        return self.wanted[index.fqn].as_subclass(torch.Tensor)


def test_every_flipped_bit_is_found(tmp_path):
    """One in each record of a tensor, whether it is read whole or in part; torch loads them all."""
    whole = torch.randn(6, 5)
    path = save(tmp_path / "step_1", *({"w": Shard.of(whole, rank, 2), "extra": {"n": 1}} for rank in range(2)))
    checkpoint = dcptool.open(path)
    entry = checkpoint.tensors["w"]
    for chunk in entry.chunks:
        record = checkpoint.payload(entry, chunk).record
        copy = damage.copy(path, tmp_path / f"copy_{chunk.offsets[0]}")
        damage.flip_byte(copy / chunk.item.file, chunk.item.byte_offset + record.byte_offset + 3)
        load({"w": torch.zeros(6, 5)}, FileSystemReader(copy))
        with pytest.raises(CheckpointException, match=r"distcp, bytes [\d,]+–[\d,]+: 'w': bytes were changed"):
            load({"w": torch.zeros(6, 5)}, Reader(copy))
        wanted = {"w": torch.zeros(6, 2)}
        wanted["w"] = Shard.of(torch.zeros(6, 5), 0, 3, dim=1)
        with pytest.raises(CheckpointException, match="'w': bytes were changed"):
            dcp.load(wanted, storage_reader=Reader(copy), planner=ShardPlanner(wanted), no_dist=True)


def test_a_flipped_bit_in_an_object_is_found(tmp_path):
    path = save(tmp_path / "step_1", {"text": ("x" * 200,), "w": torch.ones(2)})
    item = dcptool.open(path)["text"].item
    place = (path / item.file).read_bytes().index(b"x" * 200)
    damage.flip_byte(path / item.file, place + 5)
    state = {"text": ("",)}
    load(state, FileSystemReader(path))
    assert state["text"] != ("x" * 200,)
    with pytest.raises(CheckpointException, match=r"'text': .*CRC32"):
        load({"text": ("",)}, Reader(path))


@pytest.mark.parametrize("change", ["missing", "short"])
def test_a_lost_file_is_named(tmp_path, change):
    path = save(tmp_path / "step_1", *({"w": Shard.of(torch.ones(6, 5), rank, 2)} for rank in range(2)))
    if change == "missing":
        (path / "__1_0.distcp").unlink()
    else:
        damage.truncate(path / "__1_0.distcp", 300)
    with pytest.raises(CheckpointException, match=r"__1_0\.distcp"):
        load({"w": torch.zeros(6, 5)}, Reader(path))


class Executed:
    """Pickles as a call of os.mkdir."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_pickle_of_the_metadata_is_executed(tmp_path):
    path = save(tmp_path / "step_1", {"w": torch.arange(4.0)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = {**metadata.planner_data, "bait": Executed(tmp_path / "executed")}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"w": torch.zeros(4)}
    load(state, Reader(path))
    assert state["w"].tolist() == [0, 1, 2, 3]
    assert not (tmp_path / "executed").exists()
    load(state, FileSystemReader(path))
    assert (tmp_path / "executed").exists()


def test_no_file_outside_is_read(tmp_path):
    path = save(tmp_path / "step_1", {"w": torch.arange(4.0)})
    shutil.move(path / "__0_0.distcp", tmp_path / "outside.distcp")

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../outside.distcp"

    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    load({"w": torch.zeros(4)}, FileSystemReader(path))
    with pytest.raises(CheckpointException, match="'w': the metadata has no place for it"):
        load({"w": torch.zeros(4)}, Reader(path))


def test_what_torch_needs_one_metadata_for_loads_too():
    """`use_collectives=False` leaves `__R.metadata` only, of which FileSystemReader reads one."""
    found = part("w_no_collectives")
    checkpoint = dcptool.open(found.path)
    state = blank(checkpoint, 0x33)
    load(state, Reader(checkpoint))
    for fqn in checkpoint.tensors:
        assert torch.equal(state[fqn], checkpoint.read_torch(fqn)), fqn


def test_a_reader_can_be_given_another_place(tmp_path):
    for step in (1, 2):
        save(tmp_path / f"step_{step}", {"w": torch.full((3,), float(step))})
    reader = Reader(tmp_path / "step_1")
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "step_2", no_dist=True)
    assert (state["w"].tolist(), reader.checkpoint_id) == ([2.0] * 3, str(tmp_path / "step_2"))
    assert Reader.validate_checkpoint_id("s3://bucket/step_1")


def test_a_url_is_read_too(tmp_path, s3_url):
    import fsspec

    path = save(tmp_path / "step_1", {"w": torch.arange(4.0), "note": ("x",)})
    fsspec.filesystem("s3").put(str(path), f"{s3_url}/step_1", recursive=True)
    state = {"w": torch.zeros(4), "note": ("",)}
    load(state, Reader(f"{s3_url}/step_1"))
    assert (state["w"].tolist(), state["note"]) == ([0, 1, 2, 3], ("x",))


def test_opened_files_are_given_back(tmp_path):
    path = save(tmp_path / "step_1", {"w": torch.arange(4.0)})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        load({"w": torch.zeros(4)}, Reader(path))
    assert len(os.listdir("/proc/self/fd")) <= before
