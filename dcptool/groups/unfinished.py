"""Output that members have begun and not published: what was told of it, and its removal once they are gone."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import Any

from dcptool.errors import DcptoolError
from dcptool.storage import is_temporary, storage_at


class UnfinishedOutput:
    """What has to be removed if the members end without a result.

    Attributes:
        path: where output grows, "" if nothing is to be removed.
        published: whether it has its name already.
    """

    def __init__(self) -> None:
        self.path, self.published = "", False
        self._sealing: tuple[str, ...] = ()
        self._made: list[str] = []

    def note(self, kind: str, value: Any) -> None:
        """Take note of what a member told its audience: the method's name, and what it was given."""
        if kind == "writing":
            self.path, self._sealing = value
        elif kind == "made":
            self._made.append(value)
        elif kind == "published":
            self.path, self.published = "", True

    def keep(self) -> None:
        """Leave all as it is: the members ended well."""
        self.path = ""

    def remove(self) -> None:
        """Remove a temporary folder whole, of an object store what was made there. Never raises."""
        if is_temporary(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.path and self._made:
            storage = storage_at(self.path)
            # What makes it complete goes first, so that nothing half removed looks whole.
            for name in sorted(self._made, key=lambda name: name not in self._sealing):
                with suppress(DcptoolError):
                    storage.delete(name)
