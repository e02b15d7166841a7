"""Convert: open, select, lay out, copy, look at the result, publish. What all conversions have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from dcptool.checkpoint.casting import Loss
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import ObjectEntry
from dcptool.checkpoint.extents import Extent, place_words
from dcptool.checkpoint.findings import Finding, errors
from dcptool.checkpoint.kinds import Effect
from dcptool.checkpoint.selection import AS_IS, Renaming, Selection, select, selects
from dcptool.checks.check import Level, check
from dcptool.checks.copies import require_one_rank
from dcptool.copying.engine import CopyReport, copy, memory_nbytes
from dcptool.copying.outputs import LaidOut, OutputFile, Wanted
from dcptool.copying.pool import default_threads
from dcptool.copying.publishing import prepare, require_place
from dcptool.errors import ItemError
from dcptool.formats.detect import found_below, open_checkpoint
from dcptool.formats.output import is_one_file, lay_out
from dcptool.ops.carrying import carry, require_same_bytes, require_whole
from dcptool.ops.convert.beside import files_beside, own_step
from dcptool.ops.convert.lightning import META, Consolidated, consolidated, is_whole
from dcptool.ops.convert.quantised import dequantized, flattened
from dcptool.ops.following import Carried, Following, FoundStep
from dcptool.ops.guards import (
    LEAVES_OUT,
    damaged,
    leftover_notes,
    of_rank,
    require_equal,
    require_no_part,
    require_safe,
    require_same,
    require_sound,
    require_unchanged,
    source_notes,
)
from dcptool.ops.model_config import without_quantisation
from dcptool.ops.replacing import replaced
from dcptool.storage import Progress
from dcptool.words import plural


class ConvertOptions(NamedTuple):
    """How a conversion is done.

    Attributes:
        keys, exclude: names or globs of what to take, and of what to leave out.
        renaming: how names and dtypes change.
        max_shard_nbytes: size of safetensors shards, in bytes.
        nesting: "auto" to nest as the source's paths say, "flat" for one flat dict; of `.pt` files.
        objects: "keep", "skip" or "error"; None for what the format does by itself.
        threads: how many bands are read at the same time, None for the number of processors.
        overwrite: replace output that is there, once the new one is complete.
        check: compare the output with the source, element by element, before it is published.
        skip_corrupt: leave out tensors that are damaged, after checking everything.
        also: further folders that hold files of the source.
        trust: take also what runs code when it is loaded.
        side_files: carry what belongs to a folder: a model's configuration and tokenizer, from DCP to DCP all that its
            trainer loads.
        rank: of a checkpoint in which each rank kept metadata of its own, the one whose values are taken where they
            differ; None refuses them.
        dequantize: dtype that quantised tensors are written as, by the values they stand for; None to keep them.
        flatten_subclasses: write the inner tensors of tensors made of tensors in place of these.
    """

    keys: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    renaming: Renaming = AS_IS
    max_shard_nbytes: int = 5_000_000_000
    nesting: str = "auto"
    objects: str | None = None
    threads: int | None = None
    overwrite: bool = False
    check: bool = False
    skip_corrupt: bool = False
    also: tuple[str, ...] = ()
    trust: bool = False
    side_files: bool = True
    rank: int | None = None
    flatten_subclasses: bool = False
    dequantize: str | None = None


DEFAULTS = ConvertOptions()


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
        memory_nbytes: of the buffers it needs at most, besides what opening the source needs.
        notes: worth knowing, one sentence each.
        published: whether it was written.
        carried: names of the files beside the checkpoint that go with it; they are among the files.
        lost: what casts lost, by fqn: how many values became infinite, zero or subnormal.
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


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    options: ConvertOptions = DEFAULTS,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint of any format to another one.

    Args:
        source: local path or URL of a checkpoint.
        target: local path or URL of the output: a file for "torch"; a file if it ends in `.safetensors`, else a folder,
            for "safetensors"; a folder for "dcp".
        to: "safetensors", "torch" or "dcp".
        options: see `ConvertOptions`.
        dry_run: plan only, write nothing; refuses what the conversion itself would refuse without reading tensors.
        progress: told the bytes as they are written.

    Returns:
        What was written.

    Raises:
        ItemError: the source is damaged; the message names tensor, file and bytes. Nothing is written.
        LayoutError: nothing is selected, names collide, or a tensor has holes.
        OutputExistsError: there is something at the target.
        UnsupportedError: the format cannot hold something that is selected.
        StorageError: the target cannot be written.

    Example:
        >>> dcptool.convert("ckpt/step_500", "model.safetensors", "safetensors", ConvertOptions(keys=("model.*",)))
    """
    began = time.perf_counter()
    plan = _plan(source, os.fspath(target), to, options)
    report = CopyReport(0, ())
    if dry_run:
        require_place(plan.path, plan.output.is_file, plan.nbytes, options.overwrite, plan.sources)
    else:
        report = _write(plan, options, progress)
    found = found_below(source, plan.checkpoint)
    notes = (*found, *_notes(plan, options, report.unproven))
    return _told(plan, options, notes, report.lost, time.perf_counter() - began, not dry_run)


