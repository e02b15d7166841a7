"""Saves that find no room, or are killed: the error says so, and nothing they leave stands in the way of the next."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.ops.verify.judge import judge  # noqa: E402
from dcptool.ops.verify.verdict import State, VerifyOptions  # noqa: E402
from dcptool.storage import is_url, storage_at  # noqa: E402
from dcptool.training import CheckpointManager, TrainState, writing  # noqa: E402
from tests.conftest import OLD  # noqa: E402
from tests.conftest import run as cli  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A disk of 21 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=21m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def job(nbytes: int = 6_000_000) -> TrainState:
    """A job whose checkpoint has so many bytes."""
    model = torch.nn.Linear(nbytes // 4000, 1000, bias=False)
    return TrainState(model, torch.optim.SGD(model.parameters()))


def used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def marked(root: Path) -> list[str]:
    return sorted((file.parent.name for file in root.glob("step_*/_COMPLETE")), key=lambda name: int(name[5:]))


def save_with_an_obstacle(rank: int, folder: str, how: str) -> dict[int, str]:
    """Save steps 1 to 12; a file of 4 MiB is on the disk in steps 5 to 7. Returns what went wrong, by step."""
    root, obstacle, failed, most = Path(folder, "run"), Path(folder, "obstacle"), {}, 0
    manager = CheckpointManager(root, keep=2)
    state = job()
    for step in range(1, 13):
        if rank == 0 and step == 5:
            obstacle.write_bytes(bytes(4 * MIB))
        if rank == 0 and step == 8:
            obstacle.unlink()
        try:
            getattr(manager, how)(step, state)
            manager.wait()
        except TrainingError as error:
            failed[step] = str(error)
        most = max(most, used(root))
    manager.close()
    return {**failed, 0: str(most)}


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_disk_that_is_full_for_a_moment_stops_only_the_saves_of_that_moment(disk, how, ranks):
    failed = values(run_ranks(ranks, save_with_an_obstacle, str(disk), how))
    root = disk / "run"
    assert all(one.keys() == failed[0].keys() for one in failed)
    steps = sorted(failed[0].keys() - {0})
    assert steps
    assert set(steps) <= {5, 6, 7}
    for step in steps:
        assert len({one[step] for one in failed}) == 1  # all ranks are told the same
        message = failed[0][step]
        words = rf"step_{step} was not saved: .*{root}/step_{step}: no space left on device; "
        assert re.search(words, message), message
        assert re.search(r"this rank has [\d,]+ bytes to write there, [\d,]+ were free before", message), message
    assert marked(root) == ["step_11", "step_12"]
    assert sorted(path.name for path in root.iterdir()) == ["step_11", "step_12"]
    assert int(failed[0][0]) <= 19_000_000  # two that are kept, and one that is written
    assert dcptool.verify(root, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good


def fill_and_die(rank: int, root: str) -> str:
    """Save until the disk is full, and end without another word."""
    manager = CheckpointManager(root, keep=None)
    try:
        for step in range(1, 10):
            manager.save(step, job())
    except TrainingError:
        os._exit(7)
    return "it never was full"


def fill(file: Path) -> None:
    """Take all that is left of a disk."""
    with suppress(OSError), open(file, "wb", buffering=0) as opened:
        while opened.write(bytes(4096)):
            pass


@pytest.mark.parametrize("lease", ["there", "gone"])
def test_a_job_that_died_of_a_full_disk_leaves_room_for_the_next(disk, lease):
    """With no room for a lease either: it is made empty, and written once what the dead job left is gone."""
    root = disk / "run"
    assert run_ranks(0, fill_and_die, str(root))[0].code == 7
    assert marked(root) == ["step_1", "step_2", "step_3"]
    assert (root / "step_4" / "_SAVING").exists()
    if lease == "gone":
        (root / "_LEASE").unlink()
        fill(disk / "rest")
    with CheckpointManager(root, keep=None) as manager:
        manager.save(5, job(1_000_000))
    assert marked(root) == ["step_1", "step_2", "step_3", "step_5"]
    assert not (root / "step_4").exists()


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (OSError(28, "No space left on device"), "no space left on device"),
        (OSError(122, "Disk quota exceeded"), "the disk quota is used up"),
        (OSError(5, "Input/output error"), r"OSError: \[Errno 5\] Input/output error"),
        (RuntimeError("unexpected pos 704 vs 598"), "RuntimeError: unexpected pos 704 vs 598"),
    ],
)
@pytest.mark.parametrize("where", ["write_data", "finish"])
def test_what_the_disk_said_is_found_under_what_torch_says(tmp_path, monkeypatch, raised, words, where):
    def fail(*_):
        try:
            raise raised
        except Exception:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch does

    def plainly(*_):
        raise raised

    for failing in (fail, plainly) if "unexpected" not in words and "Errno 5" not in words else (plainly,):
        with monkeypatch.context() as patched, CheckpointManager(tmp_path / "run") as manager:
            patched.setattr(FileSystemWriter, where, failing)
            with pytest.raises(TrainingError, match=f"step_1 was not saved: .*{words}"):
                manager.save(1, job(4000))


def test_a_disk_that_says_nothing_is_looked_at(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    monkeypatch.setattr(writing, "_free_nbytes", lambda path: 1000)
    with (
        CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(TrainingError, match=r"no space left.* 4,000 byt"),
    ):
        manager.save(1, job(4000))


def die_in_save(rank: int, root: str, step: int, where: str) -> None:
    """Be killed as a step is saved."""
    setattr(FileSystemWriter, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    CheckpointManager(root, keep=None).save(step, job(4000))


def names(root: str) -> list[str]:
    if is_url(root):
        return [entry.name for entry in storage_at(root).entries()]
    return sorted(os.listdir(root))


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_what_killed_saves_left_goes_before_the_next(request, tmp_path, kind):
    """Of several lives, killed before and after their data; other files, and what no manager began, stay."""
    root = str(tmp_path / "run") if kind == "folder" else request.getfixturevalue("s3_url")
    with CheckpointManager(root, keep=None) as manager:
        manager.save(1, job(4000))
    if kind == "folder":
        for step, where in ((2, "write_data"), (3, "finish"), (4, "finish")):
            assert run_ranks(0, die_in_save, root, step, where)[0].code == -9
            assert names(root) == ["_LEASE", "step_1", f"step_{step}"]  # each removes what the one before left
    storage = storage_at(root) if is_url(root) else None
    for name in (
        "step_5/_SAVING",
        "step_5/__0_0.distcp",
        "step_5/.metadata.tmp",
        "step_5/notes.txt",
        "step_6/__0_0.distcp",
    ):
        if storage:
            storage.write(name, b"x")
        else:
            Path(root, name).parent.mkdir(exist_ok=True)
            Path(root, name).write_bytes(b"x")
    with CheckpointManager(root, keep=None) as manager:
        assert manager.restore(job(4000)).step == 1
        assert {"step_5", "step_6"} <= set(names(root))  # who restores only removes nothing
        manager.save(7, job(4000))
    assert names(root) == ["step_1", "step_5", "step_6", "step_7"]
    left = [entry.name for entry in storage_at(root).entries("step_5")] if storage else os.listdir(Path(root, "step_5"))
    assert [name.rpartition("/")[2] for name in left] == ["notes.txt"]
    assert not any("_SAVING" in entry for entry in names(f"{root}/step_7"))


class TestStates:
    """What commands make of a step that has `_SAVING`."""

    @pytest.fixture
    def run(self, tmp_path):
        """Of three steps the last was killed when all but its marker was written."""
        root = tmp_path / "run"
        with CheckpointManager(root, keep=None) as manager:
            for step in (1, 2, 3):
                manager.save(step, job(4000))
        (root / "step_3" / "_COMPLETE").unlink()
        (root / "step_3" / "_SAVING").write_text("{}")
        return root

    def state(self, run):
        return dcptool.verify(run).verdicts[-1].state.value

    def test_it_is_in_progress_then_incomplete_and_prune_removes_it_once_a_newer_one_is_there(self, run):
        assert self.state(run) == "in-progress"
        for file in (run / "step_3").iterdir():
            os.utime(file, (OLD, OLD))
        verdict = dcptool.verify(run).verdicts[-1]
        assert (verdict.state.value, [f.kind for f in verdict.findings]) == ("incomplete", ["unfinished-save"])
        assert cli("latest", run).stdout == f"{run / 'step_2'}\n"
        refused = cli("mark", run / "step_3")
        assert refused.returncode == 3
        assert "delete _SAVING, then dcptool mark" not in refused.stdout
        assert cli("prune", run, "--keep", "3", "--yes").returncode == 0
        assert (run / "step_3").exists()
        os.rename(run / "step_3", run / "step_0")  # older than the newest now
        cli("prune", run, "--keep", "3", "--yes")
        assert not (run / "step_0").exists()

    def test_restore_passes_it_over_and_a_first_save_that_never_finished_was_none(self, run):
        with CheckpointManager(run) as manager:
            restored = manager.restore(job(4000))
            assert restored.step == 2
            assert "_SAVING is there and no _COMPLETE" in restored.skipped[0][1]
            for step in (1, 2):
                for file in (run / f"step_{step}").iterdir():
                    file.unlink()
                (run / f"step_{step}").rmdir()
            assert manager.restore(job(4000)) is None

    def test_beside_a_marker_it_says_nothing(self, run):
        (run / "step_2" / "_SAVING").write_text("{}")  # killed between the two
        (verdict,) = dcptool.verify(run / "step_2").verdicts
        assert (verdict.state.value, verdict.findings) == ("complete", ())
        assert cli("latest", run).stdout == f"{run / 'step_2'}\n"
        with CheckpointManager(run, keep=None) as manager:
            manager.save(4, job(4000))
        assert marked(run) == ["step_1", "step_2", "step_4"]
        assert not (run / "step_3").exists()


def test_a_save_killed_before_it_wrote_anything_is_unfinished(tmp_path):
    (tmp_path / "run/step_1").mkdir(parents=True)
    (tmp_path / "run/step_1/_SAVING").write_text("{}")
    verdict = judge(str(tmp_path / "run/step_1"))
    assert verdict.state is State.IN_PROGRESS
    verdict = judge(str(tmp_path / "run/step_1"), VerifyOptions(grace=0.0))
    assert verdict.state is State.INCOMPLETE
    assert "a save began here and has not finished" in verdict.reason
