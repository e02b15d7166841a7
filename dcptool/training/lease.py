"""One job at a time saves to a run directory: taking, renewing and losing the lease that `runs.lease` reads.

All ranks of a job are one owner: rank 0 takes it and renews it, the others look whether it is still theirs. Knows no
collectives and no checkpoints.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dcptool.errors import DcptoolError, StorageError, TrainingError
from dcptool.runs.lease import NAME, Lease, mine, parse, read_lease
from dcptool.storage import FsspecStorage, LocalStorage, is_url, remember_options, storage_at
from dcptool.storage.base import translated
from dcptool.training.writing import FULL

logger = logging.getLogger("dcptool.training")
_RENEWALS = 6
"""In the time after which it lapses."""
_PAUSE_SECONDS = 0.25
"""After it was taken over: who else saw it lapse has taken it over by then too, and one of the two sees the other."""


class RunLease:
    """The lease of one manager on its run directory; `hold` is called on rank 0 only, `join` on the others.

    Attributes:
        root: the run directory, a path or URL.
        seconds: without renewal after which others take it.
        id: of the owner, "" until it is held.
        lost: who has taken it, in a sentence; "" as long as nobody has.
    """

    def __init__(self, root: str, seconds: float) -> None:
        self.root, self.seconds = root, seconds
        self.id = self.lost = ""
        self._file: _LeaseFile | _StoredLease = _StoredLease(root) if is_url(root) else _LeaseFile(root)
        self._lock = threading.Lock()  # of the thread that renews, and the one that saves
        self._held = mine("", seconds)
        self._confirmed = 0.0
        self._is_holder = False
        self._ended = threading.Event()

    def hold(self, make_space: Callable[[], None]) -> bool:
        """Take the lease, or look whether it is still ours.

        One that somebody else holds is waited for, until it has lapsed or `seconds` have gone by: what is left of a job
        that was killed may take that long to end.

        Args:
            make_space: called if the disk is too full for it, when nobody else can take it any more.

        Returns:
            Whether it was taken now.

        Raises:
            TrainingError: another job holds it; the message says which.
            StorageError: it can be neither read nor written.
        """
        if self.id:
            self.confirm()
            return False
        with self._lock:
            self._take(mine(uuid.uuid4().hex, self.seconds), make_space)
        self._ended.clear()
        threading.Thread(target=self._renew_until_it_ends, name="dcptool-lease", daemon=True).start()
        return True

    def join(self, owner: str) -> None:
        """Take note that rank 0 holds the lease under this id; nothing on rank 0 itself."""
        if not self._is_holder:
            self.id, self._confirmed = owner, _now()

    def confirm(self) -> None:
        """Look whether the lease is still ours; on rank 0 also renew it if it is time.

        Raises:
            TrainingError: somebody else has taken it over; from then on, always.
            StorageError: it cannot be read.
        """
        with self._lock:
            if self.lost:
                raise TrainingError(self.lost)
            began = _now()
            found = self._file.read()
            fresh = _now() - self._confirmed <= self.seconds
            if found is None and fresh and self._is_holder:  # somebody removed the file; nobody can have taken it over
                self._held = self._held._replace(renewed=time.time())
                self._file.create(self._held, lambda: None)
                found = self._file.read()
            if (found and found.id != self.id) or (found is None and not fresh):
                who = f"{found.holder()}, holds it now" if found else "and that job has ended"
                self.lost = f"{self.root} was taken over while this job did not renew its lease: {who}"
                raise TrainingError(self.lost, next_step="This job saves no more: end it.")
            if found and self._is_holder and time.time() - found.renewed >= self.seconds / _RENEWALS:
                self._held = self._held._replace(renewed=time.time())
                self._file.renew(self._held, found)
            self._confirmed = began  # not now: this process may have stood still since it looked

    def release(self) -> None:
        """Give the lease back, if it is ours; can be called again."""
        self._ended.set()
        with self._lock:
            if self._is_holder and not self.lost:
                with suppress(DcptoolError):
                    found = self._file.read()
                    if found and found.id == self.id:
                        self._file.remove()
            self.id, self._is_holder = "", False

    def _take(self, wanted: Lease, make_space: Callable[[], None]) -> None:
        began = changed = time.monotonic()
        before: Lease | None = None
        while True:
            found = self._file.read()
            now = time.monotonic()
            if before is not None and found != before:
                changed = now
            elif before is None and found is not None and not found.is_dead():
                logger.warning("%s: waiting for another job that saves there: %s", self.root, found.holder())
            before = found
            if found is not None and found.id == wanted.id:  # the store said no to what it had done
                break
            if found is None or found.is_dead() or _has_lapsed(found, now - changed):
                wanted = wanted._replace(since=time.time(), renewed=time.time())
                if found is None and self._file.create(wanted, make_space):
                    break
                if found is not None and self._file.replace(wanted, found, make_space):
                    logger.warning("%s: took over from %s", self.root, found.holder())
                    time.sleep(_PAUSE_SECONDS)
                    break
            elif now - began > max(self.seconds, found.seconds) * (1 + 1 / _RENEWALS):
                raise _refused(self.root, found)
            time.sleep(min(0.2, self.seconds / 20))
        there = self._file.read()
        if there is None or there.id != wanted.id:
            raise _refused(self.root, there or wanted)
        self.id, self._held, self._is_holder, self._confirmed = wanted.id, wanted, True, _now()

    def _renew_until_it_ends(self) -> None:
        said = False
        while not self._ended.wait(self.seconds / _RENEWALS):
            try:
                self.confirm()
                said = False
            except TrainingError as error:
                logger.error("%s", error)
                return
            except (DcptoolError, OSError) as error:
                if not said:
                    logger.warning("the lease of %s was not renewed: %s", self.root, error)
                said = True


class LeaseWatch:
    """Looks in another process whether a lease is still its owner's; can be pickled.

    Args:
        root: the run directory.
        owner: id of the lease.
        options: what the file system of a URL takes.
    """

    def __init__(self, root: str, owner: str, options: Mapping[str, Any] | None = None) -> None:
        self._root, self._owner, self._options = root, owner, options

    def __call__(self) -> None:
        """Look.

        Raises:
            TrainingError: somebody has taken it over, or it is gone.
            StorageError: it cannot be read.
        """
        if self._options and is_url(self._root):
            remember_options(self._root, self._options)
        found = read_lease(storage_at(self._root) if is_url(self._root) else LocalStorage(self._root))
        if found is None or found.id != self._owner:
            raise TrainingError(f"{self._root} was taken over: {found.holder() if found else 'its lease is gone'}")


def _now() -> float:
    """Return seconds that go on while this process, or the machine, is stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _has_lapsed(lease: Lease, unchanged: float) -> bool:
    """Tell whether nobody renews a lease any more.

    Args:
        lease: as it is now.
        unchanged: seconds in which we have seen no change. An old time alone may be another machine's clock.
    """
    return unchanged > lease.seconds or (lease.is_old() and unchanged > 1.5 * lease.seconds / _RENEWALS)


