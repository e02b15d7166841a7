"""What `prune` plans and did, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcptool.checks.check import Level
from dcptool.ops.prune.delete import Deleted
from dcptool.ops.prune.plan import PrunePlan
from dcptool.render.findings import finding_json, finding_lines
from dcptool.render.text import table
from dcptool.words import nbytes, plural, shown

SCHEMA = 1


_CHECKED = {
    Level.METADATA: "metadata and sizes",
    Level.RECORDS: "the headers of every item (--deep: every byte)",
    Level.DEEP: "every byte",
}


def plan_text(plan: PrunePlan, proof: Level, finite: bool = False) -> str:
    """Return the plan of `prune` as a table, with what is checked before anything is deleted."""
    rows = [
        [shown(d.name), "keep" if d.keep else "DELETE", d.state.value, nbytes(d.nbytes), shown(d.reason)]
        for d in plan.decisions
    ]
    shown_plan = table(["step", "plan", "state", "bytes", "reason"], rows, right=(3,))
    blocks = [shown_plan, *(["\n".join(finding_lines(plan.notes, ""))] if plan.notes else [])]
    if plan.removed and plan.newest:
        values = ", and that all values are finite" if finite else ""
        blocks.append(f"checked before anything is deleted: {_CHECKED[proof]} of {shown(plan.newest)}{values}")
    return "\n\n".join(blocks)


def plan_json(plan: PrunePlan, deleted: Deleted | None) -> dict[str, Any]:
    """Return the plan of `prune`, and what came of it, as plain data."""
    refused = [{"name": name, "reason": reason} for name, reason in deleted.refused] if deleted else []
    return {
        "schema": SCHEMA,
        "run": plan.run,
        "notes": [finding_json(finding) for finding in plan.notes],
        "steps": [{**decision._asdict(), "state": decision.state.value} for decision in plan.decisions],
        "deleted": deleted and {**deleted._asdict(), "refused": refused},
    }


def deleted_lines(deleted: Deleted) -> Sequence[str]:
    """Return what was deleted, and what was not after all."""
    lines = [f"{shown(name)} was not deleted: {shown(reason)}" for name, reason in deleted.refused]
    return [*lines, f"deleted {plural(len(deleted.names), 'step')}, {nbytes(deleted.nbytes)}"]
