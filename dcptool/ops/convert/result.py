"""What a conversion answers. Decides nothing, and reads no values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from dcptool.checkpoint.casting import Loss
from dcptool.checkpoint.findings import Finding
from dcptool.copying.engine import memory_nbytes
from dcptool.ops.convert.plan import ConvertOptions, ConvertPlan
from dcptool.ops.guards import leftover_notes, source_notes


class Conversion(NamedTuple):
    """What was written, or would be.

    Attributes:
        path: of the output.
        files: name and bytes of each file.
        n_tensors, n_objects: how many are in it.
        nbytes_in, nbytes_out: bytes of the selected tensors' values in the source, and in the output.
        seconds: wall time.
        skipped: fqns of objects that were left out.
        corrupt: what is damaged and was left out.
        n_cast: tensors whose dtype changed.
        memory_nbytes: of the buffers each process needs at most, besides what opening the source needs.
        notes: worth knowing, one sentence each.
        published: whether it was written.
        carried: names of the files beside the checkpoint that go with it; they are among the files.
        lost: what casts lost, by fqn: how many values became infinite, zero or subnormal.
        parts: names of the checkpoints of the step that were converted, if there are several.
        workers: processes that shared the work, or would.
    """

    path: str
    files: tuple[tuple[str, int], ...]
    n_tensors: int
    n_objects: int
    nbytes_in: int
    nbytes_out: int
    seconds: float
    skipped: tuple[str, ...]
    corrupt: tuple[Finding, ...]
    n_cast: int
    memory_nbytes: int
    notes: tuple[str, ...]
    published: bool
    carried: tuple[str, ...] = ()
    lost: Mapping[str, Loss] = MappingProxyType({})
    parts: tuple[str, ...] = ()
    workers: int = 1


def summarize_conversion(
    plan: ConvertPlan,
    options: ConvertOptions,
    seconds: float,
    published: bool,
    workers: int,
    threads: int,
    unproven: Mapping[str, Collection[str]] = MappingProxyType({}),
    lost: Mapping[str, Loss] = MappingProxyType({}),
) -> Conversion:
    """Return a plan as a result.

    Args:
        plan, options: what was, or would be, done.
        seconds: wall time so far.
        published: whether it was written.
        workers: processes that shared the work, or would.
        threads: of each of them.
        unproven: of each part the names of tensors that were read and have no checksums.
        lost: what casts lost, by fqn.
    """
    tensors = [tensor for part in plan.parts for tensor in part.selection.tensors]
    n_files = sum(len(part.output.files) for part in plan.parts)
    return Conversion(
        plan.path,
        (*((file.name, file.nbytes) for file in plan.files), *plan.following.sizes.items()),
        len(tensors),
        sum(part.output.n_objects for part in plan.parts),
        sum(tensor.entry.nbytes for tensor in tensors),
        sum(tensor.nbytes for tensor in tensors),
        seconds,
        tuple(fqn for part in plan.parts for fqn in part.output.skipped),
        tuple(finding for part in plan.parts for finding in part.corrupt),
        sum(part.selection.n_cast for part in plan.parts),
        memory_nbytes(-(-n_files // workers), threads),
        tuple(_notes(plan, options, workers, unproven)),
        published,
        tuple(plan.following.sizes),
        dict(sorted(lost.items())),
        tuple(part.name for part in plan.parts if part.name),
        workers,
    )


def _notes(
    plan: ConvertPlan, options: ConvertOptions, workers: int, unproven: Mapping[str, Collection[str]]
) -> Iterator[str]:
    yield from plan.notes
    if plan.replaces:
        yield plan.replaces
    n_cast = sum(part.selection.n_cast for part in plan.parts)
    if options.check and n_cast:
        yield f"--check did not compare the values of the {n_cast:,} tensors that were cast"
    n_files = sum(len(part.output.files) for part in plan.parts)
    if n_files < workers:
        what = (
            "one file is written by one process"
            if n_files == 1
            else f"{n_files} files are written by as many processes"
        )
        yield f"{what}: the others of {workers} had nothing to do"
    of_parts = {part.name: (*part.selection.notes, *part.output.notes) for part in plan.parts}
    of_all = [note for note in of_parts[plan.parts[0].name] if all(note in notes for notes in of_parts.values())]
    yield from of_all
    for part in plan.parts:
        yield from part.told(note for note in of_parts[part.name] if note not in of_all)
    yield from plan.following.notes
    for part in plan.parts:
        yield from part.told(source_notes(part.checkpoint, part.selection, unproven.get(part.name, ())))
    yield from leftover_notes(plan.path)
