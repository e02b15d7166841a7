"""What prune never deletes, what it looks at before it does, and what it tidies up; two of them at once."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

import dcptool
from dcptool.checkpoint.items import FileItems
from dcptool.checks.check import Level
from dcptool.errors import StorageError
from dcptool.ops.prune.delete import delete_steps
from dcptool.ops.prune.prune import make_plan
from tests import damage
from tests.conftest import FOREIGN, OLD
from tests.conftest import run as cli
from tests.run_steps import GOOD, crash, prune, saved, steps

torchfree = pytest.mark.torchfree
TRAINER = FOREIGN / "trainer_fsdp2" / "checkpoint-2"


def kept(folder, keep=1, **options) -> dict[str, str]:
    plan = make_plan(folder, keep, now=time.time(), **options)
    return {decision.name: decision.reason for decision in plan.decisions if decision.keep}


@torchfree
class TestBest:
    @pytest.fixture
    def trained(self, tmp_path):
        """A run of transformers' Trainer whose best step is an old one."""
        for step in (10, 20, 30):
            folder = tmp_path / "run" / f"checkpoint-{step}"
            shutil.copytree(TRAINER, folder)
            state = json.loads((folder / "trainer_state.json").read_text())
            best = {"best_model_checkpoint": "/other/machine/run/checkpoint-10", "global_step": step}
            (folder / "trainer_state.json").write_text(json.dumps({**state, **best}))
        return tmp_path / "run"

    def test_n43_the_best_stays(self, trained):
        assert kept(trained)["checkpoint-10"] == "the best by checkpoint-30/trainer_state.json"
        assert prune(trained) == ("checkpoint-20",)

    def test_n43_a_link_to_the_best_stays_and_is_no_stale_pointer(self, tmp_path):
        folder = steps(tmp_path, "step_1", "step_2", "step_3")
        (folder / "best").symlink_to("step_1")
        assert set(kept(folder)) == {"step_1", "step_3"}
        assert not dcptool.find_latest(folder).pointers

    def test_a_record_that_cannot_be_read_may_name_any(self, trained):
        for step in (20, 30):
            (trained / f"checkpoint-{step}" / "trainer_state.json").write_text("{")
        plan = make_plan(trained, 1, now=time.time())  # an older one has a record
        assert [note.kind for note in plan.notes] == ["unreadable-best", "unreadable-best"]
        (trained / "checkpoint-10" / "trainer_state.json").write_text("{")
        with pytest.raises(StorageError, match="Nothing is deleted"):
            make_plan(trained, 1, now=time.time())


@torchfree
def test_b_a_step_proven_by_checksums_stays_until_a_newer_one_is(tmp_path):
    folder = steps(tmp_path, "step_1", "step_2", "step_3", "step_4")
    dcptool.mark_complete(folder / "step_1", checksums=True)
    dcptool.mark_complete(folder / "step_2", checksums=True)
    assert kept(folder) == {
        "step_2": "newest complete step with checksums in its marker",
        "step_4": "newest complete step",
    }
    dcptool.mark_complete(folder / "step_4", checksums=True)
    assert set(kept(folder)) == {"step_4"}


