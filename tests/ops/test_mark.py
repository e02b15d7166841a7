"""mark, and markers: what they prove, what they must not hide, and what is wrong in them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
import zipfile

import pytest

import dcptool
from dcptool.checkpoint.kinds import Severity
from dcptool.checks.check import Level
from dcptool.errors import ItemError, OutputExistsError, StorageError, UnsupportedError
from dcptool.formats.marker import FOREIGN as FOREIGN_MARKERS
from dcptool.formats.marker import NEGATIVE, is_marker
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.storage import LocalStorage, locate
from tests import damage
from tests.conftest import OLD
from tests.conftest import run as cli
from tests.run_steps import GOOD, crash, kinds, latest, names, saved, whole

torchfree = pytest.mark.torchfree


class TestMarkers:
    def test_once_saves_write_markers_one_without_is_not_complete(self, run_of):
        folder = run_of("step_1", "step_2", "step_3")
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

    def test_marking_an_old_step_by_hand_hides_no_newer_one(self, run_of):
        folder = run_of("step_1", "step_2", "step_3")
        dcptool.mark_complete(folder / "step_1")
        assert latest(folder).path == str(folder / "step_3")
        assert dcptool.verify(folder).good

    @pytest.mark.parametrize("name", FOREIGN_MARKERS)
    def test_markers_of_other_software(self, run_of, name):
        folder = run_of("step_1", "step_2")
        (folder / "step_1" / name).write_text("")
        assert names(latest(folder).skipped) == [("step_2", "unmarked")]
        verdict = judge(folder / "step_1", VerifyOptions(require_marker=True))
        assert (verdict.state, verdict.marker.name) == (State.COMPLETE, name)

    def test_a_name_of_your_own(self, run_of):
        folder = run_of("step_1")
        assert judge(folder / "step_1", VerifyOptions(require_marker=True, marker="OK")).state is State.UNMARKED
        (folder / "step_1" / "OK").write_text("")
        assert judge(folder / "step_1", VerifyOptions(require_marker=True, marker="OK")).state is State.COMPLETE
        dcptool.mark_complete(folder / "step_1", marker="OK")
        assert json.loads((folder / "step_1" / "OK").read_text())["writer"] == "mark"

    @pytest.mark.parametrize("name", NEGATIVE)
    def test_a_sign_that_it_is_being_written(self, run_of, name):
        folder = run_of("step_1", "step_2")
        (folder / "step_2" / name).write_text("")
        assert names(latest(folder).skipped) == [("step_2", "in-progress")]
        assert dcptool.verify(folder).good
        assert not dcptool.verify(folder / "step_2").good
        with pytest.raises(ItemError, match="in-progress, not marked"):
            dcptool.mark_complete(folder / "step_2")
        (folder / "step_2" / name).unlink()
        (folder / "step_2-unfinished").mkdir()
        assert latest(folder).path == str(folder / "step_1")

    def test_grace(self, run_of):
        folder = run_of("step_1", "step_2")
        crash(folder / "step_2")
        now = time.time()
        os.utime(folder / "step_2" / "__0_0.distcp", (now - 1800, now - 1800))
        assert judge(folder / "step_2").state is State.IN_PROGRESS
        assert judge(folder / "step_2", VerifyOptions(grace=60)).state is State.INCOMPLETE
        (folder / "step_2" / "_COMPLETE").write_text("")  # the save was done: the metadata was lost later
        assert judge(folder / "step_2").state is State.INCOMPLETE

    def test_what_changes_while_it_is_looked_at_is_in_progress(self, run_of, monkeypatch):
        import dcptool.ops.verify.parts as module

        folder = run_of("step_1")
        check = module.check

        def slow(*args, **kwargs):
            with (folder / "step_1" / "__0_0.distcp").open("ab") as file:
                file.write(b"more")
            return check(*args, **kwargs)

        monkeypatch.setattr(module, "check", slow)
        verdict = judge(folder / "step_1")
        assert verdict.state is State.IN_PROGRESS
        assert "__0_0.distcp changed while it was looked at" in verdict.reason

    def test_the_document(self, run_of):
        folder = run_of("step_500")
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

    def test_a_marker_that_cannot_be_read_or_lists_what_is_gone(self, run_of):
        folder = run_of("step_1")
        (folder / "step_1" / "rng.pt").write_bytes(b"state")
        dcptool.mark_complete(folder / "step_1")
        (folder / "step_1" / "rng.pt").unlink()
        verdict = judge(folder / "step_1")
        assert (verdict.state, verdict.findings[0].file) == (State.INCOMPLETE, "rng.pt")
        (folder / "step_1" / "_COMPLETE").write_text('{"schema": 7}')
        verdict = judge(folder / "step_1")
        assert (verdict.state, verdict.marker) == (State.UNMARKED, None)
        assert "cannot be read" in verdict.reason

    def test_only_what_verifies_is_marked(self, run_of):
        folder = run_of("step_1")
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


class TestMarkerFiles:
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
        {"step": 10**400},
        {"number": 10**4000},
        {"save_seconds": 10**400},
        {"world_size": -(10**400)},
        {"files": {".metadata": 10**400}},
        {"files": {"../x": 1}},
        {"sha256": {"/etc/hostname": "0" * 64}},
    )

    @pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda fields: str(fields)[:40])
    def test_fields_of_wrong_types(self, step, fields):
        dcptool.mark_complete(step)
        document = json.loads((step / "_COMPLETE").read_text())
        (step / "_COMPLETE").write_text(json.dumps({**document, **fields}))
        assert kinds(judge(step)) == {"bad-marker"}
        assert cli("verify", "--json", step).returncode == 1
        assert cli("interval", "--save", "45s", "--mtbf", "3h", step.parent).returncode == 0

    @pytest.mark.parametrize("n_digits", [400, 4299, 20_000])
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("_COMPLETE", '{"schema": 1, "writer": "save", "step": %s}'),
            ("_SUCCESS", '{"schema": 1, "writer": "save", "save_seconds": %s}'),
            ("trainer_state.json", '{"global_step": %s, "best_metric": %s}'),
            ("metadata.json", '{"sharded_backend": %s}'),
            ("model.safetensors.index.json", '{"weight_map": {"a": %s}}'),
            ("integrity.json", '{"files": {"a": %s}}'),
            ("model.sig", '{"dsseEnvelope": %s}'),
        ],
    )
    def test_numbers_of_many_digits_take_nothing_down(self, step, name, text, n_digits):
        """Python parses none of more than 4,300 digits, and makes no float of one with more than 308."""
        shutil.copytree(step, step.parent / "step_2")
        (step / name).write_text(text.replace("%s", "9" * n_digits))
        for command in ("verify --deep", "verify --json", "inspect", "mark"):
            done = cli(*command.split(), step)
            assert done.returncode in (0, 1, 3), done.stderr
            assert "this is a bug" not in done.stderr
        for command in ("latest", "verify --json", "prune --keep 1 --dry-run", "interval --save 45s --mtbf 3h"):
            done = cli(*command.split(), step.parent)
            assert done.returncode in (0, 1, 3), done.stderr
            assert "this is a bug" not in done.stderr

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
            assert (found.state, kinds(found)) == (State.UNREADABLE, {"unreadable"})


class TestWhatMarksVouchFor:
    @pytest.fixture
    def step(self, tmp_path):
        folder = whole(tmp_path / "step_1")
        (folder / "trainer_state.json").write_text('{"global_step": 1, "epoch": 0.5}')
        (folder / "notes.txt").write_text("the learning rate was halved")
        with zipfile.ZipFile(folder / "rng_state_0.pth", "w") as archive:
            archive.writestr("rng_state_0/data.pkl", pickle.dumps({"python": 1}, 2))
            archive.writestr("rng_state_0/version", "3")
        return folder

    def test_it_says_what_holds_nothing_that_can_be_checked(self, step):
        done = cli("mark", step)
        uncheckable = "2 files, 60 B, hold nothing that can be checked"
        assert f"({uncheckable}; --checksums vouches for them too)" in done.stdout
        assert f"; {uncheckable}\n" in cli("verify", step).stdout
        (step / "trainer_state.json").unlink()
        (step / "_COMPLETE").unlink()
        assert (
            "(1 file, 28 B, holds nothing that can be checked; --checksums vouches for it too)"
            in cli("mark", step).stdout
        )
        assert "nothing" not in cli("mark", "--checksums", step).stdout
        assert "nothing" not in cli("verify", step).stdout
        assert (
            "(the _COMPLETE before held the SHA-256 of its files; --checksums keeps that)" in cli("mark", step).stdout
        )

    @pytest.mark.parametrize(
        "name", ["trainer_state.json", "rng_state_0.pth", "notes.txt", ".metadata", "__1_0.distcp"]
    )
    def test_with_checksums_one_bit_of_any_file_is_found(self, step, name):
        dcptool.mark_complete(step, checksums=True)
        assert judge(step, VerifyOptions(level=Level.DEEP)).findings == ()
        for byte_offset in range(0, (step / name).stat().st_size, max((step / name).stat().st_size // 7, 1)):
            damage.flip_byte(step / name, byte_offset)
            found = judge(step, VerifyOptions(level=Level.DEEP))
            assert "changed-file" in kinds(found) or (name == ".metadata" and "stale-marker" in kinds(found))
            damage.flip_byte(step / name, byte_offset)

    def test_a_file_that_is_added_later_is_said(self, step):
        dcptool.mark_complete(step)
        assert judge(step).findings == ()
        (step / "added.txt").write_text("x")
        found = judge(step)
        [finding] = found.findings
        assert (found.state, finding.kind, finding.severity, finding.file) == (
            State.COMPLETE,
            "unmarked-file",
            Severity.NOTE,
            "added.txt",
        )
        (step / "more.txt").write_text("x")
        assert judge(step).findings[0].message.startswith("added.txt and 1 more were added since it was marked")
        dcptool.mark_complete(step)
        assert judge(step).findings == ()


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


class TestSaved:
    def test_as_the_job_that_saved_it(self, run_of):
        folder = run_of("step_500", "step_600", "step_510")
        for name in ("step_500", "step_600", "step_510"):
            assert cli("mark", "--saved", folder / name).returncode == 0
        markers = [json.loads((folder / name / "_COMPLETE").read_text()) for name in sorted(os.listdir(folder))]
        assert [(marker["step"], marker["writer"], marker["number"]) for marker in markers] == [
            (500, "save", 1), (510, "save", 3), (600, "save", 2)
        ]  # fmt: skip
        assert dcptool.find_latest(folder).path == str(folder / "step_510")
        dcptool.mark_complete(folder / "step_500", saved=True, checksums=True)  # again: it was saved when it was
        assert json.loads((folder / "step_500" / "_COMPLETE").read_text())["number"] == 1

    def test_a_later_step_without_a_marker_is_unmarked(self, run_of):
        folder = run_of("step_1", "step_2")
        dcptool.mark_complete(folder / "step_1")
        assert dcptool.find_latest(folder).path == str(folder / "step_2")
        (folder / "step_1" / "_COMPLETE").unlink()
        dcptool.mark_complete(folder / "step_1", saved=True)
        assert dcptool.find_latest(folder).path == str(folder / "step_1")


def test_i_a_marker_with_a_number_of_many_digits_cannot_be_read(run_of):
    folder = run_of("step_1", "step_2")
    (folder / "step_2" / "_COMPLETE").write_text('{"schema": 1, "step": ' + "9" * 20_000 + "}")
    assert "bad-marker" in kinds(judge(folder / "step_2"))
    assert latest(folder).path == str(folder / "step_1")
