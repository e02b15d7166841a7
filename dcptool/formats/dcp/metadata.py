"""The records of one `.metadata` pickle, of any torch version or package, recognised by their fields.

Knows the names torch gives its fields, and nothing of files or payloads. Classes do not matter: torch moved some of
them between versions, and other packages bring their own.

Source: torch 2.2 to 2.14, distributed/checkpoint/metadata.py, filesystem.py.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from operator import add, itemgetter
from typing import Any, TypeGuard

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding, unsafe_pickle
from dcptool.checkpoint.regions import Box, volume
from dcptool.errors import MetadataError, RunsCodeError
from dcptool.formats.dcp.bulk import BULK_NBYTES, MIN_RECORDS, Bulk, ItemRow, ItemRun
from dcptool.formats.dcp.format import METADATA
from dcptool.formats.dcp.tensor_runs import ChunkRun, TensorRow, is_dense
from dcptool.formats.safetensors.header import LFS_START
from dcptool.pickles import inert
from dcptool.pickles.calls import Calls
from dcptool.pickles.standins import Global, Node, brief, qualified_name
from dcptool.pickles.tensors import MAX_NDIM
from dcptool.storage import is_inside

_MAX = (1 << 63) - 1
_KNOWN = {"state_dict_metadata", "storage_data", "planner_data", "storage_meta", "version"}
_GLOBALS = re.compile(
    r"torch\.(Size|[a-z]+\d\w*|bool|serialization\._get_layout)"
    r"|torch\.distributed\.(checkpoint|_shard\.sharded_tensor)\.metadata"
    r"\.(Metadata|MetadataIndex|StorageMeta|TensorStorageMetadata|BytesStorageMetadata|ChunkStorageMetadata"
    r"|TensorProperties|_?MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.(filesystem|_fsspec_filesystem)\._StorageInfo"
    r"|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData)"
    r"|pathlib\.(Posix|Windows|PurePosix|PureWindows)Path"
)
"""What the writers of torch, its fsspec back end and Megatron-core name; other names are read by their fields."""


class Records:
    """What one `.metadata` says.

    Attributes:
        tensors: fqn → (torch's dtype name, shape, boxes of the chunks in stored order), in stored order.
        objects: fqns that are no tensors. Both appear in `order`, as stored.
        items: fqn → places of its chunks, or of the object.
        requires_grad: fqns of tensors that were saved as trained parameters.
        paths: fqn → nested position; None where the saver did not flatten.
        extra: further attributes, as stand-ins.
        save_id: torch's identifier of the save; None before torch 2.3, which has none.
        version: of the metadata, as text; None where it gives none.
        planner_data: what the saver's planner left, with stand-ins.
        evidence: what the records tell about their writer.
        problems: records that make no sense, with what was done about them.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[str, Ints, list[Box]]] = {}
        self.objects: set[str] = set()
        self.order: list[str] = []
        self.items: dict[str, list[ItemRow]] = defaultdict(list)
        self.requires_grad: set[str] = set()
        self.paths: dict[str, tuple[str | int, ...]] | None = None
        self.extra: dict[str, Any] = {}
        self.save_id: str | None = None
        self.version: str | None = None
        self.planner_data: Any = None
        self.evidence: list[str] = []
        self.problems: list[Finding] = []

    def problem(self, kind: str, message: str, fqn: str | None = None, **where: Any) -> None:
        """Note something wrong in the records."""
        self.problems.append(Finding.of(kind, message, fqn=fqn, **where))


