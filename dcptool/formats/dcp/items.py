"""Items of a DCP checkpoint: torch zips, tensors of a safetensors blob, bare bytes, each maybe compressed."""

from __future__ import annotations

from collections import OrderedDict
from io import BytesIO
from typing import Any

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.entries import Entry, ObjectEntry, StoredPiece, TensorEntry
from dcptool.checkpoint.extents import Chunk, Examined, Extent, Payload, Record
from dcptool.checkpoint.regions import contiguous_strides, volume
from dcptool.errors import ItemError, MetadataError, StorageError, UnsupportedError
from dcptool.formats.safetensors.header import Header, read_header
from dcptool.formats.torch_save import items as torch_items
from dcptool.formats.torch_save.zip import TorchZip, head_nbytes
from dcptool.pickles import inert
from dcptool.pickles.calls import Calls
from dcptool.storage import Storage

MAX_VALUE_NBYTES = 32 << 20
"""An object's item longer than this is not decoded for display."""
_ZIP, _ZIP_END, _ZIP_END_NBYTES, _ZSTD = b"PK\x03\x04", b"PK\x05\x06", 22, b"\x28\xb5\x2f\xfd"
_OTHER_SAVE = "the file is of another save, or overwritten"
_START_NBYTES = 64
_DECODED_NBYTES = 64 << 20
"""A compressed item may always have this many bytes once it is not, and so many are kept."""
_PIECE_NBYTES = 1 << 20


