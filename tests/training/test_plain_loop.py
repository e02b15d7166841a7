"""The loop with plain torch in docs/training.md: killed anywhere, it goes on with other ranks as if never killed."""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict  # noqa: E402

import dcptool  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.launches import launch, told  # noqa: E402

PAGE = (ROOT / "docs" / "training.md").read_text()
SCRIPT = next(block for block in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL) if "loop.py RUN" in block)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
SEED = int(os.environ.get("LIVES_SEED", "5"))
KILLS = {
    # where a rank dies, which rank, in which save; the step that the next life resumes from, if that is certain
    "while rank 0 writes": ("write", 0, 8, 4),
    "while rank 1 writes": ("write", 1, 8, 4),
    "before the metadata": ("metadata", 0, 12, 8),
    "between the future and the marker": ("mark_complete", 0, 8, 4),
    "between the future and the first marker": ("mark_complete", 0, 4, 4),
    "before steps are deleted": ("delete_steps", 0, 12, 12),
    "at random": ("random", random.Random(SEED).randrange(2), 8, None),
}
OFTEN = ("while rank 1 writes", "between the future and the marker", "at random")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def arm(where: str, step: int) -> None:
    """Let this process die at a place in the save of a step."""
    if where in ("mark_complete", "delete_steps"):
        function = getattr(dcptool, where)

        def deadly(path, **options):
            if where == "delete_steps" and not Path(path.run, f"step_{step}", "_COMPLETE").exists():
                return function(path, **options)
            return die() if step == step_of(path) or where == "delete_steps" else function(path, **options)

        setattr(dcptool, where, deadly)
        return
    create_stream, rename = FileSystem.create_stream, FileSystem.rename

    def stream(self, path, mode):
        if mode == "wb" and step_of(Path(path).parent) == step and Path(path).suffix == ".distcp":
            if where == "random":
                threading.Timer(random.Random(SEED).uniform(0, 0.05), die).start()
            elif where == "write":
                Path(path).write_bytes(b"half")
                die()
        return create_stream(self, path, mode)

    FileSystem.create_stream = stream
    if where == "metadata":
        FileSystem.rename = lambda self, path, new: (
            die() if step_of(Path(new).parent) == step else rename(self, path, new)
        )


def step_of(path) -> int:
    return int(str(path).rpartition("_")[2])


def life(folder: Path, where: str, victim: int, step: int) -> None:
    """One rank of the script as it stands in the docs; it may die."""
    if where and int(os.environ["RANK"]) == victim:
        arm(where, step)
    in_flight, async_save = [], dcp.async_save

    def one_at_a_time(*arguments, **options):
        assert all(future.done() for future in in_flight)
        in_flight.append(async_save(*arguments, **options))
        return in_flight[-1]

    dcp.async_save = one_at_a_time
    sys.argv = ["loop.py", str(folder / "run")]
    runpy.run_path(str(folder / "loop.py"), run_name="__main__")


def reference(folder: Path, after: int, until: int) -> None:
    """One rank of the same training without a checkpoint: whole tensors in a file of torch.save between two jobs."""
    loop = runpy.run_path(str(folder / "loop.py"), run_name="loop")
    dist.init_process_group("gloo")
    app = loop["build"]()
    if after:
        kept = torch.load(folder / f"whole_{after}.pt")
        set_state_dict(
            app.model, app.optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optim"], options=WHOLE
        )
        app.scheduler.load_state_dict(kept["scheduler"])
        app.step = after
    while app.step < until:
        loop["train"](app)
        if app.step in (4, 8, 12, until):
            model, optim = get_state_dict(app.model, app.optimizer, options=WHOLE)
            kept = {"model": model, "optim": optim, "scheduler": app.scheduler.state_dict(), "step": app.step}
            if dist.get_rank() == 0:
                torch.save(kept, folder / f"whole_{app.step}.pt")
    dist.destroy_process_group()


def in_turn(folder: Path, jobs) -> None:
    """Start jobs one after the other, from one process that has imported all they need."""
    for ranks, function, *arguments in jobs:
        print("began", flush=True)
        print("ended", launch(ranks, 0, function, folder, *arguments), flush=True)


@pytest.fixture(scope="module")
def uninterrupted(once):
    """The state at the end, by the step up to which two ranks trained, three after it, and nothing was ever killed."""

    def find(after: int) -> Path:
        def train(folder: Path) -> Path:
            (folder / "loop.py").write_text(SCRIPT)
            jobs = [(2, reference, 0, after), (3, reference, after, 20)]
            values(run_ranks(0, told, folder / "out", in_turn, folder, jobs))
            assert "ended 1" not in (folder / "out").read_text(), (folder / "out.err").read_text()
            return folder / "whole_20.pt"

        return once(f"plain_loop_{after}", train)

    return find


@pytest.mark.parametrize(
    "kill", [kill if kill in OFTEN else pytest.param(kill, marks=pytest.mark.slow) for kill in KILLS]
)
def test_killed_on_two_ranks_and_finished_on_three(tmp_path, uninterrupted, kill):
    where, victim, step, resumed = KILLS[kill]
    (tmp_path / "loop.py").write_text(SCRIPT)
    jobs = [(2, life, where, victim, step), (3, life, "", 0, 0)]
    values(run_ranks(0, told, tmp_path / "out", in_turn, tmp_path, jobs))
    said, errors = (tmp_path / "out").read_text(), (tmp_path / "out.err").read_text()
    lives = re.findall(r"began\n(?:from step (\d+)\n)?ended (-?\d+)\n", said)
    assert [code != "0" for _, code in lives] == [True, False], errors[-3000:]
    found = [int(first) for first, _ in lives]
    assert found in ([[0, resumed]] if resumed else [[0, 4], [0, 8]])
    run = tmp_path / "run"
    assert sorted(step_of(file.parent) for file in run.glob("*/_COMPLETE")) == [16, 20]
    assert dcptool.find_latest(run).path == str(run / "step_20")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(run / "step_20", tmp_path / "all.pt")
    same(torch.load(tmp_path / "all.pt")["app"], torch.load(uninterrupted(found[1])), "app")


def same(here, there, name: str) -> None:
    """Compare two states, bit for bit."""
    if isinstance(there, dict):
        assert sorted(map(str, here)) == sorted(map(str, there)), name
        for key, value in there.items():
            same(here[key], value, f"{name}.{key}")
    elif torch.is_tensor(there):
        assert here.dtype == there.dtype, name
        assert torch.equal(here, there), name
    elif isinstance(there, list | tuple):  # torch's whole state dicts have lists for tuples
        same(dict(enumerate(here)), dict(enumerate(there)), name)
    else:
        assert here == there, name


@pytest.mark.slow
def test_it_is_a_command_for_torchrun(tmp_path):
    """As the first line of the script says, by the command itself."""
    from tests.launches import torchrun

    (tmp_path / "loop.py").write_text(SCRIPT)
    arguments = ["--standalone", "--nproc-per-node=2", str(tmp_path / "loop.py"), str(tmp_path / "run")]
    values(run_ranks(0, told, tmp_path / "out", torchrun, arguments))
    assert (tmp_path / "out").read_text() == "from step 0\n", (tmp_path / "out.err").read_text()
    assert [step.name for step in dcptool.find_steps(tmp_path / "run")] == ["step_16", "step_20"]
