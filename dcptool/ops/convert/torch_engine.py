"""Convert with torch's own code: the oracle, and the slow path. Whole model in memory, pickles executed.

Source: torch 2.13, distributed/checkpoint/format_utils.py.
"""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.copying.publishing import prepare
from dcptool.errors import DcptoolError, ItemError, StorageError, UnsupportedError
from dcptool.formats.detect import open_checkpoint
from dcptool.formats.output import is_one_file
from dcptool.ops.guards import require_unchanged
from dcptool.ops.replacing import replaced
from dcptool.storage import is_url
from dcptool.storage.base import translated
from dcptool.storage.local import sync

_PAIRS = {("dcp", "torch"), ("dcp", "safetensors"), ("torch_save", "dcp")}


def convert_with_torch(source: str, target: str, to: str, *, trust: bool, overwrite: bool = False) -> str:
    """Convert with `format_utils`, all or nothing.

    Args:
        source: local path of a DCP directory, or of a `.pt` file.
        target: local path of the output.
        to: "torch", "safetensors" (a file; tensors only) or "dcp" (from a `.pt` file).
        trust: must be True: torch executes the pickles in the source.
        overwrite: replace output that is there, once the new one is complete.

    Returns:
        The version of torch.

    Raises:
        UnsupportedError: torch is missing, `trust` is False, or torch has no such conversion.
        ItemError: torch cannot do it; the message has its reason.
    """
    if not trust:
        raise UnsupportedError(f"--engine torch executes the pickles in {source}; add --trust if you trust them")
    problem = torch_problem(source, target, to)
    if problem:
        raise UnsupportedError(problem)
    checkpoint = open_checkpoint(source)
    if overwrite:
        replaced(target, to)
    try:
        import torch
    except ImportError:
        raise UnsupportedError("--engine torch needs torch: pip install 'dcptool[torch]'") from None
    nbytes = sum(checkpoint.files.values())
    with prepare(target, to != "dcp", nbytes, overwrite, checkpoint.path) as place:
        _attempt(to, checkpoint, place.written)
        _sync_all(place.written)
        require_unchanged(checkpoint)
        place.publish(overwrite)
    return str(torch.__version__)


def _sync_all(path: str) -> None:
    """Make what was written last through a power cut: torch.save and safetensors sync nothing.

    Raises:
        StorageError: it cannot be made so.
    """
    paths = [path] if os.path.isfile(path) else [os.path.join(path, name) for name in os.listdir(path)]
    for name in paths:
        with translated(name, StorageError):
            sync(name)


def torch_problem(source: str, target: str, to: str) -> str:
    """Say why torch has no such conversion, whatever is in the source; "" if it has."""
    if is_url(source) or is_url(target):
        return "torch converts on local disks only; --engine stream (the default) reads and writes URLs"
    theirs = open_checkpoint(source).format
    if (theirs.name, to) not in _PAIRS or is_one_file(to, target) != (to != "dcp"):
        to = "safetensors in a folder" if to == "safetensors" and theirs.loads_in_torch else to
        return (
            f"torch converts DCP to a .pt or .safetensors file, and .pt to DCP, not {theirs} to {to}; "
            "--engine stream (the default) does"
        )
    return ""


def _attempt(to: str, checkpoint: Checkpoint, target: str) -> None:
    """Call torch, without its prints; its errors, some of which are no Exception, become ours."""
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            _run(to, checkpoint, target)
    except (KeyboardInterrupt, SystemExit, DcptoolError):
        raise
    except BaseException as error:
        reason = str(error).strip().splitlines()[:1] or [""]
        message = f"{checkpoint.path}: torch cannot convert it: {type(error).__name__}: {reason[0]}"
        raise ItemError(message) from error


def _run(to: str, checkpoint: Checkpoint, target: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    if to == "dcp":
        torch_save_to_dcp(checkpoint.path, target)
    elif to == "torch":
        dcp_to_torch_save(checkpoint.root, target)
    else:
        import torch
        from safetensors.torch import save_file

        between = f"{target}.pt"
        try:
            dcp_to_torch_save(checkpoint.root, between)
            state = torch.load(between, weights_only=False)
        finally:
            if os.path.exists(between):
                os.unlink(between)
        save_file(dict(_tensors(state, ())), target, metadata={"format": "pt"})


def _tensors(value: Any, path: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the tensors in nested dicts and lists by their joined names; each has storage of its own."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, part in parts for found in _tensors(part, (*path, str(key)))]
    return [(".".join(path), value.contiguous().clone())] if hasattr(value, "untyped_storage") else []
