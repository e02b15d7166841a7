"""Start fixtures/train.py several times by torchrun's own elastic agent, its ranks forked from one process.

    python tests/launches.py '[[RANKS, [ARGUMENT, …]], …]'

Importing torch and FSDP takes longer than all that these jobs do; here it is done once. Before each start a line
`launch` is printed, after one that failed `failed` and the exit code of its first rank that did. Instead of a start,
`[FROM, TO]` copies a folder.
"""

import json
import os
import shutil
import sys
import uuid

import torch._dynamo  # the first optimizer would import it, in every rank
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fixtures import train


def work(arguments: list[str]) -> None:
    sys.argv = ["train.py", *arguments]
    train.main()


def main() -> None:
    torch.set_num_threads(1)
    for ranks, arguments in json.loads(sys.argv[1]):
        if isinstance(ranks, str):
            shutil.copytree(ranks, arguments)
            continue
        if "--reference" not in arguments:  # which must not find it imported
            import dcptool.training  # noqa: F401
        print("launch", flush=True)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="fork",
        )
        try:
            elastic_launch(config, work)(arguments)
        except ChildFailedError as error:
            print("failed", error.get_first_failure()[1].exitcode, flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
