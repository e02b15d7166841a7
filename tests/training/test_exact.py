"""What was saved comes back, on every rank: exact, or refused at the save (case C)."""

from __future__ import annotations

import collections
import logging
import re

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import TrainingError  # noqa: E402
from dcptool.training import CheckpointManager, TrainState  # noqa: E402
from dcptool.training.tree import flatten, nested, pack, unpack  # noqa: E402
from tests.conftest import run as cli  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.training_jobs import Box, build, job, train  # noqa: E402

Pair = collections.namedtuple("Pair", "a b")
W = torch.arange(3.0)
STATES = [
    {"w": W, "n": 1},
    {"w": {2: W, "2": W + 1}},
    {"lr": [W], "milestones": collections.Counter({2: 1, 4: 2})},
    {"w": (W, {"y": W + 1, "z": None})},
    {"l": [{"a": 1}, {"b": W}], "m": [[1, 2], [3]]},
    {"w": Pair(W, 1)},
    {"a.b": W, "a": {"b": W + 1}},
    {"w": W, "empty": {}, "none": [], "deep": {"e": {}}},
    {"_structure": 1, "w": W},
    {"d": collections.defaultdict(list, {"a": [W]})},
    {"o": collections.OrderedDict(b=W, a=1)},
    {"t": [(W, 1), (W + 1, 2)]},
    {(1, "x"): W, None: 2},
    {"s": {3, 4}, "w": W, "b": b"xy", "big": 10**30, "c": 1 + 2j},
    {"n": {1: {2: {3: 4}}}},
]


def same(a, b) -> bool:
    """Tell whether two states are equal, types of containers included but for OrderedDict."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        kinds = {type(a), type(b)} - {dict, collections.OrderedDict}
        return (not kinds or type(a) is type(b)) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("state", STATES, ids=lambda state: repr(state)[:40])
class TestAnyState:
    def test_names_and_paths_are_those_of_torch(self, state):
        packed = pack({"x": state})
        found, paths = flatten(packed)
        theirs, their_paths = flatten_state_dict(packed)
        assert list(found) == list(theirs)
        assert paths == their_paths
        assert same(unpack(nested(found, paths)), {"x": state})

    def test_saved_restored_and_saved_again(self, tmp_path, state):
        box = Box(x=state) if not all(isinstance(key, str) for key in state) else Box(**state)
        want = box.state
        root = tmp_path / "run"
        for step in (1, 2, 3):
            fresh = Box()
            _, _, whole = job(box=box)
            with CheckpointManager(root) as manager:
                manager.save(step, whole)
                assert manager.restore(job(box=fresh)[2]).step == step
            assert same(fresh.state, want)
            box = fresh
        assert dcptool.verify(root, dcptool.VerifyOptions(dcptool.Level.DEEP)).good

    def test_of_a_module_and_of_an_optimizer(self, tmp_path, state):
        class Keeps(nn.Linear):
            kept = None

            def get_extra_state(self):
                return self.kept

            def set_extra_state(self, kept):
                self.kept = kept

        class Odd(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter]["odd"] = state

        def made():
            model = Keeps(2, 1)
            model.kept = {"of": 1}
            return model, Odd(model.parameters(), lr=0.1, momentum=0.9)

        model, optimizer = made()
        if any(isinstance(part, Pair) for part in state.values()):
            pytest.skip("torch's optimizers load no named tuples")
        model.kept = state
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        again, other = made()
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, TrainState(model, optimizer))
            manager.restore(TrainState(again, other))
            assert same(again.kept, state)
            want = optimizer_as_torch_loads_it(made, optimizer)
            for parameter, known in zip(again.parameters(), want, strict=True):
                assert same(other.state[parameter]["odd"], known["odd"])
            manager.save(2, TrainState(again, other))


def optimizer_as_torch_loads_it(made, optimizer):
    """What torch itself makes of an optimizer's state: containers of other types become dicts there."""
    _, fresh = made()
    fresh.load_state_dict(optimizer.state_dict())
    return [fresh.state[parameter] for parameter in fresh.param_groups[0]["params"]]


