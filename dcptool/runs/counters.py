"""Steps whose numbers count saves and begin anew when a job goes on: in which order they were saved."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dcptool.checkpoint.steps import step_order
from dcptool.errors import DcptoolError
from dcptool.frameworks.profile import Profile
from dcptool.frameworks.table import PROFILES
from dcptool.frameworks.values import found_at, reader
from dcptool.runs.activity import last_written, list_files
from dcptool.runs.directory import Run
from dcptool.storage import DirEntry, Location, Storage, locate

_MIN_SPREAD_SECONDS = 1.0
"""Between the oldest and the newest step; in less they were copied or unpacked, and their times tell nothing."""


def order_of_counted(run: Run) -> tuple[str, ...] | None:
    """Return the steps of a run in the order of saving where their numbers count saves; None where the numbers tell.

    accelerate's `checkpoint_N` begins at 0 again when a job goes on. What grows with training inside such steps tells,
    else when they were written.

    Raises:
        CheckpointNotFoundError, StorageError: the run directory cannot be looked at.
    """
    counting = [profile for profile in PROFILES if profile.counter]
    profile = next((one for one in counting if all(re.fullmatch(one.counter, name) for name in run.steps)), None)
    if profile is None or len(run.steps) < 2:
        return None
    storage = locate(run.path).storage
    listings = {name: listing for name in run.steps if (listing := _listed(storage, name)) is not None}
    saved_by_it = any(profile.needs(file) for listing in listings.values() for file in listing)
    if not saved_by_it or len(listings) < len(run.steps):
        return None
    progress = {name: _progress(storage, name, listing, profile) for name, listing in listings.items()}
    if len(set(progress.values()) - {None}) == len(progress):
        return _sorted(run, {name: value or 0.0 for name, value in progress.items()})
    times = {name: last_written(Location(storage.below(name), None), listing) for name, listing in listings.items()}
    known = [time for time in times.values() if time is not None]
    if len(known) < len(times) or max(known) - min(known) < _MIN_SPREAD_SECONDS:
        return None
    return _sorted(run, {name: time or 0.0 for name, time in times.items()})


def _sorted(run: Run, key: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(sorted(run.steps, key=lambda name: (key[name], step_order(name))))


def _listed(storage: Storage, step: str) -> dict[str, DirEntry] | None:
    try:
        return list_files(Location(storage.below(step), None))
    except DcptoolError:
        return None


def _progress(storage: Storage, step: str, listing: Mapping[str, DirEntry], profile: Profile) -> float | None:
    """Return how far training was at a step, None if nothing in it tells."""
    if profile.progress is None or profile.progress.file not in listing:
        return None
    sizes = {name: entry.nbytes for name, entry in listing.items()}
    value = reader(storage.below(step), sizes)(profile.progress.file)
    found = next(found_at(value, profile.progress.keys), None)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
