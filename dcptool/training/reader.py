"""A storage reader for `dcp.load` that executes no pickle of the metadata and checks every CRC32 while it loads.

Knows torch's protocol of a load; how items are brought to the planner `reading` knows.

Source: torch 2.13, distributed/checkpoint/storage.py (StorageReader), filesystem.py (FileSystemReader),
_fsspec_filesystem.py, state_dict_loader.py (`read_metadata(rank=…)`).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata, StorageReader
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.copying.pool import MAX_THREADS
from dcptool.errors import CheckpointNotFoundError, LayoutError, MetadataError, StorageError
from dcptool.formats.dcp.format import DCP, metadata_names, metadata_rank, rank_metadata, rank_name
from dcptool.formats.detect import open_at, open_part
from dcptool.ops.latest import find_latest
from dcptool.runs.directory import runs_at
from dcptool.storage import Location, is_url, locate
from dcptool.training.as_metadata import ItemPlace, as_metadata
from dcptool.training.ranks import cores_per_rank
from dcptool.training.reading import Delivery, group
from dcptool.words import listed

logger = logging.getLogger("dcptool.training")
_MEANWHILE = "A save finished, or was replaced, while they looked: name one step, and load again."


class Reader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint for `torch.distributed.checkpoint.load`, in place of any of torch's readers.

    The values are those that torch's `FileSystemReader`, `FsspecReader` and `HuggingFaceStorageReader` give. Besides,
    `.metadata` is read without executing a pickle; the CRC32 of every record of which anything is loaded is checked,
    and a read that leaves the checkpoint's folder is refused. Objects are unpickled by torch's planner, as always.

    The metadata is read anew for every load. Of a save with `use_collectives=False` each rank gets its own values.

    Args:
        path: local path or fsspec URL of a checkpoint of any format, or of a run directory, which stands for its
            newest complete step; or an open checkpoint, which is refused once it was written to.
        registry: torch's extensions, for stream transforms other than zstd; torch names it `_extension_registry`.
        threads: how many items are read at the same time; None for this rank's share of the processors.
        trust: let torch decode items that dcptool does not look into, such as quantised tensors and those of
            subclasses, as torch's readers do (`torch.load` with `weights_only`).
        storage_options: what the fsspec file system of a URL takes, such as `anon` or `endpoint_url`.
        run: whether a run directory stands for its newest complete step; else it is refused.

    Attributes:
        load_id: torch's identifier of the load, new after each `reset`.
        storage_data: where each item of the checkpoint is, as the metadata of this load says.
        rank: of this process, where each has metadata of its own; `use_collectives` is False then.

    Example:
        >>> dcp.load(state_dict, storage_reader=Reader("ckpt/step_500"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        _extension_registry: ExtensionRegistry | None = None,
        *,
        threads: int | None = None,
        trust: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        run: bool = True,
    ) -> None:
        super().__init__()
        self._given = path if isinstance(path, Checkpoint) else None
        self._checkpoint = self._given
        self._path = path.path if isinstance(path, Checkpoint) else os.fspath(path)
        self._registry, self._trust, self._run = _extension_registry, trust, run
        self._storage_options = storage_options
        self._threads = threads or min(MAX_THREADS, cores_per_rank())
        self._begin()

    def _begin(self) -> None:
        self.load_id = str(uuid.uuid4())
        self.storage_data: Mapping[MetadataIndex, Any] = {}
        self.rank: int | None = None
        self.use_collectives = True

    @property
    def checkpoint_id(self) -> str:
        """The path or URL that is read."""
        return self._path

    @property
    def path(self) -> str:
        """The same, under the name that torch's readers have for it."""
        return self._path

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that was read last, opened if none was.

        Raises:
            DcptoolError: it cannot be opened.
        """
        if self._checkpoint is None:
            self._checkpoint = self._open()
        return self._checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read; read from another place next, if one is given."""
        if checkpoint_id:
            self._path, self._given = os.fspath(checkpoint_id), None
        self._checkpoint = self._given
        self._begin()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a checkpoint could be there: a path below a folder that exists, a URL of a known protocol."""
        text = os.fspath(checkpoint_id)
        if isinstance(checkpoint_id, Path) or not is_url(text):
            return os.path.exists(text) or bool(FileSystemReader.validate_checkpoint_id(checkpoint_id))
        from fsspec.core import url_to_fs

        try:
            url_to_fs(text)
        except (ImportError, ValueError):
            return False
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's metadata, made from what dcptool reads, just now, without executing it.

        Args:
            args: ignored, as torch's readers do.
            kwargs: `rank`: whose metadata, where each rank has its own.

        Raises:
            MetadataError: it cannot be read; or each rank has its own, and none was named.
            StorageError: the checkpoint that was given open has changed since.
        """
        self._checkpoint = self._open(kwargs.get("rank"))
        return as_metadata(self._checkpoint, self._path, self.load_id)

    def _open(self, rank: int | None = None) -> Checkpoint:
        found, named = self._given, False
        if found is None:
            location = self._located()
            named = metadata_rank(location.file or "") is not None
            found = open_at(location)
        else:
            changed = found.changed()
            if changed:
                raise StorageError(f"{found.path}: {changed} changed since it was opened", next_step="Open it again.")
        names = metadata_names(found.files) if found.format is DCP else []
        if named or not rank_metadata(names):
            return found
        return _of_rank(found, rank)

    def _located(self) -> Location:
        """Find the place; in a run directory that of its newest complete step."""
        location = locate(self._path, (), self._storage_options)
        if not self._run or self._storage_options or not runs_at(location):
            return location
        latest = find_latest(self._path)
        for verdict in latest.skipped:
            logger.warning("%s was passed over: %s: %s", verdict.path, verdict.state.value, verdict.reason)
        if latest.path is None:
            raise CheckpointNotFoundError(latest.problem or f"{latest.run} has no complete checkpoint")
        logger.info("the newest complete checkpoint of %s is read: %s", latest.run, latest.path)
        return locate(latest.path)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take over where the items are.

        Args:
            metadata: as of `read_metadata`; names in it may have been changed.
            is_coordinator: ignored.
            args: ignored, as torch's readers do.
            kwargs: `rank` and `use_collectives`, as torch found them.
        """
        self.storage_data = metadata.storage_data or {}
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with what is read, so that ranks that found different saves do not load them."""
        return replace(plan, storage_data=(self.checkpoint.save_id, self.checkpoint.path))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are.

        Raises:
            LayoutError: the ranks read different checkpoints: a save finished, or one was replaced, meanwhile.
        """
        saves = dict(plan.storage_data for plan in plans if plan.storage_data and plan.storage_data[0])
        if self.use_collectives and len(saves) > 1:
            found = listed(sorted(set(saves.values())), 3)
            raise LayoutError(f"the ranks read different saves, at {found}", next_step=_MEANWHILE)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring what this rank wants to its planner, one item after the other: resolve, fill, commit.

        Raises:
            ItemError: a stored item is damaged; the message names file, fqn and byte range.
            LayoutError: the metadata has no such item, or a tensor of the planner has another shape.
            StorageError: a file is missing, unreadable or too short.
            UnsupportedError: an item is of a form, or went through a transform, that is not known.
        """
        checkpoint = self.checkpoint
        try:
            wanted = group(checkpoint, [(self._place(item), item) for item in plan.items])
            Delivery(checkpoint, planner, self._threads, self._registry, self._trust).run(wanted)
        finally:
            checkpoint.storage.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _place(self, item: ReadItem) -> ItemPlace:
        place = self.storage_data.get(item.storage_index)
        if isinstance(place, ItemPlace):
            return place
        index = item.storage_index
        at = f" at {list(index.offset)}" if index.offset else ""
        raise LayoutError(
            f"{self._path}: {index.fqn!r}: the metadata has no item{at}",
            next_step="Reader loads by the metadata that its own read_metadata returned.",
        )


def _of_rank(checkpoint: Checkpoint, rank: int | None) -> Checkpoint:
    """Return a checkpoint whose ranks have metadata of their own as one of them sees it: what it saved comes first.

    Raises:
        MetadataError: no rank is named.
    """
    if rank is None:
        message = f"{checkpoint.path} was saved with use_collectives=False: each rank has metadata of its own"
        raise MetadataError(
            message, next_step="read_metadata(rank=R) gives that of one; dcp.load asks for it by itself."
        )
    name = rank_name(rank)
    if name in checkpoint.files:
        return open_part(Location(checkpoint.storage, name), "")
    logger.warning(
        "%s: rank %d saved nothing there; where ranks have values of their own it gets those of the lowest rank",
        checkpoint.path,
        rank,
    )
    return checkpoint
