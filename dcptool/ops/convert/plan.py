"""What a conversion would do: which checkpoints, what of them, into which files. Copies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, inside
from dcptool.checkpoint.selection import AS_IS, Renaming, Selection, require_match, select, unmatched
from dcptool.checks.copies import require_one_rank
from dcptool.copying.outputs import LaidOut, OutputFile, Wanted
from dcptool.copying.publishing import require_place
from dcptool.errors import LayoutError, SeveralCheckpointsError, UnsupportedError
from dcptool.formats.detect import found_below, open_checkpoint
from dcptool.formats.output import is_one_file, lay_out, lay_out_marker, lay_out_part, why_no_folder
from dcptool.ops.carrying import require_whole
from dcptool.ops.convert.beside import beside_parts, files_beside, own_step
from dcptool.ops.convert.corrupt import corrupt_entries, require_some_left
from dcptool.ops.convert.lightning import META, Consolidated, consolidated, is_whole
from dcptool.ops.following import Carried, Following, FoundStep
from dcptool.ops.guards import LEAVES_OUT, of_rank, require_no_part, require_safe, require_sound
from dcptool.ops.replacing import replaced
from dcptool.ops.sources import StepSource, Wish, open_source, require_renamed

MIN_TIMEOUT = 2.0


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
        workers: processes that share the work, if the output is a folder; None for one.
        torch: a version of torch, (2, 2) or later, that shall read DCP output: what it cannot hold is refused. None
            for the oldest that can hold it all, which is told.
        timeout: seconds after which one of several processes that gives no sign of life is given up.
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
    workers: int | None = None
    timeout: float = 300.0
    torch: tuple[int, int] | None = None


def options_problem(options: ConvertOptions) -> str:
    """Say why options cannot be meant; "" if they can."""
    if options.timeout < MIN_TIMEOUT:
        return f"--timeout must be at least {MIN_TIMEOUT:g}s: a process shows every second that it lives"
    return ""


class ConvertPart(NamedTuple):
    """What is to be done with one checkpoint.

    Attributes:
        name: its place in the step that the source is; "" of a source that is one checkpoint.
        place: where what is made of it is in the output; "" for the output itself.
        checkpoint: open.
        selection: what of it goes in.
        corrupt: what was left out as damaged.
        wanted: how the output shall be.
        output: the files by their names in the output.
    """

    name: str
    place: str
    checkpoint: Checkpoint
    selection: Selection
    corrupt: tuple[Finding, ...]
    wanted: Wanted
    output: LaidOut

    @property
    def left_out(self) -> frozenset[str]:
        """Fqns of what was left out as damaged."""
        return frozenset(finding.fqn for finding in self.corrupt if finding.fqn)

    def told(self, notes: Iterable[str]) -> Iterator[str]:
        """Yield notes on it, saying of which part they are."""
        return (f"{self.name}: {note}" if self.name else note for note in notes)


class ConvertPlan(NamedTuple):
    """What is to be written from what.

    Attributes:
        opens: what was named, and where the step is below it.
        sources: the paths that are read.
        path: of the output.
        to: its format.
        parts: the checkpoints.
        following: the files beside them.
        marker: what is written last, if anything.
        replaces: what is at the target now, as a note.
        notes: what else is worth knowing of the source, one sentence each.
    """

    opens: tuple[str, str]
    sources: tuple[str, ...]
    path: str
    to: str
    parts: tuple[ConvertPart, ...]
    following: Following
    marker: tuple[OutputFile, ...]
    replaces: str
    notes: tuple[str, ...]

    @property
    def is_file(self) -> bool:
        """Whether the output is one file."""
        return self.parts[0].output.is_file and not self.parts[0].place

    @property
    def files(self) -> list[OutputFile]:
        """All files that are made."""
        return [file for part in self.parts for file in part.output.all_files] + list(self.marker)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files) + self.following.nbytes


def make_plan(source: str, path: str, to: str, options: ConvertOptions) -> ConvertPlan:
    """Open the source, see that it is sound and that output can go where it shall, and lay that out.

    Args:
        source: path or URL of a checkpoint, or of a step of several.
        path: of the output.
        to: its format.
        options: see `ConvertOptions`.

    Raises:
        As `convert.convert`.
    """
    if problem := options_problem(options):
        raise LayoutError(problem)
    opens = of_rank(source, options.rank)
    try:
        checkpoint = open_checkpoint(opens, options.also)
    except SeveralCheckpointsError as several:
        found = _step(opens, options, several)
        if not (why := why_no_folder(to, path)):
            return _plan_step(found, opens, path, to, options)
        [part, *others] = _selected(found, options) or found.parts
        if others:
            several.next_step = why
            raise
        return _plan_one(found.parts[part], source, found.parts[part].path, path, to, options)
    return _plan_one(checkpoint, source, opens, path, to, options)


def _plan_one(
    checkpoint: Checkpoint, source: str, opens: str, path: str, to: str, options: ConvertOptions
) -> ConvertPlan:
    sources = (checkpoint.path, *options.also)
    is_file = is_one_file(to, path)
    replaces = _require_free(path, is_file, to, sources, [checkpoint], options)
    selection, corrupt = _chosen(checkpoint, _wish(options), options)
    own = own_step(checkpoint)
    whole = _consolidated(checkpoint, selection, own, to, options)
    if whole and own:
        selection, own = whole.selection, own.without(META)
    following = files_beside(checkpoint, own, to, is_file, options.side_files, options.renaming.dtype)
    require_whole(following, options.trust, options.threads)
    if whole:
        following = following._replace(notes=(whole.note, *following.notes))
    wanted = _wanted(path, options)._replace(merged=whole.merged if whole else None)
    output = lay_out(checkpoint, selection, to, wanted)
    _require_safe(checkpoint, selection, output, options)
    part = ConvertPart("", "", checkpoint, selection, tuple(corrupt), wanted, output)
    marker = lay_out_marker(to, path, [output], following.sizes)
    notes = found_below(source, checkpoint)
    return ConvertPlan((opens, ""), sources, path, to, (part,), following, marker, replaces, notes)


def _step(opens: str, options: ConvertOptions, several: SeveralCheckpointsError) -> StepSource:
    """Return the step that a folder of several checkpoints is.

    Raises:
        SeveralCheckpointsError: it is none, or one with a part that is not of DCP.
    """
    try:
        found = open_source(opens, options.also)
    except (SeveralCheckpointsError, UnsupportedError):
        raise several from None
    if len(found.parts) < 2:
        raise several
    return found


def _selected(found: StepSource, options: ConvertOptions) -> dict[str, Wish]:
    """Return the parts of which something is selected, and what is asked of each."""
    wishes = {name: _wish(options).of_part(part) for name, part in found.parts.items()}
    return {name: wish for name, wish in wishes.items() if wish.takes_of(found.parts[name])}


def _plan_step(found: StepSource, opens: str, path: str, to: str, options: ConvertOptions) -> ConvertPlan:
    """Plan a step of several checkpoints: each into its place in one folder."""
    sources = (found.path, *options.also)
    everything = list(found.parts.values())
    replaces = _require_free(path, False, to, sources, everything, options)
    require_match(everything, options.keys, options.exclude)
    require_renamed(everything, options.renaming)
    chosen = _selected(found, options)
    parts = [_plan_part(name, found.parts[name], wish, path, to, options) for name, wish in chosen.items()]
    following = beside_parts(found, to, options.side_files, options.renaming.dtype)
    require_whole(following, options.trust, options.threads)
    marker = lay_out_marker(to, path, [part.output for part in parts], following.sizes)
    names = {fqn for part in everything for fqn in part}
    left = [f"{name}/" for name in found.parts if name not in chosen]
    notes = [
        *([f"the one step in {opens.rstrip('/')} is {found.path}"] if found.folder else []),
        *unmatched(names, options.keys, options.exclude),
        *([f"nothing of {', '.join(left)} is selected: left out"] if left else []),
    ]
    return ConvertPlan(
        (opens, found.folder), sources, path, to, tuple(parts), following, marker, replaces, (*found.notes, *notes)
    )


def _plan_part(
    name: str, checkpoint: Checkpoint, wish: Wish, path: str, to: str, options: ConvertOptions
) -> ConvertPart:
    selection, corrupt = _chosen(checkpoint, wish, options)
    wanted = _wanted(path, options)
    place, output = lay_out_part(checkpoint, selection, to, wanted, name)
    _require_safe(checkpoint, selection, output, options)
    return ConvertPart(name, place, checkpoint, selection, tuple(inside(name, one) for one in corrupt), wanted, output)


def _require_free(
    path: str, is_file: bool, to: str, sources: tuple[str, ...], read: Iterable[Checkpoint], options: ConvertOptions
) -> str:
    """Refuse a place where output cannot go, before all is checked, which takes time; return what is there now."""
    require_place(path, is_file, 0, options.overwrite, sources)
    for checkpoint in read:
        require_no_part(path, checkpoint, "source")
    return replaced(path, to) if options.overwrite else ""


def _chosen(checkpoint: Checkpoint, wish: Wish, options: ConvertOptions) -> tuple[Selection, list[Finding]]:
    """Select of a checkpoint what is asked, and see that it is sound; return what was left out as damaged, too."""
    corrupt = corrupt_entries(checkpoint, options.threads) if options.skip_corrupt else []
    require_some_left(checkpoint, corrupt, wish)
    selection = select(checkpoint, *wish, {finding.fqn for finding in corrupt if finding.fqn})
    skip, hint = options.skip_corrupt, "" if options.skip_corrupt else LEAVES_OUT
    require_sound(checkpoint, selection, wish.keys, wish.exclude, skip_corrupt=skip, trust=options.trust, hint=hint)
    require_one_rank(checkpoint, {item.entry.fqn for item in selection.in_order})
    return selection, corrupt


def _require_safe(checkpoint: Checkpoint, selection: Selection, output: LaidOut, options: ConvertOptions) -> None:
    if not options.trust:
        require_safe(checkpoint, selection.without_objects() if output.skipped else selection)


def _wish(options: ConvertOptions) -> Wish:
    return Wish(options.keys, options.exclude, options.renaming)


def _wanted(path: str, options: ConvertOptions) -> Wanted:
    return Wanted(path, options.objects, options.nesting, options.max_shard_nbytes, torch=options.torch)


def lay_out_again(
    checkpoint: Checkpoint, name: str, to: str, wanted: Wanted, left_out: frozenset[str], options: ConvertOptions
) -> LaidOut:
    """Return the files of a part that another process has planned.

    Args:
        checkpoint: the part.
        name, wanted, left_out: as its plan has them.
        to, options: of the conversion.
    """
    wish = _wish(options).of_part(checkpoint) if name else _wish(options)
    selection = select(checkpoint, *wish, left_out)
    return (
        lay_out_part(checkpoint, selection, to, wanted, name)[1] if name else lay_out(checkpoint, selection, to, wanted)
    )


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
