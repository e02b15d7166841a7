"""Megatron-core: `iter_NNNNNNN`, DCP with `common.pt` (up to core 0.18) and `metadata.json`; or a folder per rank.

Megatron-Bridge adds files of its own to the first; the second is what Megatron-LM calls legacy.
"""

from __future__ import annotations

import itertools
import math
import re

from dcptool.frameworks.profile import Extra, Follow, Needed, Places, Profile, SavedStep, any_of, numbered
from dcptool.frameworks.values import MAX_RANKS, count_of, items_of

_NAME = re.compile(r"iter_\d{7}|release")


def _recognises(step: SavedStep) -> bool:
    if "" not in step.parts:
        return False
    return step.parts[""].variant.stacks_layers or (
        "common.pt" in step.files and _NAME.fullmatch(step.name) is not None
    )


_NEEDED = (
    Needed(("metadata.json",), "Megatron's choice of back end"),
    Needed(("common.pt",), "Megatron's arguments, RNG state and iteration", unless="common_state/shard_0_1"),
)
_EXTRAS = (
    Extra(r"latest_checkpointed_iteration\.txt", "Megatron's pointer to the newest step"),
    Extra(r"integrity\.json", "SHA-256 of the files", Follow.STALE),
    Extra(r"tokenizer/.*", "the tokenizer"),
    Extra(r"mp_rank_\d+(_\d+)*/train_dataloader_dprank\d+\.pt", "the data loader", Follow.PER_RANK),
)
_TAKEN = (r"iter_.*", "takes every iter_* for a step when it deletes old ones, and stops at a name that is no number")
_TRACKER = "latest_checkpointed_iteration.txt"
_of_bridge = any_of(r"train_state\.pt|run_config\.yaml")

MEGATRON = Profile(
    "Megatron-core",
    "megatron-core 0.16.1 to 0.19.2, dist_checkpointing/serialization.py, save and load",
    _recognises,
    _NEEDED,
    ("optimizer",),
    _EXTRAS,
    last_written="metadata.json",
    taken=_TAKEN,
    tracker=_TRACKER,
)

MEGATRON_BRIDGE = Profile(
    "Megatron-Bridge",
    "megatron-bridge 0.3.1, training/checkpointing.py, save_checkpoint",
    lambda step: _recognises(step) and _of_bridge(step.files),
    (
        *_NEEDED,
        Needed(("train_state.pt",), "Megatron-Bridge's progress"),
        Needed(("run_config.yaml",), "Megatron-Bridge's configuration"),
    ),
    ("optimizer",),
    _EXTRAS,
    last_written="run_config.yaml",
    taken=_TAKEN,
    tracker=_TRACKER,
)

_RANK_FILE = re.compile(r"mp_rank_(\d\d(?:_\d{3}){0,2})/(?:model_optim_rng|distrib_optim)\.pt")


def _legacy_places(step: SavedStep) -> Places:
    """Return the folders of model-parallel ranks, and those of them that hold a distributed optimizer.

    Source: Megatron-LM, megatron/training/checkpointing.py, get_checkpoint_name.
    """
    there = sorted({match[1] for name in step.files if (match := _RANK_FILE.fullmatch(name))})
    first = next((value for mp in there if (value := items_of(step.value(f"mp_rank_{mp}/model_optim_rng.pt")))), {})
    args = items_of(first.get("args"))
    sizes = [count_of(args.get(f"{name}_model_parallel_size")) for name in ("tensor", "pipeline", "expert")]
    shape = [sizes[0], *(size for size in sizes[1:] if size > 1)]
    numbers = [[int(number) for number in mp.split("_")] for mp in there]
    if any(len(found) != len(shape) for found in numbers) or not sizes[0]:
        shape = [1 + max(column) for column in zip(*numbers, strict=False)]
    shape = shape if math.prod(shape) < MAX_RANKS else []
    counted = (numbered(size, 3 if depth else 2) for depth, size in enumerate(shape))
    ranks = ["_".join(rank) for rank in itertools.product(*counted)] if shape else there
    distributed = args.get("use_distributed_optimizer") is True and args.get("no_save_optim") is not True
    has_file = any(name.endswith("/distrib_optim.pt") for name in step.files)
    return {"mp": ranks, "distributed": ranks if distributed or has_file else ()}


MEGATRON_LEGACY = Profile(
    "Megatron-LM, legacy",
    "NVIDIA/Megatron-LM, megatron/training/checkpointing.py, get_checkpoint_name and save_checkpoint",
    lambda step: any(map(_RANK_FILE.fullmatch, step.files)),
    (
        Needed(("mp_rank_{mp}/model_optim_rng.pt",), "one rank's model, optimizer and random generators", fixed=True),
        Needed(("mp_rank_{distributed}/distrib_optim.pt",), "the distributed optimizer", fixed=True),
    ),
    extras=_EXTRAS,
    places=_legacy_places,
)
