"""`training.CheckpointManager` on one and on several forked ranks: saves, marks, failures of one rank, the way back."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import DcptoolError, TrainingError  # noqa: E402
from dcptool.training import CheckpointManager, Reader, TrainState, staging  # noqa: E402
from tests import damage  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import Box, job, train, whole  # noqa: E402

HOW = ("save", "async_save")


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        yield manager


def run(root: Path, *steps: int, keep: int | None = None, how: str = "save", **more) -> dict:
    """Train up to the last of the steps in this process and save each; returns the weights after each."""
    model, optimizer, state = job(**more)
    weights = {}
    with CheckpointManager(root, keep) as manager:
        restored = manager.restore(state)
        for step in range((restored.step if restored else 0) + 1, max(steps) + 1):
            train(model, optimizer, step)
            if step in steps:
                getattr(manager, how)(step, state)
                weights[step] = whole(model)
    return weights


def names(root: Path) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir())


@pytest.mark.parametrize("how", HOW)
def test_a_save_is_marked_and_comes_back(tmp_path, how):
    weights = run(tmp_path / "run", 1, 3, how=how)
    marker = json.loads((tmp_path / "run" / "step_3" / "_COMPLETE").read_text())
    assert (marker["writer"], marker["step"], marker["world_size"]) == ("save", 3, 1)
    assert 0 < marker["blocked_seconds"] <= marker["save_seconds"] < 60
    assert set(marker["files"]) == {".metadata", "__0_0.distcp"}
    assert dcptool.find_latest(tmp_path / "run", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).verdict.step == 3
    model, _, state = job(seed=1)
    with CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(state)
    assert (restored.step, restored.path, restored.world_size) == (3, str(tmp_path / "run" / "step_3"), 1)
    assert (restored.skipped, restored.per_rank, restored.ignored) == ((), (), ())
    assert whole(model) == weights[3]


def test_the_future_is_done_when_the_step_is_marked_and_older_ones_are_gone(tmp_path):
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run", keep=1) as manager:
        for step in (1, 2):
            train(model, optimizer, step)
            assert manager.async_save(step, state).result() == str(tmp_path / "run" / f"step_{step}")
            assert (tmp_path / "run" / f"step_{step}" / "_COMPLETE").exists()
            assert names(tmp_path / "run") == ["_LEASE", f"step_{step}"]


def test_training_goes_on_while_the_state_is_copied_but_the_optimizer_waits(tmp_path, monkeypatch):
    """What is saved is the state when it was asked for, though the copy takes long."""
    from torch.distributed.checkpoint.staging import DefaultStager

    stage, copying = DefaultStager._stage, threading.Event()

    def slow(self, tree, **kwargs):
        copying.set()
        time.sleep(0.5)
        return stage(self, tree, **kwargs)

    monkeypatch.setattr(DefaultStager, "_stage", slow)
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run") as manager:
        train(model, optimizer, 1)
        saved = whole(model)
        began = time.perf_counter()
        manager.async_save(1, state)
        assert copying.wait(5)
        assert time.perf_counter() - began < 0.4  # not blocked
        train(model, optimizer, 2)
        assert time.perf_counter() - began >= 0.5  # but its step was
        assert whole(model) != saved
        train(model, optimizer, 3)
    other, _, state = job(seed=1)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(state).step == 1
    assert whole(other) == saved
    assert json.loads((tmp_path / "run" / "step_1" / "_COMPLETE").read_text())["blocked_seconds"] >= 0.4


def test_a_torch_without_stager_copies_first_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(staging, "DefaultStager", None)
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "run") as manager:
        train(model, optimizer, 1)
        saved = whole(model)
        future = manager.async_save(1, state)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)  # at once, by no optimizer
        future.result()
        manager.async_save(2, state).result()
    assert caplog.text.count("has no DefaultStager: states are copied before training goes on") == 1
    shutil.rmtree(tmp_path / "run" / "step_2")
    other, _, state = job(seed=1)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.restore(state)
    assert whole(other) == saved


def test_never_two_saves_at_once(tmp_path, monkeypatch):
    write, running, most = FileSystemWriter.write_data, [], []

    def counted(self, plan, planner):
        running.append(1)
        most.append(len(running))
        time.sleep(0.2)
        running.pop()
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", counted)
    run(tmp_path / "run", 1, 2, 3, how="async_save")
    assert most == [1, 1, 1]
    assert names(tmp_path / "run") == ["step_1", "step_2", "step_3"]


@pytest.mark.parametrize("how", ["save", "async_save", "restore", "warm_start"])
def test_what_is_no_state_of_a_job_is_refused(manager, how):
    state = job()[2]
    manager.save(1, state)
    arguments = {"save": (1, [1]), "async_save": (1, {2: 1}), "restore": ("state",)}
    with pytest.raises(TrainingError, match=r"pass a TrainState\(model, optimizer, …\).*, not "):
        getattr(manager, how)(*arguments.get(how, ({"a": 1}, manager.root)))
    assert manager.restore(state).step == 1  # a step of that number is still there


class Refusal(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize("call", ["save", "async_save", "should_stop", "restore", "wait", "close"])
def test_a_failed_background_save_surfaces_at_the_next_call(tmp_path, monkeypatch, call):
    def full(self, plan, planner):
        raise OSError(28, "No space left on device")

    model, optimizer, state = job()
    train(model, optimizer, 1)
    manager = CheckpointManager(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "write_data", full)
        manager.async_save(1, state)
        while not manager._uploading.done():
            time.sleep(0.01)
    arguments = {"save": (2, state), "async_save": (2, state), "restore": (state,)}.get(call, ())
    with pytest.raises(TrainingError, match=r"step_1 was not saved: .*step_1: no space left on device"):
        getattr(manager, call)(*arguments)
    if call == "close":
        with pytest.raises(TrainingError, match="closed"):
            manager.save(2, state)
        return
    manager.save(2, state)  # and is told once
    manager.close()
    assert dcptool.find_latest(tmp_path / "run").verdict.step == 2
    assert not (tmp_path / "run" / "step_1" / ".metadata").exists()


def test_retention(tmp_path):
    run(tmp_path / "run", *range(1, 8), keep=2)
    assert names(tmp_path / "run") == ["step_6", "step_7"]
    model, optimizer, state = job()
    with CheckpointManager(tmp_path / "kept", keep=2, archive_every=3) as manager:
        for step in range(1, 9):
            train(model, optimizer, step)
            manager.async_save(step, state)
    assert names(tmp_path / "kept") == ["step_3", "step_6", "step_7", "step_8"]


def test_what_cannot_be_deleted_stops_nothing(tmp_path, caplog):
    run(tmp_path / "run", 1, 2)
    (tmp_path / "run" / "latest").write_text("step_1")  # somebody's pointer
    run(tmp_path / "run", 3, 4, keep=1)
    assert {"step_1", "step_4"} <= set(names(tmp_path / "run"))


def test_wrong_arguments(tmp_path, manager):
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointManager(tmp_path, keep=0)
    with pytest.raises(TrainingError, match="a number from 0 on"):
        manager.save(-1, job()[2])
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "step_1").write_text("")
    with pytest.raises(TrainingError, match="step_1 is no folder"):
        manager.save(1, job()[2])


class TestSavingAStepAnew:
    def test_marker_then_metadata_go_before_the_first_byte(self, tmp_path, monkeypatch):
        root = tmp_path / "run"
        run(root, 1, 2)
        (root / "step_2" / "config.json").write_text("{}")  # not ours
        (root / "step_2" / "__7_0.distcp").write_bytes(b"of a wider save")
        unlinked, seen = [], []
        unlink, write = os.unlink, FileSystemWriter.write_data
        monkeypatch.setattr(os, "unlink", lambda path, **kw: (unlinked.append(Path(path).name), unlink(path, **kw)))
        monkeypatch.setattr(
            FileSystemWriter, "write_data", lambda *args: (seen.append(names(root / "step_2")), write(*args))[1]
        )
        with CheckpointManager(root) as manager:
            model, optimizer, state = job(seed=3)
            train(model, optimizer, 2)
            manager.save(2, state)
        assert unlinked[:4] == ["_COMPLETE", ".metadata", "__0_0.distcp", "__7_0.distcp"]
        assert seen == [["_SAVING", "config.json"]]
        assert names(root / "step_2") == [".metadata", "_COMPLETE", "__0_0.distcp", "config.json"]

    def test_the_only_complete_one_is_kept_until_the_new_one_is_marked(self, tmp_path, monkeypatch):
        root = tmp_path / "run"
        before = run(root, 2)

        def full(self, plan, planner):
            raise OSError(28, "No space left on device")

        model, optimizer, state = job(seed=3)
        with CheckpointManager(root) as manager, monkeypatch.context() as patched:
            patched.setattr(FileSystemWriter, "write_data", full)
            with pytest.raises(TrainingError, match="no space"):
                manager.save(2, state)
        assert names(root) == ["step-2", "step_2"]
        other, _, its_state = job(seed=4)
        with CheckpointManager(root) as manager:
            assert manager.restore(its_state).path == str(root / "step-2")
            assert whole(other) == before[2]
            train(model, optimizer, 2)
            manager.save(2, state)
            assert names(root) == ["_LEASE", "step_2"]
            manager.restore(its_state)
        assert whole(other) == whole(model)


class TestRestore:
    def test_nothing_yet(self, tmp_path, manager):
        model, optimizer, state = job()
        before = whole(model)
        assert manager.restore(state) is None
        (tmp_path / "run").mkdir(exist_ok=True)
        assert manager.restore(state) is None
        (tmp_path / "run" / "step_2").mkdir()
        (tmp_path / "run" / "step_2" / "__0_0.distcp").write_bytes(b"cut")  # the first save was killed
        assert manager.restore(state) is None
        assert whole(model) == before
        assert not optimizer.state

    @pytest.mark.parametrize("how", ["flip", "missing", "no metadata", "no marker"])
    def test_a_damaged_newest_one_is_passed_over(self, tmp_path, caplog, how):
        weights = run(tmp_path / "run", 1, 2, 3)
        step = tmp_path / "run" / "step_3"
        if how == "flip":
            flip_all(step)
        elif how == "missing":
            (step / "__0_0.distcp").unlink()
        else:
            (step / (".metadata" if how == "no metadata" else "_COMPLETE")).unlink()
        model, _, state = job(seed=1)
        with CheckpointManager(tmp_path / "run") as manager:
            restored = manager.restore(state)
        assert restored.step == 2
        assert whole(model) == weights[2]
        ((path, reason),) = restored.skipped
        assert path == str(step)
        words = {
            "flip": r"loading it: .*__0_0\.distcp, bytes [\d,]+–[\d,]+: '.*': bytes were changed",
            "missing": "incomplete: .*__0_0.distcp",
            "no metadata": "incomplete: .*metadata",
            "no marker": "unmarked: it has no marker, though step_2 has one",
        }[how]
        assert re_search(words, reason)
        assert re_search(f"step_3 was (passed over|not restored): {words}", caplog.text)

    def test_all_damaged_raises_and_leaves_the_optimizer(self, tmp_path):
        run(tmp_path / "run", 1, 2)
        (tmp_path / "run" / "step_1" / "__0_0.distcp").unlink()
        flip_all(tmp_path / "run" / "step_2")
        model, optimizer, state = job(seed=1)
        with CheckpointManager(tmp_path / "run") as manager:
            with pytest.raises(TrainingError, match=r"(?s)none could be restored:\n.*step_2: .*\n.*step_1: incomplete"):
                manager.restore(state)
            assert not optimizer.state
            train(model, optimizer, 1)
            before = repr(optimizer.state_dict())
            with pytest.raises(TrainingError):
                manager.restore(state)
        assert repr(optimizer.state_dict()) == before

    def test_all_differences_at_once(self, tmp_path):
        run(tmp_path / "run", 1)
        model, optimizer, state = job(hidden=10, progress=Box(n=1))
        before = whole(model)
        with CheckpointManager(tmp_path / "run") as manager, pytest.raises(TrainingError) as raised:
            manager.restore(state)
        text = str(raised.value)
        for name in ("up.weight", "up.bias", "down.weight"):
            assert f"'model.{name}': shape" in text
            assert f"'optim.state.{name}.exp_avg': shape" in text
        assert "missing from the checkpoint: progress" in text
        assert whole(model) == before
        assert not optimizer.state

    def test_less_strict(self, tmp_path):
        run(tmp_path / "run", 1, gone=Box(n=1))
        _, optimizer, state = job(seed=1, progress=Box(n=5))
        with CheckpointManager(tmp_path / "run") as manager:
            with pytest.raises(TrainingError, match="only in the checkpoint: gone"):
                manager.restore(state)
            restored = manager.restore(state, strict=False)
        assert restored.ignored == ("missing from the checkpoint: progress", "only in the checkpoint: gone")
        assert state.shared["progress"].state == {"n": 5}
        assert len(optimizer.state) == 4

    def test_less_strict_lets_renamed_entries_pass(self, tmp_path):
        def made(*names):
            model = torch.nn.ModuleDict({"kept": torch.nn.Linear(2, 2)})
            for name in names:
                model[name] = torch.nn.ModuleDict({str(n): torch.nn.Linear(2, n + 1) for n in range(6)})
            optimizer = torch.optim.AdamW(model.parameters())
            return model, TrainState(model, optimizer)

        old, state = made("blocks")
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, state)
            new, state = made("layers")
            before = whole(new)
            with pytest.raises(TrainingError, match="names differ by"):
                manager.restore(state)
            restored = manager.restore(state, strict=False)
            ignored = "; ".join(restored.ignored)
            assert "missing from the checkpoint: model.layers.0.weight" in ignored
            assert "only in the checkpoint: model.blocks.0.weight" in ignored
            after = whole(new)
            assert torch.equal(new["kept"].weight, old["kept"].weight)
            assert all(after[name] == before[name] for name in before if "layers" in name)
            del new["kept"]
            with pytest.raises(TrainingError, match="no entry of the model is in the checkpoint under its name"):
                manager.restore(TrainState(new, torch.optim.AdamW(new.parameters())), strict=False)

    def test_a_new_parameter_has_taken_no_step(self, tmp_path):
        class Grown(torch.nn.Module):
            def __init__(self, *names):
                super().__init__()
                for name in names:
                    self.add_module(name, torch.nn.Linear(2, 2))

            def forward(self, value):
                for part in self.children():
                    value = part(value)
                return value

        def made(*names):
            model = Grown(*names)
            optimizer = torch.optim.AdamW(model.parameters())
            return model, optimizer, TrainState(model, optimizer)

        model, optimizer, state = made("a")
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, state)
            model, optimizer, state = made("a", "b")
            manager.restore(state, strict=False)
        assert set(optimizer.state) == {model.a.weight, model.a.bias}

    def test_a_checkpoint_of_plain_dcp(self, tmp_path):
        """As torch's own tutorial writes it: no marker, no list of what was never stepped."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer, _ = job()
        train(model, optimizer, 1)
        saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=tmp_path / "run" / "checkpoint-70", no_dist=True)
        other, its_optimizer, state = job(seed=1)
        with CheckpointManager(tmp_path / "run") as manager:
            assert manager.restore(state).step == 70
        assert whole(other) == whole(model)
        assert repr(its_optimizer.state_dict()) == repr(optimizer.state_dict())

    def test_the_directory_above_is_no_run_directory(self, tmp_path):
        run(tmp_path / "exp" / "checkpoints", 1)
        with CheckpointManager(tmp_path / "exp") as manager, pytest.raises(TrainingError, match="checkpoints: name"):
            manager.restore(job()[2])

    def test_a_run_directory_named_like_its_only_step(self, tmp_path):
        run(tmp_path / "4", 4)
        with CheckpointManager(tmp_path / "4") as manager, pytest.raises(TrainingError, match="name the run directory"):
            manager.restore(job()[2])
        run(tmp_path / "5", 4, 6)
        with CheckpointManager(tmp_path / "5") as manager:
            assert manager.restore(job()[2]).step == 6

    def test_warm_start(self, tmp_path, manager):
        weights = run(tmp_path / "other", 1, 2, progress=Box(n=1))
        model, optimizer, state = job(seed=1, progress=Box(n=5))
        assert manager.warm_start(state, tmp_path / "other") == str(tmp_path / "other" / "step_2")
        assert whole(model) == weights[2]
        assert (optimizer.state, state.shared["progress"].state) == ({}, {"n": 5})
        manager.warm_start(state, tmp_path / "other" / "step_1")
        assert whole(model) == weights[1]
        with pytest.raises(TrainingError, match="shape"):
            manager.warm_start(job(hidden=3)[2], tmp_path / "other")
        with pytest.raises(TrainingError, match="no such file"):
            manager.warm_start(state, tmp_path / "nothing")


