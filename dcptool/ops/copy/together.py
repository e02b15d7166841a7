"""Copy a step with the processes that torchrun started, on one machine or several: each sends what it sees.

What they see is one step, whether it lies on disks of their own, on storage that they share, or partly on both. Rank 0
judges it, and publishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dcptool.errors import CheckpointNotFoundError, DcptoolError, UnsupportedError
from dcptool.formats.digests import sha256
from dcptool.groups.asking import Ask, agree_asking
from dcptool.groups.audience import Audience
from dcptool.groups.group import ProcessGroup
from dcptool.groups.sharing import contribute, require_going, values_of
from dcptool.groups.together import require_gloo, work_together
from dcptool.ops.copy.copy import StepCopies
from dcptool.ops.copy.spread import Copies, Sight, SpreadStorage, copies_of, senders, sight_of, unlike
from dcptool.ops.copy.step import DEFAULTS, NOBODY, CopyOptions, CopyWatch, copy_found
from dcptool.ops.copy.survey import Survey, located_step
from dcptool.runs.directory import runs_at
from dcptool.storage import DirEntry, Location, Storage, is_url

T = TypeVar("T")
TIMEOUT_SECONDS = 600.0
"""A process that gives no sign of life for so long is given up."""


def copy_together(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: CopyOptions = DEFAULTS,
    watch: CopyWatch = NOBODY,
    *,
    dry_run: bool = False,
) -> StepCopies:
    """Copy one step as `copy.copy_steps` does, with every process of torchrun's group; each of them calls this.

    Args:
        source: local path or URL of the step, the same for all: on disks of their own, or on storage that they share.
        target: local path or URL, the same for all: of storage that they share.
        options: threads are those of one process; `also` is not for several.
        watch: told what this process does.
        dry_run: plan only, write nothing.

    Returns:
        The same on all of them.

    Raises:
        DcptoolError: as `copy.copy_steps`, or what one process raised.
        StorageError: files of one name differ, or the target is not on storage that all share.
        UnsupportedError: the source is a run.
        WorkerError: a process was lost; what has been copied is used when the same is copied again.
    """
    require_gloo("copy under torchrun")
    path = os.fspath(source).removeprefix("file://") if not is_url(os.fspath(source)) else os.fspath(source)

    def work(group: ProcessGroup, audience: Audience) -> StepCopies:
        crew = _Together(group, audience)
        found = _found(crew, path, options)
        done = copy_found(found, os.fspath(target), options, _numbered(watch, group.rank), crew, dry_run=dry_run)
        return crew.decide(lambda: StepCopies(done.source, done.path, False, (done,), done.seconds))

    return work_together(0, work, TIMEOUT_SECONDS)


def _numbered(watch: CopyWatch, rank: int) -> CopyWatch:
    """Return whom to tell, with the rank in what is said."""
    say = watch.say
    return watch._replace(say=lambda text: say(f"rank {rank}: {text}")) if say else watch


class _Together:
    """The crew of torchrun's processes; see `Crew`."""

    def __init__(self, group: ProcessGroup, audience: Audience) -> None:
        self._group, self._audience = group, audience
        self.rank, self.size = group.rank, group.size
        self.storage: SpreadStorage | None = None
        self.sender: Mapping[str, int] = {}

    def decide(self, act: Callable[[], T]) -> T:
        def decided(ask: Ask) -> T:
            if self.storage is None:
                return act()
            self.storage.shared.fetch = lambda rank, *place: ask(rank, place)
            try:
                return act()
            finally:
                self.storage.shared.fetch = None

        return agree_asking(self._group, decided, self._answer)

    def _answer(self, place: Any) -> bytes:
        assert self.storage is not None  # who asks has gathered what this process sees
        return self.storage.read(*place)

    def each(self, part: Callable[[], T]) -> list[T]:
        try:
            return values_of(contribute(self._group, self._audience, part))
        except DcptoolError as error:
            error.told_elsewhere = self.rank != 0
            raise

    def learn(self, look: Callable[[], object]) -> None:
        assert self.storage is not None  # there is something to look at
        shared = self.storage.shared

        def recorded() -> dict[tuple[str, int, int], bytes]:
            shared.recording = True
            try:
                look()
            finally:
                shared.recording = False
            return shared.reads

        def looked() -> None:
            look()

        shared.reads = self.decide(recorded)
        self.each(looked)

    def sends(self, name: str) -> bool:
        return self.sender.get(name) == self.rank

    def require_going(self) -> None:
        require_going(self._group)


def _found(crew: _Together, path: str, options: CopyOptions) -> Survey:
    """Gather what all see of a step."""

    def look() -> tuple[Storage | None, Sight]:
        try:
            storage = located_step(path).storage
        except CheckpointNotFoundError:
            storage = None
        return storage, sight_of(storage)

    own: list[Storage | None] = []

    def seen() -> Sight:
        storage, sight = look()
        own.append(storage)
        return sight

    sights = crew.each(seen)
    if not any(sight.folders for sight in sights):
        crew.decide(lambda: located_step(path).path)  # which says that nothing is there
    copies = crew.decide(lambda: copies_of(sights))
    _require_alike(crew, own[0], copies)
    sizes = {name: entry.nbytes for sight in sights for name, entry in sight.files.items()}
    crew.sender = senders(copies, sizes, crew.size)
    crew.storage = SpreadStorage(path.rstrip("/") or path, own[0], crew.rank, sights, crew.sender)
    location = Location(crew.storage, None)
    if crew.decide(lambda: bool(runs_at(location))):
        raise _told(
            crew, UnsupportedError(f"{path} is a run; under torchrun one step is copied at a time", next_step=_STEPS)
        )
    return _SpreadSurvey(location, options.marker, options.threads, sights[crew.rank], lambda: look()[1])


_STEPS = "Name a step of it, or copy the run from one machine that sees all of it, without torchrun."


def _told(crew: _Together, error: DcptoolError) -> DcptoolError:
    error.told_elsewhere = crew.rank != 0
    return error


def _require_alike(crew: _Together, own: Storage | None, copies: Mapping[str, Copies]) -> None:
    """Refuse files of one name that are not the same one, and not alike: one who sees each reads it."""
    several = {name: ranks for name, ranks in copies.items() if len(ranks) > 1}
    mine = [name for name, ranks in several.items() if any(crew.rank == who[0] for who in ranks)]

    def hashed() -> dict[str, str]:
        return {name: sha256(own, name, own.size(name) or 0) for name in mine if own}

    digests = crew.each(hashed) if several else []

    def compared() -> None:
        for name, ranks in several.items():
            by_digest: dict[str, list[int]] = {}
            for who in ranks:
                by_digest.setdefault(f"SHA-256 {digests[who[0]][name][:12]}…", []).extend(who)
            if len(by_digest) > 1:
                raise unlike(name, by_digest)

    crew.decide(compared)


class _SpreadSurvey(Survey):
    """A step of which each process sees a part, or all."""

    def __init__(
        self, location: Location, marker: str, threads: int | None, sight: Sight, look: Callable[[], Sight]
    ) -> None:
        super().__init__(location, marker, threads)
        self._before, self._look = sight, look

    def _seen(self) -> tuple[Mapping[str, DirEntry], Mapping[str, DirEntry]]:
        return self._before.files, self._look().files
