"""Copy the files that follow a checkpoint, byte by byte, after a look at each as `verify --records` looks at it."""

from __future__ import annotations

from collections.abc import Sequence

from dcptool.checkpoint.findings import Finding, errors
from dcptool.checkpoint.kinds import Effect
from dcptool.checks.check import Level
from dcptool.checks.side_files import look_at
from dcptool.errors import ItemError, StorageError, UnsafePickleError
from dcptool.formats.digests import sha256
from dcptool.ops.following import Carried, Following
from dcptool.storage import Creator, Progress, Storage, join
from dcptool.words import cut_lines

MAX_LISTED = 20


def require_whole(found: Following, trust: bool, threads: int | None) -> None:
    """Refuse files that are damaged, or that run code when they are loaded, before they are carried.

    Raises:
        ItemError: names them.
        UnsafePickleError: they run code, and nobody said that it is trusted.
        StorageError: one could not be read.
    """
    if found.storage is None or not found.carried:
        return
    files = {file.name: file.entry.nbytes for file in found.carried}
    wrong = errors(look_at(found.storage, files, Level.RECORDS, threads).findings)
    unsafe = [finding for finding in wrong if finding.traits.effect is Effect.UNSAFE]
    others = [finding for finding in wrong if finding.traits.effect is not Effect.UNSAFE]
    if others:
        raise ItemError(_refused(found.storage, "damaged files beside the checkpoint", others))
    if unsafe and not trust:
        raise UnsafePickleError(
            _refused(found.storage, "files beside the checkpoint that run code when they are loaded", unsafe),
            next_step="--trust takes them all the same; nothing of them is executed here.",
        )


def _refused(storage: Storage, what: str, found: Sequence[Finding]) -> str:
    lines = cut_lines([finding.message for finding in found], MAX_LISTED)
    return "\n".join([f"{storage.root} has {what}, nothing was written:", *lines])


def carry(found: Following, files: Sequence[Carried], target: Creator, progress: Progress | None = None) -> None:
    """Copy files byte by byte.

    Raises:
        StorageError: one cannot be read or written, or changed since it was chosen.
    """
    if found.storage is None:
        return
    for file in files:
        sink = target.create(file.target)
        try:
            if file.content is not None:
                sink.write(file.content)
            for start in range(0, 0 if file.content is not None else file.nbytes, found.storage.piece_nbytes):
                data = found.storage.read(file.name, start, min(found.storage.piece_nbytes, file.entry.nbytes - start))
                sink.write(data)
                if progress:
                    progress(len(data))
            _require_unchanged(found.storage, file)
            sink.finish()
        except BaseException:
            sink.abort()
            raise


def _require_unchanged(storage: Storage, file: Carried) -> None:
    now = storage.entry(file.name)
    if now is None or (now.nbytes, now.mtime, now.version) != (file.entry.nbytes, file.entry.mtime, file.entry.version):
        message = f"{join(storage.root, file.name)} changed while it was read, nothing was written"
        raise StorageError(message, next_step="Somebody saves there: run this again when that is done.")


def require_same_bytes(found: Following, written: Storage) -> None:
    """Compare every carried file with what it was made from.

    Raises:
        ItemError: one differs.
    """
    if found.storage is None:
        return
    for file in found.carried:
        if file.content is not None:
            continue
        meant = sha256(found.storage, file.name, file.entry.nbytes)
        if sha256(written, file.target, file.entry.nbytes) != meant:
            raise ItemError(f"{file.target} of the output differs from {file.name} of the source")