def flip_all(step: Path) -> None:
    """Flip one bit in every record of a tensor of a checkpoint."""
    checkpoint = dcptool.open(step)
    for entry in checkpoint.tensors.values():
        for chunk in entry.chunks:
            record = checkpoint.payload(entry, chunk).record
            damage.flip_byte(step / chunk.item.file, chunk.item.byte_offset + record.byte_offset)


def re_search(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text) is not None


class TestSignals:
    def test_a_signal_is_noticed_and_handlers_are_given_back(self, tmp_path):
        got = []
        before = signal.signal(signal.SIGTERM, lambda *_: got.append(1))
        try:
            with CheckpointManager(tmp_path / "run") as manager:
                assert not manager.should_stop()
                os.kill(os.getpid(), signal.SIGTERM)
                assert manager.should_stop()
                assert got == [1]  # the one that was there is called too
            os.kill(os.getpid(), signal.SIGTERM)
            assert got == [1, 1]
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_in_another_thread_none_is_listened_to(self, tmp_path, caplog):
        thread = threading.Thread(target=lambda: CheckpointManager(tmp_path / "run").close())
        thread.start()
        thread.join()
        assert "no signal is listened to" in caplog.text


# ---- on several ranks ----


def save_all_kinds(rank, root):
    """Save the same training as DDP, FSDP2, and FSDP2 over tensor parallelism; returns the weights of each."""
    weights = {}
    for kind in ("ddp", "fsdp", "fsdp+tp"):
        model, optimizer, state = job(kind)
        with CheckpointManager(f"{root}/{kind}") as manager:
            manager.save(0, state)
            train(model, optimizer, 1)
            train(model, optimizer, 2)
            manager.async_save(2, state)
        weights[kind] = whole(model)
    return weights


