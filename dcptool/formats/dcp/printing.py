"""Write the chunks of tensors and the places of items of a `.metadata` without an object per record.

The other half of `tensor_runs` and `bulk`: the same opcodes as CPython's pickle writes, so that what is printed here
is read in bulk too. Equal sizes are taken apart once.

Source: what CPython's pickle writes for torch's ChunkStorageMetadata, MetadataIndex and _StorageInfo, protocol 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import Box
from dcptool.formats.dcp.tokens import memo_entries
from dcptool.pickles.standins import Global, Printed, ref

_CHUNK = ref("torch.distributed.checkpoint.metadata.ChunkStorageMetadata")
_INDEX = ref("torch.distributed.checkpoint.metadata.MetadataIndex")
_PLACE = ref("torch.distributed.checkpoint.filesystem._StorageInfo")
_SIZE = ref("torch.Size")
_BATCH = 1000
_NEW = b")\x81\x94}\x94("
"""An instance without arguments, and the dict of its state begun."""

Fetch = Callable[[Global | str], bytes]


class Place(NamedTuple):
    """Where an item will be, in bytes of its file; `offsets` is None for an object."""

    name: str
    offsets: Ints | None
    file: str
    byte_offset: int
    nbytes: int


def chunks(boxes: Sequence[Box]) -> Printed:
    """Return the list of a tensor's chunks."""

    def write(fetch: Fetch) -> tuple[bytes, int]:
        size, head = fetch(_SIZE), fetch(_CHUNK) + _NEW + fetch("offsets")
        middle = fetch("sizes")
        records = (
            b"".join((head, size, _numbers(offsets), middle, size, _numbers(sizes), b"ub")) for offsets, sizes in boxes
        )
        n_memo = sum(2 + memo_entries(len(offsets)) + memo_entries(len(sizes)) for offsets, sizes in boxes)
        return b"]\x94" + _batches(list(records), b"a", b"e"), 1 + n_memo

    return Printed((_SIZE, _CHUNK, "offsets", "sizes"), write)


def places(items: Sequence[Place], boxes: Mapping[str, Sequence[Box]]) -> Printed:
    """Return `storage_data`: where each item is.

    Args:
        items: in order.
        boxes: of every tensor, in the order of its chunks, which an index hints at.
    """
    hints = {name: {offsets: index for index, (offsets, _) in enumerate(found)} for name, found in boxes.items()}
    keys = ("fqn", "offset", "index", "relative_path", "length", "transform_descriptors")
    names = dict.fromkeys(item.name for item in items)
    files = dict.fromkeys(item.file for item in items)

    def write(fetch: Fetch) -> tuple[bytes, int]:
        fqn, offset, index, path, length, transforms = map(fetch, keys)
        size, begin, middle = fetch(_SIZE), fetch(_INDEX) + _NEW + fqn, b"ub" + fetch(_PLACE) + _NEW + path
        end = transforms + b"Nub"
        fetched = {text: fetch(text) for text in (*names, *files)}
        records, n_memo = [], 0
        for item in items:
            if item.offsets is None:
                where, hint = b"N", b"N"
            else:
                where, hint = size + _numbers(item.offsets), integer(hints[item.name][item.offsets])
                n_memo += memo_entries(len(item.offsets))
            parts = (begin, fetched[item.name], offset, where, index, hint, middle, fetched[item.file], offset)
            records.append(b"".join((*parts, integer(item.byte_offset), length, integer(item.nbytes), end)))
        return b"}\x94" + _batches(records, b"s", b"u"), 1 + n_memo + 4 * len(items)

    return Printed((_SIZE, _INDEX, _PLACE, *keys, *names, *files), write)


def _batches(records: Sequence[bytes], one: bytes, many: bytes) -> bytes:
    """Put records into the container below them, as many at a time as a reader should hold on its stack."""
    found: list[bytes] = []
    for start in range(0, len(records), _BATCH):
        batch = records[start : start + _BATCH]
        found += [*batch, one] if len(batch) == 1 else [b"(", *batch, many]
    return b"".join(found)


@functools.lru_cache(100_000)
def _numbers(numbers: Ints) -> bytes:
    """Return a torch.Size after the opcode that fetches the class."""
    parts = b"".join(map(integer, numbers))
    if not numbers:
        return b")\x85\x94R\x94"
    made = (b"\x85", b"\x86", b"\x87")[len(numbers) - 1] if len(numbers) <= 3 else b"t"
    return (b"(" if len(numbers) > 3 else b"") + parts + made + b"\x94\x85\x94R\x94"


def integer(value: int) -> bytes:
    """Return the opcode of a number that is not negative."""
    if value < 256:
        return b"K%c" % value
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    nbytes = value.bit_length() // 8 + 1
    return b"\x8a%c" % nbytes + value.to_bytes(nbytes, "little")
