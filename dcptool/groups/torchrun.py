"""torchrun's group: whether this process is in one, and joining it. Knows what torchrun sets, not the work."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from dcptool.errors import WorkerError
from dcptool.groups.group import JOINED, ProcessGroup, first_line


def under_torchrun() -> bool:
    """Tell whether torchrun, or something like it, started this process as one of several."""
    there = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return there and os.environ["WORLD_SIZE"] != "1"


def speaks_for_all() -> bool:
    """Tell whether this process is the one of its group that talks to the user."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def join_torchrun(timeout: float) -> ProcessGroup:
    """Join the group that torchrun made.

    Args:
        timeout: seconds after which a member that is silent, or does not come, is given up.

    Raises:
        WorkerError: it does not form.
    """
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store: Any = dist.TCPStore(
            host, int(port), size, hosts, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
        )
    except ValueError as error:
        raise WorkerError(f"RANK, WORLD_SIZE or MASTER_PORT in the environment is no number: {error}") from error
    except RuntimeError as error:
        who = "cannot be opened here" if hosts else "does not answer: rank 0, or torchrun on its machine, is not there"
        message = f"{host}:{port}, where the processes meet, {who} ({first_line(error)})"
        raise WorkerError(message, next_step=JOINED) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return ProcessGroup(dist.PrefixStore(f"attempt {attempt}", store), rank, size, timeout, hosts=hosts)
