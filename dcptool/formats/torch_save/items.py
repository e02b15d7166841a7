"""Tensors and objects inside a zip that torch.save wrote, found without executing its pickle."""

from __future__ import annotations

import functools
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Examined, Extent, Payload, Record
from dcptool.checkpoint.findings import how_to_load
from dcptool.checkpoint.regions import span
from dcptool.errors import ItemError, UnsupportedError
from dcptool.formats.torch_save.stream import Archive
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.pickles import inert, plain
from dcptool.pickles.calls import Calls
from dcptool.pickles.standins import qualified_name
from dcptool.pickles.tensors import TensorView, foreign_tensor, tensor_view

MAX_KEPT_NBYTES = 4096
MAX_CHECKED_NBYTES = 1 << 20
"""A storage in an object up to this length is read whole to be shown, so that its CRC32 can be checked."""
_KEPT_STORAGES = 8

_Viewed = tuple[TensorView | None, tuple[str, ...], str]


def payload_of(view: TensorView, archive: Archive, item: Extent) -> Payload:
    """Return the payload behind a tensor view: the zip member of its storage.

    Args:
        view: what the pickle says.
        archive: the zip, which is `item` after its transforms are undone.
        item: where the zip is stored.

    Raises:
        ItemError: the member is missing or its length is not what the pickle says.
        UnsupportedError: it was written on a big-endian machine.
    """
    archive.require_little_endian()
    member = archive.member(f"data/{view.storage}")
    # torch counts a storage in elements of the tensor's dtype and drops a remainder that is no whole element.
    if not 0 <= member.nbytes - view.storage_nbytes < dtypes.lookup(view.dtype).itemsize:
        raise ItemError(f"record {member.name!r} has {member.nbytes} bytes, its pickle says {view.storage_nbytes}")
    record = Record(item, archive.data_offset(member), member.nbytes, member.name, member.crc32)
    return Payload(record, view.dtype, view.shape, view.strides, view.storage_offset, view.conj, view.neg)


def tensor_payload(archive: TorchZip, item: Extent) -> Payload:
    """Return the payload of a zip that holds one tensor and nothing else, as DCP's items do.

    Raises:
        ItemError: it holds something else, or is damaged.
        UnsupportedError: it is a tensor of a form or class that is not looked into.
    """
    view, _, foreign = _view(archive.content("data.pkl"))
    if view is None:
        raise not_looked_into(foreign)
    return payload_of(view, archive, item)


def not_looked_into(foreign: str) -> UnsupportedError:
    """Return the error that something is a tensor whose values are not found here; `foreign` says what."""
    return UnsupportedError(f"it is {foreign}, which dcptool does not look into", next_step=how_to_load(foreign))


def examine(archive: TorchZip, item: Extent, is_tensor: bool) -> Examined:
    """Read all headers of a zip that holds one tensor, or one object, and check that they agree.

    Raises:
        ItemError: they do not, or it holds something else.
    """
    archive.require_version()
    pickled = archive.content("data.pkl")
    if is_tensor:
        view, unsafe, foreign = _view(pickled)
        payload = payload_of(view, archive, item) if view else None
        return Examined(payload, archive.records(item), unsafe, foreign)
    calls = Calls()
    inert.load(pickled, calls=calls)
    return Examined(None, archive.records(item), calls.unsafe)


def _view(pickled: bytes) -> _Viewed:
    """Return the tensor that is all of an item's pickle, what the pickle would run, and what is not looked into."""
    return _small_view(pickled) if len(pickled) <= MAX_KEPT_NBYTES else _read_view(pickled)


def _read_view(pickled: bytes) -> _Viewed:
    calls = Calls()
    root = inert.load(pickled, calls=calls)
    view = tensor_view(root)
    foreign = "" if view else foreign_tensor(root)
    if view is None and not foreign:
        raise ItemError(f"the metadata says tensor, stored is an object of class {qualified_name(root)}")
    return view, calls.unsafe, foreign


_small_view = functools.lru_cache(4096)(_read_view)
"""Chunks of one dtype and shape have one pickle, byte for byte; a checkpoint has few different ones."""


def storages(archive: Archive, item: Extent) -> dict[str, Record]:
    """Return the records of a zip's storages, by key."""
    archive.require_little_endian()
    return {
        record.name.removeprefix("data/"): record for record in archive.records(item) if record.name.startswith("data/")
    }


def decoded(root: Any, archive: Archive) -> Any:
    """Return an object of a zip's pickle in readable form, with the values of small tensors in it."""

    @functools.lru_cache(_KEPT_STORAGES)
    def checked(name: str) -> bytes:
        return archive.content(name, MAX_CHECKED_NBYTES)

    def read_view(view: TensorView) -> bytes:
        record = payload_of(view, archive, Extent("", 0, archive.nbytes)).record
        itemsize = dtypes.lookup(view.dtype).itemsize
        start, nbytes = view.storage_offset * itemsize, span(view.shape, view.strides) * itemsize
        if record.nbytes <= MAX_CHECKED_NBYTES:
            return checked(record.name)[start : start + nbytes]
        return archive.read(record.byte_offset + start, nbytes)

    return plain.decode(root, read_view)
