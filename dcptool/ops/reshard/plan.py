"""What a reshard would do: target layout, files, what goes where, and what is worth knowing. Copies nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.families import per_rank_state
from dcptool.checkpoint.findings import errors
from dcptool.checkpoint.selection import (
    AS_IS,
    Renaming,
    Selection,
    require_match,
    select,
    unmatched,
)
from dcptool.checks.check import cover_problems
from dcptool.checks.copies import require_one_rank
from dcptool.copying.outputs import OutputFile
from dcptool.errors import CheckpointNotFoundError, LayoutError
from dcptool.formats.dcp.write import Arrangement, DcpLayout, lay_out_dcp, marker_of
from dcptool.formats.detect import open_checkpoint
from dcptool.ops.carrying import require_whole
from dcptool.ops.following import NOTHING, Following, data_order, follow, left_notes, ranks_named
from dcptool.ops.guards import of_rank, require_safe, require_sound
from dcptool.ops.model_config import with_dtype
from dcptool.ops.reshard.assign import assign
from dcptool.ops.reshard.mesh import MAX_RANKS, parse_mesh, parse_placement
from dcptool.ops.reshard.rules import LayoutRules, WantedLayout, mesh_hint
from dcptool.ops.reshard.source import default_target, in_a_run, source_here
from dcptool.ops.sources import StepSource, Wish, open_source, require_renamed
from dcptool.ops.tracking import tracked
from dcptool.storage import join
from dcptool.words import listed, plural

MAX_NAMED = 3
MIN_TIMEOUT = 2.0


class ReshardOptions(NamedTuple):
    """How a checkpoint is resharded.

    Attributes:
        world_size: ranks of the target; None where `like`, `mesh` or `files` says it.
        like: path of a checkpoint whose layout is taken over.
        mesh: names and sizes of the target's mesh, such as "dp=6,tp=8".
        placements: how tensors are placed on it, such as "*.weight=tp:1,dp:0"; the first that matches wins.
        files: keep all boxes, and spread them over so many files.
        keys, exclude: names or globs of what to take, and of what to leave out.
        workers: processes that share the work, None for the number of processors.
        threads: how many bands each of them reads at the same time.
        timeout: seconds after which a process that gives no sign of life is given up.
        overwrite: replace output that is there, once the new one is complete.
        check: compare the output with the source, element by element, before it is published.
        also: further folders that hold files of the source.
        trust: take also objects that run code when they are loaded.
        rank: of a checkpoint in which each rank kept metadata of its own, the one whose values are taken where they
            differ; None refuses them.
        renaming: how names and dtypes change.
        torch: a version of torch, (2, 2) or later, that shall read the output: what it cannot hold is refused. None for
            the oldest that can hold it all, which is told.
    """

    world_size: int | None = None
    like: str | None = None
    mesh: str | None = None
    placements: tuple[str, ...] = ()
    files: int | None = None
    keys: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    workers: int | None = None
    threads: int | None = None
    timeout: float = 300.0
    overwrite: bool = False
    check: bool = False
    also: tuple[str, ...] = ()
    trust: bool = False
    rank: int | None = None
    renaming: Renaming = AS_IS
    torch: tuple[int, int] | None = None


class PartPlan(NamedTuple):
    """What is to be done with one checkpoint of a step.

    Attributes:
        name: its place in the step, "" for the step itself.
        source: the open checkpoint.
        selection: what of it goes in.
        arrangement: what goes into which file, by names in the part.
        layout: the files by names in the step, with their bytes.
        notes: worth knowing, one sentence each.
    """

    name: str
    source: Checkpoint
    selection: Selection
    arrangement: Arrangement
    layout: DcpLayout
    notes: tuple[str, ...]


class Plan(NamedTuple):
    """What is to be done.

    Attributes:
        source: path of the step, or of the one checkpoint.
        opens: what was named, and where the step is below it.
        parts: the checkpoints in it.
        following: the files beside them.
        marker: what is written last.
        target: path of the output.
        n_ranks: of the target.
        notes: worth knowing, one sentence each.
    """

    source: str
    opens: tuple[str, str]
    parts: tuple[PartPlan, ...]
    following: Following
    marker: OutputFile
    target: str
    n_ranks: int
    notes: tuple[str, ...]

    @property
    def files(self) -> list[OutputFile]:
        """Data files of all parts, by their names in the step."""
        return [file for part in self.parts for file in part.layout.files]

    @property
    def last(self) -> list[OutputFile]:
        """What makes it complete, in order."""
        return [*(part.layout.metadata for part in self.parts), self.marker]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in (*self.files, *self.last)) + self.following.nbytes


def make_plan(source: str | None, target: str | None, options: ReshardOptions) -> Plan:
    """Open the source and lay out the target.

    Args:
        source: path or URL of a step or a checkpoint; None for the one in, or the newest complete one under, the
            current folder.
        target: path or URL of the output; None for `<RUN>-ws<N>/<STEP>` beside the run directory.
        options: see `ReshardOptions`.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        ItemError: the source is damaged; the message names tensor, file and bytes.
        LayoutError: what is wanted cannot be laid out; the message names the tensor.
        UnsupportedError: the step has files that only as many ranks as saved it can load.
    """
    told: tuple[str, ...] = ()
    if source is None:
        source, told = source_here()
    source = of_rank(source, options.rank)
    found = open_source(source, options.also)
    problem = options_problem(options)
    if problem:
        raise LayoutError(problem)
    several = len(found.parts) > 1
    if several:
        require_match(list(found.parts.values()), options.keys, options.exclude)
        require_renamed(found.parts.values(), options.renaming)
    asked = {name: _options_of(part, options) if several else options for name, part in found.parts.items()}
    chosen = {name: part for name, part in found.parts.items() if asked[name] is not None}
    n_ranks = 0
    parts = []
    path = os.fspath(target) if target is not None else ""
    for name, checkpoint in chosen.items():
        of_part = asked[name] or options
        wanted = _wanted_layout(of_part, name if several or found.step else "")
        n_ranks = wanted.n_ranks
        path = path or default_target(found.path, n_ranks, found.around[1] if found.around else "")
        parts.append(_plan_part(name, checkpoint, of_part, wanted))
    following = NOTHING
    cut = None if options.files else n_ranks
    if found.step:
        following = follow(found.step, found.parts, cut)
        following = with_dtype(following, options.renaming.dtype) if options.renaming.dtype else following
        require_whole(following, options.trust, options.threads)
    marker = marker_of(path, "reshard", [part.layout for part in parts], following.sizes)
    notes = (
        *told,
        *found.notes,
        *in_a_run(found, path),
        *tracked(found.step.profile if found.step else None, path),
        *(_step_notes(found, chosen, options) if several else ()),
        *dict.fromkeys(note for part in parts for note in part.notes),
        *following.notes,
        *(left_notes(found.around[0], [found.around[1]]) if found.around else ()),
    )
    return Plan(found.path, (source, found.folder), tuple(parts), following, marker, path, n_ranks, notes)


def _plan_part(name: str, checkpoint: Checkpoint, options: ReshardOptions, wanted: WantedLayout) -> PartPlan:
    selection = select(checkpoint, options.keys, options.exclude, options.renaming)
    require_sound(checkpoint, selection, options.keys, options.exclude, trust=options.trust)
    require_one_rank(checkpoint, {item.entry.fqn for item in selection.in_order})
    _require_common(selection, wanted)
    rules = LayoutRules(checkpoint, selection, wanted)
    arrangement = assign(rules.held(), wanted.n_ranks)
    layout = lay_out_dcp(checkpoint, selection, arrangement, options.torch)
    if not options.trust:
        require_safe(checkpoint, selection)
    notes = [*selection.notes, *layout.notes, *_notes(checkpoint, selection, rules, wanted)]
    told = tuple(f"{name}: {note}" for note in notes) if name else tuple(notes)
    return PartPlan(name, checkpoint, selection, arrangement, layout.below(name), told)


def _options_of(part: Checkpoint, options: ReshardOptions) -> ReshardOptions | None:
    """Return what of the options is about one part of several; None if nothing of it is selected."""
    asked = asked_of(options).of_part(part)
    if not asked.takes_of(part):
        return None
    mesh = parse_mesh(options.mesh) if options.mesh else None
    placements = tuple(
        text for text in options.placements if mesh and any(map(parse_placement(text, mesh).matches, part.tensors))
    )
    return options._replace(**asked._asdict(), placements=placements)


def asked_of(options: ReshardOptions) -> Wish:
    """Return what of options says which entries are taken, and under which names."""
    return Wish(options.keys, options.exclude, options.renaming)


def _step_notes(found: StepSource, chosen: Collection[str], options: ReshardOptions) -> list[str]:
    """Say of options what matches nothing in any part, and which parts are left out."""
    names = {fqn for part in found.parts.values() for fqn in part}
    notes = list(unmatched(names, options.keys, options.exclude))
    left = [f"{name}/" for name in found.parts if name not in chosen]
    notes += [f"nothing of {', '.join(left)} is selected: left out"] if left else []
    mesh = parse_mesh(options.mesh) if options.mesh else None
    tensors = [name for part in found.parts.values() for name in part.tensors]
    placements = [parse_placement(text, mesh) for text in options.placements] if mesh else []
    lone = [placement.glob for placement in placements if not any(map(placement.matches, tensors))]
    return notes + [_matches_nothing(glob, tensors) for glob in lone]


def _matches_nothing(glob: str, names: Sequence[str]) -> str:
    return f"--placement {glob!r} matches no tensor; names are such as {_named(names)}"


def options_problem(options: ReshardOptions) -> str:
    """Say why options do not go together, or cannot be read; "" if they do."""
    ways = [name for name in ("like", "mesh", "files") if getattr(options, name) is not None]
    if len(ways) > 1:
        return f"--{ways[0]} and --{ways[1]} are two layouts; give one of them"
    if options.placements and options.mesh is None:
        return "--placement needs --mesh, such as --mesh dp=6,tp=8"
    if not ways and options.world_size is None:
        return "give --world-size N, or --mesh, --like or --files"
    if options.timeout < MIN_TIMEOUT:
        return f"--timeout must be at least {MIN_TIMEOUT:g}s: a process shows every second that it lives"
    n_ranks = options.world_size or options.files or 1
    said = f"--files {options.files}"
    if options.mesh is not None:
        try:
            mesh = parse_mesh(options.mesh)
            for text in options.placements:
                parse_placement(text, mesh)
        except LayoutError as error:
            return str(error)
        n_ranks, said = mesh.n_ranks, f"--mesh {options.mesh}, which is {mesh.n_ranks:,} ranks"
    if n_ranks > MAX_RANKS:
        return f"{n_ranks:,} ranks are more than the {MAX_RANKS:,} dcptool lays out"
    if (options.mesh or options.files) and options.world_size not in (None, options.files or n_ranks):
        return f"--world-size {options.world_size} contradicts {said}"
    return ""


def _wanted_layout(options: ReshardOptions, part: str) -> WantedLayout:
    """Read what layout is wanted for a part of a step.

    Raises:
        LayoutError: the options do not go together.
    """
    found = WantedLayout(options.world_size or 0)
    if options.mesh is not None:
        mesh = parse_mesh(options.mesh)
        found = WantedLayout(mesh.n_ranks, mesh, tuple(parse_placement(text, mesh) for text in options.placements))
    elif options.like is not None:
        like = _like(options.like, part)
        found = WantedLayout(like.world_size or 1, like=like)
    elif options.files is not None:
        found = WantedLayout(options.files, repack=True)
    if options.world_size not in (None, found.n_ranks):
        raise LayoutError(
            f"--world-size {options.world_size} contradicts --like {options.like}, which {found.n_ranks} ranks saved"
        )
    return found


def _like(path: str, part: str) -> Checkpoint:
    """Open the checkpoint whose layout is taken over: that in the same place of another step, or the one named."""
    try:
        return open_checkpoint(join(path, part) if part else path)
    except CheckpointNotFoundError:
        if not part:
            raise
        return open_checkpoint(path)


def _require_common(selection: Selection, wanted: WantedLayout) -> None:
    """Refuse a layout that says nothing of what is selected, or nothing that a checkpoint may look like.

    Raises:
        LayoutError: `--like` has none of the entries, or its boxes of one leave a hole, overlap or lie outside.
    """
    like = wanted.like
    if like is None:
        return
    names = [item.name for item in selection.in_order]
    if not any(name in like for name in names):
        raise LayoutError(
            f"--like {like.path} has none of the entries, which are {_named(names)}; its own are {_named(list(like))}"
        )
    selected = set(names)
    wrong = [finding.message for finding in errors((*like.problems, *cover_problems(like))) if finding.fqn in selected]
    if wrong:
        raise LayoutError(f"--like {like.path} is damaged, its layout is no model for another:\n{wrong[0]}")


def _notes(checkpoint: Checkpoint, selection: Selection, rules: LayoutRules, wanted: WantedLayout) -> list[str]:
    notes = []
    names = [item.name for item in selection.tensors]
    for placement in wanted.placements:
        if not any(map(placement.matches, names)):
            notes.append(_matches_nothing(placement.glob, names))
    if rules.kept:
        first, found = next(iter(rules.kept.items()))
        others = ", …" if len(rules.kept) > 1 else ""
        keep = "keeps its boxes" if len(rules.kept) == 1 else "keep their boxes"
        notes.append(f"{plural(len(rules.kept), 'tensor')} {keep}, spread over the ranks: {first!r} ({found}){others}")
        hint, fitting = mesh_hint(rules.kept, wanted.n_ranks)
        if hint:
            notes.append(
                f"{hint} would cut {plural(len(fitting), 'tensor')} as {wanted.n_ranks} ranks do: {_named(fitting)}"
            )
    if rules.unplaced:
        notes.append(
            f"{plural(len(rules.unplaced), 'tensor')} match no --placement and are sharded by their stored boxes: "
            f"{_named(rules.unplaced)}"
        )
    if wanted.like is not None:
        lacking = [item.name for item in selection.in_order if item.name not in wanted.like]
        if lacking:
            notes.append(f"{wanted.like.path} lacks {len(lacking):,} entries, laid out by default: {_named(lacking)}")
    return notes + _per_rank_notes(checkpoint, selection, wanted.n_ranks)


def _per_rank_notes(checkpoint: Checkpoint, selection: Selection, n_ranks: int) -> list[str]:
    """Say which entries of single ranks a resume with another number of them will miss, or not look for."""
    notes = []
    for family in per_rank_state(item.name for item in selection.in_order):
        if len(family.ranks) == 1 and checkpoint.world_size != 1:
            continue
        told = f"{family.named} of {ranks_named(sorted(family.ranks))} cannot be resharded and is copied as it is"
        missed = [rank for rank in range(n_ranks) if rank not in family.ranks]
        spare = sum(rank >= n_ranks for rank in family.ranks)
        if missed:
            told += f"; a resume on {n_ranks} ranks finds none for {ranks_named(missed)}"
        if spare:
            told += f"; that of {plural(spare, 'rank')} belongs to no rank any more"
        notes.append(told + (data_order(family.form) if missed or spare else ""))
    return notes


def _named(names: Sequence[str]) -> str:
    return listed(list(map(repr, names)), MAX_NAMED, counted=False)
