"""What is in one checkpoint: the facts `dcptool inspect` shows, as frozen values. Prints nothing, knows no terminal.

Reads the objects' small items; of tensors not one byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import FileUse
from dcptool.checkpoint.entries import ObjectEntry, TensorEntry
from dcptool.checkpoint.extents import Chunk, Ints
from dcptool.checkpoint.findings import Finding, errors, state_of, unsafe_pickle
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.layouts import Layout, layouts_of
from dcptool.checkpoint.regions import volume
from dcptool.checkpoint.selection import selects
from dcptool.checks.check import shown_by_metadata
from dcptool.errors import DcptoolError, UnsupportedError
from dcptool.ops.inspect.notes import notes
from dcptool.pickles import plain
from dcptool.words import plural

MAX_VALUES = 2_000
"""Objects whose values are read for one summary; select with `keys` to see others."""
MAX_CORNERS = 50
"""Tensors whose first elements are read for one summary."""
MAX_VALUES_NBYTES = 32 << 20
"""Bytes of such objects together."""


class TensorSummary(NamedTuple):
    """One tensor: names, sizes in elements and bytes, how it is cut and where it is stored.

    `chunks` and `corner` are None unless asked for; `corner` holds the tensor's first elements as nested lists, or the
    reason why they could not be read. `kind` is the class of a tensor that is made of tensors, and `nbytes` those of
    its inner ones, which follow it: `inside` is its name in them.
    """

    fqn: str
    dtype: str
    shape: Ints
    nbytes: int
    layout: Layout
    n_chunks: int
    files: tuple[str, ...]
    chunks: tuple[Chunk, ...] | None
    corner: Any = None
    kind: str = ""
    inside: str = ""

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


class FileSummary(NamedTuple):
    """One file: its size in bytes (None: missing), the rank that wrote it, and its items with their bytes together."""

    name: str
    nbytes: int | None
    rank: int | None
    n_items: int
    item_nbytes: int


class NameGroup(NamedTuple):
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
        saved_by_ranks: whether ranks write files of their own in its format.
        state: "complete" (all files there and long enough), "incomplete" or "damaged".
        nbytes: bytes of its files on disk.
        files: each file, and each that is missing.
        groups, tensors, objects: in the order of the metadata, selected by `keys` and `exclude`.
        n_entries: entries before selection.
        problems: what is wrong.
    """

    path: str
    format: str
    flavour: str
    evidence: tuple[str, ...]
    world_size: int | None
    saved_by_ranks: bool
    state: str
    nbytes: int
    files: tuple[FileSummary, ...]
    groups: tuple[NameGroup, ...]
    tensors: tuple[TensorSummary, ...]
    objects: tuple[ObjectSummary, ...]
    n_entries: int
    problems: tuple[Finding, ...]

    @property
    def good(self) -> bool:
        """Whether nothing is missing or wrong as far as was looked."""
        return not errors(self.problems)


def summarize_checkpoint(
    checkpoint: Checkpoint,
    keys: Sequence[str],
    exclude: Sequence[str],
    chunks: bool,
    depth: int,
    values: bool = False,
) -> CheckpointSummary:
    """Summarize one open checkpoint; arguments as in `summarize`."""
    selected = [fqn for fqn in checkpoint if selects(fqn, keys, exclude)]
    layouts = layouts_of(checkpoint)
    tensors = tuple(_tensors(checkpoint, keys, exclude, layouts, chunks))
    if values:
        corners = (t if t.kind else t._replace(corner=_corner(checkpoint, t)) for t in tensors[:MAX_CORNERS])
        tensors = (*corners, *tensors[MAX_CORNERS:])
    names = [fqn for fqn in selected if not isinstance(checkpoint[fqn], TensorEntry)]
    unreadable: dict[str, list[DcptoolError]] = {}
    within = _within_budget(checkpoint, names)
    objects = tuple(_object(checkpoint, fqn, fqn in within, unreadable) for fqn in names)
    exact = (fqn for fqn, found in layouts.items() if found.is_grid)
    problems = shown_by_metadata(checkpoint, known_exact=exact)
    if state_of(problems) != "incomplete":  # what is not there cannot be read, and is said already
        problems += _unreadable(unreadable)
    for fqn, calls in checkpoint.source.unsafe.items():
        problems += unsafe_pickle(calls, repr(fqn), None, fqn)
    decoded = {item.fqn: item.value for item in objects if item.error is None}
    problems += notes(checkpoint, layouts, decoded)
    return CheckpointSummary(
        path=checkpoint.path,
        format=checkpoint.format.name,
        flavour=checkpoint.flavour,
        evidence=checkpoint.evidence,
        world_size=checkpoint.world_size,
        saved_by_ranks=checkpoint.format.saved_by_ranks,
        state=state_of(problems),
        nbytes=sum(checkpoint.files.values()),
        files=_files(checkpoint),
        groups=_groups(tensors, objects, depth),
        tensors=tensors,
        objects=objects,
        n_entries=len(checkpoint),
        problems=tuple(problems),
    )


