"""Entries of a checkpoint by the names they get: none twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding
from dcptool.errors import MetadataError
from dcptool.formats.torch_save.build import Builder, StoredBox
from dcptool.formats.torch_save.files import TorchFile
from dcptool.formats.torch_save.flatten import Path, leaves

FP32 = "fp32"
"""What a parameter is called among what there is of it."""


def named(kind: str, parameter: str) -> tuple[str, Path]:
    """Return name and path of what there is of a parameter: of itself, or of what the optimizer keeps for it."""
    if kind == FP32:
        return parameter, (parameter,)
    return f"optim.state.{parameter}.{kind}", ("optim", "state", parameter, kind)


class Names:
    """What is added to a checkpoint; of tensors with one name the first counts, and it is said.

    Args:
        builder: of the checkpoint.
        shared: further name of a parameter → the one it is stored as.

    Attributes:
        problems: to be added to.
        taken: names that tensors have.
    """

    def __init__(self, builder: Builder, shared: Mapping[str, str]) -> None:
        self._builder = builder
        self.problems: list[Finding] = builder.problems
        self.taken: set[str] = set()
        self._further: dict[str, list[str]] = {}
        for further, stored in shared.items():
            self._further.setdefault(stored, []).append(further)

    def add_tensor(self, fqn: str, path: Path, dtype: str, shape: Ints, pieces: Sequence[StoredBox]) -> None:
        """Add a tensor in pieces; a parameter under its further names too."""
        if self._is_free(fqn, pieces[0].file if pieces else None):
            self._builder.add_tensor(fqn, path, dtype, shape, pieces)
            for further in self._further.get(fqn, ()) if path == (fqn,) else ():
                if self._is_free(further, pieces[0].file if pieces else None):
                    self._builder.add_tensor(further, (further,), dtype, shape, pieces)

    def add_value(self, fqn: str, path: Path, value: Any, file: TorchFile) -> None:
        """Add a tensor that is whole in a file, or an object."""
        if self._is_free(fqn, file.name):
            self._builder.add_value(fqn, path, value, file)

    def add_all(self, values: Mapping[Any, Any], file: TorchFile, under: Path = ()) -> None:
        """Add values that are no parameters, by their nested paths; a name that is taken gets a number."""
        try:
            for path, value in leaves(values, file.pickle_nbytes):
                if values:
                    self._builder.add_value(".".join(map(str, (*under, *path))), (*under, *path), value, file)
        except MetadataError as error:
            message = f"{file.name}: {error}; the rest is left out"
            self.problems.append(Finding.of("bad-file", message, file.name))

    def _is_free(self, fqn: str, file: str | None) -> bool:
        if fqn in self.taken:
            message = f"{fqn!r} is the name of several tensors; the first is shown"
            self.problems.append(Finding.of("duplicate-name", message, file, fqn))
            return False
        self.taken.add(fqn)
        return True
