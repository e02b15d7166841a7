"""What `verify` found, as text and as JSON."""

from __future__ import annotations

import time
from typing import Any

from dcptool.checkpoint.kinds import Severity
from dcptool.checks.check import Level
from dcptool.checks.side_files import SideFiles
from dcptool.formats.marker import Marker
from dcptool.ops.verify.verdict import ManifestReport, State, Verdict
from dcptool.ops.verify.verify import VerifyReport
from dcptool.render.findings import finding_json, finding_lines
from dcptool.render.text import table
from dcptool.runs.activity import CLOCKS_APART_SECONDS
from dcptool.words import fields_of, listed, nbytes, plural, shown, span

SCHEMA = 1
_ALSO = {
    Level.METADATA: "metadata and sizes; --records looks into every item, --deep reads every byte",
    Level.RECORDS: "the headers of every item; --deep reads every byte",
    Level.DEEP: "every byte",
}


def verify_text(report: VerifyReport, width: int) -> str:
    """Return the report on a checkpoint, or a table of steps and what is wrong with which."""
    if not report.is_run:
        return "\n\n".join(_verdict_text(verdict, report.finite) for verdict in report.verdicts)
    rows = [
        [
            shown(verdict.name),
            verdict.state.value,
            _marker_word(verdict.marker),
            f"{verdict.n_files:,}",
            nbytes(verdict.nbytes),
            age(verdict.written),
            *([_finite_words(verdict)] if report.finite else []),
        ]
        for verdict in report.verdicts
    ]
    used = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) + 4
    rows = [[*row, _worst(verdict, max(width - used, 40))] for row, verdict in zip(rows, report.verdicts, strict=True)]
    headers = [
        "step",
        "state",
        "marker",
        "files",
        "bytes",
        "age",
        *(["finite"] if report.finite else []),
        "worst finding",
    ]
    n_unread = sum(verdict.tally.n_unread for verdict in report.verdicts)
    unread = f"; {plural(n_unread, 'item')} could not be read" if n_unread else ""
    blocks = [
        f"{shown(report.path)} is a run directory with {plural(len(rows), 'step')}; checked: "
        f"{_ALSO[report.verdicts[0].level]}{', every value of tensors' if report.finite else ''}{unread}",
        table(headers, rows, right=(3, 4, 5)),
    ]
    for verdict in report.verdicts:
        found = [finding for finding in verdict.findings if finding.severity is not Severity.NOTE]
        if found:
            blocks.append("\n".join([f"{shown(verdict.name)}: {verdict.state.value}", *finding_lines(found)]))
    if report.notes:
        blocks.append("\n".join(finding_lines(report.notes, "")))
    return "\n\n".join([*blocks, _newest(report)])


def _newest(report: VerifyReport) -> str:
    complete = [verdict for verdict in report.verdicts if verdict.state is State.COMPLETE and not verdict.not_finite]
    resumable = [verdict for verdict in complete if verdict.resumable is not False]
    word = "complete, finite" if report.finite else "complete"
    if not complete:
        some = any(verdict.not_finite for verdict in report.verdicts)
        return f"no step is complete{' and finite' if some else ''}: nothing to resume from"
    if complete[-1:] == resumable[-1:]:
        return f"newest {word} step: {shown(complete[-1].path)}"
    newest = shown(complete[-1].path)
    if not resumable:
        return f"newest {word} step: {newest}; none has all that a resume needs"
    found = f"newest {word} step to resume from: {shown(resumable[-1].path)}"
    return f"{found}; {newest} is newer, and lacks what that needs"


def _finite_words(verdict: Verdict) -> str:
    if verdict.not_finite:
        return plural(len(verdict.not_finite), "tensor")
    return "–" if verdict.finite is None else "yes"


def _verdict_text(verdict: Verdict, finite: bool) -> str:
    facts = [["state", verdict.state.value]]
    if verdict.resume.framework:
        facts.append(["saved by", verdict.resume.framework])
    for part in verdict.parts:
        ranks = f", {plural(part.world_size, 'rank')}" if part.world_size else ""
        counts = f"{plural(part.n_tensors, 'tensor')}, {plural(part.n_objects, 'object')}"
        facts.append([shown(part.name) if part.name else "format", f"{shown(part.flavour)}{ranks}, {counts}"])
    facts.append(["files", f"{plural(verdict.n_files, 'file')}, {nbytes(verdict.nbytes)}"])
    if verdict.side_files.names:
        facts.append(["beside", _beside(verdict)])
    facts.append(["marker", _marker_text(verdict.marker)])
    facts.append(["checked", _checked(verdict)])
    if finite:
        facts.append(["finite", _finite_text(verdict)])
    label = max(len(name) for name, _ in facts) + 2
    lines = [shown(verdict.path), *(f"  {name:<{label}}{value}" for name, value in facts)]
    return "\n".join([*lines, *([""] if verdict.findings else []), *finding_lines(verdict.findings, "")])


