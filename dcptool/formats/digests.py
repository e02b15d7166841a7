"""Digests of files: whole ones and parts of them, all that are wanted of one file with one read of it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, NamedTuple

from dcptool.storage import Storage

NBYTES = {"md5": 16, "sha1": 20, "sha224": 28, "sha256": 32, "sha384": 48, "sha512": 64}
"""Bytes of the digests that are computed here, by algorithm; those of blake2b have 1 to 64."""
BLAKE2 = "blake2b"


class WantedDigest(NamedTuple):
    """A digest that is wanted of a file.

    Attributes:
        algorithm: a name of `NBYTES`, or BLAKE2.
        digest_nbytes: bytes of the digest, which BLAKE2's content depends on.
        start, end: first and one past the last byte of the file it is of; None: to its end.
    """

    algorithm: str
    digest_nbytes: int
    start: int = 0
    end: int | None = None


def is_computed(algorithm: str, digest_nbytes: int) -> bool:
    """Tell whether a digest of an algorithm and a length is one that is computed here."""
    return 0 < digest_nbytes <= 64 if algorithm == BLAKE2 else NBYTES.get(algorithm) == digest_nbytes


def digests(storage: Storage, name: str, nbytes: int, wanted: Collection[WantedDigest]) -> dict[WantedDigest, str]:
    """Read a file once and return its digests, in hexadecimal digits.

    Args:
        storage: holds the file.
        name: of the file.
        nbytes: of the file; no part ends behind it.
        wanted: at most a few of them over the same bytes: each is computed by itself.

    Raises:
        StorageError: the file cannot be read.
    """
    passing = Digesting(nbytes, wanted)
    buffer = memoryview(bytearray(min(storage.piece_nbytes, nbytes)))
    for start in range(0, nbytes, storage.piece_nbytes):
        piece = buffer[: min(len(buffer), nbytes - start)]
        storage.read_into(name, start, piece)
        passing.look(start, piece)
    return passing.found()


class Digesting:
    """Digests of a file that passes piece by piece, front to back; arguments as of `digests`."""

    def __init__(self, nbytes: int, wanted: Collection[WantedDigest]) -> None:
        self._nbytes = nbytes
        self._waiting = sorted(wanted, key=lambda one: one.start, reverse=True)
        self._going: list[tuple[WantedDigest, Any]] = []
        self._found: dict[WantedDigest, str] = {}

    def look(self, start: int, piece: memoryview) -> None:
        """Take the next piece, which begins at byte `start` of the file."""
        stop = start + len(piece)
        while self._waiting and self._waiting[-1].start < stop:
            one = self._waiting.pop()
            self._going.append((one, _new(one)))
        for one, digest in self._going:
            digest.update(piece[max(one.start - start, 0) : self._nbytes if one.end is None else one.end - start])
        ended = [(one, digest) for one, digest in self._going if one.end is not None and one.end <= stop]
        self._found.update({one: digest.hexdigest() for one, digest in ended})
        self._going = [(one, digest) for one, digest in self._going if one not in self._found]

    def found(self) -> dict[WantedDigest, str]:
        """Return the digests, in hexadecimal digits, once all pieces have passed."""
        return {
            **self._found,
            **{one: digest.hexdigest() for one, digest in self._going},
            **{one: _new(one).hexdigest() for one in self._waiting},
        }


def sha256(storage: Storage, name: str, nbytes: int) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits; errors as in `digests`."""
    return digests(storage, name, nbytes, [SHA256])[SHA256]


SHA256 = WantedDigest("sha256", NBYTES["sha256"])


def _new(wanted: WantedDigest) -> Any:
    if wanted.algorithm == BLAKE2:
        return hashlib.blake2b(digest_size=wanted.digest_nbytes)
    return hashlib.new(wanted.algorithm, usedforsecurity=False)
