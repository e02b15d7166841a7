"""composer's sharded checkpoints: `epE-baB`, plain DCP with the state and each rank's random generators."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Profile, SavedStep


def _recognises(step: SavedStep) -> bool:
    groups = {fqn.partition(".")[0] for fqn in step.parts[""]} if "" in step.parts else set()
    return "state" in groups and ("rng" in groups or re.fullmatch(r"ep\d+-ba\d+", step.name) is not None)


COMPOSER = Profile(
    "composer",
    "mosaicml 0.32.1, composer/utils/checkpoint.py and callbacks/checkpoint_saver.py",
    _recognises,
    groups=("optimizers", "timestamp", "rng"),
)
