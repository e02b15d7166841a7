"""Sets of files that hold one model: the index that says which file has which tensor, and what such a set lacks.

Source: the Hugging Face index layout (`weight_map`), the same for safetensors and for files of torch.save.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeVar

from dcptool.checkpoint.findings import Finding
from dcptool.errors import DcptoolError, MetadataError, RunsCodeError
from dcptool.storage import Storage, is_inside, join
from dcptool.words import listed

T = TypeVar("T")

MAX_INDEX_NBYTES = 1 << 30
_AGAIN = "Copy it here again."
_OF_SEVERAL = re.compile(r"(?:shard-\d{5}-)?(?P<stem>.*?)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.[\w.]+)")


def read_weight_map(storage: Storage, index: str, nbytes: int) -> dict[str, str]:
    """Return fqn → name of the file that an index says it is in.

    Args:
        storage: the folder.
        index: name of the index there.
        nbytes: its size.

    Raises:
        MetadataError: it is none, or names a file outside the folder.
    """
    path = join(storage.root, index)
    if nbytes > MAX_INDEX_NBYTES:
        raise MetadataError(f"{path} has {nbytes:,} bytes, more than any index needs")
    try:
        weight_map = json.loads(storage.read(index, 0, nbytes))["weight_map"]
        named = {str(fqn): str(file) for fqn, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MetadataError(f"{path} is not an index with a weight_map: {type(error).__name__}: {error}") from None
    for fqn, file in named.items():
        if not is_inside(file):
            raise MetadataError(f"{path} places {fqn!r} in {file!r}, outside the folder; refused")
    return named


def read_each(
    storage: Storage,
    files: Mapping[str, int],
    wanted: Sequence[str],
    index: str,
    read: Callable[[str, int], T],
    errors: tuple[type[DcptoolError], ...],
) -> tuple[dict[str, T], list[Finding]]:
    """Read the files of a set; of one that is missing or damaged among others, say so.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it.
        wanted: names of the files.
        index: name of what lists them.
        read: reads a file, given its name and size.
        errors: what says that one is damaged; of the only file it is raised.
    """
    found: dict[str, T] = {}
    problems: list[Finding] = []
    for file in wanted:
        nbytes = files.get(file)
        if nbytes is None and "/" in file:
            nbytes = storage.size(file)
        if nbytes is None:
            message = f"{index} names {file}, which is not there"
            problems.append(Finding.of("missing-file", message, file, next_step=_AGAIN))
            continue
        try:
            found[file] = read(file, nbytes)
        except errors as error:
            if len(wanted) == 1 or isinstance(error, RunsCodeError):
                raise
            problems.append(Finding.of("bad-file", str(error), file, next_step=_AGAIN))
    return found, problems


def index_problems(
    index: str, weight_map: Mapping[str, str], places: Mapping[str, list[str]], read: Container[str]
) -> list[Finding]:
    """Compare an index with what its files hold.

    Args:
        index: its name.
        weight_map: what it says.
        places: fqn → the files it is in.
        read: the files that were read.
    """
    problems = []
    for fqn, file in weight_map.items():
        if file in read and file not in places.get(fqn, ()):
            message = f"{index} says {fqn!r} is in {file}, but it is not"
            step = "The set is damaged or mixed from two saves; copy or export it again."
            problems.append(Finding.of("missing-tensor", message, file, fqn, next_step=step))
    for fqn, files in places.items():
        if fqn not in weight_map:
            message = f"{fqn!r} is in {files[0]} but not in {index}"
            problems.append(Finding.of("unlisted-tensor", message, files[0], fqn))
    return problems


def missing_of_set(read: Mapping[str, object], files: Container[str]) -> list[Finding]:
    """Name the files that a set lacks: `model-00001-of-00003.safetensors` says that there are three.

    One that is there, though an index does not name it, is not missing. Of DCP's shards not every rank has a part of
    each file, but each file has a part from some rank.

    Args:
        read: the files that were read, by name.
        files: all that are there.
    """
    sets: dict[tuple[str, int, str], set[int]] = {}
    for file in read:
        match = _OF_SEVERAL.fullmatch(file)
        if match:
            key = match["stem"], int(match["count"]), match["end"]
            sets.setdefault(key, set()).add(int(match["number"]))
    problems = []
    for (stem, count, end), there in sets.items():
        missing = [
            file
            for number in range(1, count + 1)
            if number not in there and (file := f"{stem}-{number:05d}-of-{count:05d}{end}") not in files
        ]
        if missing:
            message = f"{len(missing):,} of {count:,} files are missing: {listed(missing, 3)}"
            step = "Copy them here again."
            problems.append(Finding.of("missing-file", message, missing[0], next_step=step))
    return problems


def unlisted_files(index: str, files: list[str]) -> list[Finding]:
    """Name files of tensors beside an index that it does not name: whoever loads by it does not see them."""
    if not files:
        return []
    verb = "is" if len(files) == 1 else "are"
    message = f"{listed(files, 3)} {verb} there, but {index} does not name {'it' if len(files) == 1 else 'them'}"
    step = "What loads by the index does not read it: of another save, or the index is not of these files."
    return [Finding.of("unlisted-file", message, files[0], next_step=step)]
