"""Run commands as whole processes: wall time and peak memory, children included."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Run:
    """One run of a command: wall seconds, and peak resident bytes of all its processes together."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Side:
    """All counted runs of one side of a row."""

    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """Median wall seconds."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Median peak memory in bytes."""
        return int(statistics.median(run.nbytes for run in self.runs))


def run(command: Sequence[str]) -> Run:
    """Run a command to its end, its output thrown away.

    Peak memory is what the kernel accounts for the process or, where several run at once, the largest sum of their
    resident sets seen every 50 ms.

    Raises:
        RuntimeError: it exits with an error; the message has the end of its standard error.
    """
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    peak = [0]
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, peak, done))
    sampler.start()
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    done.set()
    sampler.join()
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {process.returncode}:\n{errors.decode()[-2000:]}")
    return Run(seconds, max(peak[0], usage.ru_maxrss * 1024))


def compare(ours: Sequence[str], theirs: Sequence[str], n_runs: int) -> tuple[Side, Side]:
    """Run two commands in turn, after one run of each that is not counted."""
    for command in (ours, theirs):
        run(command)
    pairs = [(run(ours), run(theirs)) for _ in range(n_runs)]
    return Side(tuple(pair[0] for pair in pairs)), Side(tuple(pair[1] for pair in pairs))


def compare_inside(ours: Sequence[str], theirs: Sequence[str], n_runs: int) -> tuple[dict[str, Side], dict[str, Side]]:
    """Run two jobs in turn that measure themselves; return both sides by the names of what they measured.

    A job prints, as its last line, a JSON object of `{"seconds": [one per round], "nbytes": peak memory}` by name.
    """
    found: tuple[dict[str, list[Run]], dict[str, list[Run]]] = ({}, {})
    for _ in range(n_runs):
        for command, runs in zip((ours, theirs), found, strict=True):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-2000:]}")
            for name, measured in json.loads(done.stdout.strip().splitlines()[-1]).items():
                runs.setdefault(name, []).extend(Run(seconds, measured["nbytes"]) for seconds in measured["seconds"])
    ours_found, theirs_found = ({name: Side(tuple(runs)) for name, runs in side.items()} for side in found)
    return ours_found, theirs_found


def _sample(root: int, peak: list[int], done: threading.Event) -> None:
    while not done.wait(SAMPLE_SECONDS):
        peak[0] = max(peak[0], _resident(root))


def _resident(root: int) -> int:
    """Return the resident bytes of a process and all its descendants; torchrun's workers have sessions of their own."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)], pages[int(name)] = int(fields[1]), int(fields[21])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(pages.get(pid, 0) for pid in family) * os.sysconf("SC_PAGE_SIZE")
