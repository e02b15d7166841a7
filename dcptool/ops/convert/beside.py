"""The files beside a checkpoint that is converted: what of them goes with it, and what is said of the rest."""

from __future__ import annotations

import json
from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.errors import StorageError
from dcptool.formats.dcp.format import DCP, metadata_rank
from dcptool.ops.following import (
    NOTHING,
    Carried,
    Following,
    FoundStep,
    describing,
    follow,
    left_notes,
    step_around,
    step_of,
)
from dcptool.runs.activity import list_files
from dcptool.storage import Location

_CONFIG = "config.json"
_DTYPES = ("torch_dtype", "dtype")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MAX_CONFIG_NBYTES = 16 << 20


def own_step(checkpoint: Checkpoint) -> FoundStep | None:
    """Return the folder of a checkpoint with all in it; None where one file was named."""
    if checkpoint.name and metadata_rank(checkpoint.name) is None:
        return None
    location = Location(checkpoint.storage, None)
    return step_of(location, {"": checkpoint}, list_files(location))


def files_beside(
    checkpoint: Checkpoint, own: FoundStep | None, to: str, is_file: bool, wanted: bool, dtype: str | None
) -> Following:
    """Decide what of the files beside a checkpoint goes with it.

    Args:
        checkpoint: the source.
        own: its folder, as `own_step` returns it; None if nothing beside belongs to it.
        to: format of the output: of DCP to DCP all is carried that its trainer loads, else what describes a model.
        is_file: whether the output is one file, so that nothing can lie beside.
        wanted: whether anything is to be carried; what is not is told.
        dtype: what tensors are cast to; the model's configuration then says so.
    """
    if own is None:
        return NOTHING
    around = step_around(checkpoint)
    left = left_notes(around[0], [around[1]]) if around else []
    if is_file or not wanted:
        return Following(notes=(*left_notes(own, [""]), *left))
    if to == "dcp" and checkpoint.format is DCP:
        found = follow(own, [""], None)
        found = found._replace(notes=(*found.notes, *left))
    else:
        found = describing(around[0], [around[1]], around[1]) if around else describing(own, [""])
    return _with_dtype(found, dtype) if dtype else found


def _with_dtype(found: Following, dtype: str) -> Following:
    """Let the model's configuration name the dtype that its tensors are cast to: transformers loads them as that."""
    files, notes = [], list(found.notes)
    for file in found.carried:
        changed = _changed_config(found, file, dtype) if file.target == _CONFIG else None
        if changed:
            file = file._replace(content=changed[0])
            notes.append(f"{_CONFIG} names {dtype} in place of {changed[1]}, which is what transformers loads it as")
        files.append(file)
    return found._replace(carried=tuple(files), notes=tuple(notes))


def _changed_config(found: Following, file: Carried, dtype: str) -> tuple[bytes, str] | None:
    """Return a configuration with another dtype, and the one it had; None if it names none, or cannot be read."""
    if found.storage is None or file.nbytes > _MAX_CONFIG_NBYTES:
        return None
    try:
        config = json.loads(found.storage.read(file.name, 0, file.nbytes))
    except (ValueError, RecursionError, StorageError):
        return None
    replaced: list[str] = []
    _replace(config, dtype, replaced)
    return (json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n", replaced[0]) if replaced else None


def _replace(config: Any, dtype: str, replaced: list[str]) -> None:
    """Put a dtype into a configuration, and into those of the models in it."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key in _DTYPES and value in _FLOATS and value != dtype:
            config[key] = dtype
            replaced.append(value)
        elif key.endswith("_config") and key != "quantization_config":
            _replace(value, dtype, replaced)
