"""What a job is told of its saves: `on_save`, a line in the log, and `interval`, which reads the markers."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dcptool.errors import TrainingError  # noqa: E402
from dcptool.ops.interval import read_cadence  # noqa: E402
from dcptool.training import CheckpointManager, SaveResult  # noqa: E402
from tests.conftest import run as cli  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import job, train  # noqa: E402


def told(rank: int, root: str, how: str) -> list:
    """Save three steps; rank 1 is slow to give its state. Returns what `on_save` was given."""
    from torch.distributed.checkpoint.staging import DefaultStager

    stage, found = DefaultStager._stage, []
    DefaultStager._stage = lambda self, tree, **kwargs: (time.sleep(0.2 * rank), stage(self, tree, **kwargs))[1]
    model, optimizer, state = job("fsdp")
    with CheckpointManager(root, keep=1, on_save=lambda result: found.append(result)) as manager:
        for step in (1, 2, 3):
            train(model, optimizer, step)
            getattr(manager, how)(step, state)
    return [(result, result.bytes_per_second) for result in found]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_on_save_is_given_every_step_once(tmp_path, how):
    if not hasattr(pytest.importorskip("torch.distributed.checkpoint.staging"), "DefaultStager"):
        pytest.skip("this torch copies before async_save returns")
    first, second = values(run_ranks(2, told, str(tmp_path / "run"), how))
    assert second == []  # rank 0 only
    assert [(result.step, result.path) for result, _ in first] == [
        (step, str(tmp_path / "run" / f"step_{step}")) for step in (1, 2, 3)
    ]
    folder = tmp_path / "run" / "step_3"
    result, rate = first[-1]
    assert isinstance(result, SaveResult)
    files = [file for file in folder.iterdir() if file.name != "_COMPLETE"]
    assert result.nbytes == sum(file.stat().st_size for file in files)
    assert rate == pytest.approx(result.nbytes / result.seconds)
    marker = json.loads((folder / "_COMPLETE").read_text())
    assert marker["save_seconds"] == round(result.seconds, 3)
    assert marker["blocked_seconds"] == round(max(result.blocked_seconds), 3)  # training waits for the slowest
    assert len(result.blocked_seconds) == 2
    assert all(0 < seconds <= result.seconds for seconds in result.blocked_seconds)
    if how == "async_save":
        assert first[0][0].blocked_seconds[1] > 0.15  # in the optimizer's step after


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_what_on_save_raises_loses_nothing(tmp_path, caplog, how):
    calls = []

    def fail(result):
        calls.append((result.step, threading.current_thread().name, (Path(result.path) / "_COMPLETE").exists()))
        raise RuntimeError("the logger is down")

    model, optimizer, state = job()
    with caplog.at_level(logging.INFO), CheckpointManager(tmp_path / "run", keep=1, on_save=fail) as manager:
        for step in (1, 2):
            train(model, optimizer, step)
            getattr(manager, how)(step, state)
        manager.wait()
    thread = threading.main_thread().name if how == "save" else "dcptool-save_0"
    assert calls == [(1, thread, True), (2, thread, True)]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_2"]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        f"{tmp_path / 'run' / f'step_{step}'} is saved, but on_save failed" for step in (1, 2)
    ]
    assert "the logger is down" in caplog.text
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO and r.getMessage().startswith("saved")]
    assert len(lines) == 2
    pattern = r"saved \S+/step_1: [\d.]+ kB in [\d.]+ s \([\d.]+ [kM]B/s\), training waited [\d.]+ s"
    assert re.fullmatch(pattern, lines[0]), lines[0]


def test_a_save_that_failed_is_no_event(tmp_path, monkeypatch):
    from torch.distributed.checkpoint import FileSystemWriter

    found = []
    with CheckpointManager(tmp_path / "run", on_save=found.append) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(FileSystemWriter, "write_data", lambda *_: 1 / 0)
            with pytest.raises(TrainingError):
                manager.save(1, job()[2])
        assert found == []
        manager.save(2, job()[2])
    assert [result.step for result in found] == [2]


def test_interval_reads_what_markers_record(tmp_path):
    results = []
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run", keep=None, on_save=results.append) as manager:
        for step in (1, 2, 3):
            train(model, optimizer, step)
            manager.save(step, state)
    cadence = read_cadence(tmp_path / "run")
    assert cadence.nbytes == sorted(result.nbytes for result in results)[1]
    rates = sorted(result.nbytes / round(result.seconds, 3) for result in results)
    assert cadence.bytes_per_second == pytest.approx(rates[1])
    said = cli("interval", tmp_path / "run", "--mtbf", "3h").stdout
    assert re.search(r"3 markers of 3 steps, saves of [\d.]+ s \([\d.]+ kB each, [\d.]+ [kM]B/s\)", said), said
    found = json.loads(cli("interval", tmp_path / "run", "--mtbf", "3h", "--json").stdout)["cadence"]
    assert (found["nbytes"], found["bytes_per_second"]) == (cadence.nbytes, cadence.bytes_per_second)
