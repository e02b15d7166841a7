"""Copy one step: look at it, refuse it or not, move its files, look again, publish."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, errors, state_of
from dcptool.copying.publishing import require_place
from dcptool.errors import CheckpointNotFoundError, ItemError, OutputExistsError, StorageError, UnsafePickleError
from dcptool.formats.digests import sha256
from dcptool.formats.marker import FOREIGN, NAME, Marker, marked_as, marker_problems
from dcptool.formats.table import is_metadata
from dcptool.ops.copy.journal import STORE_NAME, Moved
from dcptool.ops.copy.moving import Mover, memory_nbytes, n_threads, part_of
from dcptool.ops.copy.passing import PassingFile
from dcptool.ops.copy.places import CopyPlace, place_at, tidy, unfinished_at
from dcptool.ops.copy.retrying import Retrying
from dcptool.ops.copy.survey import Survey, refusal, require_copyable, survey
from dcptool.ops.replacing import replaced
from dcptool.ops.verify.verdict import State
from dcptool.runs.activity import list_files
from dcptool.storage import LocalStorage, Progress, base_name, is_url, join, locate, walk

SMALL_NBYTES = 1 << 20
"""Files up to this length are compared by what is in them where a step is only looked at quickly."""


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
    began = time.perf_counter()
    target = target if is_url(target) else target.removeprefix("file://")
    found = survey(source, options.also, options.marker, options.threads)
    result = StepCopy(base_name(found.path), found.path, target, "there", _sizes(found), found.nbytes)
    taken = _taken(found, target, options)
    if (taken or options.overwrite) and is_there(found, target, options.marker, quick=quick):
        if not dry_run:
            tidy(target)
        return result._replace(seconds=time.perf_counter() - began)
    if taken and not (is_url(target) and _is_begun(target)):
        raise taken
    require_copyable(found, options.trust)
    notes = [replaced(target, "dcp")] if options.overwrite else []
    result = result._replace(notes=tuple(filter(None, [*notes, *found.notes])))
    copying = _Copying(found, target, options, watch)
    done = copying.planned(result) if dry_run else copying.run(result)
    return done._replace(seconds=time.perf_counter() - began)


def _sizes(found: Survey) -> tuple[tuple[str, int], ...]:
    return tuple((name, found.listing[name].nbytes) for name in found.files)


def is_there(found: Survey, target: str, marker: str, *, quick: bool = False) -> bool:
    """Tell whether the same step is at a path already, with a marker that gives the SHA-256 of every file.

    Args:
        found: the step.
        target: path or URL.
        marker: name of the marker.
        quick: compare only small files and metadata, where the source has no checksums in its own marker.
    """
    try:
        location = locate(target)
        if location.file is not None:
            return False
        there = {name: entry.nbytes for name, entry in list_files(location).items()}
    except CheckpointNotFoundError:
        return False
    proof = marked_as(location.storage, marker)
    if proof is None or {**dict(_sizes(found)), marker: there.get(marker)} != there:
        return False
    foreign = {marker, NAME, *FOREIGN}
    if any(name not in proof.sha256 for name in found.files if name not in foreign):
        return False
    if marker_problems(proof, location.storage, there):
        return False
    return all(_is_same(found, name, proof.sha256.get(name), quick) for name in found.files)


def _is_same(found: Survey, name: str, digest: str | None, quick: bool) -> bool:
    """Tell whether a file of the source has a SHA-256; metadata is read, whatever a marker says that may be older."""
    nbytes, claimed = found.listing[name].nbytes, found.sha256_claims(name)
    if digest is None:
        return True
    if not is_metadata(name) and (claimed or (quick and nbytes > SMALL_NBYTES)):
        return not claimed or claimed == {digest}
    return sha256(found.location.storage, name, nbytes) == digest


def _taken(found: Survey, target: str, options: CopyOptions) -> OutputExistsError | None:
    """Return the error that something is at the target, None if a copy can go there.

    Raises:
        StorageError, UnsupportedError: no copy can, whatever is there.
    """
    sources = (found.path, *options.also)
    needed = found.nbytes
    if not is_url(target):  # what an unfinished copy has taken is used
        temporary, _ = unfinished_at(target.rstrip("/") or target)
        there = walk(LocalStorage(temporary)) if os.path.isdir(temporary) else []
        needed = max(needed - sum(entry.nbytes for entry in there), 0)
    try:
        require_place(target, False, needed, options.overwrite, sources)
    except OutputExistsError as error:
        inside = join(target.rstrip("/"), base_name(found.path))
        hint = f"To copy it into that folder: {inside}" if base_name(target) != base_name(found.path) else ""
        return OutputExistsError(error.message, next_step=hint or error.next_step)
    return None


def _is_begun(target: str) -> bool:
    try:
        location = locate(target)
    except CheckpointNotFoundError:
        return False
    return location.file is None and location.storage.size(STORE_NAME) is not None


class _Copying:
    """One copy of one step."""

    def __init__(self, found: Survey, target: str, options: CopyOptions, watch: CopyWatch) -> None:
        self._found, self._target, self._options, self._watch = found, target, options, watch
        self._again = Retrying(watch.say or (lambda text: None))
        remote = is_url(target) or is_url(found.path)
        self._threads = n_threads(options.threads, remote)
        self._part = part_of([entry.nbytes for entry in found.listing.values()], remote)
        self._findings: list[Finding] = []
        self._moved: dict[str, Moved] = {}
        self._kept_nbytes = 0
        self._lock = threading.Lock()

    def planned(self, result: StepCopy) -> StepCopy:
        """Return the plan."""
        return result._replace(state="planned", memory_nbytes=self._memory)

    @property
    def _memory(self) -> int:
        return memory_nbytes(self._threads, self._part, is_url(self._target))

    def run(self, result: StepCopy) -> StepCopy:
        """Copy; errors as of `copy_step`."""
        found = self._found
        place = place_at(self._target)
        try:
            source = found.path if is_url(found.path) else os.path.abspath(found.path)
            self._again(place.path, lambda: place.begin(source, self._names))
            self._go_on(place)
            try:
                with Mover(
                    found.location.storage, self._threads, self._part, self._again, self._watch.progress
                ) as mover:
                    self._move_all(mover, place)
                self._publish(place)
            except (ItemError, UnsafePickleError):
                place.discard()
                raise
            except StorageError as error:
                with suppress(StorageError):
                    place.journal.save()
                if error.gone:  # a file that is written anew is empty at first
                    self._again(found.path, found.require_unchanged)
                raise
        finally:
            place.journal.close()
        return result._replace(
            state="copied",
            kept_nbytes=self._kept_nbytes,
            n_checked=sum(moved.n_records for moved in self._moved.values()),
            n_claimed=len(self._found.claims.keys() & self._moved.keys()),
            retries=self._again.count,
            memory_nbytes=self._memory,
        )

    @property
    def _names(self) -> set[str]:
        return {*self._found.files, self._options.marker}

    def _go_on(self, place: CopyPlace) -> None:
        """Find what an earlier run copied, and say how much there is to do.

        What makes a copy look complete goes if it, or anything else before it, has to be copied anew.
        """
        found = self._found
        last, n_before = set(found.last), len(found.first)
        for name in found.files:
            is_last = name in last
            kept = None if is_last and len(self._moved) < n_before else place.kept(name, found.listing[name])
            if kept and found.sha256_claims(name) <= {kept.sha256}:
                self._moved[name] = kept
                self._kept_nbytes += kept.nbytes
            elif is_last:
                self._delete(place, name)
        self._delete(place, self._options.marker)
        if self._watch.expect:
            self._watch.expect(self._found.nbytes - self._kept_nbytes)

    def _delete(self, place: CopyPlace, name: str) -> None:
        self._again(name, lambda: place.storage.delete(name))

    def _move_all(self, mover: Mover, place: CopyPlace) -> None:
        """Copy what is not there; the files that make it look complete only when all is known to be sound."""
        found = self._found
        mover.all(
            [name for name in found.first if name not in self._moved], lambda name: self._move(mover, place, name)
        )
        for name in found.last:
            passing = self._passing(name)
            mover.look_only(name, found.listing[name].nbytes, passing)
            passing.sha256()
            self._note(passing.findings)
        self._require_sound()
        self._again(found.path, found.require_unchanged)
        self._again(place.path, lambda: place.require_all(self._moved))
        for name in found.last:
            if name not in self._moved:
                self._move(mover, place, name)
        self._require_sound()
        self._again(found.path, found.require_unchanged)

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
                self._moved[name] = moved

    def _passing(self, name: str) -> PassingFile:
        found = self._found
        held, claims = found.held.get(name, ()), found.claims.get(name, ())
        return PassingFile(found.location.storage, name, found.listing[name].nbytes, held, claims)

    def _note(self, findings: Iterable[Finding]) -> None:
        with self._lock:
            self._findings += findings

    def _require_sound(self) -> None:
        wrong = errors(self._findings)
        if wrong:
            self._again(self._found.path, self._found.require_unchanged)  # a save into the same place looks like damage
            raise refusal(self._found.path, wrong, State(state_of(wrong)))

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
