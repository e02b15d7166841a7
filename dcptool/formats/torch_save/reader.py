"""`.pt` files of torch.save: one zip, one pickle, any nesting, flattened as torch.distributed.checkpoint does.

Source: torch 2.13, distributed/checkpoint/_traverse.py for what is flattened; serialization.py for the file.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Examined, Extent, Payload, Record
from dcptool.checkpoint.findings import Finding, foreign_tensors, unsafe_pickle
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.regions import is_contiguous, volume
from dcptool.errors import DcptoolError, ItemError, MetadataError, StorageError, UnsupportedError
from dcptool.formats.torch_save import items as torch_items
from dcptool.formats.torch_save.format import TORCH_SAVE, is_legacy
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.pickles import inert, plain
from dcptool.pickles.calls import LEGACY_MAGIC, Calls
from dcptool.pickles.emit import emit
from dcptool.pickles.standins import Global, Node, qualified_name
from dcptool.pickles.tensors import TensorView, foreign_tensor, is_tensor, tensor_view
from dcptool.storage import Storage, join
from dcptool.storage.stream import stream
from dcptool.words import are

MAX_DEPTH = 60
_FOLLOWING_NBYTES = 1 << 20
"""Read of what follows a zip, to tell zeros from other bytes."""
MAX_KEY_CHARS = 10_000
ROOT_NAME = "."
"""Name of the entry when the file holds one value that is no dict."""

_OF_TORCH = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", ".data/serialization_id"}
"""Records of torch's own, but for storages."""

Path = tuple[str | int, ...]

