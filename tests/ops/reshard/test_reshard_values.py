"""What reshard copies: values of every flavour through stock torch, and one flipped bit refused by a group."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import dcptool
from dcptool.checkpoint.entries import TensorEntry
from dcptool.errors import DcptoolError, ItemError
from tests import damage
from tests.alone import reshard_alone
from tests.commands import Done
from tests.conftest import PARTS, WHOLE, part

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: E402

from tests.ranks import Shard, save  # noqa: E402

WITHOUT_CHECKSUMS = {
    "hf_idle_absent_w4",
    "hf_consolidated",
    "hf_sharded",
    "hf_sharded_multi",
    "legacy_stream/bare_tensor.pt",
    "legacy_stream/linear.pth",
    "legacy_stream/old.pt",
    "w_nocrc",
    "w_safetensors",
}


def stock_hashes(path: Path) -> dict[str, str]:
    """Load every tensor of a checkpoint with stock torch and hash it."""
    metadata = FileSystemReader(path).read_metadata()
    state = {
        fqn: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for fqn, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    _load_state_dict(state, FileSystemReader(path), no_dist=True)
    found = {}
    for fqn, tensor in state.items():
        flat = tensor.resolve_conj().contiguous().view(-1)
        found[fqn] = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("found", WHOLE, ids=[found.name for found in WHOLE])
def test_every_flavour_to_three_ranks(found, tmp_path):
    """Rank-local, zstd, SAFETENSORS, Megatron, `.pt`, safetensors: all become what three ranks would have saved."""
    rank = 0 if found.name == "w_no_collectives" else None
    done = reshard_alone(found.path, tmp_path / "out", world_size=3, check=True, rank=rank)
    expected = {fqn: entry for fqn, entry in found.expected.items() if entry["kind"] == "tensor"}
    assert done.n_tensors == len(expected)
    assert any("stored without checksums" in note for note in done.notes) == (found.name in WITHOUT_CHECKSUMS)
    assert stock_hashes(tmp_path / "out") == {fqn: entry["sha256"] for fqn, entry in expected.items()}
    source, written = dcptool.open(found.path), dcptool.open(tmp_path / "out")
    assert set(written.objects) == set(source.objects)
    assert dcptool.compare(found.path, tmp_path / "out").equal
    assert not [note for note in done.notes if "damaged" in note]
    assert dcptool.verify(tmp_path / "out").verdicts[0].state is dcptool.State.COMPLETE


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_files_of_one_process_are_sharded(form, tmp_path):
    dcptool.convert(part("xver_t2130").path, tmp_path / f"m.{'pt' if form == 'torch' else form}", form)
    source = tmp_path / ("m.pt" if form == "torch" else "m.safetensors")
    reshard_alone(source, tmp_path / "out", world_size=3)
    expected = {fqn: entry for fqn, entry in part("xver_t2130").expected.items() if entry["kind"] == "tensor"}
    found = stock_hashes(tmp_path / "out")
    assert found == {fqn: entry["sha256"] for fqn, entry in expected.items()}
    written = dcptool.open(tmp_path / "out")
    assert len(written.tensors["model.emb.weight"].chunks) == 3


def test_strided_payloads_and_tensors_larger_than_a_band(tmp_path, monkeypatch):
    """Bands of a few KiB cut everything everywhere: rows, within rows, across chunks, across target boxes."""
    monkeypatch.setattr("dcptool.copying.reading.BAND_NBYTES", 4096)
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(7, 3000, generator=generator)
    state = {
        "wide": wide,
        "turned": torch.randn(60, 50, generator=generator).t(),
        "part": torch.randn(100, 40, generator=generator)[10:30, 5:25],
        "deep": torch.randn(3, 5, 7, 11, generator=generator).permute(3, 1, 0, 2),
        "half": torch.randn(333, generator=generator).to(torch.bfloat16),
        "conj": torch.randn(40, 3, dtype=torch.complex64, generator=generator).conj(),
        "scalar": torch.tensor(2.5),
    }
    save(tmp_path / "one", state)
    wanted = {name: tensor.resolve_conj().contiguous() for name, tensor in state.items()}
    for number, options in enumerate(
        (
            {"world_size": 5},
            {"mesh": "a=3,b=2", "placements": ("half=a+b:0", "*=b:1,a:0")},
            {"mesh": "a=2,b=3", "placements": ("half=a:0", "deep=a:3,b:2", "*=a:1,b:0")},
        )
    ):
        out = tmp_path / f"out{number}"
        reshard_alone(tmp_path / "one", out, **options)
        again = tmp_path / f"again{number}"
        reshard_alone(out, again, world_size=4)
        for path in (out, again):
            loaded = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            _load_state_dict(loaded, FileSystemReader(path), no_dist=True)
            assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())


def test_selection(tmp_path):
    source = part("xver_t2130").path
    done = reshard_alone(source, tmp_path / "out", world_size=3, keys=("model.*",), exclude=("*.bias",))
    names = [fqn for fqn in dcptool.open(source) if fqn.startswith("model.") and not fqn.endswith(".bias")]
    assert set(dcptool.open(tmp_path / "out")) == set(names)
    assert done.n_tensors + done.n_objects == len(names)


def test_damaged_parts_are_refused(tmp_path):
    refused = 0
    for found in PARTS:
        if found.damaged:
            with pytest.raises(DcptoolError):
                reshard_alone(found.path, tmp_path / "out", world_size=3)
            assert not (tmp_path / "out").exists()
            refused += 1
    assert refused
    assert not list(tmp_path.iterdir())


def test_one_flipped_bit_is_refused_by_one_process_too(tmp_path):
    save(tmp_path / "a", *({"w": Shard.of(torch.randn(12, 8), rank, 3)} for rank in range(3)))
    damage.flip_byte(tmp_path / "a" / "__1_0.distcp", payload_of(tmp_path / "a", "w", 1))
    with pytest.raises(ItemError, match=r"__1_0.distcp, bytes .*: 'w' at \[4, 0\]: bytes were changed"):
        reshard_alone(tmp_path / "a", tmp_path / "out", world_size=48)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def payload_of(path: Path, fqn: str, index: int) -> int:
    """Where the middle of a chunk's values is in its file."""
    checkpoint = dcptool.open(path)
    entry = checkpoint[fqn]
    assert isinstance(entry, TensorEntry)
    chunk = entry.chunks[index]
    record = checkpoint.payload(entry, chunk).record
    return record.item.byte_offset + record.byte_offset + record.nbytes // 2


