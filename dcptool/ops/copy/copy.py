"""Copy what a user names: one step, or every complete step of a run that the target has not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from dcptool.errors import CheckpointNotFoundError, DcptoolError, ItemError, UnsafePickleError, UnsupportedError
from dcptool.ops.copy.step import DEFAULTS, CopyOptions, CopyWatch, StepCopy, copy_step
from dcptool.ops.following import opened_parts, step_of
from dcptool.ops.tracking import tracked
from dcptool.ops.verify.verdict import State, Verdict, VerifyOptions
from dcptool.ops.verify.verify import verify
from dcptool.runs.activity import exists, list_files
from dcptool.runs.directory import require_run, runs_at
from dcptool.storage import Progress, join, locate


class StepCopies(NamedTuple):
    """What was copied, or would be.

    Attributes:
        source, path: as given; of a run the folder that holds its steps, and the one that holds their copies.
        is_run: whether a run was copied.
        steps: what became of each step, in the order of their saves.
        seconds: wall time.
    """

    source: str
    path: str
    is_run: bool
    steps: tuple[StepCopy, ...]
    seconds: float

    @property
    def good(self) -> bool:
        """Whether all steps are there now, but those that are still being written, or were deleted meanwhile."""
        return all(step.state != "left" or step.reason.startswith(_NO_FAILURE) for step in self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes that were copied now."""
        return sum(step.nbytes - step.kept_nbytes for step in self.steps if step.state == "copied")


_NO_FAILURE = (State.IN_PROGRESS.value, "gone")
"""How the reasons begin for which a step may be left."""


def copy_steps(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: CopyOptions = DEFAULTS,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Callable[[int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> StepCopies:
    """Copy a step, byte for byte, from any storage to any other; of a run directory each complete step.

    Every CRC32 stored in it is checked and every file hashed while its bytes pass; what markers and manifests say of
    them is compared. The copy has a marker with the SHA-256 of every file, written last.

    Args:
        source: local path or URL of a step or a run directory.
        target: local path or URL of the copy itself, not of a folder to put it in.
        options: see `CopyOptions`.
        dry_run: plan only, write nothing.
        progress: told the bytes as they are written.
        expect: told how many bytes are to be written, once for each step.
        say: told in a sentence what failed and is tried again.

    Returns:
        What became of each step; of a run those that are not complete, or turn out damaged, are left.

    Raises:
        ItemError: the step is damaged or not whole; nothing is published.
        UnsafePickleError: it runs code when it is loaded.
        OutputExistsError: there is something else at the target.
        StorageError: something cannot be read or written, or changed meanwhile; what has been copied is used when the
            same is copied again.

    Example:
        >>> dcptool.copy_steps("/local/ckpt/step_500", "s3://bucket/run/step_500")
    """
    began = time.perf_counter()
    path = os.fspath(target)
    watch = CopyWatch(progress, expect, say)
    location = locate(source, options.also)
    if location.file is not None or not runs_at(location):
        done = _with_tracker(copy_step(source, path, options, watch, dry_run=dry_run))
        return StepCopies(location.path, done.path, False, (done,), time.perf_counter() - began)
    run = require_run(location)
    if options.overwrite:
        raise UnsupportedError("--overwrite is for one step; of a run only steps are copied that the target has not")
    report = verify(source, VerifyOptions(marker=options.marker, also=options.also, threads=options.threads))
    path = join(path.rstrip("/"), run.folder)
    steps = []
    for verdict in report.verdicts:
        below = f"{run.folder}/{verdict.name}" if run.folder else verdict.name
        halves = tuple(half for folder in options.also if exists(half := join(folder, below)))
        halves = tuple(half for half in halves if half != verdict.path)
        steps.append(_of_run(verdict, join(path, verdict.name), options._replace(also=halves), watch, dry_run))
    if steps:  # the newest is last
        steps[-1] = _with_tracker(steps[-1])
    return StepCopies(run.path, path, True, tuple(steps), time.perf_counter() - began)


def _with_tracker(step: StepCopy) -> StepCopy:
    """Add to its notes by which file its trainer would not find the copy."""
    try:
        location = locate(step.source)
        listing = list_files(location)
        profile = step_of(location, opened_parts(location, listing), listing).profile
    except DcptoolError:  # as it was just copied, that is no reason for less
        return step
    return step._replace(notes=(*step.notes, *(tracked(profile, step.path) if step.state != "left" else ())))


def _of_run(verdict: Verdict, target: str, options: CopyOptions, watch: CopyWatch, dry_run: bool) -> StepCopy:
    """Copy a step of a run if it is complete; one that turns out not to be is left, and others go on."""
    left = StepCopy(verdict.name, verdict.path, target, "left")
    if verdict.state is not State.COMPLETE and not (verdict.state is State.UNSAFE and options.trust):
        return left._replace(reason=f"{verdict.state.value}: {verdict.reason}")
    try:
        return copy_step(verdict.path, target, options, watch, dry_run=dry_run, quick=True)
    except (ItemError, UnsafePickleError) as error:
        return left._replace(reason=_in_short(error))
    except CheckpointNotFoundError:
        if exists(verdict.path):
            raise
        return left._replace(reason="gone: it was deleted meanwhile")


def _in_short(error: DcptoolError) -> str:
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    state = "unsafe" if isinstance(error, UnsafePickleError) else "damaged"
    return f"{state}: {lines[1] if len(lines) > 1 else lines[0]}"
