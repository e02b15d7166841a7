"""What a reshard would do: target layout, files, what goes where, and what is worth knowing. Copies nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.families import per_rank_families
from dcptool.checkpoint.findings import errors
from dcptool.checkpoint.selection import Selection, select
from dcptool.checks.check import cover_problems
from dcptool.errors import CheckpointNotFoundError, LayoutError
from dcptool.formats.dcp.write import Arrangement, DcpLayout, lay_out_dcp
from dcptool.formats.detect import open_checkpoint
from dcptool.formats.table import FORMATS, fills_folder
from dcptool.ops.guards import require_safe, require_sound
from dcptool.ops.latest import find_latest
from dcptool.ops.reshard.assign import assign
from dcptool.ops.reshard.mesh import MAX_RANKS, parse_mesh, parse_placement
from dcptool.ops.reshard.rules import LayoutRules, WantedLayout, mesh_hint
from dcptool.storage import is_url, locate
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


class Plan(NamedTuple):
    """What is to be done.

    Attributes:
        source: the open checkpoint.
        selection: what of it goes in.
        target: path of the output.
        arrangement: what goes into which file.
        layout: the files, with their bytes.
        n_ranks: of the target.
        notes: worth knowing, one sentence each.
    """

    source: Checkpoint
    selection: Selection
    target: str
    arrangement: Arrangement
    layout: DcpLayout
    n_ranks: int
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in (*self.layout.files, *self.layout.last))


def make_plan(source: str | None, target: str | None, options: ReshardOptions) -> Plan:
    """Open the source and lay out the target.

    Args:
        source: path or URL of a checkpoint; None for the one in, or the newest complete one under, the current folder.
        target: path or URL of the output; None for `<RUN>-ws<N>/<STEP>` beside the run directory.
        options: see `ReshardOptions`.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        ItemError: the source is damaged; the message names tensor, file and bytes.
        LayoutError: what is wanted cannot be laid out; the message names the tensor.
    """
    told: tuple[str, ...] = ()
    if source is None:
        source, told = source_here()
    checkpoint = open_checkpoint(source, options.also)
    selection = select(checkpoint, options.keys, options.exclude)
    require_sound(checkpoint, selection, options.keys, options.exclude, trust=options.trust)
    wanted = _wanted_layout(options)
    path = os.fspath(target) if target is not None else default_target(checkpoint.path, wanted.n_ranks)
    _require_common(selection, wanted)
    rules = LayoutRules(checkpoint, selection, wanted)
    arrangement = assign(rules.held(), wanted.n_ranks)
    layout = lay_out_dcp(checkpoint, selection, path, "reshard", arrangement)
    if not options.trust:
        require_safe(checkpoint, selection)
    notes = (*told, *selection.notes, *layout.notes, *_notes(checkpoint, selection, rules, wanted))
    return Plan(checkpoint, selection, path, arrangement, layout, wanted.n_ranks, notes)


def source_here() -> tuple[str, tuple[str, ...]]:
    """Return the checkpoint in the current folder, or the newest complete one of the run in or below it, and notes.

    Raises:
        CheckpointNotFoundError: there is none, or it is not clear which.
    """
    here = os.getcwd()
    if fills_folder({entry.name: entry.nbytes for entry in locate(here).storage.entries()}):
        return here, (f"the source is the checkpoint in the current folder, {here}",)
    found = find_latest(here)
    if found.path is None:
        why = found.problem or f"{found.run}: no step is complete; dcptool verify {found.run} says why"
        raise CheckpointNotFoundError(
            why, next_step="Name the checkpoint to reshard: dcptool reshard --world-size N SRC"
        )
    passed = [
        f"{verdict.name} is {verdict.state.value} and was passed over: {verdict.reason}" for verdict in found.skipped
    ]
    warned = [finding.message for finding in (*found.warnings, *found.pointers)]
    return found.path, (f"the source is the newest complete step, {found.path}", *passed, *warned)


def default_target(source: str, n_ranks: int) -> str:
    """Return `<RUN>-ws<N>/<STEP>` beside the run directory of a source.

    >>> default_target("/data/ckpt/step_500", 48)
    '/data/ckpt-ws48/step_500'
    """
    path = source.rstrip("/")
    run, _, step = path.rpartition("/")
    if not is_url(source) and ({step, run.rpartition("/")[2]} & {"", ".", ".."}):
        run, _, step = os.path.abspath(source).rpartition("/")
    if not run or run.endswith((":", "/")):
        raise LayoutError(f"{source} has no folder of its own beside which the output could go; name DST")
    suffix = next((end for known in FORMATS for end in known.format.suffixes if step.endswith(end)), "")
    return f"{run}-ws{n_ranks}/{step.removesuffix(suffix)}"


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


def _wanted_layout(options: ReshardOptions) -> WantedLayout:
    """Read what layout is wanted.

    Raises:
        LayoutError: the options do not go together.
    """
    problem = options_problem(options)
    if problem:
        raise LayoutError(problem)
    found = WantedLayout(options.world_size or 0)
    if options.mesh is not None:
        mesh = parse_mesh(options.mesh)
        found = WantedLayout(mesh.n_ranks, mesh, tuple(parse_placement(text, mesh) for text in options.placements))
    elif options.like is not None:
        like = open_checkpoint(options.like)
        found = WantedLayout(like.world_size or 1, like=like)
    elif options.files is not None:
        found = WantedLayout(options.files, repack=True)
    if options.world_size not in (None, found.n_ranks):
        raise LayoutError(
            f"--world-size {options.world_size} contradicts --like {options.like}, which {found.n_ranks} ranks saved"
        )
    return found


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
            notes.append(f"--placement {placement.glob!r} matches no tensor; names are such as {_named(names)}")
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
    """Say which objects of single ranks a resume with another number of them will miss, or not look for."""
    notes = []
    for pattern, ranks in per_rank_families(item.name for item in selection.objects).items():
        if len(ranks) == 1 and checkpoint.world_size != 1:
            continue
        first, last = min(ranks), max(ranks)
        shown = f"{pattern} of {f'ranks {first}–{last}' if last > first else f'rank {first}'}"
        missed = [rank for rank in range(n_ranks) if rank not in ranks]
        spare = sum(rank >= n_ranks for rank in ranks)
        told = f"{shown} cannot be resharded and is copied as it is"
        if missed:
            named = f"rank {missed[0]}" if len(missed) == 1 else f"ranks {missed[0]}–{missed[-1]} ({len(missed):,})"
            told += f"; a resume on {n_ranks} ranks finds none for {named}"
        if spare:
            told += f"; that of {plural(spare, 'rank')} belongs to no rank any more"
        notes.append(told)
    return notes


def _named(names: Sequence[str]) -> str:
    return listed(list(map(repr, names)), MAX_NAMED, counted=False)
