"""What must never be deleted, overwritten or called complete: one test for each way it could come to that."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import dcptool
from dcptool.checkpoint.findings import Finding, Severity
from dcptool.checks.check import Level
from dcptool.errors import OutputExistsError, StorageError, UnsupportedError
from dcptool.formats.marker import is_marker
from dcptool.ops.prune import delete_steps, make_plan, plan_prune
from dcptool.ops.verify.verdict import State, VerifyOptions, judge
from dcptool.ops.verify.verify import compare_steps
from dcptool.runs.directory import find_runs
from dcptool.runs.pointers import read_pointers
from dcptool.storage import LocalStorage, locate
from tests import damage
from tests.conftest import FOREIGN, OLD
from tests.conftest import run as cli
from tests.runs.test_run_dirs import GOOD, crash, latest, names, plan, saved, verdict

DAY = 86400.0


def whole(path: Path) -> Path:
    """A whole step, written long ago, without a marker."""
    return Path(shutil.copytree(GOOD, path, ignore=shutil.ignore_patterns("COMPLETE")))


def steps(folder: Path, *names: str) -> Path:
    """A run directory with whole steps."""
    for name in names:
        whole(folder / name)
    return folder


def prune(folder: Path, keep: int = 1, **options) -> tuple[str, ...]:
    """Plan and delete; returns what was deleted."""
    return delete_steps(make_plan(folder, keep, now=time.time(), **options)).names


ASK = {"include_incomplete": True, "older_than": DAY}


def kinds(found) -> set[str]:
    return {finding.kind for finding in found.findings if finding.severity is Severity.ERROR}


class TestFoldersOfRuns:
    """Folders named by the number of a job hold runs; they are no steps."""

    @pytest.fixture
    def sweep(self, tmp_path):
        for job in ("1001", "1002"):
            steps(tmp_path / "sweep" / job, "step_100", "step_200")
        return tmp_path / "sweep"

    def test_no_command_takes_a_run_for_a_step(self, sweep):
        done = cli("prune", sweep, "--keep", "1", "--yes")
        assert done.returncode == 3
        assert "holds 2 run directories; name one:" in done.stderr
        assert f"{sweep / '1001'}  (2 steps)" in done.stderr
        assert len(list(sweep.glob("*/*/.metadata"))) == 4
        done = cli("latest", sweep)
        assert (done.returncode, done.stdout) == (1, "")
        assert "holds 2 run directories" in done.stderr
        found = judge(sweep / "1001")
        assert (found.state, kinds(found)) == (State.OTHER, {"run-directory"})
        assert dcptool.verify(sweep).verdicts[0].state is State.OTHER
        with pytest.raises(UnsupportedError, match="run director"):
            dcptool.mark_complete(sweep)

    def test_one_job_is_found(self, sweep):
        shutil.rmtree(sweep / "1002")
        assert latest(sweep).path == str(sweep / "1001" / "step_200")

    def test_a_run_deeper_inside_is_left_alone(self, tmp_path):
        steps(tmp_path / "1001" / "checkpoints", "step_1", "step_2")
        steps(tmp_path, "1002", "1003")
        assert prune(tmp_path) == ("1002",)

    def test_bare_numbers_are_steps_where_they_hold_checkpoints(self, tmp_path):
        for number in (100, 200, 300):
            whole(tmp_path / str(number) / "model")
        assert latest(tmp_path).path == str(tmp_path / "300")

    def test_a_step_named_again_inside_is_one_step(self, tmp_path):
        for number in (100, 200):
            whole(tmp_path / f"checkpoint-{number}" / f"iter_0000{number}")
        assert latest(tmp_path).path == str(tmp_path / "checkpoint-200")
        assert judge(tmp_path / "checkpoint-200").state is State.COMPLETE
        assert dcptool.mark_complete(tmp_path / "checkpoint-200").marker.step == 200

    def test_a_run_is_not_marked(self, tmp_path):
        steps(tmp_path, "step_1", "step_2")
        with pytest.raises(UnsupportedError, match="is a run directory; mark a step"):
            dcptool.mark_complete(tmp_path)
        assert not (tmp_path / "_COMPLETE").exists()


class TestWhatCouldNotBeRead:
    @pytest.mark.parametrize("kind", ["unreadable", "unsupported", "unsupported-item", "bad-metadata"])
    def test_it_is_left_alone(self, kind):
        bad = verdict("step_1", State.DAMAGED)._replace(findings=(Finding(kind, Severity.ERROR, "?"),))
        made = plan_prune("run", [bad, verdict("step_2")], 1, now=1e9, **ASK)
        assert (made.decisions[0].keep, made.decisions[0].reason) == (True, "could not be read: left alone")

    def test_a_damaged_pickle_stays_and_an_empty_one_goes(self, tmp_path):
        folder = steps(tmp_path, "step_1", "step_2", "step_3")
        for step, nbytes in (("step_1", 300), ("step_2", 0)):
            damage.truncate(folder / step / ".metadata", nbytes)
            os.utime(folder / step / ".metadata", (OLD, OLD))
        assert names(dcptool.verify(folder).verdicts)[:2] == [("step_1", "damaged"), ("step_2", "incomplete")]
        assert prune(folder, **ASK) == ("step_2",)

    def test_a_file_that_gives_an_io_error(self, tmp_path, monkeypatch):
        folder = steps(tmp_path, "step_1", "step_2")
        read = LocalStorage.read

        def failing(storage, name, *args):
            if storage.root.endswith("step_1") and name.endswith(".distcp"):
                raise StorageError(f"{name}: Input/output error")
            return read(storage, name, *args)

        monkeypatch.setattr(LocalStorage, "read", failing)
        found = judge(folder / "step_1")
        assert (found.state, kinds(found)) == (State.DAMAGED, {"unreadable"})
        assert prune(folder, **ASK) == ()

    def test_a_step_that_cannot_be_listed_stops_no_other(self, tmp_path, monkeypatch):
        folder = steps(tmp_path, "step_1", "step_2", "step_3")
        entries = LocalStorage.entries

        def failing(storage, sub=""):
            if "step_3" in f"{storage.root}/{sub}" or "step_1" in f"{storage.root}/{sub}":
                raise StorageError("permission denied")
            return entries(storage, sub)

        monkeypatch.setattr(LocalStorage, "entries", failing)
        found = latest(folder)
        assert found.path == str(folder / "step_2")
        assert names(found.skipped) == [("step_3", "damaged")]
        assert kinds(found.skipped[0]) == {"unreadable"}
        report = dcptool.verify(folder)
        assert [v.state.value for v in report.verdicts] == ["damaged", "complete", "damaged"]

    def test_a_sibling_that_vanishes_drops_no_candidate(self, tmp_path, monkeypatch):
        import dcptool.ops.latest as module
        from dcptool.errors import CheckpointNotFoundError

        folder = steps(tmp_path, "step_1", "step_2")

        def gone(*args, **kwargs):
            raise CheckpointNotFoundError("gone")

        monkeypatch.setattr(module, "find_parts", gone)
        assert latest(folder).path == str(folder / "step_2")


class TestMarkerNames:
    BAD = (".metadata", "../../evil", "a/b", "", "..", "__0_0.distcp", "__1.metadata", "x.safetensors", ".incomplete")
    BAD += ("model.safetensors.index.json", "metadata.json", "run-unfinished", "a\nb", "INCOMPLETE")

    @pytest.mark.parametrize("name", BAD)
    def test_a_marker_hides_no_file_of_a_checkpoint(self, tmp_path, name):
        step = whole(tmp_path / "step_1")
        before = (step / ".metadata").read_bytes()
        with pytest.raises(ValueError, match="a marker cannot be named so"):
            dcptool.mark_complete(step, marker=name)
        assert cli("mark", "--marker", name, step).returncode == 2
        assert cli("verify", "--marker", name, step).returncode == 2
        assert (step / ".metadata").read_bytes() == before

    def test_a_file_that_is_no_marker_is_not_replaced(self, tmp_path):
        step = whole(tmp_path / "step_1")
        (step / "config.json").write_text('{"model": "llama"}')
        (step / "notes.txt").write_text("lr 3e-4")
        for name in ("config.json", "notes.txt"):
            with pytest.raises(OutputExistsError, match="is no marker of dcptool"):
                dcptool.mark_complete(step, marker=name)
        (step / "OK").write_text("\n")
        dcptool.mark_complete(step, marker="OK")
        dcptool.mark_complete(step, marker="OK")
        assert is_marker(locate(step).storage, "OK", (step / "OK").stat().st_size)


class TestMarkers:
    @pytest.fixture
    def step(self, tmp_path):
        return whole(tmp_path / "step_1")

    def test_one_that_cannot_be_read_is_not_a_bare_one(self, step, monkeypatch):
        os.mkfifo(step / "_COMPLETE")
        found = judge(step)
        assert (found.state, found.marker, kinds(found)) == (State.UNMARKED, None, {"bad-marker"})
        (step / "_COMPLETE").unlink()
        (step / "_COMPLETE").write_text("")
        assert judge(step, VerifyOptions(require_marker=True)).state is State.COMPLETE
        read = LocalStorage.read

        def failing(storage, name, *args):
            if name == "_COMPLETE":
                raise StorageError("permission denied")
            return read(storage, name, *args)

        monkeypatch.setattr(LocalStorage, "read", failing)
        assert kinds(judge(step, VerifyOptions(require_marker=True))) == {"bad-marker"}

    def test_one_that_is_too_large(self, step, monkeypatch):
        monkeypatch.setattr("dcptool.formats.marker.MAX_MARKER_NBYTES", 10)
        (step / "_COMPLETE").write_text(" " * 11)
        assert kinds(judge(step)) == {"bad-marker"}

    @pytest.mark.parametrize("text", ["done at 12:00", "step=100\n", '"yes"', "[1]", "\0\1"])
    def test_other_text_is_a_bare_marker(self, step, text):
        for name in ("_COMPLETE", "_SUCCESS"):
            (step / name).write_text(text)
            found = judge(step, VerifyOptions(require_marker=True))
            assert (found.state, found.marker.writer) == (State.COMPLETE, None)
            (step / name).unlink()

    def test_json_under_another_software_s_name(self, step):
        dcptool.mark_complete(step, marker="_SUCCESS")
        assert judge(step).marker.writer == "mark"
        (step / "__1_0.distcp").unlink()
        assert "missing-file" in kinds(judge(step))
        (step / "_SUCCESS").write_text('{"name": "org.apache.hadoop.fs.s3a.commit.files.SuccessData/1"}')
        assert judge(step).marker.writer is None
        (step / "_SUCCESS").write_text('{"schema": 1, "writer": "mark", ')
        assert "bad-marker" in kinds(judge(step))

    BAD_FIELDS = (
        {"save_seconds": float("nan")},
        {"save_seconds": "12"},
        {"blocked_seconds": float("inf")},
        {"blocked_seconds": True},
        {"world_size": 2.5},
        {"created": 7},
        {"save_id": ["x"]},
        {"step": "500"},
        {"files": {".metadata": -1}},
        {"files": []},
        {"sha256": {".metadata": 7}},
        {"writer": "somebody"},
        {"schema": 2},
    )

    @pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
    def test_fields_of_wrong_types(self, step, fields):
        dcptool.mark_complete(step)
        document = json.loads((step / "_COMPLETE").read_text())
        (step / "_COMPLETE").write_text(json.dumps({**document, **fields}))
        assert kinds(judge(step)) == {"bad-marker"}
        assert cli("verify", "--json", step).returncode == 1

    def test_marking_again_keeps_what_the_save_knew(self, step):
        saved(step)
        document = json.loads((step / "_COMPLETE").read_text())
        (step / "_COMPLETE").write_text(json.dumps({**document, "save_seconds": 12.5, "blocked_seconds": 0.5}))
        marker = dcptool.mark_complete(step, checksums=True).marker
        assert (marker.writer, marker.save_seconds, marker.blocked_seconds) == ("save", 12.5, 0.5)
        assert marker.sha256
        (step / "_COMPLETE").write_text(json.dumps({**document, "metadata_sha256": {".metadata": "0"}}))
        assert dcptool.mark_complete(step).marker.writer == "mark"  # the old one was of another save

    def test_an_io_error_while_hashing_is_a_finding(self, step, monkeypatch):
        import dcptool.formats.marker as module

        dcptool.mark_complete(step, checksums=True)

        def failing(storage, name, nbytes):
            raise StorageError(f"{name}: Input/output error")

        monkeypatch.setattr(module, "sha256", failing)
        for level in (Level.METADATA, Level.DEEP):
            found = judge(step, VerifyOptions(level=level))
            assert (found.state, kinds(found)) == (State.DAMAGED, {"unreadable"})


class TestMarkersOfParts:
    @pytest.fixture
    def step(self, tmp_path):
        for part in ("actor", "critic"):
            whole(tmp_path / "step_1" / part / "ckpt")
        return tmp_path / "step_1"

    @pytest.mark.parametrize("place", ["actor/.incomplete", "critic/ckpt/.incomplete"])
    def test_a_part_that_is_being_written(self, step, place):
        (step / place).write_text("")
        assert judge(step).state is State.IN_PROGRESS

    @pytest.mark.parametrize("place", ["actor-unfinished", "critic/ckpt-unfinished"])
    def test_a_sibling_of_a_part(self, step, place):
        (step / place).mkdir()
        assert judge(step).state is State.IN_PROGRESS

    def test_the_sibling_of_the_current_folder(self, step, monkeypatch):
        monkeypatch.chdir(step)
        assert judge(".").state is State.COMPLETE
        assert (judge(".").name, judge(".").step) == ("step_1", 1)
        (step.parent / "step_1-unfinished").mkdir()
        assert judge(".").state is State.IN_PROGRESS

    def test_markers_of_all_parts_mark_the_step(self, step):
        require = VerifyOptions(require_marker=True)
        dcptool.mark_complete(step / "actor" / "ckpt")
        assert judge(step, require).state is State.UNMARKED
        dcptool.mark_complete(step / "critic" / "ckpt")
        found = judge(step, require)
        assert (found.state, found.marker.name) == (State.COMPLETE, "actor/ckpt/_COMPLETE")

    def test_a_stale_marker_of_a_part(self, step):
        dcptool.mark_complete(step / "critic" / "ckpt")
        file = step / "critic" / "ckpt" / "_COMPLETE"
        document = json.loads(file.read_text())
        file.write_text(json.dumps({**document, "metadata_sha256": {".metadata": "0"}}))
        found = judge(step)
        assert (found.state, kinds(found)) == (State.UNMARKED, {"stale-marker"})
        assert found.findings[0].file == "critic/ckpt/.metadata"


class TestOrder:
    def test_epochs_come_before_steps(self, tmp_path):
        folder = steps(tmp_path, "epoch_1_step_500", "epoch_2_step_100")
        assert [step.name for step in dcptool.find_steps(folder)] == ["epoch_1_step_500", "epoch_2_step_100"]
        (folder / "latest").write_text("epoch_1_step_500")
        found = latest(folder)
        assert found.path == str(folder / "epoch_2_step_100")
        assert [problem.kind for problem in found.pointers] == ["stale-pointer"]
        (folder / "latest").unlink()
        assert [v.name for v in dcptool.verify(folder).verdicts][-1] == "epoch_2_step_100"
        assert prune(folder) == ("epoch_1_step_500",)

    def test_whole_unmarked_steps_newer_than_the_newest_complete_one_stay(self, tmp_path):
        folder = steps(tmp_path, "step_1", "step_2", "step_3")
        saved(folder / "step_2")
        assert names(dcptool.verify(folder).verdicts)[-1] == ("step_3", "unmarked")
        assert prune(folder, **ASK) == ("step_1",)
        unmarked = [verdict("step_1", State.UNMARKED), verdict("step_2"), verdict("step_3", State.UNMARKED)]
        assert plan(unmarked, 1, now=1e9, **ASK) == {"step_1": False, "step_2": True, "step_3": True}


class TestRankLocal:
    @pytest.fixture
    def save(self, tmp_path):
        folder = shutil.copytree(FOREIGN / "w_no_collectives", tmp_path / "step_1")
        for file in folder.iterdir():
            os.utime(file, (OLD, OLD))
        return folder

    def test_data_of_a_rank_whose_metadata_is_gone(self, save):
        (save / "__7_0.distcp").write_bytes(b"data")
        os.utime(save / "__7_0.distcp", (OLD, OLD))
        found = judge(save)
        assert (found.state, kinds(found)) == (State.INCOMPLETE, {"rank-metadata-missing"})
        assert "rank 7" in found.reason
        os.utime(save / "__7_0.distcp")
        assert judge(save).state is State.IN_PROGRESS
        (save / "__7_0.distcp").write_bytes(b"")  # an idle rank's
        assert judge(save).state is State.COMPLETE

    def test_metadata_that_is_empty_is_not_there(self, save):
        damage.truncate(save / "__1.metadata", 0)
        os.utime(save / "__1.metadata", (OLD, OLD))
        assert "rank-metadata-missing" in kinds(judge(save))
        damage.truncate(save / "__0.metadata", 0)
        os.utime(save / "__0.metadata", (OLD, OLD))
        found = judge(save)
        assert (found.state, kinds(found)) == (State.INCOMPLETE, {"no-metadata"})


class TestDependencies:
    """What a pointer, or a link in a kept step, leads into is not deleted."""

    @pytest.fixture
    def folder(self, tmp_path):
        return steps(tmp_path / "exp" / "run", "step_1", "step_2", "step_3")

    def test_links_in_a_kept_step(self, folder):
        (folder / "step_3" / "__0_0.distcp").unlink()
        (folder / "step_3" / "__0_0.distcp").symlink_to("../step_2/__0_0.distcp")
        (folder / "step_2" / "extra").mkdir()
        (folder / "step_2" / "extra" / "data").symlink_to("../../step_1")
        made = make_plan(folder, 1, now=time.time())
        assert [decision.keep for decision in made.decisions] == [True, True, True]
        assert made.decisions[1].reason == "links in step_3 lead into it"
        assert made.decisions[0].reason == "links in step_2 lead into it"

    def test_a_link_made_after_the_plan(self, folder):
        made = make_plan(folder, 1, now=time.time())
        (folder / "step_3" / "base").symlink_to(folder / "step_2")
        deleted = delete_steps(made)
        assert deleted.names == ("step_1",)
        assert deleted.refused == (("step_2", "links in step_3 lead into it"),)

    @pytest.mark.parametrize("target", ["step_1/sub", "step_1/__0_0.distcp", "./step_1", "chain"])
    def test_links_into_a_step(self, folder, target):
        (folder / "step_1" / "sub").mkdir()
        if target == "chain":
            (folder / "other").symlink_to("step_1/.metadata")
            target = "other"
        (folder / "best.pt").symlink_to(target)
        assert prune(folder) == ("step_2",)

    def test_a_link_named_like_a_step(self, folder):
        (folder / "step_99").symlink_to("step_1")
        assert prune(folder) == ("step_2",)
        assert latest(folder).pointers == ()

    @pytest.mark.parametrize("text", ["1", "step_1", "run/step_1", "/elsewhere/run/step_1/model"])
    def test_what_text_files_say(self, folder, text):
        (folder / "latest").write_text(text)
        assert prune(folder) == ("step_2",)

    def test_pointers_beside_the_folder_of_the_steps(self, folder):
        (folder.parent / "latest").write_text("run/step_1")
        (folder.parent / "best").symlink_to("run/step_2")
        found = find_runs(locate(folder.parent))[0]
        assert read_pointers(found).named == {"../best": "step_2", "../latest": "step_1"}
        assert prune(folder.parent) == ()

    def test_pointers_above_a_folder_that_is_named_checkpoints(self, folder):
        folder = folder.rename(folder.parent / "checkpoints")
        (folder.parent / "latest").write_text("1")
        assert prune(folder) == ("step_2",)

    def test_a_pointer_that_cannot_be_read(self, folder):
        os.mkfifo(folder / "latest")
        found = latest(folder)
        assert found.path == str(folder / "step_3")
        assert [problem.kind for problem in found.pointers] == ["unreadable-pointer"]
        with pytest.raises(StorageError, match="Nothing is deleted"):
            make_plan(folder, 1, now=time.time())


class TestDelete:
    @pytest.fixture
    def folder(self, tmp_path):
        return steps(tmp_path, "step_1", "step_2", "step_3", "step_4")

    def test_only_newer_complete_steps_count(self, folder):
        made = make_plan(folder, 1, archive_every=2, now=time.time())
        assert [decision.name for decision in made.removed] == ["step_1", "step_3"]
        crash(folder / "step_4")
        deleted = delete_steps(made)
        assert deleted.names == ("step_1",)
        assert deleted.refused == (("step_3", "no newer step that is kept is complete any more"),)

    def test_a_rewrite_of_the_same_size(self, folder):
        made = make_plan(folder, 3, now=time.time())
        assert made.removed[0].written == OLD
        os.utime(folder / "step_1" / "__0_0.distcp")
        assert delete_steps(made).refused == (("step_1", "it has changed since the plan was made"),)

    def test_a_deletion_that_fails_stops_no_other(self, folder, monkeypatch):
        delete_folder = LocalStorage.delete_folder

        def failing(storage, name):
            if name == "step_1":
                raise StorageError("step_1: Read-only file system")
            delete_folder(storage, name)

        monkeypatch.setattr(LocalStorage, "delete_folder", failing)
        deleted = delete_steps(make_plan(folder, 2, now=time.time()))
        assert deleted.names == ("step_2",)
        assert deleted.refused == (("step_1", "step_1: Read-only file system; a part of it may be gone"),)

    def test_a_file_that_vanishes_meanwhile_stops_nothing(self, folder, monkeypatch):
        rmtree = shutil.rmtree
        calls = []

        def racing(path, *args, **kwargs):
            calls.append(path)
            if len(calls) == 1:
                raise FileNotFoundError(errno.ENOENT, "gone", path)
            rmtree(path, *args, **kwargs)

        monkeypatch.setattr(shutil, "rmtree", racing)
        assert prune(folder, 3) == ("step_1",)
        assert not (folder / "step_1").exists()
        assert len(calls) == 2

    def test_a_step_without_a_part_can_go(self, tmp_path):
        for number in (1, 2, 3):
            for part in ("model", "optim"):
                whole(tmp_path / "run" / f"step_{number}" / part)
        shutil.rmtree(tmp_path / "run" / "step_1" / "optim")
        assert names(dcptool.verify(tmp_path / "run").verdicts)[0] == ("step_1", "incomplete")
        assert prune(tmp_path / "run", 2, **ASK) == ("step_1",)

    def test_kept_steps_are_not_judged_for_each_deletion(self, folder, monkeypatch):
        import dcptool.ops.prune as module

        made = make_plan(folder, 1, now=time.time())
        judged = []
        monkeypatch.setattr(module, "judge", lambda path, options: judged.append(path) or judge(path, options))
        assert len(delete_steps(made).names) == 3
        assert judged == [str(folder / "step_4")]


class TestStates:
    def test_a_broken_part_below_a_whole_one(self, tmp_path):
        step = whole(tmp_path / "step_3")
        crash(whole(step / "optim"))
        found = judge(step)
        assert (found.state, kinds(found)) == (State.INCOMPLETE, {"no-metadata"})
        assert found.findings[0].file == "optim"
        assert len(dcptool.summarize(step).checkpoints) == 1  # what is shown is still the one at the root

    def test_an_empty_folder(self, tmp_path):
        whole(tmp_path / "step_1")
        (tmp_path / "step_2").mkdir()
        assert judge(tmp_path / "step_2").state is State.IN_PROGRESS
        os.utime(tmp_path / "step_2", (OLD, OLD))
        assert judge(tmp_path / "step_2").state is State.INCOMPLETE
        assert prune(tmp_path, **ASK) == ("step_2",)

    def test_only_the_other_half_has_a_step(self, tmp_path):
        steps(tmp_path / "a", "step_1")
        steps(tmp_path / "b", "step_1", "step_2")
        report = dcptool.verify(tmp_path / "a", VerifyOptions(also=(str(tmp_path / "b"),)))
        assert names(report.verdicts) == [("step_1", "complete"), ("step_2", "complete")]

    def test_comparing_steps_is_linear(self):
        many = [verdict(f"step_{number}") for number in range(20_000)]
        start = time.perf_counter()
        assert len(compare_steps(many)) == len(many)
        assert time.perf_counter() - start < 5


class TestCommandLine:
    def test_a_folder_without_steps_has_no_latest(self, tmp_path):
        done = cli("latest", tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert "holds no steps" in done.stderr
        assert json.loads(cli("latest", "--json", tmp_path).stdout)["problem"].endswith("…)")
        assert cli("latest", tmp_path / "gone").returncode == 3

    def test_verify_goes_on_after_a_path_that_cannot_be_opened(self, tmp_path):
        step = whole(tmp_path / "step_1")
        done = cli("verify", tmp_path / "gone", step)
        assert done.returncode == 3
        assert "gone: no such file" in done.stderr
        assert "state    complete" in done.stdout
        reports = json.loads(cli("verify", "--json", tmp_path / "gone", step).stdout)["reports"]
        assert "no such file" in reports[0]["error"]
        assert reports[1]["good"]
        assert cli("verify", "--quiet", tmp_path / "gone", step).returncode == 3

    def test_latest_tells_the_warnings_of_its_answer(self, tmp_path):
        folder = steps(tmp_path, "step_1")
        found = latest(folder)
        warning = Finding("unknown-global", Severity.WARNING, "the metadata names posix.system")
        from dcptool.render.verify import latest_lines

        assert latest_lines(found) == []
        found = found._replace(verdict=found.verdict._replace(findings=(warning,)))
        assert latest_lines(found) == ["warning: step_1: the metadata names posix.system"]