class DcpSource:
    """Finds and reads the payloads of one DCP directory."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._headers: dict[tuple[str, int], Header] = {}
        self._decoded: OrderedDict[Extent, bytes] = OrderedDict()
        self._limits: dict[Extent, int] = {}
        self.unsafe: dict[str, tuple[str, ...]] = {}

    def payload(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> Payload:
        nbytes = self._nbytes(item, volume(chunk.sizes) * dtypes.lookup(entry.dtype).itemsize)
        start = self._read(item, 0, head_nbytes(nbytes))
        if start.startswith(_ZIP):
            archive = TorchZip(lambda at, n: self._read(item, at, n), nbytes, start)
            return torch_items.tensor_payload(archive, item, entry.inner)
        if not item.transforms and self._in_blob(item):
            return self._safetensors_payload(entry, chunk, item)
        raise ItemError(_no_zip(start))

    def examine(self, entry: Entry, chunk: Chunk | None, item: Extent) -> Examined:
        expected = MAX_VALUE_NBYTES
        if chunk is not None and isinstance(entry, TensorEntry):
            expected = volume(chunk.sizes) * dtypes.lookup(entry.dtype).itemsize
        nbytes = self._nbytes(item, expected)
        try:
            return self._examined(entry, chunk, item, nbytes)
        except StorageError:
            raise
        except (ItemError, MetadataError, UnsupportedError) as error:
            from dcptool.pickles.files import MAX_NBYTES, refuse_code

            if not self._in_blob(item):
                refuse_code(BytesIO(self._read(item, 0, min(nbytes, MAX_NBYTES))), error)
            raise

    def _examined(self, entry: Entry, chunk: Chunk | None, item: Extent, nbytes: int) -> Examined:
        start = self._read(item, 0, head_nbytes(nbytes))
        if start.startswith(_ZIP):
            archive = TorchZip(lambda at, n: self._read(item, at, n), nbytes, start)
            return torch_items.examine(archive, item, chunk is not None)
        if chunk is None or not isinstance(entry, TensorEntry):
            raise ItemError(_no_zip(start))
        payload = self.payload(entry, chunk, item)
        return Examined(payload, (payload.record,))

    def edge_problem(self, item: Extent) -> str:
        start = self._storage.read(item.file, item.byte_offset, min(4, item.nbytes))
        if item.transforms:
            is_zstd = item.transforms[-1].partition("/")[0] == "stream.zstd"
            return "it does not begin like a zstd frame; " + _OTHER_SAVE if is_zstd and start != _ZSTD else ""
        if start != _ZIP:
            try:
                if self._in_blob(item):
                    self._blob_header(item)
                    return ""
            except (MetadataError, StorageError) as error:
                return f"the safetensors blob of this file is damaged or cut short: {error}"
            return "no item is where the metadata says; " + _OTHER_SAVE
        end = item.byte_offset + item.nbytes - _ZIP_END_NBYTES
        if item.nbytes < _ZIP_END_NBYTES or self._storage.read(item.file, end, 4) != _ZIP_END:
            return "the item does not end where the metadata says; " + _OTHER_SAVE
        return ""

    def graph(self, entry: ObjectEntry) -> tuple[Any, dict[str, Record]]:
        archive, item = self._object_archive(entry)
        return self._loaded(entry, archive), torch_items.storages(archive, item)

    def stored(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> StoredPiece | None:
        nbytes = self._nbytes(item, MAX_VALUE_NBYTES // 4)
        start = self._read(item, 0, head_nbytes(nbytes))
        if not start.startswith(_ZIP):
            return None
        found = torch_items.stored(TorchZip(lambda at, n: self._read(item, at, n), nbytes, start), item)
        if found and found.unsafe:
            self.unsafe[entry.fqn] = found.unsafe
        return found

    def over(self, storage: Storage) -> DcpSource:
        return DcpSource(storage)

    def value(self, entry: ObjectEntry) -> Any:
        archive, _ = self._object_archive(entry)
        if archive.nbytes > MAX_VALUE_NBYTES:
            raise UnsupportedError(f"an object of {archive.nbytes:,} bytes is too large to show")
        return torch_items.decoded(self._loaded(entry, archive), archive)

    def _loaded(self, entry: ObjectEntry, archive: TorchZip) -> Any:
        """Load an object's pickle, and note what it would run."""
        calls = Calls()
        root = inert.load(archive.content("data.pkl"), calls=calls)
        if calls.unsafe:
            self.unsafe[entry.fqn] = calls.unsafe
        return root

    def _object_archive(self, entry: ObjectEntry) -> tuple[TorchZip, Extent]:
        item = entry.item
        if item is None:
            raise ItemError("the metadata has no place for it")
        nbytes = self._nbytes(item, MAX_VALUE_NBYTES // 4)
        start = self._read(item, 0, min(nbytes, _START_NBYTES))
        if not start.startswith(_ZIP):
            raise ItemError(_no_zip(start))
        return TorchZip(lambda at, n: self._read(item, at, n), nbytes), item

    def read_into(self, record: Record, byte_offset: int, out: memoryview) -> None:
        item = record.item
        start = record.byte_offset + byte_offset
        if item.transforms:
            out[:] = self._read(item, start, len(out))
        else:
            self._storage.read_into(item.file, item.byte_offset + start, out)

    def _nbytes(self, item: Extent, expected: int) -> int:
        """Return an item's length after its transforms are undone; more than 4 × `expected` bytes are refused."""
        if not item.transforms:
            return item.nbytes
        self._limits[item] = max(4 * expected, _DECODED_NBYTES)
        return len(self._undone(item))

    def _read(self, item: Extent, byte_offset: int, nbytes: int) -> bytes:
        if not item.transforms:
            return self._storage.read(item.file, item.byte_offset + byte_offset, nbytes)
        data = self._undone(item)[byte_offset : byte_offset + nbytes]
        if len(data) < nbytes:
            raise ItemError(f"it ends before byte {byte_offset + nbytes} of its uncompressed form")
        return data

    def _undone(self, item: Extent) -> bytes:
        """Return an item with its transforms undone; the last ones are kept, for they are read piece by piece."""
        data = self._decoded.get(item)
        if data is None:
            stored = self._storage.read(item.file, item.byte_offset, item.nbytes)
            data = undo_transforms(stored, item.transforms, self._limits.get(item, _DECODED_NBYTES))
            self._decoded[item] = data
            while len(self._decoded) > 1 and sum(map(len, self._decoded.values())) > _DECODED_NBYTES:
                self._decoded.popitem(last=False)
        return data

    def _in_blob(self, item: Extent) -> bool:
        """Tell whether an item's place is the beginning of a safetensors blob: a length, then a JSON object."""
        size = self._storage.size(item.file) or 0
        return size >= item.byte_offset + 9 and self._storage.read(item.file, item.byte_offset + 8, 1) == b"{"

    def _blob_header(self, item: Extent) -> tuple[Extent, Header]:
        """Return the safetensors blob that begins at an item's place, and its header."""
        blob = Extent(item.file, item.byte_offset, (self._storage.size(item.file) or 0) - item.byte_offset)
        header = self._headers.get(blob[:2])
        if header is None:
            header = read_header(lambda at, n: self._storage.read(blob.file, blob.byte_offset + at, n), blob.nbytes)
            self._headers[blob[:2]] = header
        return blob, header

    def _safetensors_payload(self, entry: TensorEntry, chunk: Chunk, item: Extent) -> Payload:
        """Find a tensor in the safetensors blob that SAFETENSORS serialization writes at the end of a file.

        All tensors of a file share one byte_offset; the blob's own header says where each is.
        """
        blob, header = self._blob_header(item)
        found = header.tensors.get(entry.fqn)
        if found is None:
            raise ItemError("it is neither a torch.save zip nor in the safetensors blob of this file")
        saved = header.saved_offsets.get(entry.fqn, chunk.offsets)
        if saved != chunk.offsets:
            raise ItemError(f"the safetensors blob holds the chunk at {list(saved)} instead")
        record = Record(blob, header.data_offset + found.byte_offset, found.nbytes, entry.fqn, None)
        return Payload(record, found.dtype, found.shape, contiguous_strides(found.shape))


def _no_zip(start: bytes) -> str:
    """Say what an item that should be a zip begins with."""
    if not start.strip(b"\0"):
        return "its bytes are zeros: they never reached the disk, or a copy left a hole"
    return f"it is no torch.save zip: it begins with the bytes {start[:8].hex(' ')}"


def undo_transforms(data: bytes, transforms: tuple[str, ...], limit: int) -> bytes:
    """Undo the stream transforms of an item, last applied first.

    Args:
        data: the stored bytes.
        transforms: their names as the metadata gives them, such as `stream.zstd/1`.
        limit: most bytes the result may have.

    Raises:
        UnsupportedError: an unknown transform, or its codec is not installed.
        ItemError: the stream is damaged or longer than `limit` bytes.

    Source: torch 2.14, distributed/checkpoint/_extension.py.
    """
    for name in reversed(transforms):
        if name.partition("/")[0] != "stream.zstd":
            raise UnsupportedError(
                f"its bytes went through {name!r}, which is unknown to this dcptool",
                next_step="a newer version may know it",
            )
        try:
            import zstandard
        except ImportError:
            raise UnsupportedError("it is zstd-compressed", next_step="pip install 'dcptool[zstd]'") from None
        try:
            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
                data = _read_all(stream, limit)
        except (zstandard.ZstdError, MemoryError) as error:
            raise ItemError(f"its zstd frame is damaged: {error}") from None
    return data


def _read_all(stream: Any, limit: int) -> bytes:
    pieces, nbytes = [], 0
    while piece := stream.read(_PIECE_NBYTES):
        nbytes += len(piece)
        if nbytes > limit:
            raise ItemError(f"its zstd frame holds more than the {limit:,} bytes it may have")
        pieces.append(piece)
    return b"".join(pieces)
