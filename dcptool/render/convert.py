"""What a conversion did, or would do, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from dcptool.checkpoint.casting import Loss
from dcptool.checkpoint.families import grouped
from dcptool.ops.convert.convert import Conversion
from dcptool.render.findings import finding_json, finding_lines
from dcptool.render.text import table
from dcptool.words import are, cut_lines, listed, nbytes, plural, shown

SCHEMA = 1
MAX_NAMED = 5
MAX_LOST = 10


def left_out_lines(conversion: Conversion) -> list[str]:
    """Return what was left out or changed, for stderr."""
    notes = finding_lines(conversion.corrupt, "")
    lost = list(dict.fromkeys(finding.fqn for finding in conversion.corrupt if finding.fqn))
    if lost:
        notes.append(f"{are(len(lost), 'damaged entry')} left out: {_named(lost)}")
    if conversion.skipped:
        notes.append(f"note: {plural(len(conversion.skipped), 'object')} left out: {_named(conversion.skipped)}")
    if conversion.n_cast:
        notes.append(f"note: {plural(conversion.n_cast, 'tensor')} cast")
    return notes + lost_lines(conversion.lost)


def lost_lines(lost: Mapping[str, Loss]) -> list[str]:
    """Return what casts made of values, a line for each of the first tensors, for stderr."""
    if not lost:
        return []
    lines = [f"  {shown(fqn)}: {_lost(found)}" for fqn, found in lost.items()]
    total = reduce(Loss.plus, lost.values())
    head = f"warning: the cast lost values of {plural(len(lost), 'tensor')}: {_lost(total)}"
    return [head, *cut_lines(lines, MAX_LOST, more=" tensors", indent="  ")]


def _lost(found: Loss) -> str:
    counts = zip(found, ("infinite", "zero", "subnormal"), strict=True)
    return ", ".join(f"{count:,} became {what}" for count, what in counts if count)


def conversion_line(conversion: Conversion) -> str:
    """Return the line that ends a conversion."""
    rate = conversion.nbytes_out / max(conversion.seconds, 1e-9)
    sizes = f"{nbytes(conversion.nbytes_in)} in, {nbytes(conversion.nbytes_out)} out"
    counts = plural(conversion.n_tensors, "tensor")
    if conversion.n_objects:
        counts += f", {plural(conversion.n_objects, 'object')}"
    return f"{counts}, {sizes}, {conversion.seconds:.2f} s, {nbytes(int(rate))}/s: {shown(conversion.path)}"


def _named(fqns: Sequence[str]) -> str:
    return listed(list(map(shown, grouped(fqns))), MAX_NAMED, counted=False)


def plan_text(conversion: Conversion) -> str:
    """Return the plan of a dry run: the files with their sizes, and their sums."""
    rows = [[shown(name), f"{size:,}"] for name, size in conversion.files]
    total = sum(size for _, size in conversion.files)
    counts = f"{plural(conversion.n_tensors, 'tensor')}, {plural(conversion.n_objects, 'object')}"
    summary = f"{shown(conversion.path)} would be {nbytes(total)} in {plural(len(rows), 'file')}: {counts}"
    buffers = nbytes(conversion.memory_nbytes)
    if conversion.workers == 1:
        memory = f"the copy needs up to {buffers} of memory for its buffers"
    else:
        memory = f"{conversion.workers} processes would share the work, with up to {buffers} of memory in each"
    return f"{table(['file', 'bytes'], rows, right=(1,))}\n\n{summary}\n{memory}"


def conversion_json(conversion: Conversion) -> dict[str, Any]:
    """Return a conversion as plain data; the layout is documented in docs/json.md."""
    fields = conversion._asdict()
    fields["files"] = [{"name": name, "nbytes": size} for name, size in conversion.files]
    fields["corrupt"] = [finding_json(finding) for finding in conversion.corrupt]
    fields["lost"] = [{"fqn": fqn, **found._asdict()} for fqn, found in conversion.lost.items()]
    return {"schema": SCHEMA, **fields}
