"""`verify` under torchrun: its processes share the reading, come to one verdict, and rank 0 says it."""

from __future__ import annotations

import json
import os
import socket

import pytest

torch = pytest.importorskip("torch")


import dcptool  # noqa: E402
from dcptool.checks import items as item_checks  # noqa: E402
from dcptool.ops.verify.together import verify_together  # noqa: E402
from tests.damage import flip_byte  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402

DEEP = dcptool.VerifyOptions(dcptool.Level.DEEP)
SIZE = 3


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def step(tmp_path):
    """A step of four ranks with a file beside it, marked with checksums."""
    whole = torch.arange(40_000.0).reshape(400, 100)
    states = [
        {
            "w": Shard.of(whole, rank, 4),
            "v": Shard.of(whole + 1, rank, 4),
            "small": torch.ones(3),
            "n": rank,
            "x": [1, rank],
        }
        for rank in range(4)
    ]
    save(tmp_path / "step_1", *states)
    torch.save({"a": torch.ones(30_000)}, tmp_path / "step_1/rng.pt")
    dcptool.mark_complete(tmp_path / "step_1", checksums=True)
    return tmp_path / "step_1"


def started(rank, port):
    """Be a process that torchrun started."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def one_rank(rank, path, port, range_nbytes):
    started(rank, port)
    item_checks.RANGE_NBYTES = range_nbytes
    read = []
    report = verify_together(path, DEEP, read.append)
    return [(one.state, one.findings, one.tally, one.side_files.n_unproven) for one in report.verdicts], sum(read)


@pytest.mark.parametrize("damaged", ["nothing", "__2_0.distcp", "rng.pt", ".metadata"])
def test_all_come_to_the_verdict_that_one_comes_to_alone(step, damaged):
    if damaged != "nothing":
        flip_byte(step / damaged, (step / damaged).stat().st_size // 2)
    alone = []
    want = dcptool.verify(step.parent, DEEP, alone.append)
    found = values(run_ranks(SIZE, one_rank, str(step.parent), free_port(), 10_000, group=False))
    verdicts = [(one.state, one.findings, one.tally, one.side_files.n_unproven) for one in want.verdicts]
    assert all(mine == verdicts for mine, _ in found)
    shares = [read for _, read in found]
    assert sum(shares) == sum(alone)
    if sum(alone):
        assert max(shares) < 0.6 * sum(alone)  # three shares of pieces of 10 kB


def command(rank, out, port, arguments):
    from dcptool.cli import main
    from tests.launches import told

    started(rank, port)

    def call():
        try:
            return main(arguments)
        except SystemExit as ended:
            return ended.code

    return told(0, out.with_name(f"{out.name}{rank}"), call)


def test_rank_0_speaks_for_all(step, tmp_path):
    flip_byte(step / "__2_0.distcp", 9_000)
    codes = values(
        run_ranks(SIZE, command, tmp_path / "out", free_port(), ["verify", "--deep", "--json", str(step)], group=False)
    )
    assert codes == [1] * SIZE
    outputs = [(tmp_path / f"out{rank}").read_text() for rank in range(SIZE)]
    assert outputs[1:] == ["", ""]
    assert json.loads(outputs[0])["checkpoints"][0]["state"] == "damaged"


def test_one_path_at_a_time(step, tmp_path):
    codes = values(
        run_ranks(1, command, tmp_path / "out", free_port(), ["verify", "--deep", str(step), str(step)], group=False)
    )
    assert codes == [2]
    assert "under torchrun: one PATH, without --load" in (tmp_path / "out0.err").read_text()
