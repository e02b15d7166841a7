"""Load everything of one DCP checkpoint with the torch that is installed: the body of `verify --load`.

Decides what torch is given, in which portions, and what its errors mean; how torch is called is `torch_reader`'s.
torch is imported inside functions only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.regions import volume
from dcptool.errors import DcptoolError, StorageError, UnsupportedError
from dcptool.formats.dcp.format import METADATA
from dcptool.ops.verify.torch_reader import (
    load_chunks,
    load_whole,
    metadata_once_reader,
    one_line,
    one_rank_group,
    quiet,
)
from dcptool.storage import LocalStorage, join

MAX_READS = 4096
"""Reads that one `dcp.load` is planned with; torch keeps about a kilobyte for each."""
_SAFE_TORCH = (2, 6)
"""Older ones may execute what the item of a tensor holds, with weights_only too (CVE-2025-32434)."""
_REWRITE = "If `dcptool verify --deep` finds nothing wrong, `dcptool convert --to dcp` writes it anew for this torch."
_INSTALL = "An object loads only where the package of its class is installed."

T = TypeVar("T")


class LoadReport(NamedTuple):
    """What one torch made of one checkpoint.

    Attributes:
        torch_version: of the torch that was asked.
        n_tensors, n_objects: how many it loaded.
        n_skipped_objects: objects it was not asked to load, because that executes their pickles.
        nbytes: bytes of the values of the loaded tensors.
        findings: one per tensor or object it cannot load, in the order of the checkpoint, or one for the checkpoint
            as a whole: `torch-cannot-load`, `torch-cannot-read-metadata`, `unsafe-metadata`, `unsupported-item`.
    """

    torch_version: str
    n_tensors: int
    n_objects: int
    n_skipped_objects: int
    nbytes: int
    findings: tuple[Finding, ...]


def load_with_torch(
    checkpoint: Checkpoint,
    *,
    trust: bool = False,
    max_nbytes: int = 256 << 20,
    progress: Callable[[int], None] | None = None,
) -> LoadReport:
    """Load every tensor of a checkpoint with the installed torch, and every object if its code is trusted.

    torch unpickles `.metadata` for this. Without `trust` it is asked only if dcptool's own reading, which executes
    nothing, met no name in there that DCP's writers do not use.

    Tensors are loaded into new memory of at most `max_nbytes` at a time and given up at once. A larger one is loaded
    chunk by chunk as it is stored. Besides, torch holds its metadata and the stored chunk it is reading, whole; of a
    chunk larger than `max_nbytes` only the last elements, as many as fit, are copied out of what torch read. What
    torch loads without complaint is no finding, though its values may be wrong: it casts dtypes, leaves holes
    uninitialised and checks no CRC.

    Args:
        checkpoint: an open DCP directory on a local (or mounted) file system.
        trust: let torch execute the pickles of the metadata and of the objects.
        max_nbytes: bytes of tensors to load at a time.
        progress: called with the bytes of tensor values dealt with since the last call, loaded or not.

    Raises:
        UnsupportedError: no local DCP directory, no torch, a torch too old to be safe without `trust`, one that cannot
            form a process group of one rank, or a process group that is already there.
        StorageError: something else than a regular file is in place of a data file.
    """
    _check_is_local_dcp(checkpoint)
    version = torch_version(trust)
    n_skipped = 0 if trust else len(checkpoint.objects)
    if refusal := _refusal(checkpoint, trust):
        return LoadReport(version, 0, 0, n_skipped, 0, (refusal,))
    with one_rank_group():
        loader = _Loader(checkpoint, version, max_nbytes, progress or (lambda nbytes: None))
        if reason := loader.read_metadata():
            message = f"torch {version} cannot read {METADATA}: {reason}"
            finding = Finding.of("torch-cannot-read-metadata", message, METADATA, next_step=_REWRITE)
            return LoadReport(version, 0, 0, n_skipped, 0, (finding,))
        loader.load_all(trust)
    findings = tuple(loader.failed[fqn] for fqn in checkpoint if fqn in loader.failed)
    return LoadReport(version, loader.n_tensors, loader.n_objects, n_skipped, loader.nbytes, findings)


def _check_is_local_dcp(checkpoint: Checkpoint) -> None:
    if not checkpoint.format.loads_in_torch:
        reader = checkpoint.format.loader
        raise UnsupportedError(f"{checkpoint.path} is no DCP directory, which dcp.load is for; {reader} loads it")
    copies = next((problem for problem in checkpoint.problems if problem.kind == "in-copies"), None)
    if copies:
        raise UnsupportedError(
            f"{checkpoint.path}: {copies.message}, where torch's FileSystemReader does not look",
            next_step="Its writer's own reader does; `dcptool convert --to dcp` writes it without copies.",
        )
    if not isinstance(checkpoint.storage, LocalStorage):
        raise UnsupportedError(f"{checkpoint.path}: torch's FileSystemReader reads local folders; copy it to one first")
    for name in checkpoint.usage:
        if name in checkpoint.files and checkpoint.storage.size(name) is None:
            raise StorageError(f"{join(checkpoint.root, name)} is not a regular file; torch might wait for it forever")


def torch_version(trust: bool) -> str:
    """Return the version of the installed torch, which is imported here first."""
    try:
        with quiet():
            import torch
            import torch.distributed.checkpoint
    except ImportError as error:
        raise UnsupportedError(f"{error}; loading with torch needs it: pip install 'dcptool[torch]'") from error
    version = str(torch.__version__)
    if not trust and tuple(map(int, re.findall(r"\d+", version)[:2])) < _SAFE_TORCH:
        raise UnsupportedError(
            f"torch {version} may execute code that a tensor's item holds (CVE-2025-32434, fixed in 2.6); "
            "load with it only what you trust, and say so with --trust"
        )
    return version


def _refusal(checkpoint: Checkpoint, trust: bool) -> Finding | None:
    """Return why torch is not asked at all, None if it is."""
    if METADATA not in checkpoint.files:
        message = "rank-local metadata (__R.metadata), no .metadata: torch loads it only at the same number of ranks"
        next_step = "`dcptool convert --to dcp` joins the ranks' metadata into one."
        return Finding.of("torch-cannot-load", message, next_step=next_step, severity=Severity.WARNING)
    foreign = {"unsafe-pickle", "unknown-global", "unknown-torch-name"}
    unknown = [problem for problem in checkpoint.problems if problem.kind in foreign]
    if not unknown or trust:
        return None
    message = f"{unknown[0].message}; torch would import and call it, so torch was not asked"
    next_step = "With --trust torch reads it, and with it executes whatever it names."
    return Finding.of("unsafe-metadata", message, METADATA, next_step=next_step)


class _Loader:
    """Has torch load parts of a checkpoint whose metadata it has read once, and counts what comes of it."""

    def __init__(self, checkpoint: Checkpoint, version: str, max_nbytes: int, progress: Callable[[int], None]) -> None:
        self._checkpoint, self._version, self._max_nbytes, self._progress = checkpoint, version, max_nbytes, progress
        self._reader = metadata_once_reader(checkpoint.root)
        self.failed: dict[str, Finding] = {}
        self.n_tensors = self.n_objects = self.nbytes = 0

    def read_metadata(self) -> str:
        """Let torch unpickle `.metadata`; return why it cannot, "" if it can."""
        return self._tried(self._reader.read_metadata)

    def load_all(self, with_objects: bool) -> None:
        """Load all tensors, and the objects if wanted: first what is loaded whole, many at a time, then the rest."""
        outside = {p.fqn: p.message for p in self._checkpoint.problems if p.kind == "path-escape"}
        wanted, large = [], []
        for entry in (self._checkpoint if with_objects else self._checkpoint.tensors).values():
            nbytes, n_reads = _cost(entry)
            if entry.fqn in outside:  # torch would follow the path
                self._count(entry, f"not tried: {outside[entry.fqn]}")
            elif isinstance(entry, TensorEntry) and (nbytes > self._max_nbytes or n_reads > MAX_READS):
                large.append(entry)
            else:
                wanted.append(entry)
        for batch in _batches(wanted, _cost, self._max_nbytes):
            self._load_whole(batch)
        for tensor in large:
            self._load_by_chunks(tensor)

    def _load_whole(self, entries: Sequence[Entry]) -> None:
        """Load entries whole, at once; of those that fail together, halves, until each that fails is alone."""
        reason = self._tried(load_whole, self._reader, entries)
        if reason and len(entries) > 1:
            middle = len(entries) // 2
            self._load_whole(entries[:middle])
            self._load_whole(entries[middle:])
            return
        for entry in entries:
            self._count(entry, reason)
            self._progress(entry.nbytes if isinstance(entry, TensorEntry) else 0)

    def _load_by_chunks(self, entry: TensorEntry) -> None:
        """Load a tensor chunk by chunk, up to the first that torch cannot load."""
        itemsize, reason, left = _itemsize(entry), "", entry.nbytes
        boxes = (box for box in entry.chunks.boxes() if 0 not in box[1])
        for batch in _batches(boxes, lambda box: (volume(box[1]) * itemsize, 1), self._max_nbytes):
            reason = self._tried(load_chunks, self._reader, entry.fqn, batch, self._max_nbytes // itemsize or 1)
            if reason:
                break
            nbytes = min(sum(volume(box[1]) for box in batch) * itemsize, left)
            left -= nbytes
            self._progress(nbytes)
        self._count(entry, reason)
        self._progress(left)

    def _count(self, entry: Entry, reason: str) -> None:
        foreign = _foreign(self._checkpoint, entry) if reason else ""
        if foreign:
            message = f"{entry.fqn!r} was not loaded, so not proven: it is {foreign}"
            step = "Nothing that a checkpoint names is imported; dcp.load reads it in a job that has such a tensor."
            self.failed[entry.fqn] = Finding.of("unsupported-item", message, fqn=entry.fqn, next_step=step)
        elif reason:
            message = f"torch {self._version} cannot load {entry.fqn!r}: {reason}"
            next_step = _REWRITE if isinstance(entry, TensorEntry) else _INSTALL
            finding = Finding.of("torch-cannot-load", message, fqn=entry.fqn, next_step=next_step)
            self.failed[entry.fqn] = finding
        elif isinstance(entry, TensorEntry):
            self.n_tensors += 1
            self.nbytes += entry.nbytes
        else:
            self.n_objects += 1

    def _tried(self, function: Callable[..., object], *args: object) -> str:
        """Call; return torch's reason if it fails, "" if it does not. Interrupts get through, errors do not."""
        self._reader.failure = None
        try:
            with quiet():
                function(*args)
        except BaseException as error:
            from torch.distributed.checkpoint import CheckpointException

            # It is no Exception, and holds by rank whatever was raised, were it KeyboardInterrupt.
            failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
            cause = next(iter(failures.values()))[0]
            if not isinstance(cause, Exception):
                raise cause from None
            return one_line(self._reader.failure or cause)
        return ""


