"""Whether a checkpoint fits the state of a job, and what of it goes where; before anything is loaded.

Each rank asks for what it has, and for what its objects may take over besides. What no rank asks for is unexpected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.errors import LayoutError
from dcptool.ops.diff.diff import compare
from dcptool.ops.diff.results import Alignment, DiffReport
from dcptool.training.rank_local import PREFIX, Flat, view_of
from dcptool.training.ranks import Ranks
from dcptool.training.tree import STRUCTURE, Path
from dcptool.words import listed, plural

_MODEL, _STATE = "model.", "optim.state."
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
MAX_LISTED = 40
"""Differences of one kind that are told one by one."""


class LoadList(NamedTuple):
    """What a rank takes from a checkpoint.

    Attributes:
        names: by the name in the state, the name in the checkpoint.
        paths: of these names in the state.
        kept: names of the state that the checkpoint lacks and that stay as they are, if nothing is asked strictly.
        own: by name the other ranks that have a value of their own.
    """

    names: dict[str, str]
    paths: dict[str, Path]
    kept: tuple[str, ...]
    own: dict[str, frozenset[int]]


class Demands(NamedTuple):
    """What a job asks of a checkpoint.

    Attributes:
        own: the state of the job on this rank.
        open_at: tells of a path how much of it names what comes whole from the checkpoint, whatever the job has there
            now; 0 if it must be what the job has.
        optional: names of the state that a checkpoint need not have.
        ignored: names in the checkpoint that are nobody's, and meant to be.
        frozen: parameters of the job that are not trained.
        other: that the optimizers are of other classes, "" if they are not.
    """

    own: Flat
    open_at: Callable[[Path], int]
    optional: frozenset[str] = frozenset()
    ignored: Callable[[str], bool] = lambda name: False
    frozen: frozenset[str] = frozenset()
    other: str = ""


def fit(checkpoint: Checkpoint, demands: Demands, ranks: Ranks, strict: bool) -> tuple[LoadList, list[str]]:
    """Compare the state of a job with a checkpoint, on all ranks.

    Args:
        checkpoint: an open checkpoint.
        demands: what this rank asks for.
        ranks: all of them.
        strict: whether a missing, unexpected or renamed entry, or another dtype, is one too many.

    Returns:
        What this rank takes, and the differences that are let pass.

    Raises:
        TrainingError: it does not fit some rank; the message lists all differences and what can be done.
    """
    what = "comparing it with this job"
    wanted, report = ranks.agree(what, lambda: _compared(checkpoint, demands, ranks.rank))
    nobodys = _asked_by_none(checkpoint, wanted, ranks)
    nobodys = {name for name in nobodys if not name.startswith(f"{PREFIX}.") and not demands.ignored(name)}
    return wanted, ranks.agree(what, lambda: _let_pass(checkpoint, demands, wanted, report, nobodys, strict))


def _asked_by_none(checkpoint: Checkpoint, wanted: LoadList, ranks: Ranks) -> set[str]:
    """Return the entries of a checkpoint that no rank takes."""
    asked = set(wanted.names.values())
    mask = np.packbits(np.fromiter((name in asked for name in checkpoint), bool, len(checkpoint)))
    together = np.unpackbits(np.bitwise_or.reduce(ranks.gather(mask)), count=len(checkpoint))
    return {name for name, bit in zip(checkpoint, together, strict=True) if not bit}


def _compared(checkpoint: Checkpoint, demands: Demands, rank: int) -> tuple[LoadList, DiffReport]:
    """Find what a rank takes, and compare what it has now with that."""
    own, there = demands.own, view_of(checkpoint, rank)
    names: dict[str, str] = {}
    paths: dict[str, Path] = {}
    for name, fqn in there.names.items():
        path = own.paths.get(name) or _path_of(checkpoint, fqn)
        if name in own.values or (path and demands.open_at(path)):
            names[name], paths[name] = fqn, path or ()
    taken = _TakenPaths(paths.values())
    asked: dict[str, Any] = {}
    missing: list[str] = []
    for name, value in own.values.items():
        path = own.paths[name]
        whole = demands.open_at(path)
        if name in names:
            if _must_be_alike(value, checkpoint.entries[names[name]], path, whole):
                asked[names[name]] = _known(value)
        elif name not in demands.optional and not (whole and taken.replace(path, whole)):
            asked[name] = _known(value)
            missing.append(name)
    return LoadList(names, paths, tuple(missing), there.own), compare(asked, checkpoint)


class _TakenPaths:
    """The paths of what a rank takes from a checkpoint."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._leaves = set(paths)
        self._branches = {path[:end] for path in self._leaves for end in range(1, len(path))}

    def replace(self, path: Path, whole: int) -> bool:
        """Tell whether something else is taken where the state has a leaf now.

        Args:
            path: of the leaf.
            whole: so many parts of it name what comes whole.
        """
        path = path[: min(whole, len(path) - (path[-1] == STRUCTURE))]
        above = [path[:end] for end in range(1, len(path) + 1)]
        return path in self._branches or any(one in self._leaves or (*one, STRUCTURE) in self._leaves for one in above)


def _must_be_alike(value: Any, entry: Entry, path: Path, whole: int) -> bool:
    """Tell whether what the job has must be what is stored: unless it comes whole, or one of both is no tensor."""
    both = isinstance(entry, TensorEntry) and torch.is_tensor(value)
    return not whole or is_alike(value, entry) or (both and whole == len(path))


def is_alike(value: Any, entry: Entry) -> bool:
    """Tell whether a value of the job is a tensor into which a stored one can be loaded."""
    return isinstance(entry, TensorEntry) and torch.is_tensor(value) and tuple(value.shape) == entry.shape


