"""What a training job needs to survive: its state, saves that are marked when they are whole, and the way back.

Needs torch, and imports it; nothing else in dcptool imports this package.
"""

from __future__ import annotations

from dcptool.errors import UnsupportedError

try:
    import torch.distributed.checkpoint  # noqa: F401
except ImportError as error:
    raise UnsupportedError(f"dcptool.training needs torch ({error}): pip install 'dcptool[torch]'") from error

from dcptool.training.events import SaveResult
from dcptool.training.loading import PerRank
from dcptool.training.manager import CheckpointManager
from dcptool.training.reader import Reader
from dcptool.training.restoring import Restored
from dcptool.training.rng import RandomState
from dcptool.training.state import TrainState

__all__ = ["CheckpointManager", "PerRank", "RandomState", "Reader", "Restored", "SaveResult", "TrainState"]
