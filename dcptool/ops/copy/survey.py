"""What is to be copied: the files of a step, whether it is sound, and what marker and manifests say of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, errors, state_of
from dcptool.checkpoint.items import FileItems
from dcptool.checkpoint.kinds import Effect
from dcptool.checks.check import Level
from dcptool.errors import ItemError, StorageError, UnsafePickleError, UnsupportedError
from dcptool.formats.detect import find_parts, open_part
from dcptool.formats.digests import SHA256
from dcptool.formats.marker import NAME
from dcptool.formats.table import is_metadata, vouching
from dcptool.ops.verify.judge import judge_at
from dcptool.ops.verify.verdict import State, Verdict, VerifyOptions
from dcptool.ops.verify.vouched import Claim, claims_of
from dcptool.runs.activity import list_files
from dcptool.storage import DirEntry, Location, locate
from dcptool.words import cut_lines, listed

MAX_TOLD = 20
MAX_STEPS = 2
_WHAT = {
    State.OTHER: "is no checkpoint that can be copied",
    State.INCOMPLETE: "is not whole",
    State.UNREADABLE: "could not be read",
    State.UNSAFE: "runs code when it is loaded",
    State.IN_PROGRESS: "is being written",
    State.UNMARKED: "has no marker that is right",
}
_TRUST = "--trust takes it all the same."


class ItemsOfFile(NamedTuple):
    """A checkpoint that has items in a file, and the name of the file in it."""

    checkpoint: Checkpoint
    items: FileItems
    name: str


class Survey:
    """A step that is to be copied.

    Args:
        location: its folder, or several as one.
        marker: name of its marker.
        threads: how many read at the same time.

    Attributes:
        listing: its files by name, as they were before anything of it was read.
    """

    def __init__(self, location: Location, marker: str, threads: int | None) -> None:
        self.location, self.marker, self._threads = location, marker, threads
        self.listing: Mapping[str, DirEntry] = list_files(location)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on it, for which the headers of all items are read."""
        return judge_at(self.location, VerifyOptions(Level.RECORDS, self.marker, threads=self._threads))

    @cached_property
    def parts(self) -> Sequence[str]:
        """The places of the checkpoints in it that opened."""
        return [report.name for report in self.verdict.parts]

    @property
    def path(self) -> str:
        """Path or URL of the step."""
        return self.location.path

    @property
    def last(self) -> list[str]:
        """The files that make a copy look complete, in the order in which they come, without the step's own marker."""
        names = [name for name in vouching(self.listing, self.marker) if name != self.marker]
        markers = [name for name in names if not is_metadata(name)]
        return [*filter(is_metadata, names), *sorted(markers, key=lambda name: -name.count("/"))]

    @property
    def first(self) -> list[str]:
        """All other files, the largest first."""
        last = {self.marker, *self.last}
        return sorted(self.listing.keys() - last, key=lambda name: (-self.listing[name].nbytes, name))

    @property
    def files(self) -> list[str]:
        """All files but the step's own marker, in the order in which they are copied."""
        return [*self.first, *self.last]

    @property
    def nbytes(self) -> int:
        """Bytes of these."""
        return sum(self.listing[name].nbytes for name in self.files)

    @cached_property
    def held(self) -> Mapping[str, Sequence[ItemsOfFile]]:
        """For each file the checkpoints that have items in it."""
        found: dict[str, list[ItemsOfFile]] = {}
        for part in self.parts:
            checkpoint = open_part(self.location, part)
            items = FileItems(checkpoint)
            for name in items.files:
                found.setdefault(f"{part}/{name}" if part else name, []).append(ItemsOfFile(checkpoint, items, name))
        return found

    @cached_property
    def claims(self) -> Mapping[str, Sequence[Claim]]:
        """What marker and manifests say of each file's digests."""
        sizes = {name: entry.nbytes for name, entry in self.listing.items()}
        parts = [part.name for part in find_parts(self.location, below_whole=True)]
        found: dict[str, list[Claim]] = {}
        for claim in claims_of(self.location, sizes, parts, self.marker):
            found.setdefault(claim.file, []).append(claim)
        return found

    def sha256_claims(self, name: str) -> set[str]:
        """Return what marker and manifests say that the SHA-256 of a file is."""
        return {claim.value for claim in self.claims.get(name, ()) if claim.wanted == SHA256}

    @property
    def notes(self) -> list[str]:
        """What of the step is not copied, one sentence each."""
        left = sorted(self.location.storage.links().keys() - self.listing.keys())
        return [f"not copied, for they lead to folders or nowhere: the links {listed(left, 5)}"] if left else []

    def require_unchanged(self) -> None:
        """Refuse a step that somebody wrote to while it was read: half of it may be of another save.

        Raises:
            StorageError: names a file that changed.
            CheckpointNotFoundError: it is gone.
        """
        before, now = self._seen()
        if now != before:
            changed = sorted({*before.items()} ^ {*now.items()})[0][0]
            message = f"{self.path}: {changed} changed while it was read, nothing was published"
            raise StorageError(message, next_step="Somebody saves there: run this again when that is done.")

    def _seen(self) -> tuple[Mapping[str, DirEntry], Mapping[str, DirEntry]]:
        """Return its files as they were, and as they are now."""
        return self.listing, list_files(self.location)