class _ConvertPlan(NamedTuple):
    """What is to be written from what: the paths that are read, what of the source, what was left out as damaged.

    `replaces`: what is at the target now, as a note.
    """

    checkpoint: Checkpoint
    sources: tuple[str, ...]
    path: str
    selection: Selection
    corrupt: tuple[Finding, ...]
    output: LaidOut
    replaces: str
    following: Following

    @property
    def files(self) -> tuple[OutputFile, ...]:
        """All files of the output."""
        return (*self.output.files, *self.output.last)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files) + self.following.nbytes


def _plan(source: str | os.PathLike[str], path: str, to: str, options: ConvertOptions) -> _ConvertPlan:
    """Open the source, see that it is sound and that output can go where it shall, and lay that out."""
    checkpoint = opened = open_checkpoint(of_rank(os.fspath(source), options.rank), options.also)
    sources = (checkpoint.path, *options.also)
    is_file = is_one_file(to, path)
    require_place(path, is_file, 0, options.overwrite, sources)  # before all is checked, which takes time
    require_no_part(path, checkpoint, "source")
    replaces = replaced(path, to) if options.overwrite else ""
    corrupt = _corrupt(checkpoint, options)
    bad = {finding.fqn for finding in corrupt if finding.fqn}
    if corrupt and not any(fqn not in bad and selects(fqn, options.keys, options.exclude) for fqn in checkpoint):
        causes = [finding for finding in corrupt if finding.kind != "lost-entry"] or corrupt
        raise ItemError(damaged(checkpoint, causes, "Nothing undamaged is left to convert."))
    if options.dequantize:
        checkpoint = dequantized(checkpoint, options.dequantize)
    if options.flatten_subclasses:
        selection, checkpoint = flattened(checkpoint, options.keys, options.exclude, options.renaming, bad)
    else:
        selection = select(checkpoint, options.keys, options.exclude, options.renaming, bad)
    skip, hint = options.skip_corrupt, "" if options.skip_corrupt else LEAVES_OUT
    require_sound(
        opened,
        select(opened, options.keys, options.exclude, without=bad),
        options.keys,
        options.exclude,
        skip_corrupt=skip,
        trust=options.trust,
        hint=hint,
    )
    require_one_rank(checkpoint, {item.entry.fqn for item in selection.in_order})
    own = own_step(checkpoint)
    whole = None if options.dequantize else _consolidated(checkpoint, selection, own, to, options)
    if whole and own:
        selection, own = whole.selection, own.without(META)
    dtype = options.dequantize or options.renaming.dtype
    following = files_beside(checkpoint, own, to, is_file, options.side_files, dtype)
    following = without_quantisation(following) if options.dequantize else following
    require_whole(following, options.trust, options.threads)
    if whole:
        following = following._replace(notes=(whole.note, *following.notes))
    merged = whole.merged if whole else None
    wanted = Wanted(path, options.objects, options.nesting, options.max_shard_nbytes, following.sizes, merged)
    output = lay_out(checkpoint, selection, to, wanted)
    if not options.trust:
        require_safe(checkpoint, selection.without_objects() if output.skipped else selection)
    return _ConvertPlan(checkpoint, sources, path, selection, tuple(corrupt), output, replaces, following)


def _consolidated(
    checkpoint: Checkpoint, selection: Selection, own: FoundStep | None, to: str, options: ConvertOptions
) -> Consolidated | None:
    """Return what Lightning makes of all of a step of its own in one file; None of anything else, or a part of it."""
    renamed = options.renaming._replace(dtype=None) != AS_IS
    part = options.keys or options.exclude or renamed or options.nesting == "flat" or not options.side_files
    if to != "torch" or own is None or part or options.objects == "skip" or not is_whole(own):
        return None
    meta = Carried(META, META, own.listing[META])
    require_whole(Following(checkpoint.storage, (meta,)), options.trust, options.threads)
    return consolidated(checkpoint, selection, own)


