"""In which order files are made of their parts, and which parts are made at the same time. Reads and writes nothing.

Files that come to the same tensor together share its bands: it is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.extents import Record
from dcptool.copying.outputs import Closing, Fill, Literal, Part, Verbatim
from dcptool.copying.reading import Band, PartReader, RecordReader, TensorReader
from dcptool.copying.writing import OpenFile


class WriteBytes(NamedTuple):
    """Bytes go into a file that are known, or that follow from what was written of it before."""

    file: OpenFile
    part: Literal | Closing


class HandOut(NamedTuple):
    """A band is read and handed out to the files its reader's parts are of, each taking its share."""

    band: Band
    files: Sequence[OpenFile]


class EndPart(NamedTuple):
    """All bands of a reader were handed out: a Fill or Verbatim of these files is complete, and so are its checks."""

    reader: PartReader
    files: Sequence[OpenFile]


Move = WriteBytes | HandOut | EndPart
"""What a group's writer does next."""


class _Waiting(NamedTuple):
    """A file that has come to a tensor, and its further parts."""

    file: OpenFile
    parts: Iterator[Part]
    fill: Fill


def schedule(
    files: Sequence[OpenFile],
    order: Mapping[str, int],
    tensor_reader: Callable[[Sequence[Fill]], TensorReader],
    record_reader: Callable[[Record], RecordReader],
) -> Iterator[Move]:
    """Yield what is to be done, in order: what stands before a tensor, its bands, what follows.

    The tensor that comes first in the source goes first, so that files whose order is that of the source come to it
    together; those of any other order are right too, only read more.

    Args:
        files: they are written side by side.
        order: fqn → place in the source.
        tensor_reader: makes what reads boxes of one tensor.
        record_reader: makes what reads a record that is carried as it is.
    """
    moving = [(file, iter(file.file.parts)) for file in files]
    waiting: list[_Waiting] = []
    while moving or waiting:
        for file, parts in moving:
            fill = yield from _up_to_tensor(file, parts, record_reader)
            if fill:
                waiting.append(_Waiting(file, parts, fill))
        if not waiting:
            return
        first = min(waiting, key=lambda found: order[found.fill.fqn]).fill
        here = [found for found in waiting if _is_same_reading(found.fill, first)]
        waiting = [found for found in waiting if not _is_same_reading(found.fill, first)]
        yield from _all_of(tensor_reader([found.fill for found in here]), [found.file for found in here])
        moving = [(found.file, found.parts) for found in here]


def _up_to_tensor(
    file: OpenFile, parts: Iterator[Part], record_reader: Callable[[Record], RecordReader]
) -> Generator[Move, None, Fill | None]:
    """Yield the moves for a file's parts before its next tensor; return that, None if there is none."""
    for part in parts:
        if isinstance(part, Fill):
            return part
        if isinstance(part, Verbatim):
            yield from _all_of(record_reader(part.record), [file])
        else:
            yield WriteBytes(file, part)
    return None


def _all_of(reader: PartReader, files: Sequence[OpenFile]) -> Iterator[Move]:
    for band in reader.bands():
        yield HandOut(band, files)
    yield EndPart(reader, files)


def _is_same_reading(fill: Fill, other: Fill) -> bool:
    return fill.fqn == other.fqn and fill.dtype == other.dtype
