"""What `prune` plans and did, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcptool.checks.check import Level
from dcptool.ops.prune.archive import Archived
from dcptool.ops.prune.delete import Deleted
from dcptool.ops.prune.plan import PrunePlan
from dcptool.render.findings import finding_json, finding_lines
from dcptool.render.text import table
from dcptool.words import listed, nbytes, plural, shown

SCHEMA = 1


_CHECKED = {
    Level.METADATA: "metadata and sizes",
    Level.RECORDS: "the headers of every item (--deep: every byte)",
    Level.DEEP: "every byte",
}


def plan_text(plan: PrunePlan, proof: Level, finite: bool = False, looked: Archived | None = None) -> str:
    """Return the plan of `prune` as a table, with what is checked before anything is deleted.

    Args:
        plan: the plan.
        proof: how closely the newest step that is kept is looked at.
        finite: whether at its values, too.
        looked: what a dry run of `archive_steps` told.
    """
    headers, rows = ["step", "plan", "state", "bytes", "reason"], []
    copies = {step.name: _IN_ARCHIVE[step.state] for step in looked.steps} if looked else {}
    for one in plan.decisions:
        row = [
            shown(one.name),
            "keep" if one.keep else "DELETE",
            one.state.value,
            nbytes(one.nbytes),
            shown(one.reason),
        ]
        rows.append([row[0], copies.get(one.name, "–"), *row[1:]] if looked else row)
    shown_plan = table([headers[0], "archive", *headers[1:]] if looked else headers, rows, right=(4 if looked else 3,))
    blocks = [shown_plan, *(["\n".join(finding_lines(plan.notes, ""))] if plan.notes else [])]
    blocks += ["\n".join(_copy_lines(looked))] if looked else []
    if plan.removed and plan.newest:
        values = ", and that all values are finite" if finite else ""
        blocks.append(f"checked before anything is deleted: {_CHECKED[proof]} of {shown(plan.newest)}{values}")
    return "\n\n".join(blocks)


_IN_ARCHIVE = {"planned": "COPY", "copied": "copied", "there": "there", "left": "refused"}


def _copy_lines(looked: Archived) -> list[str]:
    """Return which steps are to be copied where, and which cannot be."""
    steps = [step for step in looked.steps if step.state == "planned"]
    lines = [f"{shown(name)} cannot be archived: {shown(reason)}" for name, reason in looked.left.items()]
    if not steps:
        return [*lines, f"nothing to copy to {shown(looked.path)}"]
    memory = f"the copies need up to {nbytes(max(step.memory_nbytes for step in steps))} of memory for parts of files"
    total = nbytes(sum(step.nbytes for step in steps))
    names = listed([shown(step.name) for step in steps], 3)
    return [*lines, f"to copy to {shown(looked.path)}: {plural(len(steps), 'step')}, {total}: {names}", memory]


def archived_lines(archived: Archived) -> Sequence[str]:
    """Return what was copied into the archive, and what was not."""
    lines = [f"{shown(name)} was not archived: {shown(reason)}" for name, reason in archived.left.items()]
    copied = [step for step in archived.steps if step.state == "copied"]
    there = sum(step.state == "there" for step in archived.steps)
    more = f", {there:,} there already" if there else ""
    total = nbytes(sum(step.nbytes for step in copied))
    return [*lines, f"archived {plural(len(copied), 'step')}, {total}{more}: {shown(archived.path)}"]


def _archive_json(archived: Archived | None) -> dict[str, Any] | None:
    if archived is None:
        return None
    kept = ("name", "path", "state", "nbytes", "kept_nbytes", "n_checked", "retries", "seconds", "reason")
    steps = [{field: getattr(step, field) for field in kept} for step in archived.steps]
    return {"path": archived.path, "good": archived.good, "steps": steps}


def plan_json(plan: PrunePlan, deleted: Deleted | None, archived: Archived | None = None) -> dict[str, Any]:
    """Return the plan of `prune`, and what came of it, as plain data."""
    refused = [{"name": name, "reason": reason} for name, reason in deleted.refused] if deleted else []
    return {
        "schema": SCHEMA,
        "run": plan.run,
        "notes": [finding_json(finding) for finding in plan.notes],
        "steps": [{**decision._asdict(), "state": decision.state.value} for decision in plan.decisions],
        "archive": _archive_json(archived),
        "deleted": deleted and {**deleted._asdict(), "refused": refused},
    }


def deleted_lines(deleted: Deleted) -> Sequence[str]:
    """Return what was deleted, and what was not after all."""
    lines = [f"{shown(name)} was not deleted: {shown(reason)}" for name, reason in deleted.refused]
    return [*lines, f"deleted {plural(len(deleted.names), 'step')}, {nbytes(deleted.nbytes)}"]