def read_records(data: bytes, min_records: int = MIN_RECORDS) -> Records:
    """Read the bytes of a `.metadata` or `__R.metadata` file.

    Args:
        data: the whole file.
        min_records: how many equal records in a row are read at once.

    Raises:
        UnsafePickleError: the pickle is built to harm its reader.
        MetadataError: it is no whole pickle, or none of DCP metadata; says what it looks like instead.
        RunsCodeError: one of these, and it runs code when it is loaded.
    """
    check_pickle_start(data)
    calls = Calls()
    take = Bulk(data, min_records).take if len(data) >= BULK_NBYTES or min_records < MIN_RECORDS else None
    root = inert.load(data, {"torch.Size": _size}, calls, take)
    fields = _fields(root, "Metadata")
    if "state_dict_metadata" not in fields:
        raise _no_metadata(f"it holds a {qualified_name(root)}, not the metadata of a DCP checkpoint", calls)
    state, storage = fields["state_dict_metadata"], fields.get("storage_data")
    if not isinstance(state, dict):
        raise _no_metadata("its state_dict_metadata is not a dict", calls)
    records = Records()
    records.problems += _what_it_runs(calls)
    for fqn, record in state.items():
        _add_entry(records, fqn, record)
    if isinstance(storage, dict):
        for index, info in storage.items():
            if isinstance(index, ItemRun):
                _add_items(records, index)
            else:
                _add_item(records, index, info)
    else:
        records.problem("no-storage-data", "the metadata names no files (storage_data is missing)")
    records.planner_data = fields.get("planner_data")
    _add_paths(records, records.planner_data)
    records.extra = {str(name): value for name, value in fields.items() if name not in _KNOWN}
    storage_meta = _fields(fields.get("storage_meta"), "StorageMeta")
    save_id = storage_meta.get("save_id")
    records.save_id = save_id if isinstance(save_id, str) else None
    saved_to = storage_meta.get("checkpoint_id")
    if isinstance(saved_to, Node) and not all(isinstance(part, str) for part in saved_to.args):
        records.problem("bad-storage-meta", "the path this was saved to is damaged in storage_meta")
    version = fields.get("version")
    records.version = version if isinstance(version, str) else None
    if "version" in fields:
        shown = brief(version).strip("'")
        records.evidence.append(f".metadata version {shown}")
    elif "storage_meta" not in fields:
        records.evidence.append("no storage_meta: torch 2.2 or older")
    if storage_meta.get("modules"):
        records.evidence.append("storage_meta names extension modules")
    return records


def _no_metadata(message: str, calls: Calls) -> MetadataError:
    return RunsCodeError(message, calls.unsafe) if calls.unsafe else MetadataError(message)


def _what_it_runs(calls: Calls) -> list[Finding]:
    """Return what the pickle would import or run beyond what writers of DCP let it."""
    found = unsafe_pickle(calls.unsafe, "the metadata", METADATA)
    for name in sorted(name for name in calls.names if not _GLOBALS.fullmatch(name)):
        if name in calls.unsafe:
            continue
        if name.startswith("torch."):
            message = f"the metadata names {name}, which torch's writers do not: a bit of the name may have flipped"
            step = "A newer dcptool may know it; torch refuses a name that it does not have."
            found.append(Finding.of("unknown-torch-name", message[:300], next_step=step))
        else:
            message = f"the metadata names {name}, which DCP's writers do not; nothing was imported or executed"
            found.append(Finding.of("unknown-global", message[:300]))
    if calls.n_persistent:
        found.append(Finding.of("persistent-id", "the metadata refers to something outside it, which torch refuses"))
    return found


def check_pickle_start(data: bytes) -> None:
    """Refuse what is no binary pickle, saying what it looks like."""
    if not data:
        raise MetadataError("it is empty: the save was interrupted or the copy failed")
    if data.startswith(LFS_START):
        raise MetadataError("it is a Git LFS pointer, not the file itself; run `git lfs pull`")
    if data[:512].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise MetadataError("it is an HTML or XML page, not a checkpoint; the download failed")
    if not re.match(rb"\x80[\x02-\x05]", data):
        if data[:512].isascii() and b"\0" not in data[:512]:
            raise MetadataError("it is not a pickle: it looks like text")
        raise MetadataError(f"it is not a pickle: it begins with the bytes {data[:4].hex(' ')}, a pickle with 80 04")


def _size(*args: Any) -> Ints:
    """Stand-in for torch.Size; its result is a flat tuple of a few numbers, as the opcode screen assumes."""
    value = args[0] if args else ()
    if len(args) > 1 or not isinstance(value, tuple | list) or len(value) > MAX_NDIM:
        raise MetadataError("a torch.Size in the metadata is damaged")
    if not all(type(number) is int and 0 <= number <= _MAX for number in value):
        raise MetadataError(f"a torch.Size in the metadata is no list of counts: {', '.join(map(brief, value[:5]))}")
    return tuple(value)


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of the stand-in for an instance of torch's class `kind`, or of a foreign class like it."""
    if not isinstance(record, Node):
        return {}
    name = qualified_name(record)
    if record.called and _GLOBALS.fullmatch(name):  # whose classes take arguments, and torch gives them none
        return {}
    state = record.state if _may_be(name, kind) else None
    if isinstance(state, tuple) and len(state) == 2 and all(part is None or isinstance(part, dict) for part in state):
        state = {**(state[0] or {}), **(state[1] or {})}  # the form of a class with __slots__
    return state if isinstance(state, dict) and set(map(type, state)) == {str} else {}


