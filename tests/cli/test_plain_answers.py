"""What a command says where it cannot do its work, or has nothing to say: exit codes, plain words, order."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import dcptool.cli  # noqa: F401 - its modules are patched
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State
from tests import damage
from tests.conftest import FOREIGN, run


def in_a_fork(function) -> str:
    """What a function prints in a process that is not root's; everything it needs is imported already."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.chdir("/")  # the tree that is tested may be in a folder of root's own
            os.setuid(65534)
            os.write(writer, str(function()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def open_to_all(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and len(folder.parts) > 2:
            folder.chmod(0o755)
    return tmp_path


needs_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root to become somebody else"
)


@needs_root
@pytest.mark.parametrize("command", ["verify", "inspect", "latest", "mark"])
def test_a_folder_that_cannot_be_read_is_no_wrong_usage(open_to_all, command):
    folder = open_to_all / "p3"
    folder.mkdir()
    run(command, FOREIGN / "w_nodist" if command != "mark" else folder)  # imported while it can be read
    (folder / "_COMPLETE").unlink(missing_ok=True)
    folder.chmod(0)
    text = in_a_fork(lambda: run(command, folder, cwd=Path("/")))
    assert "returncode=3" in text
    assert f"error: {folder}: permission denied; it needs read access, and its folders search access" in text
    assert "Usage" not in text


@needs_root
def test_a_marker_that_cannot_be_written_needs_write_access(open_to_all):
    folder = damage.copy(FOREIGN / "w_nodist", open_to_all / "c")
    run("mark", damage.copy(folder, open_to_all / "d"))
    text = in_a_fork(lambda: run("mark", folder, cwd=Path("/")))
    assert "returncode=3" in text
    assert f"error: {folder}/_COMPLETE: permission denied; its folder needs write access" in text


def test_several_runs_are_listed_in_one_wording(tmp_path):
    for name, n_steps in (("one", 1), ("two", 2)):
        for step in range(n_steps):
            damage.copy(FOREIGN / "w_nodist", tmp_path / name / f"step_{step + 1}")
    wanted = f"  {tmp_path}/one  (1 step)\n  {tmp_path}/two  (2 steps)\n"
    for command in (("latest",), ("verify",), ("prune", "--keep", "1", "--yes")):
        done = run(*command, tmp_path)
        assert f"holds 2 run directories; name one:\n{wanted}" in done.stdout + done.stderr, command


class TestDebug:
    def test_it_keeps_the_exit_code(self, tmp_path):
        plain = run("verify", tmp_path / "nothing")
        done = run("--debug", "verify", tmp_path / "nothing")
        assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (3, "")
        assert done.stderr.startswith("Traceback")
        assert done.stderr.endswith(plain.stderr)

    def test_a_bug_is_still_a_bug(self, monkeypatch):
        def broken(*_):
            raise ZeroDivisionError("oh")

        monkeypatch.setattr(sys.modules["dcptool.cli.interval"], "_mtbf", broken)
        done = run("--debug", "interval", "--save", "45s", "--mtbf", "3h")
        assert done.returncode == 70
        assert "in broken" in done.stderr
        assert "this is a bug in dcptool: ZeroDivisionError: oh\n  Report it with this traceback.\n" in done.stderr


def test_ctrl_c_is_told(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["dcptool.cli.interval"], "_mtbf", interrupted)
    done = run("interval", "--save", "45s", "--mtbf", "3h")
    assert (done.returncode, done.stderr.strip()) == (128 + signal.SIGINT, "interrupted")


def test_a_page_is_not_named_like_stdout(tmp_path):
    done = run("report", FOREIGN / "w_nodist", "-o", "-", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "-o names a file" in done.stderr
    assert not (tmp_path / "-").exists()


def test_findings_of_a_step_in_progress_are_sorted_too(tmp_path):
    folder = damage.copy(FOREIGN / "w_nodist", tmp_path / "step_1")
    (folder / ".metadata").unlink()
    os.utime(folder)
    for path in folder.iterdir():
        os.utime(path)
    found = judge(folder)
    assert found.state is State.IN_PROGRESS
    assert [finding.severity.value for finding in found.findings] == ["error", "warning"]
    assert found.reason.startswith("no metadata yet")


@pytest.mark.parametrize("command", [("verify",), ("latest",), ("inspect",), ("convert", "--to", "torch")])
def test_json_where_nothing_could_be_done(tmp_path, command):
    paths = [tmp_path / "nothing", *([tmp_path / "o.pt"] if command[0] == "convert" else [])]
    done = run(*command, "--json", *paths)
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    if command[0] == "inspect":
        assert json.loads(done.stdout)["errors"][0]["path"] == str(paths[0])
    else:
        assert done.stdout == ""
