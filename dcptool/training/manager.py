"""Saves that survive a crash and the way back, for the loop of a training job.

Decides when what is done, and that all ranks do the same; how is in `saving`, `restoring`, `ranks`.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any

from dcptool.errors import TrainingError
from dcptool.storage import is_url, join, remember_options
from dcptool.training.archiving import Archiver
from dcptool.training.events import OnSave, SaveResult, announce
from dcptool.training.lease import LeaseWatch, RunLease
from dcptool.training.loading import Saving, require_restorable
from dcptool.training.objects import ObjectLoader
from dcptool.training.options import Choice, Choices
from dcptool.training.processes import SavingProcess, wants_process
from dcptool.training.rank_local import Flat, RankLocal, Share
from dcptool.training.ranks import Ranks
from dcptool.training.restoring import Job, Restored, is_step_of, load_model_only, restore_chosen, restore_newest
from dcptool.training.saving import Keeping, Times, clear_unfinished, make_room, mark_saved, step_name, tidy
from dcptool.training.signals import StopSignals
from dcptool.training.staging import Stager, require_stageable
from dcptool.training.state import UNSTARTED, JobState, TrainState, as_state, require_model
from dcptool.training.stopping import LastSave, seconds_of
from dcptool.training.tree import flatten
from dcptool.training.writing import Writing, threads_while_waiting

logger = logging.getLogger("dcptool.training")


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
        archive_every: steps whose number is a multiple of this, the milestones, are kept too.
        archive: a folder, path or URL, that milestones are copied into in the background; they are deleted here once
            they are proven to be there, unless something else keeps them.
        stop_on: signals that make `should_stop` true; the handlers there were before are called too.
        stop_within: seconds, or a timedelta, after the first of them in which the job must have ended: the save that
            comes then is its last, is not made in the background, and is left out if it would come too late.
        on_save: called with a `SaveResult` when a step is marked, on rank 0, after `async_save` by its thread. It must
            use no collectives; what it raises is logged, and the step stays.
        writer: options of torch's `FileSystemWriter` (of `FsspecWriter` for a URL), such as `{"thread_count": 2}`; or a
            function that makes a new writer for a path.
        planner: options of torch's `DefaultSavePlanner`; or a function that makes a new planner.
        stager: options of torch's `StagingOptions`; or a function that makes one of torch's `AsyncStager`s.
        async_checkpointer_type: what writes for `async_save`: "thread", "process" or torch's `AsyncCheckpointerType`.
        storage_options: what the fsspec file system of a URL takes; this process then uses them for all of the run.
        process_group: the manager is made, and called, on the ranks of this group only; they hold all of the state.
            Whatever its backend is, gloo groups of the same ranks are used.
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
        archive: str | os.PathLike[str] | None = None,
        stop_on: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        stop_within: float | timedelta | None = None,
        on_save: OnSave | None = None,
        writer: Choice = None,
        planner: Choice = None,
        stager: Choice = None,
        async_checkpointer_type: Any = "thread",
        storage_options: Mapping[str, Any] | None = None,
        process_group: Any = None,
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
        self._lease = RunLease(self.root, lease_seconds)
        self._archiver = Archiver(self.root, archive, self._keeping, self._lease)
        if storage_options is not None and is_url(self.root):
            remember_options(self.root, storage_options)
        choices = Choices(writer, planner, storage_options)
        choices.check(self.root)
        apart = wants_process(async_checkpointer_type)
        self._stager = Stager(stager, shared=apart)
        within = seconds_of(stop_within)
        self._ranks = Ranks(timeout, process_group)
        self._upload_ranks = Ranks(timeout, process_group)  # of the thread: two threads must not share a group
        self._writing = Writing(choices, SavingProcess(stop_on) if apart else None)
        self._on_save = on_save
        self._left_over = True  # there may be something of saves that did not finish
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcptool-save")
        self._uploading: Future[str] | None = None
        self._resumed_from: int | None = None
        self._closed = False
        self._rank_local = RankLocal()
        self._objects = ObjectLoader(safe_globals)
        self._last_save = LastSave(self._ranks)
        self._signals = StopSignals(stop_on, within)

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

        With `stop_within`, after `should_stop` was true: if a save is still on its way and there is no time for another
        one after it, this one is left out, with a warning, and the path is that of the save that was finished.

        Args:
            step: its number, the same on all ranks.
            state: a TrainState; or a dict as `dcp.save` takes it, of things with `state_dict` and of plain values.

        Raises:
            TrainingError: it was not saved, or the save before it was not; on every rank, with what went wrong where.
        """
        began = time.perf_counter()
        if (instead := self._last_save.finished_instead(step, self._uploading, self.wait)) is not None:
            return instead
        path, job_state = self._begin(step, state)
        self._write(path, step, self._state_of(job_state, path), began)
        return path

    def async_save(self, step: int, state: TrainState | dict[str, Any]) -> Future[str]:
        """Save a step in the background, once the save before it is finished.

        Where torch has `DefaultStager`, the state is copied in the background too, and the next `optimizer.step()`
        waits until that is done; whatever else changes weights or buffers must call `wait_staged` first. With an older
        torch it is copied before this returns. A last save, with `stop_within`, is made as `save` makes it.

        Returns:
            A future of the path: done when the step is marked and older ones are deleted. It need not be waited for:
            what fails in the background is raised by the next call of any method, and by `close`.

        Raises:
            TrainingError: as `save`, and if the save before this one failed.
        """
        if self._last_save.is_due:
            done: Future[str] = Future()
            done.set_result(self.save(step, state))
            return done
        began = time.perf_counter()
        path, job_state = self._begin(step, state)
        saving = self._state_of(job_state, path, require_stageable)
        values, paths = saving.written
        staged = self._stager.begin(values, job_state.optimizers, self._ranks, f"{path} was not saved")
        self._stager.blocked_seconds = time.perf_counter() - began

        def upload() -> str:
            copied = Flat(self._upload_ranks.agree(f"{path} was not saved", staged), paths)
            self._write(path, step, saving._replace(written=copied), began, in_background=True)
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
        self._ranks.agree("nothing was loaded", lambda: require_model(state))
        return load_model_only(os.fspath(path), state, Job(self._ranks, self._objects))

    def should_stop(self) -> bool:
        """Tell whether any rank has been told to stop; call it on all ranks after the same steps.

        Raises:
            TrainingError: the save in the background has failed, or another job has taken over the run directory.
        """
        self._require_open()
        save = self._uploading
        failed = save is not None and save.done() and save.exception() is not None
        told = self._ranks.gather((self._signals.told, failed, self._lease.lost, self._signals.seconds_left()))
        self._last_save.is_in([left for *_, left in told if left is not None])
        if any(failed for _, failed, *_ in told) and not self._last_save.is_due:
            self.wait()
        lost = next((lost for _, _, lost, _ in told if lost), "")
        if lost:
            raise TrainingError(lost)
        return any(stop for stop, *_ in told)

    def close(self) -> None:
        """Finish the save in the background and what goes to the archive, give everything back; can be called again.

        Raises:
            TrainingError: that save failed.
        """
        if self._closed:
            return
        try:
            self.wait()
            self._archiver.finish(self._signals)
        finally:
            self._release()
            self._stager.close()
            self._writing.close()
            for ranks in (self._ranks, self._upload_ranks):
                ranks.close()

    def _begin(self, step: int, given: TrainState | dict[str, Any]) -> tuple[str, JobState]:
        """Finish the save before, and make room for a step; return its path, and what is saved."""
        self.wait()
        path = join(self.root, step_name(step) if type(step) is int else str(step))
        states: list[JobState] = []

        def given_here() -> tuple[int, str]:
            states.append(as_state(given))
            return step, self.root

        wanted = self._ranks.share(f"{path} was not saved", given_here)
        if type(step) is not int or step < 0 or len(set(wanted)) != 1:
            said = ", ".join(f"rank {rank}: step {step} in {root}" for rank, (step, root) in enumerate(wanted))
            raise TrainingError(f"all ranks must save one step, a number from 0 on, in one directory; {said}")

        def prepare() -> str:
            self._lease.hold(lambda: clear_unfinished(self.root))
            if self._left_over:
                clear_unfinished(self.root)
            self._left_over = True  # until it is marked
            with self._archiver.deletes_nothing():
                make_room(self.root, step, self._lease.id)
            return self._lease.id

        self._lease.join(self._ranks.on_first(f"{path} was not saved", prepare))
        return path, states[0]

    def _state_of(
        self, state: JobState, path: str, require: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> Saving:
        """Return the state to save: what is not the same on all ranks, each rank saves under a name of its own.

        Refused on all ranks if `require` refuses it on one.
        """

        def share() -> Share:
            flat = Flat(*flatten(state.tree()))
            require(flat.values)
            return Share.of(flat, state.per_rank, flat.values.get(UNSTARTED, ()))

        whole, written = self._rank_local.arrange(share, self._ranks, f"{path} was not saved")
        return Saving(state, whole.flat, written, self._rank_local.changed)

    def _write(self, path: str, step: int, saving: Saving, began: float, *, in_background: bool = False) -> None:
        """Write a step, mark it once all ranks have, and delete older ones; in whichever thread."""
        ranks = self._upload_ranks if in_background else self._ranks
        apart = in_background and self._writing.process is not None
        watch = LeaseWatch(self.root, self._lease.id, self._writing.choices.storage_options)
        begun = time.perf_counter()
        n_threads = 1 if in_background else threads_while_waiting(saving.written)
        self._writing.write(saving.written, path, ranks, watch if apart else self._lease.confirm, apart, n_threads)
        seconds = time.perf_counter() - began
        told = ranks.gather((seconds, self._stager.blocked_seconds if in_background else seconds))
        blocked = tuple(blocked for _, blocked in told)
        times = Times(max(seconds for seconds, _ in told), max(blocked))
        if saving.is_new:
            require_restorable(path, saving.own, saving.state, self._objects, ranks)

        def finish() -> int:
            marker = mark_saved(path, step, ranks.world_size, times, self._resumed_from, self._lease.confirm)
            self._left_over = False
            tidy(self.root, step, self._keeping)
            self._archiver.wake(step)
            return sum(marker.files.values())

        nbytes = ranks.on_first(f"{path} was not marked", finish)
        self._last_save.took(time.perf_counter() - begun)
        if ranks.rank == 0:
            announce(SaveResult(step, path, nbytes, times.save_seconds, blocked), self._on_save)

    def _finish_upload(self) -> None:
        """Wait for the thread in the background; nothing is on its way afterwards, also if it failed."""
        uploading, self._uploading = self._uploading, None
        if uploading is None:
            return
        try:
            uploading.result()
        finally:
            self._stager.done()

    def _release(self) -> None:
        """Give signals, thread and memory back without waiting."""
        self._closed = True
        self._archiver.stop()
        self._signals.close()
        self._thread.shutdown(wait=False)
        if self._uploading is None:
            self._lease.release()
        else:  # a save that is on its way may still be marked
            self._uploading.add_done_callback(lambda _: self._lease.release())

    def _require_open(self) -> None:
        if self._closed:
            raise TrainingError("the manager is closed")
