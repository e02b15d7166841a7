"""What a look at a checkpoint finds: values, never exceptions. Knows no format and no file system."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Severity(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Some data is missing, wrong or unreadable."""
    WARNING = "warning"
    """Probably not what was meant; nothing is proven wrong."""
    NOTE = "note"
    """Worth knowing."""


class Finding(NamedTuple):
    """One thing found, with where it is and what to do about it.

    Attributes:
        kind: stable machine-readable word, such as `missing-file`.
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


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by severity, errors first; those of one severity stay in their order."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def problem_and_step(message: str) -> tuple[str, str]:
    """Split what is said of an item of an unsupported form into the problem and what to do, which may be "".

    >>> problem_and_step("it is zstd-compressed; pip install 'dcptool[zstd]'")
    ('it is zstd-compressed', "pip install 'dcptool[zstd]'")
    """
    problem, _, step = message.partition("; ")
    return problem, step


def inside(part: str, finding: Finding) -> Finding:
    """Return a finding of a part as one of the folder that holds it; `part` is its path there, "" the folder itself."""
    if not part:
        return finding
    file = f"{part}/{finding.file}" if finding.file else part
    return finding._replace(file=file, message=f"{part}: {finding.message}")
