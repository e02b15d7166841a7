"""Zips of any software as the standard library reads them: whether they open, and whether their checksums are right."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from functools import partial
from typing import IO

from dcptool.errors import StorageError

_PIECE_NBYTES = 1 << 20
_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError, OSError
)  # fmt: skip


def opened(file: IO[bytes]) -> zipfile.ZipFile | None:
    """Open a zip by the directory at its end; None if there is none.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        return zipfile.ZipFile(file)
    except StorageError:
        raise
    except _ERRORS:
        return None


def is_of_torch(archive: zipfile.ZipFile) -> bool:
    """Tell whether torch.save wrote a zip, by its pickle."""
    return any(name.lower().endswith("data.pkl") for name in archive.namelist())


def damaged_record(archive: zipfile.ZipFile) -> str:
    """Read all records, and return the first whose CRC32 or header is wrong, with what is wrong; "" if none is.

    Raises:
        StorageError: it cannot be read.
    """
    for member in archive.infolist():
        if not member.CRC:  # torch with CRC32 switched off
            continue
        try:
            with archive.open(member) as record:
                for _ in iter(partial(record.read, _PIECE_NBYTES), b""):
                    pass
        except StorageError:
            raise
        except _ERRORS as error:
            return f"{member.filename}: {error}"
    return ""
