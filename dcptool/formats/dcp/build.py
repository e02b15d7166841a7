"""Records of one `.metadata`, or of several `__R.metadata`, made into one view of tensors and objects.

`dcp.save(use_collectives=False)` writes one `__R.metadata` per rank, each knowing its own chunks only; the view is
their union. A box that several ranks stored is kept once, from the lowest rank; the others are its replicas.

Source: torch 2.13, distributed/checkpoint/state_dict_saver.py (`use_collectives`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Extent, Ints
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import Box, intersect
from dcptool.formats.dcp.bulk import ItemRow
from dcptool.formats.dcp.metadata import Records

_ONE_RANK = "The ranks saved different things; name the metadata of one, such as __0.metadata, for what it saved."


class View(NamedTuple):
    """Entries over one table of chunks, with what did not fit together."""

    entries: dict[str, Entry]
    table: ChunkTable
    problems: list[Finding]


def build(parts: Mapping[str, Records], own: bool = False) -> View:
    """Make one view of the records of all metadata files of a checkpoint; takes the items out of the records.

    Args:
        parts: metadata file name → its records, lowest rank first.
        own: the first is that of one rank, whose values count wherever it has some.

    Returns:
        Entries in the order of the saver's state dict where planner_data tells it, else in the order of the metadata;
        chunks in the order of the metadata.
    """
    table = ChunkTable()
    entries: dict[str, Entry] = {}
    first = next(iter(parts.values())) if own else None
    problems = [problem for records in parts.values() for problem in records.problems]
    for fqn in _order(parts.values()):
        path = next((records.paths[fqn] for records in parts.values() if records.paths and fqn in records.paths), None)
        tensors = [records for records in parts.values() if fqn in records.tensors]
        objects = [records for records in parts.values() if fqn in records.objects]
        if tensors and objects and not (first and (fqn in first.tensors or fqn in first.objects)):
            problems.append(_disagree(fqn, "a tensor in some and an object in others"))
        if tensors and not (first and fqn in first.objects):
            entries[fqn] = _tensor(fqn, path, tensors, table, problems, tensors[0] is first)
        else:
            places = [_lookup(records.items, fqn, [None], problems)[0] for records in objects]
            found = [place for place in places if place]
            if not found:
                problems.append(_placeless(fqn))
            replicas = tuple(place for place in found[1:] if place != found[0])
            entries[fqn] = ObjectEntry(fqn, path, found[0] if found else None, replicas=replicas)
    for records in parts.values():
        for fqn in list(records.items):
            _lookup(records.items, fqn, [], problems)
    return View(entries, table, problems)


def _order(parts: Iterable[Records]) -> list[str]:
    """Return all fqns, each once; state_dict_metadata alone is in the order in which ranks contributed."""
    parts = list(parts)
    known = {fqn for records in parts for fqn in records.order}
    planned = [fqn for records in parts for fqn in records.paths or () if fqn in known]
    return list(dict.fromkeys([*planned, *(fqn for records in parts for fqn in records.order)]))


def _tensor(
    fqn: str,
    path: tuple[str | int, ...] | None,
    parts: Sequence[Records],
    table: ChunkTable,
    problems: list[Finding],
    own: bool,
) -> TensorEntry:
    dtype, shape, _ = parts[0].tensors[fqn]
    if not own and any(records.tensors[fqn][:2] != (dtype, shape) for records in parts):
        problems.append(_disagree(fqn, "of different dtype or shape in some"))
    mark = table.mark()
    if len(parts) == 1 and _add_columns(fqn, parts[0], table):
        return TensorEntry(fqn, dtype, shape, path, table.chunks_since(mark, len(shape)))
    placed: dict[Box, Extent | None] = {}
    replicas: list[Chunk] = []
    ours: list[Box] = []
    for records in parts:
        boxes = records.tensors[fqn][2]
        items = _lookup(records.items, fqn, [box[0] for box in boxes], problems)
        if records.tensors[fqn][:2] != (dtype, shape):
            continue
        for box, item in zip(boxes, items, strict=True):
            if box not in placed and not any(intersect(box, mine) for mine in ours):
                placed[box] = item
                table.add(*box, item)
                if item is None and 0 not in box[1]:
                    problems.append(_placeless(fqn, *box))
            elif item is not None and item != placed.get(box):
                replicas.append(Chunk(*box, item))
        ours = list(placed) if own and not ours else ours
    return TensorEntry(fqn, dtype, shape, path, table.chunks_since(mark, len(shape)), tuple(replicas))


def _add_columns(fqn: str, records: Records, table: ChunkTable) -> bool:
    """Add the chunks of a tensor whose items come in the order of its chunks, as they mostly do."""
    boxes, rows = records.tensors[fqn][2], records.items.get(fqn)
    if not rows or len(rows) != len(boxes):
        return False
    offsets, files, byte_offsets, nbytes, transforms = zip(*rows, strict=True)
    if set(transforms) != {()} or len(set(offsets)) < len(boxes) or offsets != tuple(map(itemgetter(0), boxes)):
        return False
    table.extend(boxes, files, byte_offsets, nbytes)
    del records.items[fqn]
    return True


def _lookup(
    by_fqn: dict[str, list[ItemRow]], fqn: str, wanted: Sequence[Ints | None], problems: list[Finding]
) -> list[Extent | None]:
    """Take the items of a tensor out, and return those at the wanted offsets; the others are problems.

    Where a place is given twice the later one counts, as in the dict that torch makes of them.
    """
    found = {row[0]: Extent(*row[1:]) for row in by_fqn.pop(fqn, ())}
    known = set(wanted)
    problems += [_chunkless(fqn, offsets, item) for offsets, item in found.items() if offsets not in known]
    return [found.get(offsets) for offsets in wanted]


def _chunkless(fqn: str, offsets: Ints | None, item: Extent) -> Finding:
    at = f" at {list(offsets)}" if offsets is not None else ""
    message = f"the metadata places {fqn!r}{at} in {item.file}, but lists no such chunk"
    span = (item.byte_offset, item.byte_offset + item.nbytes)
    return Finding.of("item-without-chunk", message, item.file, fqn, offsets, None, span)


def _disagree(fqn: str, how: str) -> Finding:
    message = f"{fqn!r} is {how} of the ranks' metadata files"
    return Finding.of("ranks-disagree", message, fqn=fqn, next_step=_ONE_RANK)


def _placeless(fqn: str, offsets: Ints | None = None, sizes: Ints | None = None) -> Finding:
    at = f" chunk at {list(offsets)}" if offsets is not None else ""
    message = f"the metadata has no place for {fqn!r}{at}: it cannot be read"
    return Finding.of("chunk-without-item", message, None, fqn, offsets, sizes)
