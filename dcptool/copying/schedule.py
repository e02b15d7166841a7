"""In which order files are made of their parts, and which parts are made at the same time. Reads and writes nothing.

Files that come to the same tensor together share its bands: it is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Record
from dcptool.checkpoint.fill import RecordCheck
from dcptool.checkpoint.regions import index_in
from dcptool.copying.outputs import Closing, Fill, Literal, OutputFile, Part, Verbatim
from dcptool.copying.reading import BAND_NBYTES, Band, TensorReader, Where
from dcptool.errors import LayoutError
from dcptool.storage import Sink

if TYPE_CHECKING:
    import numpy as np


class Output:
    """A file that is being written, and the CRC32 of each Fill and Verbatim of it so far."""

    def __init__(self, file: OutputFile, sink: Sink) -> None:
        self.file, self.sink = file, sink
        self.crcs: list[int] = []
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        self.sink.write(data)
        self.written += len(data)

    def require_complete(self) -> None:
        if self.written != self.file.nbytes:
            raise LayoutError(f"{self.file.name} has {self.written:,} bytes, planned were {self.file.nbytes:,}")


class Run(NamedTuple):
    """Bytes of a record that is carried as it is."""

    record: Record
    check: RecordCheck
    start: int
    nbytes: int

    @property
    def where(self) -> Where:
        return "", None, self.record


class Bytes(NamedTuple):
    """Bytes that are known, or that follow from what was written of the file before."""

    output: Output
    part: Literal | Closing


class Begin(NamedTuple):
    """A Fill or Verbatim begins in these files."""

    outputs: Sequence[Output]


class Carried(NamedTuple):
    """A run of a carried record, and the file it goes into."""

    source: Run
    output: Output

    def shares(self, data: memoryview) -> Iterator[tuple[Output, memoryview]]:
        """Yield what each file takes of the bytes."""
        yield self.output, data


class Share(NamedTuple):
    """A band, and the files its reader's parts are of."""

    source: Band
    outputs: Sequence[Output]

    def shares(self, data: memoryview) -> Iterator[tuple[Output, memoryview]]:
        """Yield what each file takes of the band's bytes."""
        box, takers = self.source.box, self.source.takers
        if len(takers) == 1:
            yield self.outputs[takers[0][0]], data
            return
        array = _elements(data, self.source)
        for index, common in takers:
            yield self.outputs[index], _bytes_of(array[index_in(box, common)])


class End(NamedTuple):
    """All of a Fill or Verbatim was handed out: its checks are complete once it is written."""

    reader: TensorReader | None
    check: RecordCheck | None = None


Step = Bytes | Begin | Share | Carried | End
_Head = tuple[Output, Iterator[Part], Fill]
"""A file, its further parts, and the tensor it has come to."""


def schedule(
    outputs: Sequence[Output], order: Mapping[str, int], reader: Callable[[Sequence[Fill]], TensorReader]
) -> Iterator[Step]:
    """Yield what is to be done, in order: what stands before a tensor, its bands, what follows.

    The tensor that comes first in the source goes first, so that files whose order is that of the source come to it
    together; those of any other order are right too, only read more.

    Args:
        outputs: files that are written side by side.
        order: fqn → place in the source.
        reader: makes what reads boxes of one tensor.
    """
    heads: list[_Head] = []
    rest = [(output, iter(output.file.parts)) for output in outputs]
    while rest or heads:
        for output, parts in rest:
            for part in parts:
                if isinstance(part, Fill):
                    heads.append((output, parts, part))
                    break
                yield from _other_steps(output, part)
        if not heads:
            return
        first = min(heads, key=lambda head: order[head[2].fqn])[2]
        here: list[_Head] = []
        later: list[_Head] = []
        for head in heads:
            is_same = head[2].fqn == first.fqn and head[2].dtype == first.dtype
            (here if is_same else later).append(head)
        heads = later
        opened = reader([fill for *_, fill in here])
        taking = [output for output, *_ in here]
        yield Begin(taking)
        for band in opened.bands():
            yield Share(band, taking)
        yield End(opened)
        rest = [(output, parts) for output, parts, _ in here]


def _other_steps(output: Output, part: Literal | Verbatim | Closing) -> Iterator[Step]:
    if not isinstance(part, Verbatim):
        yield Bytes(output, part)
        return
    check = RecordCheck(part.record)
    yield Begin([output])
    for start in range(0, part.nbytes, BAND_NBYTES):
        yield Carried(Run(part.record, check, start, min(BAND_NBYTES, part.nbytes - start)), output)
    yield End(None, check)


def _elements(data: memoryview, band: Band) -> np.ndarray[Any, Any]:
    """Return a band's bytes as an array of elements of their size, whatever they mean."""
    import numpy as np

    itemsize = dtypes.lookup(band.reader.parts[0].dtype).itemsize
    plain = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(itemsize, f"V{itemsize}")
    return np.frombuffer(data, np.dtype(plain)).reshape(band.box[1])


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
