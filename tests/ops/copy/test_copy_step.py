"""A step is copied byte for byte and proven on the way; anything else is refused, and leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import (
    CheckpointNotFoundError,
    DcptoolError,
    ItemError,
    OutputExistsError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
)
from dcptool.ops.copy.copy import copy_steps
from dcptool.ops.copy.step import CopyOptions
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests.conftest import FOREIGN, OLD, WHOLE, run
from tests.damage import flip_byte, truncate

SOURCE = FOREIGN / "xver_t2130"
pytestmark = pytest.mark.torchfree


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def deep(path) -> dcptool.verify:
    return dcptool.verify(path, VerifyOptions(Level.DEEP)).verdicts[0]


@pytest.fixture
def step(tmp_path) -> Path:
    """A step of a trainer's, with files beside it."""
    folder = Path(shutil.copytree(SOURCE, tmp_path / "run" / "step_1"))
    (folder / "trainer_state.json").write_text('{"step": 1}')
    (folder / "data").mkdir()
    (folder / "data" / "order.txt").write_text("3 1 2")
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    return folder


@pytest.fixture
def small_parts(monkeypatch):
    """Parts so short that items lie over many of them."""
    monkeypatch.setattr("dcptool.storage.parts.LOCAL_PART_NBYTES", 1000)


@pytest.mark.parametrize("part", [part for part in WHOLE if part.path.is_dir()], ids=lambda part: part.name)
def test_every_checkpoint_comes_out_byte_for_byte_and_every_crc32_is_compared(part, tmp_path, monkeypatch):
    target = tmp_path / "step_1"
    done = copy_steps(part.path, target)
    assert not done.is_run
    assert done.good
    copied, source = contents(target), contents(part.path)
    marker = json.loads(copied.pop("_COMPLETE"))
    assert copied == source
    assert sorted(os.listdir(tmp_path)) == ["step_1"]
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in source.items()}
    assert marker["sha256"] == {name: digests[name] for name in marker["files"]}
    verdict = deep(target)
    assert verdict.state is State.COMPLETE
    assert verdict.marker.sha256
    # However the file is cut into parts, the same is compared; and as much as there are checksums.
    monkeypatch.setattr("dcptool.storage.parts.LOCAL_PART_NBYTES", 700)
    again = copy_steps(part.path, tmp_path / "again")
    assert contents(tmp_path / "again").keys() == contents(target).keys()
    assert again.steps[0].n_checked == done.steps[0].n_checked
    tally = verdict.tally
    assert done.steps[0].n_checked >= tally.n_items - tally.n_unverifiable


def test_a_step_of_a_trainer_with_all_that_lies_in_it(step, tmp_path):
    os.symlink("trainer_state.json", step / "link.json")
    done = copy_steps(step, tmp_path / "copies" / "step_1").steps[0]
    assert (done.state, done.kept_nbytes, done.retries) == ("copied", 0, 0)
    copied = contents(tmp_path / "copies" / "step_1")
    del copied["_COMPLETE"]
    assert copied == contents(step)
    assert {name for name, _ in done.files} == copied.keys()
    assert done.files[-1][0] == ".metadata"  # what makes it look complete comes last
    assert not os.path.islink(tmp_path / "copies" / "step_1" / "link.json")
    times = {file.stat().st_mtime for file in (tmp_path / "copies").rglob("*.distcp")}
    assert times == {OLD}  # a copy does not make a step newer


def test_links_that_are_left_out_are_named(step, tmp_path):
    os.symlink(tmp_path, step / "elsewhere")
    os.symlink("nowhere", step / "dangling")
    (step / "real").symlink_to("data/order.txt")
    done = copy_steps(step, tmp_path / "out").steps[0]
    assert "not copied, for they lead to folders or nowhere: the links dangling, elsewhere" in done.notes
    assert sorted(os.listdir(tmp_path / "out")) == sorted({*os.listdir(step), "_COMPLETE"} - {"elsewhere", "dangling"})


def test_nothing_is_under_the_final_name_until_all_is(step, tmp_path):
    target = tmp_path / "out"
    seen = []
    copy_steps(step, target, progress=lambda nbytes: seen.append(target.exists()))
    assert seen
    assert not any(seen)
    assert target.is_dir()


