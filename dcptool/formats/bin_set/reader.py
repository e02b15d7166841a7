"""Open the `.bin` files of a model as one checkpoint: by its index, or all of a folder that are named so."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding
from dcptool.errors import CheckpointNotFoundError, MetadataError, UnsupportedError
from dcptool.formats.bin_set.format import BIN_SET, is_index, is_weights
from dcptool.formats.torch_save.build import Builder
from dcptool.formats.torch_save.files import TorchFile, load_file
from dcptool.formats.torch_save.reader import add_values
from dcptool.formats.weight_map import index_problems, missing_of_set, read_each, read_weight_map, unlisted_files
from dcptool.storage import Storage, join
from dcptool.words import plural

_NAME_ONE = "Two saves, or two forms of one: name the file itself to take what it holds, or move the other away."


def open_bin_set(storage: Storage, files: Mapping[str, int], name: str = "") -> Checkpoint:
    """Open the `.bin` files of a model.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it.
        name: the index to open; "" for the folder, of which the index counts if there is one.

    Raises:
        CheckpointNotFoundError: there are several indexes.
        MetadataError, UnsupportedError, RunsCodeError: the index, or the only file, cannot be read.
    """
    index = name or _only_index(storage, files)
    weight_map = read_weight_map(storage, index, files.get(index, 0)) if index else None
    wanted = sorted(set(weight_map.values()) if weight_map is not None else filter(is_weights, files))
    read, problems = read_each(
        storage, files, wanted, index, partial(load_file, storage), (MetadataError, UnsupportedError)
    )
    builder = Builder(storage, read.values())
    builder.problems += problems
    places: dict[str, list[str]] = {}
    for file in read.values():
        _add(builder, file, places)
    if weight_map is not None:
        builder.problems += index_problems(index, weight_map, places, read)
    if not name:
        builder.problems += missing_of_set(read, files)
    if index and not name:
        builder.problems += unlisted_files(index, sorted(set(filter(is_weights, files)) - set(wanted)))
    evidence = [f"{plural(len(read), 'torch.save file')} named as of one model", *([index] if index else [])]
    own = {file: nbytes for file, nbytes in files.items() if file in read or file == index}
    return builder.checkpoint(name, BIN_SET, "transformers .bin", tuple(evidence), own)


def _only_index(storage: Storage, files: Mapping[str, int]) -> str:
    indexes = sorted(filter(is_index, files))
    if len(indexes) > 1:
        paths = ", ".join(join(storage.root, file) for file in indexes)
        raise CheckpointNotFoundError(f"{storage.root} holds {len(indexes)} indexes of .bin files; name one: {paths}")
    return indexes[0] if indexes else ""


def _add(builder: Builder, file: TorchFile, places: dict[str, list[str]]) -> None:
    """Add what a file holds, and note where; of a name that another file has too, the first is shown."""

    def is_new(fqn: str) -> bool:
        there = places.setdefault(fqn, [])
        there.append(file.name)
        if there[0] == file.name:
            return True
        message = f"{fqn!r} is in {there[0]} and in {file.name}, which are no shards; the first is shown"
        builder.problems.append(Finding.of("duplicate-name", message, file.name, fqn, next_step=_NAME_ONE))
        return False

    add_values(builder, file, is_new)
