"""DCP output is for the oldest torch that can hold it: of classes that torch 2.2 has, and where that ends is told.

What torch 2.2.2 and 2.3.1 themselves read of such output was measured: docs/formats.md.
"""

from __future__ import annotations

import pickletools
from pathlib import Path

import pytest

import dcptool
from dcptool.errors import UnsupportedError
from dcptool.ops.convert.convert import ConvertOptions, convert
from tests.alone import reshard_alone
from tests.conftest import FOREIGN, run

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")
OF_CHECKPOINT = "torch.distributed.checkpoint.metadata"
OF_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
IN_TORCH_2_2 = {
    *(
        f"{OF_CHECKPOINT}.{name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
        )
    ),
    f"{OF_SHARDS}.TensorProperties",
    f"{OF_SHARDS}.MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    *(f"torch.{name}" for name in _DTYPES),
}
DCP = (
    "xver_t2130",
    "dtypes_keys_t241",
    "fsdp1_t222_orig",
    "hsdp",
    "trainer_fsdp2/checkpoint-2/optimizer_0",
    "megatron_tp2",
)


def names(file: Path) -> set[str]:
    """The globals of a pickle of protocol 4, as an older torch would import them."""
    found, texts, memo = set(), [], {}
    for opcode, argument, _ in pickletools.genops(file.read_bytes()):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            texts.append(argument)
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = texts[-1] if texts else None
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            texts.append(memo[argument])
        elif opcode.name == "STACK_GLOBAL":
            found.add(f"{texts[-2]}.{texts[-1]}")
            texts.append(None)
    return found


@pytest.mark.parametrize("name", DCP)
def test_metadata_names_only_what_torch_2_2_has(tmp_path, name):
    source = next(path for path in (FOREIGN / name, FOREIGN / name / "iter_0000010") if (path / ".metadata").exists())
    for number, options in enumerate((ConvertOptions(), ConvertOptions(torch=(2, 2)), ConvertOptions(torch=(2, 14)))):
        convert(source, tmp_path / f"{number}", "dcp", options)
        assert names(tmp_path / f"{number}" / ".metadata") <= IN_TORCH_2_2
    reshard_alone(source, tmp_path / "ws3", world_size=3, torch=(2, 2))
    assert names(tmp_path / "ws3" / ".metadata") <= IN_TORCH_2_2
    assert dcptool.compare(source, tmp_path / "ws3").equal


def test_of_other_formats_too_and_stock_torch_loads_it(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3).half()}, "step": 7}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "d", "dcp")
    assert names(tmp_path / "d" / ".metadata") <= IN_TORCH_2_2
    assert dcp.FileSystemReader(tmp_path / "d").read_metadata().planner_data["model.w"] == ("model", "w")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)
    assert torch.equal(back["model"]["w"], state["model"]["w"])
    assert back["step"] == 7
    assert dcptool.verify(tmp_path / "d", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good


NEWER = {"uint16": "2.3", "uint32": "2.3", "uint64": "2.3", "float8_e8m0fnu": "2.7", "float4_e2m1fn_x2": "2.8"}


@pytest.mark.parametrize(("dtype", "since"), NEWER.items())
def test_where_it_ends_is_told_and_what_is_asked_for_in_vain_refused(tmp_path, dtype, since):
    values = torch.arange(16, dtype=torch.uint8).view(getattr(torch, dtype))
    torch.save({"old": torch.ones(3), "new": values}, tmp_path / "a.pt")
    note = f"torch before {since} reads none of it, for it cannot hold 'new' ({dtype})"
    for done in (
        convert(tmp_path / "a.pt", tmp_path / "d", "dcp"),
        reshard_alone(tmp_path / "a.pt", tmp_path / "r", world_size=2),
    ):
        assert note in done.notes
    wanted = tuple(map(int, since.split(".")))
    before = (2, wanted[1] - 1)
    message = rf"^torch 2\.{before[1]} cannot hold 'new' \({dtype}\): that takes torch {since}\n.*--exclude 'new'"
    with pytest.raises(UnsupportedError, match=message):
        convert(tmp_path / "a.pt", tmp_path / "x", "dcp", ConvertOptions(torch=before))
    with pytest.raises(UnsupportedError, match=message):
        reshard_alone(tmp_path / "a.pt", tmp_path / "x", world_size=2, torch=before)
    assert not (tmp_path / "x").exists()
    done = convert(tmp_path / "a.pt", tmp_path / "y", "dcp", ConvertOptions(torch=wanted))
    assert not any("torch before" in note for note in done.notes)
    done = convert(tmp_path / "a.pt", tmp_path / "z", "dcp", ConvertOptions(torch=(2, 2), exclude=("new",)))
    assert not any("torch before" in note for note in done.notes)


def test_of_a_step_all_parts_are_meant(tmp_path):
    from tests.ranks import save

    save(tmp_path / "step_1" / "a", {"w": torch.ones(2)})
    save(tmp_path / "step_1" / "b", {"u": torch.ones(2).to(torch.uint16)})
    done = convert(tmp_path / "step_1", tmp_path / "out", "dcp")
    assert "b: torch before 2.3 reads none of it, for it cannot hold 'u' (uint16)" in done.notes
    with pytest.raises(UnsupportedError, match=r"torch 2\.2 cannot hold 'u'"):
        convert(tmp_path / "step_1", tmp_path / "x", "dcp", ConvertOptions(torch=(2, 2)))


def test_as_a_user_types_it(tmp_path):
    source = FOREIGN / "dtypes_keys_t2130"
    done = run("convert", "--to", "dcp", "--torch", "2.2.2", source, tmp_path / "out")
    assert done.returncode == 3
    assert "torch 2.2 cannot hold " in done.stderr
    assert run("convert", "--to", "dcp", "--torch", "2.8", source, tmp_path / "out").returncode == 0
    for arguments, code, message in (
        (["--to", "torch", "--torch", "2.2", source, tmp_path / "x.pt"], 2, "--torch is about DCP, not --to torch"),
        (["--to", "dcp", "--torch", "new", source, tmp_path / "x"], 2, "'new' is no version; write 2.2 or 2.4.1"),
        (["--to", "dcp", "--torch", "2.1", source, tmp_path / "x"], 3, "is for torch 2.2 and later"),
    ):
        done = run("convert", *arguments)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
