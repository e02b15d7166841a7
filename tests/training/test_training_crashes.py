"""Saves that are killed at every file event: what is resumed from is always whole, and always there once it was."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: E402

import dcptool  # noqa: E402
from dcptool.training import CheckpointManager, TrainState  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402

ROWS = 6
AUDITED = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir"}
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP, grace=0.0)


def tagged(tag: float):
    """A job whose weights and optimizer state are all one number: a mix of two saves shows."""
    model = nn.Linear(4, ROWS, bias=False)
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.Adagrad(model.parameters())
    with torch.no_grad():
        for tensor in [*model.parameters(), *(value for found in optimizer.state.values() for value in found.values())]:
            tensor.fill_(tag)
    return model, optimizer, TrainState(model, optimizer)


class Killer:
    """Counts file events below a folder, and kills this process at one of them, before it happens."""

    def __init__(self, root: str, at: int, every_write: bool) -> None:
        self.root, self.at, self.every_write, self.n_events, self.events = root, at, every_write, 0, []

    def __enter__(self):
        sys.addaudithook(self._audit)
        fsync, create_stream, killer = os.fsync, FileSystem.create_stream, self
        os.fsync = lambda descriptor: (self.count("fsync"), fsync(descriptor))[1]

        @contextmanager
        def counted(self, path, mode):
            with create_stream(self, path, mode) as stream:
                yield Counted(stream, killer) if mode != "rb" else stream

        FileSystem.create_stream = counted
        return self

    def __exit__(self, *_):
        self.root = "/nowhere"

    def _audit(self, event, arguments):
        reads = event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event in AUDITED and not reads and str(arguments[0]).startswith(self.root):
            self.count(event)

    def count(self, event):
        self.n_events += 1
        self.events.append(event)
        if self.n_events == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Counted:
    """A file whose writes are events; without `every_write` only each twelfth."""

    def __init__(self, stream, killer):
        self.stream, self.killer, self.n_writes = stream, killer, 0

    def write(self, data):
        if self.killer.every_write or self.n_writes % 12 == 0:
            self.stream.flush()
            self.killer.count("write")
        self.n_writes += 1
        return self.stream.write(data)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def save_and_die(rank, root, step, tag, how, victim, at, every_write):
    """Save a step; one rank is killed at a file event. Returns that rank's events if it gets to the end."""
    _, _, state = tagged(tag)
    with CheckpointManager(root, keep=2) as manager:
        with Killer(root, at if rank == victim else 0, every_write) as killer:
            getattr(manager, how)(step, state)
            manager.wait()
        return killer.events


def save_and_die_everywhere(rank, template, folder, stride, *saving):
    """Save over copies of a run directory, each in a process of its own that is killed at a later event.

    Returns how each ended, in the order of the folders `folder`/1, /2, …; and the events of the last, which was not.
    """
    save_steps(0, f"{folder}/0", [(1, 1.0)])  # what torch does at its first save need not be done in each
    codes = []
    for number in itertools.count(1):
        root = shutil.copytree(template, f"{folder}/{number}")
        process = os.fork()
        if not process:
            code = 1
            try:
                events = save_and_die(0, root, *saving[:-1], 1 + stride * (number - 1), saving[-1])
                Path(folder, "events").write_text(" ".join(events))
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        if codes[-1] != -signal.SIGKILL:
            return codes, Path(folder, "events").read_text().split()


def save_steps(rank, root, steps):
    with CheckpointManager(root, keep=None) as manager:
        for step, tag in steps:
            manager.save(step, tagged(tag)[2])


def tags(path: str) -> set[float]:
    """All different numbers in the tensors of a checkpoint, the step counter excepted."""
    checkpoint = dcptool.open(path)
    return {float(value) for fqn in checkpoint.tensors for value in checkpoint.read(fqn).reshape(-1)}


def check_after_kill(root: Path, old: dict[str, float], new: tuple[str, float], case: str) -> bool:
    """Check what a killed save left; returns whether the new step counts.

    Args:
        root: the run directory.
        old: the complete steps there were, with their numbers.
        new: the step that was being saved, and its number.
        case: for messages.
    """
    for verdict in dcptool.verify(root, DEEP).verdicts:
        if verdict.state.value == "complete":
            found = tags(verdict.path)
            assert len(found) == 1, f"{case}: {verdict.name} is a mix: {found}"
        elif (root / verdict.name / "_COMPLETE").exists():
            raise AssertionError(f"{case}: {verdict.name} has a marker and is {verdict.state}: {verdict.reason}")
    latest = dcptool.find_latest(root, DEEP)
    assert latest.path, f"{case}: there was a checkpoint, now there is none: {[v.reason for v in latest.skipped]}"
    model, _, state = tagged(0.0)
    with CheckpointManager(root, keep=2) as manager:
        restored = manager.restore(state)
        tag = model.weight.detach().unique().tolist()
        assert len(tag) == 1, f"{case}: {restored.path}: {tag}"
        name = Path(restored.path).name
        if (root / name / "_COMPLETE").exists() and name == new[0] and tag[0] == new[1]:
            counts = True
        else:
            counts = False
            assert tag[0] == (old.get(name) or old[new[0]]), f"{case}: {restored.path}: {tag}"
        manager.save(int(new[0].rpartition("_")[2]), tagged(9.0)[2])  # and the job goes on
    assert tags(str(root / new[0])) == {9.0}, case
    assert dcptool.find_latest(root, DEEP).path == str(root / new[0]), case
    assert not [name for name in os.listdir(root) if not name.startswith("step_")], case
    return counts


