"""A step as a whole: what a resume needs of it that is not there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, errors
from dcptool.checks.check import Level
from dcptool.checks.side_files import SideFiles
from dcptool.frameworks.profile import SavedStep
from dcptool.frameworks.table import profile_of
from dcptool.words import listed, plural

MAX_NAMED = 5
_DIED = "The save died before it was done, or the file was left behind: resume from another step."
_LOST = "The save was finished, so the file was lost or left behind since: bring it back, or resume from another step."
_LOOKED = {
    Level.METADATA: "sizes and zip directories",
    Level.RECORDS: "sizes, zip directories and pickles",
    Level.DEEP: "every byte that has a checksum",
}
_OF_RANKS = re.compile(
    r"(.*(?:rank|rng|rng_state|random_states?|dataloader|sampler)[_-]?)(\d+)(\.(?:pt|pth|bin|ckpt|pkl))", re.IGNORECASE
)


class Resume(NamedTuple):
    """Whether a job can go on from a step.

    Attributes:
        framework: the trainer that saved it, "" if none is known to.
        resumable: None where nothing tells.
        lacks: what it lacks for that, in words.
    """

    framework: str = ""
    resumable: bool | None = None
    lacks: tuple[str, ...] = ()


def resume_of(step: SavedStep, side_files: Collection[str], as_it_is: bool = False) -> tuple[Resume, list[Finding]]:
    """Return whether a job can go on from a step, by what is known of its trainer, and what is missing.

    Args:
        step: its files, and the checkpoints in it.
        side_files: names of the files that belong to none of these.
        as_it_is: no trainer saved it: nothing was lost, and a resume lacks what its trainer puts beside.
    """
    problems = [] if as_it_is else _gaps(side_files)
    profile = profile_of(step)
    if profile is None:
        return Resume(), problems
    told = {problem.file for problem in problems}
    missing = [(name, holds) for name, holds in profile.missing(step) if name not in told]
    by_parts = [entry for entry in missing if _is_told(step, entry[0])]
    missing = [entry for entry in missing if entry not in by_parts]
    lacks = profile.lacks(step)
    if as_it_is:
        anew = [(name, holds) for name, holds in missing if profile.goes_on_without(name)]
        lacks += [f"{name} ({holds})" for name, holds in missing if (name, holds) not in anew]
        notes = _begin_anew(anew, profile.name)
    else:
        notes = []
        finished = step.has(profile.last_written) and profile.last_written not in dict(missing)
        problems += _missing(missing, profile.name, _LOST if finished else _DIED)
    resumable = not problems and not lacks and not by_parts
    if lacks and not problems:
        message = f"it lacks {listed(lacks, MAX_NAMED)}, which {profile.name} resumes with: that would start anew"
        problems.append(Finding.of("not-resumable", message))
    return Resume(profile.name, resumable, tuple(lacks)), [*problems, *notes]


def _is_told(step: SavedStep, name: str) -> bool:
    """Tell whether a missing file is one of a rank of a checkpoint in the step, which says so itself."""
    folder, _, file = name.rpartition("/")
    part = step.parts.get(folder)
    if part is None or not part.format.boxes_in_files or part.format.rank_of(file) is None:
        return False
    return any(problem.kind == "missing-file" for problem in part.problems)


def is_known(step: SavedStep) -> bool:
    """Tell whether some trainer's files are what a step is of, whatever they hold."""
    return profile_of(step) is not None


def not_read(step: SavedStep, side_files: SideFiles, level: Level) -> list[Finding]:
    """Return the note on a whole step of a known trainer in which there is no checkpoint that dcptool reads."""
    profile = profile_of(step)
    if profile is None or errors(side_files.findings) or profile.missing(step):
        return []
    looked = f"{plural(len(side_files.names), 'file')} there and whole ({_LOOKED[level]})"
    read = "only looked through for NaN and infinities" if side_files.n_seen else "not read by dcptool"
    message = f"a step of {profile.name}: {looked}; tensors are {read}"
    return [Finding.of("tensors-not-read", message)]


def rank_in(name: str) -> int | None:
    """Return whose a file is by its name, of which each rank seems to have one, whatever trainer left it; else None."""
    match = _OF_RANKS.fullmatch(name)
    return int(match[2]) if match else None


def _by_kind(lacking: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, holds in lacking:
        found.setdefault(holds, []).append(name)
    return found


def _begin_anew(lacking: Iterable[tuple[str, str]], trainer: str) -> list[Finding]:
    """Return a note for each kind of file that ranks do not find and go on without."""
    notes = []
    for holds, names in _by_kind(lacking).items():
        which = f"{listed(names, MAX_NAMED, counted=False)} {'is' if len(names) == 1 else 'are'} not there"
        ranks = "the rank that looks for it goes" if len(names) == 1 else "the ranks that look for them go"
        message = f"{which}: {trainer} resumes all the same, {ranks} on with new {holds}"
        notes.append(Finding.of("begins-anew", message, names[0]))
    return notes


def _missing(lacking: Iterable[tuple[str, str]], trainer: str, next_step: str) -> list[Finding]:
    """Return a finding for each kind of file that is missing, however many ranks' files are."""
    problems = []
    for holds, names in _by_kind(lacking).items():
        which = listed(names, MAX_NAMED, counted=False)
        message = f"{which} {'is' if len(names) == 1 else 'are'} missing: {holds}, which {trainer} resumes with"
        problems.append(Finding.of("missing-side-file", message, names[0], next_step=next_step))
    return problems


def _gaps(names: Collection[str]) -> list[Finding]:
    """Return ranks whose file is missing though the ones before and after are there, for files no profile knows."""
    families: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _OF_RANKS.fullmatch(name)
        if match:
            families.setdefault((match[1], match[3]), set()).add(int(match[2]))
    problems = []
    for (before, after), ranks in sorted(families.items()):
        if min(ranks) or max(ranks) >= 2 * len(ranks):
            continue
        missing = sorted(set(range(max(ranks))) - ranks)
        if missing:
            gone = [f"{before}{rank}{after}" for rank in missing]
            which = f"{listed(gone, MAX_NAMED, counted=False)} {'is' if len(gone) == 1 else 'are'}"
            message = f"{which} missing, though there are files of rank {min(ranks)} and {max(ranks)}"
            problems.append(Finding.of("missing-side-file", message, gone[0], next_step=_DIED))
    return problems
