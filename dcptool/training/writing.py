"""Write a state with torch's own writer, and say in plain words that a disk was too full. Knows no run directory."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from dcptool.errors import StorageError
from dcptool.storage import is_url
from dcptool.training.ranks import sendable
from dcptool.training.tree import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a disk, or a quota, says that has no room."""
_AS_GOOD_AS_FULL_NBYTES = 1 << 20


def write(
    values: dict[str, Any],
    paths: Mapping[str, Path],
    path: str,
    group: Any,
    still_ours: Callable[[], None] = lambda: None,
) -> None:
    """Write a state with torch, on all ranks of a group.

    Args:
        values: by name, as torch.distributed.checkpoint takes them.
        paths: of these names in the nested state, for the metadata.
        path: local path or URL of the checkpoint.
        group: the process group; None without one.
        still_ours: called on every rank before it writes anything; raises if it must not.
    """
    base: Any = FileSystemWriter
    if is_url(path):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        base = FsspecWriter
    files = type("FileSystem", (_NewFiles, FileSystem), {"still_ours": staticmethod(still_ours)})
    careful = {"still_ours": staticmethod(still_ours), "local_files": files}
    writer = sendable(
        type(base.__name__, (_Careful, base), careful),
        "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish",
    )  # fmt: skip
    planner = sendable(
        type("DefaultSavePlanner", (_WithPaths, DefaultSavePlanner), {"paths": paths}),
        "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan",
    )  # fmt: skip
    dcp.save(values, storage_writer=writer(path), planner=planner(), process_group=group)


class _WithPaths:
    """What a planner of torch's does besides: record where in a nested state a name was, which it is given flat."""

    paths: Mapping[str, Path]
    mappings: dict[str, Path]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)  # type: ignore[misc]
        self.mappings = {fqn: self.paths[fqn] for fqn in self.mappings}


class _Careful:
    """What a writer of torch's does besides: ask whether it may write, and find out that there is no room."""

    still_ours: Callable[[], None]
    local_files: Callable[[], FileSystem]

    def __init__(self, path: str) -> None:
        super().__init__(path)  # type: ignore[call-arg]
        if not is_url(path):
            self.fs = self.local_files()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.still_ours()
        path, free = str(self.path), _free_nbytes(self.path)  # type: ignore[attr-defined]
        try:
            return super().write_data(plan, planner)  # type: ignore[misc]
        except FileExistsError:
            self.still_ours()  # then somebody else has saved this step meanwhile
            raise
        except Exception as error:
            raise _no_space(path, _nbytes_of(plan), free, error) or error  # noqa: B904 - the error it is about, or itself

    def finish(self, metadata: Any, results: Any) -> None:
        self.still_ours()
        path, free = str(self.path), _free_nbytes(self.path)  # type: ignore[attr-defined]
        try:
            super().finish(metadata, results)  # type: ignore[misc]
        except Exception as error:
            raise _no_space(path, 0, free, error) or error  # noqa: B904


class _NewFiles:
    """Local files as torch makes them, but only new ones, and none once the run directory is another job's.

    A process that stood still (a machine that hung) may come back in the middle of a save, when another job has saved
    the same step and marked it: what it has open is a file that is gone, and what it opens now must not be the other's.
    """

    still_ours: Callable[[], None]

    def create_stream(self, path: Any, mode: str) -> Any:
        self.still_ours()
        return super().create_stream(path, "xb" if mode == "wb" else mode)  # type: ignore[misc]

    def rename(self, path: Any, new_path: Any) -> None:
        self.still_ours()
        super().rename(path, new_path)  # type: ignore[misc]

    def rm_file(self, path: Any) -> None:
        self.still_ours()
        super().rm_file(path)  # type: ignore[misc]


def _no_space(path: str, needed: int, free: int | None, error: Exception) -> StorageError | None:
    """Return the error that there was no room, None if that is not why a write failed.

    Args:
        path: of the checkpoint.
        needed: bytes that this rank has to write, or more.
        free: bytes that were free before; None where nobody knows.
        error: what torch raised: often not what the disk said.
    """
    said = next((one.errno for one in _causes(error) if isinstance(one, OSError) and one.errno in FULL), None)
    if said is None and isinstance(error, RuntimeError | OSError) and free is not None:
        now = _free_nbytes(path)
        if free < needed or (now is not None and now < min(needed, _AS_GOOD_AS_FULL_NBYTES)):
            said = errno.ENOSPC
    if said is None:
        return None
    what = "no space left on device" if said == errno.ENOSPC else "the disk quota is used up"
    room = "" if free is None else f"; this rank has {needed:,} bytes to write there, {free:,} were free before"
    return StorageError(f"{path}: {what}{room}")


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and all it was raised from or while."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _free_nbytes(path: Any) -> int | None:
    """Return how many bytes may be written to the disk of a folder, None if it is none or does not tell."""
    try:
        found = os.statvfs(path)
    except (OSError, TypeError, ValueError):
        return None
    return found.f_bavail * found.f_frsize


def _nbytes_of(plan: Any) -> int:
    """Return the bytes of the values of all tensors in a plan of torch's; those of objects are not known."""
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in tensors)
