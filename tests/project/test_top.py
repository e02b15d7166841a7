"""What lies at the top of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "CHANGELOG.md", "LICENSE", "README.md", "benchmarks", "constraints.txt", "dcptool", "docs", "fixtures", "ruff.toml",
    "setup.cfg", "setup.py", "tests", "build", "dist",
}  # fmt: skip


@pytest.mark.torchfree
def test_nothing_else_is_at_the_top():
    """An output that an example or a test leaves there would be committed some day."""
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.suffix != ".egg-info"}
    assert there <= ALLOWED