def load_all_kinds(rank, root, kinds, count):
    """Load each into each; returns the weights, after two more steps too."""
    found = {}
    for saved in ("ddp", "fsdp", "fsdp+tp"):
        for kind in kinds:
            model, optimizer, state = job(kind, seed=1)
            with CheckpointManager(f"{root}/{saved}") as manager:
                assert manager.restore(state).step == 2
            before = whole(model)
            losses = [train(model, optimizer, step) for step in (3, 4)]
            found[saved, kind] = before, losses
    return found


def test_the_names_are_the_same_whatever_the_parallelism(tmp_path):
    weights = values(run_ranks(4, save_all_kinds, str(tmp_path)))[0]
    run(tmp_path / "plain", 2)
    keys = {kind: sorted(dcptool.open(tmp_path / kind / "step_2")) for kind in ("plain", "ddp", "fsdp", "fsdp+tp")}
    assert all(found == keys["plain"] for found in keys.values())
    assert {"model.up.weight", "optim.state.up.weight.exp_avg", "optim.param_groups.0.lr"} <= set(keys["plain"])
    assert sorted(dcptool.open(tmp_path / "fsdp" / "step_0")) == keys["plain"]  # before the first step too
    shapes = {kind: dcptool.open(tmp_path / kind / "step_2").tensors["model.up.weight"].shape for kind in weights}
    assert set(shapes.values()) == {(12, 8)}
    for count, kinds in ((0, ("plain",)), (2, ("ddp", "fsdp+tp"))):
        losses = []
        for (saved, _), (loaded, after) in values(run_ranks(count, load_all_kinds, str(tmp_path), kinds, count))[
            0
        ].items():
            assert loaded == weights[saved]
            losses.append(after)
        assert all(one == pytest.approx(losses[0], rel=1e-5) for one in losses)


