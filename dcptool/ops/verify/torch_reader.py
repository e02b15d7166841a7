"""torch's own way to load a DCP directory: its FileSystemReader and planners, in a process group of one rank.

Goes through `dcp.load`, as a job of one rank would. Knows torch's classes, and nothing of how items are stored or what
an error means. torch is imported inside functions only.

Source: torch 2.13, distributed/checkpoint/state_dict_loader.py, default_planner.py, filesystem.py.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.regions import Box
from dcptool.errors import UnsupportedError

_REASON_LENGTH = 300


def metadata_once_reader(root: str) -> Any:
    """Return torch's reader of local files, made to read the metadata once and to remember what stopped it."""
    from torch.distributed.checkpoint import FileSystemReader

    class OnceReader(FileSystemReader):  # type: ignore[misc]
        """Attributes: metadata, once it is read; failure, what the last read_data raised, if anything."""

        metadata: Any = None
        failure: BaseException | None = None

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if self.metadata is None:
                self.metadata = super().read_metadata(*args, **kwargs)
            return self.metadata

        def read_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().read_data(plan, planner)
            except BaseException as error:
                self.failure = error  # torch sends it through the group, which not every exception survives
                raise

    return OnceReader(root)


def load_whole(reader: Any, entries: Sequence[Entry]) -> None:
    """Load entries whole, into new memory; the reader has read the metadata. Raises whatever torch does."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, load

    state: dict[str, Any] = {}
    for entry in entries:
        state[entry.fqn] = None
        if isinstance(entry, TensorEntry):
            record = reader.metadata.state_dict_metadata[entry.fqn]
            state[entry.fqn] = _empty(record.size, record.properties.dtype)
    # The stored names are flat already; flattening would look through all of them for each portion.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(state, storage_reader=reader, planner=planner)


def _empty(shape: Any, dtype: Any) -> Any:
    """Return an uninitialised tensor; one of a quantised dtype has scales, which loading gives it."""
    import torch

    if dtype in (torch.qint8, torch.quint8, torch.qint32):
        return torch._empty_affine_quantized(shape, scale=1.0, zero_point=0, dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def load_chunks(reader: Any, fqn: str, chunks: Sequence[Box], max_elements: int) -> None:
    """Load stored chunks of one tensor, each into memory of its own for as long as it is read.

    Args:
        reader: of the checkpoint.
        fqn: name of the tensor.
        chunks: boxes as the metadata has them, none empty.
        max_elements: of a larger chunk the far corner is loaded: torch reads the chunk whole, and finds it there only
            if all dimensions are as long as the metadata says.
    """
    import torch
    from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, load
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk_of(box: Box) -> Any:
        return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))

    class ChunkPlanner(DefaultLoadPlanner):  # type: ignore[misc]
        """Plans with one stored chunk at a time, so that a plan costs what its chunks cost, not what all cost."""

        def create_local_plan(self) -> Any:
            record = self.metadata.state_dict_metadata[fqn]
            items = []
            for box in chunks:
                stored = TensorStorageMetadata(record.properties, record.size, [chunk_of(box)])
                wanted = [chunk_of(far_corner(box, max_elements))]
                items += create_read_items_for_chunk_list(fqn, stored, wanted)
            return LoadPlan(items)

        def resolve_tensor(self, read_item: Any) -> Any:
            dtype = self.metadata.state_dict_metadata[fqn].properties.dtype
            return _empty(read_item.lengths, dtype)

    planner = ChunkPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load({}, storage_reader=reader, planner=planner)


def far_corner(box: Box, max_elements: int) -> Box:
    """Return the part of a box that ends where it ends and has at most `max_elements` (≥ 1) elements.

    Whole rows are kept as far as they fit; a box that fits is returned whole.
    """
    kept: list[int] = []
    for size in reversed(box[1]):
        kept.insert(0, min(size, max_elements))
        max_elements = max(max_elements // max(size, 1), 1)
    return tuple(a + n - k for a, n, k in zip(*box, kept, strict=True)), tuple(kept)


def one_line(error: BaseException) -> str:
    """Return an error's class and the first sentence of what it says."""
    if type(error.__context__) is type(error):
        error = error.__context__  # torch.load wraps why a pickle is refused in advice to load it without safety
    line = next(filter(None, map(str.strip, str(error).splitlines())), "")
    line = re.split(r"\.\s+(?=[A-Z])", line)[0]
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's warnings, and what loaded code prints, from the user's terminal."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def one_rank_group() -> Iterator[None]:
    """Form a gloo process group of this process alone, over a file and the loopback interface, and end it after."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise UnsupportedError("there is a process group already; load with torch in a process that has none")
    # By itself gloo looks up the host's name, which may lead nowhere.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    with tempfile.TemporaryDirectory(prefix="dcptool-") as folder:
        try:
            with quiet(), _environment("GLOO_SOCKET_IFNAME", loopback):
                store = dist.FileStore(os.path.join(folder, "store"), 1)
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        except Exception as error:
            raise UnsupportedError(f"this torch cannot form a gloo process group: {one_line(error)}") from error
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