@pytest.mark.parametrize("kind", ["MultiStepLR", "CosineAnnealingLR", "SequentialLR", "ReduceLROnPlateau"])
def test_n15_a_tensor_learning_rate_with_any_scheduler(tmp_path, kind):
    from torch.optim import lr_scheduler as of

    make = {
        "MultiStepLR": lambda optimizer: of.MultiStepLR(optimizer, [2, 4, 40]),
        "CosineAnnealingLR": lambda optimizer: of.CosineAnnealingLR(optimizer, 100),
        "SequentialLR": lambda optimizer: of.SequentialLR(
            optimizer, [of.LinearLR(optimizer, total_iters=3), of.StepLR(optimizer, 2)], [3]
        ),
        "ReduceLROnPlateau": lambda optimizer: of.ReduceLROnPlateau(optimizer, patience=1),
    }[kind]

    def made():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
        return model, optimizer, make(optimizer)

    def steps(model, optimizer, scheduler, n):
        for _ in range(n):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([loss.detach()] if kind == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"]), model.weight.detach().clone()

    first = made()
    steps(*first, 3)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, TrainState(*first))
        want = steps(*first, 4)
        second = made()
        manager.restore(TrainState(*second))
        got = steps(*second, 4)
        manager.save(7, TrainState(*second))
        third = made()
        manager.restore(TrainState(*third))
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])
    assert same(third[2].state_dict(), second[2].state_dict())


class Lazy:
    """An average of weights that is made at its first update."""

    def __init__(self):
        self.shadow, self.best = {}, None

    def update(self, model):
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.best = torch.tensor(0.5)

    def state_dict(self):
        return {"shadow": self.shadow, "decay": 0.99, "best": self.best}

    def load_state_dict(self, state):
        self.shadow, self.best = state["shadow"], state["best"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("made", [True, False])
def test_n31_state_that_a_fresh_job_has_not_made_yet(tmp_path, strict, made):
    """And the other way round: what was not made when it was saved is not there afterwards."""
    model, optimizer, _ = job()
    train(model, optimizer, 1)
    saved, fresh = Lazy(), Lazy()
    (saved if made else fresh).update(model)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, TrainState(model, optimizer, ema=saved))
        restored = manager.restore(TrainState(model, optimizer, ema=fresh), strict=strict)
    assert restored.ignored == ()
    assert same(fresh.state_dict(), saved.state_dict())


def lazy_on_fsdp(rank, root):
    from torch.distributed.tensor import DTensor

    def made():
        model, optimizer, _ = job("fsdp")
        return model, optimizer, Lazy()

    model, optimizer, ema = made()
    train(model, optimizer, 1)
    ema.update(model)
    with CheckpointManager(root) as manager:
        manager.save(1, TrainState(model, optimizer, ema=ema))
        model, optimizer, fresh = made()
        manager.restore(TrainState(model, optimizer, ema=fresh))
    return [
        isinstance(value, DTensor) and torch.equal(value.to_local(), ema.shadow[name].to_local())
        for name, value in fresh.shadow.items()
    ]


def test_n31_a_sharded_average_comes_back_sharded(tmp_path):
    for found in values(run_ranks(2, lazy_on_fsdp, str(tmp_path / "run"))):
        assert found == [True] * 4


