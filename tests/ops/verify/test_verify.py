"""Every way to damage a checkpoint, on every format that has it: which level finds it, and what it says.

A column of the table below is a format, a row a damage; a cell is the kind of finding and the lowest level that gives
it. `marker` says that no level can know without a marker with checksums, and that one with them does.
"""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.ops.mark import mark_complete
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests import damage
from tests.conftest import FOREIGN, PARTS

METADATA, RECORDS, DEEP = Level
MARKER = "marker"
FORMATS = {
    "dcp": "xver_t2130",
    "per-item": "w_file_per_item",
    "safetensors-dcp": "w_safetensors",
    "zstd": "w_zstd",
    "rank-local": "w_no_collectives",
    "hf-shards": "hf_sharded",
    "safetensors": "hf_consolidated",
    "pt": "pt",
}
DCP = ("dcp", "per-item", "zstd", "rank-local")
UNCHECKED = ("safetensors-dcp", "hf-shards", "safetensors")


@pytest.fixture(scope="session")
def pt_folder(tmp_path_factory):
    """A folder with a `.pt` file that torch wrote."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("pt")
    torch.save({"model": {"w": torch.arange(4096.0), "b": torch.ones(7)}, "step": 3}, folder / "model.pt")
    return folder


@pytest.fixture
def fresh(tmp_path, request):
    """Gives a fresh copy of the checkpoint of a format."""

    def make(name: str) -> Path:
        source = request.getfixturevalue("pt_folder") if name == "pt" else FOREIGN / FORMATS[name]
        target = tmp_path / f"copy-{name}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("sharded"))
        return target

    return make


def target_of(folder: Path, name: str) -> Path:
    """What a user would name: the folder, or the `.pt` file in it."""
    return folder / "model.pt" if name == "pt" else folder


class Place(NamedTuple):
    """Bytes of one file."""

    file: Path
    start: int
    end: int


def places(folder: Path, name: str) -> dict[str, Place]:
    """Where in the files of a checkpoint lie a payload, its pickle, a header and a directory of a zip."""
    checkpoint = dcptool.open(target_of(folder, name))
    entry = max(checkpoint.tensors.values(), key=lambda entry: entry.nbytes)
    chunk = entry.chunks[0]
    item = chunk.item
    file = folder / item.file
    payload = checkpoint.payload(entry, chunk)
    start = (0 if item.transforms else payload.record.item.byte_offset) + payload.record.byte_offset
    found = {"payload": Place(file, start, start + payload.record.nbytes)}
    data = file.read_bytes()[item.byte_offset : item.byte_offset + item.nbytes]
    if item.transforms:
        return {"payload": Place(file, item.byte_offset + item.nbytes // 2, item.byte_offset + item.nbytes)}
    if data.startswith(b"PK"):
        pickled = data.index(b"data.pkl") + 30
        directory = data.index(b"PK\x01\x02")
        at = item.byte_offset
        found["data.pkl"] = Place(file, at + pickled, at + pickled + 20)
        found["zip header"] = Place(file, at, at + 4)
        found["directory"] = Place(file, at + directory + 16, at + directory + 20)
    return found


def kinds(verdict) -> set[str]:
    return {finding.kind for finding in verdict.findings if finding.severity.value == "error"}


def assert_found(target: Path, expected: str, level: Level) -> None:
    """The finding comes at this level, not before, and no level says that the checkpoint is whole."""
    for at in Level:
        verdict = judge(target, VerifyOptions(level=at))
        if at < level:
            assert expected not in kinds(verdict), at
        else:
            assert expected in kinds(verdict), (at, verdict.findings)
            assert not verdict.whole
            assert all(finding.message for finding in verdict.findings)


FLIPS = {
    **{(where, name): (kind, RECORDS) for name in ("dcp", "per-item", "rank-local") for where, kind in [
        ("data.pkl", "damaged-item"), ("directory", "damaged-item")]},
    **{("payload", name): ("wrong-crc", DEEP) for name in ("dcp", "per-item", "rank-local", "pt")},
    **{("payload", name): MARKER for name in UNCHECKED},
    ("zip header", "per-item"): ("misplaced-item", METADATA),
    ("zip header", "dcp"): ("damaged-item", RECORDS),
    ("data.pkl", "pt"): ("bad-metadata", METADATA),
}  # fmt: skip


@pytest.mark.parametrize(("where", "name"), FLIPS, ids=lambda value: value)
def test_a_flipped_bit(fresh, where, name):
    expected = FLIPS[where, name]
    folder = fresh(name)
    place = places(folder, name)[where]
    if expected is MARKER:
        mark_complete(folder, checksums=True)
        damage.flip_byte(place.file, place.end - 1)
        assert judge(folder, VerifyOptions(level=RECORDS)).state is State.COMPLETE
        verdict = judge(folder, VerifyOptions(level=DEEP))
        assert kinds(verdict) == {"changed-file"}
        (folder / "_COMPLETE").unlink()
        verdict = judge(folder, VerifyOptions(level=DEEP))
        assert verdict.whole
        assert "not-verifiable" in {finding.kind for finding in verdict.findings}
        return
    damage.flip_byte(place.file, place.start + 1)
    kind, level = expected
    if where == "zip header" and name == "dcp":  # the first item of a file shows at once, others when looked into
        level = METADATA if place.start == 0 else level
        kind = "misplaced-item" if level is METADATA else kind
        verdict = judge(folder, VerifyOptions(level=level))
        assert kind in kinds(verdict)
        return
    if name == "per-item" and where == "zip header":
        assert kind in kinds(judge(folder))
        assert "damaged-item" in kinds(judge(folder, VerifyOptions(level=RECORDS)))
        return
    assert_found(target_of(folder, name), kind, level)


def test_flips_in_compressed_items(fresh):
    """A frame holds padding too, which nothing checks: nearly every flip is found, and none breaks the tool."""
    folder = fresh("zstd")
    place = places(folder, "zstd")["payload"]
    found = 0
    for at in range(place.start, place.end):
        damage.flip_byte(place.file, at)
        found += bool(kinds(judge(folder, VerifyOptions(level=DEEP))) & {"wrong-crc", "damaged-item"})
        damage.flip_byte(place.file, at)
    assert found > 0.8 * (place.end - place.start)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pt"])
def test_a_marker_with_checksums_finds_a_flip_in_any_file(fresh, name):
    folder = fresh(name)
    mark_complete(folder, checksums=True)
    rng = random.Random(name)
    for file in sorted(folder.iterdir()):
        if file.name == "_COMPLETE" or not file.stat().st_size:
            continue
        content = file.read_bytes()
        damage.flip_byte(file, rng.randrange(len(content)), 1 << rng.randrange(8))
        assert not judge(folder, VerifyOptions(level=DEEP)).whole, file
        file.write_bytes(content)
    assert judge(folder, VerifyOptions(level=DEEP)).state is State.COMPLETE


@pytest.mark.parametrize("name", ["dcp", "rank-local", "safetensors-dcp", "hf-shards", "safetensors", "zstd"])
def test_a_file_cut_at_every_512_bytes(fresh, name):
    folder = fresh(name)
    file = max((file for file in folder.iterdir() if file.suffix in (".distcp", ".safetensors")), key=_size)
    content = file.read_bytes()
    for nbytes in range(0, len(content), 512):
        file.write_bytes(content[:nbytes])
        verdict = judge(folder)
        assert not verdict.whole, nbytes
        assert any(finding.file == file.name for finding in verdict.findings), nbytes
        if name in ("dcp", "rank-local", "zstd"):
            assert (verdict.state, kinds(verdict)) == (State.INCOMPLETE, {"short-file"})


def _size(file: Path) -> int:
    return file.stat().st_size


@pytest.mark.parametrize("name", [*DCP, "safetensors-dcp"])
def test_files_missing_empty_or_too_many(fresh, name):
    folder = fresh(name)
    file = max(folder.glob("*.distcp"), key=_size)
    content = file.read_bytes()
    file.unlink()
    verdict = judge(folder)
    assert (verdict.state, kinds(verdict)) == (State.INCOMPLETE, {"missing-file"})
    assert file.name in verdict.reason
    file.write_bytes(b"")
    assert "is empty" in judge(folder).reason
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    verdict = judge(folder)
    assert (verdict.state, kinds(verdict)) == (State.INCOMPLETE, {"lfs-pointer"})
    file.write_bytes(content)
    (folder / "__77_0.distcp").write_bytes(content)
    verdict = judge(folder, VerifyOptions(grace=0))
    # Where each rank has metadata of its own, data without it is of a rank whose metadata is lost, and no leftover.
    lacking = {"rank-metadata-missing"} if name == "rank-local" else set()
    left = [finding.kind for finding in verdict.findings if finding.file == "__77_0.distcp"]
    assert left == ([] if lacking else ["leftover-files"])
    assert (verdict.state, kinds(verdict)) == (State.INCOMPLETE if lacking else State.COMPLETE, lacking)


def test_missing_files_of_the_safetensors_formats(fresh):
    for name, expected in (("safetensors", "missing-file"), ("hf-shards", "hole")):
        folder = fresh(name)
        min(folder.glob("*.safetensors")).unlink()
        verdict = judge(folder)
        assert not verdict.whole, (name, expected)


@pytest.mark.torchfree
class TestSetsOfSafetensors:
    """`-of-N` in a file's name says how many there are."""

    def test_a_lone_file_of_several(self, fresh):
        folder = fresh("safetensors")
        (folder / "model.safetensors.index.json").unlink()
        assert judge(folder).state is State.COMPLETE
        (folder / "model-00002-of-00002.safetensors").unlink()
        verdict = judge(folder)
        assert (verdict.state, kinds(verdict)) == (State.INCOMPLETE, {"missing-file"})
        assert verdict.reason == "1 of 2 files are missing: model-00002-of-00002.safetensors"
        assert judge(folder / "model-00001-of-00002.safetensors").whole  # a file that is named is looked at alone

    def test_shards_between_others(self, fresh):
        folder = fresh("hf-shards")
        (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
        verdict = judge(folder)
        assert (verdict.state, kinds(verdict)) == (State.INCOMPLETE, {"missing-file"})
        assert "shard 2 of at least 3" in verdict.reason

    def test_a_file_that_no_rank_has(self, tmp_path):
        folder = damage.copy(FOREIGN / "hf_sharded_multi", tmp_path / "c")
        assert judge(folder).state is State.COMPLETE
        for file in folder.glob("*-00003-of-00003.safetensors"):
            file.unlink()
        verdict = judge(folder)
        assert (verdict.state, kinds(verdict)) == (State.INCOMPLETE, {"missing-file"})
        assert "model-00003-of-00003.safetensors" in verdict.reason

    def test_the_last_shards_cannot_be_proven_and_it_is_said(self, fresh):
        folder = fresh("hf-shards")
        (folder / "shard-00003-model-00001-of-00001.safetensors").unlink()
        verdict = judge(folder)
        assert verdict.state is State.COMPLETE
        assert [finding.kind for finding in verdict.findings] == ["last-shards-unknown"]


@pytest.mark.torchfree
def test_what_a_cut_takes_with_it(fresh):
    folder = fresh("dcp")
    items = sorted(
        (chunk.item.byte_offset, entry.fqn, list(chunk.offsets))
        for entry in dcptool.open(folder).tensors.values()
        for chunk in entry.chunks
        if chunk.item.file == "__1_0.distcp"
    )
    start, fqn, offsets = items[-1]
    damage.truncate(folder / "__1_0.distcp", start + 10)
    assert judge(folder).reason.endswith(f"1 of them lies beyond the end: {fqn!r} at {offsets}")
    start, fqn, offsets = items[-3]
    damage.truncate(folder / "__1_0.distcp", start + 10)
    assert f"of them lie beyond the end, the first {fqn!r} at {offsets}" in judge(folder).reason


def test_an_item_too_short_for_its_box(fresh):
    torch = pytest.importorskip("torch")
    folder = fresh("dcp")

    def grow(metadata):
        entry = metadata.state_dict_metadata["model.emb.weight"]
        entry.size = torch.Size((entry.size[0], 9000))
        for chunk in entry.chunks:
            chunk.sizes = torch.Size((chunk.sizes[0], 9000))

    damage.edit_metadata(folder, grow)
    verdict = judge(folder)
    assert (verdict.state, kinds(verdict)) == (State.DAMAGED, {"short-item"})
    assert "too few for float32 [10, 9000], and 3 more" in verdict.reason


def test_a_save_of_nothing_is_a_warning(tmp_path):
    verdict = judge(save(tmp_path / "step", {}))
    assert verdict.state is State.COMPLETE
    assert [(found.kind, found.severity.value) for found in verdict.findings] == [("nothing-saved", "warning")]


@pytest.mark.torchfree
def test_a_number_of_many_digits_is_no_rank():
    from dcptool.checkpoint.families import per_rank_families

    names = ["rng.rank_1", "rng.rank_" + "9" * 10, "rng.rank_" + "9" * 5000]
    assert per_rank_families(names) == {"rng.rank_N": {1}}


@pytest.mark.torchfree
def test_ctrl_c_stops_at_the_next_piece(fresh, monkeypatch):
    from dcptool.storage import LocalStorage

    folder = fresh("dcp")
    reads = []
    read_into = LocalStorage.read_into

    def interrupted(storage, *args):
        reads.append(args[0])
        if len(reads) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)  # the main thread takes the signal meanwhile
        read_into(storage, *args)

    monkeypatch.setattr(LocalStorage, "read_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        judge(folder, VerifyOptions(level=DEEP, threads=1))
    assert reads == ["__0_0.distcp"]


def test_two_files_of_one_layout_swapped(tmp_path):
    """Nothing in the bytes of an item names its rank: only a marker with checksums can tell."""
    torch = pytest.importorskip("torch")
    target = save(tmp_path / "step", {"a": torch.zeros(64), "b": torch.ones(64)}, per_item=True)
    mark_complete(target)
    damage.swap(*sorted(target.glob("*.distcp"))[:2])
    assert judge(target, VerifyOptions(level=DEEP)).state is State.COMPLETE
    damage.swap(*sorted(target.glob("*.distcp"))[:2])
    mark_complete(target, checksums=True)
    damage.swap(*sorted(target.glob("*.distcp"))[:2])
    assert kinds(judge(target, VerifyOptions(level=DEEP))) == {"changed-file"}


def test_two_files_of_different_layout_swapped(fresh):
    folder = fresh("dcp")
    damage.swap(folder / "__2_0.distcp", folder / "__3_0.distcp")
    assert not judge(folder).whole


def save(target, state, per_item=False):
    """Save with torch's own writer in this process."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    target.mkdir(parents=True, exist_ok=True)
    _save_state_dict(state, FileSystemWriter(target, single_file_per_rank=not per_item), no_dist=True)
    return target


class TestTornOverwrite:
    """A crash in the middle of a save over an older one (FORMAT A15, F7)."""

    @pytest.fixture
    def saves(self, tmp_path):
        torch = pytest.importorskip("torch")
        same = [save(tmp_path / f"same{n}", {"w": torch.full((64,), float(n)), "v": torch.ones(9) * n}) for n in (1, 2)]
        other = save(tmp_path / "other", {"w": torch.ones(3, 5), "v": torch.ones(200)})
        return (*same, other)

    def test_of_the_same_layout(self, saves):
        old, new, _ = saves
        mark_complete(old, checksums=True)
        shutil.copy(new / "__0_0.distcp", old / "__0_0.distcp")
        assert judge(old, VerifyOptions(level=RECORDS)).whole  # nothing in the payload names the save
        assert kinds(judge(old, VerifyOptions(level=DEEP))) == {"changed-file"}

    def test_of_another_layout(self, saves):
        old, _, other = saves
        shutil.copy(other / "__0_0.distcp", old / "__0_0.distcp")
        assert not judge(old).whole
        assert not judge(old, VerifyOptions(level=RECORDS)).whole

    def test_metadata_of_another_save_under_a_marker(self, saves):
        old, new, _ = saves
        mark_complete(old)
        shutil.copy(new / ".metadata", old / ".metadata")
        verdict = judge(old)
        assert (verdict.state, kinds(verdict)) == (State.UNMARKED, {"stale-marker"})
        assert "dcptool mark" in verdict.findings[0].next_step
        mark_complete(old)
        assert judge(old).state is State.COMPLETE

    def test_a_file_much_newer_than_the_metadata_is_a_hint(self, fresh):
        import os

        folder = fresh("dcp")
        for file in folder.iterdir():
            os.utime(file, (1_000_000, 1_000_000))
        assert "mixed-times" not in {finding.kind for finding in judge(folder).findings}
        os.utime(folder / "__2_0.distcp", (1_000_500, 1_000_500))
        verdict = judge(folder)
        assert verdict.state is State.COMPLETE
        assert [finding.file for finding in verdict.findings if finding.kind == "mixed-times"] == ["__2_0.distcp"]
        mark_complete(folder)
        assert "mixed-times" not in {finding.kind for finding in judge(folder).findings}

    def test_a_checkout_gives_all_files_about_one_time(self, fresh):
        import os

        folder = fresh("dcp")
        for second, file in enumerate(sorted(folder.iterdir())):  # .metadata comes first, and is oldest
            os.utime(file, (1_000_000 + 20 * second, 1_000_000 + 20 * second))
        assert "mixed-times" not in {finding.kind for finding in judge(folder).findings}


def _chunks(metadata, fqn):
    return metadata.state_dict_metadata[fqn].chunks


def _drop(metadata, fqn):
    _chunks(metadata, fqn).pop(1)


def _shift(metadata, fqn):
    torch = pytest.importorskip("torch")
    chunk = _chunks(metadata, fqn)[1]
    chunk.offsets = torch.Size((chunk.offsets[0] - 1, *chunk.offsets[1:]))


def _grow(metadata, fqn):
    torch = pytest.importorskip("torch")
    chunk = _chunks(metadata, fqn)[0]
    chunk.sizes = torch.Size((chunk.sizes[0] + 1, *chunk.sizes[1:]))


def _out_of_bounds(metadata, fqn):
    torch = pytest.importorskip("torch")
    chunk = _chunks(metadata, fqn)[-1]
    chunk.sizes = torch.Size((chunk.sizes[0] + 5, *chunk.sizes[1:]))


def _wrong_ndim(metadata, fqn):
    torch = pytest.importorskip("torch")
    chunk = _chunks(metadata, fqn)[0]
    chunk.offsets, chunk.sizes = torch.Size((*chunk.offsets, 0)), torch.Size((*chunk.sizes, 1))


def _duplicate(metadata, fqn):
    _chunks(metadata, fqn).append(_chunks(metadata, fqn)[0])


def _enlarge(metadata, fqn):
    torch = pytest.importorskip("torch")
    size = metadata.state_dict_metadata[fqn].size
    metadata.state_dict_metadata[fqn].size = torch.Size((size[0] + 4, *size[1:]))


def _dtype(metadata, fqn):
    torch = pytest.importorskip("torch")
    metadata.state_dict_metadata[fqn].properties.dtype = torch.int32


def _reshape(metadata, fqn):
    torch = pytest.importorskip("torch")
    entry = metadata.state_dict_metadata[fqn]
    entry.size = torch.Size((*entry.size, 1))
    for chunk in entry.chunks:
        chunk.offsets, chunk.sizes = torch.Size((*chunk.offsets, 0)), torch.Size((*chunk.sizes, 1))
    for index in [index for index in metadata.storage_data if index.fqn == fqn]:
        place = metadata.storage_data.pop(index)
        metadata.storage_data[type(index)(fqn, torch.Size((*index.offset, 0)), index.index)] = place


def _move_item(metadata, fqn):
    first, second = [place for index, place in metadata.storage_data.items() if index.fqn == fqn][:2]
    second.relative_path, second.offset = first.relative_path, first.offset + 64


SURGERY = {
    _drop: ("hole", METADATA),
    _shift: ("overlap", METADATA),
    _grow: ("overlap", METADATA),
    _out_of_bounds: ("chunk-out-of-bounds", METADATA),
    _wrong_ndim: ("bad-chunk", METADATA),
    _duplicate: ("duplicate-chunk", METADATA),
    _enlarge: ("hole", METADATA),
    _dtype: ("wrong-item", RECORDS),
    _reshape: ("wrong-item", RECORDS),
    _move_item: ("items-overlap", METADATA),
}


@pytest.mark.parametrize("change", SURGERY, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("name", ["dcp", "per-item", "safetensors-dcp"])
def test_metadata_that_is_wrong(fresh, name, change):
    if name == "safetensors-dcp" and change is _move_item:
        pytest.skip("its tensors share one offset")
    pytest.importorskip("torch")
    folder = fresh(name)
    fqn = "model.emb.weight" if name == "dcp" else "model.embed.weight"
    damage.edit_metadata(folder, lambda metadata: change(metadata, fqn))
    kind, level = SURGERY[change]
    if name == "safetensors-dcp" and change is _reshape:
        kind = "damaged-item"  # the blob's own header says where each part belongs
    assert_found(folder, kind, level)
    named = [finding for finding in judge(folder, VerifyOptions(level=RECORDS)).findings if finding.fqn == fqn]
    assert named
    assert fqn in named[0].message
    if level is METADATA:
        assert kind in {finding.kind for finding in dcptool.summarize(folder).checkpoints[0].problems}


@pytest.mark.torchfree
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_whole_checkpoint_is_clean_and_every_damaged_one_is_not(part):
    for level in Level if part.damaged else (DEEP,):
        verdict = judge(part.path, VerifyOptions(level=level, grace=0))
        if not part.damaged:
            assert verdict.state is State.COMPLETE, verdict.findings
        elif level is DEEP:
            assert not verdict.whole


@pytest.mark.torchfree
def test_values_that_differ_between_ranks_are_told():
    verdict = judge(FOREIGN / "w_no_collectives", VerifyOptions(level=DEEP))
    assert [(f.kind, f.severity.value, f.fqn) for f in verdict.findings] == [
        ("replicas-differ", "warning", "rank_only")
    ]


@pytest.mark.torchfree
def test_what_has_no_checksums_is_counted_and_neither_good_nor_bad():
    for name, count in (("w_nocrc", 15), ("w_safetensors", 11), ("hf_sharded", 15)):
        verdict = judge(FOREIGN / name, VerifyOptions(level=DEEP))
        assert verdict.state is State.COMPLETE
        assert verdict.tally.n_unverifiable == count
        assert "not verifiable" in verdict.findings[-1].message
    assert judge(FOREIGN / "w_async", VerifyOptions(level=DEEP)).tally.n_unverifiable == 0


def load_all(folder):
    """Load every tensor with torch in place; None if torch refuses."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        state = {
            fqn: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for fqn, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    except BaseException:
        return None
    return state


def flips(folder, count, seed):
    """Flip bits of data files one at a time; each flip that changes what torch loads must be found by --deep."""
    torch = pytest.importorskip("torch")
    good = load_all(folder)
    rng = random.Random(seed)
    files = sorted(file for file in folder.glob("*.distcp") if file.stat().st_size)
    missed = []
    for _ in range(count):
        file = rng.choice(files)
        content = file.read_bytes()
        at, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        damage.flip_byte(file, at, bit)
        if judge(folder, VerifyOptions(level=DEEP)).whole:
            now = load_all(folder)
            if now is None or any(not torch.equal(now[fqn], good[fqn]) for fqn in good):
                missed.append((file.name, at, bit))
        file.write_bytes(content)
    assert not missed


@pytest.mark.filterwarnings("ignore")
def test_flips_that_matter_are_found(fresh):
    flips(fresh("dcp"), 100, 1)  # the slow test makes 2000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_flips_that_matter_are_found(fresh):
    flips(fresh("dcp"), 2000, 2)


def test_unzip_agrees_that_the_fixtures_are_whole():
    """Our oracle for CRCs that we did not write."""
    import io

    checkpoint = dcptool.open(FOREIGN / "w_async")
    for entry in checkpoint.tensors.values():
        for chunk in entry.chunks:
            data = (FOREIGN / "w_async" / chunk.item.file).read_bytes()
            part = data[chunk.item.byte_offset : chunk.item.byte_offset + chunk.item.nbytes]
            assert zipfile.ZipFile(io.BytesIO(part)).testzip() is None
