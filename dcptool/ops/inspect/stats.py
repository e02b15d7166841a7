"""Statistics of the tensors of a checkpoint, and what in them is not as a trained model has it.

Every tensor is read once, chunk by chunk in bands, in constant memory, with the CRC32 of every record checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding, errors
from dcptool.checkpoint.selection import globs, select, with_inner
from dcptool.copying.checking import damaged_item
from dcptool.copying.pool import Pool
from dcptool.copying.reading import Where
from dcptool.errors import DcptoolError, UnsupportedError
from dcptool.formats.detect import open_checkpoint
from dcptool.ops.inspect.measuring import CheckpointReading, Measurement
from dcptool.storage import Progress

VALUES, MAGNITUDES, UNPACKED = "values", "magnitudes", "unpacked"
_SECOND_MOMENT = re.compile(r"(?:^|\.)(?:max_)?(?:exp_avg_sq|square_avg)(?:$|\.)")
"""What Adam and its like keep of the squares of gradients, in torch's names and in Megatron-core's."""


class TensorStats(NamedTuple):
    """Statistics of one tensor. NaN and infinities are counted; everything else is of the finite values.

    Attributes:
        fqn, dtype, shape: as in `TensorEntry`.
        measured: what the numbers are of: "values" (False is 0, True is 1), "magnitudes" of a complex tensor, or the
            values "unpacked" of float4, two for each element.
        n_values: how many there are.
        n_nan, n_inf: NaN; infinities of either sign. A complex number with a NaN in it is NaN.
        n_zero: 0 and -0.
        min, max: exact, for integers too; None if there is no finite value.
        mean: in float64; None if there is no finite value.
        std: standard deviation over n - 1, as `torch.std`; None for fewer than two finite values.
        norm: Euclidean norm; None only if nothing was computed.
        problem: why nothing was computed, else "".
    """

    fqn: str
    dtype: str
    shape: Ints
    measured: str = VALUES
    n_values: int = 0
    n_nan: int = 0
    n_inf: int = 0
    n_zero: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    problem: str = ""

    @property
    def is_constant(self) -> bool:
        """Whether there are several values and all are finite and the same."""
        return self.n_values > 1 and self.min == self.max and not self.n_nan and not self.n_inf and not self.problem

    @property
    def is_zero(self) -> bool:
        """Whether there are several values and all are zero."""
        return self.n_values > 1 and self.n_zero == self.n_values


class StatsReport(NamedTuple):
    """Statistics of the selected tensors of one checkpoint.

    Attributes:
        path: of the checkpoint.
        tensors: in the order of the metadata.
        findings: tensors that could not be read (errors), that hold NaN or infinities (a warning), that are all zero,
            constant, or the trace of training that never reached a parameter (notes).
        nbytes: of the values that were read.
        n_unproven: tensors with values that are stored without a checksum.
    """

    path: str
    tensors: tuple[TensorStats, ...]
    findings: tuple[Finding, ...]
    nbytes: int
    n_unproven: int = 0

    @property
    def good(self) -> bool:
        """Whether all of them could be read, with nothing changed since they were saved."""
        return not errors(self.findings)


def tensor_stats(
    checkpoint: Checkpoint | str | os.PathLike[str],
    keys: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> StatsReport:
    """Compute statistics of the tensors of a checkpoint, reading each once in constant memory.

    Args:
        checkpoint: an open checkpoint, or the path or URL of one.
        keys: names or shell globs on whole fqns, `*` crosses dots; default: all.
        exclude: names or globs of what to leave out.
        threads: bands read at the same time, None for the number of processors, at most 8.
        progress: told the bytes of values as they are read.

    Returns:
        Statistics of each, and what is to be pointed out. A tensor that cannot be read has a `problem`; others go on.

    Raises:
        LayoutError: nothing is selected; the message lists what there is.
        CheckpointNotFoundError, MetadataError, StorageError, UnsupportedError: as `dcptool.open`.

    Example:
        >>> [tensor.fqn for tensor in dcptool.tensor_stats("ckpt/step_500").tensors if tensor.n_nan]
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    flat = opened.flat
    entries = [tensor.entry for tensor in select(flat, *with_inner(opened, globs(keys), globs(exclude))).tensors]
    return stats_of(flat, entries, threads, progress)