def _refused(root: str, lease: Lease) -> TrainingError:
    ago = max(0.0, time.time() - lease.renewed)
    message = f"another job saves to {root}: {lease.holder()}; it renewed its lease {ago:,.0f} s ago"
    return TrainingError(
        message, next_step=f"End that job (or close its manager), or save elsewhere. See {NAME} there."
    )


class _LeaseFile:
    """The lease's file in a folder. It is made anew by one only, and renewed in place: so nobody renews another's."""

    def __init__(self, root: str) -> None:
        self._root, self._path = root, os.path.join(root, NAME)

    def read(self) -> Lease | None:
        return read_lease(LocalStorage(self._root))

    def create(self, lease: Lease, make_space: Callable[[], None]) -> bool:
        with translated(self._path, StorageError, writes=True):
            os.makedirs(self._root, exist_ok=True)
            try:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                return False
            try:
                try:
                    _write(descriptor, lease)
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    make_space()
                    _write(descriptor, lease)
            except BaseException:
                with suppress(OSError):
                    os.unlink(self._path)
                raise
            finally:
                os.close(descriptor)
        return True

    def replace(self, lease: Lease, old: Lease, make_space: Callable[[], None]) -> bool:
        if self.read() != old:
            return False
        with translated(self._path, StorageError, writes=True), suppress(FileNotFoundError):  # another was faster
            os.unlink(self._path)
        return self.create(lease, make_space)

    def renew(self, lease: Lease, old: Lease) -> None:
        with translated(self._path, StorageError, writes=True):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if parse(os.pread(descriptor, len(lease.document()), 0), 0.0).id == lease.id:
                    _write(descriptor, lease)
            finally:
                os.close(descriptor)

    def remove(self) -> None:
        LocalStorage(self._root).delete(NAME)


def _write(descriptor: int, lease: Lease) -> None:
    os.pwrite(descriptor, lease.document(), 0)
    os.fsync(descriptor)  # else another machine may not see it


class _StoredLease:
    """The lease's object in a store: every write depends on what is there, where the store can do that."""

    def __init__(self, root: str) -> None:
        self._url = root

    def _at(self) -> FsspecStorage:
        return storage_at(self._url)  # anew: what the library has kept of a listing is of no use here

    def read(self) -> Lease | None:
        return read_lease(self._at())

    def create(self, lease: Lease, make_space: Callable[[], None]) -> bool:
        return self._at().write_if(NAME, lease.document(), None)

    def replace(self, lease: Lease, old: Lease, make_space: Callable[[], None]) -> bool:
        return self._at().write_if(NAME, lease.document(), old.version)

    def renew(self, lease: Lease, old: Lease) -> None:
        self._at().write_if(NAME, lease.document(), old.version)

    def remove(self) -> None:
        self._at().delete(NAME)
