"""prune --archive-to: milestones are copied elsewhere and proven there, and only then deleted here."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from pathlib import Path

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.cli.prune import question
from dcptool.errors import StorageError, UnsupportedError
from dcptool.ops.copy import retrying
from dcptool.ops.prune import archive as archive_module
from dcptool.ops.prune.archive import archive_steps
from dcptool.ops.prune.delete import delete_steps
from dcptool.ops.prune.plan import plan_prune
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.storage import LocalStorage
from tests.conftest import run as cli
from tests.damage import flip_byte
from tests.ops.copy.test_copy_stores import contents, store_contents
from tests.run_steps import verdict

pytestmark = pytest.mark.torchfree


@pytest.fixture
def run(run_of) -> Path:
    return run_of(*(f"step_{number}" for number in (500, 1000, 1500, 2000, 2500, 3000)))


@pytest.fixture(params=["local", "memory", "s3"])
def archive(request, tmp_path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_url')}-archive"
    return str(tmp_path / "archive") if request.param == "local" else f"memory://{uuid.uuid4().hex}/archive"


def plan_of(run: Path, archive: str, keep: int = 2):
    return make_plan(run, keep, archive_every=1000, archive_to=archive, now=time.time())


def move(run: Path, archive: str, keep: int = 2):
    """Copy and delete, as the twin in Python does."""
    plan = plan_of(run, archive, keep)
    archived = archive_steps(plan)
    return archived, delete_steps(plan.keeping(archived.left), archived=archived)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def copied(archive: str, name: str) -> dict[str, bytes]:
    url = f"{archive}/{name}"
    return store_contents(url) if "://" in url else contents(Path(url))


class TestPlan:
    STEPS = tuple(verdict(f"step_{number}") for number in (500, 1000, 1500, 2000, 2500, 3000))

    def test_milestones_go_unless_something_else_keeps_them(self):
        plan = plan_prune("run", self.STEPS, 1, archive_every=1000, archive_to="x", named={"step_1000": "best"})
        assert [d.name for d in plan.milestones] == ["step_1000", "step_2000", "step_3000"]
        assert [d.name for d in plan.decisions if d.keep] == ["step_1000", "step_3000"]

    def test_without_an_archive_they_stay(self):
        plan = plan_prune("run", self.STEPS, 1, archive_every=1000)
        assert plan.milestones == ()
        assert [d.name for d in plan.decisions if d.keep] == ["step_1000", "step_2000", "step_3000"]

    @pytest.mark.parametrize("state", [state for state in State if state is not State.COMPLETE])
    def test_only_complete_ones_are_milestones(self, state):
        plan = plan_prune("run", [verdict("step_1000", state), *self.STEPS[2:]], 1, archive_every=1000, archive_to="x")
        assert "step_1000" not in {d.name for d in plan.milestones}

    def test_an_archive_for_nothing(self):
        with pytest.raises(ValueError, match="archive_every"):
            plan_prune("run", self.STEPS, 1, archive_to="x")


def test_there_and_then_gone_here(run, archive):
    before = {name: contents(run / name) for name in names(run)}
    archived, deleted = move(run, archive)
    assert archived.good
    assert deleted.names == ("step_500", "step_1000", "step_1500", "step_2000")
    assert deleted.refused == ()
    assert names(run) == ["step_2500", "step_3000"]  # the newest is a milestone: copied, and kept
    for name in ("step_1000", "step_2000", "step_3000"):
        there = copied(archive, name)
        assert json.loads(there.pop("_COMPLETE"))["sha256"]
        assert there == before[name]
    assert dcptool.verify(archive, VerifyOptions(level=Level.DEEP)).good
    assert [verdict.name for verdict in dcptool.verify(archive).verdicts] == ["step_1000", "step_2000", "step_3000"]
    again, deleted = move(run, archive, keep=1)  # nothing is moved again
    assert [(step.name, step.state) for step in again.steps] == [("step_3000", "there")]
    assert deleted.names == ("step_2500",)


def test_what_is_no_newest_any_more_goes_later(run, archive):
    move(run, archive)
    shutil.copytree(run / "step_2500", run / "step_3500")
    shutil.copytree(run / "step_2500", run / "step_4500")
    archived, deleted = move(run, archive)
    assert [(step.name, step.state) for step in archived.steps] == [("step_3000", "there")]
    assert deleted.names == ("step_2500", "step_3000")


def test_nothing_is_deleted_that_was_not_archived(run, archive):
    plan = plan_of(run, archive)
    deleted = delete_steps(plan)
    assert deleted.names == ("step_500", "step_1500")
    assert [name for name, _ in deleted.refused] == ["step_1000", "step_2000"]
    other = archive_steps(plan._replace(archive=f"{archive}2"))
    assert [name for name, _ in delete_steps(plan, archived=other).refused] == ["step_1000", "step_2000"]
    dry = archive_steps(plan, dry_run=True)
    assert [step.state for step in dry.steps] == ["planned"] * 3
    assert dry.proven == {}


def test_what_changed_since_it_was_archived_stays(run, archive):
    plan = plan_of(run, archive)
    archived = archive_steps(plan)
    file = run / "step_1000" / "__0_0.distcp"
    times = file.stat()
    file.unlink()
    shutil.copy(run / "step_2000" / "__0_0.distcp", file)
    os.utime(file, (times.st_atime, times.st_mtime - 5))  # neither number, length nor newest time tell it
    refused = dict(delete_steps(plan, archived=archived).refused)
    assert refused == {"step_1000": "it has changed since it was archived"}


def test_something_else_of_that_name_is_there(run, archive):
    plan = plan_of(run, archive)
    archive_steps(plan._replace(decisions=tuple(d for d in plan.decisions if d.name == "step_1000")))
    (run / "step_1000" / "notes.txt").write_text("a file more")
    os.utime(run / "step_1000" / "notes.txt", (1e9, 1e9))
    there = copied(archive, "step_1000")
    archived, deleted = move(run, archive)
    assert list(archived.left) == ["step_1000"]
    assert "is there already" in archived.left["step_1000"]
    assert deleted.names == ("step_500", "step_1500", "step_2000")
    assert copied(archive, "step_1000") == there


def test_other_bytes_there_of_the_same_names_and_sizes(run, tmp_path):
    """A copy that cannot be told from the step but by its bytes proves nothing."""
    move(run, str(tmp_path / "archive"))
    back = Path(shutil.copytree(tmp_path / "archive" / "step_1000", run / "step_1000"))
    (back / "_COMPLETE").unlink()
    step = dcptool.open(back)
    entry = next(iter(step.tensors.values()))
    flip_byte(back / entry.chunks[0].item.file, entry.chunks[0].item.byte_offset + 100)
    archived, _ = move(run, str(tmp_path / "archive"))
    assert list(archived.left) == ["step_1000"]
    assert (run / "step_1000").exists()


def test_a_copy_that_was_damaged_in_the_archive(run, tmp_path):
    archive = tmp_path / "archive"
    plan = plan_of(run, str(archive))
    archive_steps(plan)
    os.truncate(archive / "step_1000" / "__0_0.distcp", 100)
    archived, _ = move(run, str(archive))
    assert "step_1000" in archived.left
    assert names(run) == ["step_1000", "step_2500", "step_3000"]


def test_it_is_looked_at_there_after_it_was_copied(run, archive, monkeypatch):
    """What arrived is judged by what the archive gives out, not by what was sent."""
    original = archive_module.judge

    def judge(path, *more):
        if os.fspath(path).endswith("archive/step_1000"):
            raise StorageError(f"{path}: the store does not give it out")
        return original(path, *more)

    monkeypatch.setattr(archive_module, "judge", judge)
    archived, deleted = move(run, archive)
    assert "does not give it out" in archived.left["step_1000"]
    assert "step_1000" in names(run)
    assert "step_2000" in deleted.names


def test_a_damaged_milestone_is_not_archived_and_others_go_on(run, archive):
    step = dcptool.open(run / "step_1000")
    entry = next(entry for entry in step.tensors.values() if len(entry.chunks))
    record = step.payload(entry, entry.chunks[0]).record
    flip_byte(run / "step_1000" / record.item.file, record.item.byte_offset + record.byte_offset)
    archived, deleted = move(run, archive)
    assert "CRC32" in archived.left["step_1000"]
    assert names(run) == ["step_1000", "step_2500", "step_3000"]
    assert deleted.refused == ()


def test_a_copy_that_fails_and_goes_on_later(run, tmp_path, monkeypatch):
    archive = str(tmp_path / "archive")
    monkeypatch.setattr(retrying, "WAITS", (0.01,))
    original = LocalStorage.read_into

    def read_into(self, name, byte_offset, out):
        if self.root.endswith("step_1000") and name == "__0_0.distcp" and out.nbytes > 1000:
            raise StorageError(f"{name}: slow down") from TimeoutError("slow down")
        original(self, name, byte_offset, out)

    monkeypatch.setattr(LocalStorage, "read_into", read_into)
    done = cli("prune", run, "--keep", 2, "--archive-every", 1000, "--archive-to", archive, "--threads", 1, "--yes")
    assert done.returncode == 1, done.stderr
    assert "step_1000 was not archived: __0_0.distcp: __0_0.distcp: slow down; given up" in done.stdout
    assert "note: __0_0.distcp: __0_0.distcp: slow down; trying again" in done.stderr
    assert names(run) == ["step_1000", "step_2500", "step_3000"]
    assert names(tmp_path / "archive")[-2:] == ["step_2000", "step_3000"]
    monkeypatch.setattr(LocalStorage, "read_into", original)
    archived, deleted = move(run, archive)
    assert deleted.names == ("step_1000",)
    assert archived.steps[0].kept_nbytes > 0
    assert names(tmp_path / "archive") == ["step_1000", "step_2000", "step_3000"]


def test_links_of_kept_steps_into_a_milestone_keep_it(run, archive):
    (run / "step_3000" / "base").symlink_to("../step_1000/__0_0.distcp")
    archived, deleted = move(run, archive)
    assert archived.good
    assert "step_1000" in names(run)
    assert "step_2000" in deleted.names


def test_a_milestone_that_was_not_archived_keeps_what_it_has_links_into(run, tmp_path):
    (run / "step_1000" / "base").symlink_to("../step_500/__0_0.distcp")
    (tmp_path / "archive" / "step_1000").mkdir(parents=True)
    (tmp_path / "archive" / "step_1000" / "notes.txt").write_text("mine")
    archived, deleted = move(run, str(tmp_path / "archive"))
    assert list(archived.left) == ["step_1000"]
    assert dict(deleted.refused) == {"step_500": "links in step_1000 lead into it"}


def test_links_to_folders_cannot_be_archived(run, tmp_path, archive):
    (run / "step_1000" / "more").symlink_to(tmp_path)
    archived, _ = move(run, archive)
    assert archived.left["step_1000"].startswith("not all of it can be archived")
    assert "step_1000" in names(run)


class TestOnePlace:
    @pytest.mark.parametrize("inside", ["", "/", "/archive", "/step_3000/more"])
    def test_in_the_run(self, run, inside):
        with pytest.raises(UnsupportedError, match="is the run directory"):
            move(run, f"{run}{inside}")
        with pytest.raises(UnsupportedError, match="is the run directory"):
            move(run, f"file://{run}{inside}")

    def test_by_a_link(self, run, tmp_path):
        (tmp_path / "other").symlink_to(run)
        with pytest.raises(UnsupportedError, match="is the run directory"):
            move(run, str(tmp_path / "other"))

    def test_under_another_name_that_no_path_tells(self, run):
        for path in run.iterdir():
            dcptool.mark_complete(path, checksums=True)
        archived, deleted = move(run, f"local://{run}")
        assert {reason.partition(":")[0] for reason in archived.left.values()} == {"the archive is the run directory"}
        assert set(deleted.names) == {"step_500", "step_1500"}
        assert names(run) == ["step_1000", "step_2000", "step_2500", "step_3000"]


class TestCommand:
    def arguments(self, run, archive):
        return ["prune", run, "--keep", 2, "--archive-every", 1000, "--archive-to", archive]

    def test_a_dry_run_writes_nothing(self, run, tmp_path):
        done = cli(*self.arguments(run, tmp_path / "archive"), "--dry-run")
        assert done.returncode == 0
        assert "to copy to" in done.stdout
        assert "3 steps, 115 kB: step_1000, step_2000, step_3000" in done.stdout
        assert not (tmp_path / "archive").exists()
        assert len(names(run)) == 6

    def test_yes_and_json(self, run, archive):
        done = cli(*self.arguments(run, archive), "--yes", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert [step["state"] for step in document["archive"]["steps"]] == ["copied"] * 3
        assert document["deleted"]["names"] == ["step_500", "step_1000", "step_1500", "step_2000"]
        done = cli(*self.arguments(run, archive), "--dry-run")
        assert "nothing to copy to" in done.stdout
        assert "nothing to delete" in done.stdout

    def test_refused_is_said_and_exits_1(self, run, tmp_path):
        (tmp_path / "archive" / "step_1000").mkdir(parents=True)
        (tmp_path / "archive" / "step_1000" / "notes.txt").write_text("mine")
        for how in ("--dry-run", "--yes"):
            done = cli(*self.arguments(run, tmp_path / "archive"), how)
            assert done.returncode == 1
            assert "archive/step_1000 is there already, and nothing there proves that it is this step" in done.stdout
        assert names(run) == ["step_1000", "step_2500", "step_3000"]

    def test_what_is_asked(self, run, tmp_path):
        archive = str(tmp_path / "archive")
        plan = plan_of(run, archive)
        looked = archive_steps(plan, dry_run=True)
        assert question(plan, looked) == f"copy 3 of 6 steps to {archive}, then delete 4 of 6 steps?"
        assert question(plan, None) == "delete 4 of 6 steps?"
        kept = plan.keeping({decision.name: "" for decision in plan.removed})
        assert question(kept, looked) == f"copy 3 of 6 steps to {archive}?"
        assert question(kept, None) == ""

    def test_usage(self, run):
        assert cli("prune", run, "--keep", 1, "--archive-to", "x", "--yes").returncode == 2
        assert cli("prune", run, "--keep", 1, "--threads", 2, "--yes").returncode == 2
        done = cli(*self.arguments(run, run), "--yes")
        assert done.returncode == 3
        assert len(names(run)) == 6
