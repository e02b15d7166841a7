"""dcptool: inspect, verify and tidy torch.distributed.checkpoint directories, without torch and executing no pickle."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcptool.checkpoint import Checkpoint, ObjectEntry, TensorEntry
    from dcptool.checks import Level, check
    from dcptool.comparing import DiffOptions, compare
    from dcptool.formats.detect import open_checkpoint as open
    from dcptool.interval import optimal_interval, read_cadence
    from dcptool.marking import mark_complete
    from dcptool.newest import find_latest, find_steps
    from dcptool.overview import summarize
    from dcptool.page import write_report
    from dcptool.rescuing import rescue
    from dcptool.resharding import ReshardOptions, reshard
    from dcptool.retention import delete_steps, plan_prune
    from dcptool.rewrite import ConvertOptions, convert
    from dcptool.selection import Renaming
    from dcptool.stats import tensor_stats
    from dcptool.verdict import State, VerifyOptions
    from dcptool.verification import verify

__all__ = [
    "Checkpoint",
    "ConvertOptions",
    "DiffOptions",
    "Level",
    "ObjectEntry",
    "Renaming",
    "ReshardOptions",
    "State",
    "TensorEntry",
    "VerifyOptions",
    "check",
    "compare",
    "convert",
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
    "checkpoint": ("Checkpoint", "ObjectEntry", "TensorEntry"),
    "checks": ("Level", "check"),
    "comparing": ("DiffOptions", "compare"),
    "interval": ("optimal_interval", "read_cadence"),
    "marking": ("mark_complete",),
    "newest": ("find_latest", "find_steps"),
    "overview": ("summarize",),
    "page": ("write_report",),
    "rescuing": ("rescue",),
    "resharding": ("ReshardOptions", "reshard"),
    "retention": ("delete_steps", "plan_prune"),
    "rewrite": ("ConvertOptions", "convert"),
    "selection": ("Renaming",),
    "stats": ("tensor_stats",),
    "verdict": ("State", "VerifyOptions"),
    "verification": ("verify",),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: a command needs a few of these modules."""
    if name == "open":
        return import_module("dcptool.formats.detect").open_checkpoint
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"dcptool.{module}"), name)
    raise AttributeError(f"module 'dcptool' has no attribute {name!r}")
