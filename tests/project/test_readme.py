"""README and docs show what the tool really does: console and Python blocks are run, options are documented."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
EVERY = "\n".join((README, *PAGES.values()))
LOOP = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "CheckpointManager" in block)
BLOCKS = sorted(set(re.findall(r"```console\n\$ (.*?)\n(.*?)```", EVERY, re.DOTALL)))


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_console_blocks_are_real(commands, command, output):
    program, *arguments = shlex.split(command)
    assert program == "dcptool"
    assert without_ages(commands.run(*arguments).out) == without_ages(output)


def without_ages(text):
    """Text without what changes from day to day: how old files are, and the widths that follow from it."""
    return re.sub(r"[ -]{2,}", "  ", re.sub(r"\d+ (s|min|h|d)\b", "N d", text))


def test_python_blocks_run():
    for block in sorted(set(re.findall(r"```python\n(.*?)```", EVERY, re.DOTALL)) - {LOOP}):
        subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, capture_output=True)


def test_the_training_loop_goes_on_with_other_ranks(tmp_path):
    """By torchrun's agent on two ranks, then as one process without it."""
    from tests.forks import run_ranks, values
    from tests.launches import launch, script, told

    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "longer.py").write_text(LOOP.replace("STEPS, SAVE_EVERY = 10, 5", "STEPS, SAVE_EVERY = 13, 5"))
    out, longer = tmp_path / "out", tmp_path / "longer"
    assert values(run_ranks(0, told, out, launch, 2, 0, script, tmp_path, "loop.py")) == [0]
    values(run_ranks(0, told, longer, script, tmp_path, "longer.py"))
    assert re.findall(r"\S.*?beginning", out.read_text()) == ["from the beginning"] * 2  # ranks print at once
    assert longer.read_text().splitlines() == [f"resumed from {tmp_path}/ckpt/step_10"]
    assert sorted(path.parent.name for path in tmp_path.glob("ckpt/*/_COMPLETE")) == ["step_10", "step_13", "step_5"]


@pytest.mark.torchfree
def test_every_option_is_documented():
    from dcptool.cli import main

    for name, command in main.commands.items():
        section = README.partition(f"\n## dcptool {name}\n")[2].partition("\n## ")[0]
        page = re.search(r"\]\(docs/(\w+)\.md(?:#[\w-]+)?\)", section)
        assert page, f"README has no section on {name} that leads to its page"
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert f"`{option}" in PAGES[page[1]], option


@pytest.mark.torchfree
def test_links_between_the_pages_lead_somewhere():
    for folder, text in ((ROOT, README), *((ROOT / "docs", page) for page in PAGES.values())):
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (folder / path).resolve() if path else None
            assert target is None or target.exists(), link
            if anchor:
                headings = re.findall(r"(?m)^#+ (.+)$", (target.read_text() if target else text).lower())
                assert anchor in {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}, link


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