def fail_on_one(rank, root, how, where):
    """Save twice; the second time rank 1 fails at some place. Returns what each rank was told, and what is left."""
    model, optimizer, state = job("fsdp")
    manager = CheckpointManager(root)
    train(model, optimizer, 1)
    getattr(manager, how)(1, state)
    manager.wait()
    restore = spoil(where) if rank == 1 else (lambda: None)
    told = ""
    try:
        getattr(manager, how)(2, state)
        manager.wait()
    except TrainingError as error:
        told = str(error)
    restore()
    manager.save(3, state)  # all ranks are still together
    manager.close()
    return told


def spoil(where):
    """Make a part of saving fail in this process; returns what undoes it."""
    import torch.distributed.checkpoint.default_planner as planners
    from torch.distributed.checkpoint.staging import DefaultStager

    from dcptool.training import TrainState

    owner, name = {
        "state": (TrainState, "tree"),
        "plan": (planners.DefaultSavePlanner, "create_local_plan"),
        "writer": (FileSystemWriter, "prepare_local_plan"),
        "write": (FileSystemWriter, "write_data"),
        "staging": (DefaultStager, "_stage"),
        "stager": (DefaultStager, "stage"),
    }[where]
    real = getattr(owner, name)

    def fail(*args, **kwargs):
        raise Refusal("no", where) if where in ("writer", "write") else RuntimeError(f"no {where}")

    setattr(owner, name, fail)
    return lambda: setattr(owner, name, real)


