"""What a live state dict holds, under the names torch.distributed.checkpoint would give it. Never imports torch.

Tensors are recognised by what they have: a `shape`, and a `dtype` of torch. A DTensor or ShardedTensor has the shape of
the whole tensor, which is what a checkpoint records.

Source: torch 2.13, distributed/checkpoint/_traverse.py (what is flattened), state_dict_saver.py (`Stateful` values).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dcptool.errors import LayoutError
from dcptool.ops.diff.results import Known

Path = tuple[str | int, ...]


def known_entries(state_dict: Mapping[str, Any]) -> list[Known]:
    """Flatten a state dict as `torch.distributed.checkpoint.save` does.

    Args:
        state_dict: nested or flat. A value at its top that has `state_dict` and `load_state_dict`, such as a module or
            an optimizer, stands for what its `state_dict()` gives.

    Raises:
        LayoutError: two values would have one name; such a state dict cannot be saved.
    """
    entries: dict[str, Known] = {}
    for path, value in _entries(state_dict):
        fqn = ".".join(map(str, path))
        if fqn in entries:
            raise LayoutError(f"{entries[fqn].path} and {path} of the state dict would both be named {fqn!r}")
        entries[fqn] = _known(fqn, path, value)
    return list(entries.values())


def _known(fqn: str, path: Path, value: Any) -> Known:
    if not is_tensor(value):
        return Known(fqn, "object", path=path)
    return Known(fqn, "tensor", str(value.dtype).removeprefix("torch."), tuple(map(int, value.shape)), path)


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor of torch; an array of numpy, which is pickled as an object, is none."""
    return hasattr(value, "shape") and str(getattr(value, "dtype", "")).startswith("torch.")


def _entries(state_dict: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) of all that torch does not look into: dicts it always does, so an empty one is nothing.

    A list is looked into only if it holds a tensor, a dict or such a list; a tuple never.
    """
    for key, value in state_dict.items():
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            value = value.state_dict()
        yield from leaves((str(key),), value)


def leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield all that torch does not look into below a path, with its own path; see `_entries`."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves((*path, str(key)), part)
    elif isinstance(value, list) and is_entered(value):
        for index, part in enumerate(value):
            yield from leaves((*path, index), part)
    else:
        yield path, value


def is_entered(value: Sequence[Any]) -> bool:
    """Tell whether torch looks into a list."""
    return any(
        isinstance(part, Mapping) or is_tensor(part) or (isinstance(part, list) and is_entered(part)) for part in value
    )
