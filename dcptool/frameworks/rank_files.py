"""verl and SkyRL with FSDP: `global_step_N`, for each model a folder of files per rank that name the world size."""

from __future__ import annotations

import re

from dcptool.frameworks.profile import Extra, Follow, Needed, Places, Profile, SavedStep, numbered
from dcptool.frameworks.values import MAX_RANKS

_FILE = re.compile(
    r"((?:actor|critic|policy|ref|reward)\w*/|)(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt"
)


def _found(step: SavedStep) -> list[re.Match[str]]:
    matches = [match for name in step.files if (match := _FILE.fullmatch(name))]
    return [match for match in matches if len(match[3]) < 8 and 0 < int(match[3]) < MAX_RANKS]


def _places(step: SavedStep) -> Places:
    """Return the models' folders and the ranks; of saves of several world sizes in one folder the largest counts."""
    found = _found(step)
    world_size = max((int(match[3]) for match in found), default=1)
    data = () if all(match[1] for match in found) else numbered(world_size)
    return {
        "role": sorted({match[1] for match in found}),
        "world": (str(world_size),),
        "rank": numbered(world_size),
        "data": data,
    }


_MODEL = Needed(("{role}model_world_size_{world}_rank_{rank}.pt",), "one rank's part of the model", fixed=True)
_OPTIM = Needed(
    ("{role}optim_world_size_{world}_rank_{rank}.pt",), "one rank's part of the optimizer", resumes=True, fixed=True
)
_EXTRA = "one rank's scheduler and random generators"
_EXTRAS = (
    Extra(r"(.*/)?fsdp_config\.json", "the settings of FSDP"),
    Extra(r"(.*/)?huggingface/.*", "configuration and tokenizer"),
)

VERL = Profile(
    "verl",
    "verl 0.9.1, utils/checkpoint/fsdp_checkpoint_manager.py and trainer/ppo/ray_trainer.py",
    lambda step: bool(_found(step)) and "policy" not in step.folders and "trainer_state.pt" not in step.files,
    (
        _MODEL,
        _OPTIM,
        Needed(("{role}extra_state_world_size_{world}_rank_{rank}.pt",), _EXTRA, resumes=True, fixed=True),
        Needed(("data.pt",), "the data loader", given="actor/"),
    ),
    extras=(*_EXTRAS, Extra(r"data_\d+\.pt", "one rank's data loader", Follow.PER_RANK)),
    places=_places,
    last_written="data.pt",
)

SKYRL = Profile(
    "SkyRL",
    "skyrl 0.4.0, train/trainer.py and backends/skyrl_train/distributed",
    lambda step: bool(_found(step)),
    (
        _MODEL,
        _OPTIM,
        Needed(("{role}extra_state_world_size_{world}_rank_{rank}.pt",), _EXTRA, fixed=True),
        Needed(("data.pt",), "the data loader"),
        Needed(("trainer_state.pt",), "the trainer's progress"),
    ),
    extras=_EXTRAS,
    places=_places,
)
