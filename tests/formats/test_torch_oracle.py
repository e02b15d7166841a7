"""Checkpoints saved by the installed torch, read by dcptool and by torch: equal, whatever is in them."""

from __future__ import annotations

import collections
import os
import pathlib
import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checkpoint import dtypes  # noqa: E402
from dcptool.errors import ItemError, MetadataError, UnsupportedError  # noqa: E402
from dcptool.pickles import plain  # noqa: E402


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def nasty_state() -> dict:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    sizes = {"b": torch.bool, "i8": torch.int8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64}
    shared = torch.arange(10.0)
    return {
        "model": {
            "plain": base.clone(),
            "transposed": base.permute(2, 0, 1),
            "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "view": base[1:, ::2, 1:4],
            "expanded": torch.ones(1, 3).expand(4, 3),
            "conj": torch.randn(3, dtype=torch.complex64).conj(),
            "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3),
            "tied.a": shared,
            "tied.b": shared,
            "parameter": torch.nn.Parameter(torch.randn(2, 2)),
            "fp8": torch.randn(5).to(torch.float8_e4m3fn),
            "half": torch.randn(5).to(torch.bfloat16),
            "odd name/with spaces\n and ünicode": torch.ones(1),
            **{name: torch.ones(3, dtype=dtype) for name, dtype in sizes.items()},
        },
        "list": [torch.zeros(2), {"deep": torch.ones(2)}, 3],
        "objects": {
            "text": "hello",
            "none": None,
            "tuple": (1, (2.5, "x")),
            "empty_list": [],
            "counter": collections.Counter("aab"),
            "path": pathlib.PurePosixPath("/a/b"),
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
            "device": torch.device("cuda", 1),
            "array": np.arange(3.0),
            "tensors": (torch.arange(4), "label"),
        },
    }


def flat(state, prefix=""):
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        name = f"{prefix}.{key}" if prefix else str(key)
        if (isinstance(value, dict) and value) or (isinstance(value, list) and any(torch.is_tensor(v) for v in value)):
            yield from flat(value, name)
        else:
            yield name, value


