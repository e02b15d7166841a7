"""Lightning's sharded checkpoints: a folder `<name>.ckpt`, DCP with `meta.pt` beside it, which is written last."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Needed, Profile, SavedStep, Value

_OF_STRATEGIES = re.compile(r"state_dict\.|optimizer_\d+\.")
"""ModelParallel's names, and those of the optimizers in FSDP's, whose models are `model.*` as everybody's."""


def _recognises(step: SavedStep) -> bool:
    if "meta.pt" not in step.files and not step.name.endswith(".ckpt"):
        return False
    return "" in step.parts and any(map(_OF_STRATEGIES.match, step.parts[""]))


LIGHTNING = Profile(
    "Lightning",
    "lightning 2.6.6, pytorch/strategies/fsdp.py and model_parallel.py, save_checkpoint and load_checkpoint",
    _recognises,
    (Needed(("meta.pt",), "Lightning's loops, callbacks and hyper-parameters"),),
    ("optimizer_0",),
    last_written="meta.pt",
    best=Value("meta.pt", ("callbacks", "*", "best_model_path")),
    taken=(r"last.*\.ckpt", 'takes the newest last*.ckpt for its last step (ckpt_path="last")'),
)
