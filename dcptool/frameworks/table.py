"""All profiles, and which one a step is of."""

from __future__ import annotations

from dcptool.frameworks.accelerate import ACCELERATE
from dcptool.frameworks.lightning import LIGHTNING
from dcptool.frameworks.megatron import MEGATRON
from dcptool.frameworks.nemo import NEMO
from dcptool.frameworks.olmo import OLMO
from dcptool.frameworks.profile import Profile, SavedStep
from dcptool.frameworks.torchtitan import TORCHTITAN
from dcptool.frameworks.trainer import TRAINER

PROFILES = (LIGHTNING, TRAINER, ACCELERATE, MEGATRON, NEMO, OLMO, TORCHTITAN)
"""In the order in which they are asked."""


def profile_of(step: SavedStep) -> Profile | None:
    """Return the profile of the trainer that saved a step, None if none knows it."""
    return next((profile for profile in PROFILES if profile.recognises(step)), None)


def resuming_groups() -> frozenset[str]:
    """Return the first parts of names that, for some trainer, only a step one can resume from has."""
    return frozenset(group for profile in PROFILES for group in profile.groups)


def holds(name: str) -> str:
    """Return what a file of this name holds beside a checkpoint, whatever trainer left it; "" if none is known to."""
    return next(filter(None, (profile.holds(name) for profile in PROFILES)), "")
