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


def leave_lfs_pointer(file: Path) -> None:
    """Put in place of a file what a clone without Git LFS has there."""
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 123456\n")


def overwrite(file: Path, byte_offset: int, data: bytes) -> None:
    """Put other bytes in place of some."""
    content = bytearray(file.read_bytes())
    content[byte_offset : byte_offset + len(data)] = data
    file.write_bytes(content)


def swap(first: Path, second: Path) -> None:
    """Give each of two files the other's content."""
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def edit_metadata(folder: Path, change) -> None:
    """Change the metadata of a DCP checkpoint as torch's own object and pickle it again."""
    import pickle

    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, 4))
