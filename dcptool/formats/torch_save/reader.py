"""`.pt` files of torch.save: one zip, one pickle, any nesting, flattened as torch.distributed.checkpoint does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import is_contiguous, volume
from dcptool.errors import MetadataError
from dcptool.formats.torch_save.build import Builder
from dcptool.formats.torch_save.files import TorchFile, load_file
from dcptool.formats.torch_save.flatten import leaves
from dcptool.formats.torch_save.format import TORCH_SAVE
from dcptool.formats.torch_save.one_rank import of_one_rank
from dcptool.formats.torch_save.stream import LegacyStream
from dcptool.pickles.tensors import TensorView
from dcptool.storage import Storage, join
from dcptool.words import are

ROOT_NAME = "."
"""Name of the entry when the file holds one value that is no dict."""


def open_torch_save(storage: Storage, files: Mapping[str, int], name: str) -> Checkpoint:
    """Open a `.pt` file by reading its zip directory and its pickle.

    Args:
        storage: the folder it is in.
        files: its name → its size in bytes.
        name: of the file.

    Raises:
        UnsupportedError: it is a TorchScript archive.
        MetadataError: it or its pickle is damaged.
        RunsCodeError: one of these, and it runs code when it is loaded.
    """
    file = load_file(storage, name, files[name])
    builder = Builder(storage, [file])
    try:
        add_values(builder, file)
    except MetadataError as error:
        raise MetadataError(f"{join(storage.root, name)}: {error}") from error
    is_old = isinstance(file.archive, LegacyStream)
    flavour, evidence = "torch.save", ["a torch.save stream, as before torch 1.6" if is_old else "a torch.save zip"]
    if builder.parts:
        alone = of_one_rank(builder.parts, name, storage.root)
        flavour = f"torch.save, {alone.whose}" if alone.whose else flavour
        evidence.append(alone.evidence)
        builder.problems += alone.problems
    return builder.checkpoint(name, TORCH_SAVE, flavour, tuple(evidence), {name: files[name]})


def add_values(builder: Builder, file: TorchFile, is_new: Callable[[str], bool] = lambda fqn: True) -> None:
    """Add everything that a file holds, and what there is to note of its storages.

    Args:
        builder: of the checkpoint.
        file: one of its files.
        is_new: asked for each name whether it is to be added.

    Raises:
        MetadataError: it stands for more than it can hold.
    """
    for path, value in leaves(file.root, file.pickle_nbytes):
        fqn = ".".join(map(str, path)) or ROOT_NAME
        if is_new(fqn):
            builder.add_value(fqn, path, value, file)
    builder.problems += _storage_notes(builder.views(file.name), file.name)


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
