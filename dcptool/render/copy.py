"""What a copy did, or would do, as text and as JSON."""

from __future__ import annotations

from typing import Any

from dcptool.ops.copy.copy import StepCopies
from dcptool.ops.copy.step import StepCopy
from dcptool.render.text import table
from dcptool.words import nbytes, plural, shown

SCHEMA = 1


def notes(report: StepCopies) -> list[str]:
    """Return what is worth knowing, for stderr."""
    return [note for step in report.steps for note in step.notes]


def copy_text(report: StepCopies) -> str:
    """Return what was copied: a line for a step, a table for a run."""
    if not report.is_run:
        return step_line(report.steps[0])
    return f"{_table(report)}\n\n{_summary(report, 'copied')}"


def step_line(step: StepCopy) -> str:
    """Return the line that ends the copy of one step."""
    if step.state == "there":
        return f"{shown(step.path)}: there already, the same step with a checksum of every file"
    moved = step.nbytes - step.kept_nbytes
    rate = nbytes(int(moved / max(step.seconds, 1e-9)))
    kept = f" ({nbytes(step.kept_nbytes)} of it were there)" if step.kept_nbytes else ""
    counts = f"{plural(len(step.files), 'file')}, {nbytes(step.nbytes)}{kept}, {_proof(step)}"
    return f"{counts}, {step.seconds:.2f} s, {rate}/s: {shown(step.path)}"


def _proof(step: StepCopy) -> str:
    compared = f"{plural(step.n_checked, 'CRC32')} right"
    return f"{compared}, {plural(step.n_claimed, 'file')} as vouched for" if step.n_claimed else compared


def plan_text(report: StepCopies) -> str:
    """Return the plan of a dry run: of a step its files, of a run its steps."""
    if report.is_run:
        return f"{_table(report)}\n\n{_summary(report, 'planned')}\n{_memory(report)}"
    step = report.steps[0]
    if step.state == "there":
        return step_line(step)
    rows = [[shown(name), f"{size:,}"] for name, size in step.files]
    summary = f"{shown(step.path)} would be {nbytes(step.nbytes)} in {plural(len(rows), 'file')}, and a marker"
    return f"{table(['file', 'bytes'], rows, right=(1,))}\n\n{summary}\n{_memory(report)}"


def _memory(report: StepCopies) -> str:
    return (
        f"the copy needs up to {nbytes(max(step.memory_nbytes for step in report.steps))} of memory for parts of files"
    )


def _table(report: StepCopies) -> str:
    rows = [
        [shown(step.name), step.state, nbytes(step.nbytes) if step.nbytes else "–", shown(step.reason or "–")]
        for step in report.steps
    ]
    return table(["step", "copy", "bytes", "reason"], rows, right=(2,))


def _summary(report: StepCopies, state: str) -> str:
    steps = [step for step in report.steps if step.state == state]
    total = sum(step.nbytes for step in steps)
    counts = [f"{plural(len(steps), 'step')} {state}, {nbytes(total)}"]
    for other, words in (("there", "there already"), ("left", "left")):
        count = sum(step.state == other for step in report.steps)
        counts += [f"{count:,} {words}"] if count else []
    if state == "copied":
        counts.append(f"{report.seconds:.2f} s, {nbytes(int(report.nbytes / max(report.seconds, 1e-9)))}/s")
    return f"{', '.join(counts)}: {shown(report.path)}"


def copy_json(report: StepCopies) -> dict[str, Any]:
    """Return a copy as plain data; the layout is documented in docs/json.md."""
    steps = []
    for step in report.steps:
        files = [{"name": name, "nbytes": size} for name, size in step.files]
        steps.append({**step._asdict(), "files": files, "notes": list(step.notes)})
    fields = {"source": report.source, "path": report.path, "is_run": report.is_run, "good": report.good}
    return {"schema": SCHEMA, **fields, "seconds": report.seconds, "steps": steps}
