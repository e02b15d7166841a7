"""rescue: a lost .metadata comes back equal to the original, by torch's own objects; nothing that differs passes."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import zipfile

import pytest

import dcptool
from dcptool.errors import (
    CheckpointNotFoundError,
    DcptoolError,
    ItemError,
    LayoutError,
    OutputExistsError,
    StorageError,
    UnsupportedError,
)
from dcptool.formats.dcp.metadata import read_records
from dcptool.formats.torch_save.zip_scan import zip_at_start
from dcptool.ops.rescue import rescue as rescuing
from tests import damage
from tests.conftest import FOREIGN, WHOLE, run

try:
    import torch
    import torch.distributed.checkpoint as dcp

    from tests import ranks
except ImportError:  # then only what is marked torchfree runs
    torch = dcp = ranks = None

CRASHED = FOREIGN / "run_crashed" / "ckpt"


def nested_zip(text):
    """A zip in memory, as an object may hold one: its end looks like that of an item."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(text))
    return buffer.getvalue()


def states(step, count=3, **changes):
    """What the ranks hold at a step: shards, replicas, odd strides and dtypes, objects whose length changes."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(10, 4, generator=generator)
    ended = torch.frombuffer(bytearray(nested_zip("x" * 20).ljust(400, b"\0")), dtype=torch.uint8)
    found = []
    for rank in range(count):
        state = {
            "model": {
                "w": ranks.Shard.of(weight, rank, count),
                "half": ranks.Shard.of(weight.to(torch.bfloat16) + step, rank, count, 1),
                "rep": torch.randn(3, 2, generator=generator).t(),
                "scalar": torch.tensor(float(step)),
                "bytes": ended.clone(),
                "none": torch.zeros(0, 4),
            },
            "step": step,
            "history": list(range(step)),
            "raw": nested_zip("y" * step) * 2,
            f"rank{rank}": {"rng": bytes(step + rank)},
        }
        state["model"].update(changes)
        found.append(state)
    return found


@pytest.fixture
def steps(tmp_path):
    """A sibling, and a checkpoint whose metadata is lost; with that metadata."""
    like = ranks.save(tmp_path / "step_10", *states(10))
    path = ranks.save(tmp_path / "step_300", *states(300))
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    return like, path, data


def same_metadata(found, wanted):
    """Compare two .metadata as torch's own objects; only what names the save may differ."""
    found, wanted = pickle.loads(found), pickle.loads(wanted)
    assert found.state_dict_metadata == wanted.state_dict_metadata
    assert list(found.state_dict_metadata) == list(wanted.state_dict_metadata)
    assert found.planner_data == wanted.planner_data
    assert found.storage_data == wanted.storage_data
    hints = [{index: index.index for index in metadata.storage_data} for metadata in (found, wanted)]
    assert hints[0] == hints[1]
    assert vars(found).keys() == vars(wanted).keys()
    for name in vars(found).keys() - {"state_dict_metadata", "planner_data", "storage_data", "storage_meta"}:
        assert repr(vars(found)[name]) == repr(vars(wanted)[name])


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What comes back.


def test_a_lost_metadata_comes_back_equal_and_torch_loads_it(steps):
    like, path, data = steps
    assert [file.stat().st_size for file in sorted(like.glob("*.distcp"))] != [
        file.stat().st_size for file in sorted(path.glob("*.distcp"))
    ]
    before = listing(path)
    done = dcptool.rescue(path, like)
    after = listing(path)
    assert after.keys() - before.keys() == {".metadata"}
    assert all(after[name] == content for name, content in before.items())
    same_metadata(after[".metadata"], data)
    storage_meta = pickle.loads(after[".metadata"]).storage_meta
    assert (storage_meta.checkpoint_id, storage_meta.save_id) == (str(path), done.save_id)
    assert storage_meta.save_id != pickle.loads(data).storage_meta.save_id
    assert done.published
    assert (done.n_items, done.n_tensors, done.n_objects) == (len(pickle.loads(data).storage_data), 6, 6)
    assert done.nbytes > 3000
    loaded = {"model": {"w": torch.zeros(10, 4), "rep": torch.zeros(2, 3)}, "step": 0, "history": [0] * 300}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    wanted = torch.randn(10, 4, generator=torch.Generator().manual_seed(300))
    assert torch.equal(loaded["model"]["w"], wanted)
    assert (loaded["step"], loaded["history"]) == (300, list(range(300)))
    verdict = dcptool.verify(path, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).verdicts[0]
    assert verdict.state.value == "complete"
    with pytest.raises(OutputExistsError, match=r"nothing is lost.*\n.*dcptool verify"):
        dcptool.rescue(path, like)


