"""Which steps of a run to keep, and why: a pure function of what was found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, errors
from dcptool.ops.verify.verdict import State, Verdict

IDLE_SECONDS = 3600.0
"""A step without metadata in which nothing was written for so long is nobody's work any more."""


class Decision(NamedTuple):
    """What is to become of one step, and why.

    Attributes:
        name: of the step's folder.
        keep: whether it stays.
        reason: in a few words.
        state: it was found in.
        nbytes: of its files.
        n_files: how many they are.
        written: when the newest of them was written, seconds since the epoch; None if unknown.
        resumable: whether a job can go on from it, as far as is known.
        milestone: whether it is one that belongs into the archive.
    """

    name: str
    keep: bool
    reason: str
    state: State
    nbytes: int
    n_files: int = 0
    written: float | None = None
    resumable: bool = True
    milestone: bool = False


class PrunePlan(NamedTuple):
    """A decision for every step of a run directory.

    Attributes:
        run: path of the run directory.
        decisions: the step saved first first.
        notes: what is odd about the run.
        archive: path or URL of the folder that milestones are copied into, "" if they stay here.
    """

    run: str
    decisions: tuple[Decision, ...]
    notes: tuple[Finding, ...] = ()
    archive: str = ""

    @property
    def removed(self) -> tuple[Decision, ...]:
        """The steps that are to be deleted."""
        return tuple(decision for decision in self.decisions if not decision.keep)

    @property
    def milestones(self) -> tuple[Decision, ...]:
        """The steps that belong into the archive, also those that stay here for now; none without an archive."""
        return tuple(decision for decision in self.decisions if decision.milestone and self.archive)

    def keeping(self, reasons: Mapping[str, str]) -> PrunePlan:
        """Return this plan, but that steps of these names stay, for the reasons given."""
        return self._replace(
            decisions=tuple(
                one._replace(keep=True, reason=reasons[one.name]) if not one.keep and one.name in reasons else one
                for one in self.decisions
            )
        )

    @property
    def newest(self) -> str:
        """The newest complete step that is kept, one to resume from if there is any; "" without one."""
        whole = [decision for decision in self.decisions if decision.keep and decision.state is State.COMPLETE]
        return next((one.name for one in reversed(whole) if one.resumable), whole[-1].name if whole else "")


