"""DeepSpeed's folders as a value: which files there are. Reads nothing.

Source: deepspeed 0.19.8, runtime/engine.py, _get_ckpt_name, _get_zero_ckpt_name; checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dcptool.checkpoint.format import Format

ZERO_FOLDER = "zero"
"""Where a universal checkpoint has a folder for each parameter."""
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = re.compile(r"(?:layer|expp_rank)_.*_states\.pt|(?:.*_)?mp_rank_(?!00_)\d+_.*_states\.pt")
"""Of pipelines, experts and model-parallel ranks: pieces of parameters, of which nothing tells how they go together."""


def models(files: Iterable[str]) -> dict[int, str]:
    """Return the files of the model by data-parallel rank; one that all ranks share is rank 0's."""
    return {int(match[1] or 0): name for name in sorted(files) if (match := _MODEL.fullmatch(name))}


def optimizers(files: Iterable[str]) -> dict[int, str]:
    """Return the files of the optimizer by data-parallel rank."""
    return {int(match[1]): name for name in sorted(files) if (match := _OPTIMIZER.fullmatch(name))}


def kind_of(files: Mapping[str, int]) -> str | None:
    """Say that a folder with these files is one that DeepSpeed saved, None if not, or if models are cut in it too."""
    if any(map(_OTHERS.fullmatch, files)) or not (models(files) or optimizers(files)):
        return None
    return "DeepSpeed"


def is_model_file(name: str) -> bool:
    """Tell whether a file names the parameters and their shapes, by the last part of its name."""
    return _MODEL.fullmatch(name) is not None


def _is_own(name: str) -> bool:
    return is_model_file(name) or _OPTIMIZER.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """Return the data-parallel rank that wrote a file of partitions; a rank's file of the model may hold none."""
    match = _OPTIMIZER.fullmatch(name)
    return int(match[1]) if match else None


def _world_size(named: Iterable[str], files: Mapping[str, int]) -> int | None:
    ranks = [int(match[1]) for name in (*named, *files) if (match := _OPTIMIZER.fullmatch(name))]
    return 1 + max(ranks) if ranks else None


DEEPSPEED = Format(
    "deepspeed",
    "DeepSpeed's load_checkpoint",
    is_metadata=is_model_file,
    is_own=_is_own,
    rank_of=rank_of,
    world_size=_world_size,
    owns_folder=True,
    saved_by_ranks=True,
    boxes_in_files=True,
    cuts_flat=True,
    pointer="latest",
)
