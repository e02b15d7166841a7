"""Objects of a checkpoint as the job that saved them had them: without executing anything where that can be.

Values made of plain values, containers, tensors and arrays are decoded by torch's restricted unpickler. Others are by
the full one, after a look at what they would run; a job may name the only ones it allows.

Source: torch 2.13, serialization.py (`weights_only`, `safe_globals`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import fractions
import io
import logging
import pathlib
import pickle
import types
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.errors import ItemError, RunsCodeError, UnsupportedError
from dcptool.pickles.files import runs
from dcptool.training.reading import Asked, Delivery
from dcptool.words import listed

logger = logging.getLogger("dcptool.training")
_MULTIARRAY = getattr(np, "_core", None) or np.core
HARMLESS: tuple[Any, ...] = (
    argparse.Namespace, collections.defaultdict, collections.deque, datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction, frozenset, pathlib.Path,
    pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, range, slice, types.SimpleNamespace, uuid.UUID,
    _MULTIARRAY.multiarray._reconstruct, _MULTIARRAY.multiarray.scalar, np.dtype, np.ndarray,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGOSUVMm"},
)  # fmt: skip
"""What values are made of besides what torch allows by itself; calling any of it makes a value and nothing else."""
_THREADS = 4


class ObjectLoader:
    """Decodes objects; says once which are of classes of their own.

    Args:
        safe_globals: classes and functions that may be named besides `HARMLESS`; None for any that does nothing but
            make an object, as far as can be told.
    """

    def __init__(self, safe_globals: Sequence[Any] | None = None) -> None:
        self._given = safe_globals
        self._said: set[str] = set()

    def load(self, checkpoint: Checkpoint, fqns: Iterable[str]) -> dict[str, Any]:
        """Read objects and check their CRCs.

        Raises:
            RunsCodeError: one would run something.
            UnsupportedError: one needs a class that is not allowed, or not there.
            ItemError, StorageError: one is damaged, or cannot be read.
        """
        found: dict[str, Any] = {}
        loader = self

        class Takes:
            def load_bytes(self, item: ReadItem, stream: io.BytesIO) -> None:
                fqn = item.dest_index.fqn
                found[fqn] = loader.decode(stream.getvalue(), fqn)

        asked = [_asked(checkpoint, fqn) for fqn in fqns]
        planner: Any = Takes()
        Delivery(checkpoint, planner, _THREADS, None, False).run(asked)
        return found

    def decode(self, data: bytes, fqn: str) -> Any:
        """Return what torch.save wrote; errors as of `load`."""
        with _allowing((*HARMLESS, *(self._given or ()))):
            try:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                reason = error
        names = runs(io.BytesIO(data))
        if names:
            raise RunsCodeError(f"{fqn!r} runs code when it is loaded: it calls or names {listed(names, 5)}", names)
        wanted = _named_in(data)
        if self._given is not None:
            raise UnsupportedError(
                f"{fqn!r} names {listed(wanted, 5) or 'what safe_globals does not allow'}",
                next_step="CheckpointManager(…, safe_globals=[…]) allows exactly what is named there.",
            ) from reason
        if fqn not in self._said:
            logger.info("%r is unpickled by torch: it names %s", fqn, listed(wanted, 5) or "what plain values do not")
            self._said.add(fqn)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ItemError(f"{fqn!r} cannot be unpickled here: {said}") from error


def _asked(checkpoint: Checkpoint, fqn: str) -> Asked:
    index = MetadataIndex(fqn)
    nothing = torch.Size(())
    item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    return Asked(checkpoint.entries[fqn], None, (item,), 0)


def _allowing(names: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch's restricted unpickler allows names besides its own; since torch 2.5."""
    from torch import serialization

    allow = getattr(serialization, "safe_globals", None)
    return allow(list(names)) if allow else contextlib.nullcontext()


def _named_in(data: bytes) -> list[str]:
    """Return the names in a pickle that torch does not allow by itself, nor `HARMLESS`; since torch 2.6."""
    from torch import serialization

    look = getattr(serialization, "get_unsafe_globals_in_checkpoint", None)
    with _allowing(HARMLESS):
        return sorted(look(io.BytesIO(data))) if look else []
