"""`training.Reader` where torch's readers stand: planners of all kinds, ranks with metadata of their own, overwritten
checkpoints, extensions, and what else of their interface people use."""

from __future__ import annotations

import dataclasses
import logging
import shutil

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import (  # noqa: E402
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)

import dcptool  # noqa: E402
from dcptool.errors import CheckpointNotFoundError, MetadataError, StorageError, UnsupportedError  # noqa: E402
from dcptool.training import Reader  # noqa: E402
from tests.ranks import Shard, save, save_apart  # noqa: E402
from tests.training.test_training_reader import ShardPlanner, assert_same, load  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
BOTH = [FileSystemReader, Reader]
LARGE = (3 << 20,)
"""Elements of a float32 tensor that is not read ahead: several threads read it together."""


class OneBuffer(DefaultLoadPlanner):
    """Stages every tensor through the same memory, as a planner of a small pinned buffer does."""

    def __init__(self):
        super().__init__()
        self.buffer = torch.zeros(LARGE)
        self.calls = []

    def resolve_tensor(self, read_item):
        self.calls.append(("resolve", read_item.dest_index.fqn))
        return self.buffer[: read_item.lengths.numel()].view(read_item.lengths)

    def commit_tensor(self, read_item, tensor):
        self.calls.append(("commit", read_item.dest_index.fqn))
        super().resolve_tensor(read_item).copy_(tensor)

    def load_bytes(self, read_item, value):
        self.calls.append(("object", read_item.dest_index.fqn))
        super().load_bytes(read_item, value)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_item_is_committed_before_the_next_is_asked_for(tmp_path, threads):
    state = {f"w{index}": torch.full((4,), float(index)) for index in range(40)}
    state |= {"large": torch.arange(LARGE[0], dtype=torch.float32), "larger": torch.ones(LARGE), "o": {"n": [7]}}
    dcp.save(state, checkpoint_id=tmp_path / "ck", no_dist=True)
    found = []
    for reader in (FileSystemReader(tmp_path / "ck"), Reader(tmp_path / "ck", threads=threads)):
        out = {name: torch.zeros_like(value) for name, value in state.items() if name != "o"} | {"o": {"n": None}}
        planner = OneBuffer()
        dcp.load(out, storage_reader=reader, planner=planner, no_dist=True)
        found.append((out, planner.calls))
    assert_same({**found[1][0], "o": 0}, {**found[0][0], "o": 0})
    assert torch.equal(found[1][0]["large"], state["large"])
    assert found[1][0]["o"] == {"n": [7]}
    assert found[1][1] == found[0][1]


