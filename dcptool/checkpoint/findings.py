"""What a look at a checkpoint finds: values, never exceptions. Knows no format and no file system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.kinds import KINDS, Effect, Kind, Severity
from dcptool.errors import StorageError
from dcptool.words import are, listed

MAX_NAMED = 3
LOOK_AGAIN = "It may be whole: look again when it can be read."
_HOW_TO_LOAD = "dcp.load or torch.load reads it, in a job that imports what it is of."
_ONE_RANKS = (
    "It is one rank's slice of a tensor: save whole ones, or with dcp.save, which writes the slices of all ranks."
)
DO_NOT_LOAD = "Do not load it with torch; nothing of it was imported or executed here."


class Finding(NamedTuple):
    """One thing found, with where it is and what to do about it; made by `of`.

    Attributes:
        kind: stable machine-readable word, such as `missing-file`; see `kinds.KINDS`.
        severity: how much it matters.
        message: one sentence for a person; names what and where.
        file: file name relative to the checkpoint, if the finding is about a file.
        fqn: fully qualified name of the tensor or object, if it is about one.
        offsets, sizes: the box inside that tensor, in elements.
        byte_range: first and one past the last byte in `file`.
        next_step: what the user can do now, one sentence, or empty.
    """

    kind: str
    severity: Severity
    message: str
    file: str | None = None
    fqn: str | None = None
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    byte_range: tuple[int, int] | None = None
    next_step: str = ""

    @classmethod
    def of(cls, kind: str, message: str, *where: Any, severity: Severity | None = None, **more: Any) -> Finding:
        """Return a finding of a kind that the table knows, with its severity unless another is given."""
        return cls(kind, severity or KINDS[kind].severity, message, *where, **more)

    @property
    def traits(self) -> Kind:
        """What the table says of its kind."""
        return KINDS[self.kind]

    @property
    def is_error(self) -> bool:
        """Whether some data is missing, wrong or unreadable."""
        return self.severity is Severity.ERROR


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return those that are errors, in their order."""
    return [finding for finding in findings if finding.is_error]


def state_of(findings: Iterable[Finding]) -> str:
    """Return what errors make of a state: the worst of `kinds.Effect`, "complete" if there are none."""
    effects = {finding.traits.effect for finding in errors(findings)}
    return next((effect.value for effect in Effect if effect in effects), "complete")


def unsafe_pickle(names: Sequence[str], what: str, *where: Any) -> list[Finding]:
    """Return the finding that a pickle would run something, none if it would not.

    Args:
        names: what it would run.
        what: the pickle, for the message.
        where: file, fqn, … as of a `Finding`.
    """
    if not names:
        return []
    message = f"{what} runs code when it is loaded: it calls or names {listed(names, MAX_NAMED)[:300]}"
    return [Finding.of("unsafe-pickle", message, *where, next_step=DO_NOT_LOAD)]


def cannot_be_read(error: StorageError, *where: Any, message: str = "") -> Finding:
    """Return the finding that the storage would not give something out; `where` and `message` as of a `Finding`."""
    return Finding.of("unreadable", message or error.message, *where, next_step=error.next_step or LOOK_AGAIN)


def foreign_tensors(found: Mapping[str, str], file: str | None = None) -> list[Finding]:
    """Return the note that some tensors are of a form or class that is not looked into, none if there are none.

    Args:
        found: fqn → what it is.
        file: that holds them, if it is one.
    """
    if not found:
        return []
    fqn, what = next(iter(found.items()))
    message = f"{are(len(found), 'tensor')} not looked into, such as {fqn!r}, {what}: not proven"
    step = how_to_load(what)
    return [Finding.of("unsupported-item", message, file, fqn, next_step=step, severity=Severity.NOTE)]


def how_to_load(foreign: str) -> str:
    """Return the next step for a tensor of a form or class that is not looked into; `foreign` says what it is."""
    return _ONE_RANKS if foreign.endswith(("DTensor", "ShardedTensor")) else _HOW_TO_LOAD


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by severity, errors first; those of one severity stay in their order."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def inside(part: str, finding: Finding) -> Finding:
    """Return a finding of a part as one of the folder that holds it; `part` is its path there, "" the folder itself."""
    if not part:
        return finding
    file = f"{part}/{finding.file}" if finding.file else part
    return finding._replace(file=file, message=f"{part}: {finding.message}")