FAILURES = [
    ("save", "state"), ("save", "plan"), ("save", "write"), ("async_save", "staging"), ("async_save", "stager"),
    ("async_save", "writer"), ("async_save", "write"),
]  # fmt: skip


def fail_at_each(rank, root):
    """Returns what this rank was told when rank 1 failed at one place after the other, each in a run of its own."""
    return [fail_on_one(rank, f"{root}/{how}-{where}", how, where) for how, where in FAILURES]


def test_when_one_rank_fails_all_are_told_and_none_waits(tmp_path):
    told = values(run_ranks(3, fail_at_each, str(tmp_path), timeout=200))
    for (how, where), *reasons in zip(FAILURES, *told, strict=True):
        assert len(set(reasons)) == 1
        assert re_search(rf"step_2 was not saved: rank 1: \w+: no {where}", reasons[0])
        run_dir = tmp_path / f"{how}-{where}"
        steps = {verdict.name: verdict.state.value for verdict in dcptool.verify(run_dir).verdicts}
        assert (steps["step_1"], steps["step_3"]) == ("complete", "complete"), run_dir
        assert steps.get("step_2") != "complete", run_dir


def fail_to_load(rank, root):
    """Restore where rank 1 alone cannot read a file of the newest step."""
    model, _, state = job("fsdp")
    if rank == 1:
        read = Reader.read_data

        def refuse(self, plan, planner):
            if "step_2" in self.checkpoint_id:
                raise Refusal("no", "disk")
            return read(self, plan, planner)

        Reader.read_data = refuse
    with CheckpointManager(root) as manager:
        restored = manager.restore(state)
        return restored.step, restored.skipped, whole(model)


