"""Run directories: what is a step of one, of which parts, on which disks or in a store, and in which state."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import StorageError, UnsupportedError
from dcptool.ops.prune.delete import delete_steps
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.ops.verify.verify import compare_steps
from tests import damage
from tests.conftest import FOREIGN, OLD
from tests.conftest import run as cli
from tests.run_steps import ASK, GOOD, crash, kinds, latest, names, prune, steps, verdict, whole

torchfree = pytest.mark.torchfree


def test_find_steps(run_of):
    folder = run_of("step_9", "step_10", "other")
    assert [(step.number, step.name) for step in dcptool.find_steps(folder)] == [(9, "step_9"), (10, "step_10")]


class TestStepsByPattern:
    """Folders whose names differ in one number, each with a checkpoint, are steps; that this was taken so is said."""

    @pytest.fixture
    def odd(self, tmp_path):
        return steps(tmp_path / "exp", "weights-at-900", "weights-at-1000")

    def test_every_command_takes_them_and_says_so(self, odd):
        done = cli("latest", odd)
        assert done.stdout == f"{odd / 'weights-at-1000'}\n"
        said = "note: 2 folders named weights-at-N are taken as steps, by their names alone"
        assert said in done.stderr
        assert said in cli("verify", odd).stdout
        assert said in cli("inspect", odd).stdout
        assert [finding["kind"] for finding in json.loads(cli("verify", "--json", odd).stdout)["notes"]] == [
            "steps-by-pattern"
        ]
        assert [step.number for step in dcptool.find_steps(odd)] == [900, 1000]

    def test_a_save_that_died_is_passed_over_and_the_order_is_by_number(self, odd):
        crash(odd / "weights-at-1000")
        assert latest(odd, grace=0).path == str(odd / "weights-at-900")
        whole(odd / "weights-at-2000")
        (odd / "weights-at-3000").mkdir()
        assert prune(odd) == ("weights-at-900",)

    def test_a_pointer_with_a_number_names_one(self, odd):
        (odd / "latest").write_text("900")
        assert "the pointer latest names weights-at-900, older than" in cli("latest", odd).stderr

    def test_they_are_no_steps_beside_known_ones(self, odd):
        whole(odd / "step_5")
        assert latest(odd).path == str(odd / "step_5")

    def test_models_alone_are_no_steps_unless_they_are_named_so(self, tmp_path):
        for name in ("llama.100", "llama.200"):
            shutil.copytree(FOREIGN / "hf_consolidated", tmp_path / "models" / name)
        assert latest(tmp_path / "models").path is None
        for name in ("llama.100", "llama.200"):
            (tmp_path / "models" / name).rename(tmp_path / "models" / name.replace("llama", "llama-step"))
        assert latest(tmp_path / "models").path == str(tmp_path / "models" / "llama-step.200")


def test_names_that_other_folders_have_too_are_steps_where_they_hold_checkpoints(tmp_path):
    for name in ("release", "epoch_3"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "sample.png").touch()
    steps(tmp_path / "images" / "checkpoints", "step_5")
    assert latest(tmp_path / "images").path == str(tmp_path / "images" / "checkpoints" / "step_5")
    steps(tmp_path / "tune", "epoch_9", "epoch_10", "release")
    assert latest(tmp_path / "tune").path == str(tmp_path / "tune" / "epoch_10")


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


@torchfree
class TestComposite:
    @pytest.fixture
    def composite(self, run_of, tmp_path):
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
        (composite / "global_step_20" / "data" / "notes").touch()
        assert latest(composite).path == str(composite / "global_step_30")
        done = cli("latest", "--require", "actor,critic,data/notes", composite)
        assert done.stdout == f"{composite / 'global_step_20'}\n"

    def test_a_file_that_all_other_steps_have_is_missed(self, composite):
        (composite / "global_step_30" / "data" / "data.pt").unlink()
        found = latest(composite)
        assert found.path == str(composite / "global_step_20")
        assert "data/data.pt is missing, which the 2 steps beside it have" in found.skipped[0].reason
        assert names(dcptool.verify(composite).verdicts)[-1] == ("global_step_30", "incomplete")

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
        source = FOREIGN / "xver_t2130"
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


class TestObjectStore:
    """No folders, no links, no rename: only keys."""

    @pytest.fixture
    def url(self, s3_url, run_of):
        import fsspec

        folder = run_of("step_1", "step_2", "step_10")
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


class TestCommandLine:
    def test_verify_says_what_and_where(self, run_of):
        folder = run_of("step_1", "step_2")
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

    def test_durations(self, run_of):
        folder = run_of("step_1")
        assert cli("verify", "--grace", "1.5h", folder).returncode == 0
        done = cli("verify", "--grace", "5", folder)
        assert done.returncode == 2
        assert "no length of time" in done.stderr

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
