"""Milestones of a run go into an archive while training goes on: one thread of rank 0, one copy at a time.

Every step that is marked wakes it. What it copies is proven to be in the archive before anything is deleted here, as
`dcptool prune --archive-to` does; what it had not finished when the job ended, the next job goes on with.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from dcptool.checkpoint.steps import step_number
from dcptool.checks.check import Level
from dcptool.errors import DcptoolError, StorageError
from dcptool.ops.prune.archive import Archived, archive_steps, require_apart
from dcptool.ops.prune.delete import delete_steps
from dcptool.ops.prune.plan import Decision, PrunePlan
from dcptool.ops.prune.prune import make_plan
from dcptool.runs.activity import list_files
from dcptool.storage import DirEntry, is_url, join, locate
from dcptool.training.lease import RunLease
from dcptool.training.saving import NO_GRACE, Keeping, is_foreign, step_name, storage_of
from dcptool.training.signals import StopSignals
from dcptool.words import nbytes

logger = logging.getLogger("dcptool.training")
_THREADS = 2
"""Parts that are read, and written, at the same time: training has the machine first."""
_EXIT_SECONDS = 5.0
"""Kept of the time in which a job must end: a part of a file that is on its way is finished."""


class Archiver:
    """Copies the milestones of a run directory into an archive, and deletes here what is proven to be there.

    Does nothing without an archive, and until `wake` is called, which rank 0 does.

    Args:
        root: the run directory, a path or URL.
        archive: the folder to copy into, a path or URL; None for no archive.
        keeping: which steps are kept in the run directory.
        lease: of the run directory; without it nothing is deleted.
    """

    def __init__(self, root: str, archive: str | os.PathLike[str] | None, keeping: Keeping, lease: RunLease) -> None:
        if archive is not None and keeping.archive_every is None:
            raise ValueError("archive= is for the steps that archive_every= says")
        path = os.fspath(archive or "")
        self._archive = path if not path or is_url(path) else os.path.abspath(path.removeprefix("file://"))
        if self._archive:
            require_apart(root, self._archive)
        self._root, self._keeping, self._lease = root, keeping, lease
        self._changing = threading.Condition()  # of what follows
        self._is_running = self._is_wanted = self._is_stopped = False
        self._last = -1
        self._tries_again = True
        self._saving = threading.Lock()
        self._there: dict[str, Mapping[str, DirEntry]] = {}  # of the thread alone, as is the next one
        self._failed: set[str] = set()

    def wake(self, step: int) -> None:
        """Take note that a step was saved and marked; whatever is to be done now is done in the background."""
        if not self._archive:
            return
        with self._changing:
            self._last = step
            self._tries_again |= step % (self._keeping.archive_every or 1) == 0
            self._is_wanted = not self._is_stopped
            if self._is_wanted and not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="dcptool-archive", daemon=True).start()

    def deletes_nothing(self) -> AbstractContextManager[object]:
        """Return a context in which it deletes nothing: a step's folder is made ready for a save."""
        return self._saving

    def finish(self, signals: StopSignals) -> None:
        """Wait until all is archived that is here; once the job has been told to stop, as long as there is time.

        What is not finished then the next job goes on with.
        """
        with self._changing:
            if self._is_running:
                logger.info("waiting for milestones of %s to be copied to %s", self._root, self._archive)
            while self._is_running:
                left = signals.seconds_left() or 0.0
                if signals.told and left <= _EXIT_SECONDS:
                    break
                self._changing.wait(min(left - _EXIT_SECONDS, 0.5) if signals.told else 0.5)
        self.stop()
        with self._changing:
            self._changing.wait_for(lambda: not self._is_running, _EXIT_SECONDS)

    def stop(self) -> None:
        """Begin no more, and have what is on its way end at the next part of a file; waits for nothing."""
        with self._changing:
            self._is_stopped, self._is_wanted = True, False

    def _run(self) -> None:
        """Go on as long as something is wanted."""
        while True:
            with self._changing:
                if not self._is_wanted:
                    self._is_running = False
                    self._changing.notify_all()
                    return
                self._is_wanted = False
                if self._tries_again:
                    self._failed.clear()
                self._tries_again = False
            try:
                self._look()
            except DcptoolError as error:
                logger.warning("no milestone of %s was archived: %s", self._root, error)
            except Exception:  # nobody else would hear of it
                if not self._is_stopped:  # else the interpreter may be ending
                    logger.exception("no milestone of %s was archived", self._root)

    def _look(self) -> None:
        """Archive the milestones that are here, the one saved first first."""
        if not self._may_hold_any():
            return
        plan = self._plan()
        for decision in plan.milestones:
            if self._is_stopped:
                return
            if decision.name not in self._failed and not self._is_done(decision):
                self._archive_one(plan, decision)

    def _may_hold_any(self) -> bool:
        """Tell by the names in the run directory whether it is worth a closer look."""
        entries = storage_of(self._root).entries()
        numbers = [step_number(entry.name) for entry in entries if entry.is_dir]
        return any(number is not None and number % (self._keeping.archive_every or 1) == 0 for number in numbers)

    def _plan(self) -> PrunePlan:
        """Return what is to be archived, and what of it is not to be kept here; all other steps are kept."""
        keep, every, adopt, _ = self._keeping
        plan = make_plan(
            self._root, keep or 1, NO_GRACE, archive_every=every, archive_to=self._archive, now=time.time()
        )
        storage = storage_of(self._root)
        decisions = []
        for one in plan.decisions:
            if one.milestone and not adopt and is_foreign(storage, one):
                one = one._replace(milestone=False)
            stays = keep is None or not one.milestone or one.name == step_name(self._last)
            decisions.append(one._replace(keep=one.keep or stays))
        return plan._replace(decisions=tuple(decisions))

    def _is_done(self, decision: Decision) -> bool:
        """Tell whether nothing is to be done of a milestone, as it is in the archive and stays here."""
        if not decision.keep or decision.name not in self._there:
            return False
        return self._there[decision.name] == list_files(locate(join(self._root, decision.name)))

    def _archive_one(self, plan: PrunePlan, decision: Decision) -> None:
        files = list_files(locate(join(self._root, decision.name)))
        archived = archive_steps(
            plan._replace(decisions=(decision,)), NO_GRACE, threads=_THREADS, progress=self._going, say=self._say
        )
        done = archived.steps[0]
        if self._is_stopped and archived.left:
            logger.info("%s is not archived yet: the next job goes on with it", decision.name)
        elif archived.left:
            self._failed.add(decision.name)
            if not archived.good:
                what = "%s was not archived: %s; it stays here until it is, which is tried at the next milestone"
                logger.warning(what, decision.name, done.reason)
        else:
            self._there[decision.name] = files
            if done.state == "copied":
                rate = nbytes(int((done.nbytes - done.kept_nbytes) / max(done.seconds, 1e-9)))
                what = "archived %s: %s in %.1f s (%s/s)"
                logger.info(what, done.path, nbytes(done.nbytes), done.seconds, rate)
            self._delete(archived)

    def _delete(self, archived: Archived) -> None:
        """Delete here what has been proven to be in the archive, if it is not to be kept even now."""
        if not archived.proven:
            return
        plan = self._plan()  # anew: steps have come and gone while it was copied
        plan = plan.keeping({one.name: "" for one in plan.removed if one.name not in archived.proven})
        with self._saving:
            if self._is_stopped:  # the lease may be given back
                return
            self._lease.confirm()
            deleted = delete_steps(plan, NO_GRACE, proof=Level.METADATA, archived=archived)
        for name, reason in deleted.refused:
            logger.warning("%s is in the archive and was not deleted here: %s", name, reason)
        if deleted.names:
            logger.info("deleted %s, which is in the archive", ", ".join(deleted.names))

    def _going(self, nbytes: int) -> None:
        """Break a copy off that must not go on.

        Raises:
            StorageError: says why; what was copied is used when it goes on.
        """
        if self._is_stopped or self._lease.lost:
            raise StorageError("the manager was closed" if self._is_stopped else self._lease.lost)

    def _say(self, text: str) -> None:
        self._going(0)
        logger.info("%s", text)
