"""Saves that survive a crash and the way back, for the loop of a training job.

Decides when what is done, and that all ranks do the same; how is in `saving`, `restoring`, `ranks`.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from dcptool.errors import TrainingError
from dcptool.storage import is_url, join
from dcptool.training.lease import RunLease
from dcptool.training.loading import require_restorable
from dcptool.training.objects import ObjectLoader
from dcptool.training.rank_local import Flat, RankLocal
from dcptool.training.ranks import Ranks
from dcptool.training.restoring import Job, Restored, is_step_of, load_model_only, restore_chosen, restore_newest
from dcptool.training.saving import Keeping, Times, clear_unfinished, make_room, mark_saved, step_name, tidy
from dcptool.training.staging import Stager
from dcptool.training.state import UNSTARTED, JobState, TrainState, as_state
from dcptool.training.tree import flatten
from dcptool.training.writing import write

logger = logging.getLogger("dcptool.training")


class _Saving(NamedTuple):
    """A state that is being saved.

    Attributes:
        state: whose it is.
        own: it.
        written: what this rank writes of it.
        is_new: whether names or kinds are not those of the save before: then it is seen whether it could be restored.
    """

    state: JobState
    own: Flat
    written: Flat
    is_new: bool


class CheckpointManager:
    """Saves, marks, prunes and restores the checkpoints of one run directory.

    Every rank makes one, after `init_process_group`, and calls the same methods in the same order; without a process
    group it serves a job of one process. A step is saved to `<root>/step_<n>` by torch's own writer. Its marker
    `_COMPLETE` is written when the data of all ranks and the metadata are, and only then older steps are deleted, so
    whatever kills the job, `restore` finds the last step that has one. What fails on one rank, all ranks raise.

    From its first save on it holds the lease of the run directory, the file `_LEASE`: another manager's save is refused
    then. A lease whose process has ended, or that was not renewed for `lease_seconds`, is taken over, and the manager
    it was taken from saves no more.

    Args:
        root: the run directory: a path all ranks share, or an fsspec URL; made if it is not there.
        keep: how many of the newest complete steps are kept; None keeps all.
        archive_every: steps whose number is a multiple of this are kept too.
        stop_on: signals that make `should_stop` true; the handlers there were before are called too.
        timeout: how long a rank waits for the others, None for torch's half hour.
        lease_seconds: how long a lease lasts that is not renewed (it is, six times in that time), and the longest that
            the first save waits for another job to end.
        adopt: whether whole steps that no manager saved are deleted like others; without it they stay.
        safe_globals: classes and functions that objects in checkpoints may name besides those of plain values, tensors
            and arrays; None for any that does nothing but make an object.

    Example:
        >>> with CheckpointManager("run", keep=3) as manager:
        ...     restored = manager.restore(state)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        keep: int | None = 3,
        archive_every: int | None = None,
        *,
        stop_on: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        timeout: timedelta | None = None,
        lease_seconds: float = 60.0,
        adopt: bool = False,
        safe_globals: Sequence[Any] | None = None,
    ) -> None:
        if (keep is not None and keep < 1) or (archive_every is not None and archive_every < 1):
            raise ValueError("keep and archive_every must be at least 1")
        if not 0 < lease_seconds < math.inf:
            raise ValueError("lease_seconds must be more than 0")
        path = os.fspath(root)
        self.root = path if is_url(path) else os.path.abspath(path.removeprefix("file://"))
        self._keeping = Keeping(keep, archive_every, adopt, set())
        self._ranks = Ranks(timeout)
        self._upload_ranks = Ranks(timeout)  # of the background thread: two threads must not share a group
        self._stager = Stager()
        self._lease = RunLease(self.root, lease_seconds)
        self._left_over = True  # there may be something of saves that did not finish
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcptool-save")
        self._uploading: Future[str] | None = None
        self._resumed_from: int | None = None
        self._signalled = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._closed = False
        self._rank_local = RankLocal()
        self._objects = ObjectLoader(safe_globals)
        self._listen(stop_on)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception without waiting for the other ranks, which may not have raised one."""
        if kind is None:
            self.close()
        else:
            self._release()

    def save(self, step: int, state: TrainState | dict[str, Any]) -> str:
        """Save a step and return its path, once it is marked.

        Args:
            step: its number, the same on all ranks.
            state: a TrainState; or a dict as `dcp.save` takes it, of things with `state_dict` and of plain values.

        Raises:
            TrainingError: it was not saved, or the save before it was not; on every rank, with what went wrong where.
        """
        began = time.perf_counter()
        path, job_state = self._begin(step, state)
        saving = self._state_of(job_state, path)

        def times() -> Times:
            seconds = time.perf_counter() - began
            return Times(seconds, seconds)

        self._write(path, step, saving, self._ranks, times)
        return path

    def async_save(self, step: int, state: TrainState | dict[str, Any]) -> Future[str]:
        """Save a step in the background, once the save before it is finished.

        Where torch has `DefaultStager`, the state is copied in the background too, and the next `optimizer.step()`
        waits until that is done; whatever else changes weights or buffers must call `wait_staged` first. With an older
        torch it is copied before this returns.

        Returns:
            A future of the path: done when the step is marked and older ones are deleted. It need not be waited for:
            what fails in the background is raised by the next call of any method, and by `close`.

        Raises:
            TrainingError: as `save`, and if the save before this one failed.
        """
        began = time.perf_counter()
        path, job_state = self._begin(step, state)
        saving = self._state_of(job_state, path)
        try:
            values, paths = saving.written
            staged = self._ranks.agree(
                f"{path} was not saved", lambda: self._stager.stage(values, job_state.optimizers)
            )
        except BaseException:
            self._stager.done()
            raise
        self._stager.blocked_seconds = time.perf_counter() - began

        def upload() -> str:
            ranks = self._upload_ranks
            copied = saving._replace(written=Flat(ranks.agree(f"{path} was not saved", staged), paths))
            self._write(
                path, step, copied, ranks, lambda: Times(time.perf_counter() - began, self._stager.blocked_seconds)
            )
            return path

        self._uploading = self._thread.submit(upload)
        return self._uploading

    def wait_staged(self) -> None:
        """Wait until the state that `async_save` was given has been copied and may be changed."""
        self._stager.wait()

    def wait(self) -> None:
        """Wait until the save in the background is finished and marked.

        Raises:
            TrainingError: it failed, on whichever rank.
        """
        self._require_open()
        self._ranks.agree("the last save failed", self._finish_upload)

    def restore(
        self,
        state: TrainState | dict[str, Any],
        *,
        strict: bool = True,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Restored | None:
        """Load the newest complete checkpoint in place, whatever the number of ranks that saved it.

        Names, kinds, shapes and dtypes are compared first. A checkpoint that does not fit, or turns out to be damaged
        while it is loaded, is passed over for the next older one: logged, and in `Restored.skipped`. Until one
        is loaded the optimizer is what it was. One that is named, to go back on purpose, is loaded or refused, and what
        is saved from then on is newer than every step there is.

        Args:
            state: what to load into; or a dict of names, of which those with `load_state_dict` take their state over.
            strict: without it, entries that are only here or only there are left alone, and dtypes are cast; a
                checkpoint that has no entry of the model is still refused.
            step: number of the step to load, of this run.
            path: path or URL of the checkpoint to load, of any run.

        Returns:
            What was restored; None only if none was named and no checkpoint was ever completed here.

        Raises:
            TrainingError: there are checkpoints, and none could be restored, or the newest could not be read (no
                permission, a store that does not answer), which says nothing against it.
        """
        self.wait()
        chosen_state = self._ranks.agree("nothing was restored", lambda: as_state(state))
        if step is not None and path is not None:
            raise ValueError("name a step of this run or a path, not both")
        chosen = step if path is None else os.fspath(path)
        job = Job(self._ranks, self._objects, strict)
        if chosen is None:
            restored = restore_newest(self.root, chosen_state, job)
        else:
            restored = restore_chosen(self.root, chosen, chosen_state, job)
        self._resumed_from = restored.step if restored and is_step_of(self.root, restored.path) else None
        return restored

    def warm_start(self, state: TrainState, path: str | os.PathLike[str]) -> str:
        """Load the weights of the model alone, from a checkpoint or the newest complete one of another run.

        Returns:
            The path of the checkpoint.

        Raises:
            TrainingError: there is none, it does not fit, or it cannot be loaded.
        """
        self.wait()
        self._ranks.agree("nothing was loaded", lambda: _require_model(state))
        return load_model_only(os.fspath(path), state, Job(self._ranks, self._objects))

    def should_stop(self) -> bool:
        """Tell whether any rank has been told to stop; call it on all ranks after the same steps.

        Raises:
            TrainingError: the save in the background has failed, or another job has taken over the run directory.
        """
        self._require_open()
        save = self._uploading
        failed = save is not None and save.done() and save.exception() is not None
        told = self._ranks.gather((self._signalled, failed, self._lease.lost))
        if any(failed for _, failed, _ in told):
            self.wait()
        lost = next((lost for _, _, lost in told if lost), "")
        if lost:
            raise TrainingError(lost)
        return any(stop for stop, _, _ in told)

    def close(self) -> None:
        """Finish the save in the background, give everything back; can be called again.

        Raises:
            TrainingError: that save failed.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._release()
            self._stager.close()
            for ranks in (self._ranks, self._upload_ranks):
                ranks.close()

    def _begin(self, step: int, given: TrainState | dict[str, Any]) -> tuple[str, JobState]:
        """Finish the save before, and make room for a step; return its path, and what is saved."""
        self.wait()
        wanted = self._ranks.gather((step, self.root))
        if type(step) is not int or step < 0 or len(set(wanted)) != 1:
            said = ", ".join(f"rank {rank}: step {step} in {root}" for rank, (step, root) in enumerate(wanted))
            raise TrainingError(f"all ranks must save one step, a number from 0 on, in one directory; {said}")
        path = join(self.root, step_name(step))
        state = self._ranks.agree(f"{path} was not saved", lambda: as_state(given))

        def prepare() -> str:
            self._lease.hold(lambda: clear_unfinished(self.root))
            if self._left_over:
                clear_unfinished(self.root)
            self._left_over = True  # until it is marked
            make_room(self.root, step, self._lease.id)
            return self._lease.id

        self._lease.join(self._ranks.on_first(f"{path} was not saved", prepare))
        return path, state

    def _state_of(self, state: JobState, path: str) -> _Saving:
        """Return the state to save: what is not the same on all ranks, each rank saves under a name of its own."""
        what = f"{path} was not saved"
        own = self._ranks.agree(what, lambda: Flat(*flatten(state.tree())))
        unstarted = own.values.get(UNSTARTED, ())
        written = self._rank_local.arrange(own, state.per_rank, unstarted, self._ranks, what)
        return _Saving(state, own, written, self._rank_local.changed)

    def _write(self, path: str, step: int, saving: _Saving, ranks: Ranks, times: Callable[[], Times]) -> None:
        """Write a step, mark it once all ranks have, and delete older ones; in whichever thread."""
        values, paths = saving.written
        ranks.agree(f"{path} was not saved", lambda: write(values, paths, path, ranks.group, self._lease.confirm))
        if saving.is_new:
            require_restorable(path, saving.own, saving.state, self._objects, ranks)

        def finish() -> None:
            mark_saved(path, step, ranks.world_size, times(), self._resumed_from, self._lease.confirm)
            self._left_over = False
            logger.info("saved %s", path)
            tidy(self.root, step, self._keeping)

        ranks.on_first(f"{path} was not marked", finish)

    def _finish_upload(self) -> None:
        """Wait for the thread in the background; nothing is on its way afterwards, also if it failed."""
        uploading, self._uploading = self._uploading, None
        if uploading is None:
            return
        try:
            uploading.result()
        finally:
            self._stager.done()

    def _listen(self, signals: tuple[signal.Signals, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            if signals:
                logger.warning("no signal is listened to: the manager was not made in the main thread")
            return
        for number in signals:
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True  # no lock: the handler may interrupt itself
        before = self._handlers.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _release(self) -> None:
        """Give signals, thread and memory back without waiting."""
        self._closed = True
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._handlers = {}
        self._thread.shutdown(wait=False)
        if self._uploading is None:
            self._lease.release()
        else:  # a save that is on its way may still be marked
            self._uploading.add_done_callback(lambda _: self._lease.release())

    def _require_open(self) -> None:
        if self._closed:
            raise TrainingError("the manager is closed")


def _require_model(state: object) -> None:
    """Refuse what has no model of its own.

    Raises:
        TypeError: says what to pass.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"pass a TrainState(model, optimizer, …), not a {type(state).__name__}")
