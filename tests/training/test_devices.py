"""A job that is interrupted and goes on, bit for bit: on the CPU, and on a GPU if there is one (`pytest -m cuda`)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from dcptool.training import CheckpointManager, TrainState  # noqa: E402

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
STEPS = 8


@pytest.fixture
def group(device, tmp_path):
    """A process group of one rank; on a GPU with NCCL for tensors there and gloo for those on the host."""
    backend = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(device, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64)).to(device)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(device, (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device=device), capturable=device == "cuda")
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    return model, optimizer, scheduler


def trained(device, model, optimizer, scheduler, step):
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


@DEVICES
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_an_interrupted_job_goes_on_bit_for_bit(tmp_path, device, group, sharded, how):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        parts = built(device, sharded)
        want = [trained(device, *parts, step) for step in range(STEPS)]
        parts = built(device, sharded)
        got = []
        with CheckpointManager(tmp_path / "run") as manager:
            for step in range(STEPS // 2):
                manager.wait_staged()  # BatchNorm changes its statistics in `forward`
                got.append(trained(device, *parts, step))
                getattr(manager, how)(step, TrainState(*parts))
        parts = built(device, sharded)
        with CheckpointManager(tmp_path / "run") as manager:
            first = manager.restore(TrainState(*parts)).step + 1
            got += [trained(device, *parts, step) for step in range(first, STEPS)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert got == want


@DEVICES
def test_what_is_saved_in_the_background_is_the_state_at_the_call(tmp_path, device, group):
    model, optimizer, scheduler = built(device, False)
    trained(device, model, optimizer, scheduler, 0)
    want = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.async_save(1, TrainState(model, optimizer, scheduler))
        for step in range(1, STEPS):
            manager.wait_staged()  # BatchNorm changes its statistics in `forward`
            trained(device, model, optimizer, scheduler, step)
        again = built(device, False)
        manager.restore(TrainState(*again))
    assert all(torch.equal(value.cpu(), want[name]) for name, value in again[0].state_dict().items())
    assert all(value.device.type == device for value in again[0].state_dict().values())
