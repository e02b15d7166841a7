"""What the other steps of a run have, one without it lacks: latest passes it over, prune keeps one to resume from."""

from __future__ import annotations

import shutil

import pytest

import dcptool
from dcptool.ops.latest import find_latest
from dcptool.ops.prune.prune import make_plan
from tests.conftest import FOREIGN, OLD, run

pytestmark = pytest.mark.torchfree
TITAN = FOREIGN / "torchtitan_dcp" / "checkpoint"


@pytest.fixture
def titan(tmp_path):
    """A run of four steps, the last of which holds the weights alone."""
    for number in (1, 2, 3):
        shutil.copytree(TITAN / "step-2", tmp_path / "run" / f"step-{number}")
    shutil.copytree(TITAN / "step-3", tmp_path / "run" / "step-4")
    return tmp_path / "run"


def test_weights_alone_are_complete_and_not_to_resume_from(titan):
    verdict = dcptool.verify(titan).verdicts[-1]
    assert (verdict.name, verdict.state.value, verdict.resumable) == ("step-4", "complete", False)
    assert {"optimizer", "train_state"} <= set(verdict.resume.lacks)
    assert "which the 3 steps beside it have" in verdict.reason
    assert f"newest complete step to resume from: {titan / 'step-3'}" in run("verify", titan).stdout


def test_latest_passes_over_weights_alone_and_says_so(titan):
    done = run("latest", titan)
    assert done.stdout == f"{titan / 'step-3'}\n"
    assert "step-4 is complete: it lacks " in done.stderr
    assert run("latest", "--weights", titan).stdout == f"{titan / 'step-4'}\n"


def test_one_sibling_is_enough_where_a_profile_knows(titan):
    for number in (1, 2):
        shutil.rmtree(titan / f"step-{number}")
    assert find_latest(titan).path == str(titan / "step-3")


def test_weights_alone_are_taken_where_there_is_nothing_else(titan):
    for number in (1, 2, 3):
        shutil.rmtree(titan / f"step-{number}")
    assert find_latest(titan).path == str(titan / "step-4")


def test_prune_keeps_the_newest_step_to_resume_from(titan):
    plan = make_plan(titan, 1, now=OLD)
    kept = {decision.name: decision.reason for decision in plan.decisions if decision.keep}
    assert kept == {"step-3": "newest complete step to resume from", "step-4": "newest complete step"}


def test_a_file_that_two_siblings_have_is_missing_that_one_has_is_doubtful(titan):
    shutil.rmtree(titan)
    for number in (1, 2, 3):
        shutil.copytree(FOREIGN / "w_nodist", titan / f"step-{number}")
    for number in (1, 2):
        shutil.copy(FOREIGN / "accelerate_fsdp2" / "scheduler.bin", titan / f"step-{number}" / "schedule.bin")
        (titan / f"step-{number}" / "eval.json").write_text("{}")  # which may come and go
    found = find_latest(titan)
    assert found.path == str(titan / "step-2")
    assert "schedule.bin is missing, which the 2 steps beside it have" in found.skipped[0].reason
    plan = make_plan(titan, 1, include_incomplete=True, now=OLD + 1e9)
    assert {decision.name for decision in plan.decisions if decision.keep} == {"step-2", "step-3"}
    shutil.rmtree(titan / "step-1")
    found = find_latest(titan)
    assert found.path == str(titan / "step-3")
    assert "schedule.bin is missing, which the step beside it has" in found.warnings[0].message


@pytest.fixture
def of_ranks(tmp_path):
    """Steps of two ranks, each with a file of each rank beside, of no known trainer."""
    for number in (1, 2, 3):
        shutil.copytree(FOREIGN / "w_align512", tmp_path / "run" / f"step_{number}")
        for rank in (0, 1):
            shutil.copy(
                FOREIGN / "accelerate_fsdp2" / "scheduler.bin", tmp_path / "run" / f"step_{number}" / f"at{rank}.pt"
            )
    return tmp_path / "run"


