"""A `Summary` as the JSON that `dcptool inspect` prints; the layout is documented in docs/json.md."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dcptool.checkpoint.extents import Extent
from dcptool.ops.inspect.inspect import Summary
from dcptool.ops.inspect.summary import CheckpointSummary, ObjectSummary, TensorSummary, corner_sizes
from dcptool.pickles import plain
from dcptool.render.findings import finding_json
from dcptool.words import fields_of, value

if TYPE_CHECKING:
    from dcptool.ops.inspect.stats import TensorStats
    from dcptool.ops.verify.verdict import Verdict

SCHEMA = 1
MAX_REPR_CHARS = 2000
_OF_NOTES = ("kind", "severity", "message", "fqn", "file", "next_step")


def to_json(summary: Summary) -> dict[str, Any]:
    """Return the report as plain data, numbered by "schema"."""
    errors = [{"path": path, "message": message} for path, message in summary.errors]
    return {
        "schema": SCHEMA,
        "path": summary.path,
        "checkpoints": [
            _checkpoint_json(checkpoint, {stats.fqn: stats for stats in report.tensors} if report else {})
            for checkpoint, report in zip_longest(summary.checkpoints, summary.stats)
        ],
        **({"steps": [_step_json(step) for step in summary.steps]} if summary.steps else {}),
        **({"notes": [finding_json(note) for note in summary.notes]} if summary.notes else {}),
        **({"others": summary.others} if summary.others else {}),
        **({"errors": errors} if errors else {}),
    }


def _checkpoint_json(checkpoint: CheckpointSummary, stats: Mapping[str, TensorStats]) -> dict[str, Any]:
    return {
        **fields_of(checkpoint, "path", "format", "flavour", "evidence", "world_size", "nbytes", "state"),
        "tensors": [_tensor_json(tensor, stats.get(tensor.fqn)) for tensor in checkpoint.tensors],
        "objects": [_object_json(item) for item in checkpoint.objects],
        "files": [file._asdict() for file in checkpoint.files],
        "notes": [finding_json(problem, _OF_NOTES) for problem in checkpoint.problems],
    }


def _tensor_json(tensor: TensorSummary, stats: TensorStats | None) -> dict[str, Any]:
    told = fields_of(tensor, "dtype", "shape", "nbytes", "layout", "n_chunks", "files")
    fields = {"fqn": tensor.fqn, "kind": "tensor", **told, "layout": str(tensor.layout)}
    fields |= {"class": tensor.kind} if tensor.kind else {}
    fields |= {"inside": tensor.inside} if tensor.inside else {}
    if stats is not None:
        from dcptool.render.stats import stats_json

        fields["stats"] = stats_json(stats)
    if tensor.corner is not None:
        fields["corner"] = None if isinstance(tensor.corner, str) else plain.to_json(_finite(tensor.corner))
        fields["corner_sizes"] = list(corner_sizes(tensor.shape))
    if tensor.chunks is not None:
        boxes = [(offsets, sizes, _place(item)) for offsets, sizes, item in tensor.chunks]
        fields["chunks"] = [{"offsets": offsets, "sizes": sizes, **place} for offsets, sizes, place in boxes]
    return fields


def _place(item: Extent | None) -> dict[str, Any]:
    names = ("file", "byte_offset", "nbytes")
    return fields_of(item, *names) if item else dict.fromkeys(names)


def _finite(corner: Any) -> Any:
    """Return nested numbers with those that JSON cannot say as text: nan, inf, complex, complex32's pairs."""
    if isinstance(corner, list):
        return [_finite(part) for part in corner]
    if isinstance(corner, bool | int) or (isinstance(corner, float) and corner - corner == 0):
        return corner
    return str(corner)


def _object_json(item: ObjectSummary) -> dict[str, Any]:
    return {
        "fqn": item.fqn,
        "kind": "object",
        "value": plain.to_json(item.value) if item.error is None else None,
        "class": item.class_name,
        "repr": value(item.value, MAX_REPR_CHARS) if item.error is None else None,
        "error": item.error,
    }


def _step_json(step: Verdict) -> dict[str, Any]:
    return {
        "name": step.name,
        "state": step.state.value,
        "world_size": step.world_size,
        "n_checkpoints": len(step.parts),
        **fields_of(step, "n_entries", "n_files", "nbytes"),
        "problem": step.reason or None,
    }
