"""`async_checkpointer_type=PROCESS`: a process beside each rank writes, the rank marks; whichever of them is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint._async_process_executor")

from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.training import CheckpointManager  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training.test_choices import loaded, same  # noqa: E402
from tests.training_jobs import Box, job, train, whole  # noqa: E402

DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


class SlowWriter(FileSystemWriter):
    """Says which process writes, and takes its time; fails in the steps it is told."""

    def write_data(self, plan, planner):
        folder = Path(self.path)
        (folder.parent.parent / f"{folder.name}.{self.rank}.pid").write_text(str(os.getpid()))
        time.sleep(0.4)
        if (folder.parent.parent / f"fail.{folder.name}.{self.rank}").exists():
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


def writers(folder: Path, step: int) -> list[int]:
    """Wait until all ranks' processes write a step, and return their ids."""
    files = [folder / f"step_{step}.{rank}.pid" for rank in (0, 1)]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def save_apart(rank: int, folder: str) -> dict:
    """Save; a writer fails on rank 1 in step 2, a process gets SIGTERM in step 3, that of rank 0 SIGKILL in step 4."""
    told, found = {}, {"mine": os.getpid()}
    model, optimizer, state = job("fsdp", per_rank={"loader": Box(place=rank)})
    manager = CheckpointManager(
        Path(folder, "run"),
        keep=None,
        writer=SlowWriter,
        planner={"enable_plan_caching": True},
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    plain = CheckpointManager(Path(folder, "plain"), keep=None)
    if rank == 1:
        Path(folder, "fail.step_2.1").touch()
    for step in range(1, 7):
        train(model, optimizer, step)
        plain.save(step, state)
        manager.async_save(step, state)
        process = writers(Path(folder), step)[rank]
        found[step] = process
        if step == 3:
            os.kill(process, signal.SIGTERM)
        if step == 4 and rank == 0:
            os.kill(process, signal.SIGKILL)
        train(model, optimizer, 100 + step)  # not waited for
        try:
            manager.wait()
        except TrainingError as error:
            told[step] = str(error)
    manager.save(7, state)  # in this process
    found[7] = writers(Path(folder), 7)[rank]
    manager.close()
    plain.close()
    for process in {found[step] for step in range(1, 7)}:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    return {"told": told, "found": found}


def test_a_process_beside_each_rank_writes_and_the_rank_marks(tmp_path):
    first, second = values(run_ranks(2, save_apart, str(tmp_path)))
    assert first["told"] == second["told"]
    assert list(first["told"]) == [2, 4]
    assert "step_2 was not saved: rank 1: " in first["told"][2]
    assert "no space left on device" in first["told"][2]
    assert "step_4 was not saved: " in first["told"][4], first["told"][4]
    assert "the process that writes for this rank has ended (Checkpoint background" in first["told"][4]
    for found in (first["found"], second["found"]):
        assert found["mine"] == found[7]
        assert found["mine"] not in [found[step] for step in range(1, 7)]
        assert len({found[step] for step in (1, 2, 3, 4)}) == 1  # a failure or SIGTERM does not end it
        assert found[5] == found[6] != found[4]  # a new one on both ranks
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == [
        f"step_{step}" for step in (1, 3, 5, 6, 7)
    ]
    assert dcptool.verify(tmp_path / "run", DEEP).good
    for step in (1, 3, 5, 6):
        assert same(loaded(tmp_path / "run" / f"step_{step}"), loaded(tmp_path / "plain" / f"step_{step}"))
    model, _, state = job(seed=1, per_rank={"loader": Box(place=None)})
    other, _, reference = job(seed=2, per_rank={"loader": Box(place=None)})
    with CheckpointManager(tmp_path / "run") as manager, CheckpointManager(tmp_path / "plain") as plain:
        manager.restore(state, step=6)
        plain.restore(reference, step=6)
    assert whole(model) == whole(other)


def give_what_cannot_be_sent(rank: int, folder: str) -> str:
    """Have a state on rank 1 that cannot be pickled."""
    place = Box(value=(lambda: 1) if rank else 1)
    manager = CheckpointManager(Path(folder, "run"), async_checkpointer_type="process")
    try:
        manager.async_save(1, job("fsdp", per_rank={"place": place})[2]).result()
    except TrainingError as error:
        said = str(error)
    place.state = {"value": 1}
    with pytest.raises(TrainingError):
        manager.wait()
    manager.async_save(2, job("fsdp", per_rank={"place": place})[2])
    manager.close()
    return said


def test_what_cannot_be_sent_to_one_rank_s_process_leaves_none_waiting(tmp_path):
    for said in values(run_ranks(2, give_what_cannot_be_sent, str(tmp_path), timeout=60)):
        assert "step_1 was not saved: " in said
        assert "pickle" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_2"]


def die_while_it_writes(rank: int, folder: str) -> None:
    """Be killed while the process beside it writes step 2."""
    model, optimizer, state = job("fsdp")
    manager = CheckpointManager(
        Path(folder, "run"), writer=SlowWriter, async_checkpointer_type="process", lease_seconds=5
    )
    for step in (1, 2):
        train(model, optimizer, step)
        manager.async_save(step, state)
        writers(Path(folder), step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_writes_for_a_rank_that_was_killed_marks_nothing_and_does_not_stay(tmp_path):
    assert [outcome.code for outcome in run_ranks(2, die_while_it_writes, str(tmp_path))] == [-9, -9]
    left = writers(tmp_path, 2)
    with CheckpointManager(tmp_path / "run") as manager:  # at once, while they may still write
        model, _, state = job(seed=1)
        assert manager.restore(state).step == 1
        manager.save(2, state)
        ours = whole(model)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{process}").exists() for process in left)
    assert dcptool.verify(tmp_path / "run", DEEP).good
    model, _, state = job(seed=2)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(state).step == 2
    assert whole(model) == ours


def leave_open(rank: int, folder: str) -> None:
    """End without closing the manager, while its process is idle."""
    manager = CheckpointManager(Path(folder, "run"), async_checkpointer_type="process")
    manager.async_save(1, job("fsdp")[2]).result()
    import atexit

    atexit._run_exitfuncs()  # as Python does; forked ranks leave by os._exit


def test_a_manager_that_is_not_closed_does_not_keep_python_from_ending(tmp_path):
    assert [outcome.code for outcome in run_ranks(2, leave_open, str(tmp_path), timeout=60)] == [0, 0]
    assert dcptool.verify(tmp_path / "run").good
