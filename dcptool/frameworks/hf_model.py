"""A model as transformers saves it, in the place of a step: weights and configuration, nothing to resume with."""

from __future__ import annotations

from dcptool.checkpoint.steps import step_number
from dcptool.formats.torch_save.format import SUFFIXES
from dcptool.frameworks.profile import Needed, Profile, SavedStep

_CONFIGS = frozenset({"config.json", "adapter_config.json"})
_ARGUMENTS = "training_args.bin"


def _recognises(step: SavedStep) -> bool:
    if step_number(step.name) is None or "" not in step.parts or _CONFIGS.isdisjoint(step.files):
        return False
    model = step.parts[""]
    other = [name for name in step.files if name.endswith(SUFFIXES) and name not in {_ARGUMENTS, *model.files}]
    return model.format.name in ("safetensors", "bin_set") and not other


HF_MODEL = Profile(
    "transformers",
    "transformers 5.24, modeling_utils.py, save_pretrained",
    _recognises,
    (Needed((), "optimizer and progress", resumes=True),),
)
