"""Write a state with torch's own writer, and say in plain words that a disk was too full. Knows no run directory."""

from __future__ import annotations

import errno
import inspect
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlanner, StorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from dcptool.errors import StorageError
from dcptool.training.options import Choices
from dcptool.training.processes import SavingProcess, require_picklable
from dcptool.training.rank_local import Flat
from dcptool.training.ranks import Ranks, cores_per_rank, sendably
from dcptool.training.tree import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a disk, or a quota, says that has no room."""
_AS_GOOD_AS_FULL_NBYTES = 1 << 20
_WORTH_A_FILE_NBYTES = 64 << 20
_CACHES = (
    "_cached_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
    "_cached_final_save_plan",
)


class Writing:
    """Writes one state after the other with torch, in this process or, on request, in one beside it.

    Args:
        choices: how.
        process: what writes where `write` is told so; None if nothing does.
    """

    def __init__(self, choices: Choices, process: SavingProcess | None = None) -> None:
        self.choices, self.process = choices, process
        self._plans = uuid.uuid4().hex  # under which torch keeps plans for the next save; class-wide, by name
        self._shapes: Any = None

    def write(
        self,
        written: Flat,
        path: str,
        ranks: Ranks,
        still_ours: Callable[[], None],
        apart: bool = False,
        n_threads: int = 1,
    ) -> None:
        """Write a state, on all ranks.

        Args:
            written: the state; the paths of its names are for the metadata.
            path: local path or URL of the checkpoint.
            ranks: all ranks.
            still_ours: called on every rank before it writes anything; raises if it must not. Pickled, if apart.
            apart: let the process beside this one do it.
            n_threads: of torch's writer, where the job has not chosen how many.

        Raises:
            TrainingError: it was not written, on some rank.
        """
        try:
            ranks.agree(
                f"{path} was not saved", lambda: self._write(written, path, ranks, still_ours, apart, n_threads)
            )
        except BaseException:
            self._forget_plans()
            if self.process is not None and not all(ranks.gather(self.process.is_sound())):
                self.process.close()  # those of other ranks have lost it
            raise

    def close(self) -> None:
        """Give back what is kept from one save to the next."""
        self._forget_plans()
        if self.process is not None:
            self.process.close()

    def _write(
        self, written: Flat, path: str, ranks: Ranks, still_ours: Callable[[], None], apart: bool, n_threads: int
    ) -> None:
        def make() -> tuple[Any, Any]:
            if apart:
                require_picklable(written.values)
            return self.choices.make_planner(), self.choices.make_writer(path, n_threads)

        planner, writer = ranks.agree(path, make) if apart or self.choices.may_fail else make()
        if getattr(planner, "_enable_plan_caching", False):
            self._forget_other_plans(written, ranks)
            planner._cached_plans_key = self._plans
        guarded = GuardedWriter(writer, path, still_ours), GuardedPlanner(planner, written.paths)
        if apart and self.process is not None:
            self.process.save(written.values, *guarded, ranks.group)
        else:
            dcp.save(written.values, storage_writer=guarded[0], planner=guarded[1], process_group=ranks.group)

    def _forget_other_plans(self, written: Flat, ranks: Ranks) -> None:
        """Forget plans of another state: torch compares names and sizes, not dtypes, nor where names come from."""
        kinds = {name: value.dtype if torch.is_tensor(value) else None for name, value in written.values.items()}
        if not all(ranks.gather(self._shapes == (kinds, written.paths))):
            self._forget_plans()
        self._shapes = kinds, written.paths

    def _forget_plans(self) -> None:
        for cache in _CACHES:
            getattr(SavePlanner, cache, {}).pop(self._plans, None)
        self._plans, self._shapes = uuid.uuid4().hex, None


def threads_while_waiting(written: Flat) -> int:
    """Return how many threads write a state while training waits: two, of a rank that has two cores and much to save.

    One where a tensor is on a device: only then torch copies the next ones to the host while one is written.
    """
    tensors = [value for value in written.values.values() if torch.is_tensor(value)]
    if any(isinstance(tensor, ShardedTensor) for tensor in tensors):  # of FSDP1, which has no size of its own
        return 1
    here = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # of a DTensor what this rank has
    is_worth_it = sum(tensor.numel() * tensor.element_size() for tensor in here) >= _WORTH_A_FILE_NBYTES
    return min(2, cores_per_rank()) if is_worth_it and all(tensor.is_cpu for tensor in here) else 1


def _accepted(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that a method takes: those of older writers and planners take fewer."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


class GuardedPlanner(SavePlanner):  # type: ignore[misc]
    """A planner whose errors reach all ranks, and that records where in the nested state each name was.

    Args:
        planner: any of torch's or of a job's; it is given the state flat.
        paths: by name, the path of each value in the nested state.
    """

    def __init__(self, planner: Any, paths: Mapping[str, Path]) -> None:
        self._planner, self._paths = planner, paths

    def __getattr__(self, name: str) -> Any:
        if name == "_planner":  # as it is unpickled
            raise AttributeError(name)
        return getattr(self._planner, name)

    @sendably
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        options = {"storage_meta": storage_meta, "is_coordinator": is_coordinator}
        self._planner.set_up_planner(state_dict, **_accepted(self._planner.set_up_planner, options))
        mappings = getattr(self._planner, "mappings", {})
        self._planner.mappings = {fqn: self._paths.get(fqn, path) for fqn, path in mappings.items()}

    @sendably
    def create_local_plan(self) -> Any:
        return self._planner.create_local_plan()

    @sendably
    def create_global_plan(self, all_plans: Any) -> Any:
        return self._planner.create_global_plan(all_plans)

    @sendably
    def finish_plan(self, new_plan: Any) -> Any:
        return self._planner.finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        return self._planner.resolve_data(write_item)


class GuardedWriter(StorageWriter):  # type: ignore[misc]
    """A writer that asks before it writes, finds out that there is no room, and whose errors reach all ranks.

    Args:
        writer: any of torch's or of a job's.
        path: of the checkpoint.
        still_ours: called before it writes; raises if it must not.
    """

    def __init__(self, writer: Any, path: str, still_ours: Callable[[], None]) -> None:
        self._writer, self._path, self._still_ours = writer, path, still_ours
        self._errors: list[BaseException] = []
        if type(getattr(writer, "fs", None)) is FileSystem:
            writer.fs = NewFiles(still_ours, self._errors)

    def __getattr__(self, name: str) -> Any:
        if name == "_writer":  # as it is unpickled
            raise AttributeError(name)
        return getattr(self._writer, name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        self._writer.reset(checkpoint_id)

    def storage_meta(self) -> Any:
        return self._writer.storage_meta()

    @sendably
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        taken = _accepted(self._writer.set_up_storage_writer, kwargs)
        self._writer.set_up_storage_writer(is_coordinator, *args, **taken)

    @sendably
    def prepare_local_plan(self, plan: Any) -> Any:
        return self._writer.prepare_local_plan(plan)

    @sendably
    def prepare_global_plan(self, plans: Any) -> Any:
        return self._writer.prepare_global_plan(plans)

    @sendably
    def write_data(self, plan: Any, planner: Any) -> Any:
        self._still_ours()
        free = _free_nbytes(self._path)
        try:
            written = self._writer.write_data(plan, planner)
            self._require_all(plan, written)
            return written
        except FileExistsError:
            self._still_ours()  # then somebody else has saved this step meanwhile
            raise
        except Exception as error:
            raise _no_space(self._path, _nbytes_of(plan), free, error) or error  # noqa: B904 - the error it is about, or itself

    @sendably
    def finish(self, metadata: Any, results: Any) -> None:
        self._still_ours()
        free = _free_nbytes(self._path)
        try:
            self._writer.finish(metadata, results)
        except Exception as error:
            raise _no_space(self._path, 0, free, error) or error  # noqa: B904

    def _require_all(self, plan: Any, written: Any) -> None:
        """Raise what one of several threads has raised: torch lets it go, and the item is missing."""
        if self._errors:
            raise self._errors[0]
        if isinstance(self._writer, FileSystemWriter) and len(written.wait()) != len(plan.items):
            raise StorageError(f"{self._path}: {len(written.wait()):,} of {len(plan.items):,} items were written")


class NewFiles(FileSystem):  # type: ignore[misc]
    """Local files as torch makes them, but only new ones, and none once the run directory is another job's.

    A process that stood still (a machine that hung) may come back in the middle of a save, when another job has saved
    the same step and marked it: what it has open is a file that is gone, and what it opens now must not be the other's.

    Args:
        still_ours: raises if it is another job's.
        errors: what is raised while a file is open is added to it.
    """

    def __init__(self, still_ours: Callable[[], None], errors: list[BaseException]) -> None:
        self._still_ours, self._errors = still_ours, errors

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        self._still_ours()
        try:
            with super().create_stream(path, "xb" if mode == "wb" else mode) as stream:
                yield stream
        except BaseException as error:
            self._errors.append(error)
            raise

    def rename(self, path: Any, new_path: Any) -> None:
        self._still_ours()
        super().rename(path, new_path)

    def rm_file(self, path: Any) -> None:
        self._still_ours()
        super().rm_file(path)


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
