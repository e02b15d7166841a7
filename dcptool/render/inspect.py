"""A `Summary` as the text that `dcptool inspect` prints."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dcptool.ops.inspect.inspect import Summary
from dcptool.ops.inspect.summary import CheckpointSummary, ObjectSummary, TensorSummary, corner_sizes
from dcptool.pickles import plain
from dcptool.render.findings import finding_lines, indented
from dcptool.render.folding import Fold, fold
from dcptool.render.text import MIN_NAME_WIDTH, column_width, table
from dcptool.words import cut_lines, nbytes, plural, shown, value

if TYPE_CHECKING:
    from dcptool.ops.inspect.stats import StatsReport

MAX_SHOWN_PROBLEMS = 10
MAX_VALUE_CHARS = 100_000
FOLD_ABOVE = 40
"""Tables with more rows fold those that differ only in numbers in their names."""


def to_text(summary: Summary, width: int, by_file: bool = False, values: bool = False) -> str:
    """Return the report for a terminal of `width` columns; names are never cut, values may be.

    With `by_file` the files take the place of tensors and objects, with `values` their values, with statistics these;
    tensors whose chunks were asked for stay all the same.
    """
    blocks = [_run_text(summary)] if summary.steps else []
    count = len(summary.checkpoints) + len(summary.errors)
    if count > 1:
        blocks.append(f"{shown(summary.path)} holds {count} checkpoints; name one to see its tensors and objects")
    elif not summary.steps and summary.checkpoints[0].path != summary.path:
        blocks.append(f"{shown(summary.path)} holds one checkpoint:")
    blocks += ["\n".join(finding_lines(summary.notes, ""))] if not summary.steps else []
    in_full = count == 1 and not (by_file or values or summary.stats)
    reports = summary.stats or (None,) * len(summary.checkpoints)
    for checkpoint, report in zip(summary.checkpoints, reports, strict=True):
        blocks.append(_checkpoint_text(checkpoint, report))
        blocks += [_files_text(checkpoint)] if by_file else []
        blocks += [_values_text(checkpoint)] if values else []
        blocks += [_stats_text(report, width)] if report else []
        has_chunks = any(tensor.chunks is not None for tensor in checkpoint.tensors)
        blocks += [_tensors_text(checkpoint, width)] if in_full or has_chunks else []
        blocks += [_objects_text(checkpoint, width)] if in_full else []
    blocks += [f"error: {indented(message)}" for _, message in summary.errors]
    if summary.others:
        blocks.append("\n".join(["also here:", *(f"  dcptool inspect {_quoted(path)}" for path in summary.others)]))
    return "\n\n".join(block for block in blocks if block)


def _run_text(summary: Summary) -> str:
    rows = []
    for step in summary.steps:
        ranks = str(step.world_size) if step.world_size else "?"
        entries = f"{step.n_entries:,}" if step.n_entries is not None else "?"
        rows.append([shown(step.name), step.state.value, ranks, entries, f"{step.n_files:,}", nbytes(step.nbytes)])
    blocks = [
        f"{shown(summary.path)} is a run directory with {plural(len(rows), 'step')}",
        table(["step", "state", "ranks", "entries", "files", "bytes"], rows, right=(2, 3, 4, 5)),
        "\n".join(f"{shown(step.name)}: {shown(step.reason)}" for step in summary.steps if step.reason),
        "\n".join(finding_lines(summary.notes, "")),
    ]
    complete = [step.name for step in summary.steps if step.state.value == "complete"]
    opening = [step.name for step in summary.steps if step.n_entries is not None]
    if complete and complete[-1] not in opening:
        blocks.append(f"newest complete step: {shown(complete[-1])}; dcptool reads no tensor of it")
    elif complete:
        blocks.append(f"newest complete step: dcptool inspect {_quoted(os.path.join(summary.path, complete[-1]))}")
    elif opening:
        path = _quoted(os.path.join(summary.path, opening[-1]))
        blocks.append(f"no complete step; the newest that opens: dcptool inspect {path}")
    else:
        blocks.append("no complete step, and none that opens")
    return "\n\n".join(block for block in blocks if block)


def _quoted(path: str) -> str:
    import shlex

    return shown(shlex.quote(path))


def _checkpoint_text(checkpoint: CheckpointSummary, report: StatsReport | None) -> str:
    evidence = f" ({'; '.join(map(shown, checkpoint.evidence))})" if checkpoint.evidence else ""
    size = str(checkpoint.world_size) if checkpoint.world_size else "unknown"
    tensors = [tensor for tensor in checkpoint.tensors if not tensor.inside]
    total = sum(tensor.nbytes for tensor in tensors)
    n_files = sum(file.nbytes is not None for file in checkpoint.files)
    n_shown = len(tensors) + len(checkpoint.objects)
    selected = "" if n_shown == checkpoint.n_entries else f" (selected from {plural(checkpoint.n_entries, 'entry')})"
    facts = [
        ["format", shown(checkpoint.flavour) + evidence],
        ["state", checkpoint.state + _state_hint(checkpoint, report)],
        *([["world size", size]] if checkpoint.world_size or checkpoint.saved_by_ranks else []),
        ["files", f"{plural(n_files, 'file')}, {nbytes(checkpoint.nbytes)}"],
        [
            "content",
            f"{plural(len(tensors), 'tensor')} of {nbytes(total)}, "
            f"{plural(len(checkpoint.objects), 'object')}{selected}",
        ],
    ]
    label = max(len(name) for name, _ in facts) + 2
    blocks = [
        "\n".join([shown(checkpoint.path), *(f"  {name:<{label}}{text}" for name, text in facts)]),
        _problems_text(checkpoint),
        _groups_text(checkpoint),
    ]
    return "\n\n".join(block for block in blocks if block)


def _state_hint(checkpoint: CheckpointSummary, report: StatsReport | None) -> str:
    if checkpoint.state not in ("complete", "other"):
        return ""
    checked = "contents not checked"
    if checkpoint.state == "other":
        checked = "what is said below could not be read"
    elif report:
        n_read = sum(tensor.n_values > 0 for tensor in report.tensors)
        checked = "the tensors below read, no CRC32 wrong"
        if n_read and report.n_unproven >= n_read:
            checked = "the tensors below read; stored without checksums"
        elif report.n_unproven:
            checked += f"; {report.n_unproven:,} of {n_read:,} stored without"
    return f" (all files there and long enough; {checked})"


def _problems_text(checkpoint: CheckpointSummary) -> str:
    lines = []
    problems = checkpoint.problems[:MAX_SHOWN_PROBLEMS]
    for problem, following in zip_longest(problems, problems[1:]):
        said_again = following is not None and following.next_step == problem.next_step
        step = f"\n  {problem.next_step}" if problem.next_step and not said_again else ""
        lines.append(f"{problem.severity.value}: {indented(problem.message)}{step}")
    count = len(checkpoint.problems)
    return "\n".join(cut_lines(lines, MAX_SHOWN_PROBLEMS, count, "; --json lists all"))


def _groups_text(checkpoint: CheckpointSummary) -> str:
    rows = [
        [
            shown(group.name) if group.name else "(top level)",
            f"{group.n_tensors:,}",
            f"{group.elements:,}",
            nbytes(group.nbytes),
            f"{group.n_objects:,}",
            ", ".join(map(shown, group.dtypes)),
        ]
        for group in checkpoint.groups
    ]
    headers = ["group", "tensors", "elements", "bytes", "objects", "dtypes"]
    return table(headers, rows, right=(1, 2, 3, 4)) if rows else ""


def _tensors_text(checkpoint: CheckpointSummary, width: int) -> str:
    tensors = checkpoint.tensors
    if not tensors:
        return ""
    listed = tensors[0].chunks is not None
    folds = _folds(
        [tensor.fqn for tensor in tensors], [(t.dtype, t.shape, t.kind, t.layout) for t in tensors], not listed
    )
    rows = []
    for found in folds:
        tensor = tensors[found.indexes[0]]
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        size = nbytes(sum(tensors[index].nbytes for index in found.indexes))
        count = [f"{len(found.indexes):,}"] if len(folds) < len(tensors) else []
        rows.append([shown(found.name), *count, shown(tensor.dtype), shape, size, _layout_text(tensor)])
    headers = ["tensor", *(["count"] if len(folds) < len(tensors) else []), "dtype", "shape", "bytes", "layout"]
    right = (headers.index("bytes"), headers.index("count")) if "count" in headers else (headers.index("bytes"),)
    if not listed:
        return table(headers, rows, right, width)
    head, rule, *lines = table(headers, rows, right).splitlines()
    files = {file.name: file.nbytes for file in checkpoint.files if file.nbytes is not None}
    blocks = ["\n".join([line, *_chunk_lines(tensor, files)]) for line, tensor in zip(lines, tensors, strict=True)]
    return "\n".join([head, rule, *blocks])


def _layout_text(tensor: TensorSummary) -> str:
    return f"{tensor.layout}, {shown(tensor.kind)}" if tensor.kind else str(tensor.layout)


def _stats_text(report: StatsReport, width: int) -> str:
    from dcptool.render.stats import stats_text  # what most reports do without

    return stats_text(report, width)


def _files_text(checkpoint: CheckpointSummary) -> str:
    """Return a row per file, and how evenly the ranks share the bytes."""
    total = sum(file.item_nbytes for file in checkpoint.files) or 1
    rows = [
        [
            shown(file.name),
            "" if file.rank is None else str(file.rank),
            "MISSING" if file.nbytes is None else nbytes(file.nbytes),
            f"{file.n_items:,}",
            nbytes(file.item_nbytes),
            f"{file.item_nbytes / total:.1%}",
        ]
        for file in checkpoint.files
    ]
    text = table(["file", "rank", "size", "items", "in items", "share"], rows, right=(1, 2, 3, 4, 5))
    loads: dict[int, int] = dict.fromkeys(range(min(checkpoint.world_size or 0, 1 << 20)), 0)
    for file in checkpoint.files:
        if file.rank in loads:
            loads[file.rank] += file.item_nbytes
    if len(loads) > 1 and any(loads.values()):
        heaviest = max(loads, key=lambda rank: loads[rank])
        ratio = loads[heaviest] / (sum(loads.values()) / len(loads))
        text += f"\n\nimbalance: rank {heaviest} has {ratio:.2f} × the mean of {plural(len(loads), 'rank')}"
    return text


def _values_text(checkpoint: CheckpointSummary) -> str:
    """Return the first elements of each tensor, a line per row of its last dimension, and objects in full."""
    blocks = []
    for tensor in checkpoint.tensors:
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        head = f"{shown(tensor.fqn)}  {shown(tensor.dtype)} {shape}"
        if tensor.kind:
            blocks.append(f"{head}  ({shown(tensor.kind)}: its inner tensors are below)")
        elif tensor.corner is None:
            blocks.append(f"{head}  (not read: too many tensors; select some with --keys)")
        elif isinstance(tensor.corner, str):
            blocks.append(f"{head}  ({shown(tensor.corner)})")
        else:
            sizes = corner_sizes(tensor.shape)
            part = "" if sizes == tensor.shape else f", the first {'×'.join(map(str, sizes))}"
            blocks.append("\n".join([head + part, *_number_lines(tensor.corner)]))
    for item in checkpoint.objects:
        text = f"({shown(item.error)})" if item.error is not None else value(item.value, MAX_VALUE_CHARS)
        blocks.append(f"{shown(item.fqn)}  {shown(item.class_name or '?')}\n  {text}")
    return "\n\n".join(blocks)


def _number_lines(corner: Any) -> list[str]:
    """Return nested lists of numbers as aligned lines, one for each innermost list."""
    rows = [corner]
    while rows and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], list):
        rows = [inner for row in rows for inner in row]
    cells = [[_number(cell) for cell in row] if isinstance(row, list) else [_number(row)] for row in rows]
    width = max((len(cell) for row in cells for cell in row), default=0)
    return ["  " + "  ".join(cell.rjust(width) for cell in row) for row in cells]


def _number(cell: Any) -> str:
    return f"{cell:.6g}" if isinstance(cell, float | complex) else str(cell)


def _folds(names: list[str], alike: list[Hashable], wanted: bool) -> list[Fold]:
    """Fold the rows of a long table; a short one shows every entry."""
    if not wanted or len(names) <= FOLD_ABOVE:
        return [Fold(name, (index,)) for index, name in enumerate(names)]
    return fold(names, alike, least=2)


def _chunk_lines(tensor: TensorSummary, files: Mapping[str, int]) -> list[str]:
    lines = []
    for chunk in tensor.chunks or ():
        place = "nowhere"
        if chunk.item:
            file, start, length, _ = chunk.item
            place = f"{shown(file)}:{start}+{length}"
            if file not in files:
                place += "  MISSING"
            elif start + length > files[file]:
                place += "  BEYOND THE END"
        lines.append(f"    offsets {list(chunk.offsets)} sizes {list(chunk.sizes)}  {place}")
    return lines


def _objects_text(checkpoint: CheckpointSummary, width: int) -> str:
    objects = checkpoint.objects
    if not objects:
        return ""
    full = [_value_text(item, width) for item in objects]
    folds = _folds(
        [item.fqn for item in objects],
        [(item.class_name, text) for item, text in zip(objects, full, strict=True)],
        True,
    )
    names = [shown(found.name) for found in folds]
    classes = [shown(objects[found.indexes[0]].class_name or "?") for found in folds]
    counts = [[f"{len(found.indexes):,}"] if len(folds) < len(objects) else [] for found in folds]
    kept = [name for name in names if len(name) <= max(MIN_NAME_WIDTH, width // 2)]
    columns = [column_width("object", kept), column_width("class", classes)]
    columns += [column_width("count", [count[0] for count in counts])] if counts[0] else []
    left = sum(columns) + 2 * len(columns)
    room = max(width - left, 30)
    rows = [
        [name, *count, kind, _value_text(objects[found.indexes[0]], room)]
        for name, count, kind, found in zip(names, counts, classes, folds, strict=True)
    ]
    headers = ["object", *(["count"] if counts[0] else []), "class", "value"]
    return table(headers, rows, (1,) if counts[0] else (), width)


def _value_text(item: ObjectSummary, room: int) -> str:
    if item.error is not None:
        return f"({shown(item.error)})"
    if isinstance(item.value, plain.Opaque):
        return "(not decoded)"
    return value(item.value, room)