def _write(plan: _ConvertPlan, options: ConvertOptions, progress: Progress | None) -> CopyReport:
    """Copy, look at the result, and give it its name."""
    checkpoint, output = plan.checkpoint, plan.output
    threads = options.threads or default_threads()
    with prepare(plan.path, output.is_file, plan.nbytes, options.overwrite, checkpoint.path) as place:
        report = copy(checkpoint, [[file] for file in place.named(output.files)], place.storage, threads, progress)
        require_unchanged(checkpoint)
        if report.failures:
            raise ItemError(damaged(checkpoint, report.failures, LEAVES_OUT))
        place.note(plan.following.sizes)
        carry(plan.following, plan.following.carried, place.storage, progress)
        for file in output.last:
            copy(checkpoint, [place.named([file])], place.storage, 1, progress)
        output.validate(place.written)
        require_same(place, output.files, plan.selection)
        if options.check:
            require_equal(checkpoint, open_checkpoint(place.written), plan.selection, threads)
            require_same_bytes(plan.following, place.storage)
        place.publish(options.overwrite)
    return report


def _told(
    plan: _ConvertPlan,
    options: ConvertOptions,
    notes: tuple[str, ...],
    lost: Mapping[str, Loss],
    seconds: float,
    published: bool,
) -> Conversion:
    """Return what was written, or would be."""
    tensors = plan.selection.tensors
    return Conversion(
        plan.path,
        (*((file.name, file.nbytes) for file in plan.files), *plan.following.sizes.items()),
        len(tensors),
        plan.output.n_objects,
        sum(tensor.entry.nbytes for tensor in tensors),
        sum(tensor.nbytes for tensor in tensors),
        seconds,
        plan.output.skipped,
        plan.corrupt,
        plan.selection.n_cast,
        memory_nbytes(len(plan.output.files), options.threads or default_threads()),
        notes,
        published,
        tuple(plan.following.sizes),
        dict(sorted(lost.items())),
    )


def _notes(plan: _ConvertPlan, options: ConvertOptions, unproven: Collection[str]) -> tuple[str, ...]:
    unchecked = f"--check did not compare the values of the {plan.selection.n_cast:,} tensors that were cast"
    values = [item.name for item in plan.selection.tensors if item.entry.fqn in plan.checkpoint.recipes]
    computed = f"{plural(len(values), 'tensor')} dequantised, such as {values[0]!r}" if values else ""
    return (
        *([plan.replaces] if plan.replaces else []),
        *([unchecked] if options.check and plan.selection.n_cast else []),
        *([computed] if computed else []),
        *plan.selection.notes,
        *plan.output.notes,
        *plan.following.notes,
        *source_notes(plan.checkpoint, plan.selection, unproven),
        *leftover_notes(plan.path),
    )


def _corrupt(checkpoint: Checkpoint, options: ConvertOptions) -> list[Finding]:
    """Return what is damaged, if it is to be left out; of files that are missing or cut short, what they held."""
    if not options.skip_corrupt:
        return []
    report = check(checkpoint, Level.DEEP, threads=options.threads)
    unread = (Effect.UNREAD, Effect.UNREADABLE)  # which is refused when it is read
    damaged = [finding for finding in errors(report.findings) if finding.traits.effect not in unread]
    named = {finding.fqn for finding in damaged}
    there = {name: checkpoint.storage.size(name) for name in checkpoint.usage}
    short = {name for name, use in checkpoint.usage.items() if (there[name] or 0) < use.end}

    def is_lost(item: Extent | None) -> bool:
        return item is not None and item.file in short and item.span[1] > (there[item.file] or 0)

    for fqn, entry in checkpoint.items() if short else ():
        if fqn in named:
            continue
        if isinstance(entry, ObjectEntry):
            items = iter([entry.item])
        else:
            items = iter(()) if short.isdisjoint(entry.chunks.files()) else (chunk.item for chunk in entry.chunks)
        lost = next(filter(is_lost, items), None)
        if lost:
            why = "is missing" if there[lost.file] is None else f"ends at byte {there[lost.file]:,}"
            message = f"{fqn!r} is stored in {place_words(lost)}; that file {why}"
            damaged.append(Finding.of("lost-entry", message, lost.file, fqn))
    return damaged
