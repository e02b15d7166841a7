"""Run directories: markers, which step to resume from, which to delete; on a disk and in an object store."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError, ItemError, StorageError, UnsupportedError
from dcptool.formats.marker import FOREIGN, NEGATIVE
from dcptool.ops.prune import Decision, PrunePlan, delete_steps, make_plan, plan_prune
from dcptool.ops.verify.verdict import State, Verdict, VerifyOptions, judge
from dcptool.runs.directory import find_runs
from dcptool.runs.pointers import read_pointers
from dcptool.storage import locate
from tests import damage
from tests.conftest import FOREIGN as CHECKPOINTS
from tests.conftest import OLD
from tests.conftest import run as cli

torchfree = pytest.mark.torchfree
GOOD = CHECKPOINTS / "run_crashed" / "ckpt" / "step_100"


@pytest.fixture
def run(tmp_path):
    """Gives a run directory with whole steps of these names, without markers, written long ago."""

    def make(*names: str) -> Path:
        folder = tmp_path / "run"
        for name in names:
            shutil.copytree(GOOD, folder / name, ignore=shutil.ignore_patterns("COMPLETE"))
        return folder

    return make


def saved(step: Path, writer: str = "save") -> None:
    """Write the marker as a save does, or by hand."""
    dcptool.mark_complete(step)
    document = json.loads((step / "_COMPLETE").read_text())
    (step / "_COMPLETE").write_text(json.dumps({**document, "writer": writer}))


def crash(step: Path) -> None:
    """Leave a step as a job killed in its save does."""
    (step / ".metadata").unlink()


def latest(path, **options):
    return dcptool.find_latest(path, VerifyOptions(**options))


def names(verdicts) -> list[tuple[str, str]]:
    return [(verdict.name, verdict.state.value) for verdict in verdicts]


@torchfree
class TestLatest:
    def test_the_newest_that_is_whole_whatever_its_name_sorts_like(self, run):
        folder = run("step_9", "step_10", "step_11", "notes", "step_12.tmp", "tmp_step_13")
        crash(folder / "step_11")
        found = latest(folder)
        assert found.path == str(folder / "step_10")
        assert names(found.skipped) == [("step_11", "incomplete")]

    @pytest.mark.parametrize("how", ["removed", "temporary", "cut", "empty"])
    def test_r01_a_save_that_never_finished(self, run, how):
        folder = run("step-10", "step-20")
        metadata = folder / "step-20" / ".metadata"
        if how in ("removed", "temporary"):
            (metadata.unlink if how == "removed" else lambda: metadata.rename(f"{metadata}.tmp"))()
        else:
            damage.truncate(metadata, 300 if how == "cut" else 0)
            os.utime(metadata, (OLD, OLD))
        found = latest(folder)
        assert found.path == str(folder / "step-10")
        (skipped,) = found.skipped
        words = {"removed": "no .metadata", "temporary": ".metadata.tmp is there", "cut": "byte", "empty": "empty"}
        assert words[how] in skipped.reason
        plan = make_plan(folder, 1, now=time.time())
        assert [decision.name for decision in plan.removed] == []
        assert (folder / "step-20" / ".metadata.tmp").exists() == (how == "temporary")

    def test_none_is_an_answer(self, run):
        folder = run("step_1", "step_2")
        crash(folder / "step_1")
        crash(folder / "step_2")
        assert latest(folder).path is None
        done = cli("latest", folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert "no complete step to resume from" in done.stderr
        found = latest(folder / "step_1")
        assert (found.path, found.skipped) == (None, ())
        assert "no steps" in found.problem
        with pytest.raises(CheckpointNotFoundError, match="no such file"):
            latest(folder / "gone")

    def test_r20_no_pointer_or_a_pointer_that_is_wrong(self, run):
        folder = run("global_step_10", "global_step_20", "global_step_30")
        assert latest(folder).pointers == ()
        tracker = folder / "latest_checkpointed_iteration.txt"
        for text, kind in (("40", "dangling-pointer"), ("10", "stale-pointer"), ("30\n", None)):
            tracker.write_text(text)
            found = latest(folder)
            assert found.path == str(folder / "global_step_30")
            assert [problem.kind for problem in found.pointers] == ([kind] if kind else [])
        crash(folder / "global_step_30")
        assert [problem.kind for problem in latest(folder).pointers] == ["wrong-pointer"]

    def test_links_are_pointers_not_steps(self, run):
        folder = run("step_1", "step_2")
        (folder / "latest").symlink_to("step_2")
        (folder / "last.ckpt").symlink_to(folder / "step_7")
        (folder / "step_99").symlink_to("step_1")
        found = latest(folder)
        assert found.path == str(folder / "step_2")
        assert [(problem.kind, problem.file) for problem in found.pointers] == [("dangling-pointer", "last.ckpt")]
        named = read_pointers(find_runs(locate(folder))[0]).named
        assert named == {"last.ckpt": "step_7", "latest": "step_2", "step_99": "step_1"}

    def test_of_older_steps_at_most_the_marker_is_read(self, run, monkeypatch):
        from dcptool.storage import LocalStorage

        folder = run(*(f"step_{number}" for number in range(1, 9)))
        saved(folder / "step_2", "mark")
        reads = set()
        read = LocalStorage.read
        monkeypatch.setattr(LocalStorage, "read", lambda s, name, *a: reads.add((s.root, name)) or read(s, name, *a))
        assert latest(folder).path == str(folder / "step_8")
        assert {(root, name) for root, name in reads if not root.endswith("step_8")} == {
            (str(folder / "step_2"), "_COMPLETE")
        }

    def test_deep_finds_what_the_sizes_do_not_show(self, run):
        folder = run("step_1", "step_2")
        place = folder / "step_2" / "__1_0.distcp"
        damage.flip_byte(place, _payload(folder / "step_2", place.name))
        assert latest(folder).path == str(folder / "step_2")
        found = latest(folder, level=Level.DEEP)
        assert found.path == str(folder / "step_1")
        assert "CRC32" in found.skipped[0].reason


def _payload(step: Path, file: str) -> int:
    """A byte of a payload in a file."""
    checkpoint = dcptool.open(step)
    for entry in checkpoint.tensors.values():
        for chunk in entry.chunks:
            payload = checkpoint.payload(entry, chunk)
            if chunk.item.file == file and payload.record.nbytes:
                return chunk.item.byte_offset + payload.record.byte_offset
    raise AssertionError


class TestMarkers:
    def test_once_saves_write_markers_one_without_is_not_complete(self, run):
        folder = run("step_1", "step_2", "step_3")
        saved(folder / "step_2")
        found = latest(folder)
        assert found.path == str(folder / "step_2")
        assert names(found.skipped) == [("step_3", "unmarked")]
        done = cli("latest", folder)
        assert "WARNING: step_3 is unmarked" in done.stderr
        assert "dcptool mark" in done.stderr
        report = dcptool.verify(folder)
        assert names(report.verdicts) == [("step_1", "complete"), ("step_2", "complete"), ("step_3", "unmarked")]
        assert not report.good

    def test_marking_an_old_step_by_hand_hides_no_newer_one(self, run):
        folder = run("step_1", "step_2", "step_3")
        dcptool.mark_complete(folder / "step_1")
        assert latest(folder).path == str(folder / "step_3")
        assert dcptool.verify(folder).good

    @pytest.mark.parametrize("name", FOREIGN)
    def test_markers_of_other_software(self, run, name):
        folder = run("step_1", "step_2")
        (folder / "step_1" / name).write_text("")
        assert names(latest(folder).skipped) == [("step_2", "unmarked")]
        verdict = judge(folder / "step_1", VerifyOptions(require_marker=True))
        assert (verdict.state, verdict.marker.name) == (State.COMPLETE, name)

    def test_a_name_of_your_own(self, run):
        folder = run("step_1")
        assert judge(folder / "step_1", VerifyOptions(require_marker=True, marker="OK")).state is State.UNMARKED
        (folder / "step_1" / "OK").write_text("")
        assert judge(folder / "step_1", VerifyOptions(require_marker=True, marker="OK")).state is State.COMPLETE
        dcptool.mark_complete(folder / "step_1", marker="OK")
        assert json.loads((folder / "step_1" / "OK").read_text())["writer"] == "mark"

    @pytest.mark.parametrize("name", NEGATIVE)
    def test_a_sign_that_it_is_being_written(self, run, name):
        folder = run("step_1", "step_2")
        (folder / "step_2" / name).write_text("")
        assert names(latest(folder).skipped) == [("step_2", "in-progress")]
        assert dcptool.verify(folder).good
        assert not dcptool.verify(folder / "step_2").good
        with pytest.raises(ItemError, match="in-progress, not marked"):
            dcptool.mark_complete(folder / "step_2")
        (folder / "step_2" / name).unlink()
        (folder / "step_2-unfinished").mkdir()
        assert latest(folder).path == str(folder / "step_1")

    def test_grace(self, run):
        folder = run("step_1", "step_2")
        crash(folder / "step_2")
        now = time.time()
        os.utime(folder / "step_2" / "__0_0.distcp", (now - 1800, now - 1800))
        assert judge(folder / "step_2").state is State.IN_PROGRESS
        assert judge(folder / "step_2", VerifyOptions(grace=60)).state is State.INCOMPLETE
        (folder / "step_2" / "_COMPLETE").write_text("")  # the save was done: the metadata was lost later
        assert judge(folder / "step_2").state is State.INCOMPLETE

    def test_what_changes_while_it_is_looked_at_is_in_progress(self, run, monkeypatch):
        import dcptool.ops.verify.verdict as module

        folder = run("step_1")
        check = module.check

        def slow(*args, **kwargs):
            with (folder / "step_1" / "__0_0.distcp").open("ab") as file:
                file.write(b"more")
            return check(*args, **kwargs)

        monkeypatch.setattr(module, "check", slow)
        verdict = judge(folder / "step_1")
        assert verdict.state is State.IN_PROGRESS
        assert "__0_0.distcp changed while it was looked at" in verdict.reason

    def test_the_document(self, run):
        folder = run("step_500")
        marked = dcptool.mark_complete(folder / "step_500", checksums=True)
        document = json.loads((folder / "step_500" / "_COMPLETE").read_text())
        assert document["schema"] == 1
        assert (document["writer"], document["step"], document["world_size"]) == ("mark", 500, 2)
        assert set(document["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"} == set(document["sha256"])
        assert set(document["metadata_sha256"]) == {".metadata"}
        assert len(document["save_id"]) == 36
        again = judge(folder / "step_500", VerifyOptions(level=Level.DEEP))
        assert again.marker == marked.marker
        assert again.state is State.COMPLETE

    def test_a_marker_that_cannot_be_read_or_lists_what_is_gone(self, run):
        folder = run("step_1")
        (folder / "step_1" / "rng.pt").write_bytes(b"state")
        dcptool.mark_complete(folder / "step_1")
        (folder / "step_1" / "rng.pt").unlink()
        verdict = judge(folder / "step_1")
        assert (verdict.state, verdict.findings[0].file) == (State.INCOMPLETE, "rng.pt")
        (folder / "step_1" / "_COMPLETE").write_text('{"schema": 7}')
        verdict = judge(folder / "step_1")
        assert (verdict.state, verdict.marker) == (State.UNMARKED, None)
        assert "cannot be read" in verdict.reason

    def test_only_what_verifies_is_marked(self, run):
        folder = run("step_1")
        damage.truncate(folder / "step_1" / "__0_0.distcp", 100)
        done = cli("mark", folder / "step_1")
        assert done.returncode == 3
        assert "not marked" in done.stderr
        assert not (folder / "step_1" / "_COMPLETE").exists()
        with pytest.raises(UnsupportedError, match="is a file"):
            dcptool.mark_complete(folder / "step_1" / ".metadata")

    def test_no_false_alarm_on_a_fresh_checkout(self, tmp_path):
        """Files come in any order, all within moments of now."""
        for position, file in enumerate(sorted(GOOD.iterdir(), reverse=True)):
            (tmp_path / "c").mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / "c")
            os.utime(tmp_path / "c" / file.name, (OLD + position, OLD + position))
        verdict = judge(tmp_path / "c")
        assert verdict.state is State.COMPLETE
        assert verdict.findings == ()


@torchfree
class TestComposite:
    @pytest.fixture
    def composite(self, run, tmp_path):
        folder = tmp_path / "run"
        for number in (10, 20, 30):
            for part in ("actor", "critic"):
                shutil.copytree(GOOD, folder / f"global_step_{number}" / part / "dist_ckpt")
            (folder / f"global_step_{number}" / "data").mkdir()
            (folder / f"global_step_{number}" / "data" / "data.pt").write_bytes(b"x")
        return folder

    def test_a_part_that_all_other_steps_have_is_missed(self, composite):
        assert latest(composite).path == str(composite / "global_step_30")
        shutil.rmtree(composite / "global_step_30" / "critic")
        found = latest(composite)
        assert found.path == str(composite / "global_step_20")
        assert "the part critic/dist_ckpt is missing" in found.skipped[0].reason
        assert names(dcptool.verify(composite).verdicts)[-1] == ("global_step_30", "incomplete")

    def test_parts_that_are_asked_for(self, composite):
        (composite / "global_step_30" / "data" / "data.pt").unlink()
        assert latest(composite).path == str(composite / "global_step_30")
        done = cli("latest", "--require", "actor,critic,data/data.pt", composite)
        assert done.stdout == f"{composite / 'global_step_20'}\n"

    def test_the_worst_part_counts_and_one_marker_speaks_for_all(self, composite):
        step = composite / "global_step_30"
        dcptool.mark_complete(step)
        assert "actor/dist_ckpt/.metadata" in json.loads((step / "_COMPLETE").read_text())["metadata_sha256"]
        (step / "critic" / "dist_ckpt" / "__1_0.distcp").unlink()
        verdict = judge(step)
        assert verdict.state is State.INCOMPLETE
        assert verdict.findings[0].file == "critic/dist_ckpt/__1_0.distcp"


class TestNodeLocalHalves:
    """R02: every node wrote to a disk of its own."""

    @pytest.fixture
    def halves(self, tmp_path):
        source = CHECKPOINTS / "xver_t2130"
        for half, files in (
            ("a", (".metadata", "__0_0.distcp", "__1_0.distcp")),
            ("b", ("__2_0.distcp", "__3_0.distcp")),
        ):
            (tmp_path / half / "step_5").mkdir(parents=True)
            for file in files:
                shutil.copy(source / file, tmp_path / half / "step_5" / file)
                os.utime(tmp_path / half / "step_5" / file, (OLD, OLD))
        return tmp_path

    def test_one_half(self, halves):
        verdict = judge(halves / "a" / "step_5")
        assert verdict.state is State.INCOMPLETE
        assert "2 of 4 files (ranks 2–3) are missing" in verdict.reason
        assert "% of the bytes" in verdict.reason
        assert "tensors" in verdict.reason
        verdict = judge(halves / "b" / "step_5")
        assert "no .metadata, only data files of ranks 2–3" in verdict.reason

    def test_both(self, halves):
        for base in ("step_5", ""):
            done = cli("verify", "--deep", halves / "a" / base, "--also", halves / "b" / base)
            assert done.returncode == 0, done.stdout

    def test_a_name_in_both(self, halves):
        shutil.copy(halves / "a" / "step_5" / "__0_0.distcp", halves / "b" / "step_5")
        assert judge(halves / "a" / "step_5", VerifyOptions(also=(str(halves / "b" / "step_5"),))).whole
        damage.flip_byte(halves / "b" / "step_5" / "__0_0.distcp", 1000)
        with pytest.raises(StorageError, match="differ: these folders are not halves of one save"):
            judge(halves / "a" / "step_5", VerifyOptions(also=(str(halves / "b" / "step_5"),)))


def verdict(name: str, state: State = State.COMPLETE, written: float = 0.0) -> Verdict:
    """A verdict that nobody had to read anything for."""
    from dcptool.checkpoint.steps import step_number
    from dcptool.checks.items import Tally

    return Verdict(
        f"run/{name}", name, step_number(name), state, None, (), (), 3, 100, written, Level.METADATA, Tally()
    )


def plan(verdicts, keep, **options) -> dict[str, bool]:
    return {decision.name: decision.keep for decision in plan_prune("run", verdicts, keep, **options).decisions}


@torchfree
class TestPlan:
    STEPS = tuple(verdict(f"step_{number}") for number in (500, 1000, 1500, 2000, 2500))

    def test_the_newest_are_kept_by_number(self):
        kept = plan([*self.STEPS, verdict("step_9")], 2)
        assert [name for name, keep in kept.items() if keep] == ["step_2000", "step_2500"]
        assert next(iter(kept)) == "step_9"

    def test_only_complete_ones_count(self):
        steps = [*self.STEPS, verdict("step_3000", State.INCOMPLETE), verdict("step_3500", State.IN_PROGRESS)]
        kept = plan(steps, 1)
        assert [name for name, keep in kept.items() if keep] == ["step_2500", "step_3000", "step_3500"]

    def test_milestones_and_pointers(self):
        kept = plan(self.STEPS, 1, archive_every=1000, pointers={"latest": "step_1500"})
        assert [name for name, keep in kept.items() if not keep] == ["step_500"]

    def test_incomplete_ones_only_when_asked_and_old(self):
        steps = [verdict("step_1", State.DAMAGED, 100.0), verdict("step_2"), verdict("step_3", State.INCOMPLETE, 900.0)]
        assert all(plan(steps, 1).values())
        kept = plan(steps, 1, include_incomplete=True, older_than=500.0, now=1000.0)
        assert kept == {"step_1": False, "step_2": True, "step_3": True}
        kept = plan(steps, 1, include_incomplete=True, older_than=0.0, now=1000.0)
        assert kept == {"step_1": False, "step_2": True, "step_3": False}
        only = [verdict("step_1", State.INCOMPLETE, 0.0)]
        assert plan(only, 1, include_incomplete=True, older_than=0.0, now=1000.0) == {"step_1": True}

    @pytest.mark.parametrize("state", [State.IN_PROGRESS, State.OTHER])
    def test_never(self, state):
        steps = [verdict("step_1", state, 0.0), verdict("step_2")]
        assert plan(steps, 1, include_incomplete=True, older_than=0.0, now=1e9)["step_1"]

    def test_every_decision_has_a_reason(self):
        decisions = plan_prune("run", [*self.STEPS, verdict("step_9", State.OTHER)], 2, archive_every=1000).decisions
        assert all(decision.reason for decision in decisions)
        with pytest.raises(ValueError, match="at least 1"):
            plan_prune("run", self.STEPS, 0)


@torchfree
class TestDelete:
    def test_old_ones_go(self, run):
        folder = run(*(f"step_{number}" for number in (1, 2, 3, 4)), "notes")
        plan = make_plan(folder, 2, now=time.time())
        deleted = delete_steps(plan)
        assert deleted.names == ("step_1", "step_2")
        assert sorted(path.name for path in folder.iterdir()) == ["notes", "step_3", "step_4"]
        assert deleted.nbytes == plan.decisions[0].nbytes * 2 > 0

    def test_a_plan_is_looked_at_again_before_each_step(self, run):
        folder = run("step_1", "step_2", "step_3", "step_4")
        plan = make_plan(folder, 1, now=time.time())
        shutil.rmtree(folder / "step_1")  # somebody else did
        (folder / "step_2" / ".incomplete").write_text("")  # being written again
        (folder / "latest").write_text("step_3")
        deleted = delete_steps(plan)
        assert deleted.names == ()
        assert [name for name, _ in deleted.refused] == ["step_2", "step_3"]
        crash(folder / "step_4")
        (folder / "latest").unlink()
        assert delete_steps(plan).refused[-1] == ("step_3", "no newer step that is kept is complete any more")

    def test_a_half_deleted_step_never_looks_complete(self, run, monkeypatch):
        from dcptool.storage import LocalStorage

        folder = run("step_1", "step_2")
        saved(folder / "step_1")
        saved(folder / "step_2")
        plan = make_plan(folder, 1, now=time.time())
        seen = []
        delete = LocalStorage.delete

        def watch(storage, name):
            delete(storage, name)
            seen.append((name, judge(folder / "step_1").state))

        def fail(storage, name):
            raise StorageError("the disk is gone")

        monkeypatch.setattr(LocalStorage, "delete", watch)
        monkeypatch.setattr(LocalStorage, "delete_folder", fail)
        assert delete_steps(plan).refused == (("step_1", "the disk is gone; a part of it may be gone"),)
        assert [name for name, _ in seen] == ["_COMPLETE", ".metadata"]
        assert latest(folder).path == str(folder / "step_2")
        assert judge(folder / "step_1", VerifyOptions(grace=0)).state is State.INCOMPLETE

    def test_nothing_outside_the_run(self, run, tmp_path):
        folder = run("step_1", "step_2")
        shutil.copytree(GOOD, tmp_path / "elsewhere")
        shutil.rmtree(folder / "step_1")
        (folder / "step_1").symlink_to(tmp_path / "elsewhere")
        plan = PrunePlan(
            str(folder),
            tuple(Decision(name, False, "", State.COMPLETE, 0) for name in ("step_1", "../elsewhere", "..", "", ".")),
        )
        assert delete_steps(plan).names == ()
        assert (tmp_path / "elsewhere" / ".metadata").exists()

    def test_a_link_in_a_step_is_not_followed(self, run, tmp_path):
        folder = run("step_1", "step_2")
        (tmp_path / "dataset").mkdir()
        (tmp_path / "dataset" / "file").write_text("precious")
        (folder / "step_1" / "data").symlink_to(tmp_path / "dataset")
        delete_steps(make_plan(folder, 1, now=time.time()))
        assert not (folder / "step_1").exists()
        assert (tmp_path / "dataset" / "file").exists()


class TestCommandLine:
    def test_latest_prints_just_a_path(self, run):
        folder = run("step_1", "step_2")
        done = cli("latest", folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder / 'step_2'}\n", "")
        assert json.loads(cli("latest", "--json", folder).stdout)["step"] == 2
        done = cli("latest", "--quiet", folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_prune_needs_a_word_where_nobody_can_be_asked(self, run):
        folder = run("step_1", "step_2")
        assert cli("prune", folder, "--keep", "1").returncode == 2
        assert cli("prune", folder, "--keep", "1", "--dry-run", "--yes").returncode == 2
        assert cli("prune", folder, "--keep", "1", "--yes", "--include-incomplete").returncode == 2
        assert cli("prune", folder, "--keep", "0", "--dry-run").returncode == 2
        done = cli("prune", folder, "--keep", "1", "--dry-run")
        assert done.returncode == 0
        assert "DELETE" in done.stdout
        assert (folder / "step_1").exists()
        document = json.loads(cli("prune", folder, "--keep", "1", "--yes", "--json").stdout)
        assert document["deleted"]["names"] == ["step_1"]
        assert not (folder / "step_1").exists()
        assert "nothing to delete" in cli("prune", folder, "--keep", "1", "--yes").stdout

    def test_verify_says_what_and_where(self, run):
        folder = run("step_1", "step_2")
        (folder / "step_2" / "__1_0.distcp").unlink()
        done = cli("verify", folder)
        assert done.returncode == 1
        assert "step_2: incomplete" in done.stdout
        assert done.stdout.rstrip().endswith(f"newest complete step: {folder / 'step_1'}")
        document = json.loads(cli("verify", "--json", folder).stdout)
        assert [found["state"] for found in document["checkpoints"]] == ["complete", "incomplete"]
        assert document["checkpoints"][1]["findings"][0]["file"] == "__1_0.distcp"
        both = json.loads(cli("verify", "--json", folder / "step_1", folder / "step_2").stdout)
        assert [report["good"] for report in both["reports"]] == [True, False]
        assert cli("verify", "--quiet", folder / "step_1").stdout == ""
        assert cli("verify").returncode == 2
        assert cli("verify", "--trust", folder).returncode == 2
        assert cli("verify", "--threads", "2", folder).returncode == 2
        done = cli("verify", folder / "gone")
        assert done.returncode == 3
        assert "no such file" in done.stderr

    def test_durations(self, run):
        folder = run("step_1")
        assert cli("verify", "--grace", "1.5h", folder).returncode == 0
        done = cli("verify", "--grace", "5", folder)
        assert done.returncode == 2
        assert "no length of time" in done.stderr


class TestObjectStore:
    """No folders, no links, no rename: only keys."""

    @pytest.fixture
    def url(self, s3_url, run):
        import fsspec

        folder = run("step_1", "step_2", "step_10")
        filesystem, base = fsspec.url_to_fs(s3_url)
        filesystem.put(str(folder), base, recursive=True)
        return s3_url

    def test_a_run_from_verify_to_prune(self, url):
        import fsspec

        filesystem, base = fsspec.url_to_fs(url)
        assert latest(url).path == f"{url}/step_10"
        filesystem.rm_file(f"{base}/step_10/.metadata")
        assert names(latest(url, grace=0).skipped) == [("step_10", "incomplete")]
        assert names(latest(url).skipped) == [("step_10", "in-progress")]
        marked = dcptool.mark_complete(f"{url}/step_2", checksums=True)
        assert marked.path == f"{url}/step_2/_COMPLETE"
        assert judge(f"{url}/step_2", VerifyOptions(level=Level.DEEP)).state is State.COMPLETE
        filesystem.pipe_file(f"{base}/latest", b"step_10")
        assert [problem.kind for problem in latest(url).pointers] == ["wrong-pointer"]
        plan = make_plan(url, 1, now=time.time())
        assert [decision.name for decision in plan.removed] == ["step_1"]
        assert delete_steps(plan).names == ("step_1",)
        filesystem.invalidate_cache()
        assert not filesystem.exists(f"{base}/step_1")
        assert names(dcptool.verify(url).verdicts) == [("step_2", "complete"), ("step_10", "in-progress")]


def test_find_steps(run):
    folder = run("step_9", "step_10", "other")
    assert [(step.number, step.name) for step in dcptool.find_steps(folder)] == [(9, "step_9"), (10, "step_10")]
