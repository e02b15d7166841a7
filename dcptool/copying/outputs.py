"""What an output file is made of, as values: laid out by the writers of formats, written by the engine.

Plain data; reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.extents import Ints, Record


class Literal(NamedTuple):
    """Bytes of an output file that are known in advance."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return len(self.data)


class Fill(NamedTuple):
    """A box of a source tensor, written row-major and little-endian.

    Attributes:
        fqn: of the source tensor.
        offsets, sizes: the box, in elements of the whole tensor.
        dtype: of the output; values are cast where it differs from the source's.
        nbytes: length in the output, in bytes.
    """

    fqn: str
    offsets: Ints
    sizes: Ints
    dtype: str
    nbytes: int


class Verbatim(NamedTuple):
    """Bytes of one record of a source file, as they are."""

    record: Record

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.record.nbytes


class Closing(NamedTuple):
    """Bytes that depend on what was written before them: a zip's descriptors and its directory.

    Attributes:
        nbytes: their length, known in advance.
        make: gives them from the CRC32 of every Fill and Verbatim of the file so far, in order.
    """

    nbytes: int
    make: Callable[[Sequence[int]], bytes]


Part = Literal | Fill | Verbatim | Closing


class OutputFile(NamedTuple):
    """A file to be written front to back: its name, its exact length in bytes, and what it is made of.

    The parts may be made as they are asked for, each time anew.
    """

    name: str
    nbytes: int
    parts: Iterable[Part]


class Merged(NamedTuple):
    """What goes into a `.pt` file beside the selection: the stand-ins of a dict, and its storages by their keys."""

    root: Mapping[str, Any]
    storages: Mapping[str, Record]


class Wanted(NamedTuple):
    """How an output shall be.

    Attributes:
        path: where it will be.
        objects: "keep", "skip" or "error"; None for what the format does by itself.
        nesting: "auto" to nest as the source's paths say, "flat" for one flat dict; of `.pt` files.
        max_shard_nbytes: size of safetensors shards, in bytes.
        merged: what goes into a `.pt` file too, at the top.
        torch: oldest version of torch that shall read DCP output; None for the oldest that can.
    """

    path: str
    objects: str | None = None
    nesting: str = "auto"
    max_shard_nbytes: int = 5_000_000_000
    merged: Merged | None = None
    torch: tuple[int, int] | None = None


class LaidOut(NamedTuple):
    """What is to be written.

    Attributes:
        files: what may be written in any order.
        is_file: whether the output is the one file, else a folder of them.
        n_objects: objects that are kept.
        skipped: fqns of those that are not.
        notes: worth knowing, one sentence each.
        validate: checks the written output at a path with a library that is not ours, where there is one.
        last: files that are written after all others, in order: what makes the output complete, but for a marker.
    """

    files: tuple[OutputFile, ...]
    is_file: bool
    n_objects: int
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    validate: Callable[[str], None] = lambda path: None
    last: tuple[OutputFile, ...] = ()

    @property
    def all_files(self) -> tuple[OutputFile, ...]:
        """All of them, in the order in which they may be written."""
        return (*self.files, *self.last)

    def below(self, folder: str) -> LaidOut:
        """Return it with all names as those of files in a folder."""
        if not folder:
            return self
        files, last = (
            tuple(file._replace(name=f"{folder}/{file.name}") for file in some) for some in (self.files, self.last)
        )
        return self._replace(files=files, last=last)
