"""What fails in a writer, planner or stager on one rank is told on all, and the next save works."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.training import CheckpointManager  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training.test_choices import loaded, same  # noqa: E402
from tests.training_jobs import job, train  # noqa: E402

staging = pytest.importorskip("torch.distributed.checkpoint.staging")
if not hasattr(staging, "StagingOptions"):
    pytest.skip("this torch has no choice of staging", allow_module_level=True)
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


class Unsendable(Exception):
    """No rank can be sent it: it is not made again from what it was pickled to."""

    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


RAISED = {
    "full": lambda: OSError(28, "No space left on device"),
    "unsendable": lambda: Unsendable("not", "sent"),
    "plain": lambda: ValueError("no luck"),
}
WORDS = {"full": "o space left on device", "unsendable": "not sent", "plain": "no luck"}
FAILING = {  # where, and on which rank; what only the first rank does fails there
    "writer made": 1,
    "set_up_storage_writer": 1,
    "prepare_local_plan": 1,
    "prepare_global_plan": 0,
    "write_data": 1,
    "finish": 0,
    "planner made": 1,
    "set_up_planner": 1,
    "create_local_plan": 1,
    "create_global_plan": 0,
    "finish_plan": 1,
    "resolve_data": 1,
    "stager made": 1,
    "stage": 1,
    "staged": 1,
}
STAGER = ("stager made", "stage", "staged")


class Trouble:
    """Makes writers, planners and stagers that fail in one place while `on` is set."""

    def __init__(self, where: str, raised: str) -> None:
        self.where, self.raised, self.on = where, RAISED[raised], False

    def options(self) -> dict:
        return {"writer": self.writer, "planner": self.planner, "stager": self.stager}

    def check(self, where: str) -> None:
        if self.on and where == self.where:
            raise self.raised()

    def guarded(self, made, *names: str):
        for name in names:
            method = getattr(made, name)
            setattr(made, name, lambda *a, _m=method, _n=name, **k: (self.check(_n), _m(*a, **k))[1])
        return made

    def writer(self, path):
        self.check("writer made")
        names = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
        return self.guarded(FileSystemWriter(path, thread_count=2), *names)

    def planner(self):
        self.check("planner made")
        names = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
        return self.guarded(DefaultSavePlanner(enable_plan_caching=True), *names)

    def stager(self):
        self.check("stager made")
        trouble = self

        class Stager(staging.BlockingAsyncStager):
            def stage(self, state_dict):
                trouble.check("stage")
                future: Future = Future()
                try:
                    trouble.check("staged")
                    future.set_result(super().stage(state_dict))
                except Exception as error:
                    future.set_exception(error)
                return future

        return Stager()


def fail_once(rank: int, folder: str, how: str, raised: str, bad: int) -> dict[str, str]:
    """Save three steps with each kind of trouble, which comes in one of them; returns what was said."""
    said = {}
    for where, failing in FAILING.items():
        if where in STAGER and how == "save":
            continue
        trouble = Trouble(where, raised)
        model, optimizer, state = job("fsdp")
        with CheckpointManager(Path(folder, where), keep=None, **trouble.options()) as manager:
            for step in (1, 2, 3):
                train(model, optimizer, step)
                trouble.on = step == bad and rank == failing
                if where == "stager made" and step == bad:
                    manager._stager.close()  # so that another is made for this save
                try:
                    getattr(manager, how)(step, state)
                    manager.wait()
                except TrainingError as error:
                    said[where] = f"{step}: {error}"
    return said


@pytest.mark.parametrize(("raised", "bad"), [("plain", 1), ("plain", 2), ("full", 2), ("unsendable", 2)])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_what_fails_on_one_rank_is_told_on_all_and_the_next_save_works(tmp_path, how, raised, bad):
    """In the first save too: what is kept of a plan on some ranks only must not be used by the next."""
    said, other = values(run_ranks(2, fail_once, str(tmp_path), how, raised, bad))
    kinds = [where for where in FAILING if how == "async_save" or where not in STAGER]
    assert list(said) == kinds
    assert said == other
    for where in kinds:
        assert said[where].startswith(f"{bad}: "), where
        assert f"step_{bad} was not saved: " in said[where], where
        assert WORDS[raised] in said[where], (where, said[where])
        assert f"rank {FAILING[where]}: " in said[where], (where, said[where])
        root = tmp_path / where
        good = [f"step_{step}" for step in (1, 2, 3) if step != bad]
        assert sorted(path.name for path in root.iterdir()) == good, where
        assert dcptool.verify(root, DEEP).good, where
        assert same(loaded(root / "step_3"), loaded(tmp_path / kinds[0] / "step_3")), where
