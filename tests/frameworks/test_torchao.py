"""What dcptool writes of torchao's tensors, stock `dcp.load` and `torch.load` read with torchao installed.

Slow, and run by hand: DCPTOOL_TORCHAO names the python of an environment with torch and torchao.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import dcptool
from dcptool.ops.reshard.plan import ReshardOptions
from tests.conftest import part

PYTHON = os.environ.get("DCPTOOL_TORCHAO", "")
JOB = Path(__file__).parent / "jobs" / "torchao_job.py"
CASES = [
    (name, how)
    for name in ("ao_weights_dcp_w1", "ao_optim_dcp_w1", "ao_weights_pt/model.pt", "nf4_pt/model.pt")
    for how in ("dcp", "torch", "reshard", "back")
    if name != "nf4_pt/model.pt" or how != "reshard"  # torchao cannot take a part of an NF4 tensor
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DCPTOOL_TORCHAO names no python with torchao"),
]


def loaded(*paths):
    command = [PYTHON, str(JOB), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("loaded ")), None)
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("loaded "))


@pytest.mark.parametrize(("name", "how"), CASES)
def test_stock_torch_reads_it(name, how, tmp_path):
    found = part(name)
    path = tmp_path / ("out.pt" if how in ("torch", "back") else "out")
    if how in ("dcp", "torch"):
        dcptool.convert(found.path, path, how)
    else:
        cut = tmp_path / "cut" if how == "back" else path
        dcptool.reshard(found.path, cut, ReshardOptions(world_size=4, workers=1))
        if how == "back":
            dcptool.convert(cut, path, "torch")
    got = loaded(path) if path.suffix else loaded(path, found.path)
    tensors = {fqn: entry for fqn, entry in found.expected.items() if entry["kind"] == "tensor"}
    assert set(got) == set(tensors)
    for fqn, entry in tensors.items():
        if "inner" not in entry:
            assert got[fqn] == {"": entry["sha256"]}, fqn
            continue
        wanted = {key: inner["sha256"] for key, inner in entry["inner"].items()}
        assert {key: got[fqn][key] for key in wanted} == wanted, fqn
        if entry.get("dequantized"):
            assert got[fqn]["dequantized"] == entry["dequantized"]["sha256"], fqn