def test_when_one_rank_cannot_load_all_fall_back(tmp_path):
    weights = run(tmp_path / "run", 1, 2)
    outcomes = values(run_ranks(2, fail_to_load, str(tmp_path / "run"), timeout=60))
    for step, skipped, loaded in outcomes:
        assert step == 1
        assert re_search("rank 1: .*no disk$", skipped[0][1])
        assert loaded == weights[1]


def stop_one(rank, root):
    """Rank 1 gets a SIGTERM after step 2; all save that step and end."""
    model, optimizer, state = job("fsdp")
    with CheckpointManager(root) as manager:
        for step in range(1, 10):
            train(model, optimizer, step)
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_stop():
                manager.save(step, state)
                return step
    return None


def test_sigterm_on_one_rank_is_agreed_by_all(tmp_path):
    assert values(run_ranks(3, stop_one, str(tmp_path / "run"))) == [2, 2, 2]
    assert dcptool.find_latest(tmp_path / "run").verdict.step == 2


def save_apart(rank, root, what):
    """Ranks that do not save the same."""
    _, _, state = job("fsdp")
    manager = CheckpointManager(f"{root}_{rank}" if what == "directory" else root)
    try:
        manager.save(rank if what == "step" else 1, state)
    except TrainingError as error:
        return str(error)


