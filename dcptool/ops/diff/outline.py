"""What names and metadata alone tell of two sides: kinds, shapes, dtypes, layouts, what one side has and the other not.

Reads no tensor; of objects only those that may be an empty dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.findings import Finding, errors
from dcptool.checkpoint.layouts import layouts_of
from dcptool.checkpoint.selection import selects, unmatched
from dcptool.errors import DcptoolError
from dcptool.ops.diff.pairing import Pairing, lone
from dcptool.ops.diff.results import Difference, DiffOptions, DiffReport, Known, Lone, Side
from dcptool.words import are, plural


def known_entries(checkpoint: Checkpoint) -> list[Known]:
    """Return what the metadata says of each entry."""
    return [
        Known(fqn, "tensor", entry.dtype, entry.shape, entry.path)
        if isinstance(entry, TensorEntry)
        else Known(fqn, "object", path=entry.path)
        for fqn, entry in checkpoint.items()
    ]


def side_of(checkpoint: Checkpoint) -> Side:
    """Return what a report says of a side as a whole."""
    nbytes = sum(entry.nbytes for entry in checkpoint.tensors.values())
    counts = len(checkpoint.tensors), len(checkpoint.objects)
    return Side(checkpoint.path, checkpoint.format.name, checkpoint.flavour, *counts, nbytes)


def outline(a: Side, b: Side, paired: Pairing, only_in_a: tuple[Lone, ...], only_in_b: tuple[Lone, ...]) -> DiffReport:
    """Return the report of what names alone tell."""
    kinds = [x.kind for x, y in paired.both if x.kind == y.kind]
    counts = kinds.count("tensor"), kinds.count("object")
    notes = (
        *_nesting(paired),
        *_flattening(only_in_a, only_in_b, "A", "B"),
        *_flattening(only_in_b, only_in_a, "B", "A"),
    )
    return DiffReport(a, b, *counts, 0, only_in_a, only_in_b, (), (), paired.alignment, 0, (), notes, True)


def are_comparable(x: Known, y: Known) -> bool:
    """Tell whether two entries are tensors of one shape, so that their values can be compared."""
    return x.kind == y.kind == "tensor" and x.shape == y.shape


def outer_differences(x: Known, y: Known) -> list[Difference]:
    """Return how two entries differ in kind, or in shape and dtype."""
    if x.kind != y.kind:
        return [Difference("kind", x.fqn, y.fqn, x.words, y.words)]
    found = []
    if x.shape != y.shape:
        found.append(Difference("shape", x.fqn, y.fqn, str(list(x.shape)), str(list(y.shape))))
    if x.dtype != y.dtype:
        found.append(Difference("dtype", x.fqn, y.fqn, x.dtype, y.dtype))
    return found


def layout_differences(a: Checkpoint, b: Checkpoint, paired: Pairing) -> dict[str, Difference]:
    """Return by A's fqn the tensors of one shape that are cut into other chunks."""
    layouts = layouts_of(a), layouts_of(b)
    found = {}
    for x, y in paired.both:
        if not are_comparable(x, y):
            continue
        one, other = str(layouts[0][x.fqn]), str(layouts[1][y.fqn])
        boxes = sorted(a.tensors[x.fqn].chunks.boxes()), sorted(b.tensors[y.fqn].chunks.boxes())
        if one == other and boxes[0] != boxes[1]:
            other += ", other boxes"
        if one != other:
            found[x.fqn] = Difference("layout", x.fqn, y.fqn, one, other)
    return found


def lone_entries(entries: Sequence[Known], other: Checkpoint, mine: Checkpoint | None = None) -> tuple[Lone, ...]:
    """Return entries only one side has; excused are those that the format of the other side cannot hold.

    Args:
        entries: what is only in `mine`.
        other: the checkpoint they are missing from.
        mine: the one they are in; None for a live state dict.
    """
    return tuple(lone(known, _excuse(known, other, mine)) for known in entries)


def _excuse(known: Known, other: Checkpoint, mine: Checkpoint | None) -> str:
    if known.kind == "object" and not other.format.holds_objects:
        return f"{other.format} holds no objects"
    if known.kind == "object" and not other.format.holds_empty_dicts and mine and _is_empty_dict(mine, known.fqn):
        return "DCP stores no empty dict"
    return ""


