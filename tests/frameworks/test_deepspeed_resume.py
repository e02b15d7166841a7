"""From DeepSpeed to FSDP2: a step of ZeRO-3 on four ranks, converted, goes on on two with DeepSpeed's own losses."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dcptool.ops.convert.convert import convert
from tests.conftest import DEEPSPEED
from tests.forks import run_ranks, values

pytest.importorskip("torch")
PYTHON = os.environ.get("DCPTOOL_DEEPSPEED", "")
JOB = Path(__file__).parent / "jobs" / "deepspeed_job.py"
STEP = "global_step3"


def resumed_losses(rank: int, path: str) -> list[float]:
    """Load a DCP checkpoint into FSDP2 by torch alone, and train three steps."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    from tests.frameworks.jobs.deepspeed_job import Model, groups_of, loss_of

    torch.manual_seed(77)
    model = Model()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    weights, state = get_state_dict(model, optimizer)
    loaded = {**weights, "optim": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict={name: loaded[name] for name in weights}, optim_state_dict=loaded["optim"]
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    losses = []
    for step in (3, 4, 5):
        loss = loss_of(model, step, rank, dist.get_world_size())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def go_on(step: Path, target: Path) -> list[float]:
    convert(str(step), str(target), "dcp")
    return values(run_ranks(2, resumed_losses, str(target)))[0]


@pytest.mark.parametrize("name", ["zero3_w4", "zero1_w2", "zero3_sub_groups_w2"])
def test_fsdp2_goes_on_with_deepspeeds_losses(name, tmp_path):
    told = json.loads((DEEPSPEED / f"{name}.expected.json").read_text())["losses"]
    assert go_on(DEEPSPEED / name / STEP, tmp_path / "dcp") == pytest.approx(told, rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="DCPTOOL_DEEPSPEED names no python with torch and deepspeed")
@pytest.mark.parametrize("kind", ["zero3", "zero2"])
def test_a_step_of_four_ranks_saved_just_now_goes_on_too(kind, tmp_path):
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(JOB)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(tmp_path / "run"), kind],
        capture_output=True, text=True, env=environment, timeout=500, check=False,
    )  # fmt: skip
    found = re.search(r"losses (\[.*\])", done.stdout)
    assert found, done.stderr[-3000:]
    assert go_on(tmp_path / "run" / STEP, tmp_path / "dcp") == pytest.approx(json.loads(found[1]), rel=1e-6)
