"""`copy` under torchrun: each process sends what it sees, rank 0 judges, publishes and speaks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

import dcptool  # noqa: E402
from dcptool.ops.copy import together  # noqa: E402
from dcptool.ops.copy.places import unfinished_at  # noqa: E402
from dcptool.ops.copy.step import _Copying  # noqa: E402
from dcptool.storage.local import LocalStorage  # noqa: E402
from dcptool.storage.parts import _LocalParts  # noqa: E402
from tests import forks  # noqa: E402
from tests.conftest import OLD  # noqa: E402
from tests.damage import flip_byte, truncate  # noqa: E402
from tests.forks import run_ranks  # noqa: E402
from tests.groups.test_verify_together import free_port  # noqa: E402
from tests.launches import told, torchrun  # noqa: E402
from tests.ops.copy.test_copy_stores import contents, store_contents  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402

SIZE = 4
WHOLE = torch.arange(40_000.0).reshape(400, 100)


@pytest.fixture
def step(tmp_path) -> Path:
    """A step of four ranks with files beside it."""
    states = [
        {"w": Shard.of(WHOLE, rank, 4), "v": Shard.of(WHOLE + 1, rank, 4), "n": 3, "x": [1, rank]} for rank in range(4)
    ]
    folder = tmp_path / "whole" / "step_5"
    save(folder, *states)
    torch.save({"a": torch.ones(3_000)}, folder / "rng.pt")
    (folder / "data").mkdir()
    for rank in range(4):
        (folder / f"data/order_{rank}.txt").write_text(f"3 1 {rank}")
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    return folder


def spread(step: Path, names: dict[str, list[int]] | None = None) -> list[Path]:
    """Put each file of a step on the disk of one node; `names`: those that go elsewhere."""
    nodes = [step.parent.parent / f"node{rank}" for rank in range(SIZE)]
    for at, file in enumerate(sorted(file for file in step.rglob("*") if file.is_file())):
        name = str(file.relative_to(step))
        for rank in (names or {}).get(name, [at % SIZE]):
            target = nodes[rank] / "step_5" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
    for node in nodes:
        node.mkdir(exist_ok=True)
    return nodes


def one_rank(rank, nodes, port, arguments, out, prepare, environment):
    """Be a process that torchrun started on a node, and run a command there."""
    from dcptool.cli import main

    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(nodes)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(nodes[rank])
    together.TIMEOUT_SECONDS = 5.0
    if prepare:
        prepare(rank)

    def call():
        try:
            return main(arguments)
        except SystemExit as ended:
            return ended.code

    return told(0, out.with_name(f"{out.name}{rank}"), call)


def copied(nodes: list[Path], *arguments: object, prepare=None) -> tuple[list[int | None], str, str]:
    """Run a copy on all nodes; returns their exit codes and what they print, which rank 0 alone does."""
    out = nodes[0].parent / f"out-{time.monotonic_ns()}-"
    environment = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "READS"))}
    words = ["copy", *map(str, arguments)]
    found = run_ranks(len(nodes), one_rank, nodes, free_port(), words, out, prepare, environment, group=False)
    codes = [one.value if one.code == 0 else one.code for one in found]
    texts = [
        [out.with_name(f"{out.name}{rank}{end}").read_text() for rank in range(len(nodes))] for end in ("", ".err")
    ]
    assert texts[0][1:] == [""] * (len(nodes) - 1)
    errors = [[line for line in text.splitlines() if line.startswith("error:")] for text in texts[1]]
    assert not any(errors[1:]), texts[1]
    return codes, texts[0][0], texts[1][0]


def require_same(target: Path, step: Path) -> None:
    found = contents(target)
    assert found.pop("_COMPLETE")
    assert found == contents(step)
    assert dcptool.verify(target, dcptool.VerifyOptions(dcptool.Level.DEEP)).good


def test_four_nodes_of_torchrun(tmp_path, step):
    """Four agents, as of four machines, each with a disk of its own: one checkpoint, which stock torch loads."""
    nodes = spread(step)
    target = tmp_path / "shared" / "step_5"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    agents = [forks.start(node_of_torchrun, rank, nodes[rank], port, str(target)) for rank in range(SIZE)]
    for agent in agents:
        agent.join(240)
    said = [(node / "said").read_text() for node in nodes]
    assert [agent.exitcode for agent in agents] == [0] * SIZE, [(node / "said.err").read_text() for node in nodes]
    n_files = len(contents(step))
    assert said[0].startswith(f"{n_files} files, ")
    assert said[1:] == [""] * (SIZE - 1)
    require_same(target, step)
    assert os.listdir(target.parent) == ["step_5"]
    state = {"w": torch.zeros_like(WHOLE), "v": torch.zeros_like(WHOLE), "n": 0, "x": []}
    dcp.load(state, checkpoint_id=str(target), no_dist=True)
    assert torch.equal(state["w"], WHOLE)
    assert torch.equal(state["v"], WHOLE + 1)
    assert state["n"] == 3


def node_of_torchrun(rank, folder, port, target):
    os.chdir(folder)
    where = ["--nnodes", str(SIZE), "--node-rank", str(rank), "--nproc-per-node", "1"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    told(0, folder / "said", torchrun, [*where, *meeting, "-m", "dcptool", "copy", "step_5", target])


def count_reads(rank):
    """Note the bytes that this process reads of large files."""
    real = LocalStorage.read_into

    def read_into(self, name, byte_offset, out):
        if name.endswith(".distcp"):
            with open("/".join([os.environ["READS"], str(rank)]), "a") as file:
                file.write(f"{len(out)}\n")
        real(self, name, byte_offset, out)

    LocalStorage.read_into = read_into


def test_from_shared_storage_each_file_is_read_by_one(tmp_path, step, monkeypatch):
    (tmp_path / "reads").mkdir()
    monkeypatch.setenv("READS", str(tmp_path / "reads"))
    target = tmp_path / "shared" / "step_5"
    codes, said, _ = copied([tmp_path] * SIZE, step, target, "--json", prepare=count_reads)
    assert codes == [0] * SIZE
    done = json.loads(said)["steps"][0]
    assert done["state"] == "copied"
    require_same(target, step)
    sizes = [file.stat().st_size for file in step.glob("*.distcp")]
    read = [sum(map(int, (tmp_path / "reads" / str(rank)).read_text().split())) for rank in range(SIZE)]
    read[0] -= sum(sizes)  # for the verdict, which of items as small as these reads all
    assert sorted(read) == sorted(sizes)
    codes, said, _ = copied([tmp_path] * SIZE, step, target)
    assert codes == [0] * SIZE
    assert "there already" in said


def test_several_processes_on_a_node(tmp_path, step):
    """Two nodes with two processes each, which see the same disk."""
    nodes = spread(step)
    for at in (1, 3):
        shutil.copytree(nodes[at], nodes[at - 1], dirs_exist_ok=True)
    two = [nodes[0], nodes[0], nodes[2], nodes[2]]
    codes, *_ = copied(two, "step_5", tmp_path / "shared" / "step_5")
    assert codes == [0] * SIZE
    require_same(tmp_path / "shared" / "step_5", step)


@pytest.mark.parametrize("name", ["data/order_2.txt", "__1_0.distcp", ".metadata"])
def test_a_file_on_two_disks(tmp_path, step, name):
    """Equal bytes are sent once; other bytes of that name are refused, with who has which."""
    nodes = spread(step, {name: [1, 2]})
    os.utime(nodes[1] / "step_5" / name, (1, 1))
    codes, *_ = copied(nodes, "step_5", tmp_path / "shared" / "step_5")
    assert codes == [0] * SIZE
    require_same(tmp_path / "shared" / "step_5", step)
    flip_byte(nodes[2] / "step_5" / name, 3)
    codes, _, error = copied(nodes, "step_5", tmp_path / "other" / "step_5")
    assert codes == [3] * SIZE
    assert f"error: {name} differs: SHA-256 " in error
    assert "on rank 1, SHA-256" in error
    assert "on rank 2: these are not halves of one save" in error
    truncate(nodes[2] / "step_5" / name, 4)
    codes, _, error = copied(nodes, "step_5", tmp_path / "other" / "step_5")
    assert codes == [3] * SIZE
    assert "4 bytes on rank 2" in error
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["__2_0.distcp", ".metadata"])
def test_no_disk_has_a_file(tmp_path, step, name):
    codes, _, error = copied(spread(step, {name: []}), "step_5", tmp_path / "shared" / "step_5")
    assert codes == [3] * SIZE
    assert "error: step_5 is not whole, not copied:\n" in error
    assert name in error
    assert not (tmp_path / "shared").exists()


def test_one_disk_has_nothing_of_the_step(tmp_path, step):
    names = [str(file.relative_to(step)) for file in step.rglob("*") if file.is_file()]
    nodes = spread(step, {name: [1 + at % 3] for at, name in enumerate(names)})
    assert not (nodes[0] / "step_5").exists()
    codes, *_ = copied(nodes, "step_5", tmp_path / "shared" / "step_5")
    assert codes == [0] * SIZE
    require_same(tmp_path / "shared" / "step_5", step)
    codes, _, error = copied(nodes, "step_6", tmp_path / "shared" / "step_6")
    assert codes == [3] * SIZE
    assert "error: step_6: no such file or directory" in error


@pytest.mark.parametrize("name", ["__0_0.distcp", "rng.pt"])
def test_damage_on_one_disk(tmp_path, step, name):
    nodes = spread(step)
    file = next(node / "step_5" / name for node in nodes if (node / "step_5" / name).exists())
    flip_byte(file, file.read_bytes().index((WHOLE[99:100] if name != "rng.pt" else torch.ones(9)).numpy().tobytes()))
    codes, _, error = copied(nodes, "step_5", tmp_path / "shared" / "step_5")
    assert codes == [3] * SIZE
    assert "error: step_5 is damaged, not copied:" in error
    assert name in error
    assert os.listdir(tmp_path / "shared") == []


def fail_to_write(rank):
    """The target's disk is full when the second process has written a part."""
    if rank == 2:

        def full(self, index, data):
            from dcptool.errors import StorageError

            raise StorageError("no space left on device")

        _LocalParts.write_part = full


