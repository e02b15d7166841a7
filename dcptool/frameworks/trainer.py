"""transformers' Trainer: `checkpoint-N` with model, optimizer, scheduler, random states, `trainer_state.json` last."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Extra, Needed, Places, Profile, SavedStep, Value, any_of, ranks_of_parts
from dcptool.frameworks.values import MAX_RANKS, items_of

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


_BIN = re.compile(r"pytorch_model(-\d+-of-(\d{1,6}))\.bin")


def places_with_shards(step: SavedStep) -> Places:
    """Return the ranks, and what tells the files of a model in several `.bin` files apart: by its index, or its names.

    Source: transformers 5.24, modeling_utils.py, load_sharded_checkpoint.
    """
    listed = items_of(items_of(step.value("pytorch_model.bin.index.json")).get("weight_map")).values()
    names = {name for name in (*listed, *step.files) if isinstance(name, str)}
    found = {match[1]: match[2] for name in names if (match := _BIN.fullmatch(name))}
    counted = {f"-{number:0{len(count)}d}-of-{count}" for count in set(found.values()) for number in _to(int(count))}
    return {**ranks_of_parts(step), "shard": sorted(counted | found.keys())}


def _to(count: int) -> range:
    return range(1, 1 + min(count, MAX_RANKS))


SHARDS = Needed(("pytorch_model{shard}.bin",), "a file of the model")
BEST = Value("trainer_state.json", ("best_model_checkpoint",))

TRAINER = Profile(
    "transformers Trainer",
    "transformers 5.24, trainer.py, _save_checkpoint and _load_from_checkpoint",
    _recognises,
    (
        Needed(("trainer_state.json",), "the transformers Trainer's progress"),
        Needed(("pytorch_model_fsdp_0/",), "the model", given="optimizer_0/"),
        SHARDS,
        Needed(("optimizer_0/", "optimizer.pt", "optimizer.bin"), "the optimizer", resumes=True),
        Needed(("scheduler.pt",), "the learning-rate scheduler", resumes=True),
        Needed(("rng_state_{rank}.pth", "rng_state.pth"), "random generators", resumes=True, anew=True),
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
    places=places_with_shards,
    last_written="trainer_state.json",
    best=BEST,
    taken=(r"checkpoint-.*", "counts every checkpoint-* when it deletes old ones (save_total_limit)"),
)
