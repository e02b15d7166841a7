"""What a job chooses of torch's own writers and planners: keyword options of the usual ones, or what makes others.

torch's writers hold a path and its planners a state, so that every save needs new ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from dcptool.errors import UnsupportedError
from dcptool.storage import is_url

Choice = Mapping[str, Any] | Callable[..., Any] | None
"""Keyword options of torch's usual class; or a function, such as a class, that makes one; None for the defaults."""


class Choices(NamedTuple):
    """How checkpoints are written; see `CheckpointManager`."""

    writer: Choice = None
    planner: Choice = None
    storage_options: Mapping[str, Any] | None = None

    @property
    def may_fail(self) -> bool:
        """Whether a function of the job's makes something, which may fail on one rank."""
        return callable(self.writer) or callable(self.planner)

    def make_writer(self, path: str, n_threads: int = 1) -> Any:
        """Return a new writer for the checkpoint at a path or URL, of so many threads where the job chooses none.

        Raises:
            UnsupportedError: it would write what nothing can restore.
        """
        if callable(self.writer):
            writer = self.writer(path)
        else:
            of_url = self.storage_options or {} if is_url(path) else {}
            writer = _usual_writer(path)(path, **{"thread_count": n_threads, **(self.writer or {}), **of_url})
        if getattr(getattr(writer, "serialization_format", None), "value", "") == "safetensors":
            raise UnsupportedError(
                "SAFETENSORS serialization has no place for objects (optimizer settings, schedulers, loaders), so torch"
                " cannot load such a checkpoint of a job",
                next_step="Save as usual, then: dcptool convert --to safetensors STEP DST",
            )
        return writer

    def make_planner(self) -> Any:
        """Return a new planner."""
        return self.planner() if callable(self.planner) else DefaultSavePlanner(**(self.planner or {}))

    def check(self, root: str) -> None:
        """Look whether options are such as torch takes, as far as that shows before the first save.

        Raises:
            TypeError: they are not, or an object is passed where one is needed for each save.
            UnsupportedError: as of `make_writer`.
        """
        require_choice("writer", self.writer, _usual_writer(root), "path")
        require_choice("planner", self.planner, DefaultSavePlanner)
        if not callable(self.writer):
            self.make_writer(root)
        if not callable(self.planner):
            self.make_planner()


def _usual_writer(path: str) -> Any:
    if not is_url(path):
        return FileSystemWriter
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter


def require_choice(name: str, choice: Any, usual: Any, *given: str) -> None:
    """Refuse what is no choice.

    Args:
        name: of the argument.
        choice: what was passed.
        usual: torch's class whose options may be chosen.
        given: parameters of it that are no options.

    Raises:
        TypeError: it is none; the message says what to pass.
    """
    if choice is None or callable(choice):
        return
    if not isinstance(choice, Mapping):
        made = f"{type(choice).__name__}({'path, ' if given else ''}…)"
        how = f"lambda {'path' if given else ''}: {made}".replace(" :", ":")
        raise TypeError(f"{name}= takes a dict of options, or a function that makes a new one for each save: {how}")
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in inspect.signature(usual).parameters.values() if p.kind in kinds and p.name not in given]
    unknown = sorted(set(choice) - set(known))
    if unknown:
        raise TypeError(f"torch's {usual.__name__} has no option {unknown[0]!r}: it has {', '.join(known)}")
