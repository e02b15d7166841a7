"""torchtune's asynchronous steps: `dist_epoch_N`, plain DCP. Its others are model folders, which hold weights alone."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Profile, SavedStep

_NAME = re.compile(r"(?:dist_)?(?:epoch|step)_\d+")


def _recognises(step: SavedStep) -> bool:
    return "" in step.parts and "epochs_run" in step.parts[""] and _NAME.fullmatch(step.name) is not None


TORCHTUNE = Profile(
    "torchtune",
    "torchtune 0.6.1, training/checkpointing/_checkpoint_client.py",
    _recognises,
    groups=("optimizer", "epochs_run"),
)