def test_one_flipped_bit_is_refused_by_a_group(commands, tmp_path):
    """Chunks that one worker reads alone, that two share, and that both read whole; every one of them is checked."""
    targets = {
        "rows": ["--world-size", 48],
        "columns": ["--mesh", "r=48", "--placement", "*=r:1"],
        "grid": ["--mesh", "a=6,b=8", "--placement", "*=b:1,a:0"],
        "swapped": ["--mesh", "b=8,a=6", "--placement", "*=b:1,a:0"],
    }
    generator = torch.Generator().manual_seed(3)
    whole = {"v": torch.randn(500, 96, generator=generator), "w": torch.randn(400, 96, generator=generator)}
    states = [{name: Shard.of(tensor, rank, 3) for name, tensor in whole.items()} for rank in range(3)]
    sound = save(tmp_path / "sound", *states)

    def reshard_all(source: Path, folder: Path) -> list[Done]:
        """All at once, each in a folder of its own: they would name each other's temporary output."""
        for name in targets:
            (folder / name).mkdir(parents=True)
        command = ("reshard", "--workers", 2)
        started = [commands.start(*command, *targets[name], source, folder / name / "x") for name in targets]
        return [running.wait() for running in started]

    for name, done in zip(targets, reshard_all(sound, tmp_path / "out"), strict=True):
        assert (done.code, done.err) == (0, "")
        assert dcptool.compare(sound, tmp_path / "out" / name / "x").equal
    for index in range(3):
        source = damage.copy(sound, tmp_path / f"flipped{index}")
        damage.flip_byte(source / f"__{index}_0.distcp", payload_of(source, "w", index))
        for done in reshard_all(source, tmp_path / f"refused{index}"):
            assert done.code == 3
            assert f"'w' at [{index * 134}, 0]: bytes were changed since they were saved" in done.err
            assert done.err.count("bytes were changed") == 1  # told once, not by each worker
    assert not list(tmp_path.glob("refused*/*/*"))
    assert not list(tmp_path.rglob(".dcptool-*"))


def test_a_shared_record_is_read_again_only_if_its_pieces_do_not_join(tmp_path, monkeypatch):
    """Every byte of the source is read once by rows; columns read it once for all their files."""
    whole = torch.randn(6000, 40)  # chunks too large to be read together with their headers
    source = save(tmp_path / "a", *({"w": Shard.of(whole, rank, 3)} for rank in range(3)))
    from dcptool.storage import LocalStorage

    read: list[int] = []
    original = LocalStorage.read_into

    def counted(self, name, byte_offset, out):
        if name.endswith(".distcp"):
            read.append(len(out))
        return original(self, name, byte_offset, out)

    monkeypatch.setattr(LocalStorage, "read_into", counted)
    for number, options in enumerate(({"world_size": 48}, {"mesh": "r=40", "placements": ("*=r:1",)})):
        read.clear()
        reshard_alone(source, tmp_path / f"out{number}", **options)
        payloads = sum(nbytes for nbytes in read if nbytes > 10_000)
        assert payloads == whole.nbytes