def plan_prune(
    run: str,
    verdicts: Sequence[Verdict],
    keep: int,
    *,
    archive_every: int | None = None,
    archive_to: str = "",
    include_incomplete: bool = False,
    older_than: float = 0.0,
    now: float = 0.0,
    named: Mapping[str, str] | None = None,
    links: Mapping[str, Collection[str]] | None = None,
    later: Sequence[str] = (),
) -> PrunePlan:
    """Decide which steps of a run to delete. Reads nothing.

    Only complete steps count toward `keep`. Never deleted are the newest complete step, the newest of them that a job
    can resume from, the newest with checksums in its marker, whole ones newer than these, what a pointer or the record
    of the best step names, what a kept step has links into, what is being written, what could not be read, and what is
    no checkpoint. What a save or a deletion left that was killed goes, an hour after, once a newer step has the marker
    of a save.

    Args:
        run: path of the run directory.
        verdicts: on all its steps, the one saved first first.
        keep: how many of the newest complete steps to keep, at least 1.
        archive_every: keep every complete step whose number is a multiple of this too.
        archive_to: path or URL of a folder to keep these in instead: once they are proven to be there (see
            `archive_steps`), they go here like others.
        include_incomplete: delete incomplete, damaged and unmarked steps too.
        older_than: but only those last written so many seconds before `now`.
        now: seconds since the epoch.
        named: steps that something names, a pointer or the record of the best → what does.
        links: names of steps → the other steps that links in them lead into.
        later: steps that were written after the newest complete one, by what times say, the last one first.

    Raises:
        ValueError: `keep` or `archive_every` is below 1, or there is an archive for no steps.
    """
    if keep < 1 or (archive_every is not None and archive_every < 1):
        raise ValueError("keep and archive_every must be at least 1")
    if archive_to and archive_every is None:
        raise ValueError("an archive is for steps that archive_every says")
    names = [verdict.name for verdict in verdicts]
    complete = [verdict.name for verdict in verdicts if verdict.state is State.COMPLETE]
    newest = dict(zip(reversed(complete), range(1, keep + 1), strict=False))
    newest_by_time = [name for name in later if name in complete][:keep]
    resumable = [v.name for v in verdicts if v.state is State.COMPLETE and v.resumable is not False]
    proven = [v.name for v in verdicts if v.state is State.COMPLETE and v.marker and v.marker.sha256]
    saved = [v.name for v in verdicts if v.state is State.COMPLETE and v.marker and v.marker.writer == "save"]
    named = named or {}

    def decide(verdict: Verdict) -> tuple[bool, str]:
        name, state = verdict.name, verdict.state
        if name in newest:
            return True, "newest complete step" if newest[name] == 1 else f"one of the newest {keep} complete steps"
        if name in resumable[-1:]:
            return True, "newest complete step to resume from"
        if name in newest_by_time:
            return True, f"written after {complete[-1]}, perhaps by a job that went back to it"
        if name in proven[-1:]:
            return True, "newest complete step with checksums in its marker"
        if name in named:
            return True, named[name]
        if state is State.COMPLETE:
            if archive_to and is_milestone(verdict, archive_every):
                return False, f"milestone: a multiple of {archive_every}, kept in the archive"
            if archive_every and (verdict.step or 0) % archive_every == 0:
                return True, f"milestone: a multiple of {archive_every}"
            return False, f"older than the newest {keep}"
        if state is State.IN_PROGRESS:
            return True, "it is being written"
        if state is State.UNREADABLE:
            return True, "could not be read: left alone"
        if state is State.OTHER:
            return True, "could not be read: left alone" if verdict.parts else "no DCP checkpoint: left alone"
        if saved and names.index(name) < names.index(saved[-1]) and _is_left_over(verdict, now):
            return False, f"unfinished, or half deleted, before {saved[-1]} was saved"
        if not include_incomplete:
            return True, f"{state.value}: left alone without --include-incomplete"
        if not complete:
            return True, f"{state.value}, but there is no complete step to fall back on"
        if any(finding.traits.may_be_whole for finding in verdict.findings):
            return True, "could not be read: left alone"
        if state is State.UNMARKED and names.index(name) > names.index(complete[-1]):
            return True, "whole and newer than the newest complete step: mark it, or delete it yourself"
        if verdict.written is None or now - verdict.written < older_than:
            return True, f"{state.value}, but written too lately"
        return False, f"{state.value}: {verdict.reason}"

    decisions = [
        Decision(
            verdict.name,
            *decide(verdict),
            verdict.state,
            verdict.nbytes,
            verdict.n_files,
            verdict.written,
            verdict.resumable is not False,
            is_milestone(verdict, archive_every),
        )
        for verdict in verdicts
    ]
    return PrunePlan(run, tuple(_keep_linked(decisions, links or {})), archive=archive_to)


def is_milestone(verdict: Verdict, every: int | None) -> bool:
    """Tell whether a step is complete, and its number a multiple."""
    if not every or verdict.state is not State.COMPLETE or verdict.step is None:
        return False
    return verdict.step % every == 0


def _is_left_over(verdict: Verdict, now: float) -> bool:
    """Tell whether a step is what a killed save or deletion leaves, and nothing was written there for an hour."""
    unfinished = all(finding.traits.unfinished for finding in errors(verdict.findings))
    idle = verdict.written is not None and now - verdict.written >= IDLE_SECONDS
    return verdict.state is State.INCOMPLETE and unfinished and idle


def _keep_linked(decisions: Sequence[Decision], links: Mapping[str, Collection[str]]) -> list[Decision]:
    """Keep what kept steps have links into, and what links in these lead into, and so on."""
    users: dict[str, str] = {}
    waiting = [decision.name for decision in decisions if decision.keep]
    while waiting:
        name = waiting.pop()
        new = set(links.get(name, ())) - users.keys()
        users.update(dict.fromkeys(new, name))
        waiting += new
    return [
        decision if decision.keep or decision.name not in users
        else decision._replace(keep=True, reason=f"links in {users[decision.name]} lead into it")
        for decision in decisions
    ]  # fmt: skip
