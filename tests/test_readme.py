"""README shows what the tool really does: every console block is run, every Python block works, help is documented."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```console\n\$ (.*?)\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_console_blocks_are_real(command, output):
    program, *arguments = shlex.split(command)
    assert program == "dcptool"
    done = subprocess.run(
        [sys.executable, "-m", "dcptool", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        check=False,
    )
    assert without_ages(done.stdout) == without_ages(output)


def without_ages(text):
    """Text without what changes from day to day: how old files are, and the widths that follow from it."""
    return re.sub(r"[ -]{2,}", "  ", re.sub(r"\d+ (s|min|h|d)\b", "N d", text))


def test_python_blocks_run():
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.torchfree
def test_every_option_is_documented():
    from dcptool.cli import main

    for name, command in main.commands.items():
        assert f"## dcptool {name}" in README
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert f"`{option}" in README, option


def test_completion_works():
    environment = {
        **os.environ,
        "_DCPTOOL_COMPLETE": "bash_complete",
        "COMP_WORDS": "dcptool inspect --",
        "COMP_CWORD": "2",
    }
    command = [sys.executable, "-m", "dcptool"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert "plain,--chunks" in done.stdout