@functools.lru_cache(256)
def _may_be(name: str, kind: str) -> bool:
    """Tell whether the class of that name is torch's `kind`, or one whose fields must speak for it."""
    return name.endswith(kind) or not _GLOBALS.fullmatch(name)


def _add_entry(records: Records, fqn: Any, record: Any) -> None:
    if not isinstance(fqn, str):
        records.problem("bad-name", f"an entry is named {brief(fqn)}, which is no text; left out")
        return
    if isinstance(record, TensorRow):
        _keep_tensor(records, fqn, _dtype_name(record.dtype), record.shape, record.boxes)
        if record.requires_grad:
            records.requires_grad.add(fqn)
        return
    fields = _fields(record, "TensorStorageMetadata")
    if "size" in fields and "chunks" in fields:
        _add_tensor(records, fqn, fields)
    elif isinstance(record, Node) and _may_be(qualified_name(record), "BytesStorageMetadata"):
        records.objects.add(fqn)
        records.order.append(fqn)
    else:
        records.problem("unknown-entry", f"entry {fqn!r} is a {qualified_name(record)}; left out", fqn)


def _add_tensor(records: Records, fqn: str, fields: Mapping[str, Any]) -> None:
    shape, chunks = _plain_size(fields["size"]), fields["chunks"]
    dtype = _dtype(records, fqn, fields.get("properties"))
    if shape is None or not isinstance(chunks, list | tuple):
        _leave_out(records, fqn)
        return
    boxes: list[Box] = []
    for chunk in chunks:
        if isinstance(chunk, ChunkRun) and len(chunk.boxes[0][0]) == len(shape):
            boxes += chunk.boxes
            continue
        parts = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _plain_size(parts.get("offsets")), _plain_size(parts.get("sizes"))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            shown = f"{offsets} {sizes}"[:120]
            records.problem("bad-chunk", f"a chunk of {fqn!r} (shape {list(shape)}) is no box in it: {shown}", fqn)
            continue
        boxes.append((offsets, sizes))
    _keep_tensor(records, fqn, dtype, shape, boxes)


def _keep_tensor(records: Records, fqn: str, dtype: str | None, shape: Ints, boxes: list[Box]) -> None:
    if dtype is None:
        _leave_out(records, fqn)
        return
    if volume(shape) > _MAX // 16:
        records.problem("bad-tensor", f"tensor {fqn!r} is said to have shape {list(shape)}; left out", fqn)
        return
    if dtype not in dtypes.BY_NAME:
        records.problem("unknown-dtype", f"tensor {fqn!r} has dtype {dtype}, which this dcptool does not know", fqn)
    records.tensors[fqn] = (dtype, shape, _checked(records, fqn, shape, boxes))
    records.order.append(fqn)


def _leave_out(records: Records, fqn: str) -> None:
    records.problem("bad-tensor", f"the record of tensor {fqn!r} is damaged; left out", fqn)


def _checked(records: Records, fqn: str, shape: Ints, boxes: list[Box]) -> list[Box]:
    """Return the boxes, each once; name those that leave the shape or come twice."""
    ends = [
        max(map(add, map(itemgetter(dim), starts), map(itemgetter(dim), lengths)), default=0)
        for dim, (starts, lengths) in enumerate([tuple(zip(*boxes, strict=True))] * len(shape) if boxes else ())
    ]
    if any(end > n for end, n in zip(ends, shape, strict=False)):
        for offsets, sizes in boxes:
            if any(start + size > n for start, size, n in zip(offsets, sizes, shape, strict=True)):
                message = f"the chunk of {fqn!r} at {list(offsets)} sizes {list(sizes)} leaves its shape {list(shape)}"
                records.problem("chunk-out-of-bounds", message, fqn, offsets=offsets, sizes=sizes)
    if len({box[0] for box in boxes}) == len(boxes):
        return boxes
    unique = list(dict.fromkeys(boxes))
    if len(unique) < len(boxes):
        for (offsets, sizes), count in Counter(boxes).items():
            if count > 1:
                message = f"the chunk of {fqn!r} at {list(offsets)} is listed {count} times"
                records.problem("duplicate-chunk", message, fqn, offsets=offsets, sizes=sizes)
    return unique