def test_boxes_of_one_chunk_go_through_one_buffer(tmp_path):
    whole = torch.arange(3.0 * 2**20).view(3, -1)
    path = save(tmp_path / "ck", *({"w": Shard.of(whole, rank, 3)} for rank in range(3)))

    class Staged(ShardPlanner):
        buffer = torch.zeros(whole.numel())

        def resolve_tensor(self, read_item):
            return self.buffer[: read_item.lengths.numel()].view(read_item.lengths)

        def commit_tensor(self, read_item, tensor):
            super().resolve_tensor(read_item).copy_(tensor)

    for rank in range(2):
        wanted = {"w": Shard.of(torch.zeros_like(whole), rank, 2, dim=1)}
        dcp.load(wanted, storage_reader=Reader(path, threads=2), planner=Staged(wanted), no_dist=True)
        assert torch.equal(wanted["w"].as_subclass(torch.Tensor), whole.chunk(2, 1)[rank])


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    path = save(tmp_path / "ck", {"w": torch.ones(4)})

    class Wrong(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return torch.zeros(3)

    with pytest.raises(CheckpointException, match=r"'w': the planner's tensor is \[3\], for values of \[4\]"):
        dcp.load({"w": torch.zeros(4)}, storage_reader=Reader(path), planner=Wrong(), no_dist=True)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("make", BOTH)
def test_a_reader_used_again_reads_what_is_there_now(tmp_path, make, given):
    path = tmp_path / "ck"
    out = {"a": torch.zeros(3), "b": torch.zeros(3), "s": "", "t": ""}
    save(path, {"a": torch.full((3,), 1.0), "b": torch.full((3,), 2.0), "s": "one", "t": "two"})
    reader = make(path)
    where = {"checkpoint_id": path} if given else {}
    dcp.load(out, storage_reader=reader, no_dist=True, **where)
    load_id = reader.load_id
    save(path, {"b": torch.full((3,), 20.0), "a": torch.full((3,), 10.0), "t": "TWO", "s": "ONE"})
    dcp.load(out, storage_reader=reader, no_dist=True, **where)
    assert (out["a"].tolist(), out["b"].tolist(), out["s"], out["t"]) == ([10.0] * 3, [20.0] * 3, "ONE", "TWO")
    assert (reader.load_id != load_id) is given
    assert len(load_id) == 36


def test_a_checkpoint_given_open_is_used_until_it_changes(tmp_path):
    path = save(tmp_path / "ck", {"a": torch.ones(3), "b": torch.zeros(3)})
    reader, out = Reader(dcptool.open(path)), {"a": torch.zeros(3)}
    checkpoint = reader.checkpoint
    dcp.load(out, storage_reader=reader, no_dist=True)
    assert (out["a"].tolist(), reader.checkpoint) == ([1.0] * 3, checkpoint)
    save(path, {"b": torch.ones(300), "a": torch.zeros(3)})
    with pytest.raises(StorageError, match="changed since it was opened"):
        reader.read_metadata()


WHOLE = torch.arange(20.0).view(5, 4)


def ranks_state(rank):
    """What ranks differ in: tensors, objects, names, shapes, and what one holds whole and the others in shards."""
    mixed = WHOLE + 100 if rank == 0 else Shard.of(WHOLE, rank, 2)
    return {
        "w": Shard.of(WHOLE, rank, 2), "rng": torch.tensor([rank, 7]), "loader": {"at": 100 * rank, "epoch": 3},
        f"only{rank}": torch.full((2,), float(rank)), "longer": torch.ones(2 + rank), "mixed": mixed,
    }  # fmt: skip


def load_as(rank, reader, state):
    metadata = reader.read_metadata(rank=rank)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True, rank=rank, use_collectives=False)
    plans = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()
    assert (reader.rank, reader.use_collectives) == (rank, False)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("as_given", [True, False])
def test_r29_each_rank_gets_what_it_saved(tmp_path, rank, as_given):
    path = save_apart(tmp_path / "ck", ranks_state(0), ranks_state(1))
    found = []
    for make in BOTH:
        state = {
            "rng": torch.zeros(2, dtype=torch.int64), "loader": {"at": -1, "epoch": -1},
            f"only{rank}": torch.zeros(2), "longer": torch.zeros(2 + rank),
        }  # fmt: skip
        load_as(rank, make(dcptool.open(path) if as_given and make is Reader else path), state)
        found.append(state)
    loaders = [state.pop("loader") for state in found]
    assert loaders[0] == loaders[1] == {"at": 100 * rank, "epoch": 3}
    assert_same(found[1], found[0])
    assert found[1]["rng"].tolist() == [rank, 7]


def test_what_one_rank_saved_in_part_comes_from_all_of_them(tmp_path):
    """Another number of ranks than saved it: torch's reader knows one rank's shards only."""
    path = save_apart(tmp_path / "ck", ranks_state(0), ranks_state(1))
    for rank in range(3):
        state = {"w": torch.zeros(5, 4)}
        load_as(rank, Reader(path), state)
        assert torch.equal(state["w"], WHOLE), rank
    state = {"mixed": torch.zeros(5, 4)}
    load_as(0, Reader(path), state)
    assert torch.equal(state["mixed"], WHOLE + 100)


def test_a_rank_that_saved_nothing_is_told(tmp_path, caplog):
    path = save_apart(tmp_path / "ck", ranks_state(0), ranks_state(1))
    state = {"rng": torch.zeros(2, dtype=torch.int64)}
    with caplog.at_level(logging.WARNING, "dcptool.training"):
        load_as(2, Reader(path), state)
    assert state["rng"].tolist() == [0, 7]
    assert "rank 2 saved nothing there" in caplog.text


