"""torch's writers, planners and stagers under `CheckpointManager`: with every option the same comes back."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError, UnsupportedError  # noqa: E402
from dcptool.training import CheckpointManager, writing  # noqa: E402
from dcptool.training.rank_local import Flat  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import Box, job, train, whole  # noqa: E402

staging = pytest.importorskip("torch.distributed.checkpoint.staging")
if not hasattr(staging, "StagingOptions"):
    pytest.skip("this torch has no choice of staging", allow_module_level=True)
pytest.importorskip("zstandard")
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


def zstd():
    from torch.distributed.checkpoint._extension import ZStandard

    return ZStandard()


class KeptPlanner(DefaultSavePlanner):
    """A planner of a job's own, with the signature that planners had once."""

    def set_up_planner(self, state_dict, is_coordinator=False):
        super().set_up_planner(state_dict, is_coordinator=is_coordinator)


class OneDirWriter(FileSystemWriter):
    """A writer of a job's own that takes nothing but its path, with the signature that writers had once."""

    def __init__(self, path):
        super().__init__(path)

    def set_up_storage_writer(self, is_coordinator):
        super().set_up_storage_writer(is_coordinator)


class LateStager(staging.BlockingAsyncStager):
    """Returns at once what is filled when it is asked to synchronize."""

    _synchronize_after_execute = True

    def stage(self, state_dict):
        self.given, self.made = state_dict, dict.fromkeys(state_dict)
        return self.made

    def synchronize_staging(self):
        self.made.update(super().stage(self.given))


OPTIONS = {
    "default": {},
    "two threads": {"writer": {"thread_count": 2}},
    "four threads": {"writer": {"thread_count": 4}},
    "a file per item": {"writer": {"single_file_per_rank": False}},
    "a file per item, by threads": {"writer": {"single_file_per_rank": False, "thread_count": 3}},
    "not synced": {"writer": {"sync_files": False}},
    "copied ahead": {"writer": {"per_thread_copy_ahead": 0}},
    "only new": {"writer": {"overwrite": False}},
    "staged memory kept": {"writer": {"cache_staged_state_dict": True}},
    "zstd": {"writer": {"_extensions": [zstd()]}},
    "zstd by threads": {"writer": {"_extensions": [zstd()], "thread_count": 2}},
    "torch's writer": {"writer": FileSystemWriter},
    "a writer of its own": {"writer": OneDirWriter},
    "made by a function": {"writer": lambda path: FileSystemWriter(Path(path), thread_count=2)},
    "plans kept": {"planner": {"enable_plan_caching": True}},
    "plans kept, lowest rank": {"planner": {"enable_plan_caching": True, "dedup_save_to_lowest_rank": True}},
    "lowest rank": {"planner": {"dedup_save_to_lowest_rank": True}},
    "not flat": {"planner": {"flatten_state_dict": False}},
    "torch's planner": {"planner": DefaultSavePlanner},
    "a planner of its own": {"planner": KeptPlanner},
    "shared memory": {"stager": {"use_shared_memory": True}},
    "copied before": {"stager": {"use_async_staging": False}},
    "torch's stager": {
        "stager": lambda: staging.DefaultStager(staging.StagingOptions(False, False, False, False)),
    },
    "an old stager": {"stager": staging.BlockingAsyncStager},
    "a stager that synchronizes": {"stager": LateStager},
}


def save_with_each(rank: int, folder: str, how: str, names: list[str]) -> None:
    """Save steps 1 to 3 of the same job with each of some options."""
    for name in names:
        model, optimizer, state = job("fsdp", per_rank={"loader": Box(place=rank)}, best=Box(value=torch.arange(5.0)))
        with CheckpointManager(Path(folder, name), keep=None, **OPTIONS[name]) as manager:
            for step in (1, 2, 3):
                train(model, optimizer, step)
                getattr(manager, how)(step, state)


@pytest.fixture(scope="module", params=["save", "async_save"])
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    values(run_ranks(2, save_with_each, str(folder), request.param, list(OPTIONS)))
    return folder


def loaded(path: Path) -> dict:
    """What torch's own loader gives, by name."""
    state: dict = {}
    _load_state_dict(state, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert state
    return dict(flat("", state))


def flat(name, value):
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(f"{name}.{key}", part)
    else:
        yield name, value


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) and value.dtype == other[name].dtype
        if torch.is_tensor(value)
        else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option_the_same_comes_back(runs, name):
    for step in ("step_1", "step_2", "step_3"):
        verdict = dcptool.verify(runs / name / step, DEEP).verdicts[0]
        assert (verdict.state.value, verdict.findings) == ("complete", ()), step
        assert same(loaded(runs / name / step), loaded(runs / "default" / step)), step
    model, _, state = job(seed=1, per_rank={"loader": Box(place=None)}, best=Box(value=torch.zeros(5)))
    reference, _, other = job(seed=2, per_rank={"loader": Box(place=None)}, best=Box(value=torch.zeros(5)))
    with CheckpointManager(runs / name) as manager, CheckpointManager(runs / "default") as default:
        assert (manager.restore(state).step, default.restore(other).step) == (3, 3)
    assert whole(model) == whole(reference)
    assert same(dict(flat("", state.state_dict())), dict(flat("", other.state_dict())))


