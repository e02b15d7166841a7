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
    waiting = sorted(wanted, key=lambda one: one.start, reverse=True)
    going: list[tuple[WantedDigest, Any]] = []
    found = {}
    buffer = memoryview(bytearray(min(storage.piece_nbytes, nbytes)))
    for start in range(0, nbytes, storage.piece_nbytes):
        piece = buffer[: min(len(buffer), nbytes - start)]
        storage.read_into(name, start, piece)
        stop = start + len(piece)
        while waiting and waiting[-1].start < stop:
            one = waiting.pop()
            going.append((one, _new(one)))
        for one, digest in going:
            digest.update(piece[max(one.start - start, 0) : nbytes if one.end is None else one.end - start])
        found.update({one: digest.hexdigest() for one, digest in going if one.end is not None and one.end <= stop})
        going = [(one, digest) for one, digest in going if one not in found]
    return {
        **found,
        **{one: digest.hexdigest() for one, digest in going},
        **{one: _new(one).hexdigest() for one in waiting},
    }


def sha256(storage: Storage, name: str, nbytes: int) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits; errors as in `digests`."""
    return digests(storage, name, nbytes, [SHA256])[SHA256]


SHA256 = WantedDigest("sha256", NBYTES["sha256"])


def _new(wanted: WantedDigest) -> Any:
    if wanted.algorithm == BLAKE2:
        return hashlib.blake2b(digest_size=wanted.digest_nbytes)
    return hashlib.new(wanted.algorithm, usedforsecurity=False)