def _foreign(checkpoint: Checkpoint, entry: Entry) -> str:
    """Return what a tensor is, if it is of a class that only its owner's job has, or quantised as only that knows."""
    first = next(iter(entry.chunks), None) if isinstance(entry, TensorEntry) else None
    if first is None or first.item is None:
        return ""
    try:
        found = checkpoint.source.examine(entry, first, first.item)
    except DcptoolError:
        return ""
    return "" if found.unsafe else found.foreign


def _cost(entry: Entry) -> tuple[int, int]:
    """Return how many bytes and how many reads an entry takes."""
    if isinstance(entry, TensorEntry):
        return volume(entry.shape) * _itemsize(entry), len(entry.chunks)
    return entry.item.nbytes if entry.item else 0, 1


def _itemsize(entry: TensorEntry) -> int:
    return dtypes.BY_NAME[entry.dtype].itemsize if entry.dtype in dtypes.BY_NAME else 1


def _batches(values: Iterable[T], cost: Callable[[T], tuple[int, int]], max_nbytes: int) -> Iterator[list[T]]:
    """Yield the values in lists of at most `max_nbytes` bytes and MAX_READS reads, or of one value that is more."""
    batch: list[T] = []
    nbytes = n_reads = 0
    for value in values:
        more_nbytes, more_reads = cost(value)
        if batch and (nbytes + more_nbytes > max_nbytes or n_reads + more_reads > MAX_READS):
            yield batch
            batch, nbytes, n_reads = [], 0, 0
        batch.append(value)
        nbytes += more_nbytes
        n_reads += max(more_reads, 1)
    if batch:
        yield batch