_SHARDED_OBJECT = re.compile(r".+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
"""Source: megatron-core 0.16.1, dist_checkpointing/mapping.py, ShardedObject.unique_key."""


class TorchSaveSource:
    """Finds and reads the tensors of one `.pt` file."""

    def __init__(self, storage: Storage, item: Extent, archive: TorchZip) -> None:
        self._storage, self._item, self._archive = storage, item, archive
        self.views: dict[str, TensorView] = {}
        self.values: dict[str, Any] = {}
        self.unsafe: dict[str, tuple[str, ...]] = {}  # all of the file is one pickle, looked at when it is opened

    def payload(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> Payload:
        return torch_items.payload_of(self.views[entry.fqn], self._archive, item)

    def examine(self, entry: Entry, chunk: Chunk | None, item: Extent) -> Examined:
        is_tensor = chunk is not None and entry.fqn in self.views
        payload = torch_items.payload_of(self.views[entry.fqn], self._archive, item) if is_tensor else None
        foreign = entry.foreign if isinstance(entry, ObjectEntry) else ""
        return Examined(payload, self._records, foreign=foreign)

    def edge_problem(self, item: Extent) -> str:
        return ""  # all headers were read when it was opened

    def graph(self, entry: ObjectEntry) -> tuple[Any, dict[str, Record]]:
        return inert.load(emit(self.values[entry.fqn], 4)), self._storages  # a copy: who asks for it may change it

    @cached_property
    def _storages(self) -> dict[str, Record]:
        return torch_items.storages(self._archive, self._item)

    def over(self, storage: Storage) -> TorchSaveSource:
        other = copy.copy(self)
        other._storage = storage
        return other

    @cached_property
    def _records(self) -> tuple[Record, ...]:
        return self._archive.records(self._item)

    def value(self, entry: ObjectEntry) -> Any:
        if entry.foreign:
            return plain.Opaque(entry.foreign.removeprefix("a "))
        return torch_items.decoded(self.values[entry.fqn], self._archive)

    def read_into(self, record: Record, byte_offset: int, out: memoryview) -> None:
        self._storage.read_into(record.item.file, record.byte_offset + byte_offset, out)


def open_torch_save(storage: Storage, files: Mapping[str, int], name: str) -> Checkpoint:
    """Open a `.pt` file by reading its zip directory and its pickle.

    Args:
        storage: the folder it is in.
        files: its name → its size in bytes.
        name: of the file.

    Raises:
        UnsupportedError: it is of the format before torch 1.6, which is no zip.
        MetadataError: its zip or pickle is damaged, or it is a TorchScript archive.
        RunsCodeError: one of these, and it runs code when it is loaded.
    """
    path = join(storage.root, name)
    nbytes = files[name]
    try:
        return _opened(storage, name, nbytes, path)
    except StorageError:
        raise
    except (MetadataError, UnsupportedError) as error:
        from dcptool.pickles.files import refuse_code

        refuse_code(stream(storage, name, nbytes), error)
        raise


def _opened(storage: Storage, name: str, nbytes: int, path: str) -> Checkpoint:
    if is_legacy(storage.read(name, 0, min(nbytes, len(LEGACY_MAGIC)))):
        raise UnsupportedError(
            f"{path} was written by torch.save before 1.6 (or with the old format asked for), which is no zip.",
            next_step="Load it with torch.load and save it again.",
        )
    item = Extent(name, 0, nbytes)
    try:
        archive = TorchZip(lambda at, n: storage.read(name, at, n), nbytes, padded=True)
        if "constants.pkl" in archive.members:
            raise UnsupportedError("it is a TorchScript archive, not a state dict; torch.jit.load reads it")
        archive.require_version()
        pickled, calls = archive.content("data.pkl"), Calls()
        root = inert.load(pickled, calls=calls)
    except (ItemError, MetadataError) as error:
        raise MetadataError(f"{path}: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error
    source = TorchSaveSource(storage, item, archive)
    table = ChunkTable()
    entries: dict[str, Entry] = {}
    problems: list[Finding] = []
    again: dict[str, int] = {}
    # A value takes two bytes at the least; more of them means shared dicts that multiply.
    limit = 1000 + len(pickled)
    for count, (entry_path, value) in enumerate(_leaves(root)):
        if count > limit:
            raise MetadataError(f"{path}: it stands for more than {limit:,} entries")
        fqn = ".".join(map(str, entry_path)) or ROOT_NAME
        if fqn in entries:
            message = f"{fqn!r} is the name of several entries once keys are text; this one has a number added"
            fqn = _numbered(fqn, entries, again)
            problems.append(Finding.of("duplicate-name", message, name, fqn, severity=Severity.WARNING))
        entries[fqn] = _entry(fqn, entry_path, value, source, table, item, problems)
    problems += unsafe_pickle(sorted({*calls.unsafe, *_beside(storage, name, archive, nbytes)}), name, name)
    problems += _following(storage, archive, name)
    kinds = {fqn: entry.foreign for fqn, entry in entries.items() if isinstance(entry, ObjectEntry) and entry.foreign}
    problems += [*foreign_tensors(kinds, name), *_storage_notes(source.views, name)]
    evidence = ("a torch.save zip",)
    return Checkpoint(
        storage.root, name, TORCH_SAVE, "torch.save", evidence, entries, {name: nbytes}, table, storage, source,
        tuple(problems),
    )  # fmt: skip


def _beside(storage: Storage, name: str, archive: TorchZip, nbytes: int) -> tuple[str, ...]:
    """Return what pickles run that lie in a zip beside its own and its storages: torch loads none of them."""
    from dcptool.pickles.files import runs

    own = all(member.startswith("data/") or member in _OF_TORCH for member in archive.members)
    return () if own else runs(stream(storage, name, nbytes))


def _following(storage: Storage, archive: TorchZip, file: str) -> list[Finding]:
    """Note bytes behind the end of a file's zip, which torch reads past."""
    if not archive.n_following:
        return []
    start = archive.nbytes - archive.n_following
    rest = storage.read(file, start, min(archive.n_following, _FOLLOWING_NBYTES))
    what = "bytes" if any(rest) else "zeros"
    message = f"{archive.n_following:,} {what} follow the end of its zip, which torch.load reads past"
    step = "Padding of a storage or a copy; what reads zips strictly may refuse it."
    return [Finding.of("padded-file", message, file, next_step=step, severity=Severity.WARNING if any(rest) else None)]


def _numbered(fqn: str, taken: Container[str], again: dict[str, int]) -> str:
    """Return the first `fqn#2`, `fqn#3`, … that is not taken; `again` holds the last number of each name."""
    for number in itertools.count(again.get(fqn, 1) + 1):
        if f"{fqn}#{number}" not in taken:
            again[fqn] = number
            break
    return f"{fqn}#{again[fqn]}"


def _entry(
    fqn: str,
    path: Path,
    value: Any,
    source: TorchSaveSource,
    table: ChunkTable,
    item: Extent,
    problems: list[Finding],
) -> Entry:
    view = None
    try:
        view = tensor_view(value)
    except DcptoolError as error:
        problems.append(Finding.of("bad-tensor", f"{fqn!r}: {error}; shown as object", item.file, fqn))
    if view is None:
        source.values[fqn] = value
        return ObjectEntry(fqn, path, item, foreign_tensor(value))
    source.views[fqn] = view
    mark = table.mark()
    table.add((0,) * len(view.shape), view.shape, item)
    return TensorEntry(fqn, view.dtype, view.shape, path, table.chunks_since(mark, len(view.shape)))


def _storage_notes(views: Mapping[str, TensorView], file: str) -> list[Finding]:
    """Note tensors that are not simply a storage of their own from end to end: torch.save keeps views as views."""
    strided: list[str] = []
    partial: list[str] = []
    for fqn, view in views.items():
        if not is_contiguous(view.shape, view.strides):
            strided.append(fqn)
        elif 0 < _nbytes(view) < view.storage_nbytes:
            partial.append(fqn)
    notes = []
    if strided:
        message = f"{are(len(strided), 'tensor')} stored transposed or strided, such as {strided[0]!r}"
        notes.append(Finding.of("strided-tensors", message, file, strided[0]))
    if partial:
        view = views[partial[0]]
        part = f"{_nbytes(view):,} of {view.storage_nbytes:,} bytes, from byte {_byte_offset(view):,} on"
        message = f"{are(len(partial), 'tensor')} only part of a larger storage, such as {partial[0]!r}: {part}"
        next_step = "The file holds the whole storages; a clone() before torch.save leaves out what is not used."
        notes.append(Finding.of("partial-storage", message, file, partial[0], next_step=next_step))
    return [*notes, *_shared_storages(views, file)]


def _shared_storages(views: Mapping[str, TensorView], file: str) -> list[Finding]:
    """Note storages that several tensors use: tied weights if they are the same view of it."""
    users: dict[str, list[str]] = {}
    for fqn, view in views.items():
        if view.storage_nbytes:
            users.setdefault(view.storage, []).append(fqn)
    shared = [fqns for fqns in users.values() if len(fqns) > 1]
    if not shared:
        return []
    first = shared[0]
    more = f" and {len(first) - 2:,} more" if len(first) > 2 else ""
    what = "the same values, as tied weights" if len({views[fqn] for fqn in first}) == 1 else "parts or views of it"
    message = f"{are(len(shared), 'storage')} shared by several tensors: {first[0]!r} and {first[1]!r}{more} ({what})"
    return [Finding.of("shared-storage", message, file, first[0])]


def _nbytes(view: TensorView) -> int:
    return volume(view.shape) * dtypes.lookup(view.dtype).itemsize


def _byte_offset(view: TensorView) -> int:
    return view.storage_offset * dtypes.lookup(view.dtype).itemsize


def _mapping(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a dict, or of one of its kin in `collections` that was not executed."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, Node) or not isinstance(value.function, Global):
        return None
    name = qualified_name(value)
    try:
        if name in ("collections.OrderedDict", "collections.defaultdict") and value.called:
            return dict(value.items or ())
        if name == "collections.Counter" and len(value.args) == 1 and isinstance(value.args[0], dict):
            return value.args[0]
        # An instance with items set on it is of a subclass of dict.
        return dict(value.items) if value.items and not value.called and not value.args else None
    except TypeError:  # a key that cannot be hashed: no pickler writes that
        return None


def _key(key: Any) -> str:
    """Return a dict key as text: as `str` does for plain ones, else as its readable form."""
    if isinstance(key, str):
        return key
    try:
        return str(plain.decode(key))[:MAX_KEY_CHARS]
    except (DcptoolError, ValueError):
        return f"<{qualified_name(key)}>"


def _leaves(root: Any) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) of everything torch would not look into further.

    Dicts are always entered, lists only if they hold a tensor, a dict or such a list; tuples never, nor what Megatron
    saves as an object. An empty dict
    is a leaf here: torch drops it when it flattens, but a reader wants to know of it.
    """
    entered: dict[int, bool] = {}

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if len(path) > MAX_DEPTH:
            raise MetadataError(f"its dicts and lists are nested more than {MAX_DEPTH} deep")
        mapping = None if _is_object(path) else _mapping(value)
        if mapping:
            for key, part in mapping.items():
                yield from walk(part, (*path, _key(key)))
        elif isinstance(value, list) and value and (not path or _is_entered(value, entered)) and not _is_object(path):
            for index, part in enumerate(value):
                yield from walk(part, (*path, index))
        else:
            yield path, value

    return walk(root, ())


def _is_object(path: Path) -> bool:
    """Tell whether what is at a path is one of Megatron's sharded objects, which DCP keeps whole whatever is in it."""
    return bool(path) and isinstance(path[-1], str) and _SHARDED_OBJECT.fullmatch(path[-1]) is not None


def _is_entered(value: list[Any], known: dict[int, bool], depth: int = 0) -> bool:
    """Tell whether torch would look into a list; `known` holds the answers so far, by identity."""
    if id(value) in known:
        return known[id(value)]
    if depth > MAX_DEPTH:
        raise MetadataError(f"its lists are nested more than {MAX_DEPTH} deep")
    known[id(value)] = False
    known[id(value)] = any(
        _mapping(part) is not None
        or (isinstance(part, list) and _is_entered(part, known, depth + 1))
        or (isinstance(part, Node) and (is_tensor(part) or bool(foreign_tensor(part))))
        for part in value
    )
    return known[id(value)]