SCENARIOS = {
    # steps there are with their numbers and how many ranks saved them, the step that is saved, by how many ranks
    "a new step": ({1: 1.0, 2: 2.0}, 0, 3, 0),
    "a step anew": ({1: 1.0, 2: 2.0}, 0, 2, 0),
    "the only step anew": ({2: 2.0}, 0, 2, 0),
    "a step anew, narrower": ({1: 1.0, 2: 2.0}, 2, 2, 0),
    "a step anew, wider": ({1: 1.0, 2: 2.0}, 0, 2, 2),
}


def kill_everywhere(tmp_path, scenario, how, victim, every_write, stride=1):
    """Kill a save at one event after the other; returns for each whether the new step counts then, and all events."""
    old, width, step, count = SCENARIOS[scenario]
    template, folder = tmp_path / "template", tmp_path / "killed"
    values(run_ranks(width, save_steps, str(template), list(old.items())))
    folder.mkdir()
    saving = (step, 5.0, how, victim)
    if count == 0:
        task = (save_and_die_everywhere, str(template), str(folder), stride, *saving, every_write)
        codes, events = values(run_ranks(0, *task, timeout=250))[0]
    else:
        codes = []
        while not codes or codes[-1] == -signal.SIGKILL:
            root = shutil.copytree(template, folder / str(len(codes) + 1))
            at = 1 + stride * len(codes)
            outcomes = run_ranks(count, save_and_die, str(root), *saving, at, every_write, timeout=90)
            codes.append(outcomes[victim].code)
        events = values(outcomes)[victim]
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    known = {f"step_{number}": tag for number, tag in old.items()}
    checked: dict[tuple, bool] = {}  # many events leave the same files: what was looked at once is known
    counted = []
    for number in range(1, len(codes)):
        root = folder / str(number)
        files = tuple(
            sorted((str(path.relative_to(root)), path.is_file() and path.read_bytes()) for path in root.rglob("*"))
        )
        if files not in checked:
            case = f"{scenario}, {how}, killed at event {1 + stride * (number - 1)} of rank {victim}"
            checked[files] = check_after_kill(root, known, (f"step_{step}", 5.0), case)
        counted.append(checked[files])
    assert len(counted) > 8 // stride
    return counted, events


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "wider" not in name])
def test_a_save_killed_at_every_file_event(tmp_path, scenario):
    stride = 1 if scenario == "the only step anew" else 2  # the slow test takes them all
    counted, events = kill_everywhere(tmp_path, scenario, "save", 0, False, stride)
    assert counted == sorted(counted)  # from some event on the new step counts, and not before
    assert not counted[0]
    assert set(events) >= {"open", "os.remove", "os.rename", "fsync", "write"}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_wider_save_in_the_background_killed_on_one_rank(tmp_path, victim):
    counted, _ = kill_everywhere(tmp_path, "a step anew, wider", "async_save", victim, False, stride=3 - 2 * victim)
    assert any(counted) == (victim == 0)  # the other rank's part ends before the marker


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_save_killed_at_every_write(tmp_path, scenario, how, victim):
    if victim < max(SCENARIOS[scenario][3], 1):
        kill_everywhere(tmp_path, scenario, how, victim, True)


def run_and_die(rank, root, seed, life, n_steps):
    """Train and save in the background until a timer, or a random file event, kills one rank."""
    import random

    random.seed(seed * 7919 + life)
    size = dist.get_world_size()
    victim, at, after = random.randrange(size), int(10 ** random.uniform(0.5, 3.3)), random.uniform(0.05, 1.5)
    _, _, state = tagged(0.0)
    model = state.model
    with CheckpointManager(root, keep=2) as manager:
        restored = manager.restore(state)
        start = restored.step if restored else 0
        found = tags_of(model)
        assert found == {float(start)}, (found, start)
        if rank == victim and seed % 2:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, after)
        with Killer(root, at if rank == victim and not seed % 2 else 0, True):
            for step in range(start + 1, n_steps + 1):
                with torch.no_grad():
                    manager.wait_staged()
                    for parameter in model.parameters():
                        parameter.fill_(float(step))
                    for values_ in state.optimizers[0].state.values():
                        for value in values_.values():
                            value.fill_(float(step))
                (manager.async_save if step % 3 else manager.save)(step, state)
            manager.wait()
    return start


def tags_of(model) -> set[float]:
    found = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()]
    return {float(value) for tensor in found for value in tensor.detach().unique()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_run_with_random_kills(tmp_path, seed):
    """Widths change from life to life; each resumes from the newest marked step there is, and never from less."""
    import random

    random.seed(seed)
    root, ended = tmp_path / "run", False
    for life in range(12):
        before = marked(root)
        outcomes = run_ranks(random.choice((1, 2, 3)), run_and_die, str(root), seed, life, 25, timeout=90)
        assert None not in [outcome.code for outcome in outcomes], [outcome.error for outcome in outcomes]
        for outcome in outcomes:
            assert "AssertionError" not in outcome.error, outcome.error
            if outcome.code == 0:
                assert outcome.value >= max(before, default=0)
        after = marked(root)
        assert max(after, default=0) >= max(before, default=0)
        for verdict in dcptool.verify(root, DEEP).verdicts if root.exists() else ():
            if (root / verdict.name / "_COMPLETE").exists():
                assert verdict.state.value == "complete", verdict.reason
                assert tags(verdict.path) == {float(verdict.step)}
        ended = all(outcome.code == 0 for outcome in outcomes)
        if ended:
            break
    assert ended or marked(root), "no life got as far as a checkpoint"


def marked(root: Path) -> list[int]:
    return sorted(int(file.parent.name.rpartition("_")[2]) for file in root.glob("step_*/_COMPLETE"))