def test_n17_the_file_of_the_last_rank_is_missed(of_ranks):
    assert all(verdict.state.value == "complete" for verdict in dcptool.verify(of_ranks).verdicts)
    (of_ranks / "step_3" / "at1.pt").unlink()
    found = find_latest(of_ranks)
    assert found.path == str(of_ranks / "step_2")
    assert "atN.pt of each of 2 ranks is missing, which the 2 steps beside it have" in found.skipped[0].reason
    assert dcptool.verify(of_ranks).verdicts[-1].state.value == "incomplete"


def test_a_job_of_another_number_of_ranks_has_others(of_ranks):
    shutil.rmtree(of_ranks / "step_3")
    shutil.copytree(FOREIGN / "w_nodist", of_ranks / "step_3")
    shutil.copy(of_ranks / "step_2" / "at0.pt", of_ranks / "step_3")
    assert find_latest(of_ranks).path == str(of_ranks / "step_3")
    assert dcptool.verify(of_ranks).good


def test_what_the_trainer_does_not_need_is_no_error(tmp_path):
    """A job of the Trainer on two processes that goes on alone writes one file in place of two."""
    trained = FOREIGN / "trainer_fsdp2" / "checkpoint-2"
    for number in (1, 2, 3):
        shutil.copytree(trained, tmp_path / "run" / f"checkpoint-{number}")
    last = tmp_path / "run" / "checkpoint-3"
    (last / "rng_state_0.pth").rename(last / "rng_state.pth")
    (last / "rng_state_1.pth").unlink()
    verdict = dcptool.verify(tmp_path / "run").verdicts[-1]
    assert (verdict.state.value, verdict.resumable) == ("complete", True)
    assert find_latest(tmp_path / "run").path == str(last)


def test_latest_and_verify_compare_with_the_same_steps(tmp_path):
    for number in (1, 2, 3, 4, 5):
        shutil.copytree(FOREIGN / "w_nodist", tmp_path / "run" / f"step-{number}")
    for number in (2, 3, 4):
        shutil.copy(FOREIGN / "accelerate_fsdp2" / "scheduler.bin", tmp_path / "run" / f"step-{number}" / "s.bin")
    assert dcptool.verify(tmp_path / "run").verdicts[-1].state.value == "incomplete"
    assert find_latest(tmp_path / "run").path == str(tmp_path / "run" / "step-4")


def test_state_that_a_job_no_longer_keeps_is_not_lacking(tmp_path):
    pytest.importorskip("torch")
    from tests.ranks import save

    for number in (1, 2, 3):
        save(tmp_path / "run" / f"step-{number}", {"model": {"w": 1}, "optim": {"lr": 0.1}, "ema": {"w": 1}})
    save(tmp_path / "run" / "step-4", {"model": {"w": 1}, "optim": {"lr": 0.1}})
    assert dcptool.verify(tmp_path / "run").verdicts[-1].resumable is None
    assert find_latest(tmp_path / "run").path == str(tmp_path / "run" / "step-4")


def test_a_file_that_a_job_cannot_load_a_step_without_is_missing_beside_one_step_that_has_it(tmp_path):
    """accelerate killed before its last registered object: it refuses a step with fewer of them."""
    for number in (0, 1):
        step = shutil.copytree(FOREIGN / "accelerate_fsdp2", tmp_path / "run" / f"checkpoint_{number}")
        shutil.copy(step / "custom_checkpoint_0.pkl", step / "custom_checkpoint_1.pkl")
        shutil.copy(step / "scheduler.bin", step / "dl_state_dict.bin")
    for file in ("custom_checkpoint_1.pkl", "scheduler.bin"):
        (tmp_path / "run" / "checkpoint_1" / file).rename(tmp_path / file)
        verdict = dcptool.verify(tmp_path / "run").verdicts[-1]
        assert (verdict.state.value, verdict.resumable) == ("incomplete", False)
        assert f"{file} is missing, which the step beside it has" in verdict.reason
        assert find_latest(tmp_path / "run").path == str(tmp_path / "run" / "checkpoint_0")
        (tmp_path / file).rename(tmp_path / "run" / "checkpoint_1" / file)
    (tmp_path / "run" / "checkpoint_1" / "dl_state_dict.bin").unlink()  # loads without
    assert dcptool.verify(tmp_path / "run").verdicts[-1].state.value == "complete"