def _files(checkpoint: Checkpoint) -> tuple[FileSummary, ...]:
    def summary(name: str) -> FileSummary:
        n_items, nbytes, _ = checkpoint.usage.get(name, FileUse(0, 0, 0))
        return FileSummary(name, checkpoint.files.get(name), checkpoint.format.rank_of(name), n_items, nbytes)

    return tuple(map(summary, dict.fromkeys([*checkpoint.files, *sorted(checkpoint.usage)])))


def _tensors(
    checkpoint: Checkpoint, keys: Sequence[str], exclude: Sequence[str], layouts: Mapping[str, Layout], chunks: bool
) -> Iterator[TensorSummary]:
    """Yield the tensors that are selected, inner ones after what they are in, with it or by their own names."""
    subclasses = checkpoint.subclasses
    inner_layouts = layouts_of(checkpoint.flat) if subclasses else {}
    for fqn, entry in checkpoint.tensors.items():
        found, wanted = subclasses.get(fqn), selects(fqn, keys, exclude)
        inner = [
            _tensor(part, inner_layouts[part.fqn], chunks)._replace(inside=fqn)
            for part in (found.inner if found else ())
            if wanted or selects(part.fqn, keys, exclude)
        ]
        if wanted and found:
            kind, nbytes = found.piece.kind.removeprefix("a "), sum(part.nbytes for part in inner)
            yield _tensor(entry, layouts[fqn], chunks)._replace(kind=kind, nbytes=nbytes)
        elif wanted:
            yield _tensor(entry, layouts[fqn], chunks)
        yield from inner


def _tensor(entry: TensorEntry, found: Layout, chunks: bool) -> TensorSummary:
    kept = tuple(entry.chunks) if chunks else None
    files = tuple(entry.chunks.files())
    return TensorSummary(entry.fqn, entry.dtype, entry.shape, entry.nbytes, found, len(entry.chunks), files, kept)


def corner_sizes(shape: Ints) -> Ints:
    """Return how much of a tensor is shown: up to 8 × 8 of its last two dimensions, at the others' beginning."""
    return tuple(min(size, 8 if dim >= len(shape) - 2 else 1) for dim, size in enumerate(shape))


def _corner(checkpoint: Checkpoint, entry: TensorSummary) -> Any:
    """Read the first elements of a tensor as nested lists of Python numbers; a message where that fails."""
    try:
        array = checkpoint.read(entry.fqn, sizes=corner_sizes(entry.shape))
    except DcptoolError as error:
        return str(error)
    if entry.dtype.startswith(("bfloat", "float8")):  # float32 holds all of them exactly
        array = array.astype("float32")
    return array.tolist()


def _within_budget(checkpoint: Checkpoint, names: Sequence[str]) -> set[str]:
    """Return the objects that are read: so many, and so many stored bytes together, whatever a checkpoint holds."""
    within: set[str] = set()
    nbytes = 0
    for fqn in names[:MAX_VALUES]:
        entry = checkpoint[fqn]
        if checkpoint.format.items_apart and isinstance(entry, ObjectEntry) and entry.item:
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
        message = f"{plural(len(found), 'object')} of {file or 'no file'} cannot be read; the first: {found[0]}"
        findings.append(Finding.of("unreadable-objects", message, file or None, severity=severity))
    return findings


def _groups(tensors: Sequence[TensorSummary], objects: Sequence[ObjectSummary], depth: int) -> tuple[NameGroup, ...]:
    members: dict[str, list[TensorSummary]] = {}
    n_objects = Counter(_prefix(item.fqn, depth) for item in objects)
    for tensor in tensors:
        if tensor.inside:
            continue
        members.setdefault(_prefix(tensor.fqn, depth), []).append(tensor)
    groups = []
    for name, inside in {**members, **{name: members.get(name, []) for name in n_objects}}.items():
        nbytes: Counter[str] = Counter()
        for tensor in inside:
            nbytes[tensor.dtype] += tensor.nbytes
        dtypes = tuple(dtype for dtype, _ in nbytes.most_common())
        elements = sum(tensor.elements for tensor in inside)
        groups.append(NameGroup(name, len(inside), n_objects[name], elements, nbytes.total(), dtypes))
    return tuple(groups)


def _prefix(fqn: str, depth: int) -> str:
    """Return the first `depth` dotted parts of a name, without its last part; "" at top level."""
    return ".".join(fqn.split(".")[:-1][:depth])
