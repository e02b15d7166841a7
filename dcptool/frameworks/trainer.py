"""transformers' Trainer: `checkpoint-N` with model, optimizer, scheduler, random states, `trainer_state.json` last."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Extra, Needed, Profile, SavedStep, Value, any_of

_NAME = re.compile(r"checkpoint-\d+")
_OWN = (r"trainer_state\.json", r"training_args\.bin", r"optimizer\.pt", r"scheduler\.pt", r"rng_state(_\d+)?\.pth")
_own = [any_of(pattern) for pattern in _OWN]
_of_accelerate = any_of(r"random_states_\d+\.pkl|scheduler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl")
_of_deepspeed = any_of(r"global_step\d+")
_weights = any_of(r"(pytorch|adapter)_model.*\.bin")
_parts = any_of(r"(pytorch_model_fsdp|optimizer)_0")


def _recognises(step: SavedStep) -> bool:
    if not step.parts and not _weights(step.files):
        return False
    if not _NAME.fullmatch(step.name) or _of_accelerate(step.files) or _of_deepspeed(step.folders):
        return False  # DeepSpeed keeps optimizer and scheduler in its folder
    if "" in step.parts and step.parts[""].format.owns_folder:  # somebody else's DCP
        return False
    return _parts(step.parts) or "trainer_state.json" in step.files or sum(own(step.files) for own in _own) > 1


BEST = Value("trainer_state.json", ("best_model_checkpoint",))

TRAINER = Profile(
    "transformers Trainer",
    "transformers 5.24, trainer.py, _save_checkpoint and _load_from_checkpoint",
    _recognises,
    (
        Needed(("trainer_state.json",), "the transformers Trainer's progress"),
        Needed(("pytorch_model_fsdp_0/",), "the model", given="optimizer_0/"),
        Needed(("optimizer_0/", "optimizer.pt", "optimizer.bin"), "the optimizer", resumes=True),
        Needed(("scheduler.pt",), "the learning-rate scheduler", resumes=True),
        Needed(("rng_state_{rank}.pth", "rng_state.pth"), "random generators", resumes=True),
    ),
    (),
    (
        Extra(r"scaler\.pt", "the gradient scaler"),
        Extra(r"training_args\.bin", "the Trainer's arguments"),
        Extra(r"(generation_)?config\.json", "the model's configuration"),
        Extra(r"adapter_(config\.json|model\.\w+)", "an adapter"),
        Extra(
            r"tokenizer.*|special_tokens_map\.json|vocab\..*|merges\.txt|chat_template\..*|added_tokens\.json",
            "the tokenizer",
        ),
    ),
    last_written="trainer_state.json",
    best=BEST,
)
