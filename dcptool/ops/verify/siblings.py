"""A step beside the others of its run: what all of them have and it has not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checks.side_files import FilePattern
from dcptool.checks.steps import Resume
from dcptool.formats.marker import is_of_save
from dcptool.frameworks.table import is_regular, resuming_groups
from dcptool.ops.verify.verdict import State, Verdict
from dcptool.words import listed

MIN_SIBLINGS = 2
"""Other steps that must all have something before one without it counts as lacking it."""
MAX_SIBLINGS = 3
"""Steps whose files and entries are compared with those of one."""


def compare_steps(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts of a run's steps, lowest first, with what only comparing them shows.

    A step lacks a part that all others have; files and groups of entries that the whole ones nearest to it have, the
    older ones first, as `latest` compares; a whole one without a marker is unmarked once an earlier one has a marker
    that a save wrote.
    """
    compared = []
    marked = ""
    with_parts = [verdict for verdict in verdicts if verdict.parts]
    whole = [verdict for verdict in verdicts if verdict.whole]
    parts = Counter(part.name for verdict in with_parts for part in verdict.parts)
    n_before = 0
    for verdict in verdicts:
        # What this step has is not missing, so the count of the others is the count of all.
        n_others = len(with_parts) - bool(verdict.parts)
        common = [name for name, number in parts.items() if number == n_others] if n_others else []
        judged = lacking_parts(verdict, n_others, common)
        if verdict.whole:
            near = _nearest(whole, n_before)
            n_before += 1
            judged = lacking_groups(judged, len(near), common_of(other.groups for other in near))
            judged = lacking_files(judged, len(near), common_of(other.patterns for other in near))
        if marked and judged.state is State.COMPLETE and judged.marker is None:
            judged = without_marker(judged, marked)
        if is_of_save(judged.marker):
            marked = judged.name
        compared.append(judged)
    return tuple(compared)


def _nearest(whole: Sequence[Verdict], index: int) -> Sequence[Verdict]:
    """Return up to MAX_SIBLINGS other steps: older ones, and of an early step newer ones too."""
    older = whole[max(index - MAX_SIBLINGS, 0) : index]
    enough = len(older) >= MIN_SIBLINGS
    return older if enough else [*older, *whole[index + 1 : index + 1 + MAX_SIBLINGS - len(older)]]


Shared = TypeVar("Shared", str, FilePattern)


def common_of(sets: Iterable[Iterable[Shared]]) -> list[Shared]:
    """Return what all of some steps have, sorted."""
    found = [frozenset(one) for one in sets]
    return sorted(frozenset.intersection(*found)) if found else []


def without_marker(verdict: Verdict, marked: str) -> Verdict:
    """Return the verdict on a whole step of a run whose earlier step `marked` has a marker."""
    message = f"it has no marker, though {marked} has one: the save may have died before it was done"
    step = f"If you know that it is whole: dcptool mark {verdict.path}"
    return _with(verdict, State.UNMARKED, [Finding.of("no-marker", message, next_step=step)])


def lacking_parts(verdict: Verdict, n_others: int, common: Iterable[str]) -> Verdict:
    """Return the verdict on a step beside others, which all have the parts `common`."""
    if n_others < MIN_SIBLINGS or not verdict.parts or not verdict.whole:
        return verdict
    there = {part.name for part in verdict.parts} | {finding.file for finding in verdict.findings}
    lacking = [
        Finding.of("missing-part", f"the part {name} is missing, which all other steps have", name)
        for name in sorted(set(common) - there)
    ]
    return _with(verdict, State.INCOMPLETE, lacking) if lacking else verdict


def lacking_groups(verdict: Verdict, n_others: int, common: Iterable[str]) -> Verdict:
    """Return the verdict on a whole step beside others, which all have entries whose names begin with `common`.

    Only one without an optimizer lacks what a resume needs if they have one; any other group may come and go. One other
    is enough for groups of which some trainer's profile says that only its weights-only saves lack them.
    """
    known = resuming_groups() if n_others < MIN_SIBLINGS else None
    lacks = [name for name in common if name not in verdict.groups and (known is None or name in known)]
    if has_optimizer(verdict.groups) or not has_optimizer(lacks) or not verdict.whole or verdict.resumable is False:
        return verdict
    return not_resumable(verdict, lacks, f"which {_others(n_others)} {'has' if n_others == 1 else 'have'}")


def has_optimizer(groups: Iterable[str]) -> bool:
    """Tell by its name whether one of some groups of entries is an optimizer's."""
    return any("optim" in group.lower() for group in groups)


def lacking_files(verdict: Verdict, n_others: int, common: Collection[FilePattern]) -> Verdict:
    """Return the verdict on a whole step beside others, which all have files of the patterns `common` beside them."""
    # What each rank has, only a step of as many ranks can lack.
    missing = sorted(set(common) - verdict.patterns)
    lacks = [pattern for pattern in missing if pattern.n_ranks in (0, verdict.world_size)]
    if not lacks or not verdict.whole or verdict.resumable is False:
        return verdict
    trainer = verdict.resume.framework
    told = any(is_regular(pattern.form, trainer) for pattern in lacks) if trainer else n_others >= MIN_SIBLINGS
    which = f"{listed([str(pattern) for pattern in lacks], 3)} {'is' if len(lacks) == 1 else 'are'}"
    message = f"{which} missing, which {_others(n_others)} {'has' if n_others == 1 else 'have'}"
    step = "If it belongs to a step, the save died before it was done: resume from another one."
    severity = Severity.ERROR if told else Severity.WARNING
    finding = Finding.of("unlike-siblings", message, lacks[0].form, next_step=step, severity=severity)
    return _with(verdict, State.INCOMPLETE if told else verdict.state, [finding])


def not_resumable(verdict: Verdict, lacks: Sequence[str], why: str) -> Verdict:
    """Return the verdict on a whole step that a job cannot go on from as it was: it lacks something."""
    message = f"it lacks {listed(lacks, 3)}, {why}: a resume would start that anew"
    resume = Resume(verdict.resume.framework, False, tuple(lacks))
    return _with(verdict._replace(resume=resume), verdict.state, [Finding.of("not-resumable", message)])


def _others(n_others: int) -> str:
    return "the step beside it" if n_others == 1 else f"the {n_others:,} steps beside it"


def _with(verdict: Verdict, state: State, findings: Sequence[Finding]) -> Verdict:
    return verdict._replace(state=state, findings=(*findings, *verdict.findings))
