"""Lay out a DCP directory: data files of torch.save zips back to back, `.metadata`, and dcptool's marker.

From a DCP checkpoint boxes and ranks are kept; from any other format one rank holds everything whole.

Source: torch 2.13, distributed/checkpoint/metadata.py, filesystem.py and default_planner.py, for the records, the names
of files and what is written into them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import Box, volume
from dcptool.checkpoint.selection import SelectedObject, SelectedTensor, Selection
from dcptool.checkpoint.steps import step_number
from dcptool.copying.outputs import Fill, LaidOut, Literal, OutputFile, Part, Verbatim, Wanted
from dcptool.errors import LayoutError, UnsupportedError
from dcptool.formats.dcp import printing
from dcptool.formats.dcp.format import DCP, METADATA, data_file_rank
from dcptool.formats.dcp.printing import Place
from dcptool.formats.dcp.reader import collector_paused
from dcptool.formats.marker import NAME, Marker
from dcptool.formats.torch_save.graphs import TAIL, Keys, ObjectGraph, rekey, tensor_node
from dcptool.formats.torch_save.zip_write import NewMember, Template, lay_out_zip, template
from dcptool.pickles.emit import emit
from dcptool.pickles.standins import Node, call, new, ref
from dcptool.words import listed

_RECORDS = "torch.distributed.checkpoint.metadata"
_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
"""Where torch 2.2 has the properties of tensors. Later ones have them in `_RECORDS`, too, and read either."""
OLDEST_TORCH = (2, 2)
MAX_NAMED = 3
_PLANS = "all_local_plans"
"""Megatron's attribute that describes the plans of the save that was read; it would be wrong for this one."""


class Arrangement(NamedTuple):
    """What goes into which data file.

    Attributes:
        files: name of the file → names of its entries in order, each with its box, None for an object.
        boxes: name of the entry → its boxes in the order the metadata lists them; no box for an object. The entries are
            in the order of `state_dict_metadata`.
    """

    files: Mapping[str, Sequence[tuple[str, Box | None]]]
    boxes: Mapping[str, Sequence[Box]]


class DcpLayout(NamedTuple):
    """A DCP directory, without a marker.

    Attributes:
        files: of data.
        metadata: `.metadata`, which is to be written after them.
        notes: worth knowing, one sentence each.
    """

    files: tuple[OutputFile, ...]
    metadata: OutputFile
    notes: tuple[str, ...]

    def below(self, folder: str) -> DcpLayout:
        """Return it with all names as those of files in a folder."""
        if not folder:
            return self
        files = tuple(file._replace(name=f"{folder}/{file.name}") for file in self.files)
        return self._replace(files=files, metadata=self.metadata._replace(name=f"{folder}/{self.metadata.name}"))


def lay_out(checkpoint: Checkpoint, selection: Selection, wanted: Wanted) -> LaidOut:
    """Lay out a selection in a folder; errors as of `lay_out_dcp`."""
    empty: set[str] = set()
    if checkpoint.format.holds_empty_dicts:
        empty = {item.entry.fqn for item in selection.objects if checkpoint.value(item.entry.fqn) == {}}
    notes = [f"{len(empty)} empty dicts are left out, as torch does"] if empty else []
    kept = selection._replace(in_order=tuple(item for item in selection.in_order if item.entry.fqn not in empty))
    found = lay_out_dcp(checkpoint, kept, torch=wanted.torch)
    notes += found.notes
    last = (found.metadata,)
    return LaidOut(found.files, False, len(kept.objects), (), tuple(notes), last=last)


def marker_of_output(path: str, parts: Sequence[LaidOut], beside: Mapping[str, int]) -> OutputFile:
    """Lay out the marker of a conversion; arguments as of `marker_of`."""
    layouts = [DcpLayout(part.files, part.last[-1], part.notes) for part in parts]
    return marker_of(path, "convert", layouts, beside)


def marker_of(path: str, writer: str, parts: Sequence[DcpLayout], beside: Mapping[str, int]) -> OutputFile:
    """Lay out the marker of a folder, the last file that is written there.

    Args:
        path: where the folder will be.
        writer: what the marker names.
        parts: the DCP directories in it, named as they are there.
        beside: bytes of every other file, by name.
    """
    files = [file for part in parts for file in (*part.files, part.metadata)]
    ranks = [rank for file in files if (rank := data_file_rank(file.name)) is not None]
    marker = Marker(
        NAME,
        writer,
        step_number(path.rstrip("/").rpartition("/")[2]),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        max(ranks, default=0) + 1,
        metadata_sha256={part.metadata.name: _sha256(part.metadata) for part in parts},
        files={**{file.name: file.nbytes for file in files}, **beside},
    ).document()
    return OutputFile(NAME, len(marker), [Literal(marker)])


def _sha256(file: OutputFile) -> str:
    return hashlib.sha256(b"".join(part.data for part in file.parts if isinstance(part, Literal))).hexdigest()


