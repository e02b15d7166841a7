"""What several ranks' files hold under one name, as one entry: pieces put together, copies as copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding, cannot_be_read, unsafe_pickle
from dcptool.errors import DcptoolError, MetadataError, RunsCodeError, StorageError, UnsupportedError
from dcptool.formats.torch_save.build import Builder, StoredBox
from dcptool.formats.torch_save.files import TorchFile, load_file
from dcptool.formats.torch_save.flatten import Path, leaves
from dcptool.pickles.emit import emit
from dcptool.pickles.sharded import sharded_tensor
from dcptool.pickles.tensors import tensor_view
from dcptool.storage import Storage, join
from dcptool.words import listed

_COPY_AGAIN = "Copy this file here again, or resume from another step."
_GATHER = "Gather the files of all ranks here, or resume from another step."
_MAX_NAMED = 5


class RankValue(NamedTuple):
    """What one rank's file holds under a name."""

    file: TorchFile
    value: Any


class _RankPart(NamedTuple):
    """What one rank has of a tensor: dtype and shape of the whole, and its pieces."""

    dtype: str
    shape: Ints
    pieces: list[StoredBox]


def load_files(
    storage: Storage, sizes: Mapping[str, int], names: Iterable[str]
) -> tuple[dict[str, TorchFile], list[Finding]]:
    """Load files of several ranks.

    Args:
        storage: the folder.
        sizes: bytes of the files that are there, by name.
        names: of those that are wanted.

    Returns:
        Those that could be loaded, by name, and what is wrong with the others.
    """
    loaded: dict[str, TorchFile] = {}
    problems: list[Finding] = []
    missing = [name for name in names if name not in sizes]
    for name in filter(sizes.__contains__, names):
        try:
            loaded[name] = load_file(storage, name, sizes[name])
        except StorageError as error:
            problems.append(cannot_be_read(error, name))
        except RunsCodeError as error:
            problems += unsafe_pickle(error.names, name, name)
        except (MetadataError, UnsupportedError) as error:
            message = error.message.removeprefix(f"{join(storage.root, name)}: ")
            problems.append(Finding.of("bad-file", f"{name}: {message}", name, next_step=_COPY_AGAIN))
    if missing:
        are = "is" if len(missing) == 1 else "are"
        message = f"{listed(missing, _MAX_NAMED, counted=False)} {are} missing: what a rank has is in no other file"
        problems.append(Finding.of("missing-file", message, missing[0], next_step=_GATHER))
    return loaded, problems


def by_path(files: Iterable[TorchFile]) -> tuple[dict[Path, list[RankValue]], list[Finding]]:
    """Return what files hold, by nested path, in the order of the first; and which of them make no sense."""
    found: dict[Path, list[RankValue]] = {}
    problems = []
    for file in files:
        try:
            for path, value in leaves(file.root, file.pickle_nbytes):
                found.setdefault(path, []).append(RankValue(file, value))
        except MetadataError as error:
            problems.append(Finding.of("bad-file", f"{file.name}: {error}", file.name, next_step=_COPY_AGAIN))
    return found, problems


def add_joined(builder: Builder, fqn: str, path: Path, found: Sequence[RankValue], *, alike: bool = False) -> None:
    """Add one entry of what ranks hold under one name: a tensor whose parts they have, or copies of one, or an object.

    Where they disagree on what it is, the first counts, and it is said.

    Args:
        builder: to add to.
        fqn, path: of the entry.
        found: what each rank has.
        alike: whether their files are known to hold all the same.
    """
    good: list[RankValue] = []
    unknown: list[RankValue] = []
    parts: list[_RankPart | None] = []
    for one in found:
        try:
            parts.append(_part_of(one))
        except UnsupportedError:  # which its entry says
            unknown.append(one)
        except DcptoolError as error:
            builder.problems.append(Finding.of("bad-tensor", f"{fqn!r}: {error}", one.file.name, fqn))
        else:
            good.append(one)
    tensors = [part for part in parts if part is not None]
    if unknown:
        _add_object(builder, fqn, path, [*unknown, *good], alike)
    elif good and len(tensors) == len(good):
        _add_tensor(builder, fqn, path, list(zip(good, tensors, strict=True)))
    elif good:
        _add_object(builder, fqn, path, good, alike)


def _add_object(builder: Builder, fqn: str, path: Path, found: Sequence[RankValue], alike: bool) -> None:
    """Add the first of some objects; what others have under the name is a copy, or something else, which is said."""
    first, others = found[0], [one.file for one in found[1:]]
    of_tensors = [_is_tensor(one) for one in found]
    differ = len({emit(one.value, 4) for one in found}) > 1
    builder.add_value(fqn, path, first.value, first.file, others if alike or differ else ())
    if differ:
        kind = "ranks-disagree" if len(set(of_tensors)) > 1 else "replicas-differ"
        message = f"{fqn!r} is not the same in {first.file.name} and the files of other ranks; the first is shown"
        builder.problems.append(Finding.of(kind, message, first.file.name, fqn))


def _is_tensor(one: RankValue) -> bool:
    try:
        return _part_of(one) is not None
    except DcptoolError:
        return False


def _add_tensor(builder: Builder, fqn: str, path: Path, found: Sequence[tuple[RankValue, _RankPart]]) -> None:
    first, (dtype, shape, _) = found[0]
    pieces = []
    for one, (other_dtype, other_shape, held) in found:
        if (other_dtype, other_shape) == (dtype, shape):
            pieces += held
            continue
        message = f"{fqn!r} is {dtype} {list(shape)} in {first.file.name}, "
        message += f"and {other_dtype} {list(other_shape)} in {one.file.name}"
        builder.problems.append(Finding.of("ranks-disagree", message, one.file.name, fqn))
    builder.add_tensor(builder.free(fqn, first.file.name), path, dtype, shape, pieces)


def _part_of(one: RankValue) -> _RankPart | None:
    """Return what a rank has of a tensor; None for an object."""
    view = tensor_view(one.value)
    if view is not None:
        return _RankPart(view.dtype, view.shape, [StoredBox(one.file.name, (0,) * len(view.shape), view)])
    part = sharded_tensor(one.value)
    if part is None:
        return None
    return _RankPart(part.dtype, part.shape, [StoredBox(one.file.name, offsets, view) for offsets, view in part.pieces])
