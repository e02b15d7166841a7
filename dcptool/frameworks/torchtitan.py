"""torchtitan: `step-N`, plain DCP with everything in it; its last save holds the weights alone."""

from __future__ import annotations

from dcptool.frameworks.profile import Profile, SavedStep


def _recognises(step: SavedStep) -> bool:
    names = {fqn.partition(".")[0] for fqn in step.parts[""]} if "" in step.parts else set()
    other = "model" in names or any("optim" in name and name != "optimizer" for name in names)
    return {"train_state", "lr_scheduler"} <= names and not other


TORCHTITAN = Profile(
    "torchtitan",
    "torchtitan 0.3.0, components/checkpointer/base.py and dcp.py",
    _recognises,
    groups=("optimizer", "lr_scheduler", "train_state"),
    taken=(r".*step-\d+.*", "takes every step-N in a name for its step N, to resume from and to delete"),
    elsewhere='stops at the data loader unless it is told not to load that: exclude_from_loading = ["dataloader"]',
)
