"""Read quantised tensors as the values they stand for, band by band. Knows no format.

The scales of a tensor are held in memory while it is read; they are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.boxes import ChunkIndex
from dcptool.checkpoint.casting import loss_of_cast
from dcptool.checkpoint.entries import Source, TensorEntry
from dcptool.checkpoint.regions import Box
from dcptool.checkpoint.scaled import Recipe
from dcptool.copying.outputs import Fill
from dcptool.copying.reading import Band, TensorReader, Where
from dcptool.errors import DcptoolError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_FP4 = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""Values of the 16 codes of e2m1."""
MAX_SCALES_NBYTES = 256 << 20
"""Most bytes that the scales of one tensor may have."""


class DequantizingReader(TensorReader):
    """Reads boxes of a tensor that follows a recipe; arguments as of `TensorReader`.

    Args:
        recipe: how its values follow.
    """

    def __init__(
        self,
        source: Source,
        entry: TensorEntry,
        fills: Sequence[Fill],
        recipe: Recipe,
        fail: Callable[[DcptoolError, Where], None],
    ) -> None:
        super().__init__(source, entry, fills, ChunkIndex(entry.chunks), fail)
        self._recipe = recipe
        parts = [part for part in (recipe.values, recipe.scale, recipe.zero_point) if part is not None]
        if sum(part.nbytes for part in parts[1:]) > MAX_SCALES_NBYTES:
            raise UnsupportedError(f"{entry.fqn!r} has scales of more than {MAX_SCALES_NBYTES:,} bytes")
        whole = [Fill(part.fqn, (0,) * len(part.shape), part.shape, part.dtype, part.nbytes) for part in parts]
        self._readers = [
            TensorReader(source, part, [fill], ChunkIndex(part.chunks), fail)
            for part, fill in zip(parts, whole, strict=True)
        ]
        self._scales: list[Array] = []

    @property
    def sources(self) -> Sequence[TensorReader]:
        return self._readers

    def read(self, band: Band, out: memoryview) -> None:
        import numpy as np

        values = self._unpacked(band.box) if self._recipe.packed else self._readers[0].array(band.box)
        values = values.astype(np.float32, copy=False)
        scale, *zero_point = (self._of_box(array, band.box) for array in self._all_scales())
        cast = np.frombuffer(out, np.uint8).view(dtypes.numpy_dtype(self._dtype)).reshape(band.box[1])
        with np.errstate(over="ignore", invalid="ignore"):
            if zero_point:
                values -= zero_point[0]
            values *= scale
            np.copyto(cast, values, "unsafe")
        if self._dtype != "float32":
            self.lose(loss_of_cast(values, cast, "float32", self._dtype))

    def _all_scales(self) -> list[Array]:
        import numpy as np

        with self._reading:
            if not self._scales:
                for reader in self._readers[1:]:
                    shape = reader.entry.shape
                    scales = reader.array(((0,) * len(shape), shape))
                    if self._recipe.packed:
                        with np.errstate(over="ignore"):
                            scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
                    self._scales.append(scales.astype(np.float32))
            return self._scales

    def _unpacked(self, box: Box) -> Array:
        """Return a box of values that are stored two a byte, in groups."""
        import numpy as np

        offsets, sizes = box
        per = self._recipe.block[-1]
        first, last = offsets[-1] // per, -(-(offsets[-1] + sizes[-1]) // per)
        stored = self._readers[0].array(((*offsets[:-1], first, 0), (*sizes[:-1], last - first, per // 2)))
        table = np.array(_FP4, np.float32)
        values = np.stack((table[stored & 15], table[stored >> 4]), -1).reshape(*sizes[:-1], (last - first) * per)
        return values[..., offsets[-1] - first * per :][..., : sizes[-1]]

    def _of_box(self, scale: Array, box: Box) -> Array:
        """Return the scale of each element of a box, along dimensions without blocks one for all."""
        import numpy as np

        places = [
            np.arange(start, start + size) // per if per else np.zeros(1, np.int64)
            for per, start, size in zip(self._recipe.block, *box, strict=True)
        ]
        return scale[np.ix_(*places)]