def test_the_metadata_of_a_rank_can_be_named(tmp_path):
    path = save_apart(tmp_path / "ck", ranks_state(0), ranks_state(1))
    with pytest.raises(MetadataError, match=r"use_collectives=False.*\n.*rank=R"):
        Reader(path).read_metadata()
    assert dcptool.open(path / "__1.metadata").read("rng").tolist() == [1, 7]
    assert dcptool.open(path).read("rng").tolist() == [0, 7]
    state = {"rng": torch.zeros(2, dtype=torch.int64)}
    dcp.load(state, storage_reader=Reader(path / "__1.metadata"), no_dist=True)
    assert state["rng"].tolist() == [1, 7]
    (path / "__1.metadata").write_bytes(b"")
    with pytest.raises(MetadataError, match=r"__1\.metadata"):
        Reader(path).read_metadata(rank=1)


class Extra(DefaultSavePlanner):
    """A planner that leaves data of its own."""

    def create_global_plan(self, plans):
        plans, metadata = super().create_global_plan(plans)
        return plans, dataclasses.replace(metadata, planner_data={**metadata.planner_data, "mine": ("a", {"b": 1.5})})


def test_the_metadata_holds_what_torch_reads(tmp_path):
    state = {"w": torch.nn.Parameter(torch.ones(3, 4)), "o": {"x": (1,), "y": torch.zeros(2)}}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=Extra(), no_dist=True)
    theirs, ours = (make(tmp_path).read_metadata() for make in BOTH)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert (ours.version, ours.planner_data) == (theirs.version, theirs.planner_data)
    assert ours.storage_meta.save_id == theirs.storage_meta.save_id
    assert ours.storage_meta.load_id
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for index, info in theirs.storage_data.items():
        found = ours.storage_data[index]
        assert isinstance(found, type(info))
        assert all(getattr(found, name) == value for name, value in vars(info).items()), index


def test_a_reader_that_renames_entries_works(tmp_path):
    """A subclass that changes names in the metadata, as people do with torch's readers."""
    save(tmp_path / "ck", {"module.w": torch.ones(3), "module.n": (5,)})

    def renamed(make):
        class Renames(make):
            def read_metadata(self, *args, **kwargs):
                found = super().read_metadata(*args, **kwargs)
                states, places = found.state_dict_metadata, found.storage_data
                found.state_dict_metadata = {name.removeprefix("module."): value for name, value in states.items()}
                found.storage_data = {
                    dataclasses.replace(index, fqn=index.fqn.removeprefix("module.")): place
                    for index, place in places.items()
                }
                return found

        return Renames

    for make in BOTH:
        state = {"w": torch.zeros(3), "n": (0,)}
        load(state, renamed(make)(tmp_path / "ck"))
        assert (state["w"].tolist(), state["n"]) == ([1.0] * 3, (5,))


def test_transforms_are_undone_by_the_registry(tmp_path):
    from torch.testing._internal.distributed.checkpoint_utils import Rot13Example, get_test_extension_registry

    state = {"w": torch.arange(7.0), "o": [1, {"k": torch.ones(2)}], "e": torch.zeros(0)}
    extensions = [[Rot13Example()]]
    try:
        from torch.distributed.checkpoint._extension import ZStandard

        extensions.append([ZStandard()])
    except ValueError:  # no zstandard installed
        pass
    for number, some in enumerate(extensions):
        path = tmp_path / f"ck{number}"
        dcp.save(state, storage_writer=FileSystemWriter(path, _extensions=some), no_dist=True)
        for make in BOTH:
            out = {"w": torch.zeros(7), "o": [None, {"k": torch.zeros(2)}], "e": torch.zeros(0)}
            dcp.load(out, storage_reader=make(path, get_test_extension_registry()), no_dist=True)
            assert torch.equal(out["w"], state["w"])
            assert out["o"][0] == 1
            assert out["o"][1]["k"].tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointException, match=r"'w'.*stream.rot13/1.*\n.*ExtensionRegistry"):
        dcp.load({"w": torch.zeros(7)}, storage_reader=Reader(tmp_path / "ck0"), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_torch_decodes_what_is_not_looked_into_if_it_may(tmp_path):
    def quantised(values):
        return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)

    values = torch.tensor([[0.1, 0.5], [0.9, 0.3]])
    dcp.save({"t": quantised(values)}, checkpoint_id=tmp_path, no_dist=True)
    for reader in (FileSystemReader(tmp_path), Reader(tmp_path, trust=True)):
        state = {"t": quantised(torch.zeros(2, 2))}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(state["t"].int_repr(), quantised(values).int_repr())
    with pytest.raises(CheckpointException, match=r"'t': it is a quantised tensor.*\n.*trust=True"):
        dcp.load({"t": quantised(torch.zeros(2, 2))}, storage_reader=Reader(tmp_path), no_dist=True)