def test_ranks_must_save_the_same(tmp_path):
    for what in ("step", "directory"):
        told = values(run_ranks(2, save_apart, str(tmp_path / "run"), what))
        assert told[0] == told[1]
        assert "all ranks must save one step" in told[0]
    assert not (tmp_path / "run").exists()


def die_in_save(rank, root, how):
    """Rank 1 is killed as it writes its file."""
    model, optimizer, state = job("fsdp")
    with CheckpointManager(root) as manager:
        train(model, optimizer, 1)
        manager.save(1, state)
        if rank == 1:
            FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        getattr(manager, how)(2, state)


@pytest.mark.parametrize("how", HOW)
def test_when_one_rank_dies_the_others_end(tmp_path, how):
    began = time.monotonic()
    outcomes = run_ranks(3, die_in_save, str(tmp_path / "run"), how, timeout=60)
    assert time.monotonic() - began < 45
    assert [outcome.code for outcome in outcomes] == [1, -signal.SIGKILL, 1]
    assert dcptool.find_latest(tmp_path / "run").verdict.step == 1


def different_extras(rank, root):
    progress = Box(rank=rank)
    _, _, state = job("ddp", progress=progress, same=Box(n=1))
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dcptool.training").addHandler(handler)
    with CheckpointManager(root) as manager:
        manager.save(1, state)
        manager.async_save(2, state)
        progress.state["rank"] = 7
        manager.restore(state)
    return messages, progress.state["rank"]


def test_extras_that_differ_between_ranks_are_told_once_and_kept_per_rank(tmp_path):
    """R17: of what has one name on all ranks DCP saves one."""
    (told, mine), (nothing, others) = values(run_ranks(2, different_extras, str(tmp_path / "run")))
    assert (mine, others, nothing) == (0, 1, [])
    assert told == ["not the same on all ranks, so each keeps its own, under rank_local.rank<r>: progress"]


def test_no_process_group_is_left(tmp_path):
    assert not dist.is_initialized()
    assert issubclass(TrainingError, DcptoolError)