DCP_PARTS = [found for found in WHOLE if dcptool.open(found.path).format.name == "dcp"]


@pytest.mark.parametrize("found", DCP_PARTS, ids=lambda found: found.name)
def test_the_metadata_of_every_foreign_checkpoint_comes_back(found, tmp_path):
    path = damage.copy(found.path, tmp_path / "step_5")
    lost = {file.name: file.read_bytes() for file in path.glob("*metadata") if file.suffix == ".metadata"}
    lost |= {".metadata": (path / ".metadata").read_bytes()} if (path / ".metadata").exists() else {}
    for name in lost:
        (path / name).unlink()
    if found.name == "w_zstd":
        with pytest.raises(UnsupportedError, match="zstd"):
            dcptool.rescue(path, found.path)
        return
    done = dcptool.rescue(path, found.path)
    assert sorted(done.metadata) == sorted(lost)
    for name, data in lost.items():
        old, new = read_records(data), read_records((path / name).read_bytes())
        assert vars(new) | {"save_id": None, "extra": None} == vars(old) | {"save_id": None, "extra": None}
        assert old.extra.keys() == new.extra.keys()
        assert new.save_id == (done.save_id if old.save_id else None)
    assert dcptool.check(dcptool.open(path), dcptool.Level.DEEP).good


@pytest.mark.parametrize("found", DCP_PARTS, ids=lambda found: found.name)
def test_and_is_equal_by_torchs_own_objects(found, tmp_path):
    path = damage.copy(found.path, tmp_path / "step_5")
    if not (path / ".metadata").exists() or found.name == "w_zstd":
        pytest.skip("rank-local, or compressed: see above")
    data = (path / ".metadata").read_bytes()
    try:
        pickle.loads(data)
    except (AttributeError, ModuleNotFoundError):
        assert found.name in ("fsspec_t222", "py313_t2130")  # this torch, or this Python, has not what they name
        return
    (path / ".metadata").unlink()
    dcptool.rescue(path, found.path)
    same_metadata((path / ".metadata").read_bytes(), data)


@pytest.mark.torchfree
def test_the_step_a_real_crash_left_is_rescued_as_its_temporary_metadata_says(tmp_path):
    path = damage.copy(CRASHED / "step_500", tmp_path / "step_500")
    done = dcptool.rescue(path, CRASHED / "step_100")
    meant = read_records((path / ".metadata.tmp").read_bytes())
    found = read_records((path / ".metadata").read_bytes())
    assert (found.tensors, found.items, found.paths, found.order) == (
        meant.tensors,
        meant.items,
        meant.paths,
        meant.order,
    )
    assert ".metadata.tmp is there" in done.notes[0]
    assert dcptool.check(dcptool.open(path), dcptool.Level.DEEP).good
    with pytest.raises(ItemError, match=r"step_400/__0_0\.distcp, byte 1,705: item 2, .*cut short"):
        dcptool.rescue(CRASHED / "step_400", CRASHED / "step_100", dry_run=True)