class Stepped(torch.optim.SGD):
    """Keeps more from its second step on."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            state["n"] = state.get("n", 0) + 1
            if state["n"] > 1:
                state["slow"] = parameter.detach().clone()


def test_what_an_optimizer_keeps_only_later(tmp_path):
    def made():
        model = nn.Linear(4, 1)
        return model, Stepped(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    for step in range(2):
        train(_Wide(model), optimizer, step)
    other, fresh = made()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, TrainState(model, optimizer))
        manager.restore(TrainState(other, fresh))
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert same(dict(fresh.state[mine]), dict(optimizer.state[theirs]))
    sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with (
        CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(TrainingError, match=r"only in the checkpoint: optim\.state\.weight\.n"),
    ):
        manager.restore(TrainState(other, sgd))


class _Wide(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return self.inner(inputs[:, :4])


class LocalMomentum(torch.optim.Optimizer):
    """Keeps plain tensors of this rank's part, as quantised and fused optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            mine, grad = _local(parameter), _local(parameter.grad)
            state = self.state[parameter]
            if not state:
                state["m"], state["scale"] = torch.zeros_like(mine), torch.zeros(())
            state["m"].mul_(0.9).add_(grad)
            state["scale"].fill_(state["m"].abs().max())
            mine.sub_(self.param_groups[0]["lr"] * state["m"])


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Experts(nn.Module):
    """A sharded layer, statistics that differ between ranks, and an expert of each rank's own."""

    def __init__(self, rank):
        super().__init__()
        self.a, self.bn, self.expert = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.expert.weight.fill_(rank + 1.0)

    def forward(self, inputs):
        return self.expert(self.bn(self.a(inputs)))


def experts(rank):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Experts(rank)
    fully_shard(model.a)
    return model, LocalMomentum(model.parameters())


def steps_of_own(model, optimizer, rank, n=3):
    torch.manual_seed(100 + rank)
    for _ in range(n):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def rank_local(rank, root, how):
    model, optimizer = experts(rank)
    again, other = experts(rank)
    same_here = []
    with CheckpointManager(root) as manager:
        for step in (1, 2):  # the second time it is known which differ, and a sample of each value is looked at
            steps_of_own(model, optimizer, rank)
            saved = getattr(manager, how)(step, TrainState(model, optimizer))
            del saved
            manager.wait()
            manager.restore(TrainState(again, other))
            for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
                same_here.append(torch.equal(_local(mine), _local(theirs)))
                same_here += [
                    torch.equal(other.state[mine][name], optimizer.state[theirs][name]) for name in ("m", "scale")
                ]
            same_here += [
                torch.equal(mine, theirs) for mine, theirs in zip(again.buffers(), model.buffers(), strict=True)
            ]
    return all(same_here), float(model.bn.running_mean.sum())


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_n13_every_rank_gets_its_own_values_back(tmp_path, how):
    (first, mean), (second, other) = values(run_ranks(2, rank_local, str(tmp_path / "run"), how))
    assert first
    assert second
    assert mean != other
    found = dcptool.open(tmp_path / "run/step_2")
    assert "rank_local.rank1.model.bn.running_mean" in found
    assert "rank_local.rank1.model.a.weight" not in found  # a DTensor
    assert "rank_local.rank1.model.bn.num_batches_tracked" not in found  # the same on all
    dcp_to_torch_save(tmp_path / "run/step_2", tmp_path / "m.pt")
    nested_state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert set(nested_state["model"]) == set(nested_state["rank_local"]["rank1"]["model"]) | {
        "a.weight", "a.bias", "bn.num_batches_tracked",
    }  # fmt: skip
    assert dcptool.verify(tmp_path / "run", dcptool.VerifyOptions(dcptool.Level.DEEP)).good


def batch_norm(rank, root, step):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dcptool.training").addHandler(handler)
    with CheckpointManager(root) as manager:
        restored = manager.restore(TrainState(model, optimizer))
        mean = model.module[1].running_mean.clone()
        if restored is None:
            steps_of_own(model, optimizer, rank)
            mean = model.module[1].running_mean.clone()
            manager.save(step, TrainState(model, optimizer))
    return mean, messages, restored and restored.per_rank


