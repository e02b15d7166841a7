"""One checkpoint as one compact document: everything the page of `dcptool report` shows, every box and byte range.

Plain data, no markup. Boxes and places are rules (`columns`); tensors that are cut alike share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcptool import __version__
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.formats.marker import Marker
from dcptool.ops.inspect.summary import CheckpointSummary, ObjectSummary, TensorSummary
from dcptool.ops.report.columns import ColumnTable, boxes_rule
from dcptool.ops.verify.verdict import Verdict
from dcptool.pickles import plain
from dcptool.words import fields_of, value

SCHEMA = 1
MAX_MESSAGES = 100
"""Findings of one kind whose messages are kept; all are counted."""
MAX_VALUE_CHARS = 400


def describe(checkpoint: Checkpoint, summary: CheckpointSummary, verdict: Verdict, created: str) -> dict[str, Any]:
    """Return the document on one checkpoint; what it holds is selected by the summary.

    Args:
        checkpoint: an open checkpoint.
        summary: of it.
        verdict: on it, or on the folder it is the one part of.
        created: when this is, as it is to be shown.

    Returns:
        Data that JSON can say. `tensors` has a row each: fqn, index into `dtypes`, shape, bytes, index into `layouts`,
        number of chunks, index into `boxes`, and four indexes into `columns`, which have a value per chunk: index into
        `files` (-1: no place), byte offset, byte length, index into `transforms`. `boxes` and `columns` hold rules, see
        `columns`. `files` has name, bytes (None: missing), rank, items, bytes of items; `objects` has fqn,
        class, value as text, why there is none, file, byte offset and byte length.
    """
    shards = _Shards(checkpoint, [file.name for file in summary.files])
    tensors = [shards.row(tensor) for tensor in summary.tensors]
    index_of = {tensor.fqn: index for index, tensor in enumerate(summary.tensors)}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "created": created,
        **fields_of(summary, "path", "format", "flavour", "evidence", "world_size"),
        "state": verdict.state.value,
        "level": verdict.level.name.lower(),
        "checked": verdict.tally._asdict(),
        "marker": _marker(verdict.marker),
        **fields_of(summary, "nbytes", "n_entries"),
        "findings": grouped(_all_findings(summary, verdict), index_of),
        "files": [[*file] for file in summary.files],
        "dtypes": [*shards.dtypes],
        "layouts": [*shards.layouts],
        "transforms": [[*names] for names in checkpoint.table.transforms],
        "tensors": tensors,
        "boxes": shards.boxes,
        "columns": shards.columns.rules,
        "replicas": [
            [index, [shards.chunk(chunk) for chunk in shards.entry(fqn).replicas]]
            for fqn, index in index_of.items()
            if shards.entry(fqn).replicas
        ],
        "objects": [_object(item, shards.place(_item(checkpoint, item.fqn))) for item in summary.objects],
    }


class _Shards:
    """Collects the rules of boxes and places, and the words that rows name by index."""

    def __init__(self, checkpoint: Checkpoint, files: Sequence[str]) -> None:
        self.columns = ColumnTable()
        self.boxes: list[dict[str, Any]] = []
        self.dtypes: dict[str, int] = {}
        self.layouts: dict[str, int] = {}
        self._checkpoint = checkpoint
        self._index_of = {name: index for index, name in enumerate(files)}
        self._file = [*(self._index_of[name] for name in checkpoint.table.files), -1]  # the last for index -1
        self._known: dict[tuple[Any, ...], int] = {}

    def row(self, tensor: TensorSummary) -> list[Any]:
        """Return the row of a tensor."""
        dtype = self.dtypes.setdefault(tensor.dtype, len(self.dtypes))
        words = f"{tensor.layout}, {tensor.kind}" if tensor.kind else str(tensor.layout)
        layout = self.layouts.setdefault(words, len(self.layouts))
        return [tensor.fqn, dtype, [*tensor.shape], tensor.nbytes, layout, *self._chunks(tensor.fqn)]

    def entry(self, fqn: str) -> TensorEntry:
        """Return a tensor, be it an inner one of another."""
        found = self._checkpoint.tensors.get(fqn)
        return found if found else self._checkpoint.flat.tensors[fqn]

    def _chunks(self, fqn: str) -> list[int]:
        entry = self.entry(fqn)
        key = (entry.shape, len(entry.chunks), entry.chunks.key()[0])
        boxes = self._known.get(key)
        if boxes is None:
            boxes = self._known[key] = len(self.boxes)
            self.boxes.append(boxes_rule(entry.shape, entry.chunks, self.columns))
        files, byte_offsets, nbytes, transforms = entry.chunks.places()
        columns = ([self._file[index] for index in files], byte_offsets, nbytes, transforms)
        return [len(entry.chunks), boxes, *map(self.columns.add, columns)]

    def place(self, item: Extent | None) -> list[int]:
        """Return file, byte offset and byte length of an item."""
        return [self._index_of[item.file], item.byte_offset, item.nbytes] if item else [-1, 0, 0]

    def chunk(self, chunk: Chunk) -> list[Any]:
        return [[*chunk.offsets], [*chunk.sizes], *self.place(chunk.item)]


def _item(checkpoint: Checkpoint, fqn: str) -> Extent | None:
    entry = checkpoint[fqn]
    return entry.item if isinstance(entry, ObjectEntry) else None


def _object(item: ObjectSummary, place: Sequence[int]) -> list[Any]:
    text = None
    if item.error is None and not isinstance(item.value, plain.Opaque):
        text = value(item.value, MAX_VALUE_CHARS)
    return [item.fqn, item.class_name, text, item.error, *place]


def _marker(marker: Marker | None) -> dict[str, Any] | None:
    if marker is None:
        return None
    created = None if marker.created is None else str(marker.created)
    return {"name": marker.name, "writer": marker.writer, "created": created, "checksums": bool(marker.sha256)}


def _all_findings(summary: CheckpointSummary, verdict: Verdict) -> list[Finding]:
    """Return what `verify` finds, then the notes that `inspect` adds."""
    known = {finding.kind for finding in verdict.findings}
    notes = [note for note in summary.problems if note.severity is Severity.NOTE and note.kind not in known]
    return [*verdict.findings, *notes]


def grouped(findings: Sequence[Finding], index_of: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return findings by severity and kind, in order of first appearance.

    Args:
        findings: errors first.
        index_of: fqn → index of the tensor.

    Returns:
        For each kind: severity, kind, count, up to MAX_MESSAGES messages as (text, tensor or None, offsets or None),
        and the next steps, each once.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity.value, finding.kind), []).append(finding)
    return [
        {
            "severity": severity,
            "kind": kind,
            "count": len(members),
            "messages": [
                [finding.message, index_of.get(finding.fqn or ""), finding.offsets and [*finding.offsets]]
                for finding in members[:MAX_MESSAGES]
            ],
            "steps": list(dict.fromkeys(finding.next_step for finding in members if finding.next_step)),
        }
        for (severity, kind), members in groups.items()
    ]