def _is_empty_dict(checkpoint: Checkpoint, fqn: str) -> bool:
    try:
        value = checkpoint.value(fqn)
    except DcptoolError:
        return False
    return isinstance(value, dict) and not value


def _nesting(paired: Pairing) -> list[Finding]:
    """R37: note entries of one name that stand at another place of the nested dict; safetensors knows of no places."""
    found = [(x, y) for x, y in paired.both if x.fqn == y.fqn and None not in (x.path, y.path) and x.path != y.path]
    if not found:
        return []
    x, y = found[0]
    message = f"{are(len(found), 'entry')} nested in another way, such as {x.fqn!r}: {_place(x)} in A, {_place(y)} in B"
    return [Finding.of("nesting-differs", message, fqn=x.fqn)]


def _place(known: Known) -> str:
    return "".join(f"[{part!r}]" for part in known.path or ())


def _flattening(whole: Sequence[Lone], parts: Sequence[Lone], name: str, other: str) -> list[Finding]:
    """R14: note containers that are one object on one side and flattened on the other, as before torch 2.4."""
    found: dict[str, int] = {}
    objects = {entry.fqn for entry in whole if entry.kind == "object"}
    for entry in parts if objects else ():
        beginnings = accumulate(entry.fqn.split(".")[:-1], "{}.{}".format)
        container = next((beginning for beginning in beginnings if beginning in objects), None)
        if container is not None:
            found[container] = found.get(container, 0) + 1
    if not found:
        return []
    first, count = next(iter(found.items()))
    entries = plural(count, "entry")
    message = f"{plural(len(found), 'object')} of {name} may be in {other} in parts, such as {first!r}: "
    message += f"{entries} of {other} begin with it"
    return [Finding.of("flattening-differs", message, fqn=first)]


def subset_note(report: DiffReport) -> tuple[Finding, ...]:
    """R70: note that one side has all the other has, and more."""
    lone = [[entry for entry in side if not entry.excused] for side in (report.only_in_a, report.only_in_b)]
    if bool(lone[0]) == bool(lone[1]) or not (report.n_tensors or report.n_objects):
        return ()
    small, large = ("B", "A") if lone[0] else ("A", "B")
    if report.differences or report.unreadable or not report.values_compared:
        message = f"the names of {small} are a strict subset of those of {large}"
    else:
        message = f"{small} is a strict subset of {large}: all it holds is in {large} with the same values"
    return (Finding.of("subset", message),)


def prefix_notes(a: Sequence[Known], b: Sequence[Known], options: DiffOptions) -> tuple[Finding, ...]:
    """Note a prefix that was to be taken off the names of a side and that none of them has."""
    sides = (("A", "a", a, options.strip_prefix_a), ("B", "b", b, options.strip_prefix_b))
    return tuple(
        Finding.of("unused-prefix", f"no name of {side} begins with {prefix!r}: --strip-prefix-{letter} did nothing")
        for side, letter, known, prefix in sides
        if prefix and not any(entry.fqn.startswith(prefix) for entry in known)
    )


def unmatched_notes(a: Sequence[Known], b: Sequence[Known], options: DiffOptions) -> tuple[Finding, ...]:
    """Note names and globs that match nothing on either side."""
    names = dict.fromkeys(known.fqn for known in (*a, *b))
    notes = unmatched(names, options.keys, options.exclude)
    return tuple(Finding.of("unmatched-glob", message) for message in notes)


def metadata_problems(name: str, side: Checkpoint, options: DiffOptions, known: Sequence[Finding]) -> list[Finding]:
    """Return what is wrong with a side's metadata, as far as it is about what was compared and not among `known`."""
    fqns = {finding.fqn for finding in known}

    def is_new(fqn: str | None) -> bool:
        return fqn is None or (fqn not in fqns and selects(fqn, options.keys, options.exclude))

    found = [finding for finding in errors(side.problems) if is_new(finding.fqn)]
    return [finding._replace(message=f"{name}: {finding.message}") for finding in found]
