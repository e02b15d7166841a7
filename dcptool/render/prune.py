"""What `prune` plans and did, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcptool.ops.prune import Deleted, PrunePlan
from dcptool.render.findings import finding_json, finding_lines
from dcptool.render.text import table
from dcptool.words import nbytes, plural, shown

SCHEMA = 1


def plan_text(plan: PrunePlan) -> str:
    """Return the plan of `prune` as a table."""
    rows = [
        [shown(d.name), "keep" if d.keep else "DELETE", d.state.value, nbytes(d.nbytes), shown(d.reason)]
        for d in plan.decisions
    ]
    shown_plan = table(["step", "plan", "state", "bytes", "reason"], rows, right=(3,))
    return "\n\n".join([shown_plan, *(["\n".join(finding_lines(plan.notes, ""))] if plan.notes else [])])


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
