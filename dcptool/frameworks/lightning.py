"""Lightning's sharded checkpoints: a folder `<name>.ckpt`, DCP with `meta.pt` beside it, which is written last."""

from __future__ import annotations

from dcptool.frameworks.profile import Needed, Profile, SavedStep


def _recognises(step: SavedStep) -> bool:
    if "meta.pt" not in step.files and not step.name.endswith(".ckpt"):
        return False
    return "" in step.parts and any(fqn.startswith("state_dict.") for fqn in step.parts[""])


LIGHTNING = Profile(
    "Lightning",
    "lightning 2.6.6, pytorch/strategies/fsdp.py and model_parallel.py, save_checkpoint and load_checkpoint",
    _recognises,
    (Needed(("meta.pt",), "Lightning's loops, callbacks and hyper-parameters"),),
    ("optimizer_0",),
)