@pytest.mark.parametrize("byte", range(0, 20_000, 613))
def test_a_flipped_bit_is_refused_wherever_a_deep_look_finds_it(step, tmp_path, byte, small_parts):
    file = step / "__0_0.distcp"
    flip_byte(file, byte % file.stat().st_size, 0x10)
    sound = deep(step).whole
    if sound:  # padding, which nothing vouches for
        copy_steps(step, tmp_path / "out")
        return
    with pytest.raises(ItemError, match="not copied"):
        copy_steps(step, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_all_that_is_damaged_is_told_at_once(step, tmp_path):
    found = dcptool.open(step)
    damaged = []
    for fqn, entry in found.tensors.items():
        payload = found.payload(entry, entry.chunks[0]) if len(entry.chunks) else None
        if payload and payload.record.nbytes and len(damaged) < 3:
            record = payload.record
            flip_byte(step / record.item.file, record.item.byte_offset + record.byte_offset)
            damaged.append(fqn)
    with pytest.raises(ItemError) as caught:
        copy_steps(step, tmp_path / "out")
    assert all(repr(fqn) in str(caught.value) for fqn in damaged)
    assert "CRC32" in str(caught.value)


def with_zip(step: Path, compression: int) -> Path:
    path = step / "optimizer.pt"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.bin", bytes(range(256)) * 40)
        archive.writestr("archive/empty", b"")
        archive.writestr("archive/other.bin", b"x" * 5000)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_beside_the_checkpoint_is_checked_too(step, tmp_path, compression, small_parts):
    path = with_zip(step, compression)
    assert copy_steps(step, tmp_path / "out").good
    flip_byte(path, path.read_bytes().index(b"data.bin") + 60)
    with pytest.raises(ItemError, match=r"optimizer\.pt"):
        copy_steps(step, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_a_marker_vouches_for_is_compared(step, tmp_path):
    dcptool.mark_complete(step, checksums=True)
    done = copy_steps(step, tmp_path / "out")
    assert done.steps[0].n_claimed == len(done.steps[0].files)
    # A marker that has everything already is carried as it is.
    assert (tmp_path / "out" / "_COMPLETE").read_bytes() == (step / "_COMPLETE").read_bytes()
    (step / "data" / "order.txt").write_text("1 2 3")  # as long as before; only its hash tells
    with pytest.raises(ItemError, match=r"data/order\.txt is not what _COMPLETE lists"):
        copy_steps(step, tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_metadata_that_a_marker_does_not_vouch_for_is_never_published(step, tmp_path):
    dcptool.mark_complete(step, checksums=True)
    document = json.loads((step / "_COMPLETE").read_text())
    document["sha256"][".metadata"] = "0" * 64
    (step / "_COMPLETE").write_text(json.dumps(document))
    with pytest.raises(ItemError, match=r"\.metadata is not what _COMPLETE lists"):
        copy_steps(step, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_what_a_manifest_lists_is_compared(step, tmp_path):
    digest = hashlib.md5((step / "data" / "order.txt").read_bytes()).hexdigest()
    (step / "MD5SUMS").write_text(f"{digest}  data/order.txt\n")
    assert copy_steps(step, tmp_path / "out").steps[0].n_claimed == 1
    (step / "data" / "order.txt").write_text("1 2 3")
    with pytest.raises(ItemError, match=r"data/order\.txt is not what MD5SUMS lists: its md5 is another"):
        copy_steps(step, tmp_path / "other")


def test_a_marker_of_a_save_stays_one(step, tmp_path):
    dcptool.mark_complete(step, saved=True)
    before = json.loads((step / "_COMPLETE").read_text())
    copy_steps(step, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "_COMPLETE").read_text())
    assert before["writer"] == "save"
    assert "sha256" not in before
    assert {**after, "sha256": None} == {**before, "sha256": None}
    assert after["sha256"].keys() == after["files"].keys()


class TestRefused:
    def refused(self, step, tmp_path, error, words):
        with pytest.raises(error, match=words):
            copy_steps(step, tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["run"]
        done = run("copy", step, tmp_path / "out")
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith("error: ")
        assert sorted(os.listdir(tmp_path)) == ["run"]

    def test_incomplete(self, step, tmp_path):
        (step / "__1_0.distcp").unlink()
        self.refused(step, tmp_path, ItemError, r"is not whole, not copied:\n__1_0.distcp \(rank 1\) is missing")

    def test_cut(self, step, tmp_path):
        truncate(step / "__1_0.distcp", 500)
        self.refused(step, tmp_path, ItemError, "is cut short")

    def test_being_written(self, step, tmp_path):
        (step / ".incomplete").touch()
        self.refused(step, tmp_path, StorageError, "is being written, not copied")

    def test_unfinished(self, step, tmp_path):
        (step / "_SAVING").write_text("")
        os.utime(step / "_SAVING", (OLD, OLD))
        self.refused(step, tmp_path, ItemError, "a save began here and has not finished")

    def test_a_marker_of_another_save(self, step, tmp_path):
        dcptool.mark_complete(step)
        document = json.loads((step / "_COMPLETE").read_text())
        document["metadata_sha256"][".metadata"] = "0" * 64
        (step / "_COMPLETE").write_text(json.dumps(document))
        self.refused(step, tmp_path, ItemError, "has no marker that is right")

    def test_no_checkpoint(self, step, tmp_path):
        self.refused(step / "data", tmp_path, ItemError, "is no checkpoint that can be copied")

    def test_a_file(self, step, tmp_path):
        self.refused(step / "__0_0.distcp", tmp_path, UnsupportedError, "is a file, no step")

    def test_nothing(self, step, tmp_path):
        self.refused(step / "nowhere", tmp_path, CheckpointNotFoundError, "no such file")

    def test_itself_and_around_it(self, step, tmp_path):
        for target in (step, step / "copy", step.parent):
            with pytest.raises((UnsupportedError, OutputExistsError)):
                copy_steps(step, target)
        assert sorted(os.listdir(tmp_path)) == ["run"]
        assert sorted(os.listdir(step.parent)) == ["step_1"]

    def test_unsafe_but_with_trust(self, step, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.system, ("true",)

        (step / "rng_state_0.pth").write_bytes(pickle.dumps(Evil()))
        self.refused(step, tmp_path, UnsafePickleError, "runs code when it is loaded")
        assert run("copy", "--trust", step, tmp_path / "out").returncode == 0
        assert (tmp_path / "out" / "rng_state_0.pth").read_bytes() == (step / "rng_state_0.pth").read_bytes()

    def test_trust_does_not_take_damage(self, step, tmp_path):
        (step / "__1_0.distcp").unlink()
        with pytest.raises(ItemError):
            copy_steps(step, tmp_path / "out", CopyOptions(trust=True))


@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata", "data/order.txt"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_step_that_changes_meanwhile_is_not_published(step, tmp_path, file, after):
    """Another save's file of the same size is put in place as the first, or the last, bytes pass."""
    total = sum(len(data) for data in contents(step).values())
    content = (step / file).read_bytes()
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if after == 0 or done == total:
            (step / file).write_bytes(content)

    with pytest.raises(StorageError, match="changed while it was read, nothing was published"):
        copy_steps(step, tmp_path / "out", progress=progress)
    assert not (tmp_path / "out").exists()
    assert copy_steps(step, tmp_path / "out").good
    assert deep(tmp_path / "out").state is State.COMPLETE


class TestSomethingIsThere:
    def test_the_same_step(self, step, tmp_path):
        copy_steps(step, tmp_path / "out")
        before = {file: file.stat().st_ctime_ns for file in (tmp_path / "out").rglob("*")}
        done = run("copy", step, tmp_path / "out")
        assert done.returncode == 0
        assert "there already, the same step" in done.stdout
        assert {file: file.stat().st_ctime_ns for file in (tmp_path / "out").rglob("*")} == before

    def test_metadata_is_compared_whatever_a_marker_says(self, step, tmp_path):
        """The step was saved again in its place, and nobody marked it."""
        dcptool.mark_complete(step, checksums=True)
        copy_steps(step, tmp_path / "out")
        flip_byte(step / ".metadata", 20_000)
        with pytest.raises(OutputExistsError):
            copy_steps(step, tmp_path / "out")

    @pytest.mark.parametrize("change", ["bytes", "longer", "more", "less", "unmarked", "no checksums"])
    def test_not_quite_the_same(self, step, tmp_path, change):
        copy_steps(step, tmp_path / "out")
        if change == "bytes":
            (step / "data" / "order.txt").write_text("1 2 3")
        elif change == "longer":
            (step / "data" / "order.txt").write_text("1 2 3 4")
        elif change == "more":
            (step / "new.txt").write_text("1")
        elif change == "less":
            (step / "data" / "order.txt").unlink()
        else:
            (tmp_path / "out" / "_COMPLETE").unlink()
            if change == "no checksums":
                dcptool.mark_complete(tmp_path / "out")
        with pytest.raises(OutputExistsError, match="is there already"):
            copy_steps(step, tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["out", "run"]

    def test_a_folder_of_copies(self, step, tmp_path):
        (tmp_path / "copies" / "step_0").mkdir(parents=True)
        with pytest.raises(OutputExistsError) as caught:
            copy_steps(step, tmp_path / "copies")
        assert caught.value.next_step == f"To copy it into that folder: {tmp_path}/copies/step_1"

    def test_an_empty_folder_is_filled(self, step, tmp_path):
        (tmp_path / "out").mkdir()
        assert copy_steps(step, tmp_path / "out").good

    def test_overwrite(self, tmp_path):
        shutil.copytree(FOREIGN / "ddp", tmp_path / "out")
        done = copy_steps(SOURCE, tmp_path / "out", CopyOptions(overwrite=True)).steps[0]
        assert done.state == "copied"
        assert done.notes[0].startswith("--overwrite replaces what is at")
        assert contents(tmp_path / "out").keys() == {*contents(SOURCE), "_COMPLETE"}
        assert sorted(os.listdir(tmp_path)) == ["out"]

    def test_overwrite_takes_no_other_folder(self, step, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "photo.jpg").write_bytes(b"1")
        with pytest.raises(OutputExistsError, match="is not one checkpoint and nothing else"):
            copy_steps(step, tmp_path / "out", CopyOptions(overwrite=True))
        assert os.listdir(tmp_path / "out") == ["photo.jpg"]


def test_dry_run(step, tmp_path):
    done = run("copy", "--dry-run", step, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "trainer_state.json" in done.stdout
    assert "of memory for parts of files" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["run"]
    (step / "__1_0.distcp").unlink()
    assert run("copy", "--dry-run", step, tmp_path / "out").returncode == 3


def test_json_and_quiet(step, tmp_path):
    done = run("copy", "--json", step, tmp_path / "out")
    document = json.loads(done.stdout)
    assert (document["schema"], document["is_run"], document["good"]) == (1, False, True)
    assert document["steps"][0]["state"] == "copied"
    assert document["steps"][0]["nbytes"] > 0
    done = run("copy", "--quiet", step, tmp_path / "other")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_memory_is_bounded_by_what_is_printed(tmp_path, monkeypatch):
    """However long the files: the buffers that were made are no more than a dry run says."""
    monkeypatch.setattr("dcptool.storage.parts.LOCAL_PART_NBYTES", 4096)
    made = []
    monkeypatch.setattr("dcptool.ops.copy.moving.bytearray", lambda n: made.append(n) or bytearray(n), raising=False)
    (plan,) = copy_steps(SOURCE, tmp_path / "out", CopyOptions(threads=3), dry_run=True).steps
    copy_steps(SOURCE, tmp_path / "out", CopyOptions(threads=3))
    assert 0 < sum(made) <= plan.memory_nbytes == 8 * 4096


class TestRuns:
    def test_the_complete_ones_that_are_not_there_oldest_first(self, run_of, tmp_path):
        folder = run_of("step_1", "step_2", "step_3", "step_4")
        (folder / "step_2" / "__1_0.distcp").unlink()
        for name in ("step_4", "step_1", "step_3"):  # the order of their saves
            dcptool.mark_complete(folder / name, saved=True)
        copy_steps(folder / "step_1", tmp_path / "copies" / "step_1")
        done = run("copy", folder, tmp_path / "copies")
        assert done.returncode == 1
        rows = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("step_")]
        assert sorted(rows) == [["step_1", "there"], ["step_2", "left"], ["step_3", "copied"], ["step_4", "copied"]]
        order = [name for name, _ in rows if name != "step_2"]
        assert order == ["step_4", "step_1", "step_3"]
        assert sorted(os.listdir(tmp_path / "copies")) == ["step_1", "step_3", "step_4"]
        assert dcptool.find_latest(tmp_path / "copies").path == str(tmp_path / "copies" / "step_3")
        shutil.rmtree(folder / "step_2")
        again = copy_steps(folder, tmp_path / "copies")
        assert again.good
        assert {step.state for step in again.steps} == {"there"}
        assert again.nbytes == 0

    def test_one_that_turns_out_damaged_is_left_and_the_others_go_on(self, run_of, tmp_path):
        folder = run_of("step_1", "step_2")
        file = folder / "step_1" / "__1_0.distcp"
        flip_byte(file, next(at for at in range(1000, 20000, 97) if self.is_found(file, at)), 0)
        flip_byte(file, self.at)
        done = copy_steps(folder, tmp_path / "copies")
        assert [(step.name, step.state) for step in done.steps] == [("step_1", "left"), ("step_2", "copied")]
        assert done.steps[0].reason.startswith("damaged: ")
        assert not done.good
        assert sorted(os.listdir(tmp_path / "copies")) == ["step_2"]

    def is_found(self, file: Path, at: int) -> bool:
        flip_byte(file, at)
        verdict = deep(file.parent)
        flip_byte(file, at)
        self.at = at
        return any(finding.kind == "wrong-crc" for finding in verdict.findings)

    def test_in_a_folder_of_their_own_they_are_put_into_one(self, run_of, tmp_path):
        run_of("step_1").rename(tmp_path / "ckpt")
        (tmp_path / "job").mkdir()
        (tmp_path / "ckpt").rename(tmp_path / "job" / "ckpt")
        done = copy_steps(tmp_path / "job", tmp_path / "archive")
        assert done.good
        assert (tmp_path / "archive" / "ckpt" / "step_1" / "_COMPLETE").exists()

    def test_being_written_is_no_failure(self, run_of, tmp_path):
        folder = run_of("step_1", "step_2")
        (folder / "step_2" / ".incomplete").touch()
        done = copy_steps(folder, tmp_path / "copies")
        assert [step.state for step in done.steps] == ["copied", "left"]
        assert done.good

    def test_overwrite_is_for_one_step(self, run_of, tmp_path):
        with pytest.raises(DcptoolError, match="--overwrite is for one step"):
            copy_steps(run_of("step_1"), tmp_path / "copies", CopyOptions(overwrite=True))


class TestHalves:
    @pytest.fixture
    def halves(self, step, tmp_path) -> tuple[Path, Path]:
        other = tmp_path / "node1" / "step_1"
        (other / "data").mkdir(parents=True)
        for name in ("__1_0.distcp", "data/order.txt"):
            shutil.move(step / name, other / name)
        shutil.copy2(step / "trainer_state.json", other)  # each node wrote it
        return step, other

    def test_are_gathered(self, halves, tmp_path):
        step, other = halves
        with pytest.raises(ItemError, match="is missing"):
            copy_steps(step, tmp_path / "out")
        done = run("copy", step, tmp_path / "out", "--also", other)
        assert done.returncode == 0, done.stderr
        assert contents(tmp_path / "out").keys() == {*contents(step), *contents(other), "_COMPLETE"}
        assert deep(tmp_path / "out").state is State.COMPLETE
        assert dcptool.compare(SOURCE, tmp_path / "out").equal

    def test_of_a_run(self, halves, tmp_path):
        step, other = halves
        done = copy_steps(step.parent, tmp_path / "out", CopyOptions(also=(str(other.parent),)))
        assert done.good
        assert done.is_run
        assert deep(tmp_path / "out" / "step_1").state is State.COMPLETE

    def test_that_are_not_of_one_save(self, halves, tmp_path):
        step, other = halves
        (other / "trainer_state.json").write_text('{"step": 2}')
        with pytest.raises(StorageError, match="these folders are not halves of one save"):
            copy_steps(step, tmp_path / "out", CopyOptions(also=(str(other),)))


@pytest.mark.torchfree
@pytest.mark.parametrize("tracker", ["10", "7", None])
def test_a_trainer_that_would_not_find_the_copy_is_named(tmp_path, tracker):
    shutil.copytree(FOREIGN / "megatron_tp2", tmp_path / "run")
    (tmp_path / "copy").mkdir()
    if tracker:
        (tmp_path / "copy" / "latest_checkpointed_iteration.txt").write_text(tracker)
    for source in ("run/iter_0000010", "run"):
        name = "copy/iter_0000010" if "/" in source else "copy"
        (step,) = dcptool.copy_steps(tmp_path / source, tmp_path / name).steps
        said = [note for note in step.notes if "latest_checkpointed_iteration.txt" in note]
        assert bool(said) == (tracker != "10")
        assert all("write 10 into it" in note for note in said)
