"""dcptool: inspect torch.distributed.checkpoint directories without torch and without executing a pickle."""

from dcptool.checkpoint import Checkpoint, ObjectEntry, TensorEntry
from dcptool.formats.detect import open_checkpoint as open

__all__ = ["Checkpoint", "ObjectEntry", "TensorEntry", "open"]
__version__ = "0.1.0"