def test_objects_of_a_pt_file_are_given_one_by_one(tmp_path):
    shared = torch.arange(6.0)
    saved = {"m": {"w": torch.ones(3)}, "step": 4, "t": (shared[:2], "x"), "l": [], "d": {"e": {1, 2}}}
    torch.save(saved, tmp_path / "x.pt")
    state = {"m": {"w": torch.zeros(3)}, "step": 0, "t": None, "d": {"e": None}}
    dcp.load(state, storage_reader=Reader(tmp_path / "x.pt"), no_dist=True)
    assert (state["m"]["w"].tolist(), state["step"], state["d"]) == ([1.0] * 3, 4, {"e": {1, 2}})
    assert state["t"][0].tolist() == [0.0, 1.0]
    assert state["t"][1] == "x"


def test_a_run_directory_stands_for_its_newest_complete_step(tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path / f"step_{step}", {"w": torch.full((3,), float(step))})
    (tmp_path / "step_3" / ".metadata").unlink()
    state = {"w": torch.zeros(3)}
    with caplog.at_level(logging.INFO, "dcptool.training"):
        dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    assert state["w"].tolist() == [2.0] * 3
    assert f"is read: {tmp_path / 'step_2'}" in caplog.text
    assert "step_3 was passed over" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match="name one"):
        Reader(tmp_path, run=False).read_metadata()
    shutil.rmtree(tmp_path / "step_1")
    shutil.rmtree(tmp_path / "step_2")
    with pytest.raises(CheckpointNotFoundError, match="no complete"):
        Reader(tmp_path).read_metadata()


def test_ranks_that_found_different_saves_load_none(tmp_path):
    plans = []
    for step in (1, 2):
        save(tmp_path / f"step_{step}", {"w": torch.ones(3)})
        reader, planner = Reader(tmp_path), DefaultLoadPlanner()
        planner.set_up_planner({"w": torch.zeros(3)}, reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    with pytest.raises(dcptool.errors.LayoutError, match=r"step_1.*step_2"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[:1]) == plans[:1]


def test_places_are_told_apart_as_torch_does(tmp_path):
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    for place in (tmp_path, str(tmp_path), str(tmp_path / "not" / "there"), "memory://x", "abc://abc", ""):
        ours = Reader.validate_checkpoint_id(place)
        assert ours == (FileSystemReader.validate_checkpoint_id(place) or url_is_known(FsspecReader, place)), place


def url_is_known(reader, place):
    return "://" in str(place) and reader.validate_checkpoint_id(place)


def test_options_of_a_url_reach_its_file_system(tmp_path):
    path = save(tmp_path / "step_1", {"w": torch.arange(4.0)})
    for url, options in ((f"simplecache::file://{path}", {"simplecache": {"cache_storage": str(tmp_path / "kept")}}),):
        state = {"w": torch.zeros(4)}
        load(state, Reader(url, storage_options=options))
        assert state["w"].tolist() == [0, 1, 2, 3]
    assert any((tmp_path / "kept").iterdir())


def test_what_no_registry_and_no_torch_knows_is_unsupported(tmp_path):
    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

    writer = FileSystemWriter(tmp_path, _extensions=[Rot13Example()])
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(2)}, storage_reader=Reader(tmp_path, ExtensionRegistry()), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsupportedError)
    assert "'w': its transforms stream.rot13/1 could not be undone" in str(error)