def _plain_size(value: Any) -> Ints | None:
    if isinstance(value, tuple | list):
        try:
            return _size(value)
        except MetadataError:
            return None
    return None


def _dtype(records: Records, fqn: str, properties: Any) -> str | None:
    """Read TensorProperties: dtype, layout, requires_grad, memory format, pin_memory, as torch pickles them."""
    state = properties.state if isinstance(properties, Node) else None
    if isinstance(state, tuple) and len(state) == 5:
        value, layout, requires_grad, memory_format, pin_memory = state
        sound = is_dense(layout, memory_format) and isinstance(requires_grad, bool) and isinstance(pin_memory, bool)
        if requires_grad is True:
            records.requires_grad.add(fqn)
        if not sound:
            records.problem(
                "bad-properties", f"layout or memory format of tensor {fqn!r} is not what torch writes", fqn
            )
    else:
        value = _fields(properties, "TensorProperties").get("dtype")
    return _dtype_name(value) if isinstance(value, Global) else None


@functools.lru_cache(64)
def _dtype_name(value: Global) -> str | None:
    match = re.fullmatch(r"torch\.([a-z0-9_]+)", qualified_name(value))
    return match[1] if match else None


def _add_item(records: Records, index: Any, info: Any) -> None:
    key, place = _fields(index, "MetadataIndex"), _fields(info, "StorageInfo")
    fqn, offset = key.get("fqn"), key.get("offset")
    file, byte_offset, nbytes = (place.get(name) for name in ("relative_path", "offset", "length"))
    offsets = None if offset is None else _plain_size(offset)
    if (
        not isinstance(fqn, str)
        or not isinstance(file, str)
        or not _is_count(byte_offset)
        or not _is_count(nbytes)
        or byte_offset + nbytes > _MAX
        or (offset is not None) != (offsets is not None)
    ):
        _refuse_place(records, fqn, file)
        return
    if not is_inside(file):
        _refuse_path(records, fqn, file)
        return
    transforms = place.get("transform_descriptors") or ()
    valid = isinstance(transforms, list | tuple) and len(transforms) <= 16
    if not valid or not all(isinstance(name, str) and len(name) <= 100 for name in transforms):
        records.problem("bad-item", f"the transforms of {fqn!r} in {file} are damaged; left out", fqn, file=file)
        return
    records.items[fqn].append((offsets, file, byte_offset, nbytes, tuple(transforms)))


def _add_items(records: Records, run: ItemRun) -> None:
    by_fqn = records.items
    end = max(map(add, map(itemgetter(2), run.rows), map(itemgetter(3), run.rows)), default=0)
    if end <= _MAX and all(map(is_inside, run.files)):
        for fqn, row in zip(run.fqns, run.rows, strict=True):
            by_fqn[fqn].append(row)
        return
    for fqn, row in zip(run.fqns, run.rows, strict=True):
        if row[2] + row[3] > _MAX:
            _refuse_place(records, fqn, row[1])
        elif is_inside(row[1]):
            by_fqn[fqn].append(row)
        else:
            _refuse_path(records, fqn, row[1])


def _refuse_place(records: Records, fqn: Any, file: Any) -> None:
    message = f"a storage record is damaged (entry {brief(fqn)}, file {brief(file)}); left out"
    records.problem("bad-item", message)


def _refuse_path(records: Records, fqn: str, file: str) -> None:
    message = f"{fqn!r} is said to be in {file!r}, outside the checkpoint's folder; refused"
    records.problem("path-escape", message, fqn, file=file)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX


def _add_paths(records: Records, planner_data: Any) -> None:
    if not isinstance(planner_data, dict):
        if planner_data is not None:
            records.evidence.append(f"planner_data of its own kind ({qualified_name(planner_data)})")
        return
    records.paths = {}
    for fqn, path in planner_data.items():
        valid = isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
        if isinstance(fqn, str) and valid and (fqn in records.tensors or fqn in records.objects):
            records.paths[fqn] = path
        else:
            message = f"planner_data has a nested path for {brief(fqn)}, which is no entry or the path is damaged"
            records.problems.append(Finding.of("bad-path", message))
