"""Ten thousand mutations of each kind of file, against torch's and safetensors' own loaders.

Of every mutated file dcptool may say what it likes but that it is whole, unless the loader reads it and gives what
dcptool reads; it raises nothing but its own errors, ends soon, and executes nothing. `pytest -m slow` runs it, alone:

    pytest -m slow --timeout 0 -s tests/formats/test_fuzzing.py
"""

from __future__ import annotations

import io
import logging
import random
import resource
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checks.check import Level  # noqa: E402
from dcptool.errors import DcptoolError  # noqa: E402

pytestmark = pytest.mark.slow

N_MUTATIONS = 10_000
MOST_SECONDS = 20
MEMORY_NBYTES = 12 << 30
"""Of addresses: what a mutated size asks torch for fails then, as it would on a machine of any size."""
FORBIDDEN = {
    "exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect",
    "ctypes.dlopen", "pickle.find_class", "import",
}  # fmt: skip
TENSORS = {
    "model.w": torch.arange(24.0).view(6, 4),
    "model.b": torch.arange(5, dtype=torch.int64),
    "model.t": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    "e": torch.zeros(0, 3),
}
OBJECTS = {"step": 7, "cfg": (1, "two", 3.5)}


class TooSlow(Exception):
    """A call did not end."""


class Watch:
    """Says what dcptool did that it must not, and stops what does not end."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._is_on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_on and event in FORBIDDEN:
            self.events.append(f"{event} {args!r}"[:200])

    @contextmanager
    def within(self, seconds: int, audited: bool):
        def stop(*_: object) -> None:
            raise TooSlow

        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(seconds)
        self._is_on = audited
        try:
            yield
        finally:
            self._is_on = False
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def watch():
    return Watch()


@pytest.fixture(autouse=True)
def _limited():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, before[1]))
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
    resource.setrlimit(resource.RLIMIT_AS, before)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One mutation: bits or bytes changed, a range zeroed, cut off, left out, doubled or put over another place."""
    changed = bytearray(data)
    at = rng.randrange(len(data))
    length = rng.choice((1, 2, 4, 8, 16, 64, 256))
    kind = rng.randrange(10)
    if kind < 4:
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == 4:
        changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 5:
        changed[at : at + length] = bytes(len(changed[at : at + length]))
    elif kind == 6:
        del changed[at:]
    elif kind == 7:
        del changed[at : at + length]
    elif kind == 8:
        source = rng.randrange(len(data))
        changed[at:at] = data[source : source + length]
    else:
        source = rng.randrange(len(data))
        piece = data[source : source + length]
        changed[at : at + len(piece)] = piece
    return bytes(changed)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read_by_dcptool(path: Any) -> dict[str, Any]:
    """Everything dcptool reads: dtype, shape and bytes of tensors, what objects show."""
    checkpoint = dcptool.open(path)
    found: dict[str, Any] = {}
    for fqn, entry in checkpoint.tensors.items():
        found[fqn] = (entry.dtype, entry.shape, checkpoint.read(fqn).tobytes())
    for fqn in checkpoint.objects:
        found[fqn] = repr(checkpoint.value(fqn))
    return found


def shown(state: dict[str, Any]) -> dict[str, Any]:
    """What a loader gave, in the same form."""
    return {
        fqn: (str(value.dtype).removeprefix("torch."), tuple(value.shape), bits(value))
        if isinstance(value, torch.Tensor)
        else repr(value)
        for fqn, value in state.items()
    }


def fuzz(
    watch: Watch, name: str, path: Any, file: Any, load: Callable[[], dict[str, Any]], compares: bool = True
) -> Counter[str]:
    """Mutate a file `N_MUTATIONS` times, and hold what dcptool says of each against what a loader does.

    Args:
        watch: of this process.
        name: seeds the mutations.
        path: what dcptool and the loader open.
        file: what is mutated, at that path or in it.
        load: the loader, which raises what it likes.
        compares: whether a whole file must give what was saved; else what dcptool reads, for want of checksums.
    """
    rng = random.Random(name)
    whole = file.read_bytes()
    options = dcptool.VerifyOptions(level=Level.DEEP, threads=1)
    base = {finding.kind for finding in dcptool.verify(path, options).verdicts[0].findings}
    saved = shown(load())
    assert read_by_dcptool(path) == saved
    count: Counter[str] = Counter()
    wrong = []
    for number in range(N_MUTATIONS):
        data = mutated(whole, rng)
        if data == whole:
            count["unchanged"] += 1
            continue
        file.write_bytes(data)
        ours, read = "error", None
        try:
            with watch.within(MOST_SECONDS, audited=True):
                (verdict,) = dcptool.verify(path, options).verdicts
                told = {finding.kind for finding in verdict.findings} - base
                ours = f"{verdict.state.value}{' with a note' if told else ''}"
                read = read_by_dcptool(path)
        except DcptoolError:
            pass
        except BaseException as error:  # of any class: it is a bug, and the file shows which
            wrong.append((number, f"dcptool: {type(error).__name__}: {error}", data))
        try:
            with watch.within(MOST_SECONDS, audited=False):
                loaded = shown(load())
            theirs = "equal" if loaded == saved else "other values"
        except TooSlow:
            theirs, loaded = "too slow", None
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            theirs, loaded = "refused", None
        count[f"loader: {theirs}, dcptool: {ours}"] += 1
        if ours == "complete" and loaded != (saved if compares else read):
            wrong.append((number, f"complete, though the loader's is {theirs}", data))
        if watch.events:
            wrong.append((number, f"executed: {watch.events.pop()}", data))
            watch.events.clear()
    file.write_bytes(whole)
    print(f"\n{name}: {N_MUTATIONS:,} mutations of {len(whole):,} bytes")
    for what, number in sorted(count.items()):
        print(f"  {number:6,}  {what}")
    for number, what, data in wrong[:20]:
        print(f"  wrong: {number}: {what}: {difference(whole, data)}")
    assert not wrong
    return count


def difference(before: bytes, after: bytes) -> str:
    """Where two files differ first, for a report."""
    at = next(
        (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    return f"byte {at} of {len(before)} (now {len(after)}): {before[at : at + 12]!r} → {after[at : at + 12]!r}"


def load_dcp(path: Any) -> dict[str, Any]:
    """Everything stock torch loads of a DCP directory, by the names in its metadata."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for fqn, record in metadata.state_dict_metadata.items():
        is_tensor = isinstance(record, TensorStorageMetadata)
        state[fqn] = torch.zeros(record.size, dtype=record.properties.dtype) if is_tensor else None
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


@pytest.fixture
def folder(tmp_path):
    dcp.save({**TENSORS, **OBJECTS}, checkpoint_id=tmp_path / "step", no_dist=True)
    return tmp_path / "step"


def test_metadata(watch, folder):
    fuzz(watch, "metadata", folder, folder / ".metadata", lambda: load_dcp(folder), compares=False)


def test_items(watch, folder):
    fuzz(watch, "items", folder, folder / "__0_0.distcp", lambda: load_dcp(folder))


def test_pt(watch, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({**TENSORS, **OBJECTS}, path)
    fuzz(watch, "pt", path, path, lambda: torch.load(io.BytesIO(path.read_bytes()), weights_only=True))


def test_safetensors(watch, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, path, {"format": "pt"})

    def load() -> dict[str, Any]:
        copied = path.with_suffix(".copy")
        shutil.copy(path, copied)
        with safe_open(copied, "pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118

    fuzz(watch, "safetensors", path, path, load, compares=False)