def test_options_do_what_they_say(runs):
    def files(name):
        return sorted(path.name for path in (runs / name / "step_2").glob("*.distcp"))

    assert files("default") == ["__0_0.distcp", "__1_0.distcp"]
    assert files("two threads") == ["__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp"]
    assert len(files("a file per item")) > 10
    tensors = {(runs / name / "step_2" / "__0_0.distcp").stat().st_size for name in ("default", "zstd")}
    assert len(tensors) == 2
    assert len({(runs / name / "step_2" / "__1_0.distcp").stat().st_size for name in ("default", "lowest rank")}) == 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"writer": {"threads": 2}}, TypeError, "FileSystemWriter has no option 'threads': it has .*thread_count"),
        ({"writer": {"path": "x"}}, TypeError, "has no option 'path'"),
        ({"planner": {"cache": True}}, TypeError, "DefaultSavePlanner has no option 'cache'"),
        ({"stager": {"pinned": True}}, TypeError, "StagingOptions has no option 'pinned'"),
        ({"writer": FileSystemWriter("x")}, TypeError, r"a new one for each save: lambda path: FileSystemWriter\("),
        ({"planner": DefaultSavePlanner()}, TypeError, r"a new one for each save: lambda: DefaultSavePlanner\("),
        ({"stager": 3}, TypeError, "stager= takes a dict"),
        ({"async_checkpointer_type": "fork"}, ValueError, "'thread' or 'process', not 'fork'"),
        ({"async_checkpointer_type": "process"}, UnsupportedError, "needs a process group"),
        ({"process_group": object()}, ValueError, "init_process_group first"),
        ({"stop_within": 0}, ValueError, "stop_within must be more than 0"),
    ],
)
def test_what_cannot_be_chosen_is_refused_at_once(tmp_path, options, error, words):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error, match=words):
        CheckpointManager(tmp_path / "run", **options)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["use_pinned_memory", "use_non_blocking_copy"])
def test_what_needs_an_accelerator_is_refused_without_one(tmp_path, option):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=f"'{option}': True.* needs an accelerator, and this machine has none"):
        CheckpointManager(tmp_path / "run", stager={option: True})


@pytest.mark.parametrize("how", ["options", "a function"])
def test_what_torch_could_not_load_is_not_saved(tmp_path, how):
    """torch writes it, and its own reader refuses it: shown here, so that the refusal can go when that changes."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    pytest.importorskip("safetensors")
    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    with pytest.raises(UnsupportedError, match=r"SAFETENSORS.*\n.*dcptool convert --to safetensors"):
        CheckpointManager(tmp_path / "run", writer=options)
    with (
        CheckpointManager(tmp_path / "run", writer=lambda path: FileSystemWriter(path, **options)) as manager,
        pytest.raises(TrainingError, match="SAFETENSORS"),
    ):
        manager.save(1, job()[2])
    state = job()[2].state_dict()
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "torch", **options), no_dist=True)
    with pytest.raises(dcp.CheckpointException):
        loaded(tmp_path / "torch")


def test_a_thread_that_fails_fails_the_save(tmp_path, monkeypatch):
    """torch lets go what one of several threads raises, and says that all is saved."""
    create, left = FileSystem.create_stream, [1]

    def fail(self, path, mode):
        if mode == "xb" and threading.current_thread() is not threading.main_thread() and left:
            left.clear()
            raise OSError(28, "No space left on device")
        return create(self, path, mode)

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(FileSystem, "create_stream", fail)
    for options in ({"thread_count": 2}, {"thread_count": 3, "single_file_per_rank": False}):
        left[:] = [1]
        state = job()[2]
        with CheckpointManager(tmp_path / "run", writer=options) as manager:
            for _ in range(20):  # until one of the threads is the one that takes an item
                try:
                    manager.save(1, state)
                except TrainingError as error:
                    assert "no space left on device" in str(error)
                    break
            assert not left
            manager.save(2, state)
        assert loaded(tmp_path / "run" / "step_2")


def test_a_kept_plan_does_not_outlive_the_state_it_was_of(tmp_path):
    """torch compares names and sizes only: another dtype, another kind of key would be saved under the old plan."""

    states = [
        {"t": torch.ones(3), "nested": {"0": torch.ones(2)}},
        {"t": torch.ones(3, dtype=torch.float64), "nested": {"0": torch.ones(2)}},
        {"t": torch.ones(3, dtype=torch.float64), "nested": {"0": torch.ones(2)}, "more": torch.ones(1)},
        {"t": torch.ones(3, dtype=torch.bfloat16), "nested": [torch.ones(2)]},
    ]
    managers = {
        "kept": CheckpointManager(tmp_path / "kept", None, planner={"enable_plan_caching": True}),
        "anew": CheckpointManager(tmp_path / "anew", None),
    }
    for step, value in enumerate(states):
        for manager in managers.values():
            manager.save(step, job(changing=Box(**value))[2])
        assert same(loaded(tmp_path / "kept" / f"step_{step}"), loaded(tmp_path / "anew" / f"step_{step}")), step
    for manager in managers.values():
        manager.close()


@pytest.mark.parametrize(
    ("mib", "cores", "device", "wanted"),
    [(64, 2, "cpu", 2), (64, 8, "cpu", 2), (64, 1, "cpu", 1), (1, 2, "cpu", 1), (64, 2, "meta", 1)],
)
def test_two_threads_write_what_training_waits_for(mib, cores, device, wanted, monkeypatch):
    monkeypatch.setattr(writing, "cores_per_rank", lambda: cores)
    state = {"w": torch.empty(mib << 20, dtype=torch.uint8, device=device), "step": 1}
    assert writing.threads_while_waiting(Flat(state, {})) == wanted


def test_a_large_state_is_written_by_two_threads_and_loads_with_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "cores_per_rank", lambda: 2)
    state = {f"w{i}": torch.randint(256, (9 << 20,), dtype=torch.uint8) for i in range(8)}
    with CheckpointManager(tmp_path / "run") as manager:
        path = Path(manager.save(1, state))
    assert sorted(file.name for file in path.glob("*.distcp")) == ["__0_0.distcp", "__0_1.distcp"]
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, checkpoint_id=path)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert dcptool.verify(path, DEEP).good
