"""Lay out the output of a conversion in the format that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import how_to_load
from dcptool.checkpoint.selection import Selection
from dcptool.copying.outputs import LaidOut, OutputFile, Wanted
from dcptool.errors import LayoutError, UnsupportedError
from dcptool.formats.dcp import write as dcp
from dcptool.formats.safetensors import write as safetensors
from dcptool.formats.safetensors.format import SUFFIX
from dcptool.formats.table import FORMATS
from dcptool.formats.torch_save import write as torch_save
from dcptool.words import are


class OutputFormat(NamedTuple):
    """How output in a format is laid out.

    Attributes:
        to: what `--to` calls it.
        lay_out: lays out a selection; objects are in it only if they are to be kept.
        suffix: what names of its files end with, "" if it is always a folder.
        is_always_file: whether the output is a file however it is named; else only if its name ends so.
        skips_objects: whether objects are left out if nobody says.
        keeping: says, for a path, what `--objects keep` does and needs.
        marker: lays out what is written last of all: from the path of the output, all checkpoints in it by their names
            there, and the bytes of every other file; None if nothing is.
    """

    to: str
    lay_out: Callable[[Checkpoint, Selection, Wanted], LaidOut]
    suffix: str = ""
    is_always_file: bool = False
    skips_objects: bool = False
    keeping: Callable[[str], str] = lambda path: " takes them"
    marker: Callable[[str, Sequence[LaidOut], Mapping[str, int]], OutputFile] | None = None


OUTPUT_FORMATS = (
    OutputFormat("torch", torch_save.lay_out, ".pt", is_always_file=True),
    OutputFormat("safetensors", safetensors.lay_out, SUFFIX, skips_objects=True, keeping=safetensors.keeping),
    OutputFormat("dcp", dcp.lay_out, marker=dcp.marker_of_output),
)


def is_one_file(to: str, path: str) -> bool:
    """Tell whether output at a path is one file, else a folder.

    Raises:
        UnsupportedError: its name says another format, so that it would be taken for that later.
    """
    writer = _writer(to)
    name = path.rpartition("/")[2].lower()
    if writer.is_always_file:
        other = next((known.format for known in FORMATS if name.endswith(known.format.suffixes)), None)
        if other and writer.suffix not in other.suffixes:
            raise UnsupportedError(
                f"{path} ends as {other} do, and --to {to} writes a torch.save file: name it {writer.suffix}"
            )
        return True
    if writer.suffix and path.endswith(writer.suffix):
        return True
    if any(name.endswith(known.format.suffixes) for known in FORMATS):
        meant = f"{path.removesuffix(name)}{name.rpartition('.')[0]}"
        wanted = f"name it {meant}{writer.suffix}, or {meant} for a folder" if writer.suffix else f"name it {meant}"
        raise UnsupportedError(f"{path} has a file's name, and --to {to} would make it a folder: {wanted}")
    return False


def lay_out(checkpoint: Checkpoint, selection: Selection, to: str, wanted: Wanted) -> LaidOut:
    """Lay out a selection.

    Args:
        checkpoint: the source.
        selection: of it.
        to: "torch", "safetensors" or "dcp".
        wanted: see `Wanted`.

    Raises:
        UnsupportedError: the format cannot hold something that is selected, such as an unknown class of tensor.
        LayoutError: objects are selected and are an error, or are all that is selected and are left out.
    """
    writer = _writer(to)
    objects = wanted.objects or ("skip" if writer.skips_objects else "keep")
    if objects == "error" and selection.objects:
        raise LayoutError(
            f"{are(len(selection.objects), 'object')} selected, such as {selection.objects[0].name!r}, and "
            "--objects error refuses them",
            next_step="--objects skip leaves them out, --objects keep takes them; --keys and --exclude select.",
        )
    if objects != "skip":
        return writer.lay_out(checkpoint, selection, wanted)
    foreign = [item for item in selection.objects if item.entry.foreign]
    if foreign and not wanted.objects:
        what = f"{are(len(foreign), 'tensor')} of a form or class that dcptool does not look into"
        raise UnsupportedError(
            f"{what}, such as {foreign[0].name!r}, {foreign[0].entry.foreign}; --to {to} cannot hold it as it is",
            next_step=f"{how_to_load(foreign[0].entry.foreign)} --objects skip leaves out what is no plain tensor.",
        )
    if selection.objects and not selection.tensors:
        raise LayoutError(
            f"no tensor is selected, only objects, such as {selection.objects[0].name!r}, which are left out",
            next_step=f"--objects keep{writer.keeping(wanted.path)}; --keys and --exclude select.",
        )
    laid_out = writer.lay_out(checkpoint, selection.without_objects(), wanted)
    return laid_out._replace(skipped=tuple(item.entry.fqn for item in selection.objects))


def lay_out_part(
    checkpoint: Checkpoint, selection: Selection, to: str, wanted: Wanted, name: str
) -> tuple[str, LaidOut]:
    """Lay out one checkpoint of several of a step, in the same place of the output's folder.

    Args:
        checkpoint, selection, to: as in `lay_out`.
        wanted: of the whole output, whose path is that of its folder.
        name: the place.

    Returns:
        The place of what is written, with the ending that a file has, and its files by their names in the folder.

    Raises:
        As `lay_out`.
    """
    writer = _writer(to)
    place = f"{name}{writer.suffix}" if writer.is_always_file else name
    found = lay_out(checkpoint, selection, to, wanted._replace(path=f"{wanted.path.rstrip('/')}/{place}"))
    return place, found.below(place.rpartition("/")[0] if found.is_file else place)


def lay_out_marker(to: str, path: str, parts: Sequence[LaidOut], beside: Mapping[str, int]) -> tuple[OutputFile, ...]:
    """Lay out what is written last of all, as `OutputFormat.marker`; nothing if the format has no such file."""
    marker = _writer(to).marker
    return (marker(path, parts, beside),) if marker else ()


def why_no_folder(to: str, path: str) -> str:
    """Say what to name in place of a path for several checkpoints in a format; "" if it can be their folder."""
    bare = path.rstrip("/")
    if not any(bare.lower().endswith(known.format.suffixes) for known in FORMATS):
        return ""
    each = "a file" if _writer(to).is_always_file else "a folder"
    return f"Or name a folder for all of them, such as {bare.rpartition('.')[0]}: each becomes {each} in it."


def _writer(to: str) -> OutputFormat:
    """Return the writer of that name.

    Raises:
        UnsupportedError: there is none.
    """
    found = next((writer for writer in OUTPUT_FORMATS if writer.to == to), None)
    if found is None:
        raise UnsupportedError(
            f"there is no format {to!r}; there are {', '.join(writer.to for writer in OUTPUT_FORMATS)}"
        )
    return found
