"""Places, sizes and shapes beyond anything that is there: a finding of that step, in the time of what is there."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checks.check import Level  # noqa: E402
from dcptool.formats.dcp.metadata import read_records  # noqa: E402
from dcptool.ops.verify.verdict import State  # noqa: E402
from tests.conftest import OLD, run  # noqa: E402
from tests.damage import edit_metadata  # noqa: E402

MOST_SECONDS = 10.0


def place(fqn, **changes):
    """An edit of where an entry is stored."""

    def edit(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == fqn:
                metadata.storage_data[index] = dataclasses.replace(info, **changes)

    return edit


def shape(sizes, offsets=None):
    """An edit of the shape and of the only chunk of a tensor."""

    def edit(metadata):
        record = metadata.state_dict_metadata["m.w"]
        if offsets is None:
            record.size = torch.Size(sizes)
        start = torch.Size(offsets or [0] * len(sizes))
        record.chunks = [ChunkStorageMetadata(start, torch.Size(sizes))]

    return edit


def two_halves_over_one_another(metadata):
    record = metadata.state_dict_metadata["m.w"]
    record.size = torch.Size([1 << 50, 4])
    sizes = torch.Size([(1 << 49) + 1, 4])
    record.chunks = [ChunkStorageMetadata(torch.Size([start, 0]), sizes) for start in (0, (1 << 49) - 1)]
    (index, info) = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "m.w")
    metadata.storage_data[dataclasses.replace(index, offset=torch.Size([(1 << 49) - 1, 0]))] = info


EDITS = {
    **{
        f"{name} of {fqn}": place(fqn, **changes)
        for fqn in ("m.w", "step")
        for name, changes in {
            "end at 2^63": {"length": (1 << 63) - 1},
            "offset 2^63-1": {"offset": (1 << 63) - 1},
            "both 2^62": {"length": 1 << 62, "offset": 1 << 62},
            "length 2^62": {"length": 1 << 62},
            "length 2^200": {"length": 1 << 200},
            "offset 2^200": {"offset": 1 << 200},
            "negative offset": {"offset": -1},
            "negative length": {"length": -5},
            "fraction": {"offset": 1.5},
            "no length": {"length": 0},
        }.items()
    },
    "shape 2^50": shape([1 << 50, 4]),
    "shape 2^31 by 2^31": shape([1 << 31, 1 << 31]),
    "shape 2^62": shape([1 << 62, 1]),
    "chunk far outside": shape([1 << 62, 4], [1 << 62, 0]),
    "chunk at the end of numbers": shape([(1 << 63) - 1, 4], [(1 << 63) - 1, 0]),
    "two chunks over one another": two_halves_over_one_another,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "step"
    dcp.save({"m": {"w": torch.arange(32.0).view(8, 4), "b": torch.ones(3)}, "step": 7}, checkpoint_id=path)
    return path


@pytest.fixture
def folder(whole, tmp_path):
    """A run directory of a whole step and one to be edited."""
    for name in ("step_10", "step_20"):
        shutil.copytree(whole, tmp_path / "run" / name)
    return tmp_path / "run"


@pytest.mark.parametrize("name", EDITS)
def test_every_command_ends_soon_with_a_finding(name, folder, tmp_path):
    edit_metadata(folder / "step_20", EDITS[name])
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    step, other = folder / "step_20", folder / "step_10"
    commands = [
        ("verify", folder),
        ("verify", "--deep", step),
        ("inspect", folder),
        ("inspect", "--stats", "--values", "--chunks", step),
        ("latest", folder),
        ("prune", folder, "--keep", 1, "--dry-run"),
        ("mark", step),
        ("diff", step, step),
        ("diff", step, other),
        ("report", step, "-o", tmp_path / "r.html"),
        ("convert", "--to", "torch", step, tmp_path / "o.pt"),
        ("convert", "--to", "dcp", "--skip-corrupt", step, tmp_path / "o"),
        ("reshard", "--world-size", 2, "--dry-run", step, tmp_path / "r"),
    ]
    for command in commands:
        began = time.monotonic()
        done = run(*command)
        assert done.returncode in (0, 1, 3), (command, done.stderr)
        assert time.monotonic() - began < MOST_SECONDS, command
    judged = {verdict.name: verdict for verdict in dcptool.verify(folder).verdicts}
    assert judged["step_10"].state is State.COMPLETE
    assert judged["step_20"].state in (State.DAMAGED, State.INCOMPLETE)
    assert run("latest", folder).stdout.strip().endswith("step_10")
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.parametrize("name", [name for name in EDITS if " of m.w" in name])
def test_records_read_at_once_are_as_those_read_one_by_one(name, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "s")
    edit_metadata(tmp_path / "s", EDITS[name])
    data = (tmp_path / "s" / ".metadata").read_bytes()
    slow, fast = read_records(data), read_records(data, 1)
    assert dict(slow.items) == dict(fast.items)
    assert [finding.kind for finding in slow.problems] == [finding.kind for finding in fast.problems]


def test_an_expanded_tensor_is_not_read_element_by_element(tmp_path):
    """torch.save keeps strides of zero: a file of a kilobyte stands for petabytes, and torch.load reads it."""
    torch.save({"w": torch.ones(1).expand(1 << 50, 4), "b": torch.ones(3)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["w"].shape == (1 << 50, 4)
    (judged,) = dcptool.verify(tmp_path / "a.pt", dcptool.VerifyOptions(level=Level.DEEP)).verdicts
    assert judged.state is State.COMPLETE
    for command in (
        ("inspect", "--stats", tmp_path / "a.pt"),
        ("inspect", "--values", tmp_path / "a.pt"),
        ("diff", tmp_path / "a.pt", tmp_path / "a.pt"),
        ("convert", "--to", "safetensors", tmp_path / "a.pt", tmp_path / "o.safetensors"),
    ):
        began = time.monotonic()
        done = run(*command)
        assert done.returncode in (0, 1, 3), done.stderr
        assert time.monotonic() - began < MOST_SECONDS, command
    # What is repeated within reason is read as any.
    torch.save({"w": torch.ones(1).expand(1 << 20)}, tmp_path / "b.pt")
    assert dcptool.open(tmp_path / "b.pt").read("w").sum() == 1 << 20


def test_an_error_nobody_expected_is_that_steps(folder, monkeypatch):
    from dcptool.ops.verify import parts

    real = parts.check

    def check(checkpoint, *args, **options):
        if checkpoint.root.endswith("step_20"):
            raise OverflowError("int too big to convert")
        return real(checkpoint, *args, **options)

    monkeypatch.setattr(parts, "check", check)
    judged = {found.name: found.state for found in dcptool.verify(folder).verdicts}
    assert judged == {"step_10": State.COMPLETE, "step_20": State.DAMAGED}


def test_metadata_of_such_places_is_pickled_as_torch_pickles_it(whole, tmp_path):
    """The edits above go through torch's own classes: what is read is what they say."""
    shutil.copytree(whole, tmp_path / "s")
    edit_metadata(tmp_path / "s", EDITS["both 2^62 of m.w"])
    metadata = pickle.loads((tmp_path / "s" / ".metadata").read_bytes())
    assert any(info.offset + info.length == 1 << 63 for info in metadata.storage_data.values())


@pytest.mark.parametrize("name", ["MetadataIndex", "_StorageInfo", "ChunkStorageMetadata", "Metadata"])
def test_records_that_are_made_by_a_call_are_none(name, whole, tmp_path):
    """torch's classes take arguments: a record whose opcode calls its class without any is one torch cannot make."""
    import pickletools

    data = bytearray((whole / ".metadata").read_bytes())
    last, made = "", []
    for opcode, argument, position in pickletools.genops(bytes(data)):
        if opcode.name == "SHORT_BINUNICODE":
            last = argument
        if opcode.name == "NEWOBJ" and last == name:
            made.append(position)
    data[made[0]] = ord("R")
    shutil.copytree(whole, tmp_path / "s")
    (tmp_path / "s" / ".metadata").write_bytes(data)
    with pytest.raises(TypeError):
        pickle.loads(bytes(data))
    (verdict,) = dcptool.verify(tmp_path / "s").verdicts
    assert verdict.state is not State.COMPLETE