@pytest.mark.parametrize("per_thread", [{}, {"single_file_per_rank": False}, {"thread_count": 2}], ids=str)
def test_files_per_thread_and_per_item_and_idle_ranks(tmp_path, per_thread):
    saved = []
    for step in (1, 40):
        ranked = [
            {"a": torch.full((2000,), float(step)), "b": torch.ones(3), "o": "x" * step},
            {},
            {"c": torch.ones(2)},
        ]
        saved.append(ranks.save(tmp_path / f"step_{step}", *ranked, **per_thread))
    data = (saved[1] / ".metadata").read_bytes()
    (saved[1] / ".metadata").unlink()
    dcptool.rescue(saved[1], saved[0])
    same_metadata((saved[1] / ".metadata").read_bytes(), data)
    if not per_thread:
        assert (saved[1] / "__1_0.distcp").stat().st_size == 0
        (saved[1] / ".metadata").unlink()
        (saved[1] / "__1_0.distcp").unlink()
        with pytest.raises(LayoutError, match=r"has no __1_0\.distcp"):
            dcptool.rescue(saved[1], saved[0])


def safetensors_steps(tmp_path):
    serialization = pytest.importorskip("torch.distributed.checkpoint.filesystem").SerializationFormat.SAFETENSORS
    saved = []
    for step in (1, 50):
        state = {"w": torch.full((4, 2), float(step)), "b": torch.ones(3) * step, "o": "x" * step, "p": [step]}
        saved.append(ranks.save(tmp_path / f"step_{step}", state, serialization_format=serialization))
    return saved


def test_safetensors_serialization(tmp_path):
    like, path = safetensors_steps(tmp_path)
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    done = dcptool.rescue(path, like)
    same_metadata((path / ".metadata").read_bytes(), data)
    assert "without checksums" in done.notes[0]
    assert dcptool.open(path).read("w").tolist() == [[50.0, 50.0]] * 4
    (path / ".metadata").unlink()
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    assert content.count(b'"w"') == 1
    file.write_bytes(content.replace(b'"w"', b'"v"'))
    with pytest.raises(LayoutError, match="header of the safetensors blob"):
        dcptool.rescue(path, like)
    file.write_bytes(content[:-4])
    with pytest.raises(LayoutError, match="safetensors blob of"):
        dcptool.rescue(path, like)


def test_one_lost_rank_local_metadata(tmp_path):
    path = damage.copy(FOREIGN / "w_no_collectives", tmp_path / "c")
    old = read_records((path / "__1.metadata").read_bytes())
    (path / "__1.metadata").unlink()
    done = dcptool.rescue(path, FOREIGN / "w_no_collectives", tmp_path / "out")
    assert done.metadata == ("__1.metadata",)
    assert read_records((tmp_path / "out" / "__1.metadata").read_bytes()).items == old.items
    assert (tmp_path / "out" / "__0.metadata").read_bytes() == (path / "__0.metadata").read_bytes()
    assert not (path / "__1.metadata").exists()
    shutil.copy(FOREIGN / "w_no_collectives" / "__1.metadata", path)
    with pytest.raises(OutputExistsError, match="nothing is lost"):
        dcptool.rescue(path, FOREIGN / "w_no_collectives")
    with pytest.raises(LayoutError, match="use_collectives=False"):
        dcptool.rescue(path, FOREIGN / "w_nodist")


def test_into_a_new_folder_the_source_stays_as_it_is(steps, tmp_path):
    like, path, data = steps
    (path / "common.pt").write_bytes(b"side file")
    before = listing(path)
    done = dcptool.rescue(path, like, tmp_path / "deep" / "out")
    assert listing(path) == before
    assert done.path == str(tmp_path / "deep" / "out")
    copied = listing(tmp_path / "deep" / "out")
    same_metadata(copied.pop(".metadata"), data)
    assert copied == {name: content for name, content in before.items() if name.endswith(".distcp")}
    assert done.notes == ("common.pt beside the data files: not copied",)
    for output in (tmp_path / "deep" / "out", path, path / "inside", like):
        with pytest.raises((OutputExistsError, UnsupportedError)):
            dcptool.rescue(path, like, output)
    assert listing(path) == before
    assert not list(tmp_path.glob("**/.dcptool-*"))


