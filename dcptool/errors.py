"""The errors dcptool raises. Knows nothing else of the package, and nothing of the command line.

    DcptoolError
    ├── CheckpointNotFoundError   (FileNotFoundError)     nothing at that path, or no checkpoint in it
    │   └── SeveralCheckpointsError                       a folder of checkpoints where one is wanted
    ├── MetadataError             (ValueError)            `.metadata` or a header cannot be read
    │   ├── UnsafePickleError                             a pickle is built to exhaust or attack its reader
    │   └── RunsCodeError                                 what cannot be read would run code all the same
    ├── StorageError              (OSError)               the file system or object store said no
    ├── ItemError                 (ValueError)            a stored chunk or object is not what the metadata says
    ├── LayoutError               (ValueError)            the boxes of a tensor do not give what was asked for
    ├── UnsupportedError          (NotImplementedError)   understood, but not something dcptool reads
    ├── OutputExistsError         (FileExistsError)       output would replace something
    ├── WorkerError               (RuntimeError)          a process of a group was lost or failed
    └── TrainingError             (RuntimeError)          a training job could not save or restore, on some rank

Every error says in one or two lines what is wrong, where (path, fqn, byte range), and what to do next.
What is *found* in a checkpoint is not raised: see `findings`.
"""

from __future__ import annotations

from copy import copy


class DcptoolError(Exception):
    """Base of every error dcptool raises on purpose; the command line exits 3 on it.

    Attributes:
        message: what is wrong and where, one line for most.
        next_step: what the user can do now, one sentence, or empty.
        told_elsewhere: another process of the same group tells the user.
    """

    told_elsewhere = False

    def __init__(self, message: str = "", *, next_step: str = "") -> None:
        super().__init__(message)
        self.message, self.next_step = message, next_step

    def __str__(self) -> str:
        return f"{self.message}\n{self.next_step}" if self.next_step else self.message

    def saying(self, message: str, *, next_step: str | None = None) -> DcptoolError:
        """Return an error of the same class with another message; the next step stays if none is given."""
        other = copy(self)
        other.args, other.message = (message,), message
        other.next_step = self.next_step if next_step is None else next_step
        return other


class CheckpointNotFoundError(DcptoolError, FileNotFoundError):
    """There is nothing at the path, or what is there holds no checkpoint."""


class SeveralCheckpointsError(CheckpointNotFoundError):
    """A folder holds several checkpoints where one is wanted: `path` is the folder, `parts` are their paths."""

    def __init__(self, message: str, path: str = "", parts: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path, self.parts = path, parts


class MetadataError(DcptoolError, ValueError):
    """A description of a checkpoint (`.metadata`, a safetensors header, an index) cannot be read."""


class UnsafePickleError(MetadataError):
    """A pickle is built so that reading it would exhaust memory, the stack or time."""


class RunsCodeError(MetadataError):
    """What a file or an item holds is nothing dcptool reads, or damaged, and runs code when it is loaded.

    Attributes:
        names: what it would run; see `pickles.calls`.
    """

    def __init__(self, message: str = "", names: tuple[str, ...] = (), *, next_step: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.names = names


class StorageError(DcptoolError, OSError):
    """The file system or object store refused or failed an operation; `gone`: what was asked for is not there."""

    gone = False


class ItemError(DcptoolError, ValueError):
    """A stored item (one chunk, one object) is damaged or disagrees with the metadata."""


class LayoutError(DcptoolError, ValueError):
    """The chunks of a tensor do not cover the wanted region, or the region is not inside the tensor."""


class UnsupportedError(DcptoolError, NotImplementedError):
    """The input is recognised, but dcptool does not read it; the message says what does."""


class OutputExistsError(DcptoolError, FileExistsError):
    """There is something where output should go; nothing was changed."""


class TrainingError(DcptoolError, RuntimeError):
    """A training job could not save or restore; every rank raises it, with what went wrong on which.

    `unreadable`: a file system or store would not give something out, which may be whole. `stopped`: a rank was told to
    end, by Ctrl-C, sys.exit or a signal, which says nothing of what it did. `untouched`: the job is what it was.
    """

    unreadable = False
    stopped = False
    untouched = False


class WorkerError(DcptoolError, RuntimeError):
    """A process that shared the work was lost, failed, or never came; nothing was published."""

    trace = ""
    """Traceback of an exception that nobody expected there."""
