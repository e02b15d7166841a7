"""Two torchrun agents, as of two machines, that share one reshard."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from tests import forks  # noqa: E402
from tests.commands import wait_for  # noqa: E402
from tests.conftest import FOREIGN  # noqa: E402
from tests.launches import told, torchrun  # noqa: E402

WRAPPER = """
import os, pathlib, sys, time
from dcptool.cli import main
from dcptool.storage.local import LocalSink
real = LocalSink.write
def slow(self, data):
    pathlib.Path(os.environ["FLAGS"], os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(0.05)
    return real(self, data)
LocalSink.write = slow
main(sys.argv[1:])
"""


class Node:
    """One agent with its workers."""

    def __init__(self, folder: Path, rank: int, port: int, per_node: int, program: list[str], *args: object) -> None:
        self._out = folder / f"node{rank}.out"
        where = ["--nnodes", 2, "--node-rank", rank, "--nproc-per-node", per_node]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", port]
        command = [str(word) for word in (*where, *meeting, *program, "reshard", *args)]
        self.agent = forks.start(told, 0, self._out, torchrun, command, {"FLAGS": str(folder)})

    def wait(self, seconds: float) -> tuple[int, str, str]:
        """Wait for its end and return exit code, stdout and stderr."""
        self.agent.join(seconds)
        return self.agent.exitcode, *(
            file.read_text() for file in (self._out, self._out.with_name(f"{self._out.name}.err"))
        )


def start(folder: Path, per_node: int, program: list[str], *args: object) -> list[Node]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return [Node(folder, rank, port, per_node, program, *args) for rank in range(2)]


def test_two_nodes_share_the_work(tmp_path):
    source, target = FOREIGN / "xver_t2130", tmp_path / "out" / "step_7"
    nodes = start(tmp_path, 1, ["-m", "dcptool"], "--world-size", 5, "--timeout", "60s", source, target)
    found = [node.wait(120) for node in nodes]
    assert [code for code, *_ in found] == [0, 0], found
    assert re.fullmatch(r"19 tensors, 82 objects for 5 ranks, .*/out/step_7\n", found[0][1])
    assert found[1][1] == ""
    assert dcptool.verify(target, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
    assert dcptool.compare(source, target).equal
    assert [path.name for path in target.parent.iterdir()] == ["step_7"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["worker", "agent"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_node_is_lost(tmp_path, what, number):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    target = tmp_path / "out" / "step_7"
    options = ["--world-size", 7, "--timeout", "5s"]
    nodes = start(tmp_path, 2, [str(wrapper)], *options, FOREIGN / "xver_t2130", target)
    wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)), 120)
    victim = int((tmp_path / "2").read_text()) if what == "worker" else nodes[1].agent.pid
    began = time.monotonic()
    os.kill(victim, number)
    if what == "agent" and number == signal.SIGKILL:  # its workers live on and the work is done; torchrun waits for it
        wait_for(lambda: "for 7 ranks" in (tmp_path / "node0.out").read_text(), 60)
        nodes[0].agent.terminate()
        nodes[0].wait(60)
        nodes[1].wait(5)
        assert dcptool.verify(target, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
        return
    found = [node.wait(60) for node in nodes]
    assert time.monotonic() - began < 25
    assert all(code for code, *_ in found)
    told = [line for line in found[0][2].splitlines() if line.startswith("error:")]
    assert re.fullmatch(r"error: rank [23] of 4 was stopped, so the others stop too", told[0]), told
    assert [out for _, out, _ in found] == ["", ""]
    assert not list(target.parent.iterdir())
