"""Copy the milestones of a run into an archive, and prove that they are there, before they may be deleted here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from dcptool.checkpoint.findings import state_of
from dcptool.checkpoint.kinds import Effect
from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError, DcptoolError, OutputExistsError, UnsupportedError
from dcptool.ops.copy.step import CopyOptions, CopyWatch, StepCopy, copy_step
from dcptool.ops.prune.plan import Decision, PrunePlan
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import DEFAULTS, Verdict, VerifyOptions
from dcptool.runs.activity import exists, list_files
from dcptool.storage import DirEntry, LocalStorage, Progress, is_url, join, locate, storage_at


class Archived(NamedTuple):
    """What became of the milestones of a plan.

    Attributes:
        path: of the archive.
        steps: what became of each, the one saved first first, as a copy tells it: "copied", "there" already, "planned"
            in a dry run, or "left" here with the reason.
        proven: names of those that are there, proven closely enough to be deleted here → their files here, as they were
            before that.
    """

    path: str
    steps: tuple[StepCopy, ...]
    proven: Mapping[str, Mapping[str, DirEntry]]

    @property
    def left(self) -> Mapping[str, str]:
        """Names of the steps that are not there → why."""
        return {step.name: step.reason for step in self.steps if step.state == "left"}

    @property
    def good(self) -> bool:
        """Whether all are there, or would be, but those that were deleted here meanwhile."""
        return all(reason == _GONE for reason in self.left.values())


_GONE = "it was deleted meanwhile"


def archive_steps(
    plan: PrunePlan,
    options: VerifyOptions = DEFAULTS,
    *,
    dry_run: bool = False,
    proof: Level = Level.RECORDS,
    threads: int | None = None,
    progress: Progress | None = None,
    expect: Callable[[int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Archived:
    """Copy the milestones of a plan that its archive has not, the one saved first first, and prove that they are there.

    They are copied as `copy_steps` copies a step, each to a folder of its name, and looked at there. What the archive
    has already is not copied again: its marker must have the SHA-256 of every file, and before a step may be deleted
    here its bytes are compared with these. A step that cannot be archived is left, and the others go on. Deletes
    nothing: `delete_steps` does.

    Args:
        plan: as `plan_prune` or `make_plan` returns it for an archive.
        options: as the plan was made with.
        dry_run: look only, write nothing.
        proof: how closely a step is looked at in the archive, once it is there.
        threads: how many parts are read, and written, at the same time; None for as many as suit the storages.
        progress: told the bytes as they are written.
        expect: told how many bytes are to be written, once for each step.
        say: told in a sentence what failed and is tried again.

    Raises:
        UnsupportedError: the archive is the run directory itself, or in it.
    """
    require_apart(plan.run, plan.archive)
    archiving = _Archiving(plan, options, dry_run, proof, threads, CopyWatch(progress, expect, say))
    steps = tuple(archiving.step(decision) for decision in plan.milestones)
    return Archived(plan.archive, steps, archiving.proven)


def require_apart(run: str, archive: str) -> None:
    """Refuse an archive that is the run directory, or in it: what is deleted in the one would be gone in the other.

    Raises:
        UnsupportedError: it is.
    """
    ours, theirs = (path.rstrip("/") if is_url(path) else _real(path) for path in (run, archive))
    if f"{theirs}/".startswith(f"{ours}/"):
        message = f"the archive {archive} is the run directory {run}, or in it"
        raise UnsupportedError(message, next_step="Name a place of its own.")


def _real(path: str) -> str:
    return os.path.realpath(path.removeprefix("file://"))


def is_sound(verdict: Verdict) -> bool:
    """Tell whether nothing bad is known of a step; what is not looked into is not known bad."""
    return state_of(verdict.findings) in ("complete", Effect.UNREAD.value)


class _Archiving:
    """The way of one plan's milestones into its archive; arguments as of `archive_steps`."""

    def __init__(
        self,
        plan: PrunePlan,
        options: VerifyOptions,
        dry_run: bool,
        proof: Level,
        threads: int | None,
        watch: CopyWatch,
    ) -> None:
        self._plan, self._options, self._dry_run, self._watch = plan, options, dry_run, watch
        self._proof = options._replace(level=proof, require_marker=True, threads=threads)
        self._how = CopyOptions(marker=options.marker, threads=threads)
        self.proven: dict[str, Mapping[str, DirEntry]] = {}

    def step(self, decision: Decision) -> StepCopy:
        """Archive one step, and tell what became of it."""
        name = decision.name
        source, target = join(self._plan.run, name), join(self._plan.archive, name)
        left = StepCopy(name, source, target, "left", nbytes=decision.nbytes)
        try:
            files = list_files(locate(source))
            quick = self._dry_run or decision.keep
            done = copy_step(source, target, self._how, self._watch, dry_run=self._dry_run, quick=quick)
            reason = self._reason_to_stay(done, decision)
        except OutputExistsError as error:
            what = error.message.partition(";")[0]
            return left._replace(reason=f"{what}, and nothing there proves that it is this step")
        except DcptoolError as error:
            is_gone = isinstance(error, CheckpointNotFoundError) and not exists(source)
            return left._replace(reason=_GONE if is_gone else " ".join(error.message.split()))
        if reason:
            return left._replace(reason=reason)
        if not quick:
            self.proven[name] = files
        return done

    def _reason_to_stay(self, done: StepCopy, decision: Decision) -> str:
        """Return why a step that was copied, or is there, must not be deleted here, "" if it may."""
        if done.notes:  # a link to a folder
            return f"not all of it can be archived: {'; '.join(done.notes)}"
        if self._dry_run or (done.state == "there" and decision.keep):
            return ""
        if done.state == "there" and self._is_one_place():
            return f"the archive is the run directory: what is written to {self._plan.archive} appears there"
        verdict = judge(done.path, self._proof)
        return "" if is_sound(verdict) else f"{done.path} is {verdict.state.value} there: {verdict.reason}"

    def _is_one_place(self) -> bool:
        """Tell whether run and archive are one folder under two names, such as two mounts of it."""
        archive, run = self._plan.archive, locate(self._plan.run).storage
        storage = storage_at(archive) if is_url(archive) else LocalStorage(archive.removeprefix("file://"))
        name = f".dcptool-{os.urandom(8).hex()}.tmp"
        storage.write(name, b"")
        try:
            return run.size(name) is not None
        finally:
            with suppress(DcptoolError):
                storage.delete(name)
