"""Ranks that are new after resharding have no file of their own: whether their trainer goes on, and how that is told.

What the trainers do was tried in them (docs/reshard.md); `test_resumes.py` tries it again.
"""

from __future__ import annotations

import shutil

import pytest

import dcptool
from dcptool.ops.latest import find_latest
from dcptool.ops.reshard.plan import ReshardOptions, make_plan
from dcptool.ops.verify.verdict import State
from tests.alone import reshard_alone
from tests.conftest import FOREIGN, run

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")
TRAINER = FOREIGN / "trainer_fsdp2" / "checkpoint-2"
ACCELERATE = FOREIGN / "accelerate_fsdp2_auto" / "checkpoints" / "checkpoint_1"
TITAN = FOREIGN / "torchtitan_dcp" / "checkpoint" / "step-2"
MEGATRON = FOREIGN / "megatron_tp2" / "iter_0000010"
OF_RANKS = {TRAINER: "rng_state_{}.pth", ACCELERATE: "random_states_{}.pkl"}
of_both = pytest.mark.parametrize("source", OF_RANKS, ids=["trainer", "accelerate"])


def told(verdict) -> list[str]:
    return [finding.message for finding in verdict.findings if finding.kind == "begins-anew"]


@of_both
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_a_resharded_step_is_one_to_resume_from(source, n_ranks, tmp_path):
    out = tmp_path / "run" / source.name
    reshard_alone(source, out, world_size=n_ranks)
    [verdict] = dcptool.verify(out).verdicts
    assert (verdict.state, verdict.resumable) == (State.COMPLETE, True)
    new = [OF_RANKS[source].format(rank) for rank in range(2, n_ranks)]
    assert len(told(verdict)) == bool(new)
    assert all(name in told(verdict)[0] for name in new)
    assert find_latest(tmp_path / "run").path == str(out)
    done = run("latest", tmp_path / "run")
    assert (done.returncode, "anew" in done.stderr) == (0, False)


@of_both
@pytest.mark.parametrize("how", ["copy", "mark"])
def test_it_stays_one_when_it_is_copied_or_marked(source, how, tmp_path):
    out = tmp_path / "one" / source.name
    reshard_alone(source, out, world_size=4)
    if how == "copy":
        dcptool.copy_steps(out, tmp_path / "two" / source.name)
        out = tmp_path / "two" / source.name
    else:
        assert run("mark", "--checksums", out).returncode == 0
    [verdict] = dcptool.verify(out).verdicts
    assert (verdict.state, verdict.resumable, len(told(verdict))) == (State.COMPLETE, True, 1)


@of_both
def test_what_its_trainer_saved_without_a_ranks_file_died_in_its_save(source, tmp_path):
    step = shutil.copytree(source, tmp_path / source.name)
    lost = OF_RANKS[source].format(1)
    (step / lost).unlink()
    [verdict] = dcptool.verify(step, dcptool.VerifyOptions(grace=0)).verdicts
    assert (verdict.state, verdict.resumable) == (State.INCOMPLETE, False)
    assert any(finding.file == lost for finding in verdict.findings)  # and no file that is looked for on one rank alone


def test_a_file_that_its_trainer_needs_is_still_lacking(tmp_path):
    step = shutil.copytree(TRAINER, tmp_path / "a" / TRAINER.name)
    (step / "scheduler.pt").unlink()
    out = tmp_path / "b" / TRAINER.name
    reshard_alone(step, out, world_size=4)
    [verdict] = dcptool.verify(out).verdicts
    assert (verdict.state, verdict.resumable) == (State.COMPLETE, False)
    assert "scheduler.pt" in verdict.reason


@pytest.mark.parametrize(("n_ranks", "is_told"), [(2, False), (1, True), (3, True)])
def test_what_a_trainer_must_be_told_on_other_ranks_is_said(n_ranks, is_told, tmp_path):
    """torchtitan's data loader stops at another number of ranks, also with the step it saved itself."""
    done = reshard_alone(TITAN, tmp_path / "out" / "step-2", world_size=n_ranks)
    assert any("exclude_from_loading" in note for note in done.notes) is is_told


@pytest.mark.parametrize(("there", "said"), [(None, "is not there"), ("7", "names 7"), ("10", "")])
def test_a_file_by_which_a_trainer_finds_its_steps_is_asked_for(there, said, tmp_path):
    """Megatron-LM begins anew with a warning where it is not there; a step's own name is nothing to it."""
    if there:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(there)
    plan = make_plan(str(MEGATRON), str(tmp_path / "run" / MEGATRON.name), ReshardOptions(3))
    notes = [note for note in plan.notes if "latest_checkpointed_iteration.txt" in note]
    assert len(notes) == bool(said)
    assert all(said in note and "write 10 into it" in note for note in notes)
    plan = make_plan(str(MEGATRON), str(tmp_path / "run" / "model"), ReshardOptions(3))
    assert not any("latest_checkpointed" in note for note in plan.notes)  # no step by its name
