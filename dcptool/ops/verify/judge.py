"""Judge one folder: the checkpoints in it, its marker, the files beside them, and whether somebody writes there.

A folder may be one checkpoint, or hold several parts that belong together (model and optimizer, actor and critic); it
is as good as the worst of them, and has one marker for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, errors, state_of, worst_first
from dcptool.checkpoint.kinds import Effect
from dcptool.checkpoint.steps import step_number
from dcptool.checks.side_files import SideFiles, look_at, patterns_of
from dcptool.checks.steps import Resume, is_known, not_read, resume_of
from dcptool.formats.detect import find_parts
from dcptool.formats.marker import NAME, SAVING, is_unfinished
from dcptool.formats.table import beside
from dcptool.frameworks.profile import SavedStep
from dcptool.frameworks.table import is_needed
from dcptool.frameworks.values import reader
from dcptool.ops.verify.parts import FoundParts, check_parts
from dcptool.ops.verify.verdict import DEFAULTS, MADE_HERE, State, Verdict, VerifyOptions
from dcptool.ops.verify.vouched import Vouched, look_for_vouchers
from dcptool.runs.activity import folders_of, last_written, left_behind, list_files, sign_of_writing
from dcptool.storage import Location, Progress, base_name, locate


def judge(
    path: str | os.PathLike[str],
    options: VerifyOptions = DEFAULTS,
    progress: Progress | None = None,
    opened: Checkpoint | None = None,
) -> Verdict:
    """Judge one folder, or one file.

    Args:
        path: local path or URL.
        options: what is asked.
        progress: told the number of bytes as they are read.
        opened: the checkpoint at `path` itself, if somebody has opened it already.

    Raises:
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: it cannot be listed.
    """
    return judge_at(locate(path, options.also), options, progress, opened)


def judge_at(
    location: Location, options: VerifyOptions, progress: Progress | None = None, opened: Checkpoint | None = None
) -> Verdict:
    """Judge what is at a location, whatever the options say of further folders; else as `judge`."""
    listing = list_files(location)
    files = {name: entry.nbytes for name, entry in listing.items()}
    names = [""] if location.file is not None else [part.name for part in find_parts(location, below_whole=True)]
    vouched = look_for_vouchers(location, files, names, options)
    marker, problems = vouched.marker, list(vouched.of_markers)
    valid = vouched.is_valid
    saved = SavedStep(base_name(location.path), files, {}, reader(location.storage, files))
    by_files = location.file is None and not names and is_known(saved)
    nothing_yet = not names and is_unfinished(files)  # a save that was killed before it wrote anything
    found = (
        FoundParts() if by_files or nothing_yet else check_parts(location, names, listing, options, progress, opened)
    )
    problems += found.findings
    about_marker = _is_about_marker(problems)
    problems += _not_told(vouched.of_manifests, problems)
    saved = saved._replace(parts=found.opened)
    side_files, resume = SideFiles(), Resume()
    if by_files or (found.opened and location.file is None):
        side_files, resume, wrong = _look_beside(location, saved, options, vouched)
        told = {problem.file for problem in errors(found.findings)} - {None}
        problems += [problem for problem in wrong if problem.file not in told]
        problems += not_read(saved, side_files, options.depth) if by_files else []
    not_finite = (*found.not_finite, *side_files.not_finite)
    if options.finite and by_files and not side_files.n_seen:
        message = "whether its tensors are finite is not known: dcptool reads none of them"
        problems.append(Finding.of("finite-unknown", message))
    problems += [_missing_part(name) for name in options.require if not _is_there(name, files)]
    problems += [_unfinished(location.path)] if is_unfinished(files) else []
    problems += [_left_behind(name) for name in left_behind(location, folders_of(names))]
    if valid and marker and marker.writer:  # it vouches for names, sizes and metadata; file times are no hint then
        problems = [problem for problem in problems if problem.kind != "mixed-times"]
    if options.require_marker and marker is None and not about_marker:
        message = f"there is no marker {options.marker}"
        named = f"--marker {options.marker} " if options.marker != NAME else ""
        step = f"dcptool mark {named}{location.path}"
        problems.append(Finding.of("no-marker", message, next_step=step))
    state = State.OTHER if found.other else State(state_of(problems))
    sign = sign_of_writing(location, listing, names, problems, None if marker else options.grace)
    if sign and not found.other:
        state = State.IN_PROGRESS
    return Verdict(
        location.path,
        base_name(location.path),
        step_number(base_name(location.path)),
        state,
        marker,
        found.parts,
        tuple(worst_first([sign, *problems] if sign else problems)),
        len(files),
        sum(files.values()),
        last_written(location, listing),
        options.depth,
        found.tally,
        resume,
        tuple(dict.fromkeys(fqn.partition(".")[0] for part in found.opened.values() for fqn in part)),
        side_files,
        patterns_of(files, options.marker),
        _are_finite(problems, not_finite) if options.finite else None,
        not_finite,
        vouched.manifests,
    )


def beside_step(location: Location, opened: Mapping[str, Checkpoint]) -> list[Finding]:
    """Return what is wrong with the files beside the checkpoints of a step, and what is missing, by a quick look.

    Args:
        location: the step's folder.
        opened: all checkpoints in it, by their place there.
    """
    files = {name: entry.nbytes for name, entry in list_files(location).items()}
    step = SavedStep(base_name(location.path), files, opened, reader(location.storage, files))
    return _look_beside(location, step, DEFAULTS, look_for_vouchers(location, files, list(opened), DEFAULTS))[2]


def _are_finite(problems: Sequence[Finding], not_finite: Sequence[str]) -> bool | None:
    """Tell whether all values are finite; None if there is reason to think that not all were seen."""
    if not_finite:
        return False
    unseen = any(finding.kind == "finite-unknown" for finding in problems)
    return None if unseen or state_of(problems) not in (State.COMPLETE, State.UNMARKED) else True


def _look_beside(
    location: Location, step: SavedStep, options: VerifyOptions, vouched: Vouched
) -> tuple[SideFiles, Resume, list[Finding]]:
    """Look at the files of a step that no checkpoint in it uses; some trainers' have names that DCP has itself.

    Returns:
        What they are, whether a job can go on from the step, and what is wrong with them or missing.
    """
    used = {f"{part}/{name}" if part else name for part, found in step.parts.items() for name in found.usage}
    names = {*beside(step.files, options.marker), *filter(is_needed, step.files)} - used
    files = {name: nbytes for name, nbytes in step.files.items() if name in names}
    found = look_at(
        location.storage, files, options.depth, options.threads, vouched.files, options.finite, options.split
    )
    made_here = vouched.is_valid and vouched.marker is not None and vouched.marker.writer in MADE_HERE
    resume, missing = resume_of(step, found.names, as_it_is=made_here)
    return found, resume, [*found.findings, *missing]


def _not_told(findings: Iterable[Finding], told: Iterable[Finding]) -> list[Finding]:
    """Return what manifests show, without files that are known to be missing or short."""
    known = {(finding.kind, finding.file) for finding in told if finding.traits.effect is Effect.INCOMPLETE}
    return [finding for finding in findings if (finding.kind, finding.file) not in known]


def _is_about_marker(problems: Iterable[Finding]) -> bool:
    return any(problem.traits.effect is Effect.UNMARKED for problem in problems)


def _unfinished(path: str) -> Finding:
    message = f"{SAVING} is there and no {NAME}: a save began here and has not finished"
    step = f"The next save of the run removes it. To keep what is there: delete {SAVING}, then dcptool mark {path}"
    return Finding.of("unfinished-save", message, SAVING, next_step=step)


def _left_behind(name: str) -> Finding:
    message = f"{name} was left by a dcptool that was killed: it belongs to nothing"
    return Finding.of("left-behind", message, name, next_step="The next dcptool mark or rescue there removes it.")


def _missing_part(name: str) -> Finding:
    return Finding.of("missing-part", f"the part {name} is missing", name)


def _is_there(name: str, files: Mapping[str, int]) -> bool:
    return any(file == name or file.startswith(f"{name.rstrip('/')}/") for file in files)
