"""Small run directories, made of one whole step of a real checkpoint; and short words for what commands say of them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import dcptool
from dcptool.checkpoint.kinds import Severity
from dcptool.checks.check import Level
from dcptool.ops.prune.delete import delete_steps
from dcptool.ops.prune.plan import plan_prune
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.verdict import State, Verdict, VerifyOptions
from tests.conftest import FOREIGN

GOOD = FOREIGN / "run_crashed" / "ckpt" / "step_100"
DAY = 86400.0
ASK = {"include_incomplete": True, "older_than": DAY}


def whole(path: Path) -> Path:
    """A whole step, written long ago, without a marker."""
    return Path(shutil.copytree(GOOD, path, ignore=shutil.ignore_patterns("COMPLETE")))


def steps(folder: Path, *names: str) -> Path:
    """A run directory with whole steps."""
    for name in names:
        whole(folder / name)
    return folder


def saved(step: Path, writer: str = "save") -> None:
    """Write the marker as a save does, or by hand."""
    dcptool.mark_complete(step)
    document = json.loads((step / "_COMPLETE").read_text())
    (step / "_COMPLETE").write_text(json.dumps({**document, "writer": writer}))


def crash(step: Path) -> None:
    """Leave a step as a job killed in its save does."""
    (step / ".metadata").unlink()


def latest(path, **options):
    return dcptool.find_latest(path, VerifyOptions(**options))


def names(verdicts) -> list[tuple[str, str]]:
    return [(verdict.name, verdict.state.value) for verdict in verdicts]


def kinds(found) -> set[str]:
    return {finding.kind for finding in found.findings if finding.severity is Severity.ERROR}


def verdict(name: str, state: State = State.COMPLETE, written: float = 0.0) -> Verdict:
    """A verdict that nobody had to read anything for."""
    from dcptool.checkpoint.steps import step_number
    from dcptool.checks.items import Tally

    return Verdict(
        f"run/{name}", name, step_number(name), state, None, (), (), 3, 100, written, Level.METADATA, Tally()
    )


def plan(verdicts, keep, **options) -> dict[str, bool]:
    return {decision.name: decision.keep for decision in plan_prune("run", verdicts, keep, **options).decisions}


def prune(folder: Path, keep: int = 1, **options) -> tuple[str, ...]:
    """Plan and delete; returns what was deleted."""
    return delete_steps(make_plan(folder, keep, now=time.time(), **options)).names
