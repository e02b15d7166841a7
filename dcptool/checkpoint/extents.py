"""The values every layer speaks: where bytes are (extent, record, payload) and which box they are (chunk).

Plain data; imports nothing that reads or decodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dcptool.storage.base import join

Ints = tuple[int, ...]


class Extent(NamedTuple):
    """A run of bytes in one file: how the metadata places an item.

    Attributes:
        file: name relative to the checkpoint's root, with forward slashes.
        byte_offset, nbytes: place and length in the file, in bytes.
        transforms: names of the stream transforms the bytes went through, in order of application
            (`stream.zstd`); empty for nearly all checkpoints.
    """

    file: str
    byte_offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()

    @property
    def span(self) -> tuple[int, int]:
        """First byte and one past the last."""
        return self.byte_offset, self.byte_offset + self.nbytes


def place_words(item: Extent | None, fqn: str = "", offsets: Ints = (), root: str = "") -> str:
    """Say where something is stored, as far as it is known.

    >>> place_words(Extent("__0_0.distcp", 0, 1641), "w", (4, 0)), place_words(None, "w")
    ("__0_0.distcp, bytes 0–1,641: 'w' at [4, 0]", "'w'")
    """
    at = f" at {list(offsets)}" if offsets else ""
    where = root
    if item:
        file = join(root, item.file) if root else item.file
        where = f"{file}, bytes {item.span[0]:,}–{item.span[1]:,}"
    return ": ".join(filter(None, (where, f"{fqn!r}{at}" if fqn else "")))


class Record(NamedTuple):
    """One run of payload bytes inside an item: a zip member, or a tensor of a safetensors blob.

    Attributes:
        item: the item that holds it.
        byte_offset, nbytes: place and length inside the item, after its transforms are undone, in bytes.
        name: the member's name.
        crc32: its stored checksum, None where the writer stored none.
    """

    item: Extent
    byte_offset: int
    nbytes: int
    name: str
    crc32: int | None


class Payload(NamedTuple):
    """A record seen as a strided array.

    Attributes:
        record: the bytes.
        dtype: torch's name without prefix.
        shape: dimensions, in elements.
        strides: step per dimension, in elements.
        storage_offset: first element's place in the record, in elements.
        conj, neg: the values are the conjugate, the negative of the stored ones.
    """

    record: Record
    dtype: str
    shape: Ints
    strides: Ints
    storage_offset: int = 0
    conj: bool = False
    neg: bool = False


class Examined(NamedTuple):
    """What the headers of an item say.

    Attributes:
        payload: of a chunk; None for an object.
        records: all runs of bytes in the item, also those that are no payload.
        unsafe: what its pickle would run, by name; see `pickles.calls`.
        foreign: what it is, if that is a tensor of a form or class that is not looked into; then there is no payload.
        inner: its inner tensors, by name, if it is made of tensors that are looked into.
    """

    payload: Payload | None
    records: tuple[Record, ...]
    unsafe: tuple[str, ...] = ()
    foreign: str = ""
    inner: tuple[tuple[str, Payload], ...] = ()


class Chunk(NamedTuple):
    """A box of a tensor that is stored as one item; made on access, never kept.

    Attributes:
        offsets, sizes: the box, in elements of the whole tensor.
        item: where it is stored, None if the metadata names no place for it.
    """

    offsets: Ints
    sizes: Ints
    item: Extent | None


def whereabouts(item: Extent | None, fqn: str | None, chunk: Chunk | None) -> tuple[Any, ...]:
    """Return where something is stored as a finding has it: file, fqn, offsets, sizes, byte range."""
    box = (chunk.offsets, chunk.sizes) if chunk else (None, None)
    return item.file if item else None, fqn or None, *box, item.span if item else None
