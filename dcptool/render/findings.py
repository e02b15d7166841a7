"""Findings as text and as JSON, in one wording for all commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.words import plural, shown

MAX_ALIKE = 3
"""Findings of one kind that are shown one by one."""
EVERY_FIELD = Finding._fields


def finding_lines(findings: Iterable[Finding], indent: str = "  ") -> list[str]:
    """Return findings as lines; many alike are counted, not listed, and a next step is said once."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    lines = []
    for (severity, _), members in groups.items():
        lines += [f"{indent}{severity.value}: {indented(finding.message, indent)}" for finding in members[:MAX_ALIKE]]
        rest = members[MAX_ALIKE:]
        if rest:
            files, names = ({getattr(finding, field) for finding in rest} - {None} for field in ("file", "fqn"))
            where = f", in {plural(len(files), 'file')}" if files else ""
            where += f", of {plural(len(names), 'entry')}" if names else ""
            lines.append(f"{indent}  … and {len(rest):,} more like these{where}")
        steps = dict.fromkeys(finding.next_step for finding in members if finding.next_step)
        lines += [f"{indent}  {indented(step, indent)}" for step in steps]
    return lines


def indented(message: str, indent: str = "") -> str:
    """Return lines of a message with the second and later ones indented, so that none can pass for another."""
    return f"\n{indent}  ".join(shown(line.strip()) for line in message.splitlines())


def finding_json(finding: Finding, fields: Sequence[str] = EVERY_FIELD) -> dict[str, Any]:
    """Return a finding as plain data, with these of its fields."""
    every = {**finding._asdict(), "severity": finding.severity.value}
    return {name: every[name] for name in fields}
