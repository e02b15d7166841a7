"""What `latest` found, as text and as JSON."""

from __future__ import annotations

from typing import Any

from dcptool.ops.latest import Latest
from dcptool.ops.verify.verdict import State
from dcptool.render.findings import finding_json, indented
from dcptool.render.verify import verdict_json
from dcptool.words import shown

SCHEMA = 1


def latest_json(latest: Latest) -> dict[str, Any]:
    """Return the answer of `latest` as plain data."""
    return {
        "schema": SCHEMA,
        "run": latest.run,
        "path": latest.path,
        "step": latest.verdict.step if latest.verdict else None,
        "skipped": [verdict_json(verdict) for verdict in latest.skipped],
        "pointers": [finding_json(finding) for finding in latest.pointers],
        "order": [finding_json(finding) for finding in latest.order],
        "warnings": [finding_json(finding) for finding in latest.warnings],
        "problem": latest.problem or None,
    }


def latest_lines(latest: Latest) -> list[str]:
    """Return why newer steps were passed over, what is odd about the answer and wrong with pointers, for stderr."""
    if latest.problem:
        return [indented(latest.problem)]
    lines = []
    for verdict in latest.skipped:
        loud = "WARNING: " if verdict.state is State.UNMARKED else ""
        what = "not finite" if verdict.state is State.COMPLETE and verdict.not_finite else verdict.state.value
        lines.append(f"{loud}{shown(verdict.name)} is {what}: {shown(verdict.reason)}")
        steps = [f.next_step for f in verdict.findings if f.next_step and f.message == verdict.reason]
        lines += [f"  {shown(step)}" for step in steps[:1] if verdict.state is State.UNMARKED]
    answer = latest.verdict.name if latest.verdict else ""
    lines += [f"warning: {shown(answer)}: {shown(finding.message)}" for finding in latest.warnings]
    lines += [f"{finding.severity.value}: {shown(finding.message)}" for finding in latest.pointers]
    for finding in latest.order:
        lines += [f"WARNING: {shown(finding.message)}", f"  {finding.next_step}"]
    if latest.path is None:
        some = any(verdict.not_finite for verdict in latest.skipped)
        which, option = ("complete, finite", "--finite ") if some else ("complete", "")
        run = shown(latest.run)
        lines.append(f"{run} has no {which} step to resume from; see: dcptool verify {option}{run}")
    return lines
