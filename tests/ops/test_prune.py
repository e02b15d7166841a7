"""prune: which steps go and which never do; and that half a deletion never looks complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time

import pytest

import dcptool
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.errors import CheckpointNotFoundError, StorageError
from dcptool.ops.prune.delete import delete_steps
from dcptool.ops.prune.plan import Decision, PrunePlan, plan_prune
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.runs.directory import find_runs
from dcptool.runs.pointers import read_pointers
from dcptool.storage import LocalStorage, locate
from tests import damage
from tests.conftest import FOREIGN, OLD
from tests.conftest import run as cli
from tests.run_steps import ASK, GOOD, crash, kinds, latest, names, plan, prune, saved, steps, verdict, whole

torchfree = pytest.mark.torchfree


@torchfree
class TestPlan:
    STEPS = tuple(verdict(f"step_{number}") for number in (500, 1000, 1500, 2000, 2500))

    def test_the_newest_are_kept(self):
        kept = plan([verdict("step_9"), *self.STEPS], 2)
        assert [name for name, keep in kept.items() if keep] == ["step_2000", "step_2500"]

    def test_n03_what_was_written_after_the_newest_by_number_is_kept_too(self):
        kept = plan([verdict("step_100"), *self.STEPS], 1, later=("step_100", "step_500"))
        assert [name for name, keep in kept.items() if keep] == ["step_100", "step_2500"]
        assert all(kept[name] for name in ("step_100", "step_500")) is False
        assert plan([verdict("step_100"), *self.STEPS], 2, later=("step_100", "step_500"))["step_500"]

    def test_only_complete_ones_count(self):
        steps = [*self.STEPS, verdict("step_3000", State.INCOMPLETE), verdict("step_3500", State.IN_PROGRESS)]
        kept = plan(steps, 1)
        assert [name for name, keep in kept.items() if keep] == ["step_2500", "step_3000", "step_3500"]

    def test_milestones_and_pointers(self):
        kept = plan(self.STEPS, 1, archive_every=1000, named={"step_1500": "the pointer latest names it"})
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
    def test_old_ones_go(self, run_of):
        folder = run_of(*(f"step_{number}" for number in (1, 2, 3, 4)), "notes")
        plan = make_plan(folder, 2, now=time.time())
        deleted = delete_steps(plan)
        assert deleted.names == ("step_1", "step_2")
        assert sorted(path.name for path in folder.iterdir()) == ["notes", "step_3", "step_4"]
        assert deleted.nbytes == plan.decisions[0].nbytes * 2 > 0

    def test_a_plan_is_looked_at_again_before_each_step(self, run_of):
        folder = run_of("step_1", "step_2", "step_3", "step_4")
        plan = make_plan(folder, 1, now=time.time())
        shutil.rmtree(folder / "step_1")  # somebody else did
        (folder / "step_2" / ".incomplete").write_text("")  # being written again
        (folder / "latest").write_text("step_3")
        deleted = delete_steps(plan)
        assert deleted.names == ()
        assert [name for name, _ in deleted.refused] == ["step_2", "step_3"]
        crash(folder / "step_4")
        (folder / "latest").unlink()
        name, reason = delete_steps(plan).refused[-1]
        assert name == "step_3"
        assert reason.startswith("step_4, the newest that is kept, is incomplete: no .metadata")

    def test_a_half_deleted_step_never_looks_complete(self, run_of, monkeypatch):
        from dcptool.storage import LocalStorage

        folder = run_of("step_1", "step_2")
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

    def test_nothing_outside_the_run(self, run_of, tmp_path):
        folder = run_of("step_1", "step_2")
        shutil.copytree(GOOD, tmp_path / "elsewhere")
        shutil.rmtree(folder / "step_1")
        (folder / "step_1").symlink_to(tmp_path / "elsewhere")
        plan = PrunePlan(
            str(folder),
            tuple(Decision(name, False, "", State.COMPLETE, 0) for name in ("step_1", "../elsewhere", "..", "", ".")),
        )
        assert delete_steps(plan).names == ()
        assert (tmp_path / "elsewhere" / ".metadata").exists()

    def test_a_link_in_a_step_is_not_followed(self, run_of, tmp_path):
        folder = run_of("step_1", "step_2")
        (tmp_path / "dataset").mkdir()
        (tmp_path / "dataset" / "file").write_text("precious")
        (folder / "step_1" / "data").symlink_to(tmp_path / "dataset")
        delete_steps(make_plan(folder, 1, now=time.time()))
        assert not (folder / "step_1").exists()
        assert (tmp_path / "dataset" / "file").exists()


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
        assert (found.state, kinds(found)) == (State.UNREADABLE, {"unreadable"})
        assert prune(folder, **ASK) == ()

    def test_a_step_that_cannot_be_listed_stops_no_other(self, tmp_path, monkeypatch):
        folder = steps(tmp_path, "step_1", "step_2", "step_3")
        entries = LocalStorage.entries

        def failing(storage, sub=""):
            if "step_3" in f"{storage.root}/{sub}" or "step_1" in f"{storage.root}/{sub}":
                raise StorageError("permission denied")
            return entries(storage, sub)

        monkeypatch.setattr(LocalStorage, "entries", failing)
        with pytest.raises(StorageError, match="step_3 could not be read: permission denied"):
            latest(folder)
        found = dcptool.find_latest(folder, skip_unreadable=True)
        assert found.path == str(folder / "step_2")
        assert names(found.skipped) == [("step_3", "unreadable")]
        assert kinds(found.skipped[0]) == {"unreadable"}
        report = dcptool.verify(folder)
        assert [v.state.value for v in report.verdicts] == ["unreadable", "complete", "unreadable"]

    def test_a_sibling_that_vanishes_drops_no_candidate(self, tmp_path, monkeypatch):
        import dcptool.ops.latest as module

        folder = steps(tmp_path, "step_1", "step_2")

        def gone(*args, **kwargs):
            raise CheckpointNotFoundError("gone")

        monkeypatch.setattr(module, "find_parts", gone)
        assert latest(folder).path == str(folder / "step_2")


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


class TestDeleteAmongOthers:
    @pytest.fixture
    def folder(self, tmp_path):
        return steps(tmp_path, "step_1", "step_2", "step_3", "step_4")

    def test_only_newer_complete_steps_count(self, folder, monkeypatch):
        import dcptool.ops.prune.delete as module

        made = make_plan(folder, 1, archive_every=2, now=time.time())
        assert [decision.name for decision in made.removed] == ["step_1", "step_3"]

        def proven_then_lost(*args):
            crash(folder / "step_4")
            return ""

        monkeypatch.setattr(module, "_unproven", proven_then_lost)
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
        import dcptool.ops.prune.delete as module

        made = make_plan(folder, 1, now=time.time())
        judged = []
        monkeypatch.setattr(module, "judge", lambda path, *more: judged.append(path) or judge(path, *more))
        assert len(delete_steps(made).names) == 3
        assert judged == [str(folder / "step_4")] * 2  # once closely, once before the first deletion


class TestCommandLine:
    def test_prune_needs_a_word_where_nobody_can_be_asked(self, run_of):
        folder = run_of("step_1", "step_2")
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
