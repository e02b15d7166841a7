"""The file in a run directory by which some trainers find their newest step: whether it leads to what was written."""

from __future__ import annotations

import os

from dcptool.checkpoint.steps import step_number
from dcptool.errors import DcptoolError
from dcptool.frameworks.profile import Profile
from dcptool.runs.pointers import MAX_POINTER_NBYTES
from dcptool.storage import is_url, join, locate
from dcptool.words import shown


def tracked(profile: Profile | None, target: str) -> list[str]:
    """Say by which file the trainer would not find a step that is written to a path; nothing if it would.

    Args:
        profile: of the step's trainer.
        target: path or URL of the step's folder.
    """
    run, _, name = (target.rstrip("/") if is_url(target) else os.path.abspath(target)).rpartition("/")
    number = step_number(name)
    if profile is None or not profile.tracker or number is None:
        return []
    wanted = name if name == "release" else str(number)
    said = _said(run, profile.tracker)
    if said == wanted:
        return []
    found = "is not there, so that it begins anew without a word" if said is None else f"names {shown(said)}"
    tracker = shown(join(run, profile.tracker))
    return [
        f"{profile.name} finds its newest step by {tracker}, which {found}: write {wanted} into it to go on from this"
    ]


def _said(folder: str, name: str) -> str | None:
    """Return the text of a small file in a folder; None if it is not there or cannot be read."""
    try:
        storage = locate(folder).storage
        nbytes = storage.size(name)
        text = None if nbytes is None else storage.read(name, 0, min(nbytes, MAX_POINTER_NBYTES))
    except DcptoolError:
        return None
    return None if text is None else text.decode(errors="replace").strip()
