"""Copy one step: look at it, refuse it or not, move its files, look again, publish."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, errors, state_of
from dcptool.errors import ItemError, OutputExistsError, StorageError, UnsafePickleError
from dcptool.formats.marker import FOREIGN, NAME, Marker, marked_as
from dcptool.formats.table import is_metadata
from dcptool.ops.copy.crew import ALONE, Crew
from dcptool.ops.copy.journal import Moved
from dcptool.ops.copy.moving import Mover, memory_nbytes, n_threads, part_of
from dcptool.ops.copy.passing import PassingFile
from dcptool.ops.copy.places import CopyPlace, place_at, tidy
from dcptool.ops.copy.retrying import Retrying
from dcptool.ops.copy.survey import Survey, refusal, require_copyable, survey
from dcptool.ops.copy.there import is_begun, is_there, sizes_of, taken
from dcptool.ops.replacing import replaced
from dcptool.ops.verify.verdict import State
from dcptool.storage import Progress, base_name, is_url


class CopyOptions(NamedTuple):
    """How steps are copied.

    Attributes:
        also: further folders that hold files of the same step, or run, such as other nodes' disks.
        marker: name of the marker's file.
        trust: copy also what runs code when it is loaded.
        overwrite: replace a local step that is there, once the new one is complete.
        threads: how many parts are read, and written, at the same time; None for as many as suit the storages.
    """

    also: tuple[str, ...] = ()
    marker: str = NAME
    trust: bool = False
    overwrite: bool = False
    threads: int | None = None


DEFAULTS = CopyOptions()


class CopyWatch(NamedTuple):
    """Who is told how a copy goes on, on any thread.

    Attributes:
        progress: how many more bytes are copied; fewer, where a part is copied anew.
        expect: how many more bytes will be.
        say: a sentence, such as that something failed and is tried again.
    """

    progress: Progress | None = None
    expect: Callable[[int], None] | None = None
    say: Callable[[str], None] | None = None


NOBODY = CopyWatch()


class StepCopy(NamedTuple):
    """What became of one step.

    Attributes:
        name, source, path: of it, where it is, and where its copy is or would be.
        state: "copied"; "planned" in a dry run; "there" if the same step, proven, was there already; "left" if it was
            not copied.
        files: name and bytes of each file of the copy but its marker, in the order in which they are copied.
        nbytes: of these.
        kept_nbytes: of files that an earlier run, which did not come to its end, had copied.
        n_checked: CRC32s that were stored in it and compared.
        n_claimed: files whose digest a marker or a manifest gave, and was compared.
        retries: how often something was tried again.
        memory_nbytes: of the parts of files that are in memory at most.
        seconds: wall time.
        reason: why it was left.
        notes: worth knowing, one sentence each.
    """

    name: str
    source: str
    path: str
    state: str
    files: tuple[tuple[str, int], ...] = ()
    nbytes: int = 0
    kept_nbytes: int = 0
    n_checked: int = 0
    n_claimed: int = 0
    retries: int = 0
    memory_nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    notes: tuple[str, ...] = ()


def copy_step(
    source: str | os.PathLike[str],
    target: str,
    options: CopyOptions = DEFAULTS,
    watch: CopyWatch = NOBODY,
    *,
    dry_run: bool = False,
    quick: bool = False,
) -> StepCopy:
    """Copy one step, byte for byte, and mark the copy once all of it is proven.

    Args:
        source: path or URL of its folder.
        target: path or URL of the folder of the copy.
        options: see `CopyOptions`.
        watch: told how it goes on.
        dry_run: look at everything that can be seen without reading all of it, and write nothing.
        quick: of a step that is at the target already only markers, sizes, metadata and small files are compared.

    Raises:
        ItemError: it is damaged or not whole; nothing is published, and nothing left.
        UnsafePickleError: it runs code when it is loaded.
        OutputExistsError: there is something else at the target.
        StorageError: the source cannot be read, is being written or changed meanwhile, or the target cannot be written;
            nothing is published, and what has been copied is used when it is copied again.
    """
    found = survey(source, options.also, options.marker, options.threads)
    return copy_found(found, target, options, watch, dry_run=dry_run, quick=quick)


def copy_found(
    found: Survey,
    target: str,
    options: CopyOptions,
    watch: CopyWatch,
    crew: Crew = ALONE,
    *,
    dry_run: bool = False,
    quick: bool = False,
) -> StepCopy:
    """Copy a step that has been listed, with all who see a part of it; else as `copy_step`."""
    began = time.perf_counter()
    target = target if is_url(target) else target.removeprefix("file://")
    result = StepCopy(base_name(found.path), found.path, target, "there", sizes_of(found), found.nbytes)
    (in_the_way,) = crew.decide(lambda: (taken(found, target, options.also, options.overwrite),))
    if (in_the_way or options.overwrite) and is_there(found, target, options.marker, quick=quick, crew=crew):
        if not dry_run:
            crew.decide(lambda: tidy(target))
        return result._replace(seconds=time.perf_counter() - began)
    copying = _Copying(found, target, options, watch, crew)
    notes = crew.decide(lambda: copying.allowed(in_the_way))
    result = result._replace(notes=notes)
    done = copying.planned(result) if dry_run else copying.run(result)
    return done._replace(seconds=time.perf_counter() - began)


class _Copying:
    """One copy of one step, as one process of its crew does it; all of them do the same in the same order."""

    def __init__(self, found: Survey, target: str, options: CopyOptions, watch: CopyWatch, crew: Crew) -> None:
        self._found, self._target, self._options, self._watch, self._crew = found, target, options, watch, crew
        self._again = Retrying(watch.say or (lambda text: None))
        remote = is_url(target) or is_url(found.path)
        self._threads = n_threads(options.threads, remote)
        self._part = part_of([entry.nbytes for entry in found.listing.values()], remote)
        self._findings: list[Finding] = []
        self._moved: dict[str, Moved] = {}
        self._mine: dict[str, Moved] = {}
        self._lock = threading.Lock()

    def allowed(self, in_the_way: OutputExistsError | None) -> tuple[str, ...]:
        """Refuse what must not be copied there; return what is worth knowing. For rank 0."""
        if in_the_way and not (is_url(self._target) and is_begun(self._target)):
            raise in_the_way
        require_copyable(self._found, self._options.trust)
        notes = [replaced(self._target, "dcp")] if self._options.overwrite else []
        return tuple(filter(None, [*notes, *self._found.notes]))

    def planned(self, result: StepCopy) -> StepCopy:
        """Return the plan."""
        return result._replace(state="planned", memory_nbytes=self._memory)

    @property
    def _memory(self) -> int:
        return memory_nbytes(self._threads, self._part, is_url(self._target))

    def run(self, result: StepCopy) -> StepCopy:
        """Copy; errors as of `copy_step`."""
        found, crew = self._found, self._crew
        found.parts = crew.decide(lambda: found.parts)
        crew.learn(lambda: (found.held, found.claims))
        places: list[CopyPlace] = []
        try:
            place = self._begun(places)
            kept_nbytes = self._go_on(place)
            try:
                with Mover(
                    found.location.storage,
                    self._threads,
                    self._part,
                    self._again,
                    self._watch.progress,
                    crew.require_going,
                ) as mover:
                    self._move_all(mover, place)
                crew.decide(lambda: self._publish(place))
            except (ItemError, UnsafePickleError):
                if crew.rank == 0:
                    place.discard()
                raise
            except StorageError as error:
                with suppress(StorageError):
                    place.journal.save()
                if error.gone:  # a file that is written anew is empty at first
                    self._require_unchanged()
                raise
        finally:
            for one in places:
                one.journal.close()
        return result._replace(
            state="copied",
            kept_nbytes=kept_nbytes,
            n_checked=sum(moved.n_records for moved in self._moved.values()),
            n_claimed=len(self._found.claims.keys() & self._moved.keys()),
            retries=sum(crew.each(lambda: self._again.count)),
            memory_nbytes=self._memory,
        )

    def _begun(self, places: list[CopyPlace]) -> CopyPlace:
        """Return where the copy grows, ready for this process; it is added to `places` once it is held."""
        found, crew = self._found, self._crew
        names = {*found.files, self._options.marker}

        def begin() -> tuple[str, str, dict[str, Moved]]:
            source = found.path if is_url(found.path) else os.path.abspath(found.path)
            token = os.urandom(8).hex() if crew.size > 1 else ""
            place = place_at(self._target)
            places.append(place)
            self._again(place.path, lambda: place.begin(source, names, token))
            return source, token, place.journal.moved

        source, token, known = crew.decide(begin)

        def join() -> None:
            if crew.rank:
                place = place_at(self._target, crew.rank)
                places.append(place)
                self._again(place.path, lambda: place.join(source, known, token))

        crew.each(join)
        place = places[0]
        crew.decide(place.joined)
        return place

    def _gather(self, part: Callable[[], object]) -> None:
        """Do a part in every process, and have all know what each found to be, or made, at the target."""

        def done() -> tuple[dict[str, Moved], list[Finding]]:
            part()
            return self._mine, self._findings

        told = self._crew.each(done)
        self._moved = {name: moved for mine, _ in told for name, moved in mine.items()}
        self._findings = [finding for _, findings in told for finding in findings]

    def _go_on(self, place: CopyPlace) -> int:
        """Find what an earlier run copied, and say how much there is to do; return the bytes of what is there.

        What makes a copy look complete goes if it, or anything else before it, has to be copied anew.
        """
        found = self._found
        self._gather(lambda: self._keep(place, found.first))
        if len(self._moved) == len(found.first):
            self._gather(lambda: self._keep(place, found.last))
        self._crew.decide(lambda: self._remove_seals(place))
        if self._watch.expect:
            left = (name for name in found.files if self._is_to_move(name))
            self._watch.expect(sum(found.listing[name].nbytes for name in left))
        return sum(moved.nbytes for moved in self._moved.values())

    def _keep(self, place: CopyPlace, names: Iterable[str]) -> None:
        """Take note of files that this process would send, and that can be proven to be there."""
        for name in filter(self._crew.sends, names):
            kept = place.kept(name, self._found.listing[name])
            if kept and self._found.sha256_claims(name) <= {kept.sha256}:
                self._mine[name] = kept

    def _is_to_move(self, name: str) -> bool:
        return name not in self._moved and self._crew.sends(name)

    def _remove_seals(self, place: CopyPlace) -> None:
        for name in (*self._found.last, self._options.marker):
            if name not in self._moved:
                self._again(name, lambda name=name: place.storage.delete(name))  # type: ignore[misc]

    def _move_all(self, mover: Mover, place: CopyPlace) -> None:
        """Copy what is not there; the files that make it look complete only when all is known to be sound."""
        found = self._found

        def move(name: str) -> None:
            if self._is_to_move(name):
                self._move(mover, place, name)

        def first() -> None:
            mover.all(filter(self._is_to_move, found.first), move)
            for name in filter(self._crew.sends, found.last):
                passing = self._passing(name)
                mover.look_only(name, found.listing[name].nbytes, passing)
                passing.sha256()
                self._note(passing.findings)

        self._gather(first)
        self._require_sound()
        self._require_unchanged()
        self._crew.decide(lambda: self._again(place.path, lambda: place.require_all(self._moved)))
        for name in found.last:
            self._gather(lambda name=name: move(name))  # type: ignore[misc]
        self._require_sound()
        self._require_unchanged()

    def _move(self, mover: Mover, place: CopyPlace, name: str) -> None:
        entry = self._found.listing[name]
        passing = mover.move(
            name, entry.nbytes, lambda: self._passing(name), lambda: place.sink(name, entry, self._part)
        )
        digest = passing.sha256()
        self._note(passing.findings)
        if not passing.findings:
            moved = Moved(entry.nbytes, entry.mtime, entry.version, digest, passing.stored, passing.n_records)
            self._again(name, lambda: place.journal.add(name, moved))
            with self._lock:
                self._mine[name] = moved

    def _passing(self, name: str) -> PassingFile:
        found = self._found
        held, claims = found.held.get(name, ()), found.claims.get(name, ())
        return PassingFile(found.location.storage, name, found.listing[name].nbytes, held, claims)

    def _note(self, findings: Iterable[Finding]) -> None:
        with self._lock:
            self._findings += findings

    def _require_unchanged(self) -> None:
        self._crew.each(lambda: self._again(self._found.path, self._found.require_unchanged))

    def _require_sound(self) -> None:
        wrong = errors(self._findings)
        if wrong:
            self._require_unchanged()  # a save into the same place looks like damage
            self._crew.decide(lambda: _refuse(self._found.path, wrong))

    def _publish(self, place: CopyPlace) -> None:
        """Write the marker, last of all, and give the copy its name."""
        self._again(place.path, lambda: place.require_all(self._moved))
        marker, name = self._marker(), self._options.marker
        self._again(name, lambda: place.storage.write(name, marker))
        self._again(place.path, lambda: place.publish(self._options.overwrite))

    def _marker(self) -> bytes:
        """Return the bytes of the copy's marker: the source's own, if it has the SHA-256 of every file."""
        found, name = self._found, self._options.marker
        ours = {name, NAME, *FOREIGN}
        files = {file: moved.nbytes for file, moved in sorted(self._moved.items()) if file not in ours}
        digests = {file: self._moved[file].sha256 for file in files}
        old = marked_as(found.location.storage, name)
        if old and old.files == files and old.sha256 == digests:
            return found.location.storage.read(name, 0, found.listing[name].nbytes)
        verdict = found.verdict
        made = Marker(
            name,
            "mark",
            verdict.step,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            verdict.world_size,
            save_id=next((part.save_id for part in verdict.parts if part.save_id), None),
        )
        metadata = {file: digest for file, digest in digests.items() if is_metadata(file)}
        return (old or made)._replace(name=name, files=files, metadata_sha256=metadata, sha256=digests).document()


def _refuse(path: str, wrong: Sequence[Finding]) -> None:
    raise refusal(path, wrong, State(state_of(wrong)))
