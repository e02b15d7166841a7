"""A `Checkpoint` out of what files of torch.save hold: whole tensors, pieces of larger ones, objects."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Ints
from dcptool.checkpoint.findings import Finding, foreign_tensors
from dcptool.checkpoint.format import USUAL, Format, Variant
from dcptool.checkpoint.kinds import Severity
from dcptool.errors import DcptoolError, UnsupportedError
from dcptool.formats.torch_save.files import TorchFile
from dcptool.formats.torch_save.flatten import Path
from dcptool.formats.torch_save.source import TorchSaveSource
from dcptool.pickles.sharded import Sharded, sharded_tensor
from dcptool.pickles.tensors import TensorView, foreign_tensor, tensor_view
from dcptool.pickles.wrapped import Wrapped, wrapped
from dcptool.storage import Storage


class StoredBox(NamedTuple):
    """A box of a tensor in one file.

    Attributes:
        file: name of the file.
        offsets: first element of the box in the whole tensor; its sizes are the view's shape.
        view: of a storage of that file.
    """

    file: str
    offsets: Ints
    view: TensorView


class Builder:
    """Gathers the entries of a checkpoint whose files torch.save wrote.

    Args:
        storage: the folder they are in.
        files: the files, opened.

    Attributes:
        problems: what is wrong, the files' own problems first; to be added to.
        entries: that were added, by fqn.
        parts: of tensors that `add_value` found to be one rank's part of a larger one, by fqn.
    """

    def __init__(self, storage: Storage, files: Iterable[TorchFile]) -> None:
        self._storage = storage
        self._files = {file.name: file for file in files}
        self._source = TorchSaveSource(storage, {file.name: file.archive for file in self._files.values()})
        self._table = ChunkTable()
        self.entries: dict[str, Entry] = {}
        self._again: dict[str, int] = {}
        self.parts: dict[str, Sharded] = {}
        self.problems: list[Finding] = [problem for file in self._files.values() for problem in file.problems]

    def views(self, file: str) -> dict[str, TensorView]:
        """Return the views of all tensors of a file so far, by fqn."""
        return {fqn: view for (fqn, _, name), view in self._source.views.items() if name == file}

    def add_value(self, fqn: str, path: Path, value: Any, file: TorchFile, copies: Sequence[TorchFile] = ()) -> None:
        """Add what a file's pickle holds at a path: a tensor, one rank's part of one, or an object.

        Args:
            fqn, path: of the entry.
            value: at that path.
            file: that holds it.
            copies: files that hold all the same, if it is an object.
        """
        fqn = self.free(fqn, file.name)
        view, part, found, foreign = None, None, None, ""
        try:
            view = tensor_view(value)
            part = sharded_tensor(value) if view is None else None
            found = wrapped(value) if view is None and part is None else None
        except UnsupportedError as error:
            foreign = str(error)
        except DcptoolError as error:
            self.problems.append(Finding.of("bad-tensor", f"{fqn!r}: {error}; shown as object", file.name, fqn))
        if part is not None:
            self.parts[fqn] = part
            pieces = [StoredBox(file.name, offsets, view) for offsets, view in part.pieces]
            self.add_tensor(fqn, path, part.dtype, part.shape, pieces)
        elif found is not None:
            self._add_wrapped(fqn, path, value, found, file)
        elif view is not None:
            self.add_tensor(fqn, path, view.dtype, view.shape, [StoredBox(file.name, (0,) * len(view.shape), view)])
        else:
            self._source.values[fqn] = value
            replicas = tuple(copy.item for copy in copies)
            self.entries[fqn] = ObjectEntry(fqn, path, file.item, foreign or foreign_tensor(value), replicas)

    def _add_wrapped(self, fqn: str, path: Path, value: Any, found: Wrapped, file: TorchFile) -> None:
        """Add a tensor made of tensors, whole in a file."""
        mark, shape = self._table.mark(), found.piece.shape
        self._table.add((0,) * len(shape), shape, file.item)
        self._source.values[fqn], self._source.wrapped[fqn] = value, found
        chunks = self._table.chunks_since(mark, len(shape))
        self.entries[fqn] = TensorEntry(fqn, found.piece.dtype, shape, path, chunks, kind=found.piece.kind)

    def add_tensor(self, fqn: str, path: Path | None, dtype: str, shape: Ints, pieces: Sequence[StoredBox]) -> None:
        """Add a tensor in pieces; of a box that is there more than once, the first is a chunk, the others are copies.

        Args:
            fqn: name that no other entry has.
            path: nested position, None if it has none.
            dtype: torch's name without prefix; of all pieces.
            shape: of the whole.
            pieces: boxes inside the shape.
        """
        mark = self._table.mark()
        placed: set[tuple[Ints, Ints]] = set()
        replicas = []
        for file, offsets, view in pieces:
            self._source.views[fqn, offsets, file] = view
            box, item = (offsets, view.shape), self._files[file].item
            if box in placed:
                replicas.append(Chunk(*box, item))
                continue
            placed.add(box)
            self._table.add(*box, item)
        chunks = self._table.chunks_since(mark, len(shape))
        self.entries[fqn] = TensorEntry(fqn, dtype, shape, path, chunks, tuple(replicas))

    def checkpoint(
        self,
        name: str,
        format: Format,
        flavour: str,
        evidence: tuple[str, ...],
        files: Mapping[str, int],
        variant: Variant = USUAL,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Return the checkpoint of all that was added; arguments as its attributes."""
        foreign: dict[str, dict[str, str]] = {}
        for fqn, entry in self.entries.items():
            if isinstance(entry, ObjectEntry) and entry.foreign and entry.item:
                foreign.setdefault(entry.item.file, {})[fqn] = entry.foreign
        problems = [
            *self.problems,
            *(found for file, kinds in foreign.items() for found in foreign_tensors(kinds, file)),
        ]
        return Checkpoint(
            self._storage.root, name, format, flavour, evidence, self.entries, files, self._table, self._storage,
            self._source, tuple(problems), extra or {}, variant=variant,
        )  # fmt: skip

    def free(self, fqn: str, file: str) -> str:
        """Return a name that no entry has: the one wanted, else with a number, of which it is said."""
        if fqn not in self.entries:
            return fqn
        message = f"{fqn!r} is the name of several entries once keys are text; this one has a number added"
        fqn = _numbered(fqn, self.entries, self._again)
        self.problems.append(Finding.of("duplicate-name", message, file, fqn, severity=Severity.WARNING))
        return fqn


def _numbered(fqn: str, taken: Container[str], again: dict[str, int]) -> str:
    """Return the first `fqn#2`, `fqn#3`, … that is not taken; `again` holds the last number of each name."""
    for number in itertools.count(again.get(fqn, 1) + 1):
        if f"{fqn}#{number}" not in taken:
            again[fqn] = number
            break
    return f"{fqn}#{again[fqn]}"
