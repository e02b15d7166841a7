"""dcptool: inspect, verify and tidy torch.distributed.checkpoint directories, without torch and executing no pickle."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcptool.checkpoint.checkpoint import Checkpoint
    from dcptool.checkpoint.entries import ObjectEntry, TensorEntry
    from dcptool.checkpoint.selection import Renaming
    from dcptool.checks.check import Level, check
    from dcptool.formats.detect import open_checkpoint as open
    from dcptool.ops.convert.convert import ConvertOptions, convert
    from dcptool.ops.copy.copy import copy_steps
    from dcptool.ops.copy.step import CopyOptions
    from dcptool.ops.diff.diff import DiffOptions, compare
    from dcptool.ops.inspect.inspect import summarize
    from dcptool.ops.inspect.stats import tensor_stats
    from dcptool.ops.interval import optimal_interval, read_cadence
    from dcptool.ops.latest import find_latest, find_steps
    from dcptool.ops.mark import mark_complete
    from dcptool.ops.prune.archive import archive_steps
    from dcptool.ops.prune.delete import delete_steps
    from dcptool.ops.prune.plan import plan_prune
    from dcptool.ops.report.report import write_report
    from dcptool.ops.rescue.rescue import rescue
    from dcptool.ops.reshard.reshard import ReshardOptions, reshard
    from dcptool.ops.verify.verdict import State, VerifyOptions
    from dcptool.ops.verify.verify import verify

__all__ = [
    "Checkpoint",
    "ConvertOptions",
    "CopyOptions",
    "DiffOptions",
    "Level",
    "ObjectEntry",
    "Renaming",
    "ReshardOptions",
    "State",
    "TensorEntry",
    "VerifyOptions",
    "archive_steps",
    "check",
    "compare",
    "convert",
    "copy_steps",
    "delete_steps",
    "find_latest",
    "find_steps",
    "mark_complete",
    "open",
    "optimal_interval",
    "plan_prune",
    "read_cadence",
    "rescue",
    "reshard",
    "summarize",
    "tensor_stats",
    "verify",
    "write_report",
]
__version__ = "0.1.0"

_MODULES = {
    "checkpoint.checkpoint": ("Checkpoint",),
    "checkpoint.entries": ("ObjectEntry", "TensorEntry"),
    "checkpoint.selection": ("Renaming",),
    "checks.check": ("Level", "check"),
    "ops.convert.convert": ("ConvertOptions", "convert"),
    "ops.copy.copy": ("copy_steps",),
    "ops.copy.step": ("CopyOptions",),
    "ops.diff.diff": ("DiffOptions", "compare"),
    "ops.inspect.inspect": ("summarize",),
    "ops.inspect.stats": ("tensor_stats",),
    "ops.interval": ("optimal_interval", "read_cadence"),
    "ops.latest": ("find_latest", "find_steps"),
    "ops.mark": ("mark_complete",),
    "ops.prune.archive": ("archive_steps",),
    "ops.prune.delete": ("delete_steps",),
    "ops.prune.plan": ("plan_prune",),
    "ops.report.report": ("write_report",),
    "ops.rescue.rescue": ("rescue",),
    "ops.reshard.reshard": ("ReshardOptions", "reshard"),
    "ops.verify.verdict": ("State", "VerifyOptions"),
    "ops.verify.verify": ("verify",),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: a command needs a few of these modules."""
    if name == "open":
        return import_module("dcptool.formats.detect").open_checkpoint
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"dcptool.{module}"), name)
    raise AttributeError(f"module 'dcptool' has no attribute {name!r}")
