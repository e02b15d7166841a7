"""What is at a path: the facts `dcptool inspect` shows, as frozen values. Prints nothing, knows no terminal.

Reads metadata, one listing per folder and the objects' small items; of tensors not one byte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from dcptool.check import cover_problems, file_problems, state_of
from dcptool.checkpoint import Checkpoint, ObjectEntry, TensorEntry
from dcptool.errors import CheckpointNotFoundError, DcptoolError, LayoutError, UnsupportedError
from dcptool.findings import Finding, Severity
from dcptool.formats.dcp.reader import data_file_rank
from dcptool.formats.detect import Part, find_parts, not_a_checkpoint, open_checkpoint, open_part, part_files, part_path
from dcptool.model import Chunk, Ints
from dcptool.pickles import plain
from dcptool.placements import layout
from dcptool.regions import volume
from dcptool.runs import Run, find_run
from dcptool.storage import Location, join, locate

MAX_VALUES = 2_000
"""Objects whose values are read for one summary; select with `keys` to see others."""
MAX_VALUES_NBYTES = 32 << 20
"""Bytes of such objects together."""


class TensorSummary(NamedTuple):
    """One tensor: names, sizes in elements and bytes, how it is cut and where it is stored."""

    fqn: str
    dtype: str
    shape: Ints
    nbytes: int
    layout: str
    n_chunks: int
    files: tuple[str, ...]
    chunks: tuple[Chunk, ...] | None

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return volume(self.shape)


class ObjectSummary(NamedTuple):
    """One object: its decoded value (`pickles.plain`), its class, and why the value could not be read, if so.

    `class_name` is None when nothing of it was read.
    """

    fqn: str
    value: Any
    class_name: str | None
    error: str | None


class Group(NamedTuple):
    """Entries whose names begin alike: counts, elements, bytes, and the dtypes with the most bytes first."""

    name: str
    n_tensors: int
    n_objects: int
    elements: int
    nbytes: int
    dtypes: tuple[str, ...]


class CheckpointSummary(NamedTuple):
    """One checkpoint.

    Attributes:
        path: as a user would type it.
        format, flavour, evidence: see `Checkpoint`.
        world_size: ranks that saved it, None if the files do not tell.
        state: "complete" (all files there and long enough), "incomplete" or "damaged".
        nbytes: bytes of its files on disk.
        files: name and size in bytes of each.
        groups, tensors, objects: in the order of the metadata, selected by `keys` and `exclude`.
        n_entries: entries before selection.
        problems: what is wrong.
    """

    path: str
    format: str
    flavour: str
    evidence: tuple[str, ...]
    world_size: int | None
    state: str
    nbytes: int
    files: tuple[tuple[str, int], ...]
    groups: tuple[Group, ...]
    tensors: tuple[TensorSummary, ...]
    objects: tuple[ObjectSummary, ...]
    n_entries: int
    problems: tuple[Finding, ...]

    @property
    def good(self) -> bool:
        """Whether nothing is missing or wrong as far as was looked."""
        return not any(problem.severity is Severity.ERROR for problem in self.problems)


class StepSummary(NamedTuple):
    """One step of a run directory: the worst state of its checkpoints, and the first thing wrong with them.

    `state` is complete, incomplete, damaged, or other (no checkpoint dcptool reads); `n_entries` is None if nothing
    of it opens; files and bytes are those on disk.
    """

    name: str
    state: str
    n_checkpoints: int
    world_size: int | None
    n_entries: int | None
    n_files: int
    nbytes: int
    problem: str


class Summary(NamedTuple):
    """What is at a path.

    Attributes:
        path: where it was found, which may be below the path asked for.
        checkpoints: the checkpoint, or those of a folder.
        steps: of a run directory; its checkpoints are not opened one by one then.
        others: paths of checkpoints beside the steps, or below a safetensors folder.
        errors: (path, message) of checkpoints of a folder that do not open.
    """

    path: str
    checkpoints: tuple[CheckpointSummary, ...] = ()
    steps: tuple[StepSummary, ...] = ()
    others: tuple[str, ...] = ()
    errors: tuple[tuple[str, str], ...] = ()

    @property
    def good(self) -> bool:
        """Whether everything that was looked at is whole and readable."""
        found = all(checkpoint.good for checkpoint in self.checkpoints)
        return found and not self.errors and all(step.state in ("complete", "other") for step in self.steps)


def summarize(
    path: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    chunks: bool = False,
    depth: int = 1,
) -> Summary:
    """Summarize the checkpoint, the checkpoints or the run directory at a path.

    Args:
        path: local path or fsspec URL; see `dcptool.open`.
        keys: names or shell globs on whole fqns, `*` crosses dots; default: all.
        exclude: names or globs of what to leave out.
        chunks: keep every tensor's boxes and places too.
        depth: leading parts of a name that make a group.

    Raises:
        CheckpointNotFoundError, MetadataError, UnsupportedError, StorageError: as `dcptool.open`, if nothing opens.
        LayoutError: `keys` match nothing; the message lists what there is.

    Example:
        >>> dcptool.summarize("ckpt/step_500").checkpoints[0].tensors[0].layout
        'Shard(0) ×4'
    """
    keys, exclude = _globs(keys), _globs(exclude)
    location = locate(path)
    if location.file is not None:
        opened = [open_checkpoint(path)]
        _require_match(opened, keys, exclude)
        found = summarize_checkpoint(opened[0], keys, exclude, chunks, depth)
        return Summary(found.path, (found,))
    parts = find_parts(location)
    itself = [part for part in parts if not part.name]
    run = None if itself and itself[0].is_dcp else find_run(location)
    if run:
        steps = tuple(_summarize_step(run, name) for name in run.steps)
        others = (part for part in parts if not run.holds(part.name))
        return Summary(run.path, (), steps, tuple(part_path(location, part) for part in others))
    if not parts:
        raise CheckpointNotFoundError(not_a_checkpoint(location))
    wanted = itself or parts
    opened, errors = _open_all(location, wanted)
    _require_match(opened, keys, exclude)
    summaries = tuple(summarize_checkpoint(checkpoint, keys, exclude, chunks, depth) for checkpoint in opened)
    others = (part for part in parts if part not in wanted)
    return Summary(location.storage.root, summaries, (), tuple(part_path(location, part) for part in others), errors)


def _globs(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _open_all(location: Location, parts: Sequence[Part]) -> tuple[list[Checkpoint], tuple[tuple[str, str], ...]]:
    """Open the parts of a folder; what does not open is returned as (path, message), unless nothing does."""
    opened: list[Checkpoint] = []
    failed: list[tuple[str, DcptoolError]] = []
    for part in parts:
        try:
            opened.append(open_part(location, part.name))
        except DcptoolError as error:
            failed.append((part_path(location, part), error))
    if not opened:
        raise failed[0][1]
    return opened, tuple((path, str(error)) for path, error in failed)


def summarize_checkpoint(
    checkpoint: Checkpoint, keys: Sequence[str], exclude: Sequence[str], chunks: bool, depth: int
) -> CheckpointSummary:
    """Summarize one open checkpoint; arguments as in `summarize`."""
    selected = [fqn for fqn in checkpoint if _selected(fqn, keys, exclude)]
    tensors = tuple(_tensor(entry, chunks) for fqn in selected if isinstance(entry := checkpoint[fqn], TensorEntry))
    names = [fqn for fqn in selected if not isinstance(checkpoint[fqn], TensorEntry)]
    unreadable: dict[str, list[DcptoolError]] = {}
    within = _within_budget(checkpoint, names)
    objects = tuple(_object(checkpoint, fqn, fqn in within, unreadable) for fqn in names)
    problems = [*checkpoint.problems, *file_problems(checkpoint), *cover_problems(checkpoint)]
    if state_of(problems) != "incomplete":  # what is not there cannot be read, and is said already
        problems += _unreadable(unreadable)
    return CheckpointSummary(
        path=checkpoint.path,
        format=checkpoint.format,
        flavour=checkpoint.flavour,
        evidence=checkpoint.evidence,
        world_size=world_size(checkpoint),
        state=state_of(problems),
        nbytes=sum(checkpoint.files.values()),
        files=tuple(checkpoint.files.items()),
        groups=_groups(tensors, objects, depth),
        tensors=tensors,
        objects=objects,
        n_entries=len(checkpoint),
        problems=tuple(problems),
    )


def world_size(checkpoint: Checkpoint) -> int | None:
    """Return how many ranks saved a checkpoint, by the highest rank in its file names; None if they do not tell.

    Counted are the files the metadata names, there or not, and the empty ones that idle ranks leave.
    """
    if checkpoint.format == "dcp":
        names = {*checkpoint.usage, *(name for name, nbytes in checkpoint.files.items() if not nbytes)}
        ranks = [rank for name in names if (rank := data_file_rank(name)) is not None]
    else:
        ranks = [int(name[6:11]) - 1 for name in checkpoint.files if name.startswith("shard-") and name[6:11].isdigit()]
    return max(ranks) + 1 if ranks else None


def _selected(fqn: str, keys: Sequence[str], exclude: Sequence[str]) -> bool:
    return (not keys or _matches(fqn, keys)) and not _matches(fqn, exclude)


def _matches(fqn: str, globs: Sequence[str]) -> bool:
    return any(fqn == pattern or fnmatchcase(fqn, pattern) for pattern in globs)


def _require_match(opened: Sequence[Checkpoint], keys: Sequence[str], exclude: Sequence[str]) -> None:
    """Refuse a selection that selects nothing, naming what there is."""
    names = [fqn for checkpoint in opened for fqn in checkpoint]
    if not keys or any(_selected(fqn, keys, exclude) for fqn in names):
        return
    begin = next((pattern for pattern in keys if any(fqn.startswith(pattern) for fqn in names)), None)
    if begin:
        raise LayoutError(f"no entry is named {begin!r}; for those that begin so: --keys '{begin}*'")
    tops = list(dict.fromkeys(fqn.partition(".")[0] for fqn in names))
    listed = ", ".join(name if name.isprintable() and name else repr(name) for name in tops[:12])
    listed += ", …" if len(tops) > 12 else ""
    shown = ", ".join(map(repr, keys))
    raise LayoutError(f"no entry matches {shown}; names begin with: {listed or '(there are no entries)'}")


def _tensor(entry: TensorEntry, chunks: bool) -> TensorSummary:
    kept = tuple(entry.chunks) if chunks else None
    files = tuple(entry.chunks.files())
    shown = layout(entry.shape, entry.chunks)
    return TensorSummary(entry.fqn, entry.dtype, entry.shape, entry.nbytes, shown, len(entry.chunks), files, kept)


def _within_budget(checkpoint: Checkpoint, names: Sequence[str]) -> set[str]:
    """Return the objects that are read: so many, and so many stored bytes together, whatever a checkpoint holds."""
    within: set[str] = set()
    nbytes = 0
    for fqn in names[:MAX_VALUES]:
        entry = checkpoint[fqn]
        if checkpoint.format == "dcp" and isinstance(entry, ObjectEntry) and entry.item:
            nbytes += entry.item.nbytes
        if nbytes <= MAX_VALUES_NBYTES:
            within.add(fqn)
    return within


def _object(checkpoint: Checkpoint, fqn: str, read: bool, unreadable: dict[str, list[DcptoolError]]) -> ObjectSummary:
    if not read:
        return ObjectSummary(fqn, None, None, "not read, there are too many or too large ones; select it with --keys")
    try:
        value = checkpoint.value(fqn)
    except DcptoolError as error:
        entry = checkpoint[fqn]
        file = entry.item.file if isinstance(entry, ObjectEntry) and entry.item else ""
        unreadable.setdefault(file, []).append(error)
        return ObjectSummary(fqn, None, None, str(error))
    return ObjectSummary(fqn, value, plain.class_name(value), None)


def _unreadable(errors: Mapping[str, Sequence[DcptoolError]]) -> list[Finding]:
    """Return one finding per file whose objects could not be read; an unsupported form is no damage."""
    findings = []
    for file, found in errors.items():
        severity = Severity.NOTE if isinstance(found[0], UnsupportedError) else Severity.ERROR
        count = f"{len(found)} object{'s' * (len(found) != 1)}"
        message = f"{count} of {file or 'no file'} cannot be read; the first: {found[0]}"
        findings.append(Finding("unreadable-objects", severity, message, file or None))
    return findings


def _groups(tensors: Sequence[TensorSummary], objects: Sequence[ObjectSummary], depth: int) -> tuple[Group, ...]:
    members: dict[str, list[TensorSummary]] = {}
    n_objects: dict[str, int] = {}
    for tensor in tensors:
        members.setdefault(_prefix(tensor.fqn, depth), []).append(tensor)
    for item in objects:
        name = _prefix(item.fqn, depth)
        members.setdefault(name, [])
        n_objects[name] = n_objects.get(name, 0) + 1
    groups = []
    for name, inside in members.items():
        nbytes: dict[str, int] = {}
        for tensor in inside:
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
        dtypes = tuple(sorted(nbytes, key=lambda dtype: -nbytes[dtype]))
        elements = sum(tensor.elements for tensor in inside)
        groups.append(Group(name, len(inside), n_objects.get(name, 0), elements, sum(nbytes.values()), dtypes))
    return tuple(groups)


def _prefix(fqn: str, depth: int) -> str:
    """Return the first `depth` dotted parts of a name, without its last part; "" at top level."""
    return ".".join(fqn.split(".")[:-1][:depth])


def _summarize_step(run: Run, name: str) -> StepSummary:
    path = join(run.path, name)
    opened: list[CheckpointSummary] = []
    sizes: dict[str, int] = {}
    n_parts = 0
    state, problem = "complete", ""
    try:
        location = locate(path)
        parts = find_parts(location)
        n_parts = len(parts)
        for part in parts:
            sizes |= {f"{part.name}/{file}": nbytes for file, nbytes in part_files(location, part.name).items()}
        if not parts:
            state, problem = "other", not_a_checkpoint(location)
        for part in parts:
            opened.append(summarize_checkpoint(open_part(location, part.name), (), ("*",), False, 1))
    except CheckpointNotFoundError as error:
        state, problem = "incomplete", str(error)
    except UnsupportedError as error:
        state, problem = "other", str(error)
    except DcptoolError as error:
        state, problem = "damaged", str(error)
    for summary in opened:
        if state == "complete" and summary.state != "complete":
            state = summary.state
            problem = next(item.message for item in summary.problems if item.severity is Severity.ERROR)
    ranks = [size for summary in opened if (size := summary.world_size)]
    return StepSummary(
        name=name,
        state=state,
        n_checkpoints=n_parts,
        world_size=max(ranks) if ranks else None,
        n_entries=sum(summary.n_entries for summary in opened) if opened else None,
        n_files=len(sizes),
        nbytes=sum(sizes.values()),
        problem=problem.partition("\n")[0].removeprefix(f"{path}: ").removeprefix(f"{path}/"),
    )