def stats_of(
    checkpoint: Checkpoint,
    entries: Sequence[TensorEntry],
    threads: int | None = None,
    progress: Progress | None = None,
) -> StatsReport:
    """Compute statistics of tensors of an open checkpoint; see `tensor_stats`."""
    reading = CheckpointReading(checkpoint)
    tensors: list[TensorStats] = []
    findings: list[Finding] = []
    nbytes = 0
    with Pool(threads) as pool:
        for (measurement, band), moments in pool.run(reading.measure, reading.bands(entries)):
            if band is None:
                measurement.finish(reading)
                found, told = _told(checkpoint, measurement)
                tensors.append(found)
                findings += told
                continue
            measurement.add(moments)
            nbytes += band.nbytes
            if progress:
                progress(band.nbytes)
    return StatsReport(checkpoint.path, tuple(tensors), (*findings, *_pointed_out(tensors)), nbytes, reading.n_unproven)


def _told(checkpoint: Checkpoint, measurement: Measurement) -> tuple[TensorStats, list[Finding]]:
    """Return the statistics of a tensor that was read, or what of it is damaged."""
    entry, failures, found = measurement.entry, measurement.failures, measurement.moments
    what = entry.fqn, entry.dtype, entry.shape, _measured(entry.dtype)
    if failures:
        error, where = failures[0]
        return TensorStats(*what, problem=str(error)), [_finding(checkpoint, error, where, len(failures) - 1)]
    counts = found.n_finite + found.n_nan + found.n_inf, found.n_nan, found.n_inf, found.n_zero
    return TensorStats(*what, *counts, found.low, found.high, found.average, found.deviation, found.norm), []


def _measured(dtype: str) -> str:
    return MAGNITUDES if dtype.startswith("complex") else UNPACKED if dtype.startswith("float4") else VALUES


def _finding(checkpoint: Checkpoint, error: DcptoolError, where: Where, n_more: int) -> Finding:
    fqn, chunk, _ = where
    unsupported = isinstance(error, UnsupportedError)
    if unsupported and not chunk:
        step = error.next_step
        return Finding.of("not-computed", f"no statistics of {fqn!r}: {error.message}", fqn=fqn, next_step=step)
    more = f" (and {n_more:,} more such chunks of it)" if n_more else ""
    found = damaged_item(error.saying(error.message + more), where)
    return found if found.next_step else found._replace(next_step=f"dcptool verify --deep {checkpoint.path}")


def _pointed_out(tensors: Sequence[TensorStats]) -> list[Finding]:
    """Return what is to be pointed out, each kind once: R45, R46."""
    bad = [tensor for tensor in tensors if tensor.n_nan or tensor.n_inf]
    bad.sort(key=lambda tensor: -(tensor.n_nan + tensor.n_inf) / tensor.n_values)
    zero = [tensor for tensor in tensors if tensor.is_zero]
    untouched = [tensor for tensor in zero if _SECOND_MOMENT.search(tensor.fqn)]
    findings = []
    if bad:
        counts = [f"{n:,} {what}" for n, what in ((bad[0].n_nan, "NaN"), (bad[0].n_inf, "infinite")) if n]
        message = f"{_which(bad, 'NaN or infinities')} ({' and '.join(counts)} of {bad[0].n_values:,} values)"
        step = "Nothing recovers from them by itself; look at older steps with --stats too."
        findings.append(Finding.of("not-finite", message, fqn=bad[0].fqn, next_step=step))
    for kind, which, what in (
        ("all-zero", [tensor for tensor in zero if tensor not in untouched], "zeros only"),
        ("never-updated", untouched, "zeros only: no gradient but zero has reached these parameters"),
        ("constant", [tensor for tensor in tensors if tensor.is_constant and not tensor.is_zero], "one value only"),
    ):
        if which:
            value = f" ({which[0].min:.4g} everywhere)" if kind == "constant" else ""
            findings.append(Finding.of(kind, _which(which, what) + value, fqn=which[0].fqn))
    return findings


def _which(tensors: Sequence[TensorStats], what: str) -> str:
    """Say what some tensors hold, by the first of them."""
    if len(tensors) == 1:
        return f"{tensors[0].fqn!r} holds {what}"
    what, colon, more = what.partition(": ")
    return f"{len(tensors):,} tensors hold {what}, such as {tensors[0].fqn!r}{colon}{more}"
