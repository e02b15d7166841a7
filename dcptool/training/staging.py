"""A copy of the state in the memory of the host, made while training goes on, or before it does where torch is old.

Source: torch 2.13, distributed/checkpoint/staging.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.optim import Optimizer

from dcptool.errors import UnsupportedError
from dcptool.training.options import Choice, require_choice
from dcptool.training.ranks import Ranks

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError:
    DefaultStager = StagingOptions = None

logger = logging.getLogger("dcptool.training")
Tree = dict[str, Any]


class Stager:
    """Copies one state after the other; the optimizers it belongs to wait with their next step until it is copied.

    `blocked_seconds` adds up how long they, and whoever called, waited for the last one.

    Args:
        choice: options of torch's `StagingOptions`, or a function that makes one of torch's `AsyncStager`s.
        shared: copy to memory that another process can use.

    Raises:
        TypeError, ValueError: these options are not possible.
        UnsupportedError: this torch has no options.
    """

    def __init__(self, choice: Choice = None, shared: bool = False) -> None:
        self.blocked_seconds = 0.0
        self._choice, self._shared = choice, shared
        self._stager: Any = None
        self._copying: Future[Tree] | None = None
        self._hooks: list[Any] = []
        self._said = self._failed = False
        if not callable(choice) and (choice is not None or StagingOptions is not None):
            _options(choice, shared)  # only to see whether they are possible

    def begin(self, tree: Tree, optimizers: Sequence[Optimizer], ranks: Ranks, what: str) -> Callable[[], Tree]:
        """Begin to copy a state on all ranks, and return what waits for this rank's copy.

        torch's own stager, which copies in a thread, is only started by whoever calls what is returned, another thread.
        It holds the GIL much of the time, and this one would be long about each of the few things it still has to do.

        Args:
            tree: the state; copied before this returns if there are no optimizers, for nothing tells when it changes.
            optimizers: wait with their next step.
            ranks: all ranks.
            what: is tried, for errors.

        Raises:
            TrainingError: it failed on some rank; with torch's own stager that is raised by what is returned.
        """
        try:
            if optimizers and self._copies_in_a_thread:
                return self._later(tree, optimizers)
            else:
                staged = ranks.agree(what, lambda: self.stage(tree, optimizers))
            if not optimizers:
                self.wait()
        except BaseException:
            self.done()
            raise
        return staged

    @property
    def _copies_in_a_thread(self) -> bool:
        """Whether it is torch's own stager, and copies in a thread of its own."""
        if DefaultStager is None or callable(self._choice):
            return False
        return bool((self._choice or {}).get("use_async_staging", True))

    def _later(self, tree: Tree, optimizers: Sequence[Optimizer]) -> Callable[[], Tree]:
        """Have the optimizers wait for a copy, and return what makes it."""
        copied: Future[Tree] = Future()
        self._hold(copied, optimizers)

        def copy() -> Tree:
            try:
                found = self._finished(self._started(tree))
            except BaseException as error:
                copied.set_exception(error)
                raise
            copied.set_result(found)
            return found

        return copy

    def _hold(self, copying: Future[Tree], optimizers: Sequence[Optimizer]) -> None:
        self._copying = copying
        self._hooks = [optimizer.register_step_pre_hook(lambda *_: self.wait()) for optimizer in optimizers]

    def stage(self, tree: Tree, optimizers: Sequence[Optimizer]) -> Callable[[], Tree]:
        """Begin to copy a state, and return what waits for the copy; where torch cannot, copy it now.

        What it holds must have passed `require_stageable`.
        """
        if DefaultStager is None and not callable(self._choice):
            if not self._said:
                logger.warning(
                    "torch %s has no DefaultStager: states are copied before training goes on", torch.__version__
                )
                self._said = True
            copied = _copied(tree)
            return lambda: copied
        staged = self._started(tree)
        if isinstance(staged, Future):
            self._hold(staged, optimizers)
        return lambda: self._finished(staged)

    def _started(self, tree: Tree) -> Tree | Future[Tree]:
        """Have a stager copy a state; the copy, or a future of it."""
        if self._failed:
            self._drop()  # what it keeps from one copy to the next may be why
        self._failed = True  # until it is copied
        if self._stager is None:
            made = self._choice() if callable(self._choice) else DefaultStager(_options(self._choice, self._shared))
            self._stager = made
        staged: Tree | Future[Tree] = self._stager.stage(tree)
        if not isinstance(staged, Future) and getattr(self._stager, "should_synchronize_after_execute", False):
            self._stager.synchronize_staging()
        return staged

    def _finished(self, staged: Tree | Future[Tree]) -> Tree:
        found = staged.result() if isinstance(staged, Future) else staged
        self._failed = False
        return found

    def wait(self) -> None:
        """Wait until the state is copied; if that failed, the save says so."""
        if self._copying is None:
            return
        began = time.perf_counter()
        self._copying.exception()
        self.blocked_seconds += time.perf_counter() - began
        self.done()

    def done(self) -> None:
        """Let the optimizers step freely."""
        self._copying = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """Give the memory back."""
        self.done()
        self._drop()

    def _drop(self) -> None:
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _options(choice: Choice, shared: bool) -> Any:
    """Return how to copy here; by default torch asks for pinned memory and streams, which a CPU has not."""
    if StagingOptions is None:
        raise UnsupportedError(f"torch {torch.__version__} has no StagingOptions: stager= takes a function there")
    require_choice("stager", choice, StagingOptions)
    accelerated = torch.cuda.is_available()
    options = {
        "use_pinned_memory": accelerated,
        "use_shared_memory": shared,
        "use_async_staging": True,
        "use_non_blocking_copy": accelerated,
    }
    options |= choice if isinstance(choice, Mapping) else {}
    if shared and not options["use_shared_memory"]:
        raise ValueError("another process can only write what is staged with use_shared_memory")
    if not torch.accelerator.is_available():
        for name in ("use_pinned_memory", "use_non_blocking_copy"):
            if options[name]:
                raise ValueError(f"stager={{{name!r}: True}} needs an accelerator, and this machine has none")
    return StagingOptions(**options)


def require_stageable(tree: Tree) -> None:
    """Refuse the tensors of FSDP1 without a device mesh: torch stages none of them.

    Raises:
        UnsupportedError: says what to do.
    """
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    if any(isinstance(value, ShardedTensor) for value in _leaves(tree)):
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) without device_mesh gives ShardedTensors, which torch cannot copy in the"
            " background",
            next_step="Pass it device_mesh=init_device_mesh(…), or use fully_shard; or call save, not async_save.",
        )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    else:
        yield value


def _copied(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_copied(part) for part in value]
    return value
