"""safetensors: one file, an index, a folder, and the sharded sets that DCP's HuggingFace writer leaves.

Source: the Hugging Face index layout (`weight_map`); torch 2.13, distributed/checkpoint/hf_storage.py, for files
named `shard-RRRRR-model-….safetensors` whose tensors are parts of larger ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.cover import cover
from dcptool.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Examined, Extent, Ints, Payload, Record
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.format import Variant
from dcptool.checkpoint.regions import Box, contiguous_strides, volume
from dcptool.errors import CheckpointNotFoundError, LayoutError, MetadataError, UnsupportedError
from dcptool.formats.safetensors.format import SAFETENSORS, SUFFIX, is_index, shard_number
from dcptool.formats.safetensors.header import Header, read_header
from dcptool.formats.weight_map import index_problems, missing_of_set, read_each, read_weight_map, unlisted_files
from dcptool.storage import Storage, join
from dcptool.words import listed, plural

_OTHER_WEIGHTS = re.compile(r"((pytorch_|adapter_)?model([-_]\d+-of-\d+)?\.bin)|consolidated\.\d+\.pth")
_MAX_NAMED = 20
_NAME_ONE = "Two saves, or two forms of one: name the file itself to take what it holds, or move the other away."


class SafetensorsSource:
    """Reads tensors at the places their headers gave."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.unsafe: dict[str, tuple[str, ...]] = {}

    def payload(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> Payload:
        record = Record(item, 0, item.nbytes, entry.fqn, None)
        return Payload(record, entry.dtype, chunk.sizes, contiguous_strides(chunk.sizes))

    def examine(self, entry: Entry, chunk: Chunk | None, item: Extent) -> Examined:
        if chunk is None or not isinstance(entry, TensorEntry):
            raise UnsupportedError("safetensors holds no objects")
        payload = self.payload(entry, chunk, item)
        return Examined(payload, (payload.record,))

    def edge_problem(self, item: Extent) -> str:
        return ""  # all headers were read when it was opened

    def graph(self, entry: ObjectEntry) -> tuple[Any, dict[str, Record]]:
        raise UnsupportedError("safetensors holds no objects")

    def stored(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> None:
        return None  # a file holds plain tensors

    def over(self, storage: Storage) -> SafetensorsSource:
        return SafetensorsSource(storage)

    def value(self, entry: ObjectEntry) -> Any:
        raise UnsupportedError("safetensors holds no objects")

    def read_into(self, record: Record, byte_offset: int, out: memoryview) -> None:
        self._storage.read_into(record.item.file, record.item.byte_offset + byte_offset, out)


def open_safetensors(storage: Storage, files: Mapping[str, int], name: str = "") -> Checkpoint:
    """Open one safetensors file, an index, or all safetensors files of a folder.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it.
        name: the file or index to open; "" for the folder, of which the index counts if there is one.

    Raises:
        MetadataError: a header or the index cannot be read.
    """
    index = name if is_index(name) else ""
    if not name:
        indexes = sorted(filter(is_index, files))
        if len(indexes) > 1:
            paths = ", ".join(join(storage.root, file) for file in indexes)
            raise CheckpointNotFoundError(f"{storage.root} holds {len(indexes)} safetensors indexes; name one: {paths}")
        index = indexes[0] if indexes else ""
    weight_map = read_weight_map(storage, index, files.get(index, 0)) if index else None
    if weight_map is not None:
        wanted = list(dict.fromkeys(weight_map.values()))
    else:
        wanted = [name] if name else sorted(file for file in files if file.endswith(SUFFIX))
    headers, problems = read_each(storage, files, wanted, index, partial(_header, storage), (MetadataError,))
    parts = _parts(headers)
    if weight_map is not None:
        places = {fqn: [item.file for _, _, item, _ in found] for fqn, found in parts.items()}
        problems += index_problems(index, weight_map, places, headers)
    if not name:
        problems += missing_of_set(headers, files)
    if index and not name:
        ours = (file for file in files if file.endswith(SUFFIX) and file not in headers and "/" not in file)
        problems += unlisted_files(index, sorted(ours))
    problems += _other_weights(files) if not name else []
    sharded = any(header.saved_offsets for header in headers.values())
    own = {file: nbytes for file, nbytes in files.items() if file in headers or file == index}
    table = ChunkTable()
    entries: dict[str, Entry] = {}
    for fqn, chunks in parts.items():
        entries[fqn] = _entry(fqn, chunks, table, problems)
    problems += _absent_shards(headers, entries)
    flavour, evidence = "safetensors", [f"{plural(len(headers), 'file')} with safetensors headers"]
    if sharded:
        flavour = "safetensors, HuggingFace DCP shards"
        evidence.append("DCP_SHARDING_INFO in the headers: HuggingFaceStorageWriter")
    if index:
        evidence.append(index)
    return Checkpoint(
        storage.root, name, SAFETENSORS, flavour, tuple(evidence), entries, own, table, storage,
        SafetensorsSource(storage), tuple(problems),
        {"metadata": {file: header.metadata for file, header in headers.items()}}, variant=Variant(open_shapes=sharded),
    )  # fmt: skip


def _absent_shards(headers: Mapping[str, Header], entries: Mapping[str, Entry]) -> list[Finding]:
    """Name the ranks between the first and the last without a file; that the last are missing, nothing tells.

    A rank that had nothing to write leaves no file, so boxes decide: files are missing where tensors have holes.
    """
    ranks = {number for file in headers if (number := shard_number(file)) is not None}
    if not ranks or len(ranks) == max(ranks):
        return []
    absent = [rank for rank in range(1, max(ranks)) if rank not in ranks]
    named = listed(list(map(str, absent)), _MAX_NAMED, counted=False)
    which = f"shard{'s' * (len(absent) > 1)} {named} of at least {max(ranks):,}"
    if any(isinstance(entry, TensorEntry) and _has_hole(entry) for entry in entries.values()):
        message = f"the files of {which} are missing"
        return [Finding.of("missing-file", message, next_step="Gather the files of all ranks.")]
    message = (
        f"there is no file of {which}, and no part of a tensor is missing: those ranks wrote nothing, or whole ones"
    )
    return [Finding.of("last-shards-unknown", message)]


def _has_hole(entry: TensorEntry) -> bool:
    try:
        return cover(entry.shape, entry.chunks, max_found=1).n_missing > 0
    except LayoutError:
        return False


def _other_weights(files: Mapping[str, int]) -> list[Finding]:
    """Name files in which torch.save keeps weights: they are not read, and may be of another save."""
    other = sorted(filter(_OTHER_WEIGHTS.fullmatch, files))
    if not other:
        return []
    message = f"weights are in {listed(other, _MAX_NAMED)} too, which {'is' if len(other) == 1 else 'are'} not read"
    step = "A copy of the same, or of an older or a newer save: dcptool diff of a file of each tells."
    return [Finding.of("other-weights", message, other[0], next_step=step)]


def _header(storage: Storage, file: str, nbytes: int) -> Header:
    try:
        return read_header(lambda at, n: storage.read(file, at, n), nbytes)
    except MetadataError as error:
        raise MetadataError(f"{join(storage.root, file)}: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{join(storage.root, file)}: {error.message}", next_step=error.next_step) from error


_Part = tuple[Box, str, Extent, bool]  # box in the whole tensor, dtype, where it is, whether the file says it is a part


def _parts(headers: Mapping[str, Header]) -> dict[str, list[_Part]]:
    """Gather the stored parts of every tensor, in file order."""
    parts: dict[str, list[_Part]] = {}
    for file, header in headers.items():
        for fqn, found in header.tensors.items():
            offsets = header.saved_offsets.get(fqn, (0,) * len(found.shape))
            item = Extent(file, header.data_offset + found.byte_offset, found.nbytes)
            sharded = fqn in header.saved_offsets
            parts.setdefault(fqn, []).append(((offsets, found.shape), found.dtype, item, sharded))
    return parts


def _entry(fqn: str, parts: list[_Part], table: ChunkTable, problems: list[Finding]) -> TensorEntry:
    (first_offsets, _), dtype, _, _ = parts[0]
    ndim = len(first_offsets)
    shape: Ints = (0,) * ndim
    mark = table.mark()
    placed: set[Box] = set()
    replicas = []
    for box, part_dtype, item, sharded in parts:
        if len(box[0]) != ndim or part_dtype != dtype:
            message = (
                f"{fqn!r} is {part_dtype} with {len(box[0])} dimensions in {item.file}, other files differ; left out"
            )
            step = "" if sharded else _NAME_ONE
            problems.append(Finding.of("parts-disagree", message, item.file, fqn, next_step=step))
        elif placed and not sharded:
            message = f"{fqn!r} is in {parts[0][2].file} and in {item.file}, which are no shards; the first is shown"
            problems.append(Finding.of("duplicate-name", message, item.file, fqn, next_step=_NAME_ONE))
        elif box in placed:
            replicas.append(Chunk(*box, item))
        elif volume(tuple(a + b for a, b in zip(*box, strict=True))) >= 1 << 59:
            message = f"{fqn!r} is said to begin at {list(box[0])} in {item.file}, beyond any tensor; left out"
            problems.append(Finding.of("bad-chunk", message, item.file, fqn))
        else:
            placed.add(box)
            table.add(*box, item)
            # The format does not record the whole shape: it is where the farthest part ends.
            shape = tuple(max(n, a + b) for n, a, b in zip(shape, *box, strict=True))
    return TensorEntry(fqn, dtype, shape, None, table.chunks_since(mark, ndim), tuple(replicas))