@pytest.mark.parametrize(("n_ranks", "words"), [
    (3, "1 and 1 more): rank 2 have none of their own and got those of the lowest rank"),
    (1, "1 and 1 more): those of rank 1 were not used"),
])  # fmt: skip
def test_n13_at_another_number_of_ranks_it_is_said_what_has_no_owner(tmp_path, n_ranks, words):
    root = str(tmp_path / "run")
    saved = [mean for mean, _, _ in values(run_ranks(2, batch_norm, root, 1))]
    assert not torch.equal(*saved)
    found = values(run_ranks(n_ranks, batch_norm, root, 2))
    for rank, (mean, _, per_rank) in enumerate(found):
        assert torch.equal(mean, saved[rank] if rank < 2 else saved[0])
        kept = next(one for one in per_rank if one.name == "model.1.running_mean")
        assert (kept.saved, kept.restored) == ((0, 1), tuple(range(min(n_ranks, 2))))
        assert (kept.missing, kept.unused) == (tuple(range(2, n_ranks)), tuple(range(n_ranks, 2)))
    told = [message for message in found[0][1] if "differed between ranks" in message]
    assert len(told) == 1
    assert "2 values that differed between ranks (model.1.running_mean, model.1.running_var): " in told[0]
    assert told[0].endswith(words.partition("): ")[2])


def not_stepped(rank, root, bad):
    from torch.distributed.fsdp import fully_shard

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made()
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        if rank == bad:
            model[1].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    again, other = made()
    with CheckpointManager(root) as manager:
        manager.save(3, TrainState(model, optimizer))
        manager.restore(TrainState(again, other))
    states = [
        (optimizer.state.get(a), other.state.get(b))
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    ]
    return [
        (a is None) == (b is None) and (a is None or all(torch.equal(_local(a[k]), _local(b[k])) for k in a))
        for a, b in states
    ]


@pytest.mark.parametrize("bad", [0, 1])
def test_n14_a_parameter_that_one_rank_never_stepped(tmp_path, bad):
    for found in values(run_ranks(2, not_stepped, str(tmp_path / "run"), bad)):
        assert found == [True] * 4


def pipeline(rank, root, n_layers, step):
    """Each rank has other layers, of the same model of four."""
    torch.manual_seed(rank)
    mine = range(rank * n_layers, (rank + 1) * n_layers)
    model = nn.ModuleDict({f"layer{number}": nn.Linear(4, 4) for number in mine})
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    weights = [parameter for name, parameter in model.named_parameters() if "bias" not in name]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
    with CheckpointManager(root) as manager:
        restored = manager.restore(TrainState(model, optimizer))
        if restored is None:
            for _ in range(2):
                sum(layer(torch.ones(1, 4)).sum() for layer in model.values()).backward()
                optimizer.step()
            manager.save(step, TrainState(model, optimizer))
            manager.save(step + 1, TrainState(model, optimizer))
    moments = {name: optimizer.state[parameter]["exp_avg"].clone() for name, parameter in model.named_parameters()}
    return {name: value.clone() for name, value in model.state_dict().items()}, moments


def test_n30_pipeline_stages_come_back_in_as_many_or_fewer(tmp_path):
    root = str(tmp_path / "run")
    parts = values(run_ranks(2, pipeline, root, 2, 1))
    for n_ranks, n_layers in ((2, 2), (1, 4), (4, 1)):
        found = values(run_ranks(n_ranks, pipeline, root, n_layers, 0))
        for index in (0, 1):
            saved = {name: value for part in parts for name, value in part[index].items()}
            back = {name: value for part in found for name, value in part[index].items()}
            assert same(back, saved)
    assert not [name for name in dcptool.open(tmp_path / "run/step_2") if name.startswith("rank_local")]


def test_n30_a_layer_that_nobody_has_is_unexpected(tmp_path):
    root = str(tmp_path / "run")
    values(run_ranks(2, pipeline, root, 2, 1))
    with pytest.raises(AssertionError, match=r"(?s)only in the checkpoint: .*model\.layer2\.weight"):
        values(run_ranks(2, pipeline, root, 1, 0))


