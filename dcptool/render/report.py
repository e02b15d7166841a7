"""What `dcptool report` did, as text and as JSON."""

from __future__ import annotations

from typing import Any

from dcptool.ops.report.report import WrittenReport
from dcptool.words import nbytes, plural, shown

SCHEMA = 1


def report_line(done: WrittenReport) -> str:
    """Return the line that ends a report."""
    counts = ", ".join(
        [
            done.state.value,
            *([plural(done.n_errors, "error")] if done.n_errors else []),
            *([plural(done.n_warnings, "warning")] if done.n_warnings else []),
            plural(done.n_tensors, "tensor"),
            plural(done.n_chunks, "chunk"),
            plural(done.n_objects, "object"),
        ]
    )
    return f"{counts}; page of {nbytes(done.nbytes)}, {done.seconds:.2f} s: {shown(done.path)}"


def report_json(done: WrittenReport) -> dict[str, Any]:
    """Return what was written as plain data; the layout is documented in docs/json.md."""
    return {"schema": SCHEMA, **done._asdict(), "state": done.state.value, "good": done.good}