def test_one_fails_and_all_end_alike(tmp_path, step):
    nodes = spread(step)
    target = tmp_path / "shared" / "step_5"
    codes, _, error = copied(nodes, "step_5", target, prepare=fail_to_write)
    assert codes == [3] * SIZE
    assert "error: rank 2 of 4: no space left on device" in error
    assert not target.exists()
    codes, *_ = copied(nodes, "step_5", target)
    assert codes == [0] * SIZE
    require_same(target, step)
    assert os.listdir(target.parent) == ["step_5"]


def killed_after_a_file(rank):
    """Process 1 is killed when it has copied its first file; the others had time to copy theirs."""
    if rank == 1:
        move = _Copying._move

        def moved_one(self, mover, place, name):
            time.sleep(1)
            move(self, mover, place, name)
            os.kill(os.getpid(), signal.SIGKILL)

        _Copying._move = moved_one


@pytest.mark.parametrize("where", ["local", "s3"])
def test_killed_in_the_middle_and_run_again(tmp_path, step, where, request):
    """What all of them had copied is known to the next run, of as many processes or of one."""
    nodes = spread(step)
    target = str(tmp_path / "shared" / "step_5") if where == "local" else f"{request.getfixturevalue('s3_url')}/step_5"
    codes, _, error = copied(nodes, "step_5", target, prepare=killed_after_a_file)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == codes[2] == codes[3] == 3
    assert "rank 1 of 4" in error
    if where == "local":
        assert not Path(target).exists()
    else:
        assert dcptool.verify(target, dcptool.VerifyOptions(grace=0)).verdicts[0].state is dcptool.State.INCOMPLETE
    codes, said, _ = copied(nodes, "step_5", target, "--json")
    assert codes == [0] * SIZE
    done = json.loads(said)["steps"][0]
    assert done["kept_nbytes"] > 0.5 * done["nbytes"]
    if where == "local":
        require_same(Path(target), step)
        assert os.listdir(tmp_path / "shared") == ["step_5"]
    else:
        found = store_contents(target)
        assert found.pop("_COMPLETE")
        assert found == contents(step)


