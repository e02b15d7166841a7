"""Megatron-core's torch_dist: `iter_NNNNNNN`, DCP with `common.pt` (up to core 0.18) and `metadata.json`."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Needed, Profile, SavedStep

_NAME = re.compile(r"iter_\d{7}|release")


def _recognises(step: SavedStep) -> bool:
    if "" not in step.parts:
        return False
    return step.parts[""].variant.stacks_layers or (
        "common.pt" in step.files and _NAME.fullmatch(step.name) is not None
    )


MEGATRON = Profile(
    "Megatron-core",
    "megatron-core 0.16.1 to 0.19.2, dist_checkpointing/serialization.py, save and load",
    _recognises,
    (
        Needed(("metadata.json",), "Megatron's choice of back end"),
        Needed(("common.pt",), "Megatron's arguments, RNG state and iteration", unless="common_state/shard_0_1"),
    ),
    ("optimizer",),
    (
        (r"latest_checkpointed_iteration\.txt", "Megatron's pointer to the newest step"),
        (r"integrity\.json", "SHA-256 of the files"),
        (r"train_state\.pt", "Megatron-Bridge's progress"),
        (r"run_config\.yaml", "Megatron-Bridge's configuration"),
        (r"tokenizer/.*", "the tokenizer"),
        (r"mp_rank_\d+(_\d+)*/train_dataloader_dprank\d+\.pt", "the data loader"),
    ),
)
