"""Going back on purpose: to a step of the run, or to any checkpoint; what is saved from then on is the newest."""

from __future__ import annotations

import json
import signal

import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.ops.prune.prune import make_plan  # noqa: E402
from dcptool.training import CheckpointManager, Reader  # noqa: E402
from tests.conftest import OLD  # noqa: E402
from tests.conftest import run as cli  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import job, train, whole  # noqa: E402


def marker(step) -> dict:
    return json.loads((step / "_COMPLETE").read_text())


@pytest.fixture
def run(tmp_path):
    """A run with steps 500, 600 and 700, and the weights at each."""
    model, optimizer, state = job()
    weights = {}
    with CheckpointManager(tmp_path / "run", keep=None) as manager:
        for step in (500, 600, 700):
            train(model, optimizer, step)
            manager.save(step, state)
            weights[step] = whole(model)
    return tmp_path / "run", weights


def test_b_back_to_a_step_after_a_loss_spike(run, caplog):
    folder, weights = run
    model, optimizer, state = job(seed=1)
    with CheckpointManager(folder, keep=None) as manager:
        restored = manager.restore(state, step=500)
        assert (restored.step, restored.path) == (500, str(folder / "step_500"))
        assert whole(model) == weights[500]
        for step in (510, 520):
            train(model, optimizer, step)
            manager.save(step, state)
        newest = whole(model)
    assert [marker(folder / f"step_{step}")["number"] for step in (500, 600, 700, 510, 520)] == [1, 2, 3, 4, 5]
    assert marker(folder / "step_520")["resumed_from"] == 500
    assert "resumed_from" not in marker(folder / "step_700")
    # A restart follows the newest save, not the highest number.
    model, _, state = job(seed=2)
    with CheckpointManager(folder, keep=None) as manager:
        assert manager.restore(state).step == 520
    assert whole(model) == newest
    assert cli("latest", folder).stdout == f"{folder}/step_520\n"
    note = "note: step_600, step_700 are of a branch that was left"
    assert note in cli("verify", folder).stdout
    assert note in cli("prune", folder, "--keep", 2, "--dry-run").stdout


def test_the_branch_that_was_left_stays_until_retention_takes_it(run):
    folder, _ = run
    model, optimizer, state = job(seed=1)
    with CheckpointManager(folder, keep=3) as manager:
        manager.restore(state, step=500)
        for step, left in ((510, [510, 600, 700]), (520, [510, 520, 700]), (530, [510, 520, 530])):
            train(model, optimizer, step)
            path = manager.save(step, state)
            assert path.endswith(f"step_{step}")
            assert sorted(int(one.name[5:]) for one in folder.glob("step_*")) == left


def test_b_the_save_just_made_is_never_deleted(run):
    folder, _ = run
    model, optimizer, state = job(seed=1)
    with CheckpointManager(folder, keep=1) as manager:
        train(model, optimizer, 410)
        path = manager.save(410, state)
    assert dcptool.verify(path).good
    assert dcptool.find_latest(folder).path == path


def test_back_twice_and_over_steps_of_the_same_number(run):
    folder, weights = run
    for _ in range(2):
        model, optimizer, state = job(seed=1)
        with CheckpointManager(folder, keep=None) as manager:
            manager.restore(state, step=500)
            assert whole(model) == weights[500]
            train(model, optimizer, 600)
            manager.save(600, state)
    report = dcptool.verify(folder)
    assert [verdict.step for verdict in report.verdicts] == [500, 700, 600]
    assert [note.kind for note in report.notes] == ["other-branch"]
    assert "step_700" in report.notes[0].message
    assert [d.name for d in make_plan(folder, 1, now=OLD).decisions if d.keep] == ["step_600"]


def test_a_path_of_this_run_is_a_step_of_it_however_it_is_written(run, tmp_path, monkeypatch):
    folder, _ = run
    monkeypatch.chdir(tmp_path)
    model, optimizer, state = job(seed=1)
    with CheckpointManager(folder, keep=None) as manager:
        manager.restore(state, path="run/step_600/")
        train(model, optimizer, 610)
        manager.save(610, state)
    assert marker(folder / "step_610")["resumed_from"] == 600


def test_from_any_path(run, tmp_path):
    folder, weights = run
    model, optimizer, state = job(seed=1)
    with CheckpointManager(tmp_path / "other") as manager:
        assert manager.restore(state, path=folder / "step_600").step == 600
        assert whole(model) == weights[600]
        train(model, optimizer, 1)
        manager.save(1, state)
    assert "resumed_from" not in marker(tmp_path / "other" / "step_1")  # it is no step of that run


@pytest.mark.parametrize("how", ["missing", "incomplete", "unsafe"])
def test_what_was_named_is_loaded_or_refused_and_nothing_else(run, how):
    folder, _ = run
    if how == "incomplete":
        (folder / "step_600" / "__0_0.distcp").unlink()
    elif how == "unsafe":
        (folder / "step_600" / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    model, _, state = job(seed=1)
    before = whole(model)
    words = {
        "missing": "has no step 650; it has 700, 600, 500",
        "incomplete": "step 600 was not restored: it is incomplete: .*__0_0.distcp",
        "unsafe": "step 600 was not restored: it is unsafe: .*posix.system",
    }[how]
    with CheckpointManager(folder) as manager:
        with pytest.raises(TrainingError, match=words):
            manager.restore(state, step=650 if how == "missing" else 600)
        with pytest.raises(ValueError, match="not both"):
            manager.restore(state, step=500, path=folder / "step_500")
    assert whole(model) == before


def told_to_end(rank, root, kind):
    """Rank 1 is told to end while it loads the newest step."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raised = {"Ctrl-C": KeyboardInterrupt(), "exit": SystemExit(3), "signal": SignalException("SIGINT", signal.SIGINT)}[
        kind
    ]
    _, _, state = job("fsdp")
    tried = []
    read = Reader.read_data

    def stop(self, plan, planner):
        tried.append(self.checkpoint_id)
        if rank == 1:
            raise raised
        return read(self, plan, planner)

    Reader.read_data = stop
    try:
        with CheckpointManager(root) as manager:
            manager.restore(state)
    except BaseException as error:
        return type(error).__name__, [path.rpartition("/")[2] for path in tried]
    return "nothing", tried


@pytest.mark.parametrize("kind", ["Ctrl-C", "exit", "signal"])
def test_a_rank_that_is_told_to_end_says_nothing_against_a_checkpoint(tmp_path, kind):
    """Else it would be passed over, and the others went on from an older one."""
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            train(model, optimizer, step)
            manager.save(step, state)
    for error, tried in values(run_ranks(2, told_to_end, str(tmp_path / "run"), kind)):
        assert (error, tried) == ("TrainingError", ["step_2"])