@torchfree
class TestProof:
    @pytest.fixture
    def folder(self, tmp_path):
        return steps(tmp_path / "run", "step_1", "step_2", "step_3")

    def flip(self, step, header: bool):
        """Change a byte of the header of an item in the middle of its file, or of its values."""
        checkpoint = dcptool.open(step)
        items = FileItems(checkpoint)
        placed = items.item("__0_0.distcp", len(items.spans("__0_0.distcp")[0]) // 2)
        record = checkpoint.payload(placed.entry, placed.chunk).record
        damage.flip_byte(step / "__0_0.distcp", record.item.byte_offset + (0 if header else record.byte_offset))

    def test_nothing_goes_unless_the_newest_that_is_kept_passes(self, folder):
        self.flip(folder / "step_3", header=True)
        done = cli("prune", folder, "--keep", 1, "--yes")
        assert done.returncode == 1
        assert "step_1 was not deleted: step_3, the newest that is kept, is damaged" in done.stdout
        assert sorted(os.listdir(folder)) == ["step_1", "step_2", "step_3"]

    def test_deep_finds_what_headers_do_not_show(self, folder):
        self.flip(folder / "step_3", header=False)
        plan = make_plan(folder, 2, now=time.time())
        deleted = delete_steps(plan, proof=Level.DEEP)
        assert not deleted.names
        assert "CRC32" in deleted.refused[0][1]
        assert delete_steps(plan).names == ("step_1",)

    @pytest.mark.parametrize(("more", "what"), [((), "the headers of every item"), (("--deep",), "every byte")])
    def test_a_dry_run_says_what_would_be_checked(self, folder, more, what):
        done = cli("prune", folder, "--keep", 1, "--dry-run", *more)
        assert f"checked before anything is deleted: {what}" in done.stdout
        assert done.stdout.rstrip().endswith("of step_3")
        assert "checked before" not in cli("prune", folder, "--keep", 5, "--dry-run", *more).stdout

    def test_b_nothing_goes_for_a_step_that_holds_nan(self, tmp_path):
        for step in (1, 2, 3):  # which hold NaN and infinities
            shutil.copytree(FOREIGN / "dtypes_keys_t2130", tmp_path / f"step_{step}")
        done = cli("prune", tmp_path, "--keep", 1, "--finite", "--yes")
        assert done.returncode == 1
        assert "step_3, the newest that is kept, holds NaN or infinities: special.nan_inf" in done.stdout
        assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2", "step_3"]
        assert "and that all values are finite" in done.stdout

    def test_the_newest_to_resume_from_is_what_is_looked_at(self, tmp_path):
        for step in (1, 2, 3):
            shutil.copytree(TRAINER, tmp_path / "run" / f"checkpoint-{step}")
        weights = tmp_path / "run" / "checkpoint-3"
        for name in ("optimizer_0", "scheduler.pt"):
            (shutil.rmtree if (weights / name).is_dir() else os.unlink)(weights / name)
        plan = make_plan(tmp_path / "run", 1, now=time.time())
        assert plan.newest == "checkpoint-2"


@torchfree
class TestLeftovers:
    @pytest.fixture
    def folder(self, tmp_path):
        """A run whose saves write markers, with a killed save, a half deleted step, and a broken one."""
        folder = steps(tmp_path, "step_1", "step_2", "step_3", "step_4", "step_5")
        for name in ("step_4", "step_5"):
            saved(folder / name)
        crash(folder / "step_1")
        crash(folder / "step_2")
        (folder / "step_2" / "__0_0.distcp").unlink()
        (folder / "step_3" / "__0_0.distcp").unlink()  # lost later: no save or deletion leaves that
        return folder

    def test_k_what_killed_saves_and_deletions_left_goes(self, folder):
        plan = make_plan(folder, 2, now=OLD + 7200)
        assert {d.name: d.reason for d in plan.removed} == {
            "step_1": "unfinished, or half deleted, before step_5 was saved",
            "step_2": "unfinished, or half deleted, before step_5 was saved",
        }
        assert delete_steps(plan).names == ("step_1", "step_2")

    def test_not_within_an_hour(self, folder):
        os.utime(folder / "step_1" / "__0_0.distcp")
        plan = make_plan(folder, 2, now=time.time() + 3000)
        assert [d.name for d in plan.removed] == ["step_2"]
        plan = make_plan(folder, 2, now=time.time() + 4000)
        assert [d.name for d in plan.removed] == ["step_2"]  # in progress while it is judged

    def test_not_where_saves_write_no_markers(self, folder):
        for name in ("step_4", "step_5"):
            saved(folder / name, writer="mark")
        assert not make_plan(folder, 2, now=time.time()).removed

    def test_not_what_came_after_the_newest_that_is_marked(self, folder):
        steps(folder, "step_6")
        crash(folder / "step_6")
        assert "step_6" not in [d.name for d in make_plan(folder, 2, now=time.time()).removed]

    def test_k_temporary_files_are_named_and_go_with_the_next_write(self, folder):
        step = folder / "step_5"
        (step / ".dcptool-0a1b2c3d.tmp").write_bytes(b"{")
        os.utime(step / ".dcptool-0a1b2c3d.tmp", (OLD, OLD))
        (step / ".dcptool-ffffffff.tmp").write_bytes(b"{")  # of a command that is at work
        done = cli("verify", step)
        assert done.returncode == 0
        assert "note: .dcptool-0a1b2c3d.tmp was left by a dcptool that was killed" in done.stdout
        assert "ffffffff" not in done.stdout
        dcptool.mark_complete(step)
        assert [name for name in os.listdir(step) if name.startswith(".dcptool")] == [".dcptool-ffffffff.tmp"]
        assert ".dcptool" not in (step / "_COMPLETE").read_text()


def test_k_two_prunes_at_once_both_succeed(tmp_path, commands):
    for attempt in range(3):
        folder = steps(tmp_path / f"run{attempt}", *(f"step_{number}" for number in range(1, 31)))
        ask = ("prune", folder, "--keep", "1", "--yes")
        jobs = [commands.start(*ask) for _ in range(3)]
        done = [job.wait() for job in jobs]
        assert [one.code for one in done] == [0, 0, 0], [one.out + one.err for one in done]
        assert os.listdir(folder) == ["step_30"]


@torchfree
def test_two_prunes_the_other_is_faster(tmp_path, monkeypatch):
    import dcptool.ops.prune.delete as module

    folder = steps(tmp_path, "step_1", "step_2", "step_3")
    plan = make_plan(folder, 1, now=time.time())
    (folder / "step_1" / ".metadata").unlink()  # half deleted by the other
    monkeypatch.setattr(module.time, "sleep", lambda seconds: shutil.rmtree(folder / "step_1", ignore_errors=True))
    deleted = delete_steps(plan)
    assert (deleted.names, deleted.refused) == (("step_2",), ())
    assert GOOD.exists()
