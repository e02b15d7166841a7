"""What `dcptool inspect` does to a terminal of 80 and of 200 columns, and to a pipe; never an escape code."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

import dcptool
from dcptool.render.text import MIN_NAME_WIDTH
from tests.conftest import FOREIGN, ROOT

GOLDEN = ROOT / "tests" / "golden"


def environment(**extra: str) -> dict[str, str]:
    """The environment without what would settle the width, and with the package found from any folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | extra


def on_terminal(columns: int, *arguments: str, **extra: str) -> tuple[int, str]:
    """Exit code and what appears on a terminal that is so wide, standard error included."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-m", "dcptool", *arguments]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=FOREIGN, env=environment(**extra))
    os.close(slave)
    received = b""
    while True:
        try:
            data = os.read(master, 1 << 16)
        except OSError as error:  # how Linux says that the last process has closed it
            assert error.errno == errno.EIO
            break
        if not data:
            break
        received += data
    os.close(master)
    return process.wait(), received.decode().replace("\r\n", "\n")


def piped(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dcptool", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=FOREIGN, env=environment(**extra), check=False)


def rows_of(text: str, first_header: str) -> list[str]:
    """Lines of the table with that first header, without head and rule."""
    block = next(block for block in text.split("\n\n") if block.startswith(f"{first_header} "))
    return block.splitlines()[2:]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(("golden", "path"), [("plain", "xver_t2130"), ("megatron", "megatron_tp2/iter_0000010")])
def test_a_terminal_shows_the_text_of_its_width(golden, path, width):
    code, shown = on_terminal(width, "inspect", path)
    assert (code, shown) == (0, (GOLDEN / f"{golden}_{width}.txt").read_text())


@pytest.mark.parametrize("width", [80, 200])
def test_tables_fit_the_terminal_and_names_are_never_cut(width):
    _, shown = on_terminal(width, "inspect", "megatron_tp2/iter_0000010")
    checkpoint = dcptool.summarize(FOREIGN / "megatron_tp2/iter_0000010").checkpoints[0]
    names = {entry.fqn for entry in (*checkpoint.tensors, *checkpoint.objects)}
    lines = shown.splitlines()
    assert {name for name in names if any(line == name or line.startswith(f"{name} ") for line in lines)} == names
    for line in (*rows_of(shown, "group"), *rows_of(shown, "object")):
        assert len(line) <= width or line in names
    for line in rows_of(shown, "tensor"):  # names of up to MIN_NAME_WIDTH columns keep their place
        assert len(line) <= max(width, MIN_NAME_WIDTH + len("  float32  2×24×8   1.54 kB  stack(0) ×2, Shard(2) ×2"))
    on_a_line_of_its_own = "decoder.layers.self_attention.linear_proj.weight" in lines
    assert on_a_line_of_its_own == (width == 80)


def test_values_are_cut_to_the_terminal_with_an_ellipsis():
    start = "[[{'random_rng_state': ('py', 3), 'torch_rng_"
    for width in (80, 200):
        _, shown = on_terminal(width, "inspect", "megatron_tp2/iter_0000010")
        row = next(line for line in shown.splitlines() if line.startswith("rng_state/shard_0.0_1.2"))
        assert start in row
        assert (row[-1], len(row)) == ("…", width)


def test_columns_in_the_environment_win_over_the_terminal():
    assert on_terminal(200, "inspect", "xver_t2130", COLUMNS="80")[1] == (GOLDEN / "plain_80.txt").read_text()


@pytest.mark.torchfree
def test_a_pipe_gets_one_line_per_entry():
    done = piped("inspect", "megatron_tp2/iter_0000010")
    assert (done.returncode, done.stderr) == (0, "")
    checkpoint = dcptool.summarize(FOREIGN / "megatron_tp2/iter_0000010").checkpoints[0]
    tensors = rows_of(done.stdout, "tensor")
    assert [line.split()[0] for line in tensors] == [tensor.fqn for tensor in checkpoint.tensors]
    assert all(line.endswith(str(tensor.layout)) for line, tensor in zip(tensors, checkpoint.tensors, strict=True))
    objects = rows_of(done.stdout, "object")
    assert [line.split()[0] for line in objects] == [item.fqn for item in checkpoint.objects]
    assert max(map(len, objects)) > 200
    assert "…" not in done.stdout  # values are whole


COMMANDS = [
    ("inspect", "xver_t2130"),
    ("inspect", "xver_t2130", "--json"),
    ("inspect", "run_crashed"),
    ("inspect", "no such place"),
    ("inspect", "--no-such-option"),
    ("inspect", "--help"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments[1:]))
@pytest.mark.parametrize("extra", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}], ids=str)
def test_no_escape_code_reaches_a_terminal_or_a_pipe(arguments, extra):
    _, shown = on_terminal(80, *arguments, **extra)
    assert shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    if extra.get("NO_COLOR"):
        done = piped(*arguments, **extra)
        assert "\x1b" not in done.stdout + done.stderr
