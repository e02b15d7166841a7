"""Open a DCP directory: its metadata, the files beside it, and what software wrote it."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import ObjectEntry, TensorEntry
from dcptool.checkpoint.findings import Finding, unsafe_pickle
from dcptool.checkpoint.format import Variant
from dcptool.checkpoint.regions import volume
from dcptool.errors import CheckpointNotFoundError, MetadataError, RunsCodeError, StorageError, UnsupportedError
from dcptool.formats.dcp.build import View, build
from dcptool.formats.dcp.copy_folders import WithCopies, copies_note, find_copies
from dcptool.formats.dcp.format import DCP, METADATA, data_file_rank, metadata_names, metadata_rank, rank_metadata
from dcptool.formats.dcp.items import DcpSource
from dcptool.formats.dcp.metadata import Records, check_pickle_start, read_records
from dcptool.storage import Storage, join
from dcptool.storage.stream import stream

MAX_METADATA_NBYTES = 8 << 30


def open_dcp(storage: Storage, files: Mapping[str, int], name: str = "") -> Checkpoint:
    """Open a DCP directory by reading its metadata.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it.
        name: of the metadata, if that was named; it stands for the folder. That of one rank, where there is no other,
            has this rank's values first.

    Raises:
        CheckpointNotFoundError: there are data files but no metadata: the save never finished.
        MetadataError: the metadata cannot be read.
        UnsupportedError: one data file was named.
    """
    if data_file_rank(name) is not None:
        path = join(storage.root, name)
        raise UnsupportedError(f"{path} is one data file of a DCP checkpoint; name its folder: {storage.root}")
    names = metadata_names(files)
    if not names:
        raise _unfinished(storage, files)
    own = name in names and name != METADATA
    names = [name, *(other for other in names if other != name)] if own else names
    with collector_paused():
        parts, unread = _all_records(storage, {name: files[name] for name in names})
        if own and name not in parts:
            raise MetadataError(next(found.message for found in unread if found.file == name))
        view = build(parts, own)
    problems = [*unread, *view.problems]
    objects = (entry.item.file for entry in view.entries.values() if isinstance(entry, ObjectEntry) and entry.item)
    copies = find_copies(storage, dict.fromkeys([*view.table.files, *objects]), files)
    if copies:
        problems.append(copies_note(copies))
        files = {**files, **{name: entry.nbytes for name, entry in copies.items()}}
        storage = WithCopies(storage, copies)
    if names == [METADATA] and rank_metadata(files):
        message = "there are rank-local __R.metadata files beside .metadata; .metadata is used"
        problems.append(Finding.of("two-metadata", message, file=METADATA))
    if names != [METADATA]:
        problems += _rank_gaps(storage.root, names, files)
    evidence = list(dict.fromkeys(phrase for records in parts.values() for phrase in records.evidence))
    evidence += [f"{name} was named: what rank {metadata_rank(name)} saved comes first"] if own else []
    extra = next(iter(parts.values())).extra
    flavour, variant, more = _flavour(storage, files, view, names, extra)
    source = DcpSource(storage)
    return Checkpoint(
        storage.root,
        name if own else "",
        DCP,
        flavour,
        (*more, *evidence),
        view.entries,
        dict(files),
        view.table,
        storage,
        source,
        tuple(problems),
        extra,
        next(iter(parts.values())).save_id,
        frozenset().union(*(records.requires_grad for records in parts.values())),
        variant,
        next(iter(parts.values())).version,
        _planner_data(parts.values()),
    )


def _planner_data(parts: Iterable[Records]) -> Any:
    """Return what planners left in the metadata, that of several ranks as one."""
    found = [records.planner_data for records in parts]
    if len(found) == 1 or not all(isinstance(one, dict) for one in found):
        return found[0]
    return {key: value for one in reversed(found) for key, value in one.items()}


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from walking millions of young objects again and again: none of them is a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _all_records(storage: Storage, names: Mapping[str, int]) -> tuple[dict[str, Records], list[Finding]]:
    """Read one metadata file, or those of all ranks; of one that is damaged among others, say so."""
    parts: dict[str, Records] = {}
    problems: list[Finding] = []
    failed: MetadataError | None = None
    for name, nbytes in names.items():
        try:
            parts[name] = _records(storage, name, nbytes)
        except MetadataError as error:
            failed = error
            message = error.message
            if isinstance(error, RunsCodeError):
                problems += unsafe_pickle(error.names, name, name)
                continue
            kind = "rank-metadata-damaged" if nbytes else "rank-metadata-missing"
            step = f"Move it away, then {rescue_command(storage.root)} may rebuild it."
            problems.append(Finding.of(kind, message, name, next_step=step))
    if failed and not parts:
        raise failed
    return parts, problems


def _records(storage: Storage, name: str, nbytes: int) -> Records:
    path = join(storage.root, name)
    if nbytes > MAX_METADATA_NBYTES:
        raise MetadataError(f"{path} has {nbytes:,} bytes, more than any DCP metadata needs")
    try:
        start = storage.read(name, 0, min(nbytes, 512))
        try:
            check_pickle_start(start)
        except MetadataError as error:
            from dcptool.pickles.files import refuse_code

            refuse_code(stream(storage, name, nbytes), error)
            raise
        return read_records(storage.read(name, 0, nbytes))
    except MetadataError as error:
        step = f"move it away, then {rescue_command(storage.root)} may rebuild it"
        raise error.saying(
            f"{path}: {error.message}",
            next_step=f"Nothing can be loaded without it; resume from another step, or {step}.",
        ) from error


def rescue_command(path: str) -> str:
    """Return the command that may rebuild the lost metadata of a checkpoint."""
    return f"dcptool rescue {path} --like STEP"


def _unfinished(storage: Storage, files: Mapping[str, int]) -> CheckpointNotFoundError:
    ranks = sorted({rank for name in files if (rank := data_file_rank(name)) is not None})
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"
    temporary = next((name for name in files if name.startswith(".metadata") and name != METADATA), None)
    present = f"; {temporary} is there" if temporary else ""
    return CheckpointNotFoundError(
        f"{storage.root}: no .metadata, only data files of {shown}{present}: the save never finished, or this is one "
        "node's half of it.",
        next_step="Resume from an older step, or bring the files of all nodes together; if they are, dcptool rescue "
        "may rebuild it.",
    )


def _rank_gaps(root: str, names: list[str], files: Mapping[str, int]) -> list[Finding]:
    """Name the ranks without metadata: those below the highest that has some, and those that left data."""
    ranks = {rank for name in names if (rank := metadata_rank(name)) is not None}
    with_data = {data_file_rank(name) for name, nbytes in files.items() if nbytes} - {None} - ranks
    n_below = max(ranks) + 1 - len(ranks)
    n_missing = n_below + sum(rank is not None and rank > max(ranks) for rank in with_data)
    if not n_missing:
        return []
    first = next(rank for rank in itertools.count() if rank not in ranks and (n_below or rank in with_data))
    which = f"rank {first}" if n_missing == 1 else f"{n_missing:,} ranks, the first {first},"
    message = f"rank-local metadata of {which} is missing: what was saved there is unknown"
    step = f"Bring the files of all ranks together; if they are, {rescue_command(root)} may rebuild what was lost."
    return [Finding.of("rank-metadata-missing", message, next_step=step)]


def _flavour(
    storage: Storage, files: Mapping[str, int], view: View, names: list[str], extra: Mapping[str, Any]
) -> tuple[str, Variant, list[str]]:
    """Name the software or variant, what follows from it, and what tells so."""
    evidence: list[str] = []
    backend = megatron_backend(storage, files)
    is_megatron = backend is not None or "all_local_plans" in extra
    if is_megatron:
        evidence += [f'metadata.json says "{backend}"'] if backend else []
        evidence += ["all_local_plans in .metadata"] if "all_local_plans" in extra else []
        flavour = f"Megatron {backend or 'torch_dist'}"
    elif "meta.pt" in files:
        flavour, evidence = "Lightning", ["meta.pt beside .metadata"]
    else:
        flavour = "torch DCP"
    if names != [METADATA]:
        flavour += ", rank-local metadata"
        evidence.append(f"{len(names)} × __R.metadata, no .metadata: saved with use_collectives=False")
    shares_places = _is_safetensors(view)
    if shares_places:
        flavour += ", SAFETENSORS serialization"
        evidence.append("items are as long as their values")
    codecs = {name for transforms in view.table.transforms for name in transforms}
    if codecs:
        evidence.append(f"items went through {', '.join(sorted(codecs))}")
    return flavour, Variant(is_megatron, is_megatron, shares_places), evidence


def megatron_backend(storage: Storage, files: Mapping[str, int]) -> str | None:
    """Return the back end that Megatron's metadata.json names, None if there is no such file."""
    nbytes = files.get("metadata.json", 0)
    if not 0 < nbytes <= 1 << 16:
        return None
    try:
        fields = json.loads(storage.read("metadata.json", 0, nbytes))
    except (ValueError, RecursionError, StorageError):
        return None
    backend = fields.get("sharded_backend") if isinstance(fields, dict) else None
    return backend if isinstance(backend, str) else None


def _is_safetensors(view: View) -> bool:
    """Tell SAFETENSORS serialization by its first stored value: an item as long as the value has no zip around it."""
    for entry in view.entries.values():
        if isinstance(entry, TensorEntry) and entry.dtype in dtypes.BY_NAME:
            for chunk in entry.chunks:
                nbytes = volume(chunk.sizes) * dtypes.BY_NAME[entry.dtype].itemsize
                if nbytes and chunk.item:
                    return chunk.item.nbytes == nbytes
    return False