class TestOthersSteps:
    """N42: a job moves to CheckpointManager in a run directory that another trainer wrote."""

    @pytest.fixture
    def run(self, tmp_path):
        model, _, _ = job()
        for step in range(100, 600, 100):
            dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / f"run/step-{step}", no_dist=True)
        return tmp_path / "run"

    def test_n42_they_stay(self, run, caplog):
        _, _, state = job()
        with CheckpointManager(run, keep=2) as manager:
            for step in range(600, 1000, 100):
                manager.save(step, state)
        kept = sorted(path.name for path in run.iterdir() if path.is_dir())
        assert kept == ["step-100", "step-200", "step-300", "step-400", "step-500", "step_800", "step_900"]
        told = [record.getMessage() for record in caplog.records if "no manager saved" in record.getMessage()]
        assert len(told) == 1
        assert "adopt=True deletes such steps like others" in told[0]

    def test_n42_they_are_adopted(self, run, caplog):
        _, _, state = job()
        with CheckpointManager(run, keep=2, adopt=True) as manager:
            manager.save(600, state)
        assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["step-500", "step_600"]
        assert any("are deleted like others" in record.getMessage() for record in caplog.records)


class TestAnyStateDict:
    """`{"app": AppState()}`, as the recipe of torch has it."""

    class App:
        def __init__(self):
            from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

            self.model, self.optimizer, _ = job()
            self._get, self._set = get_state_dict, set_state_dict

        def state_dict(self):
            model, optim = self._get(self.model, self.optimizer)
            return {"model": model, "optim": optim}

        def load_state_dict(self, state):
            self._set(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    @pytest.mark.parametrize("how", ["save", "async_save"])
    def test_there_and_back(self, tmp_path, how):
        app, again = self.App(), self.App()
        train(app.model, app.optimizer, 1)
        more = {"epoch": 3, "ids": {7: "x"}, "w": torch.ones(2)}
        back = {"epoch": 0, "ids": {}, "w": torch.zeros(2)}
        with CheckpointManager(tmp_path / "run") as manager:
            getattr(manager, how)(1, {"app": app, "more": more, "n": 1})
            given = {"app": again, "more": back, "n": 0}
            manager.restore(given)
        assert same(again.state_dict(), app.state_dict())
        assert same(back, more)
        assert given["n"] == 1

    def test_both_ways_with_plain_torch(self, tmp_path):
        app, plain, ours = self.App(), self.App(), self.App()
        train(app.model, app.optimizer, 1)
        with CheckpointManager(tmp_path / "run") as manager:
            path = manager.save(1, {"app": app})
        dcp.load({"app": plain}, checkpoint_id=path, no_dist=True)
        assert same(plain.state_dict(), app.state_dict())
        dcp.save({"app": app}, checkpoint_id=tmp_path / "plain/step_7", no_dist=True)
        with CheckpointManager(tmp_path / "plain") as manager:
            assert manager.restore({"app": ours}).step == 7
        assert same(ours.state_dict(), app.state_dict())

    def test_restored_by_a_train_state_the_way_out_is_told(self, tmp_path):
        app = self.App()
        train(app.model, app.optimizer, 1)
        dcp.save({"app": app}, checkpoint_id=tmp_path / "run/step_7", no_dist=True)
        _, _, state = job()
        with CheckpointManager(tmp_path / "run") as manager, pytest.raises(TrainingError) as raised:
            manager.restore(state)
        said = str(raised.value)
        assert re.search(r"names differ by 'app\.' there", said)
        assert "Nothing was loaded. dcptool convert --to dcp --strip-prefix app. " in said
        source = tmp_path / "run/step_7"
        assert cli("convert", "--to", "dcp", "--strip-prefix", "app.", source, tmp_path / "new/step_7").returncode == 0
        model, _optimizer, state = job(seed=1)
        with CheckpointManager(tmp_path / "new") as manager:
            manager.restore(state)
        assert same(dict(model.state_dict()), dict(app.model.state_dict()))


def test_frozen_layers_are_named_as_such(tmp_path):
    model, optimizer, state = job()
    train(model, optimizer, 1)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state)
    model, _, _ = job()
    model.up.requires_grad_(False)
    state = TrainState(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(TrainingError) as raised:
            manager.restore(state)
        assert "the optimizer's state of 2 parameters frozen here: up.weight, up.bias" in str(raised.value)
        assert "restore(…, strict=False) leaves these as they are" in str(raised.value)
        assert manager.restore(state, strict=False).step == 1


class Own:
    """A class of the job's own."""

    def __init__(self, value):
        self.value = value


class TestObjects:
    def saved(self, tmp_path, value):
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, job(box=Box(value=value))[2])
        return tmp_path / "run"

    def test_plain_values_name_nothing(self, tmp_path, caplog, monkeypatch):
        import datetime
        import pathlib

        import numpy as np

        value = [
            np.arange(3),
            np.float64(2),
            datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
            pathlib.Path("a"),
            {1, 2},
            W,
        ]
        run = self.saved(tmp_path, value)
        box = Box()
        real, seen = torch.load, []
        monkeypatch.setattr(torch, "load", lambda *a, **k: (seen.append(k["weights_only"]), real(*a, **k))[1])
        with CheckpointManager(run) as manager:
            manager.restore(job(box=box)[2])
        assert seen
        assert all(seen)
        assert same(box.state["value"][2:], value[2:])
        assert (box.state["value"][0] == value[0]).all()

    def test_others_are_unpickled_and_named_once(self, tmp_path, caplog):
        caplog.set_level(logging.INFO, "dcptool.training")
        run = self.saved(tmp_path, Own(3))
        caplog.clear()
        box = Box()
        with CheckpointManager(run) as manager:
            manager.restore(job(box=box)[2])
            manager.restore(job(box=box)[2])
        assert box.state["value"].value == 3
        told = [record.getMessage() for record in caplog.records if "unpickled by torch" in record.getMessage()]
        assert told == [f"'box' is unpickled by torch: it names {Own.__module__}.Own"]

    def test_safe_globals_allow_exactly_what_they_name(self, tmp_path):
        run = self.saved(tmp_path, Own(3))
        box = Box()
        with CheckpointManager(run, safe_globals=[Own]) as manager:
            manager.restore(job(box=box)[2])
        assert box.state["value"].value == 3
        with CheckpointManager(run, safe_globals=[]) as manager:
            with pytest.raises(TrainingError, match=r"'box' names .*Own.*safe_globals"):
                manager.restore(job(box=box)[2])
            with pytest.raises(TrainingError, match=r"not marked, for it could not be restored: .*safe_globals"):
                manager.save(2, job(box=Box(value=Own(1)))[2])

    def test_what_runs_code_is_never_loaded(self, tmp_path):
        class Touch:
            def __reduce__(self):
                import os

                return os.mkdir, (str(tmp_path / "executed"),)

        _model, _optimizer, state = job(box=Box(value=1))
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, state)
        tree = state.state_dict()
        tree["box"] = ({"value": [Touch(), "x" * 70_000]},)  # too large to be looked into at the default level
        dcp.save(tree, checkpoint_id=tmp_path / "run/step_2", no_dist=True)
        dcptool.mark_complete(tmp_path / "run/step_1", saved=True)
        (tmp_path / "run/step_1/_COMPLETE").unlink()
        with CheckpointManager(tmp_path / "run") as manager:
            restored = manager.restore(state)
        assert restored.step == 1
        assert "runs code when it is loaded" in restored.skipped[0][1]
        assert not (tmp_path / "executed").exists()


