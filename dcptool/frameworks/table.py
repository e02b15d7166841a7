"""All profiles, and which one a step is of."""

from __future__ import annotations

import re
from functools import cache

from dcptool.frameworks.accelerate import ACCELERATE
from dcptool.frameworks.composer import COMPOSER
from dcptool.frameworks.deepspeed import DEEPSPEED, DEEPSPEED_ACCELERATE, DEEPSPEED_TRAINER, DEEPSPEED_UNIVERSAL
from dcptool.frameworks.hf_model import HF_MODEL
from dcptool.frameworks.lightning import LIGHTNING
from dcptool.frameworks.megatron import MEGATRON, MEGATRON_BRIDGE, MEGATRON_LEGACY
from dcptool.frameworks.nemo import NEMO
from dcptool.frameworks.olmo import OLMO
from dcptool.frameworks.profile import Profile, SavedStep, pattern_of
from dcptool.frameworks.rank_files import SKYRL, VERL
from dcptool.frameworks.torch_checkpointing import TORCH_CHECKPOINTING
from dcptool.frameworks.torchtitan import TORCHTITAN
from dcptool.frameworks.torchtune import TORCHTUNE
from dcptool.frameworks.trainer import TRAINER

PROFILES = (
    LIGHTNING,
    DEEPSPEED_TRAINER,
    DEEPSPEED_ACCELERATE,
    TRAINER,
    ACCELERATE,
    DEEPSPEED,
    DEEPSPEED_UNIVERSAL,
    MEGATRON_BRIDGE,
    MEGATRON,
    MEGATRON_LEGACY,
    NEMO,
    OLMO,
    TORCHTITAN,
    TORCHTUNE,
    COMPOSER,
    VERL,
    SKYRL,
    TORCH_CHECKPOINTING,
    HF_MODEL,
)
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


def is_needed(name: str) -> bool:
    """Tell whether a file of this name is one that some trainer resumes with."""
    return _needed_names().fullmatch(name) is not None


@cache
def _needed_names() -> re.Pattern[str]:
    """Return what the names of all files match that some trainer resumes with: folders hold thousands of others."""
    forms = (form for profile in PROFILES for needed in profile.needed for form in needed.names)
    return re.compile("|".join(dict.fromkeys(pattern_of(form).pattern for form in forms)))


def is_regular(name: str, framework: str = "") -> bool:
    """Tell whether a file is one that all steps of a job have or none, for some trainer or for the one named."""
    return any(profile.is_regular(name) for profile in PROFILES if framework in ("", profile.name))
