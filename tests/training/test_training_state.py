"""`training.TrainState`: FQN names whatever the parallelism, and nothing changes by asking for a state."""

from __future__ import annotations

import copy
import random

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402

import dcptool  # noqa: E402
from dcptool.errors import UnsupportedError  # noqa: E402
from dcptool.training import RandomState, Reader, TrainState  # noqa: E402
from tests.training_jobs import Box  # noqa: E402

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, weight_decay=0.5),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1, weight_decay=0.5, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1, eps=0.0),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "AdamW, tensor lr": lambda parameters: torch.optim.AdamW(parameters, torch.tensor(0.1), foreach=False),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.1, momentum=0.9, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.3),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
}


def make(name="AdamW", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return model, OPTIMIZERS[name](model.parameters())


def step(model, optimizer, count=1):
    for index in range(count):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(index))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen(model, optimizer):
    """All bits of a model and its optimizer."""
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    grads = [parameter.grad for parameter in model.parameters()]
    return repr(torch.utils._pytree.tree_map(bits, (saved, grads)))


def bits(value):
    if not torch.is_tensor(value):
        return value
    return value.shape, value.dtype, bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_for_the_state_before_the_first_step_changes_nothing(name):
    """F13: get_state_dict steps such an optimizer."""
    model, optimizer = make(name)
    before = frozen(model, optimizer)
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    tree = TrainState(model, optimizer).state_dict()
    assert frozen(model, optimizer) == before
    assert not hooked
    started = name == "Adagrad"  # its state is made with it
    assert bool(optimizer.state) == started
    assert tree["optim_unstarted"] == ([] if started else sorted(tree["optim"]["state"]))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n_steps", [0, 3])
def test_what_is_saved_is_what_is_loaded(name, n_steps, tmp_path):
    """Bit for bit, and training goes on bit for bit, saved before the first step too."""
    model, optimizer = make(name)
    step(model, optimizer, n_steps)
    dcp.save({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    other, its_optimizer = make(name, seed=1)
    state = {"app": TrainState(other, its_optimizer)}
    dcp.load(state, storage_reader=Reader(tmp_path / "step_1"), no_dist=True)
    assert frozen(other, its_optimizer) == frozen(model, optimizer)
    step(model, optimizer, 2)
    step(other, its_optimizer, 2)
    assert frozen(other, its_optimizer) == frozen(model, optimizer)


def test_a_parameter_that_never_had_a_gradient(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model["used"](torch.ones(4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = frozen(model, optimizer)
    tree = TrainState(model, optimizer).state_dict()
    assert frozen(model, optimizer) == before
    assert tree["optim_unstarted"] == ["unused.bias", "unused.weight"]
    dcp.save(tree, checkpoint_id=tmp_path / "step_1", no_dist=True)
    other = copy.deepcopy(model)
    its_optimizer = torch.optim.AdamW(other.parameters(), 0.1)
    state = TrainState(other, its_optimizer)
    tree = state.state_dict()
    dcp.load(tree, checkpoint_id=tmp_path / "step_1", no_dist=True)
    state.load_state_dict(tree)
    assert frozen(other, its_optimizer) == before


def test_a_failed_load_leaves_the_optimizer_as_it_was():
    for n_steps in (0, 2):
        model, optimizer = make()
        step(model, optimizer, n_steps)
        state = TrainState(model, optimizer)
        before = frozen(model, optimizer)
        tree = state.tree(apart=True)
        for values in tree["optim"]["state"].values():
            for value in values.values():
                value.fill_(7)
        del tree["optim"]["state"]["0.weight"]
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            state.load_state_dict(tree)
        assert frozen(model, optimizer) == before


def test_an_optimizer_that_cannot_be_stepped_over_zeros_is_named():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError("no gradient")

    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"Odd has no state yet.*ZeroDivisionError: no gradient"):
        TrainState(model, Odd(model.parameters(), 0.1)).state_dict()


def test_a_scheduler_wraps_the_step_and_is_not_moved():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(scheduler.state_dict())
    TrainState(model, optimizer, scheduler).state_dict()
    assert scheduler.state_dict() == before
    assert not optimizer.state


def test_extras_come_back_as_they_were(tmp_path):
    """Also what DCP would flatten away: integer keys (R38), empty dicts, tuples."""
    odd = {"milestones": {3: 1, "3": 2}, "empty": {}, "pair": (1, [2, {}])}
    model, optimizer = make()
    state = TrainState(model, optimizer, Box(last=3), progress=Box(**odd), ema=Box(w=torch.arange(3.0), decay=0.5))
    tree = state.state_dict()
    odd["milestones"][3] = 9  # a copy was taken
    dcp.save(tree, checkpoint_id=tmp_path / "step_1", no_dist=True)
    checkpoint = dcptool.open(tmp_path / "step_1")
    assert checkpoint.value("progress")[0]["milestones"] == {3: 1, "3": 2}
    assert checkpoint.tensors["ema.w"].shape == (3,)
    other = TrainState(
        *make(), Box(), progress=Box(step=0), ema=Box(w=torch.zeros(3), decay=0.0), per_rank={"loader": Box(at=1)}
    )
    tree = other.state_dict()
    del tree["loader"]  # per-rank state is optional
    dcp.load(tree, checkpoint_id=tmp_path / "step_1", no_dist=True)
    other.load_state_dict(tree)
    assert other.shared["progress"].state == {"milestones": {3: 1, "3": 2}, "empty": {}, "pair": (1, [2, {}])}
    assert other.shared["scheduler"].state == {"last": 3}
    assert other.shared["ema"].state["w"].tolist() == [0, 1, 2]
    assert other.per_rank["loader"].state == {"at": 1}


def test_random_generators(tmp_path):
    import numpy

    state = TrainState(*make(), per_rank={"rng": RandomState()})
    dcp.save(state.state_dict(), checkpoint_id=tmp_path / "step_1", no_dist=True)
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    tree = state.state_dict()
    assert list(tree["rng"]) == ["rank0"]
    dcp.load(tree, checkpoint_id=tmp_path / "step_1", no_dist=True)
    state.load_state_dict(tree)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn


def test_wrong_arguments_are_told():
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"progress \(int\) has no state_dict"):
        TrainState(model, optimizer, progress=3)
    with pytest.raises(ValueError, match="'optim' is taken"):
        TrainState(model, optimizer, optim=Box())
    with pytest.raises(ValueError, match="'loader' is taken"):
        TrainState(model, optimizer, loader=Box(), per_rank={"loader": Box()})