def _finite_text(verdict: Verdict) -> str:
    if verdict.not_finite:
        return f"no: {listed([shown(name) for name in verdict.not_finite], 3)}"
    return "not known" if verdict.finite is None else "yes"


def _checked(verdict: Verdict) -> str:
    """Say what was checked; how many files were compared with which manifest, or would be at the level that does."""
    checked = _by_level(verdict)
    if not verdict.manifests:
        return checked
    if verdict.level < Level.DEEP:
        of = [f"{plural(one.n_files, 'file')} with {shown(one.name)}" for one in verdict.manifests]
        return (
            f"{checked}{' and' if checked.endswith('--deep reads every byte') else '; --deep'} compares {listed(of, 2)}"
        )
    return f"{checked}; {listed([_compared(one) for one in verdict.manifests], 2)}"


def _compared(manifest: ManifestReport) -> str:
    of = f" of {manifest.n_files:,}" if manifest.n_compared < manifest.n_files else ""
    return f"{plural(manifest.n_compared, 'file')}{of} by {shown(manifest.name)}"


def _by_level(verdict: Verdict) -> str:
    tally = verdict.tally
    if verdict.level is Level.METADATA:
        return _ALSO[verdict.level]
    if not verdict.parts and verdict.side_files.names:
        return "zip directories and pickles" if verdict.level is Level.RECORDS else "every byte that has a checksum"
    items = plural(tally.n_items, "item")
    unread = f"{plural(tally.n_unread, 'item')} could not be read" if tally.n_unread else ""
    if unread and not tally.n_items:
        return f"nothing: {unread}"
    unread = f"; {unread}" if unread else ""
    if verdict.level is Level.RECORDS:
        return f"the headers of {items}{unread}; --deep reads every byte"
    unsure = f", {tally.n_unverifiable:,} of them without checksums" if tally.n_unverifiable else ""
    return f"every byte of {items}, {nbytes(tally.nbytes)}{unsure}{unread}"


def _beside(verdict: Verdict) -> str:
    side = verdict.side_files
    return shown(listed(side.names, 3)) + (f"; {uncheckable(side)}" if side.n_unproven else "")


def uncheckable(side: SideFiles) -> str:
    """Say how many files beside a checkpoint nothing tells anything of: `3 files, 2 kB, hold nothing …`."""
    verb = "holds" if side.n_unproven == 1 else "hold"
    return f"{plural(side.n_unproven, 'file')}, {nbytes(side.unproven_nbytes)}, {verb} nothing that can be checked"


def _marker_word(marker: Marker | None) -> str:
    return "–" if marker is None else marker.writer or shown(marker.name)


def _marker_text(marker: Marker | None) -> str:
    if marker is None:
        return "none"
    if marker.writer is None:
        return f"{shown(marker.name)} (another software's; it says no more than that it is there)"
    sums = ", with checksums" if marker.sha256 else ""
    return f"{shown(marker.name)} by {marker.writer}, {shown(str(marker.created))}{sums}"


def _worst(verdict: Verdict, room: int) -> str:
    reason = shown(verdict.reason) if verdict.reason else ""
    return reason if len(reason) <= room else reason[: room - 1] + "…"


def age(written: float | None) -> str:
    """Return how long ago something was written, in its largest unit: `5 min`, `3 h`, `12 d`; `in 2 h` of a future."""
    if written is None:
        return "?"
    seconds = time.time() - written
    return f"in {span(-seconds)}" if seconds < -CLOCKS_APART_SECONDS else span(max(seconds, 0))


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """Return the report as plain data; the layout is documented in docs/json.md and numbered by "schema"."""
    return {
        "schema": SCHEMA,
        "path": report.path,
        "run": report.is_run,
        "good": report.good,
        "checkpoints": [verdict_json(verdict) for verdict in report.verdicts],
        "notes": [finding_json(finding) for finding in report.notes],
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data."""
    return {
        **fields_of(verdict, "path", "name", "step"),
        "state": verdict.state.value,
        "level": verdict.level.name.lower(),
        "marker": None if verdict.marker is None else _marker_json(verdict.marker),
        "framework": verdict.resume.framework or None,
        "resumable": verdict.resumable,
        "lacks": list(verdict.resume.lacks),
        "parts": [part._asdict() for part in verdict.parts],
        "side_files": {
            "names": list(verdict.side_files.names),
            "n_unproven": verdict.side_files.n_unproven,
            "unproven_nbytes": verdict.side_files.unproven_nbytes,
        },
        "manifests": [manifest._asdict() for manifest in verdict.manifests],
        **fields_of(verdict, "n_files", "nbytes", "written", "finite"),
        "not_finite": list(verdict.not_finite),
        "checked": verdict.tally._asdict(),
        "findings": [finding_json(finding) for finding in verdict.findings],
    }


def _marker_json(marker: Marker) -> dict[str, Any]:
    named = ("name", "writer", "step", "number", "resumed_from", "created", "world_size")
    return {
        **fields_of(marker, *named, "save_seconds", "blocked_seconds", "save_id"),
        "checksums": bool(marker.sha256),
    }
