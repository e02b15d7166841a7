"""latest: the newest step that is whole and not being written, whatever pointers and names say."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import dcptool
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError
from dcptool.ops.prune.prune import make_plan
from dcptool.runs.directory import find_runs
from dcptool.runs.pointers import read_pointers
from dcptool.storage import LocalStorage, locate
from tests import damage
from tests.conftest import OLD
from tests.conftest import run as cli
from tests.run_steps import crash, latest, names, saved, steps

torchfree = pytest.mark.torchfree


@torchfree
class TestLatest:
    def test_the_newest_that_is_whole_whatever_its_name_sorts_like(self, run_of):
        folder = run_of("step_9", "step_10", "step_11", "notes", "step_12.tmp", "tmp_step_13")
        crash(folder / "step_11")
        found = latest(folder)
        assert found.path == str(folder / "step_10")
        assert names(found.skipped) == [("step_11", "incomplete")]

    @pytest.mark.parametrize("how", ["removed", "temporary", "cut", "empty"])
    def test_r01_a_save_that_never_finished(self, run_of, how):
        folder = run_of("step-10", "step-20")
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

    def test_none_is_an_answer(self, run_of):
        folder = run_of("step_1", "step_2")
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

    def test_r20_no_pointer_or_a_pointer_that_is_wrong(self, run_of):
        folder = run_of("global_step_10", "global_step_20", "global_step_30")
        assert latest(folder).pointers == ()
        tracker = folder / "latest_checkpointed_iteration.txt"
        for text, kind in (("40", "dangling-pointer"), ("10", "stale-pointer"), ("30\n", None)):
            tracker.write_text(text)
            found = latest(folder)
            assert found.path == str(folder / "global_step_30")
            assert [problem.kind for problem in found.pointers] == ([kind] if kind else [])
        crash(folder / "global_step_30")
        assert [problem.kind for problem in latest(folder).pointers] == ["wrong-pointer"]

    def test_links_are_pointers_not_steps(self, run_of):
        folder = run_of("step_1", "step_2")
        (folder / "latest").symlink_to("step_2")
        (folder / "last.ckpt").symlink_to(folder / "step_7")
        (folder / "step_99").symlink_to("step_1")
        found = latest(folder)
        assert found.path == str(folder / "step_2")
        assert [(problem.kind, problem.file) for problem in found.pointers] == [("dangling-pointer", "last.ckpt")]
        named = read_pointers(find_runs(locate(folder))[0]).named
        assert named == {"last.ckpt": "step_7", "latest": "step_2", "step_99": "step_1"}

    def test_of_older_steps_at_most_the_marker_is_read(self, run_of, monkeypatch):

        folder = run_of(*(f"step_{number}" for number in range(1, 9)))
        saved(folder / "step_2", "mark")
        reads = set()
        read = LocalStorage.read
        monkeypatch.setattr(LocalStorage, "read", lambda s, name, *a: reads.add((s.root, name)) or read(s, name, *a))
        assert latest(folder).path == str(folder / "step_8")
        assert {(root, name) for root, name in reads if not root.endswith("step_8")} == {
            (str(folder / "step_2"), "_COMPLETE")
        }

    def test_deep_finds_what_the_sizes_do_not_show(self, run_of):
        folder = run_of("step_1", "step_2")
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


class TestCommandLine:
    def test_latest_prints_just_a_path(self, run_of):
        folder = run_of("step_1", "step_2")
        done = cli("latest", folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder / 'step_2'}\n", "")
        assert json.loads(cli("latest", "--json", folder).stdout)["step"] == 2
        done = cli("latest", "--quiet", folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_folder_without_steps_has_no_latest(self, tmp_path):
        done = cli("latest", tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert "holds no steps" in done.stderr
        assert json.loads(cli("latest", "--json", tmp_path).stdout)["problem"].endswith("…)")
        assert cli("latest", tmp_path / "gone").returncode == 3

    def test_latest_tells_the_warnings_of_its_answer(self, tmp_path):
        folder = steps(tmp_path, "step_1")
        found = latest(folder)
        warning = Finding("unknown-global", Severity.WARNING, "the metadata names posix.system")
        from dcptool.render.latest import latest_lines

        assert latest_lines(found) == []
        found = found._replace(verdict=found.verdict._replace(findings=(warning,)))
        assert latest_lines(found) == ["warning: step_1: the metadata names posix.system"]


@torchfree
class TestHowClosely:
    @pytest.fixture
    def folder(self, tmp_path):
        """A run whose newest step has a broken header, the one before it a wrong value: in the middle of files."""
        from dcptool.checkpoint.items import FileItems

        folder = steps(tmp_path / "run", "step_1", "step_2", "step_3")
        for name, is_header in (("step_3", True), ("step_2", False)):
            checkpoint = dcptool.open(folder / name)
            items = FileItems(checkpoint)
            placed = items.item("__0_0.distcp", len(items.spans("__0_0.distcp")[0]) // 2)
            record = checkpoint.payload(placed.entry, placed.chunk).record
            place = record.item.byte_offset + (0 if is_header else record.byte_offset)
            damage.flip_byte(folder / name / "__0_0.distcp", place)
        return folder

    @pytest.mark.parametrize(("more", "step"), [((), "step_3"), (("--records",), "step_2"), (("--deep",), "step_1")])
    def test_levels(self, folder, more, step):
        assert cli("latest", folder, *more).stdout == f"{folder}/{step}\n"

    def test_halves_on_the_disks_of_two_nodes(self, tmp_path):
        folder = steps(tmp_path / "a", "step_1", "step_2")
        other = tmp_path / "b"
        for name in ("step_1", "step_2"):
            (other / name).mkdir(parents=True)
            (folder / name / "__1_0.distcp").rename(other / name / "__1_0.distcp")
        (other / "step_2" / "__1_0.distcp").unlink()
        assert cli("latest", folder).returncode == 1
        done = cli("latest", folder, "--also", other)
        assert (done.returncode, done.stdout) == (0, f"{folder}/step_1\n")
        assert "step_2 is incomplete" in done.stderr


@torchfree
def test_the_answer_is_a_path_and_false_without_one(tmp_path):
    (tmp_path / "run").mkdir()
    nothing = dcptool.find_latest(tmp_path / "run")
    assert not nothing
    with pytest.raises(CheckpointNotFoundError):
        os.path.join(nothing, ".metadata")
    found = dcptool.find_latest(steps(tmp_path / "run", "step_1"))
    assert found
    assert Path(found) == tmp_path / "run" / "step_1"
    assert dcptool.open(found).tensors
