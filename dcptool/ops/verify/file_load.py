"""Load the files of a checkpoint that is no DCP directory with the installed torch: `verify --load` of them.

A `.pt` file as `torch.load(weights_only=True, mmap=True)` takes it, safetensors tensor by tensor. Both are imported
inside functions only.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import Entry, TensorEntry
from dcptool.checkpoint.findings import DO_NOT_LOAD, Finding
from dcptool.checkpoint.kinds import Effect
from dcptool.errors import UnsupportedError
from dcptool.formats.safetensors.format import SAFETENSORS
from dcptool.ops.verify.torch_load import LoadReport, torch_version
from dcptool.ops.verify.torch_reader import one_line, quiet
from dcptool.storage import LocalStorage, join

_NOT_ALLOWED = re.compile(r"Unsupported (?:global|class|operand|reduce)|weights_only|allowlist", re.IGNORECASE)
"""How torch says that it would have to run what it does not know."""
_TRUST = "With --trust torch.load takes it with weights_only=False, and executes whatever it names."
_IN_A_JOB = "A ShardedTensor loads only in a job of as many ranks as saved it; --deep checks its bytes without."
_AGAIN = "Copy it again from where it was saved; dcptool verify --deep shows what is wrong with it."


def load_files(
    checkpoint: Checkpoint, *, trust: bool = False, progress: Callable[[int], None] | None = None
) -> LoadReport:
    """Load every file of a checkpoint of torch.save or safetensors files, and give up at once what was loaded.

    Args:
        checkpoint: an open one, on a local (or mounted) file system.
        trust: let torch execute the pickle of a `.pt` file.
        progress: called with bytes of tensor values that were dealt with.

    Raises:
        UnsupportedError: it is not local, or there is no torch, or one too old to be safe without `trust`.
    """
    if not isinstance(checkpoint.storage, LocalStorage):
        raise UnsupportedError(f"{checkpoint.path}: {checkpoint.format.loader} reads local files; copy it to one first")
    version = torch_version(trust)
    if checkpoint.format is SAFETENSORS:
        reasons = {file: _safetensors_reason(join(checkpoint.root, file)) for file in checkpoint.usage}
        found = [_refused(file, f"safetensors cannot load it: {reason}") for file, reason in reasons.items() if reason]
    else:
        found = _load_pt(checkpoint, version, trust)
    failed = {finding.file for finding in found}
    entries = [entry for entry in checkpoint.values() if failed.isdisjoint(_files_of(entry))]
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    nbytes = sum(entry.nbytes for entry in tensors)
    if progress:
        progress(nbytes)
    return LoadReport(version, len(tensors), len(entries) - len(tensors), 0, nbytes, tuple(found))


def _load_pt(checkpoint: Checkpoint, version: str, trust: bool) -> list[Finding]:
    """Load `.pt` files; what it takes code to load is not proven, and no damage."""
    unsafe = [found for found in checkpoint.problems if found.is_error and found.traits.effect is Effect.UNSAFE]
    if unsafe and not trust:
        message = f"{unsafe[0].message}, so torch was not asked"
        return [Finding.of("unsafe-metadata", message, unsafe[0].file, next_step=DO_NOT_LOAD)]
    listed = (
        checkpoint.usage if checkpoint.format.owns_folder else checkpoint.files
    )  # else others' files are among them
    names = [name for name in listed if not checkpoint.format.is_metadata(name)]
    return [found for name in names for found in _load_one(join(checkpoint.root, name), name, version, trust)]


def _load_one(path: str, name: str, version: str, trust: bool) -> list[Finding]:
    import torch

    try:
        with quiet():
            torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
    except (ImportError, AttributeError) as error:
        message = f"torch {version} did not load it, not proven: {one_line(error)}"
        step = "What it holds loads only where the packages of its classes are installed."
        return [Finding.of("not-loaded", message, name, next_step=step)]
    except Exception as error:
        if not trust and _NOT_ALLOWED.search(str(error)):
            message = f"torch {version} did not load it without executing its pickle, not proven: {one_line(error)}"
            return [Finding.of("not-loaded", message, name, next_step=_TRUST)]
        if "default process group" in str(error):
            message = f"torch {version} did not load it alone, not proven: {one_line(error)}"
            return [Finding.of("not-loaded", message, name, next_step=_IN_A_JOB)]
        return [_refused(name, f"torch {version} cannot load it: {one_line(error)}")]
    return []


def _safetensors_reason(path: str) -> str:
    """Return why the safetensors library cannot load a file, "" if it can."""
    from safetensors import safe_open

    try:
        with quiet(), safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                opened.get_tensor(name)
    except Exception as error:
        return one_line(error)
    return ""


def _refused(file: str, why: str) -> Finding:
    return Finding.of("torch-cannot-load", f"{file}: {why}", file, next_step=_AGAIN)


def _files_of(entry: Entry) -> set[str]:
    if isinstance(entry, TensorEntry):
        return set(entry.chunks.files())
    return {entry.item.file} if entry.item else set()
