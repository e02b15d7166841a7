"""Lightning and accelerate killed at every moment of a save: what `latest` gives, they themselves can go on from.

Slow, and run by hand: DCPTOOL_TRAINERS names the python of an environment with torch, lightning and accelerate.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dcptool.ops.latest import find_latest
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.ops.verify.verify import verify

PYTHON = os.environ.get("DCPTOOL_TRAINERS", "")
JOBS = Path(__file__).parent / "jobs"
SETTINGS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
TRAINERS = {
    "lightning": ("epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"),
    "accelerate": ("checkpoints/checkpoint_0", "checkpoints/checkpoint_1"),
}
ASKED = VerifyOptions(grace=0)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DCPTOOL_TRAINERS names no python with lightning and accelerate"),
]


def job(trainer: str, run: Path, fatal: int, *resume: str) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(JOBS / f"{trainer}_job.py"), str(run), str(fatal), *resume]
    environment = {**os.environ, **SETTINGS}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


def told(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """How many moments the save had, and at which step training began."""
    found = re.search(r"moments (\d+) began at (\d+)", done.stdout)
    assert found, done.stderr[-3000:]
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_at_every_moment_of_a_save(trainer, tmp_path):
    first, second = TRAINERS[trainer]
    n_moments, _ = told(job(trainer, tmp_path / "whole", 0))
    assert n_moments > 5
    assert find_latest(tmp_path / "whole", ASKED).path == str(tmp_path / "whole" / second)
    answers = []
    for fatal in range(1, n_moments + 1):
        run = tmp_path / f"killed-{fatal}"
        assert job(trainer, run, fatal).returncode != 0
        states = {verdict.name: (verdict.state, verdict.resumable) for verdict in verify(run, ASKED).verdicts}
        assert states[Path(first).name] == (State.COMPLETE, True)
        path = find_latest(run, ASKED).path
        is_second = states.get(Path(second).name, (State.INCOMPLETE, False)) == (State.COMPLETE, True)
        assert path == str(run / (second if is_second else first)), (fatal, states)
        _, began = told(job(trainer, run, 0, path))
        assert began == (4 if is_second else 2), fatal
        answers.append(is_second)
    assert not answers[0]
    assert answers == sorted(answers)  # from some moment on it is whole, and no earlier
