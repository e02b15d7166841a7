"""Conversions that several processes share: byte for byte what one makes, one error, and nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import fsspec
import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from dcptool.errors import DcptoolError, LayoutError  # noqa: E402
from dcptool.ops.convert.convert import convert_together  # noqa: E402
from tests.commands import HURRY, wait_for  # noqa: E402
from tests.damage import flip_byte  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 2
TO = {"dcp": [], "safetensors": ["--max-shard-size", "3kB"]}
SLOW = """
import os, time
from dcptool.storage import local
from dcptool.ops.convert import member
real_write, write = member._write, local.LocalSink.write
def told(rank, *rest):
    global RANK
    RANK = rank
    open(f"{flags}/{{rank}}.tmp", "w").write(str(os.getpid()))
    os.rename(f"{flags}/{{rank}}.tmp", f"{flags}/{{rank}}")
    return real_write(rank, *rest)
def slow(self, data):
    act()
    return write(self, data)
def act():
    time.sleep(0.02)
member._write, local.LocalSink.write = told, slow
"""


def save_source(folder: Path) -> Path:
    """Five ranks with sharded tensors of other sizes, objects of all and of single ranks, and a file beside."""
    whole = {f"layers.{at}.weight": torch.arange(60.0 * (at + 1)).reshape(-1, 6) + at for at in range(20)}
    states = [
        {
            **{name: Shard.of(tensor, rank, 5) for name, tensor in whole.items()},
            "bias": torch.ones(7),
            "step": 7,
            f"dl.rank{rank}": {"position": rank, "x": torch.arange(3) + rank},
        }
        for rank in range(5)
    ]
    path = save(folder / "run" / "step_7", *states)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def source(once) -> Path:
    return once("source_of_conversions", save_source)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but those that name the save and its time."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".metadata", "_COMPLETE")}


def started(rank, port):
    """Be a process that torchrun started."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def command(rank, out, port, arguments):
    from dcptool.cli import main
    from tests.launches import told

    started(rank, port)

    def call():
        try:
            return main(list(map(str, arguments)))
        except SystemExit as ended:
            return ended.code

    return told(0, out.with_name(f"{out.name}{rank}"), call)


def under_torchrun(folder, *arguments):
    """Run a command as SIZE processes of torchrun; return exit codes, outputs and errors by rank."""
    codes = values(run_ranks(SIZE, command, folder / "told", free_port(), arguments, group=False))
    texts = [[Path(folder, f"told{rank}{end}").read_text() for rank in range(SIZE)] for end in ("", ".err")]
    return codes, *texts


@pytest.mark.parametrize("to", list(TO))
def test_any_number_of_processes_writes_the_same_bytes(commands, source, tmp_path, to):
    alone = tmp_path / "alone" / "step_7"
    assert commands.run("convert", "--to", to, *TO[to], source, alone).code == 0
    expected = contents(alone)
    assert len(expected) > 4
    for workers in (2, 4, 8):
        target = tmp_path / f"of{workers}" / "step_7"
        done = commands.run("convert", "--to", to, *TO[to], "--workers", workers, "--check", source, target)
        assert done.code == 0, done.err
        assert contents(target) == expected
        assert dcptool.compare(source, target).equal
        assert [path.name for path in target.parent.iterdir()] == ["step_7"]
        assert dcptool.verify(target, dcptool.VerifyOptions(level=dcptool.Level.DEEP, require_marker=to == "dcp")).good
    idle = "note: 5 files are written by as many processes: the others of 8 had nothing to do" in done.err
    assert idle is (to == "dcp")


@pytest.mark.parametrize("to", list(TO))
def test_two_processes_of_torchrun(source, tmp_path, to):
    assert dcptool.convert(source, tmp_path / "alone", to, dcptool.ConvertOptions(max_shard_nbytes=3000)).published
    target = tmp_path / "shared" / "step_7"
    codes, out, _ = under_torchrun(tmp_path, "convert", "--to", to, *TO[to], source, target)
    assert codes == [0, 0]
    assert re.match(r"26 tensors,.*/shared/step_7\n$", out[0])
    assert out[1] == ""
    assert contents(target) == contents(tmp_path / "alone")


