"""dcptool: inspect torch.distributed.checkpoint directories without torch and without executing a pickle."""

from dcptool.checkpoint import Checkpoint, ObjectEntry, TensorEntry
from dcptool.formats.detect import open_checkpoint as open
from dcptool.overview import summarize

__all__ = ["Checkpoint", "ObjectEntry", "TensorEntry", "open", "summarize"]
__version__ = "0.1.0"