def _known(value: Any) -> Any:
    return value if torch.is_tensor(value) else None


def _path_of(checkpoint: Checkpoint, fqn: str) -> Path | None:
    path = checkpoint.entries[fqn].path
    return path[2:] if path and path[0] == PREFIX else path


def _let_pass(
    checkpoint: Checkpoint, demands: Demands, wanted: LoadList, report: DiffReport, nobodys: set[str], strict: bool
) -> list[str]:
    """Return the differences that are let pass.

    Raises:
        LayoutError: there are others; the message lists all, and what can be done.
    """
    missing = [entry.fqn for entry in report.only_in_a]
    unexpected = [entry.fqn for entry in report.only_in_b if entry.fqn in nobodys]
    differences = report.differences
    nothing: list[str] = []
    if not strict:
        if report.alignment:  # what is paired under a rule is loaded under its own name only, which is not there
            missing = list(wanted.kept)
            unexpected = [name for name in checkpoint if name in nobodys]
            differences = tuple(found for found in differences if found.fqn_a == found.fqn_b)
        of_model = [name for name in demands.own.values if name.startswith(_MODEL)]
        if of_model and not any(name in wanted.names for name in of_model):
            nothing = ["no entry of the model is in the checkpoint under its name: nothing of it would be loaded"]
    optional = {name.rpartition(".")[2] for name in demands.optional}
    unexpected = [name for name in unexpected if not (report.alignment and name.rpartition(".")[2] in optional)]
    minor = [
        *_renamed(report),
        *([demands.other] if demands.other and (missing or unexpected) else []),
        *_missing(missing, checkpoint),
        *_unexpected(unexpected, demands.frozen),
        *_some("{}", [_words(found) for found in differences if found.kind == "dtype"]),
    ]
    major = [
        *nothing,
        *_some("{}", [_words(found) for found in differences if found.kind != "dtype"]),
        *_some("{}", [finding.message for finding in report.unreadable]),
    ]
    if major or (strict and minor):
        raise LayoutError("; ".join([*major, *minor]) + ".", next_step=_way_out(report, checkpoint.path, bool(major)))
    return minor


def _way_out(report: DiffReport, path: str, certain: bool) -> str:
    """Say what can be done about a checkpoint that does not fit."""
    rule = report.alignment
    steps = ["Nothing was loaded."]
    if rule:
        steps.append(f"dcptool convert --to dcp {_renaming(rule)} {path} OUT makes one with these names.")
    elif not certain:
        steps.append("restore(…, strict=False) leaves these as they are.")
    return " ".join(steps)


def _renaming(rule: Alignment) -> str:
    """Return the options of `dcptool convert` that undo a difference of all names."""
    if rule.wrappers:
        return "--clean-names" if not (rule.prefix_a or rule.prefix_b) else "--rename OLD=NEW"
    strip = [f"--strip-prefix {rule.prefix_b}"] if rule.prefix_b else []
    return " ".join([*strip, *([f"--add-prefix {rule.prefix_a}"] if rule.prefix_a else [])])


def _words(difference: Any) -> str:
    return f"{difference.fqn_a!r}: {difference.kind} {difference.a} here, {difference.b} stored"


def _some(form: str, names: Sequence[str]) -> list[str]:
    return [form.format(listed(names, MAX_LISTED))] if names else []


def _missing(names: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """Say what a checkpoint lacks; the state of parameters that it has, but that were not trained, in one."""
    not_trained: dict[str, None] = {}
    rest = []
    any_state = any(map(_parameter_of, checkpoint))
    for name in names:
        parameter = _parameter_of(name)
        if any_state and parameter and f"{_MODEL}{parameter}" in checkpoint and not _has_state(checkpoint, parameter):
            not_trained[parameter] = None
        else:
            rest.append(name)
    what = f"the optimizer's state of {plural(len(not_trained), 'parameter')} that {{}} saved untrained, frozen perhaps"
    were = "was" if len(not_trained) == 1 else "were"
    return [
        *_some("missing from the checkpoint: {}", rest),
        *_some(f"missing from the checkpoint: {what.format(were)}: {{}}", list(not_trained)),
    ]


def _unexpected(names: Sequence[str], frozen: frozenset[str]) -> list[str]:
    """Say what only a checkpoint has; the state of parameters that are frozen here in one."""
    bare = {_bare(name) for name in frozen}
    of_frozen = dict.fromkeys(parameter for name in names if (parameter := _parameter_of(name)) and parameter in bare)
    rest = [name for name in names if _parameter_of(name) not in of_frozen]
    what = f"the optimizer's state of {plural(len(of_frozen), 'parameter')} frozen here"
    return [
        *_some("only in the checkpoint: {}", rest),
        *_some(f"only in the checkpoint: {what}: {{}}", list(of_frozen)),
    ]


def _parameter_of(name: str) -> str:
    """Return the parameter whose optimizer state an entry is, "" if it is something else."""
    return name[len(_STATE) :].rpartition(".")[0] if name.startswith(_STATE) else ""


def _has_state(checkpoint: Checkpoint, parameter: str) -> bool:
    return any(name.startswith(f"{_STATE}{parameter}.") for name in checkpoint)


def _bare(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _renamed(report: DiffReport) -> list[str]:
    """Return what is wrong with entries whose names are the same only under a rule; torch would not find them."""
    rule = report.alignment
    if rule is None:
        return []
    taken = [f"{prefix!r} {where}" for prefix, where in ((rule.prefix_a, "here"), (rule.prefix_b, "there")) if prefix]
    wrappers = [f"the wrapper {name}" for name in rule.wrappers]
    return [f"{rule.n_aligned:,} names differ by {' and '.join([*taken, *wrappers])}"]