def test_a_copy_that_went_wrong_is_not_published(steps, tmp_path, monkeypatch):
    like, path, _ = steps
    real = rescuing._copy

    def copy(source, target, match):
        real(source, target, match)
        if match.name == "__1_0.distcp":
            file = tmp_path / target.root / match.name
            damage.flip_byte(file, file.read_bytes().index(b"PK\x01\x02") - 30)

    monkeypatch.setattr(rescuing, "_copy", copy)
    with pytest.raises(ItemError, match="nothing was written"):
        dcptool.rescue(path, like, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_10", "step_300"]


def test_on_an_object_store(steps, s3_url, tmp_path):
    import fsspec

    like, path, data = steps
    dcptool.rescue(path, like, f"{s3_url}/step_300")
    filesystem = fsspec.filesystem("s3")
    same_metadata(filesystem.cat_file(f"{s3_url}/step_300/.metadata"), data)
    filesystem.rm_file(f"{s3_url}/step_300/.metadata")
    done = dcptool.rescue(f"{s3_url}/step_300", like)
    same_metadata(filesystem.cat_file(f"{s3_url}/step_300/.metadata"), data)
    assert dcptool.open(done.path).save_id == done.save_id


# What is refused. Nothing is written.


def refused(path, like, error, match):
    before = listing(path)
    with pytest.raises(error, match=match) as caught:
        dcptool.rescue(path, like)
    assert listing(path) == before
    assert str(caught.value).count("\n") >= 1, "what to do next is missing"
    return str(caught.value)


OTHERS = {
    "dtype": (lambda: {"rep": torch.zeros(3, 2, dtype=torch.float16).t()}, "float16 .* there"),
    "shape": (lambda: {"rep": torch.zeros(2, 3).t()}, r"float32 \[2, 3\] here and a tensor float32 \[3, 2\] there"),
    "strides": (lambda: {"rep": torch.zeros(2, 3)}, r"strides \[1, 2\] .* here .* strides \[3, 1\] .* there"),
    "kind": (lambda: {"scalar": 3.5}, "object"),
    "a dtype of the same size": (lambda: {"scalar": torch.tensor(3, dtype=torch.int32)}, "int32"),
    "a tensor more": (lambda: {"more": torch.zeros(2)}, "item|bytes"),
    "an object more": (lambda: {"more": "text"}, "item|bytes"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_sibling_that_differs_in_one_thing_is_refused(steps, tmp_path, name):
    _, path, _ = steps
    change, words = OTHERS[name]
    other = ranks.save(tmp_path / "other", *states(10, **change()))
    refused(path, other, LayoutError, words)


def test_a_sibling_with_one_item_less_is_refused(steps, tmp_path):
    _, path, _ = steps
    fewer = states(10)
    for state in fewer:
        del state["model"]["half"]
    refused(path, ranks.save(tmp_path / "other", *fewer), LayoutError, "item|bytes")
    one_less = states(10)
    del one_less[2]["rank2"]
    refused(path, ranks.save(tmp_path / "third", *one_less), LayoutError, "item|bytes")


def test_an_object_of_another_class_is_refused(steps, tmp_path):
    _, path, _ = steps
    other = states(10)
    for state in other:
        state["step"] = "10"
    refused(path, ranks.save(tmp_path / "other", *other), LayoutError, r"an object \(int\) here and an object \(str\)")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_ranks_is_refused(steps, tmp_path, count):
    _, path, _ = steps
    other = ranks.save(tmp_path / "other", *states(10, count))
    refused(path, other, LayoutError, "data files there")


def test_another_model_is_refused(steps):
    _, path, _ = steps
    for found in DCP_PARTS:
        if found.name != "w_zstd":
            with pytest.raises((LayoutError, ItemError)):
                dcptool.rescue(path, found.path)
    assert not (path / ".metadata").exists()


def test_missing_extra_and_swapped_files_are_refused(steps):
    like, path, _ = steps
    (path / "__1_0.distcp").rename(path / "aside")
    refused(path, like, LayoutError, r"has no __1_0\.distcp")
    (path / "aside").rename(path / "__1_0.distcp")
    (path / "__3_0.distcp").write_bytes(b"")
    refused(path, like, LayoutError, r"has __3_0\.distcp")
    (path / "__3_0.distcp").unlink()
    damage.swap(path / "__0_0.distcp", path / "__2_0.distcp")
    refused(path, like, (LayoutError, ItemError), "__0_0")


def test_a_file_cut_anywhere_is_refused(steps):
    like, path, _ = steps
    file = path / "__2_0.distcp"
    content = file.read_bytes()
    ends = [end + 22 for end in range(len(content)) if content.startswith(b"PK\x05\x06", end)]
    for nbytes in [0, 1, 100, *ends[:-1], len(content) - 1]:
        file.write_bytes(content[:nbytes])
        refused(path, like, (LayoutError, ItemError), r"__2_0\.distcp")
    for more in (b"\0", content, b"PK\x05\x06" + b"\0" * 18):
        file.write_bytes(content + more)
        refused(path, like, LayoutError, "goes on with")


def test_any_flipped_bit_is_refused_or_changes_nothing(steps):
    like, path, data = steps
    chosen = random.Random(3)
    n_refused = 0
    for file in sorted(path.glob("*.distcp")):
        content = file.read_bytes()
        for at in chosen.sample(range(len(content)), 60):
            damage.flip_byte(file, at, 1 << chosen.randrange(8))
            try:
                dcptool.rescue(path, like, threads=1)
            except DcptoolError:
                n_refused += 1
            else:  # padding, or a field nobody reads
                same_metadata((path / ".metadata").read_bytes(), data)
            (path / ".metadata").unlink(missing_ok=True)
            file.write_bytes(content)
    assert n_refused > 75


def test_every_flipped_value_is_named(steps):
    like, path, data = steps
    (path / ".metadata").write_bytes(data)
    ckpt = dcptool.open(path)
    for fqn in ("model.w", "model.rep"):
        record = ckpt.payload(ckpt[fqn], ckpt[fqn].chunks[-1]).record
        damage.flip_byte(path / record.item.file, record.item.byte_offset + record.byte_offset)
    (path / ".metadata").unlink()
    message = refused(path, like, ItemError, "is damaged, nothing was written")
    assert message.count("CRC32") == 2
    assert "'model.w' at [8, 0]" in message
    assert "'model.rep'" in message


def test_a_damaged_sibling_is_refused(steps):
    like, path, _ = steps
    content = (like / "__1_0.distcp").read_bytes()
    (like / "__1_0.distcp").write_bytes(content[:-10])
    refused(path, like, ItemError, "is damaged itself")
    (like / "__1_0.distcp").write_bytes(content + b"more")
    refused(path, like, LayoutError, "names nothing for bytes")
    (like / "__1_0.distcp").unlink()
    refused(path, like, ItemError, "is damaged itself")


def test_what_is_being_written_and_what_is_no_checkpoint(steps, tmp_path, monkeypatch):
    like, path, _ = steps
    (tmp_path / "step_300-unfinished").write_text("")
    with pytest.raises(StorageError, match="being written"):
        dcptool.rescue(path, like)
    (tmp_path / "step_300-unfinished").unlink()
    real = rescuing.prove_file

    def prove(*args):
        (path / "__4_0.distcp").write_bytes(b"")
        return real(*args)

    monkeypatch.setattr(rescuing, "prove_file", prove)
    with pytest.raises(StorageError, match="changed while it was read"):
        dcptool.rescue(path, like)
    (path / "__4_0.distcp").unlink()
    assert not (path / ".metadata").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="no data files"):
        dcptool.rescue(tmp_path / "empty", like)
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        dcptool.rescue(path / "__0_0.distcp", like)
    with pytest.raises(LayoutError, match="is the checkpoint itself\nOnly a step of the same run"):
        dcptool.rescue(path, path)
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(UnsupportedError, match="no DCP directory"):
        dcptool.rescue(path, tmp_path / "m.pt")


def test_metadata_that_is_there_is_never_replaced_however_broken(steps):
    like, path, data = steps
    for content, words in ((b"", "empty.*\nMove it away"), (data[:300], r"300 bytes.*\n.*move it away first")):
        (path / ".metadata").write_bytes(content)
        refused(path, like, OutputExistsError, words)
    (path / ".metadata").unlink()
    (path / "__0.metadata").write_bytes(data)
    refused(path, like, LayoutError, "use_collectives=False")


def test_two_files_of_one_layout_cannot_be_told_apart(tmp_path):
    """What the README says that it cannot prove."""
    like, path = (ranks.save(tmp_path / f"s{step}", *states(step)) for step in (10, 20))
    for folder in (like, path):
        for file in folder.glob("__*"):
            file.unlink()
        (folder / ".metadata").unlink()
    for folder in (like, path):
        shards = [{"w": ranks.Shard.of(torch.arange(8.0), rank, 2)} for rank in range(2)]
        ranks.save(folder, *shards)
    (path / ".metadata").unlink()
    damage.swap(path / "__0_0.distcp", path / "__1_0.distcp")
    dcptool.rescue(path, like)
    assert dcptool.open(path).read("w").tolist() == [4.0, 5.0, 6.0, 7.0, 0.0, 1.0, 2.0, 3.0]


# Zips back to back.


def test_zips_are_told_apart_without_any_hint(tmp_path):
    objects = [nested_zip("a") * 3, b"PK\x05\x06" + b"\0" * 18, torch.arange(5), b"", "text", nested_zip("b" * 5000)]
    lengths, data = [], b""
    for value in objects:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        lengths.append(len(buffer.getvalue()))
        data += buffer.getvalue()
    position = 0
    for length in lengths:
        for likely in (0, length - 1, length + lengths[0], 10):
            rest = data[position:]
            found = zip_at_start(lambda at, n, rest=rest: rest[at : at + n], len(rest), likely)
            assert found.nbytes == length
        position += length
    with pytest.raises(ItemError, match="no end"):
        zip_at_start(lambda at, n: data[at : at + n], lengths[0] - 1)
    with pytest.raises(ItemError, match=r"no torch\.save zip begins"):
        zip_at_start(lambda at, n: data[at + 1 : at + 1 + n], 100)


# The command.


def test_the_command(steps):
    like, path, data = steps
    dry = run("rescue", path, "--like", like, "--dry-run")
    assert dry.returncode == 0
    assert "would be rebuilt" in dry.stdout
    assert not (path / ".metadata").exists()
    (path / ".metadata.tmp").write_bytes(data[:300])
    done = run("rescue", path, "--like", like, "--json")
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert document["metadata"] == [".metadata"]
    assert document["files"][0] == {"name": "__0_0.distcp", "nbytes": (path / "__0_0.distcp").stat().st_size}
    same_metadata((path / ".metadata").read_bytes(), data)
    again = run("rescue", path, "--like", like)
    assert again.returncode == 3
    assert "nothing is lost" in again.stderr
    assert f"dcptool verify {path}" in again.stderr
    (path / ".metadata").unlink()
    text = run("rescue", path, "--like", like)
    assert f"dcptool mark {path}" in text.stdout
    assert "note: .metadata.tmp is there" in text.stderr
    assert run("rescue", path).returncode == 2
