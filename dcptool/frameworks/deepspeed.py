"""DeepSpeed: `global_stepN` with a file of the model and, of ZeRO, one of the optimizer for each data-parallel rank.

Also below a step of transformers' Trainer or accelerate, and as what ds_to_universal makes of one. The number of ranks
is in each file of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dcptool.frameworks.profile import Extra, Follow, Needed, Places, Profile, SavedStep, any_of, highest, numbered
from dcptool.frameworks.trainer import BEST
from dcptool.frameworks.values import count_of, items_of

_SOURCE = "deepspeed 0.19.8, runtime/engine.py, save_checkpoint and load_checkpoint"
_FILE = r"(?:(?:bf16_)?(?:zero_pp_rank|expp_rank|mp_rank|layer)_\d+.*_(?:model|optim)_states\.pt)"
_own = any_of(_FILE)
_of_trainer = any_of(rf"global_step\d+/{_FILE}")
_of_accelerate = any_of(rf"pytorch_model/{_FILE}")
_random_states = any_of(r"random_states_\d+\.pkl")
_MODEL = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_uneven = any_of(r"layer_.*|expp_rank_.*")
"""Of pipelines and experts: which rank has which of these only the job knows."""


def _places(tag: str, files: Sequence[str], step: SavedStep) -> Places:
    """Return what the names of DeepSpeed's files in a folder, `tag` with a slash or "", are made of.

    Source: deepspeed 0.19.8, runtime/engine.py, _get_ckpt_name and _get_zero_ckpt_name.
    """
    models = [name for name in sorted(files) if _MODEL.fullmatch(name)]
    known = next((found for name in models if (found := items_of(step.value(tag + name)))), {})
    zero = items_of(items_of(known.get("ds_config")).get("zero_optimization"))
    n_ranks = 1 + highest(r"(?:bf16_)?zero_pp_rank_(\d+)_.*", files)
    n_models = 1 + highest(r".*mp_rank_(\d+)_.*", files)
    if not _uneven(files):
        recorded = count_of(zero.get("mics_shard_size")) or count_of(known.get("dp_world_size"))
        n_ranks, n_models = max(n_ranks, recorded), max(n_models, count_of(known.get("mp_world_size")))
    split_weights = zero.get("stage") == 3 or any(name.startswith("zero_pp_rank") for name in models)
    split_optimizer = count_of(zero.get("stage")) > 0 or any("zero_pp_rank" in name for name in files)
    ranks, parallel = numbered(n_ranks), numbered(n_models, 2)
    return {
        "tag": (tag,),
        "mp": parallel,
        "model": () if split_weights else parallel,
        "part": ranks if split_weights else (),
        "rank": ranks,
        "optim": ranks if split_optimizer else (),
        "bf16": ("bf16_" if any(name.startswith("bf16_") for name in files) else "",),
    }


def _own_places(step: SavedStep) -> Places:
    return _places("", [name for name in step.files if "/" not in name], step)


def _places_below(step: SavedStep) -> Places:
    """The same of the folder below a step of another trainer, the newest if there are several."""
    folders = {name.rpartition("/")[0] for name in step.files if _of_trainer([name]) or _of_accelerate([name])}
    tag = max(folders, key=lambda name: (len(name), name), default="") + "/"
    return _places(tag, [name.removeprefix(tag) for name in step.files if name.startswith(tag)], step)


_NEEDED = (
    Needed(("{tag}mp_rank_{model}_model_states.pt",), "the model"),
    Needed(("{tag}zero_pp_rank_{part}_mp_rank_{mp}_model_states.pt",), "one rank's part of the model", fixed=True),
    Needed(
        ("{tag}{bf16}zero_pp_rank_{optim}_mp_rank_{mp}_optim_states.pt",),
        "one rank's part of the optimizer",
        fixed=True,
    ),
)
_LATEST = Needed(("latest",), "DeepSpeed's pointer to its folder")
_EXTRAS = (
    Extra(r"(.*/)?layer_.*_states\.pt", "a layer of the model", Follow.FIXED),
    Extra(r"(.*/)?expp_rank_.*_states\.pt", "the optimizer of experts", Follow.FIXED),
    Extra(r"zero_to_(fp32|torch)\.py", "DeepSpeed's program that joins the ranks' weights"),
)

DEEPSPEED = Profile(
    "DeepSpeed",
    _SOURCE,
    lambda step: _own(step.files) and "zero" not in step.folders,
    _NEEDED,
    extras=_EXTRAS,
    places=_own_places,
)


def _recognises_trainer(step: SavedStep) -> bool:
    return re.fullmatch(r"checkpoint-\d+", step.name) is not None and _of_trainer(step.files)


DEEPSPEED_TRAINER = Profile(
    "transformers Trainer with DeepSpeed",
    f"transformers 5.24, trainer.py, and {_SOURCE}",
    _recognises_trainer,
    (
        Needed(("trainer_state.json",), "the transformers Trainer's progress"),
        _LATEST,
        *_NEEDED,
        Needed(("rng_state_{rank}.pth", "rng_state.pth"), "random generators", anew=True),
    ),
    extras=_EXTRAS,
    places=_places_below,
    last_written="trainer_state.json",
    best=BEST,
)

DEEPSPEED_ACCELERATE = Profile(
    "accelerate with DeepSpeed",
    f"accelerate 1.15, accelerator.py, save_state, and {_SOURCE}",
    lambda step: _of_accelerate(step.files) and _random_states(step.files),
    (
        _LATEST,
        *_NEEDED,
        Needed(("random_states_{rank}.pkl",), "random generators and the step of gradient accumulation", anew=True),
    ),
    extras=_EXTRAS,
    places=_places_below,
)


def _universal_places(step: SavedStep) -> Places:
    """Return the parameters that are there, or that the model's file names, and those of them that are trained."""
    files = [name.removeprefix("zero/").rpartition("/") for name in step.files if name.startswith("zero/")]
    moments = {folder for folder, _, name in files if folder and name in ("exp_avg.pt", "exp_avg_sq.pt", "step.pt")}
    models = [name for name in sorted(step.files) if _MODEL.fullmatch(name)]
    groups = next((items_of(step.value(name)).get("param_shapes") for name in models), None)
    named = {name for group in (groups if isinstance(groups, list) else []) for name in items_of(group)}
    params = {folder for folder, _, _ in files if folder} | {name for name in named if isinstance(name, str)}
    return {
        "param": sorted(params),
        "trained": sorted(moments | (named & params if moments else set())),
        "mp": numbered(max(1, 1 + highest(r"(?:.*_)?mp_rank_(\d+)_.*", step.files)), 2),
        "split": ("zero_pp_rank_0_" if any(name.startswith("zero_pp_rank") for name in models) else "",),
    }


DEEPSPEED_UNIVERSAL = Profile(
    "DeepSpeed's universal checkpoint",
    "deepspeed 0.19.8, checkpoint/ds_to_universal.py",
    lambda step: "zero" in step.folders and any(re.fullmatch(r"zero/.+/fp32\.pt", name) for name in step.files),
    (
        Needed(("{split}mp_rank_{mp}_model_states.pt",), "all but the weights and the optimizer"),
        Needed(("zero/{param}/fp32.pt",), "the weights"),
        Needed(("zero/{trained}/exp_avg.pt",), "the optimizer's first moments"),
        Needed(("zero/{trained}/exp_avg_sq.pt",), "the optimizer's second moments"),
    ),
    extras=(Extra(r"zero/.+\.pt", "the optimizer's steps and settings"),),
    places=_universal_places,
)
