"""The formats there are: how each is recognised, opened and laid out. A new one is a package and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.format import Format
from dcptool.formats.bin_set import format as bin_set
from dcptool.formats.dcp import format as dcp
from dcptool.formats.dcp.reader import open_dcp
from dcptool.formats.deepspeed import format as deepspeed
from dcptool.formats.manifests import is_manifest_name
from dcptool.formats.marker import FOREIGN, NAME, NEGATIVE, NEGATIVE_SUFFIX, SAVING
from dcptool.formats.rank_files import format as rank_files
from dcptool.formats.safetensors import format as safetensors
from dcptool.formats.safetensors.reader import open_safetensors
from dcptool.formats.torch_checkpointing import format as torch_checkpointing
from dcptool.formats.torch_save import format as torch_save
from dcptool.formats.torch_save.reader import open_torch_save
from dcptool.storage import Storage, base_name, is_temporary

Open = Callable[[Storage, Mapping[str, int], str], Checkpoint]
"""Open what is in a folder, given the sizes of its files by name, or the one file of a name in it; "" for all of it."""


class KnownFormat(NamedTuple):
    """A row.

    Attributes:
        format: what sets it apart.
        open: see `Open`.
        kind_of: says what kind of checkpoint a folder with these files is, None if none of this format.
        is_file: tells by its name and first bytes whether a file is, or is part of, a checkpoint of this format.
        place: which file of a folder names the checkpoint in it where other things lie there too; "" for the folder.
    """

    format: Format
    open: Open
    kind_of: Callable[[Mapping[str, int]], str | None]
    is_file: Callable[[str, bytes], bool]
    place: Callable[[Iterable[str]], str] = lambda names: ""


def _opens(package: str, name: str) -> Open:
    """Return a function of a format's reader, which is imported when it is called: few folders are of that format."""

    def open_it(storage: Storage, files: Mapping[str, int], file: str) -> Checkpoint:
        function: Open = getattr(import_module(f"dcptool.formats.{package}.reader"), name)
        return function(storage, files, file)

    return open_it


FORMATS = (
    KnownFormat(dcp.DCP, open_dcp, dcp.kind_of, dcp.is_file),
    KnownFormat(
        rank_files.RANK_FILES, _opens("rank_files", "open_rank_files"), rank_files.kind_of, lambda name, start: False
    ),
    KnownFormat(
        torch_checkpointing.TORCH_CHECKPOINTING,
        _opens("torch_checkpointing", "open_torch_checkpointing"),
        torch_checkpointing.kind_of,
        lambda name, start: False,
    ),
    KnownFormat(
        deepspeed.DEEPSPEED, _opens("deepspeed", "open_deepspeed"), deepspeed.kind_of, lambda name, start: False
    ),
    KnownFormat(safetensors.SAFETENSORS, open_safetensors, safetensors.kind_of, safetensors.is_file, safetensors.place),
    KnownFormat(bin_set.BIN_SET, _opens("bin_set", "open_bin_set"), bin_set.kind_of, bin_set.is_file, bin_set.place),
    KnownFormat(torch_save.TORCH_SAVE, open_torch_save, lambda files: None, torch_save.is_file),
)
"""In the order in which they are asked; torch.save is last, for it takes every zip."""


def format_of(files: Mapping[str, int]) -> KnownFormat | None:
    """Return the format of the checkpoint that a folder with these files is, None if it is none."""
    return next((known for known in FORMATS if known.kind_of(files)), None)


def fills_folder(files: Mapping[str, int]) -> bool:
    """Tell whether a folder with these files is one checkpoint, with all that lies in it."""
    known = format_of(files)
    return known is not None and known.format.owns_folder


def is_metadata(name: str) -> bool:
    """Tell whether a file says where everything of a checkpoint is, in any format."""
    last = name.rpartition("/")[2]
    return any(known.format.is_metadata(last) for known in FORMATS)


def is_own_name(name: str) -> bool:
    """Tell whether a name is one that files of checkpoints have."""
    return any(known.format.is_own(name) for known in FORMATS)


def beside(files: Iterable[str], marker: str = NAME) -> list[str]:
    """Return the files that by their names are no checkpoint's, marker's or manifest's: what a trainer put beside."""
    markers = {marker, NAME, SAVING, *FOREIGN, *NEGATIVE}

    def is_beside(name: str) -> bool:
        last = name.rpartition("/")[2]
        if last in markers or last.startswith("._") or last.endswith((NEGATIVE_SUFFIX, ".tmp")) or is_temporary(last):
            return False
        return not (is_own_name(name) or is_metadata(last) or is_manifest_name(last))

    return list(filter(is_beside, files))


def vouching(files: Iterable[str], marker: str = NAME) -> list[str]:
    """Return the files that make a checkpoint look complete, in the order in which they go: markers, then metadata."""
    names: Sequence[str] = list(files)
    markers = {marker, NAME, *FOREIGN}
    return [*(name for name in names if base_name(name) in markers), *filter(is_metadata, names)]
