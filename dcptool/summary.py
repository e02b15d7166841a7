"""What is at a path: the facts `dcptool inspect` shows, as frozen values. Prints nothing, knows no terminal.

Reads metadata, one listing per folder and the objects' small items; of tensors not one byte.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dcptool.check import file_problems, state_of
from dcptool.checkpoint import Checkpoint, TensorEntry
from dcptool.errors import CheckpointNotFoundError, DcptoolError, LayoutError, UnsupportedError
from dcptool.findings import Finding, Severity
from dcptool.formats.dcp.reader import data_file_rank
from dcptool.formats.detect import find_parts, not_a_checkpoint, open_checkpoint, open_part
from dcptool.model import Chunk, Ints
from dcptool.pickles import plain
from dcptool.placements import layout
from dcptool.regions import volume
from dcptool.runs import Run, find_run, open_step
from dcptool.storage import join, locate

MAX_VALUES = 2_000
"""Objects whose values are read for one summary; select with `keys` to see others."""


@dataclass(frozen=True, slots=True)
class TensorSummary:
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


@dataclass(frozen=True, slots=True)
class ObjectSummary:
    """One object: its decoded value (`pickles.plain`), its class, and why the value could not be read, if so.

    `class_name` is None when nothing of it was read.
    """

    fqn: str
    value: Any
    class_name: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Group:
    """Entries whose names begin alike: counts, elements, bytes, and the dtypes with the most bytes first."""

    name: str
    n_tensors: int
    n_objects: int
    elements: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
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


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step of a run directory: the states of its checkpoints, and the first thing wrong with them.

    `state` is the worst of its parts: complete, incomplete, damaged, or other (no checkpoint dcptool reads).
    """

    name: str
    state: str
    n_checkpoints: int
    world_size: int | None
    n_entries: int
    n_files: int
    nbytes: int
    problem: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What is at a path: checkpoints (one, or the parts of a folder), or the steps of a run directory.

    `path` is where they were found, which may be below the path asked for.
    """

    path: str
    checkpoints: tuple[CheckpointSummary, ...]
    steps: tuple[StepSummary, ...] = ()

    @property
    def good(self) -> bool:
        """Whether everything looked at is complete; steps of a run directory may be incomplete."""
        return all(checkpoint.state == "complete" for checkpoint in self.checkpoints)


def summarize(
    path: str | os.PathLike[str],
    *,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    chunks: bool = False,
    depth: int = 1,
) -> Summary:
    """Summarize the checkpoint, the checkpoints or the run directory at a path.

    Args:
        path: local path or fsspec URL; see `dcptool.open`.
        keys: shell globs on whole fqns, `*` crosses dots; default: all.
        exclude: globs of what to leave out.
        chunks: keep every tensor's boxes and places too.
        depth: leading parts of a name that make a group.

    Raises:
        CheckpointNotFoundError, MetadataError, UnsupportedError, StorageError: as `dcptool.open`, if nothing opens.
        LayoutError: `keys` match nothing; the message lists what there is.

    Example:
        >>> dcptool.summarize("ckpt/step_500").checkpoints[0].tensors[0].layout
        'Shard(0) ×4'
    """
    location = locate(path)
    if location.file is None:
        parts = find_parts(location)
        run = find_run(location) if not any(part.name == "" for part in parts) else None
        if run:
            return Summary(run.path, (), tuple(_summarize_step(run, name) for name in run.steps))
        if not parts:
            raise CheckpointNotFoundError(not_a_checkpoint(location))
        opened = [open_part(location, part.name) for part in parts]
    else:
        opened = [open_checkpoint(path)]
    if keys and not any(_selected(fqn, keys, exclude) for checkpoint in opened for fqn in checkpoint):
        raise LayoutError(_nothing_matched(opened, keys))
    found = tuple(summarize_checkpoint(checkpoint, keys, exclude, chunks, depth) for checkpoint in opened)
    root = location.storage.root
    return Summary(join(root, location.file) if location.file else root, found)


def summarize_checkpoint(
    checkpoint: Checkpoint, keys: Sequence[str], exclude: Sequence[str], chunks: bool, depth: int
) -> CheckpointSummary:
    """Summarize one open checkpoint; arguments as in `summarize`."""
    selected = [fqn for fqn in checkpoint if _selected(fqn, keys, exclude)]
    tensors = tuple(_tensor(entry, chunks) for fqn in selected if isinstance(entry := checkpoint[fqn], TensorEntry))
    names = [fqn for fqn in selected if not isinstance(checkpoint[fqn], TensorEntry)]
    objects = tuple(_object(checkpoint, fqn, index < MAX_VALUES) for index, fqn in enumerate(names))
    problems = (*checkpoint.problems, *file_problems(checkpoint))
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
        problems=problems,
    )


def world_size(checkpoint: Checkpoint) -> int | None:
    """Return how many ranks saved a checkpoint, by the highest rank in its file names; None if they do not tell."""
    if checkpoint.format == "dcp":
        names = {*checkpoint.files, *checkpoint.usage()}  # a missing file tells as much as one that is there
        ranks = [rank for name in names if (rank := data_file_rank(name)) is not None]
    else:
        ranks = [int(name[6:11]) - 1 for name in checkpoint.files if name.startswith("shard-") and name[6:11].isdigit()]
    return max(ranks) + 1 if ranks else None


def _selected(fqn: str, keys: Sequence[str], exclude: Sequence[str]) -> bool:
    wanted = not keys or any(fnmatchcase(fqn, pattern) for pattern in keys)
    return wanted and not any(fnmatchcase(fqn, pattern) for pattern in exclude)


def _nothing_matched(opened: Sequence[Checkpoint], keys: Sequence[str]) -> str:
    tops = dict.fromkeys(fqn.partition(".")[0] for checkpoint in opened for fqn in checkpoint)
    shown = ", ".join(list(tops)[:12]) + (", …" if len(tops) > 12 else "")
    return f"no entry matches {', '.join(map(repr, keys))}; names begin with: {shown or '(there are no entries)'}"


def _tensor(entry: TensorEntry, chunks: bool) -> TensorSummary:
    kept = tuple(entry.chunks) if chunks else None
    files = tuple(entry.chunks.files())
    shown = layout(entry.shape, entry.chunks)
    return TensorSummary(entry.fqn, entry.dtype, entry.shape, entry.nbytes, shown, len(entry.chunks), files, kept)


def _object(checkpoint: Checkpoint, fqn: str, read: bool) -> ObjectSummary:
    if not read:
        return ObjectSummary(fqn, None, None, f"not read: more than {MAX_VALUES:,} objects; select it with keys")
    try:
        value = checkpoint.value(fqn)
    except DcptoolError as error:
        return ObjectSummary(fqn, None, None, str(error))
    return ObjectSummary(fqn, value, plain.class_name(value), None)


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
    location = open_step(run, name)
    parts: list[CheckpointSummary] = []
    problem = ""
    state = "complete"
    try:
        found = find_parts(location)
        if not found:
            state, problem = "other", not_a_checkpoint(location)
        for part in found:
            parts.append(summarize_checkpoint(open_part(location, part.name), (), ("*",), False, 1))
    except CheckpointNotFoundError as error:
        state, problem = "incomplete", str(error)
    except UnsupportedError as error:
        state, problem = "other", str(error)
    except DcptoolError as error:
        state, problem = "damaged", str(error)
    for summary in parts:
        if state == "complete" and summary.state != "complete":
            state = summary.state
            problem = next(item.message for item in summary.problems if item.severity is Severity.ERROR)
    sizes = [size for summary in parts if (size := summary.world_size)]
    return StepSummary(
        name=name,
        state=state,
        n_checkpoints=len(parts),
        world_size=max(sizes) if sizes else None,
        n_entries=sum(summary.n_entries for summary in parts),
        n_files=sum(len(summary.files) for summary in parts),
        nbytes=sum(summary.nbytes for summary in parts),
        problem=problem.partition("\n")[0].removeprefix(f"{location.storage.root}: "),
    )
