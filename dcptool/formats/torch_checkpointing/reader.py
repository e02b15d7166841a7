"""A folder of torch_checkpointing as one checkpoint: each item's values under the item's name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding, unsafe_pickle
from dcptool.errors import DcptoolError
from dcptool.formats.torch_checkpointing.format import (
    MAX_RANKS,
    METADATA,
    TORCH_CHECKPOINTING,
    ItemFile,
    named,
)
from dcptool.formats.torch_save.build import Builder
from dcptool.formats.torch_save.files import TorchFile
from dcptool.formats.torch_save.flatten import Path, leaves
from dcptool.formats.torch_save.ranks import add_joined, by_path, load_files
from dcptool.pickles import inert
from dcptool.pickles.calls import Calls
from dcptool.pickles.emit import emit
from dcptool.storage import Storage
from dcptool.words import plural

MAX_METADATA_NBYTES = 1 << 30


class _Recorded(NamedTuple):
    """What `metadata.pkl` says: how many ranks saved, and of each item that is cut the tensors' shapes by path."""

    world_size: int
    shapes: Mapping[str, Mapping[Path, Ints]]
    problems: tuple[Finding, ...]


def open_torch_checkpointing(storage: Storage, files: Mapping[str, int], name: str = "") -> Checkpoint:
    """Open a folder of torch_checkpointing.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it.
        name: "", the folder.

    Raises:
        StorageError: the folder cannot be read.
    """
    recorded = _recorded(storage, files[METADATA])
    found = [file for file in map(named, files) if file]
    items = sorted({*(file.item for file in found), *recorded.shapes})
    n_ranks = 1 + max(file.rank for file in found)
    n_ranks = recorded.world_size if n_ranks * len(items) > MAX_RANKS else max(n_ranks, recorded.world_size)
    names = [ItemFile(item, rank).name for item in items for rank in range(n_ranks)]
    loaded, problems = load_files(storage, files, names)
    builder = Builder(storage, loaded.values())
    builder.problems += [*recorded.problems, *problems]
    for item in items:
        ours = [file for rank in range(n_ranks) if (file := loaded.get(ItemFile(item, rank).name))]
        alike = item not in recorded.shapes and _is_alike(ours)
        if item in recorded.shapes or alike:
            _add_item(builder, item, ours, alike)
        else:
            _add_by_rank(builder, item, ours)
    builder.problems += [] if problems else _unlike(builder.entries, recorded.shapes)
    evidence = (METADATA, f"{plural(len(items), 'item')} of {plural(n_ranks, 'rank')}")
    own = {name: nbytes for name, nbytes in files.items() if name == METADATA or named(name)}
    return builder.checkpoint("", TORCH_CHECKPOINTING, "torch_checkpointing", evidence, own)


def _add_item(builder: Builder, item: str, files: Sequence[TorchFile], alike: bool) -> None:
    """Add an item of which each rank has its part, or a copy."""
    values, wrong = by_path(files)
    builder.problems += wrong
    for path, found in values.items():
        add_joined(builder, ".".join(map(str, (item, *path))), (item, *path), found, alike=alike)


def _add_by_rank(builder: Builder, item: str, files: Sequence[TorchFile]) -> None:
    """Add an item of which each rank has its own, under names that say the rank."""
    for file in files:
        known = named(file.name)
        place = (item, f"rank{known.rank if known else 0}")
        try:
            for path, value in leaves(file.root, file.pickle_nbytes):
                builder.add_value(".".join(map(str, (*place, *path))), (*place, *path), value, file)
        except DcptoolError as error:
            builder.problems.append(Finding.of("bad-file", f"{file.name}: {error}", file.name))


def _is_alike(files: Sequence[TorchFile]) -> bool:
    """Tell whether ranks saved the same: by their pickles, and by the checksums of the storages, if there are any."""
    kept = set()
    for file in files:
        stored = [member for name, member in file.archive.members.items() if name.startswith("data/")]
        if len(files) > 1 and any(member.crc32 is None and member.nbytes for member in stored):
            return False
        kept.add((emit(file.root, 4), tuple(sorted((member.name, member.nbytes, member.crc32) for member in stored))))
    return len(kept) <= 1


def _recorded(storage: Storage, nbytes: int) -> _Recorded:
    try:
        calls = Calls()
        value = inert.load(storage.read(METADATA, 0, min(nbytes, MAX_METADATA_NBYTES)), calls=calls)
        unsafe = unsafe_pickle(sorted(calls.unsafe), METADATA, METADATA)
        if unsafe:
            return _Recorded(1, {}, tuple(unsafe))
        size = value["world_size"]
        if type(size) is not int or not 0 < size <= MAX_RANKS:
            raise ValueError(f"world_size {size!r}")
        shapes = {
            item: {
                tuple(json.loads(path)): tuple(kinds[0]["sharding_metadata"]["data"]["global_shape"])
                for path, kinds in known["nested_path_to_metadata"].items()
                if kinds[0]["sharding_metadata"]["type"] == "DTensorShardingMetadata"
            }
            for item, known in value["metadata"].items()
        }
        return _Recorded(size, shapes, ())
    except (DcptoolError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"{METADATA} cannot be understood: {error}"[:300]
        step = "What the files hold is shown; how many ranks saved, their names alone tell."
        return _Recorded(1, {}, (Finding.of("bad-metadata", message, METADATA, next_step=step),))


def _unlike(entries: Mapping[str, Entry], shapes: Mapping[str, Mapping[Path, Ints]]) -> Iterator[Finding]:
    """Yield what the metadata says otherwise than the files."""
    for item, known in shapes.items():
        for path, shape in known.items():
            fqn = ".".join(map(str, (item, *path)))
            entry = entries.get(fqn)
            if entry is None:
                yield Finding.of("missing-tensor", f"{METADATA} names {fqn!r}, which is in no file", METADATA, fqn)
            elif not isinstance(entry, TensorEntry) or entry.shape != shape:
                stored = f"of {list(entry.shape)}" if isinstance(entry, TensorEntry) else "an object"
                message = f"{fqn!r} is of shape {list(shape)} in {METADATA}, and {stored} in the files"
                yield Finding.of("ranks-disagree", message, METADATA, fqn)
