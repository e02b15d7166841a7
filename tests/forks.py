"""Ranks as processes that are forked from one that has imported torch: a gloo group in a tenth of a second."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.warm"])


class Outcome(NamedTuple):
    """How a rank ended: its exit code (negative: the signal), what its function returned, what it raised."""

    code: int | None
    value: Any
    error: str


def run_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120, group: bool = True
) -> list[Outcome]:
    """Call `function(rank, *arguments)` in one process per rank, which form a gloo group if there are several.

    Args:
        count: number of ranks; 0 for one process without a process group.
        function: of a module; what it returns is pickled.
        arguments: pickled too.
        timeout: seconds after which what still runs is killed: its code is None then.
        group: whether they form a group.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _SERVER.Process(target=_rank, args=(rank, count if group else 0, folder, function, arguments))
            for rank in range(max(count, 1))
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        outcomes = []
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            code = process.exitcode
            if code is None:
                process.kill()
                process.join()
            file = Path(folder, f"outcome_{rank}")
            value, error = pickle.loads(file.read_bytes()) if file.exists() else (None, "")
            outcomes.append(Outcome(code, value, error))
        return outcomes


def start(function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a process without a process group that calls `function(*arguments)`; returns the `Process`."""
    process = _SERVER.Process(target=function, args=arguments)
    process.start()
    return process


def values(outcomes: list[Outcome]) -> list[Any]:
    """What all ranks returned; none may have failed."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank}: {outcome.code}\n{outcome.error}"
    return [outcome.value for outcome in outcomes]


def _rank(rank: int, count: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    value, error, code = None, "", 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if count:
                store = dist.FileStore(os.path.join(folder, "store"), count)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
            value = function(rank, *arguments)
        except BaseException:
            error, code = traceback.format_exc(), 1
        file = Path(folder, f"outcome_{rank}")
        file.with_suffix(".tmp").write_bytes(pickle.dumps((value, error)))
        file.with_suffix(".tmp").rename(file)
        if code == 0 and count:
            dist.destroy_process_group()
    os._exit(code)
