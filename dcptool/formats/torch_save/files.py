"""Load one file of torch.save as stand-ins: its directory and its pickle are read, and nothing else of it.

Source: torch 2.13, serialization.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dcptool.checkpoint.extents import Extent
from dcptool.checkpoint.findings import Finding, unsafe_pickle
from dcptool.checkpoint.kinds import Severity
from dcptool.errors import ItemError, MetadataError, StorageError, UnsupportedError
from dcptool.formats.torch_save.format import is_legacy
from dcptool.formats.torch_save.stream import Archive, LegacyStream
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.pickles import inert
from dcptool.pickles.calls import LEGACY_MAGIC, Calls
from dcptool.storage import Storage, join
from dcptool.storage.stream import stream

_FOLLOWING_NBYTES = 1 << 20
"""Read of what follows a zip, to tell zeros from other bytes."""
_OF_TORCH = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", ".data/serialization_id"}
"""Records of torch's own, but for storages."""


class TorchFile(NamedTuple):
    """A file of torch.save, opened.

    Attributes:
        name: relative to the folder.
        item: all of it.
        archive: the zip or, before torch 1.6, stream it is.
        root: what its pickle holds, as stand-ins.
        pickle_nbytes: length of the pickle.
        problems: what it would run when it is loaded, and bytes that follow the zip.
    """

    name: str
    item: Extent
    archive: Archive
    root: Any
    pickle_nbytes: int
    problems: tuple[Finding, ...]


def load_file(storage: Storage, name: str, nbytes: int) -> TorchFile:
    """Load a file of torch.save.

    Args:
        storage: the folder it is in.
        name: of the file.
        nbytes: its size.

    Raises:
        UnsupportedError: it is a TorchScript archive.
        MetadataError: it or its pickle is damaged.
        RunsCodeError: one of these, and it runs code when it is loaded.
    """
    try:
        return _loaded(storage, name, nbytes)
    except StorageError:
        raise
    except (MetadataError, UnsupportedError) as error:
        from dcptool.pickles.files import refuse_code

        refuse_code(stream(storage, name, nbytes), error)
        raise


def _loaded(storage: Storage, name: str, nbytes: int) -> TorchFile:
    path, calls = join(storage.root, name), Calls()

    def read(byte_offset: int, n_wanted: int) -> bytes:
        return storage.read(name, byte_offset, n_wanted)

    try:
        if is_legacy(read(0, min(nbytes, len(LEGACY_MAGIC)))):
            stream = LegacyStream(read, nbytes, calls)
            unsafe = unsafe_pickle(calls.unsafe, name, name)
            return TorchFile(name, Extent(name, 0, nbytes), stream, stream.root, stream.pickle_nbytes, tuple(unsafe))
        archive = TorchZip(read, nbytes, padded=True)
        if "constants.pkl" in archive.members:
            raise UnsupportedError("it is a TorchScript archive, not a state dict; torch.jit.load reads it")
        archive.require_version()
        pickled = archive.content("data.pkl")
        root = inert.load(pickled, calls=calls)
    except (ItemError, MetadataError) as error:
        raise MetadataError(f"{path}: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error
    found = unsafe_pickle(sorted({*calls.unsafe, *_beside(storage, name, archive, nbytes)}), name, name)
    problems = (*found, *_following(storage, archive, name))
    return TorchFile(name, Extent(name, 0, nbytes), archive, root, len(pickled), problems)


def _beside(storage: Storage, name: str, archive: TorchZip, nbytes: int) -> tuple[str, ...]:
    """Return what pickles run that lie in a zip beside its own and its storages: torch loads none of them."""
    from dcptool.pickles.files import runs

    own = all(member.startswith("data/") or member in _OF_TORCH for member in archive.members)
    return () if own else runs(stream(storage, name, nbytes))


def _following(storage: Storage, archive: TorchZip, file: str) -> list[Finding]:
    """Note bytes behind the end of a file's zip, which torch reads past."""
    if not archive.n_following:
        return []
    start = archive.nbytes - archive.n_following
    rest = storage.read(file, start, min(archive.n_following, _FOLLOWING_NBYTES))
    what = "bytes" if any(rest) else "zeros"
    message = f"{archive.n_following:,} {what} follow the end of its zip, which torch.load reads past"
    step = "Padding of a storage or a copy; what reads zips strictly may refuse it."
    return [Finding.of("padded-file", message, file, next_step=step, severity=Severity.WARNING if any(rest) else None)]
