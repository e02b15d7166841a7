"""The configuration of a model whose tensors are cast: it names the dtype that transformers loads them as."""

from __future__ import annotations

import json
from typing import Any

from dcptool.errors import StorageError
from dcptool.ops.following import Carried, Following

_CONFIG = "config.json"
_DTYPES = ("torch_dtype", "dtype")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MAX_CONFIG_NBYTES = 16 << 20


def with_dtype(found: Following, dtype: str) -> Following:
    """Let the model's configuration name the dtype that its tensors are cast to: transformers loads them as that."""
    files, notes = [], list(found.notes)
    for file in found.carried:
        changed = _changed_config(found, file, dtype) if file.target == _CONFIG else None
        if changed:
            file = file._replace(content=changed[0])
            notes.append(f"{_CONFIG} names {dtype} in place of {changed[1]}, which is what transformers loads it as")
        files.append(file)
    return found._replace(carried=tuple(files), notes=tuple(notes))


def without_quantisation(found: Following) -> Following:
    """Take out of the model's configuration how its weights are quantised: they are no more."""
    files, notes = [], list(found.notes)
    for file in found.carried:
        config = _read(found, file) if file.target == _CONFIG else None
        if isinstance(config, dict) and config.pop("quantization_config", None) is not None:
            file = file._replace(content=_text(config))
            notes.append(f"{_CONFIG} has no quantization_config any more")
        files.append(file)
    return found._replace(carried=tuple(files), notes=tuple(notes))


def _read(found: Following, file: Carried) -> Any:
    """Return a configuration as it is to be carried, None if it cannot be read."""
    if found.storage is None or file.nbytes > _MAX_CONFIG_NBYTES:
        return None
    try:
        return json.loads(file.content or found.storage.read(file.name, 0, file.nbytes))
    except (ValueError, RecursionError, StorageError):
        return None


def _text(config: Any) -> bytes:
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def _changed_config(found: Following, file: Carried, dtype: str) -> tuple[bytes, str] | None:
    """Return a configuration with another dtype, and the one it had; None if it names none, or cannot be read."""
    config = _read(found, file)
    replaced: list[str] = []
    _replace(config, dtype, replaced)
    return (_text(config), replaced[0]) if replaced else None


def _replace(config: Any, dtype: str, replaced: list[str]) -> None:
    """Put a dtype into a configuration, and into those of the models in it."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key in _DTYPES and value in _FLOATS and value != dtype:
            config[key] = dtype
            replaced.append(value)
        elif key.endswith("_config") and key != "quantization_config":
            _replace(value, dtype, replaced)
