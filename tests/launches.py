"""Start jobs by torchrun's own elastic agent, its ranks forked from one process, which has imported torch.

Importing torch and FSDP takes longer than all that these jobs do.
"""

import os
import runpy
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ROOT = str(Path(__file__).resolve().parent.parent)
# The second, else a restarted rank may read where a rank of the life before listened (pytorch issue 135712).
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch(ranks: int, restarts: int, function: Callable[..., Any], *arguments: Any) -> int:
    """Call a function on every rank as torchrun starts a script; returns 0, or the code of the first rank that failed.

    Args:
        ranks: how many.
        restarts: how often all are started anew when one fails.
        function: what each of them does.
        arguments: of the function.
    """
    os.environ.update(SETTINGS)
    torch.set_num_threads(1)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
    )
    try:
        elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    return 0


def told(_: int, out: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own (see `forks.run_ranks`): what is printed goes to `out`, and `out`.err."""
    for number, path in ((1, out), (2, out.with_name(f"{out.name}.err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try:
        return function(*arguments)
    finally:
        sys.stdout.flush()


def script(folder: Path, name: str) -> None:
    """Run a script as `python NAME` in a folder does."""
    os.chdir(folder)
    sys.argv = [name]
    runpy.run_path(name, run_name="__main__")


def train(arguments: list[str]) -> None:
    """Run fixtures/train.py with these arguments."""
    from fixtures import train

    if "--reference" in arguments:  # which must import dcptool if it needs it
        for name in [name for name in sys.modules if name.partition(".")[0] == "dcptool"]:
            del sys.modules[name]
    sys.argv = ["train.py", *arguments]
    train.main()


def train_in_turn(jobs: list[tuple[int | Path, Any]]) -> None:
    """Start fixtures/train.py several times.

    Before each start a line `launch` is printed; after one that failed, `failed` and the exit code of its first rank
    that did.

    Args:
        jobs: how many ranks, and the arguments. Instead of a start, two paths copy a folder.
    """
    import fixtures.train  # noqa: F401 - here, once for all ranks

    for ranks, arguments in jobs:
        if isinstance(ranks, Path):
            shutil.copytree(ranks, arguments)
            continue
        print("launch", flush=True)
        code = launch(ranks, 0, train, arguments)
        if code:
            print("failed", code, flush=True)


def torchrun(arguments: list[str], environment: dict[str, str] | None = None) -> None:
    """Be the command torchrun: its workers are processes that it starts, which can import dcptool."""
    from torch.distributed.run import main

    os.environ.update({**SETTINGS, "PYTHONPATH": ROOT, **(environment or {})})
    main(arguments)
