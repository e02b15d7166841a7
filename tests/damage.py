"""Ways to damage a copy of a checkpoint, each in one place."""

from __future__ import annotations

import shutil
from pathlib import Path


def copy(source: Path, target: Path) -> Path:
    """A copy of a checkpoint folder that may be damaged."""
    shutil.copytree(source, target)
    return target


def flip_byte(file: Path, byte_offset: int, bits: int = 0x01) -> None:
    """Flip bits of one byte by XOR, so that it changes whatever it was."""
    data = bytearray(file.read_bytes())
    data[byte_offset] ^= bits
    file.write_bytes(data)


def truncate(file: Path, nbytes: int) -> None:
    """Cut a file to its first bytes."""
    file.write_bytes(file.read_bytes()[:nbytes])
