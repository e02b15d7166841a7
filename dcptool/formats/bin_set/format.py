"""Models in `.bin` files as a value: which files there are. Reads nothing.

Source: transformers 4.57, utils/__init__.py (`WEIGHTS_NAME`, `WEIGHTS_INDEX_NAME`); peft and diffusers do alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dcptool.checkpoint.format import Format

_FILE = re.compile(r"(?:[a-z]+_)?(?:pytorch|adapter)_model(?:[-_]\d+-of-\d+)?(?:\.\w+)?\.bin")
_INDEX = re.compile(r".+\.bin\.index(?:\.\w+)?\.json")


def is_index(name: str) -> bool:
    """Tell whether a name is that of an index: `pytorch_model.bin.index.json`."""
    return _INDEX.fullmatch(name) is not None


def is_weights(name: str) -> bool:
    """Tell whether a name is that of a file of weights: `pytorch_model-00001-of-00002.bin`."""
    return _FILE.fullmatch(name) is not None


def kind_of(files: Mapping[str, int]) -> str | None:
    """Say that a folder with these files holds such a model, None if it does not."""
    return "torch.save files of a model" if any(is_index(name) or is_weights(name) for name in files) else None


def is_file(name: str, start: bytes) -> bool:
    """Tell whether a file is an index; one of the weights alone is a file of torch.save like any."""
    return is_index(name)


def place(names: Iterable[str]) -> str:
    """Return which file names the model in a folder with other things: an index, else the shortest name; "" if none."""
    ours = [name for name in names if is_index(name) or is_weights(name)]
    return next(filter(is_index, ours), min(ours, key=len, default=""))


BIN_SET = Format(
    "bin_set",
    "transformers' from_pretrained",
    (),
    is_metadata=is_index,
    is_own=lambda name: is_index(name) or is_weights(name),
    boxes_in_files=True,
)
