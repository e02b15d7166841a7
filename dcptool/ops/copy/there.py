"""What is at a target already: the same step, something else, or a copy that did not come to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dcptool.copying.publishing import require_place
from dcptool.errors import CheckpointNotFoundError, OutputExistsError
from dcptool.formats.digests import sha256
from dcptool.formats.marker import FOREIGN, NAME, Marker, marked_as, marker_problems
from dcptool.formats.table import is_metadata
from dcptool.ops.copy.crew import ALONE, Crew
from dcptool.ops.copy.journal import STORE_NAME
from dcptool.ops.copy.places import unfinished_at
from dcptool.ops.copy.survey import Survey
from dcptool.runs.activity import list_files
from dcptool.storage import LocalStorage, base_name, is_url, join, locate, walk

SMALL_NBYTES = 1 << 20
"""Files up to this length are compared by what is in them where a step is only looked at quickly."""


def sizes_of(found: Survey) -> tuple[tuple[str, int], ...]:
    """Return name and bytes of each file of a copy but its marker, in the order in which they are copied."""
    return tuple((name, found.listing[name].nbytes) for name in found.files)


def is_there(found: Survey, target: str, marker: str, *, quick: bool = False, crew: Crew = ALONE) -> bool:
    """Tell whether the same step is at a path already, with a marker that gives the SHA-256 of every file.

    Args:
        found: the step.
        target: path or URL.
        marker: name of the marker.
        quick: compare only small files and metadata, where the source has no checksums in its own marker.
        crew: who looks; each at the files that it would send.
    """
    proof = crew.decide(lambda: _proof(found, target, marker))
    if proof is None:
        return False
    crew.learn(lambda: found.claims)
    mine = [name for name in found.files if crew.sends(name)]
    return all(crew.each(lambda: all(_is_same(found, name, proof.sha256.get(name), quick) for name in mine)))


def _proof(found: Survey, target: str, marker: str) -> Marker | None:
    """Return the marker of a step at a path that has the files of this one, None if there is no such step."""
    try:
        location = locate(target)
        if location.file is not None:
            return None
        there = {name: entry.nbytes for name, entry in list_files(location).items()}
    except CheckpointNotFoundError:
        return None
    proof = marked_as(location.storage, marker)
    if proof is None or {**dict(sizes_of(found)), marker: there.get(marker)} != there:
        return None
    foreign = {marker, NAME, *FOREIGN}
    if any(name not in proof.sha256 for name in found.files if name not in foreign):
        return None
    return None if marker_problems(proof, location.storage, there) else proof


def _is_same(found: Survey, name: str, digest: str | None, quick: bool) -> bool:
    """Tell whether a file of the source has a SHA-256; metadata is read, whatever a marker says that may be older."""
    nbytes, claimed = found.listing[name].nbytes, found.sha256_claims(name)
    if digest is None:
        return True
    if not is_metadata(name) and (claimed or (quick and nbytes > SMALL_NBYTES)):
        return not claimed or claimed == {digest}
    return sha256(found.location.storage, name, nbytes) == digest


def taken(found: Survey, target: str, also: Sequence[str], overwrite: bool) -> OutputExistsError | None:
    """Return the error that something is at the target, None if a copy can go there.

    Args:
        found: the step.
        target: path or URL.
        also: the source's further folders.
        overwrite: a step that is there is to be replaced.

    Raises:
        StorageError, UnsupportedError: no copy can, whatever is there.
    """
    sources = (found.path, *also)
    needed = found.nbytes
    if not is_url(target):  # what an unfinished copy has taken is used
        temporary, _ = unfinished_at(target.rstrip("/") or target)
        there = walk(LocalStorage(temporary)) if os.path.isdir(temporary) else []
        needed = max(needed - sum(entry.nbytes for entry in there), 0)
    try:
        require_place(target, False, needed, overwrite, sources)
    except OutputExistsError as error:
        inside = join(target.rstrip("/"), base_name(found.path))
        hint = f"To copy it into that folder: {inside}" if base_name(target) != base_name(found.path) else ""
        return OutputExistsError(error.message, next_step=hint or error.next_step)
    return None


def is_begun(target: str) -> bool:
    """Tell whether a copy to a store was begun there, and did not come to its end."""
    try:
        location = locate(target)
    except CheckpointNotFoundError:
        return False
    return location.file is None and location.storage.size(STORE_NAME) is not None