def survey(
    path: str | os.PathLike[str], also: Sequence[str] = (), marker: str = NAME, threads: int | None = None
) -> Survey:
    """List a step that is to be copied.

    Raises:
        CheckpointNotFoundError: there is nothing at that path.
        StorageError: it cannot be listed.
        UnsupportedError: the path is a file.
    """
    return Survey(located_step(path, also), marker, threads)


def located_step(path: str | os.PathLike[str], also: Sequence[str] = ()) -> Location:
    """Find a step's folder; errors as of `survey`."""
    location = locate(path, also)
    if location.file is not None:
        raise UnsupportedError(
            f"{location.path} is a file, no step", next_step="cp and the tools of object stores copy single files."
        )
    return location


def require_copyable(found: Survey, trust: bool) -> None:
    """Refuse a step that is damaged, not whole, being written, or unsafe.

    Args:
        found: the step.
        trust: what runs code when it is loaded is no reason to refuse.

    Raises:
        ItemError: it is not whole, or damaged; the message lists what.
        UnsafePickleError: it runs code when it is loaded.
        StorageError: it could not be read, or is being written.
    """
    verdict = found.verdict
    if verdict.state is State.IN_PROGRESS:
        raise StorageError(f"{found.path} is being written, not copied: {verdict.reason}", next_step=_IN_PROGRESS)
    wrong = [one for one in errors(verdict.findings) if not (trust and one.traits.effect is Effect.UNSAFE)]
    if verdict.parts:  # items of a kind that is not looked into are carried as they are
        wrong = [one for one in wrong if one.kind != "unsupported-item"]
    state = State(state_of(wrong))
    if state is not State.COMPLETE or (verdict.state is State.OTHER and not verdict.parts):
        raise refusal(found.path, wrong, state if wrong else verdict.state)


_IN_PROGRESS = "Copy it when it is saved; if nobody saves there any more, dcptool verify --grace 0s says what it is."


def refusal(path: str, wrong: Sequence[Finding], state: State) -> ItemError | StorageError | UnsafePickleError:
    """Return the error that a step is not copied, with all that is wrong with it."""
    kind: type[ItemError | StorageError | UnsafePickleError] = ItemError
    if state in (State.UNREADABLE, State.UNSAFE):
        kind = StorageError if state is State.UNREADABLE else UnsafePickleError
    steps = dict.fromkeys(one.next_step for one in wrong if one.next_step)
    lines = [f"{path} {_WHAT.get(state, 'is damaged')}, not copied:"]
    lines += cut_lines([one.message for one in wrong], MAX_TOLD)
    lines += list(steps)[:MAX_STEPS]
    return kind("\n".join(lines), next_step=_TRUST if state is State.UNSAFE else "")
