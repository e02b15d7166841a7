"""A process beside each rank that writes what the rank has staged: torch's own, of `AsyncCheckpointerType.PROCESS`.

It only writes. The rank that started it waits for it in its background thread, and marks the step when all are done.

Source: torch 2.13, distributed/checkpoint/_async_process_executor.py.
"""

from __future__ import annotations

import atexit
import pickle
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from typing import Any

import torch
import torch.distributed as dist

from dcptool.errors import TrainingError, UnsupportedError

try:
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess, _ProcessGroupInitInfo
except ImportError:
    _AsyncCheckpointProcess = None

_PATIENCE_SECONDS = 1.0
"""For a process to be gone after it has hung up."""


def require_picklable(tree: dict[str, Any]) -> None:
    """Pickle a state but its tensors: what only fails as it is sent would leave the other ranks' processes waiting.

    Raises:
        Exception: as pickle does.
    """
    pickle.dumps(_without_tensors(tree))


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if type(value) is dict:
        return {key: _without_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(part) for part in value]
    return value


def wants_process(kind: Any) -> bool:
    """Tell whether saves in the background are to be written by another process.

    Args:
        kind: torch's `AsyncCheckpointerType`, or its value, "thread" or "process".

    Raises:
        ValueError: it is neither.
        UnsupportedError: that cannot be done here.
    """
    value = getattr(kind, "value", kind)
    if value not in ("thread", "process"):
        raise ValueError(f"async_checkpointer_type= is 'thread' or 'process', not {kind!r}")
    if value == "process" and _AsyncCheckpointProcess is None:
        raise UnsupportedError(f"torch {torch.__version__} has no process that saves: leave async_checkpointer_type")
    if value == "process" and not (dist.is_available() and dist.is_initialized()):
        raise UnsupportedError(
            "torch's process that saves needs a process group",
            next_step="Start the job with torchrun and call init_process_group first, or leave async_checkpointer_type",
        )
    return bool(value == "process")


class SavingProcess:
    """The process beside one rank: started by the first save, and anew after one in which it ended.

    Args:
        ignored: signals that it does not see. What tells the job to stop goes to all its processes, and the save that
            is on its way then must finish.
    """

    def __init__(self, ignored: Sequence[signal.Signals]) -> None:
        self._ignored = tuple(ignored)
        self._process: Any = None
        self._sound = True

    def save(self, tree: dict[str, Any], writer: Any, planner: Any, group: Any) -> None:
        """Let it write a state that is staged in shared memory, and wait until it has; on all ranks of a group.

        Raises:
            CheckpointException: a rank could not write it.
            TrainingError: the process has ended.
        """
        try:
            if self._process is None:
                self._start(group)
            self._process.save(tree, storage_writer=writer, planner=planner)
        except Exception as error:  # what a writer or planner raises is a CheckpointException, which is none
            self._sound = False
            if self._process is not None:
                self._process._save_process.join(_PATIENCE_SECONDS)
                if self._process._save_process.is_alive():
                    raise
            raise TrainingError(
                f"the process that writes for this rank has ended ({error})",
                next_step="What it said is in the job's log. It imports the script, which must train only below"
                " `if __name__ == '__main__':`, and the classes of the state.",
            ) from error

    def is_sound(self) -> bool:
        """Tell whether it can take another save, with those of the other ranks; or has not been started yet."""
        return self._sound

    def close(self) -> None:
        """End it, at once; the next save starts another."""
        atexit.unregister(self.close)
        if self._process is not None:
            self._process._save_process.kill()
            self._process._save_process.join()
            self._process = None
        self._sound = True

    def _start(self, group: Any) -> None:
        info = _ProcessGroupInitInfo(group)
        resource_tracker.ensure_running()  # else starting the process does it, and lets these signals through again
        atexit.register(self.close)  # Python waits for it as it ends, and it for Python
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._ignored)
        try:
            self._process = _AsyncCheckpointProcess(pg_init_info=info)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