@collector_paused()
def lay_out_dcp(
    checkpoint: Checkpoint,
    selection: Selection,
    arrangement: Arrangement | None = None,
    torch: tuple[int, int] | None = None,
) -> DcpLayout:
    """Lay out a selection.

    Args:
        checkpoint: the source.
        selection: what goes in; its order is that of `planner_data`.
        arrangement: of the files; None to keep that of a DCP source, and to put all into one file for others.
        torch: a version of torch that shall read it; None for the oldest that can.

    Raises:
        UnsupportedError: that version cannot hold something of it.
        LayoutError: two entries of a `.pt` file have one name once keys are text.
        ItemError: an object of the source is damaged.
    """
    _require_distinct(checkpoint, selection)
    readable = _readable_notes(selection, torch)
    arrangement = arrangement or _as_stored(checkpoint, selection)
    files = data_files(checkpoint, selection, arrangement)
    places = [place for file in files if isinstance(file.parts, _Zips) for place in file.parts.places(file.name)]
    metadata = emit(_metadata(checkpoint, selection, arrangement.boxes, places), 4)
    notes = [f"{_PLANS} of the source's metadata is left out: it describes that save"] * (_PLANS in checkpoint.extra)
    notes += readable
    written = OutputFile(METADATA, len(metadata), [Literal(metadata)])
    return DcpLayout(tuple(files), written, tuple(notes))


def data_files(checkpoint: Checkpoint, selection: Selection, arrangement: Arrangement) -> list[OutputFile]:
    """Lay out the data files of an arrangement, in its order.

    Raises:
        ItemError: an object of the source is damaged.
    """
    by_name = {item.name: item for item in selection.in_order}
    files = []
    for name, items in arrangement.files.items():
        zips = _Zips(checkpoint, [(by_name[entry], box) for entry, box in items])
        files.append(OutputFile(name, zips.nbytes, zips))
    return files


def _readable_notes(selection: Selection, torch: tuple[int, int] | None) -> list[str]:
    """Say which versions of torch cannot read a selection, if one can read DCP but not all that is in it.

    Raises:
        UnsupportedError: one of these is the version that shall.
    """
    if torch is not None and torch < OLDEST_TORCH:
        raise UnsupportedError(
            f"--torch {_version(torch)}: what dcptool writes is for torch {_version(OLDEST_TORCH)} and later",
            next_step="`convert --to torch` makes one file that older versions load.",
        )
    newest = max((dtypes.lookup(tensor.dtype).since for tensor in selection.tensors), default=OLDEST_TORCH)
    wanted = torch or OLDEST_TORCH
    if newest <= wanted:
        return []
    newer = [tensor for tensor in selection.tensors if dtypes.lookup(tensor.dtype).since > wanted]
    named = listed([f"{tensor.name!r} ({tensor.dtype})" for tensor in newer], MAX_NAMED)
    if torch is None:
        return [f"torch before {_version(newest)} reads none of it, for it cannot hold {named}"]
    hint = " ".join(f"--exclude {tensor.entry.fqn!r}" for tensor in newer[:MAX_NAMED])
    raise UnsupportedError(
        f"torch {_version(torch)} cannot hold {named}: that takes torch {_version(newest)}",
        next_step=f"Leave out what is newer ({hint}), or take a newer --torch.",
    )


def _version(torch: tuple[int, int]) -> str:
    return ".".join(map(str, torch))


def _require_distinct(checkpoint: Checkpoint, selection: Selection) -> None:
    names = {item.entry.fqn for item in selection.in_order}
    for problem in checkpoint.problems:
        if problem.kind == "duplicate-name" and problem.fqn in names:
            raise LayoutError(
                problem.message, next_step="DCP names entries by text: rename one of the keys in the source."
            )


_Item = tuple[SelectedTensor | SelectedObject, Box | None]


def _as_stored(checkpoint: Checkpoint, selection: Selection) -> Arrangement:
    """Keep the boxes, the files and the order in them of a DCP source; put what others hold whole into one file."""
    if checkpoint.format is not DCP:
        whole = [(item.name, _whole(item)) for item in selection.in_order]
        return Arrangement({"__0_0.distcp": whole}, {name: [box] if box else [] for name, box in whole})
    found: dict[str, list[tuple[int, int, tuple[str, Box | None]]]] = {}
    boxes: dict[str, Sequence[Box]] = {}
    for index, item in enumerate(selection.in_order):
        if isinstance(item, SelectedObject):
            boxes[item.name] = ()
            if item.entry.item:
                place = (item.entry.item.byte_offset, index, (item.name, None))
                found.setdefault(item.entry.item.file, []).append(place)
            continue
        boxes[item.name] = list(item.entry.chunks.boxes())
        for chunk in item.entry.chunks:
            if chunk.item:
                box = (chunk.offsets, chunk.sizes)
                found.setdefault(chunk.item.file, []).append((chunk.item.byte_offset, index, (item.name, box)))
    files = {name: [item for *_, item in sorted(found.get(name, ()))] for name in _file_names(checkpoint, found)}
    return Arrangement(files, boxes)