def test_what_cannot_be_restored_is_refused_at_the_save(tmp_path):
    """An object that is pickled, and cannot be unpickled."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, job(box=Box(value=1))[2])
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(
            TrainingError, match=r"step_2 was not marked, for it could not be restored: .*'box' cannot be"
        ):
            manager.save(2, job(box=Box(value=OneWay()))[2])
        assert manager.restore(job(box=Box())[2]).step == 1
        manager.save(3, job(box=Box(value=2))[2])
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["step_1", "step_3"]


class OneWay:
    """Can be pickled, not unpickled."""

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        raise ValueError("no way back")


def begins_to_differ(rank, root):
    large = torch.zeros(100_000)
    box = Box(large=large, small=torch.zeros(3), n=0, keys={1: 2})
    _, _, state = job("ddp", box=box)
    back = []
    with CheckpointManager(root) as manager:
        for step in range(4):
            if step == 1:
                large += rank
            elif step == 2:
                box.state["n"] = rank
            elif step == 3:
                box.state["small"][1] = rank
            want = {**box.state, "large": large.clone(), "small": box.state["small"].clone()}
            manager.save(step, state)
            box.state = {"large": torch.zeros(100_000), "small": torch.zeros(3), "n": 9, "keys": {}}
            manager.restore(state)
            back.append(same(box.state, want))
            large = box.state["large"]
    return back


def test_n13_a_value_that_begins_to_differ_later(tmp_path):
    for back in values(run_ranks(2, begins_to_differ, str(tmp_path / "run"))):
        assert back == [True] * 4
    kept = [
        sorted(
            name.removeprefix("rank_local.rank1.box.") for name in dcptool.open(step) if name.startswith("rank_local")
        )
        for step in sorted((tmp_path / "run").glob("step_*"))
    ]
    assert kept == [["large"], ["large", "n"], ["large", "n", "small"]]  # of the newest three


class Eight(torch.optim.Optimizer):
    """Keeps for each parameter state of other dtypes than its own."""

    def __init__(self, params, dtypes):
        super().__init__(params, {"lr": 1e-2})
        self.dtypes = dtypes

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for dtype in self.dtypes:
                name = str(dtype)
                if name not in state:
                    state[name] = torch.zeros_like(parameter, dtype=dtype)
                    state[f"local {name}"] = torch.zeros(_local(parameter).shape, dtype=dtype)
                state[name] += (parameter.grad.float().abs() * 100 + 1.00097).to(dtype)
                state[f"local {name}"] += (_local(parameter.grad).float().abs() * 100 + 1.00097).to(dtype)


def other_dtypes(rank, root, kind, of_parameters):
    def made():
        model = build(kind)
        model.to(of_parameters)
        return model, Eight(
            model.parameters(), [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int32]
        )

    def stepped(model, optimizer):
        model(torch.ones(2, 8, dtype=of_parameters)).sum().backward()
        optimizer.step()

    model, optimizer = made()
    again, other = made()
    stepped(model, optimizer)
    with CheckpointManager(root) as manager:
        manager.save(1, TrainState(model, optimizer))
        manager.restore(TrainState(again, other))
        manager.save(2, TrainState(again, other))
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return all(
        torch.equal(_local(value), _local(other.state[mine][name])) and value.dtype == other.state[mine][name].dtype
        for theirs, mine in pairs
        for name, value in optimizer.state[theirs].items()
    )


@pytest.mark.parametrize("of_parameters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_an_optimizer_keeps_its_own_dtypes(tmp_path, kind, of_parameters):
    """Torch casts them to the parameter's: bits are lost, codes become numbers, and the next save is refused."""
    n_ranks = 1 if kind == "plain" else 2
    found = values(run_ranks(n_ranks, other_dtypes, str(tmp_path / "run"), kind, of_parameters))
    assert found == [True] * n_ranks
    real = torch.optim.Optimizer._process_value_according_to_param_policy
    assert real.__module__ == "torch.optim.optimizer"
