"""transformers' Trainer: `checkpoint-N` with model, optimizer, scheduler, random states, `trainer_state.json` last."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Needed, Profile, SavedStep, any_of

_NAME = re.compile(r"checkpoint-\d+")
_files = any_of(
    r"trainer_state\.json|training_args\.bin|optimizer\.(pt|bin)|scheduler\.pt|rng_state(_\d+)?\.pth|pytorch_model_fsdp\.bin"
)
_of_deepspeed = any_of(r"global_step\d+")
_parts = any_of(r"(pytorch_model_fsdp|optimizer)_0")


def _recognises(step: SavedStep) -> bool:
    if _of_deepspeed(step.folders):  # which keeps optimizer and scheduler there
        return False
    return _NAME.fullmatch(step.name) is not None and (_files(step.files) or _parts(step.parts))


TRAINER = Profile(
    "transformers Trainer",
    "transformers 5.24, trainer.py, _save_checkpoint and _load_from_checkpoint",
    _recognises,
    (
        Needed(("trainer_state.json",), "the transformers Trainer's progress"),
        Needed(("optimizer_0/", "optimizer.pt", "optimizer.bin"), "the optimizer", resumes=True),
        Needed(("scheduler.pt",), "the learning-rate scheduler", resumes=True),
        Needed(("rng_state_{rank}.pth", "rng_state.pth"), "random generators", resumes=True),
    ),
    (),
    (
        (r"scaler\.pt", "the gradient scaler"),
        (r"training_args\.bin", "the Trainer's arguments"),
        (r"(generation_)?config\.json", "the model's configuration"),
        (r"adapter_(config\.json|model\.\w+)", "an adapter"),
        (
            r"tokenizer.*|special_tokens_map\.json|vocab\..*|merges\.txt|chat_template\..*|added_tokens\.json",
            "the tokenizer",
        ),
    ),
)
