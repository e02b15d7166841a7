"""accelerate's `save_state` with FSDP: two DCP folders per model, then scheduler, random states, custom objects."""

from __future__ import annotations

from dcptool.frameworks.profile import Extra, Needed, Profile, SavedStep, Value, any_of
from dcptool.frameworks.trainer import SHARDS, places_with_shards

_random_states = any_of(r"random_states_\d+\.pkl")
_parts = any_of(r"(pytorch_model_fsdp|optimizer)_\d+")
_weights = any_of(r"pytorch_model.*\.bin")
_of_trainer = any_of(r"trainer_state\.json|scheduler\.pt|rng_state(_\d+)?\.pth|training_args\.bin")


def _recognises(step: SavedStep) -> bool:
    if _of_trainer(step.files) or not (step.parts or _weights(step.files)):
        return False
    return _random_states(step.files) or (_parts(step.parts) and not step.name.startswith("checkpoint-"))


ACCELERATE = Profile(
    "accelerate",
    "accelerate 1.15, checkpointing.py and utils/fsdp_utils.py, save_accelerator_state and load_accelerator_state",
    _recognises,
    (
        Needed(("pytorch_model_fsdp_0/",), "the model", given="optimizer_0/"),
        SHARDS,
        Needed(("optimizer_0/", "optimizer.bin", "optimizer.pt"), "the optimizer", resumes=True),
        Needed(("random_states_{rank}.pkl",), "random generators and the step of gradient accumulation", anew=True),
    ),
    (),
    (
        Extra(r"scheduler(_\d+)?\.bin", "accelerate's learning-rate scheduler", regular=True),
        Extra(r"sampler(_\d+)?\.bin", "the data sampler", regular=True),
        Extra(r"dl_state_dict(_\d+)?\.bin", "the data loader"),
        Extra(r"scaler\.pt", "the gradient scaler", regular=True),
        Extra(r"custom_checkpoint_\d+\.pkl", "an object registered for checkpointing", regular=True),
    ),
    places=places_with_shards,
    counter=r"checkpoint_\d+",
    progress=Value("scheduler.bin", ("last_epoch",)),
    taken=(r".*", "takes every folder there for a step, by the numbers in its name (load_state, total_limit)"),
)
