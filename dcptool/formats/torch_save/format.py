"""`.pt` files as a value. Reads nothing."""

from __future__ import annotations

from dcptool.checkpoint.format import Format
from dcptool.pickles.calls import LEGACY_MAGIC

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_ZIP, _N_MAGIC = b"PK\x03\x04", 13


def is_legacy(start: bytes) -> bool:
    """Tell by a file's first bytes whether torch.save wrote it as it did before torch 1.6, which is no zip."""
    return start.startswith(LEGACY_MAGIC[:_N_MAGIC])


def is_file(name: str, start: bytes) -> bool:
    """Tell whether a file begins like one of torch.save, new or old."""
    return start.startswith(_ZIP) or is_legacy(start)


TORCH_SAVE = Format("torch_save", "torch.load", (".pt", ".pth", ".bin"))
