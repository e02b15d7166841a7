"""What a file of any kind would run when what is for its kind loads it: every pickle in it, by content, not by name.

Streams of pickles (torch.save before 1.6, joblib), zips, tars, arrays of objects, and all of these compressed or inside
one another. Never raises because of what is in them: what cannot be read shows nothing. Reads at most MAX_NBYTES.

Source: torch 2.13, serialization.load; joblib 1.5, numpy_pickle_utils.py; numpy 2.4, lib/_format_impl.py.
"""

from __future__ import annotations

import bz2
import encodings.cp437  # noqa: F401  (which zipfile would import while it reads)
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import IO, Any

from dcptool.errors import MetadataError, RunsCodeError, StorageError, UnsupportedError
from dcptool.pickles import inert
from dcptool.pickles.calls import Calls, certain

MAX_NBYTES = 64 << 20
"""Of a pickle, and of all that is read of a file."""
MAX_PICKLES = 64
_MAX_DEPTH = 3
_MAX_MEMBERS = 20_000
_START_NBYTES = 512
_ZIP, _NUMPY, _PROTO = b"PK\x03\x04", b"\x93NUMPY", b"\x80"
_LOCAL = struct.Struct("<26x2H")
_BARE = re.compile(rb"[(\]})cNKMJIFLSVXUTGBC\x82-\x84\x88-\x8f\x95\x96]")
"""First bytes of pickles that do not say their protocol; text begins so too."""
_SUFFIXES = (".pkl", ".pickle", ".joblib", ".npy", ".pt", ".pth", ".bin", ".ckpt", ".dat", ".data", "/pickle")
_LZMA_NBYTES = 256 << 20
"""What a stream of lzma may need to be unpacked; a dictionary may be 4 GiB, for nothing."""


def _lzma() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(memlimit=_LZMA_NBYTES)


_PACKED: tuple[tuple[bytes, Any], ...] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    (b"\x78\x01", zlib.decompressobj), (b"\x78\x5e", zlib.decompressobj), (b"\x78\x9c", zlib.decompressobj),
    (b"\x78\xda", zlib.decompressobj), (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ", _lzma), (b"\x5d\x00", _lzma),
)  # fmt: skip
_NAME = rb"([A-Za-z_][\w.]{0,200})"
_MEMO = rb"(?:\x94|q.|r.{4})?"
_IMPORT = re.compile(
    rb"c((?:__builtin__|builtins|posix|nt|os|sys|subprocess|runpy|pickle|_pickle|importlib)[\w.]*)\n" + _NAME + rb"\n"
    rb"|(?:\x8c.|X.{4})" + _NAME + _MEMO + rb"(?:\x8c.|X.{4})" + _NAME + _MEMO + rb"\x93",
    re.DOTALL | re.ASCII,
)
"""GLOBAL of the best known modules; STACK_GLOBAL after two strings."""
_ERRORS = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError,
    ValueError, OSError, LookupError, struct.error, MemoryError,
)  # fmt: skip


def refuse_code(file: IO[bytes], error: Exception) -> None:
    """Raise RunsCodeError if a file that could not be read, for `error`, would run code; else return."""
    names = error.names if isinstance(error, RunsCodeError) else runs(file)
    file.seek(0)
    if not isinstance(error, UnsupportedError) and file.read(len(_ZIP)) == _ZIP:  # it is damaged
        names = certain(names)
    if names:
        raise RunsCodeError(str(error).partition("\n")[0], names) from error


def runs(file: IO[bytes]) -> tuple[str, ...]:
    """Return what loading a file runs, by name as `Calls.unsafe`, sorted; empty if nothing, or nothing can be said.

    Raises:
        StorageError: it cannot be read.
    """
    found = _Unpacking()
    found.at(file, 0)
    return tuple(sorted(found.names))