def _whole(item: SelectedTensor | SelectedObject) -> Box | None:
    if isinstance(item, SelectedObject):
        return None
    return (0,) * len(item.entry.shape), item.entry.shape


def _file_names(checkpoint: Checkpoint, items: Mapping[str, object]) -> list[str]:
    """Return the names of data files: those with items, and the empty ones of idle ranks."""
    idle = [name for name in checkpoint.usage if name not in items]
    empty = [name for name, nbytes in checkpoint.files.items() if not nbytes and data_file_rank(name) is not None]
    return sorted({*items, *idle, *empty}, key=lambda name: (data_file_rank(name) or 0, name))


class _Zips:
    """The parts of a data file: the zips of its items, laid out one after the other when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, items: Sequence[_Item]) -> None:
        self._items = items
        self._objects = {
            index: _object_members(checkpoint, item)
            for index, (item, _) in enumerate(items)
            if isinstance(item, SelectedObject)
        }

    def __iter__(self) -> Iterator[Part]:
        slot = 0
        for index, (item, box) in enumerate(self._items):
            if isinstance(item, SelectedTensor) and box:
                zipped = _tensor_zip(item.dtype, box[1])
                yield Literal(zipped.head)
                yield Fill(item.entry.fqn, *box, item.dtype, _nbytes(item.dtype, box[1]))
                yield zipped.closing(slot)
                slot += 1
            else:
                members = self._objects[index]
                yield from lay_out_zip(members, slot)[0]
                slot += sum(not isinstance(member.part, Literal) for member in members)

    def places(self, file: str) -> Iterator[Place]:
        """Yield where each item is in the file of this name."""
        position = 0
        for index, (item, box) in enumerate(self._items):
            nbytes = self._nbytes(index, item, box)
            yield Place(item.name, box[0] if box else None, file, position, nbytes)
            position += nbytes

    @property
    def nbytes(self) -> int:
        """Length of the file in bytes."""
        return sum(self._nbytes(index, *item) for index, item in enumerate(self._items))

    def _nbytes(self, index: int, item: SelectedTensor | SelectedObject, box: Box | None) -> int:
        if isinstance(item, SelectedTensor) and box:
            return _tensor_zip(item.dtype, box[1]).nbytes + _nbytes(item.dtype, box[1])
        return lay_out_zip(self._objects[index])[1]


def _nbytes(dtype: str, sizes: Ints) -> int:
    return volume(sizes) * dtypes.lookup(dtype).itemsize


@functools.lru_cache(1024)
def _tensor_zip(dtype: str, sizes: Ints) -> Template:
    """Return the zip of one chunk; a checkpoint has few different ones."""
    members = [
        NewMember("data.pkl", Literal(emit(tensor_node(dtype, sizes, "0"), 2))),
        NewMember("data/0", Fill("", (), sizes, dtype, _nbytes(dtype, sizes))),
        *(NewMember(name, Literal(content)) for name, content in TAIL),
    ]
    return template(members)


def _object_members(checkpoint: Checkpoint, item: SelectedObject) -> list[NewMember]:
    keys = Keys()
    root = rekey(ObjectGraph(*checkpoint.graph(item.entry)), keys)
    return [
        NewMember("data.pkl", Literal(emit(root, 2))),
        *(NewMember(f"data/{key}", Verbatim(record)) for key, record in keys.records.items()),
        *(NewMember(name, Literal(content)) for name, content in TAIL),
    ]


def _metadata(
    checkpoint: Checkpoint,
    selection: Selection,
    boxes: Mapping[str, Sequence[Box]],
    places: Sequence[Place],
) -> Node:
    """Return the graph of `.metadata`, of classes that OLDEST_TORCH has, which is without StorageMeta."""
    by_name = {item.name: item for item in selection.in_order}
    layout = call("torch.serialization._get_layout", "torch.strided")
    memory_format = call(f"{_PROPERTIES}.MEM_FORMAT_ENCODING", 0)
    state: dict[str, Node] = {}
    for name in boxes:
        item = by_name[name]
        if isinstance(item, SelectedObject):
            state[item.name] = new(f"{_RECORDS}.BytesStorageMetadata")
            continue
        trained = item.entry.fqn in checkpoint.requires_grad
        properties = new(
            f"{_PROPERTIES}.TensorProperties", (ref(f"torch.{item.dtype}"), layout, trained, memory_format, False)
        )
        size = call("torch.Size", item.entry.shape)
        fields = {"properties": properties, "size": size, "chunks": printing.chunks(boxes[name])}
        state[item.name] = new(f"{_RECORDS}.TensorStorageMetadata", fields)
    paths = {item.name: item.path for item in selection.in_order}
    nested = any(found is not None for found in paths.values())
    planner_data = {name: found or (name,) for name, found in paths.items()} if nested else None
    whole: dict[str, Any] = {
        "state_dict_metadata": state,
        "planner_data": planner_data,
        "storage_data": printing.places(places, boxes),
        "version": "1.0.0",
        **{name: value for name, value in checkpoint.extra.items() if name != _PLANS},
    }
    return new(f"{_RECORDS}.Metadata", whole)