def test_what_many_began_one_ends(tmp_path, step):
    target = tmp_path / "shared" / "step_5"
    codes, *_ = copied([tmp_path] * SIZE, step, target, prepare=killed_after_a_file)
    assert codes[1] == -signal.SIGKILL
    _, journal = unfinished_at(str(target))
    assert len(list(target.parent.glob(f"{Path(journal).name}*"))) == SIZE
    done = dcptool.copy_steps(step, target).steps[0]
    assert done.kept_nbytes > 0.5 * done.nbytes
    require_same(target, step)
    assert os.listdir(target.parent) == ["step_5"]


def save_again(rank):
    """Somebody writes to the disk of process 3 when its files have been copied."""
    if rank == 3:
        gather = _Copying._require_unchanged

        def later(self):
            next(Path("step_5").rglob("*.*")).touch()
            gather(self)

        _Copying._require_unchanged = later


def test_the_source_changes_meanwhile(tmp_path, step):
    codes, _, error = copied(spread(step), "step_5", tmp_path / "shared" / "step_5", prepare=save_again)
    assert codes == [3] * SIZE
    assert "error: rank 3 of 4: step_5: " in error
    assert "changed while it was read, nothing was published" in error
    assert not (tmp_path / "shared" / "step_5").exists()


def test_the_target_is_not_shared(tmp_path, step):
    nodes = spread(step)
    codes, _, error = copied(nodes, "step_5", "mine/step_5")
    assert codes == [3] * SIZE
    assert "what rank 0 writes there is not seen by all\n  The target must be on storage" in error
    assert not any((node / "mine" / "step_5").exists() for node in nodes)


def test_a_run_and_further_folders_are_refused(tmp_path, step):
    shutil.copytree(step, step.with_name("step_6"))
    codes, _, error = copied([tmp_path] * SIZE, step.parent, tmp_path / "shared")
    assert codes == [3] * SIZE
    assert "is a run; under torchrun one step is copied at a time\n  Name a step of it" in error
    codes, _, error = copied([tmp_path] * SIZE, step, tmp_path / "shared", "--also", step)
    assert codes == [2] * SIZE
    assert "under torchrun each process sends what it sees itself: without --also" in error


def test_a_plan(tmp_path, step):
    codes, said, _ = copied(spread(step), "--dry-run", "step_5", tmp_path / "shared" / "step_5")
    assert codes == [0] * SIZE
    assert all(name in said for name in contents(step))
    assert not (tmp_path / "shared").exists()


def test_a_copy_is_replaced(tmp_path, step):
    target = tmp_path / "shared" / "step_5"
    save(target, {"old": torch.ones(3)})
    nodes = spread(step)
    codes, _, error = copied(nodes, "step_5", target)
    assert codes == [3] * SIZE
    assert "is there already" in error
    codes, *_ = copied(nodes, "step_5", target, "--overwrite")
    assert codes == [0] * SIZE
    require_same(target, step)