class _Unpacking:
    """One look into a file and what is packed into it."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._left = MAX_NBYTES

    def at(self, file: IO[bytes], depth: int) -> None:
        try:
            file.seek(0)
            start = file.read(_START_NBYTES)
            file.seek(0)
            if start.startswith(_ZIP):
                self._zip(file, depth)
            elif start.startswith(_NUMPY):
                width = 2 if start[6] == 1 else 4
                self._pickles(self._read(file, 8 + width + int.from_bytes(start[8 : 8 + width], "little")))
            else:
                self._rest(file, start, depth)
                if start[257:262] == b"ustar":  # whatever it begins with: a name can be a pickle
                    self._tar(file, depth)
        except StorageError:
            raise
        except _ERRORS:
            return

    def _rest(self, file: IO[bytes], start: bytes, depth: int) -> None:
        make = next((make for magic, make in _PACKED if start.startswith(magic)), None)
        if make and depth < _MAX_DEPTH:
            self.at(BytesIO(self._unpacked(make, self._read(file))), depth + 1)
        elif start.startswith(_PROTO) or _BARE.match(start):
            self._pickles(self._read(file))

    def _read(self, file: IO[bytes], offset: int = 0) -> bytes:
        file.seek(offset)
        return self._taken(file.read(max(self._left, 0)))

    def _taken(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def _unpacked(self, make: Any, data: bytes) -> bytes:
        """Decompress streams, which may follow one another."""
        pieces = []
        while data and self._left > 0:
            unpacker = make()
            try:
                pieces.append(self._taken(unpacker.decompress(data, self._left)))
            except _ERRORS:
                break
            data = unpacker.unused_data
        return b"".join(pieces)

    def _pickles(self, data: bytes) -> None:
        """Note what the pickles of a stream run; raw values may follow them, or lie between those of joblib."""
        calls, position = Calls(), 0
        try:
            for _ in range(MAX_PICKLES):
                if position >= len(data):
                    break
                position += inert.scan(data[position:], calls)
        except MetadataError:
            if position or any(name.startswith("joblib.") for name in calls.names):
                calls.add_names(_spelt(data[position:]))
        self.names |= set(calls.unsafe)

    def _zip(self, file: IO[bytes], depth: int) -> None:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist()[:_MAX_MEMBERS]:
                start = _content(file, archive, info, _START_NBYTES)
                if self._is_worth(start, f"/{info.filename}", depth):
                    self.at(BytesIO(self._taken(_content(file, archive, info, self._left))), depth + 1)

    def _tar(self, file: IO[bytes], depth: int) -> None:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for _, member in zip(range(_MAX_MEMBERS), archive, strict=False):
                content = archive.extractfile(member)  # of links what they lead to; None for folders
                if content and self._is_worth(content.read(_START_NBYTES), f"/{member.name}", depth):
                    self.at(content, depth + 1)

    def _is_worth(self, start: bytes, name: str, depth: int) -> bool:
        """Tell whether something packed is to be looked at."""
        known = start.startswith((_ZIP, _PROTO, _NUMPY, *(magic for magic, _ in _PACKED)))
        named = name.lower().endswith(_SUFFIXES) or name in ("/storages", "/tensors")
        return self._left > 0 and depth < _MAX_DEPTH and (known or named)


def _content(file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo, nbytes: int) -> bytes:
    """Return the first bytes of a member, whether its checksum is right or not."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with archive.open(info) as content:
            return content.read(nbytes)
    file.seek(info.header_offset)
    header = file.read(_LOCAL.size)
    file.seek(info.header_offset + _LOCAL.size + sum(_LOCAL.unpack(header)))
    if info.compress_type == zipfile.ZIP_STORED:
        return file.read(min(nbytes, info.file_size))
    return zlib.decompressobj(-15).decompress(file.read(min(info.compress_size, MAX_NBYTES)), max(nbytes, 1))


def _spelt(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield what looks like imports anywhere in bytes."""
    for match in _IMPORT.finditer(data):
        module, name = (part.decode("ascii") for part in match.groups() if part)
        yield module, name
