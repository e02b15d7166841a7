"""A copy of the state in the memory of the host, made while training goes on, or before it does where torch is old.

Source: torch 2.13, distributed/checkpoint/staging.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.optim import Optimizer

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError:
    DefaultStager = None

logger = logging.getLogger("dcptool.training")
Tree = dict[str, Any]


class Stager:
    """Copies one state after the other; the optimizers it belongs to wait with their next step until it is copied.

    `blocked_seconds` adds up how long they, and whoever called, waited for the last one.
    """

    def __init__(self) -> None:
        self.blocked_seconds = 0.0
        self._stager: Any = None
        self._copying: Future[Tree] | None = None
        self._hooks: list[Any] = []
        self._said = False

    def stage(self, tree: Tree, optimizers: Sequence[Optimizer]) -> Callable[[], Tree]:
        """Begin to copy a state, and return what waits for the copy; where torch cannot, copy it now."""
        if DefaultStager is None:
            if not self._said:
                logger.warning(
                    "torch %s has no DefaultStager: states are copied before training goes on", torch.__version__
                )
                self._said = True
            copied = _copied(tree)
            return lambda: copied
        if self._stager is None:
            self._stager = DefaultStager(_options())
        copying: Future[Tree] = self._stager.stage(tree)
        self._copying = copying
        self._hooks = [optimizer.register_step_pre_hook(lambda *_: self.wait()) for optimizer in optimizers]
        return copying.result

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
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _options() -> Any:
    """Return how to copy here; by default torch asks for pinned memory and streams, which a CPU has not."""
    accelerated = torch.cuda.is_available()
    return StagingOptions(
        use_pinned_memory=accelerated,
        use_shared_memory=False,  # the writer is a thread of this process
        use_async_staging=True,
        use_non_blocking_copy=accelerated,
    )


def _copied(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_copied(part) for part in value]
    return value
