"""Die by SIGKILL at the n-th moment of a save: wherever a file is opened to write, saved, or renamed in a folder."""

import os
import signal
import sys
from pathlib import Path

import torch

_WRITING = os.O_WRONLY | os.O_RDWR


class Moments:
    """Counts the moments of saves into a folder; at one of them this process ends as the kernel would end it.

    Args:
        folder: of the save that dies; nothing outside counts.
        fatal: the moment at which to die, counted from 1; 0 for never.
    """

    def __init__(self, folder: str, fatal: int) -> None:
        self._folder, self._fatal, self.n_passed = os.path.realpath(folder), fatal, 0
        self._save = torch.save
        torch.save = self._saved
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple) -> None:
        is_new = event == "open" and ((isinstance(args[1], str) and set(args[1]) & set("wax+")) or args[2] & _WRITING)
        if is_new or event in ("os.rename", "os.mkdir"):
            self._pass(args[0])

    def _saved(self, value, file, *args, **kwargs):
        if self._is_inside(file):
            self._pass(file)
            self._save(value, file, *args, **kwargs)
            if self._pass(file, die=False):
                os.truncate(file, os.path.getsize(file) // 2)  # as if the pages had not all reached the disk
                os.kill(os.getpid(), signal.SIGKILL)
            return
        self._save(value, file, *args, **kwargs)

    def _is_inside(self, path: object) -> bool:
        return isinstance(path, str | Path) and os.path.realpath(path).startswith(self._folder)

    def _pass(self, path: object, die: bool = True) -> bool:
        if not self._is_inside(path):
            return False
        self.n_passed += 1
        if self.n_passed == self._fatal and die:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.n_passed == self._fatal
