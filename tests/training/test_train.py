"""fixtures/train.py: a real FSDP2 job under torchrun whose checkpoints dcptool reads as torch does."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import OLD, ROOT
from tests.conftest import run as cli

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

import dcptool  # noqa: E402
from tests.commands import wait_for  # noqa: E402
from tests.forks import run_ranks, start, values  # noqa: E402
from tests.launches import launch, told, torchrun, train, train_in_turn  # noqa: E402
from tests.ops.rescue.test_rescue import same_metadata  # noqa: E402


class Life(NamedTuple):
    """What one start of the job printed: losses by step, the step resumed from (0: none), all lines."""

    losses: dict[int, float]
    resumed: int
    lines: list[str]


class Lives(NamedTuple):
    """A run directory, a copy of it after two kills, and what each life printed."""

    folder: Path
    killed: Path
    lives: list[Life]


def arguments(run_dir, *options) -> list[str]:
    return ["--run-dir", str(run_dir), "--hidden", "16", *options]


def lives_in(stdout: str) -> list[Life]:
    found = []
    for text in re.split(r"^marked: ", stdout, flags=re.MULTILINE)[not stdout.startswith("step") :]:
        losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (.+)", text, re.MULTILINE)}
        resumed = re.search(r"^resumed at step (\d+)", text, re.MULTILINE)
        found.append(Life(losses, int(resumed[1]) if resumed else 0, text.splitlines()))
    return found


def launch_all(place: Path) -> tuple[Life, Lives]:
    """A reference, the same training on 2 ranks without a checkpoint and without dcptool; then the lives of one run.

    4 ranks are killed in the middle of saving step 4, of 3 one is killed saving 6; then there are 2, and 4. After both
    kills whole are step 2, by 4 ranks, and step 3, by 3. Of step 6 rank 1's file is cut; the others may have finished
    their own.
    """
    folder = place / "run"
    killed = folder.with_name("killed")
    lives = [
        (2, arguments("nowhere", "--steps", "11", "--reference")),
        (4, arguments(folder, "--steps", "4", "--save-every", "2", "--sync", "--die", "save:4")),
        (3, arguments(folder, "--steps", "6", "--save-every", "3", "--sync", "--die", "save:6:1")),
        (folder, killed),
        (2, arguments(folder, "--steps", "5", "--save-every", "5")),
        (4, arguments(folder, "--steps", "8", "--save-every", "2")),
    ]
    out = folder.with_name("out")
    values(run_ranks(0, told, out, train_in_turn, lives, timeout=280))
    stdout, stderr = out.read_text(), out.with_name("out.err").read_text()
    parts = re.split(r"^launch\n", stdout, flags=re.MULTILINE)[1:]
    ended = [re.findall(r"^failed (.+)", part, re.MULTILINE) for part in parts]
    # Where one rank of several is killed, another may be seen to fail first, as it waits for that one.
    assert ended in ([[], ["-9"], [code], [], []] for code in ("-9", "1")), stderr[-3000:]
    assert "dcptool is imported: False" in parts[0]
    reference, *found = (lives_in(part)[0] for part in parts)
    return reference, Lives(folder, killed, found)


@pytest.fixture(scope="module")
def launched(once) -> tuple[Life, Lives]:
    return once("train", launch_all)


@pytest.fixture(scope="module")
def reference(launched) -> Life:
    return launched[0]


@pytest.fixture(scope="module")
def lived(launched) -> Lives:
    return launched[1]


@pytest.fixture
def run(lived, tmp_path) -> Path:
    """A copy of the run directory, with its file times."""
    return Path(shutil.copytree(lived.killed, tmp_path / "run"))


def age(*steps: Path) -> None:
    """Set the times of all files to long ago: no grace any more."""
    for step in steps:
        for file in step.iterdir():
            os.utime(file, (OLD, OLD))


def rows(stdout: str) -> dict[str, tuple[str, str]]:
    """The table that `prune` prints: step → plan and state."""
    found = re.findall(r"^(step_\d+) +(keep|DELETE) +(\S+) ", stdout, re.MULTILINE)
    return {step: (plan, state) for step, plan, state in found}


def left(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step_*"))


def test_a_run_killed_in_a_save_and_resumed_with_fewer_ranks(lived):
    summary = dcptool.summarize(lived.killed)
    assert [(step.name, step.state.value, step.world_size) for step in summary.steps] == [
        ("step_2", "complete", 4),
        ("step_3", "complete", 3),
        ("step_6", "in-progress", None),  # what was left of step 4 went before this one
    ]
    assert "perhaps still being saved" in summary.steps[2].reason


def test_from_4_ranks_to_3_to_2_to_4(lived, reference):
    """Each life goes on from the last marked step, losses are those of the reference, per-rank state is reported."""
    assert [life.resumed for life in lived.lives] == [0, 2, 3, 5]
    assert [list(life.losses) for life in lived.lives] == [[1, 2, 3, 4], [3, 4, 5, 6], [4, 5], [6, 7, 8]]
    for life in lived.lives:
        for step, loss in life.losses.items():
            assert loss == pytest.approx(reference.losses[step], rel=1e-5)
    said = [[line for line in life.lines if line.startswith("dl: ")] for life in lived.lives]
    assert said == [
        [],
        ["dl: missing [], unused [3]"],
        ["dl: missing [], unused [2]"],
        ["dl: missing [2, 3], unused []"],
    ]
    states = {
        verdict.name: (verdict.state.value, verdict.world_size) for verdict in dcptool.verify(lived.folder).verdicts
    }
    assert states == {"step_5": ("complete", 2), "step_6": ("complete", 4), "step_8": ("complete", 4)}
    marker = json.loads((lived.folder / "step_8" / "_COMPLETE").read_text())
    assert (marker["writer"], marker["step"], marker["world_size"]) == ("save", 8, 4)
    assert 0 <= marker["blocked_seconds"] <= marker["save_seconds"]


def test_killed_and_restarted_by_torchrun_bit_for_bit(tmp_path, reference):
    """SIGKILL after a step, in the middle of an upload in the background, and of one rank only in one.

    The agent is torchrun's; it forks the ranks. The command torchrun restarts one in the next test.
    """
    kills = ("--die", "step:5", "--die", "save:8", "--die", "save:10:1")
    options = ("--steps", "11", "--save-every", "2")
    out = tmp_path / "out"
    job = arguments(tmp_path / "run", *options, *kills)
    (code,) = values(run_ranks(0, told, out, launch, 2, 3, train, job, timeout=280))
    stdout, stderr = out.read_text(), out.with_name("out.err").read_text()
    assert code == 0, stderr[-3000:]
    assert "SIGKILL" in stderr or "exitcode: -9" in stderr, stderr[-3000:]
    lives = lives_in(stdout)
    assert len(lives) == 4
    for life, after in itertools.pairwise(lives):
        last_marked = int(after.lines[0].split()[-1])
        assert after.resumed == last_marked > 0
        assert next(iter(after.losses)) == last_marked + 1
        assert last_marked <= max(life.losses)
    executed = [step for life in lives for step in life.losses]
    assert set(executed) == set(range(1, 12))
    assert lives[-1].lines[-1] == reference.lines[-1]
    assert re.match("weights [0-9a-f]{64}$", reference.lines[-1])
    for life in lives:
        assert life.losses == {step: reference.losses[step] for step in life.losses}  # bit for bit


def test_sigterm_saves_and_ends(tmp_path):
    """torchrun restarts what was killed, and passes a signal on to its workers, which are no forks here."""
    out = tmp_path / "out"
    job = ["--steps", "100000", "--save-every", "100000", "--die", "step:1:1"]
    launcher = ["--standalone", "--max-restarts", "1", "--nproc-per-node", "2", str(ROOT / "fixtures" / "train.py")]
    agent = start(told, 0, out, torchrun, [*launcher, *arguments(tmp_path / "run", *job)])
    wait_for(lambda: not agent.is_alive() or "\nstep 3 " in read(out), 60)
    agent.terminate()
    agent.join(60)
    stdout = out.read_text()
    assert len(set(re.findall(r"^step 1 .*", stdout, re.MULTILINE))) == 1
    assert len(re.findall(r"^step 1 ", stdout, re.MULTILINE)) == 2
    stopped = re.search(r"^stopped at step (\d+)", stdout, re.MULTILINE)
    assert stopped, out.with_name("out.err").read_text()[-3000:]
    verdict = dcptool.find_latest(tmp_path / "run").verdict
    assert (verdict.step, verdict.marker.writer) == (int(stopped[1]), "save")


def read(path: Path) -> str:
    """The text of a file, which need not be there yet."""
    return path.read_text() if path.exists() else ""


def test_dcptool_reads_the_run_as_torch_does(lived):
    step = lived.killed / "step_2"
    checkpoint = dcptool.open(step)
    state = {
        fqn: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for fqn, entry in checkpoint.tensors.items()
    }
    dcp.load(state, checkpoint_id=step, no_dist=True)
    for fqn, tensor in state.items():
        assert torch.equal(checkpoint.read_torch(fqn), tensor), fqn
    tensors = dcptool.summarize(step).checkpoints[0].tensors
    weight = next(tensor for tensor in tensors if "up.weight" in tensor.fqn)
    assert (str(weight.layout), weight.n_chunks) == ("Shard(0) ×4", 4)
    assert checkpoint.value("dl.rank3") == ({"rank": 3, "batches": 2},)


def test_a_lost_metadata_is_rebuilt_from_a_step_of_as_many_ranks(lived, tmp_path):
    """The last life saved two steps on 4 ranks; those of the lives before had 2 and 3."""
    path = Path(shutil.copytree(lived.folder / "step_8", tmp_path / "step_8"))
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    done = cli("rescue", path, "--like", lived.folder / "step_6", "--json")
    assert done.returncode == 0, done.stderr
    assert "_COMPLETE is of the lost metadata" in json.loads(done.stdout)["notes"][0]
    same_metadata((path / ".metadata").read_bytes(), data)
    assert cli("mark", path).returncode == 0
    assert cli("verify", "--deep", "--require-marker", path).returncode == 0
    (path / ".metadata").unlink()
    for other in sorted(lived.folder.glob("step_[1-5]")):
        refused = cli("rescue", path, "--like", other)
        assert refused.returncode == 3, other
    assert not (path / ".metadata").exists()


def test_the_last_good_step_is_resumed_from(run):
    done = cli("latest", run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'step_3'}\n")
    assert re.findall(r"^(step_\d) is (\S+): ", done.stderr, re.MULTILINE) == [("step_6", "in-progress")]
    age(run / "step_6")
    done = cli("latest", "--deep", run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'step_3'}\n")
    assert re.findall(r"^(step_\d) is incomplete: no \.metadata", done.stderr, re.MULTILINE) == ["step_6"]
    assert dcptool.verify(run / "step_3", load=True).good


def test_what_is_missing_from_the_broken_steps_is_named(run):
    done = cli("verify", run)
    assert done.returncode == 0  # they may still be in progress
    assert done.stdout.count("perhaps still being saved") >= 1
    age(run / "step_6")
    done = cli("verify", run)
    assert done.returncode == 1
    assert re.search(
        r"^step_6: incomplete\n  error: no \.metadata, only data files of ranks? [^:]+: the save never finished",
        done.stdout,
        re.MULTILINE,
    )
    assert "_SAVING is there and no _COMPLETE: a save began here and has not finished" in done.stdout
    assert done.stdout.endswith(f"newest complete step: {run / 'step_3'}\n")
    # A copy of step 3's metadata does not make step 6 whole: rank 1's file was cut when it was killed.
    shutil.copy(run / "step_3" / ".metadata", run / "step_6")
    age(run / "step_6")
    verdict = dcptool.verify(run / "step_6").verdicts[0]
    assert verdict.state.value == "incomplete"
    assert "__1_0.distcp" in [finding.file for finding in verdict.findings if finding.kind == "short-file"]
    refused = cli("mark", run / "step_6")
    assert refused.returncode == 3
    assert "step_6 is incomplete, not marked: __" in refused.stderr
    assert not (run / "step_6" / "_COMPLETE").exists()


def test_prune_keeps_the_good_one_and_what_is_being_written(run):
    before = {file.name: file.read_bytes() for file in (run / "step_3").iterdir()}
    done = cli("prune", run, "--keep", "1", "--yes")
    assert done.returncode == 0
    assert rows(done.stdout) == {
        "step_2": ("DELETE", "complete"),
        "step_3": ("keep", "complete"),
        "step_6": ("keep", "in-progress"),
    }
    assert left(run) == ["step_3", "step_6"]
    ask = ("prune", run, "--keep", "1", "--yes", "--include-incomplete", "--older-than", "0s")
    assert "nothing to delete" in cli(*ask).stdout
    age(run / "step_6")
    assert cli("prune", run, "--keep", "1", "--yes").returncode == 0
    assert left(run) == ["step_3", "step_6"]
    done = cli(*ask)
    assert done.returncode == 0
    assert [plan for plan, _ in rows(done.stdout).values()] == ["keep", "DELETE"]
    assert left(run) == ["step_3"]
    assert {file.name: file.read_bytes() for file in (run / "step_3").iterdir()} == before
    assert dcptool.verify(run / "step_3", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good


def test_marking_an_old_step_by_hand_hides_no_newer_one(run):
    for step in ("step_2", "step_3"):
        (run / step / "_COMPLETE").unlink()  # as a job that writes no markers leaves them
    age(run / "step_6")
    assert cli("mark", run / "step_2").returncode == 0
    assert cli("latest", run).stdout == f"{run / 'step_3'}\n"
    assert cli("latest", "--require-marker", run).stdout == f"{run / 'step_2'}\n"
    done = cli("prune", run, "--keep", "1", "--dry-run")
    assert rows(done.stdout)["step_3"] == ("keep", "complete")