WRITERS = {
    "default": {},
    "a file per item": {"single_file_per_rank": False},
    "three threads": {"thread_count": 3},
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_real_save_reads_equal(tmp_path, kind):
    state = nasty_state()
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c", **WRITERS[kind]), no_dist=True)
    checkpoint = dcptool.open(tmp_path / "c")
    assert not checkpoint.problems
    check_entries(checkpoint, state)


def check_entries(checkpoint, state):
    expected = dict(flat(state))
    assert set(checkpoint) == set(expected)
    for fqn, value in expected.items():
        if torch.is_tensor(value):
            assert same_bits(checkpoint.read_torch(fqn), value.detach()), fqn
        else:
            check_object(checkpoint.value(fqn), value)


def check_object(got, value):
    if isinstance(value, np.ndarray):
        assert got.nested() == value.tolist()
    elif isinstance(value, tuple) and torch.is_tensor(value[0]):
        assert got[0].nested() == value[0].tolist()
    else:
        assert repr(got) == repr(value)
        assert plain.class_name(got).rpartition(".")[2] == type(value).__name__


def test_a_pt_file_reads_equal(tmp_path):
    state = nasty_state()
    torch.save(state, tmp_path / "model.pt")
    checkpoint = dcptool.open(tmp_path / "model.pt")
    check_entries(checkpoint, state)


def test_dcp_converted_by_torch_reads_equal_to_the_dcp(tmp_path):
    state = {"model": {"w": torch.randn(4, 4)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt")
    a, b = dcptool.open(tmp_path / "c"), dcptool.open(tmp_path / "m.pt")
    assert set(a) == set(b)
    assert (a.read("model.w") == b.read("model.w")).all()
    assert a.value("step") == b.value("step") == 3


def test_pt_with_one_value_and_with_state_dict_attributes(tmp_path):
    torch.save(torch.arange(3), tmp_path / "t.pt")
    assert dcptool.open(tmp_path / "t.pt").read(".").tolist() == [0, 1, 2]
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "sd.pt")  # an OrderedDict with attributes
    checkpoint = dcptool.open(tmp_path / "sd.pt")
    assert same_bits(checkpoint.read_torch("weight"), model.weight.detach())


def test_torchscript_is_named(tmp_path):
    with pytest.warns():  # torch calls its own TorchScript deprecated
        script = torch.jit.script(torch.nn.Linear(2, 2))
    script.save(str(tmp_path / "s.pt"))
    with pytest.raises((UnsupportedError, MetadataError), match="TorchScript"):
        dcptool.open(tmp_path / "s.pt")


@pytest.mark.parametrize("dtype", sorted(name for name, found in dtypes.BY_NAME.items() if found.safetensors))
def test_safetensors_dtypes_read_equal_to_the_library(tmp_path, dtype):
    from safetensors.torch import load_file, save_file

    raw = torch.arange(16, dtype=torch.uint8)
    tensor = (raw % 2 if dtype == "bool" else raw).view(getattr(torch, dtype)).reshape(2, -1)
    path = tmp_path / "m.safetensors"
    save_file({"x": tensor}, path)
    checkpoint = dcptool.open(path)
    assert checkpoint["x"].dtype == dtype
    loaded = load_file(path)["x"]
    got = checkpoint.read_torch("x")
    assert got.reshape(-1).view(torch.uint8).tolist() == loaded.reshape(-1).view(torch.uint8).tolist()


def test_one_row_of_a_large_tensor_reads_little(tmp_path, monkeypatch):
    rows = 1 << 14
    state = {"w": torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)}  # 64 MiB
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = dcptool.open(tmp_path / "c")
    count = 0
    read, read_into = checkpoint.storage.read, checkpoint.storage.read_into

    def counted_read(name, byte_offset, nbytes):
        nonlocal count
        count += nbytes
        return read(name, byte_offset, nbytes)

    def counted_read_into(name, byte_offset, out):
        nonlocal count
        count += len(out)
        read_into(name, byte_offset, out)

    monkeypatch.setattr(checkpoint.storage, "read", counted_read)
    monkeypatch.setattr(checkpoint.storage, "read_into", counted_read_into)
    row = checkpoint.read("w", (rows - 1, 0), (1, 1024))
    assert row[0, -1] == rows * 1024 - 1
    assert count < 1 << 16
    assert checkpoint.read("w", (rows - 3, 1023), (3, 1)).shape == (3, 1)
    assert count < 1 << 16


def test_a_record_larger_than_its_view_and_a_flipped_bit(tmp_path):
    dcp.save({"w": torch.arange(64.0)}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = tmp_path / "c" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    place = data.index(struct.pack("<f", 63.0))
    data[place] ^= 1
    file.write_bytes(data)
    checkpoint = dcptool.open(tmp_path / "c")
    with pytest.raises(ItemError, match=r"__0_0\.distcp, bytes 0–[\d,]+: 'w' at \[0\]: bytes were changed"):
        checkpoint.read("w")
    loaded = {"w": torch.empty(64)}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)  # torch does not look
    assert loaded["w"][63] != 63.0


def test_r32_r36_kinds_and_integer_keys(tmp_path):
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    state = {"n": 0.1, "w": torch.zeros(1), "optimizer": optimizer.state_dict() | {"state": {0: {"step": 1}}}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = dcptool.open(tmp_path / "c")
    assert list(checkpoint.tensors) == ["w"]
    assert checkpoint.value("n") == 0.1
    assert checkpoint["optimizer.state.0.step"].path == ("optimizer", "state", "0", "step")


def test_r14_containers_torch_before_2_4_kept_as_one_object(tmp_path):
    dcp.save({"cb": [{"k": 1}, {"k": 2}], "flat": [1, 2]}, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = dcptool.open(tmp_path / "c")
    assert {fqn: checkpoint.value(fqn) for fqn in checkpoint} == {"cb.0.k": 1, "cb.1.k": 2, "flat": [1, 2]}
    assert checkpoint["cb.1.k"].path == ("cb", 1, "k")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(name for name, found in dtypes.BY_NAME.items() if found.numpy))
def test_every_dtype_transposed_and_by_columns(tmp_path, dtype):
    element = dtypes.lookup(dtype)
    raw = torch.arange(24 * element.itemsize, dtype=torch.uint8)
    whole = (raw % 2 if dtype == "bool" else raw).view(getattr(torch, dtype)).reshape(4, 6)
    torch.save({"t": whole.t(), "w": whole}, tmp_path / "m.pt")
    dcp.save({"t": whole.t(), "w": whole}, checkpoint_id=tmp_path / "c", no_dist=True)
    for path in ("m.pt", "c"):
        checkpoint = dcptool.open(tmp_path / path)
        for fqn, tensor in (("w", whole), ("t", whole.t())):
            expected = tensor.contiguous().view(torch.uint8).reshape(*tensor.shape, element.itemsize)
            got = torch.from_numpy(checkpoint.read(fqn).view(np.uint8).copy()).reshape(expected.shape)
            assert torch.equal(got, expected)
            column = checkpoint.read(fqn, (0, 1), (tensor.shape[0], 2)).view(np.uint8).copy()
            assert torch.equal(torch.from_numpy(column).reshape(tensor.shape[0], 2, -1), expected[:, 1:3])


def test_many_large_compressed_chunks(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    from dcptool.formats.dcp import items

    stored = zstandard.compress(bytes(50_000))
    assert items.undo_transforms(stored, ("stream.zstd/1",), 50_000) == bytes(50_000)
    with pytest.raises(ItemError, match="more than the 49,999 bytes"):
        items.undo_transforms(stored, ("stream.zstd/1",), 49_999)
    # A tensor of more chunks than are kept, each larger than what is allowed without knowing its size.
    monkeypatch.setattr(items, "_DECODED_NBYTES", 2000)
    checkpoint = dcptool.open("fixtures/foreign/w_zstd")
    whole = checkpoint.read("model.embed.weight")
    monkeypatch.undo()
    assert (whole == dcptool.open("fixtures/foreign/w_zstd").read("model.embed.weight")).all()


def test_odd_but_legal_pt_files(tmp_path):
    one, two = torch.ones(2), torch.zeros(3)
    state = {
        "clash": {0: one, "0": two},
        "taken": {"0#2": one, 0: one, "0": two},
        "numpy": {np.int64(0): one, np.int64(1): two},
        "view": torch.arange(7, dtype=torch.uint8)[:4].view(torch.float32),
        "inside": (torch.arange(6).reshape(2, 3).t(), torch.ones(1).expand(3)),
        "small of large": (torch.arange(1_000_000)[10:13],),
        "range": range(3),
        "big": 10**5000,
    }
    torch.save(state, tmp_path / "m.pt")
    checkpoint = dcptool.open(tmp_path / "m.pt")
    assert checkpoint.read("clash.0").tolist() == [1, 1]
    assert checkpoint.read("clash.0#2").tolist() == [0, 0, 0]
    assert [checkpoint.read(f"taken.0{more}").tolist() for more in ("#2", "", "#3")] == [[1, 1], [1, 1], [0, 0, 0]]
    kinds = ["duplicate-name", "duplicate-name", "shared-storage"]
    assert [problem.kind for problem in checkpoint.problems] == kinds
    assert {"numpy.0", "numpy.1"} <= set(checkpoint)
    assert same_bits(checkpoint.read_torch("view"), state["view"])
    with pytest.MonkeyPatch.context() as patch:  # an older torch
        patch.delattr(torch, "float32")
        with pytest.raises(UnsupportedError, match="has no dtype float32; use read"):
            checkpoint.read_torch("view")
    assert [item.nested() for item in checkpoint.value("inside")] == [[[0, 3], [1, 4], [2, 5]], [1.0, 1.0, 1.0]]
    assert checkpoint.value("small of large")[0].nested() == [10, 11, 12]
    assert repr(checkpoint.value("range")) == "range(0, 3, 1)"
    assert repr(checkpoint.value("big")) == "<int of 16,610 bits>"


class Labelled(torch.Tensor):
    """A tensor subclass, as libraries write them."""


class Registry(dict):
    """A dict subclass."""


def test_tensor_and_dict_subclasses_in_pt_files(tmp_path):
    torch.save({"sub": torch.ones(2).as_subclass(Labelled), "reg": Registry(w=torch.zeros(3))}, tmp_path / "m.pt")
    checkpoint = dcptool.open(tmp_path / "m.pt")
    assert checkpoint.read("sub").tolist() == [1, 1]
    assert checkpoint.read("reg.w").shape == (3,)


def test_holes_and_overlaps_are_no_complete_checkpoint(tmp_path):
    import pickle

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    record = metadata.state_dict_metadata["w"]
    record.size = torch.Size((8,))
    file.write_bytes(pickle.dumps(metadata))
    summary = dcptool.summarize(tmp_path / "c").checkpoints[0]
    assert (summary.state, summary.problems[-1].kind) == ("damaged", "hole")
    record.size = torch.Size((6,))
    record.chunks.append(ChunkStorageMetadata(torch.Size((2,)), torch.Size((2,))))
    file.write_bytes(pickle.dumps(metadata))
    summary = dcptool.summarize(tmp_path / "c").checkpoints[0]
    assert "overlap" in {problem.kind for problem in summary.problems}


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_r16_code_in_an_entry_is_named_and_not_run(tmp_path):
    dcp.save({"w": torch.zeros(2), "x": Evil(tmp_path / "ran")}, checkpoint_id=tmp_path / "c", no_dist=True)
    torch.save({"w": torch.zeros(2), "x": Evil(tmp_path / "ran")}, tmp_path / "m.pt")
    for name in ("c", "m.pt"):
        summary = dcptool.summarize(tmp_path / name).checkpoints[0]
        assert [item.class_name for item in summary.objects] == [f"{os.system.__module__}.system"]
    assert not (tmp_path / "ran").exists()