def test_one_file_is_written_by_one_process(source, tmp_path, commands):
    alone = tmp_path / "alone.pt"
    dcptool.convert(source, alone, "torch")
    codes, out, err = under_torchrun(tmp_path, "convert", "--to", "torch", source, tmp_path / "out.pt")
    assert (codes, out[1]) == ([0, 0], "")
    assert "note: one file is written by one process: the others of 2 had nothing to do" in err[0]
    assert (tmp_path / "out.pt").read_bytes() == alone.read_bytes()
    for to, name in (("torch", "w.pt"), ("safetensors", "w.safetensors")):
        done = commands.run("convert", "--to", to, "--workers", 2, source, tmp_path / name)
        assert done.code == 3
        assert done.err == f"error: {tmp_path / name} is one file, which one process writes: leave out --workers\n"
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("file", ["__0_0.distcp", "__4_0.distcp"])
def test_damage_is_told_once_wherever_it_is(source, tmp_path, commands, file):
    damaged = Path(shutil.copytree(source, tmp_path / "step_7"))
    at = dcptool.open(damaged).tensors["layers.19.weight"].chunks[int(file[2])].item
    flip_byte(damaged / file, at.byte_offset + at.nbytes // 2)
    target = tmp_path / "out" / "step_7"
    done = commands.run("convert", "--to", "dcp", "--workers", 3, damaged, target)
    assert done.code == 3
    alone = commands.run("convert", "--to", "dcp", damaged, target)
    assert done.err == alone.err
    assert "'layers.19.weight'" in done.err
    codes, out, err = under_torchrun(tmp_path, "convert", "--to", "dcp", damaged, target)
    assert (codes, out, err) == ([3, 3], ["", ""], [alone.err, ""])
    assert not list(target.parent.iterdir())


def test_what_is_damaged_is_left_out_by_all(source, tmp_path, commands):
    damaged = Path(shutil.copytree(source, tmp_path / "step_7"))
    at = dcptool.open(damaged).tensors["layers.3.weight"].chunks[2].item
    flip_byte(damaged / at.file, at.byte_offset + at.nbytes // 2)
    arguments = ["--to", "safetensors", *TO["safetensors"], "--skip-corrupt", damaged]
    assert commands.run("convert", *arguments, tmp_path / "alone").code == 1
    assert commands.run("convert", *arguments, "--workers", 3, tmp_path / "shared").code == 1
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_is_killed(commands, source, tmp_path, rank):
    flags, target = tmp_path / "flags", tmp_path / "out" / "step_7"
    flags.mkdir()
    code = HURRY + SLOW.format(flags=flags)
    running = commands.start("convert", "--to", "dcp", "--workers", 2, source, target, code=code)
    wait_for(lambda: all((flags / str(one)).exists() for one in range(2)))
    running.children()
    began = time.monotonic()
    os.kill(int((flags / str(rank)).read_text()), signal.SIGKILL)
    done = running.wait()
    assert (done.code, done.out) == (3, "")
    assert re.fullmatch(
        rf"error: rank {rank} of 2 was killed by SIGKILL \(out of memory\?.*\); nothing was published\n", done.err
    )
    assert time.monotonic() - began < 15
    wait_for(lambda: not running.left(), 10)
    assert not list(target.parent.iterdir())


def test_a_full_disk_and_a_bug_on_one_process(commands, source, tmp_path):
    flags, target = tmp_path / "flags", tmp_path / "out" / "step_7"
    flags.mkdir()
    cases = [
        ('raise local.StorageError("/x: No space left on device")', 3, "error: rank 1 of 2: /x: No space left on dev"),
        ("1 // 0", 70, "error: rank 1 of 2 failed, this is a bug in dcptool: ZeroDivisionError"),
        ("raise MemoryError", 3, "error: rank 1 of 2 has no memory left; --threads 1 and fewer --workers need less"),
    ]
    for what, exit_code, message in cases:
        code = HURRY + SLOW.format(flags=flags) + f"\ndef act():\n    if RANK == 1:\n        {what}\n"
        done = commands.run("convert", "--to", "dcp", "--workers", 2, source, target, code=code)
        assert done.code == exit_code
        assert done.err.startswith(message)
        assert done.err.count("error:") == 1
        assert not list(target.parent.iterdir())


def lost_at_torchrun(rank, folder, port, source):
    """Rank 1 is gone in the middle of its share."""
    from dcptool.groups import group
    from dcptool.ops.convert import member

    group.BEAT_SECONDS = 0.2
    write = member._write

    def last(own, *rest):
        if own == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(own, *rest)

    member._write = last
    started(rank, port)
    options = dcptool.ConvertOptions(timeout=3.0)
    try:
        convert_together(str(source), str(folder / "out" / "step_7"), "dcp", options)
    except DcptoolError as error:
        return str(error)
    return "it went well"


def test_a_process_of_torchrun_is_lost(source, tmp_path):
    began = time.monotonic()
    found = run_ranks(SIZE, lost_at_torchrun, tmp_path, free_port(), source, group=False)
    assert "rank 1 of 2 gave no sign of life for 3 s" in found[0].value
    assert found[1].code == -signal.SIGKILL
    assert time.monotonic() - began < 30
    assert not list((tmp_path / "out").iterdir())


def test_the_plan_says_how_many_share_it(commands, source, tmp_path):
    done = commands.run("convert", "--to", "dcp", "--workers", 3, "--dry-run", source, tmp_path / "out")
    assert done.code == 0
    assert re.search(r"\n3 processes would share the work, with up to [\d.]+ MB of memory in each\n$", done.out)
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_together(commands, source, tmp_path):
    done = commands.run("convert", "--to", "dcp", "--timeout", "1s", source, tmp_path / "out")
    assert (done.code, "--timeout must be at least 2s" in done.err) == (2, True)
    with pytest.raises(LayoutError, match="at least 2s"):
        dcptool.convert(source, tmp_path / "out", "dcp", dcptool.ConvertOptions(timeout=1.0))
    codes, _, err = under_torchrun(
        tmp_path, "convert", "--to", "torch", "--engine", "torch", "--trust", source, tmp_path / "out.pt"
    )
    assert codes == [2, 2]
    assert "--engine torch is one process: not under torchrun" in err[0]


def in_store(url: str) -> list[str]:
    filesystem, base = fsspec.url_to_fs(url)
    filesystem.invalidate_cache()
    return filesystem.find(base) if filesystem.exists(base) else []


@pytest.mark.parametrize("to", list(TO))
def test_to_an_object_store_and_back(commands, source, s3_url, tmp_path, to):
    there, back = f"{s3_url}/{to}/step_7", tmp_path / "step_7"
    for here, target in ((source, there), (there, back)):
        done = commands.run("convert", "--to", to, *TO[to], "--workers", 3, here, target)
        assert done.code == 0, done.err
    assert dcptool.compare(source, back).equal
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    if to == "dcp":
        assert dcptool.verify(there).good


@pytest.mark.parametrize("how", ["damaged", "killed"])
def test_nothing_is_left_in_a_store(commands, source, s3_url, tmp_path, how):
    flags, target = tmp_path / "flags", f"{s3_url}/step_7"
    flags.mkdir()
    here = Path(shutil.copytree(source, tmp_path / "step_7"))
    if how == "damaged":
        at = dcptool.open(here).tensors["layers.19.weight"].chunks[1].item
        flip_byte(here / at.file, at.byte_offset + at.nbytes // 2)
    held = """
from dcptool.storage import remote
finish = remote.RemoteSink.finish
def finished(self):
    finish(self)
    open(f"{flags}/done", "w").close()
    while not {go} and RANK == 1:
        time.sleep(0.02)
remote.RemoteSink.finish = finished
""".format(flags=flags, go=how == "damaged")
    code = HURRY + SLOW.format(flags=flags) + held
    running = commands.start("convert", "--to", "dcp", "--workers", 2, here, target, code=code)
    if how == "killed":
        wait_for(lambda: (flags / "done").exists() and (flags / "1").exists())
        os.kill(int((flags / "1").read_text()), signal.SIGKILL)
    done = running.wait()
    assert (done.code, done.err.count("error:")) == (3, 1)
    assert in_store(s3_url) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_run_to_one_place_removes_nothing_of_the_first(commands, source, s3_url, workers):
    """Both have looked before either had written."""
    target = f"{s3_url}/step_7"
    assert commands.run("convert", "--to", "dcp", source, target).code == 0
    before = in_store(s3_url)
    blind = "from dcptool.copying import publishing\npublishing._require_nothing_there = lambda path: None\n"
    second = commands.run("convert", "--to", "dcp", "--workers", workers, source, target, code=blind)
    assert second.code == 3
    assert "is there already" in second.err
    assert in_store(s3_url) == before
