"""Conversions, each against software that is not ours: torch's loaders and converters, safetensors, unzip."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import zipfile
from fnmatch import fnmatchcase

import numpy as np
import pytest

import dcptool
from dcptool.checkpoint import selection
from dcptool.checkpoint.selection import Renaming
from dcptool.errors import DcptoolError, ItemError, LayoutError, OutputExistsError, StorageError, UnsupportedError
from dcptool.ops.convert.convert import ConvertOptions, convert
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State
from dcptool.storage import LocalStorage
from tests import damage
from tests.conftest import FOREIGN, PARTS, WHOLE
from tests.conftest import run as cli
from tests.forks import run_ranks, values

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

from tests.ranks import save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STOCK_IS_WRONG = {"w_no_collectives"}  # it takes rank 0's metadata for all (FORMAT A4)


def digest(tensor) -> str:
    """SHA-256 of a tensor's values as the expected contents have it."""
    if not tensor.numel():
        return hashlib.sha256(b"").hexdigest()
    data = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def differences(theirs, ours, path=()) -> list:
    """Where two nested values differ; the order of dicts is looked at elsewhere."""
    if isinstance(theirs, torch.Tensor):
        same = (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape) and digest(theirs) == digest(ours)
        return [] if same else [path]
    if type(theirs) is not type(ours):
        return [(path, type(theirs), type(ours))]
    if isinstance(theirs, dict):
        if set(theirs) != set(ours):
            return [(path, set(theirs) ^ set(ours))]
        return [found for key in theirs for found in differences(theirs[key], ours[key], (*path, key))]
    if isinstance(theirs, list | tuple):
        if len(theirs) != len(ours):
            return [(path, len(theirs), len(ours))]
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, (*path, index))]
    return [] if theirs == ours or theirs != theirs else [(path, theirs, ours)]


def stock_convert(source, target) -> bool:
    """Convert with torch's own format_utils, if it can."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            dcp_to_torch_save(source, target)
    except BaseException:
        return False
    return True


def of_part(part, **options) -> ConvertOptions:
    """Where ranks saved values of their own, those of rank 0."""
    return ConvertOptions(rank=0 if part.name == "w_no_collectives" else None, **options)


@pytest.mark.parametrize("part", WHOLE, ids=lambda part: part.name)
def test_to_torch(part, tmp_path):
    target = tmp_path / "model.pt"
    done = convert(part.path, target, "torch", of_part(part, side_files=False))  # Lightning's names are another matter
    assert (done.n_tensors, done.n_objects) == tuple(
        sum(entry["kind"] == kind for entry in part.expected.values()) for kind in ("tensor", "object")
    )
    assert zipfile.ZipFile(target).testzip() is None
    ours = torch.load(target, weights_only=False)
    checkpoint = dcptool.open(part.path)
    for fqn, entry in checkpoint.tensors.items():
        value = ours
        for step in (fqn,) if entry.path is None else entry.path:  # () of a bare tensor
            value = value[step]
        assert digest(value) == part.expected[fqn]["sha256"], fqn
    if part.name in STOCK_IS_WRONG or not stock_convert(part.path, tmp_path / "stock.pt"):
        return
    theirs = torch.load(tmp_path / "stock.pt", weights_only=False)
    assert not differences(theirs, ours)
    try:
        torch.load(tmp_path / "stock.pt", weights_only=True)
    except Exception:
        return
    assert not differences(theirs, torch.load(target, weights_only=True))
    assert not differences(theirs, torch.load(target, weights_only=True, mmap=True))


def test_a_pt_file_nests_in_the_order_of_the_paths(tmp_path):
    convert(FOREIGN / "xver_t2130", tmp_path / "m.pt", "torch")
    checkpoint = dcptool.open(FOREIGN / "xver_t2130")
    assert list(torch.load(tmp_path / "m.pt", weights_only=False)) == list(
        dict.fromkeys(entry.path[0] for entry in checkpoint.values())
    )
    convert(FOREIGN / "xver_t2130", tmp_path / "flat.pt", "torch", ConvertOptions(nesting="flat"))
    assert list(torch.load(tmp_path / "flat.pt", weights_only=False)) == list(checkpoint)


@pytest.mark.parametrize("part", WHOLE, ids=lambda part: part.name)
def test_to_safetensors(part, tmp_path):
    from safetensors import safe_open

    checkpoint = dcptool.open(part.path)
    lacking = [fqn for fqn, entry in checkpoint.tensors.items() if entry.dtype in ("complex128", "complex32")]
    if lacking:
        with pytest.raises(UnsupportedError, match="safetensors cannot hold") as error:
            convert(part.path, tmp_path / "m.safetensors", "safetensors")
        assert repr(lacking[0]) in str(error.value)
        assert not list(tmp_path.iterdir())
    convert(part.path, tmp_path / "m.safetensors", "safetensors", of_part(part, exclude=tuple(lacking)))
    with safe_open(tmp_path / "m.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(checkpoint.tensors) - set(lacking)
        for fqn in opened.keys():  # noqa: SIM118
            assert digest(opened.get_tensor(fqn)) == part.expected[fqn]["sha256"], fqn


@pytest.mark.parametrize("part", WHOLE, ids=lambda part: part.name)
def test_to_dcp_and_back(part, tmp_path):
    target = tmp_path / "step_7"
    done = convert(part.path, target, "dcp", of_part(part))
    verdict = judge(target, dcptool.VerifyOptions(level=dcptool.Level.DEEP, require_marker=True))
    assert verdict.state is State.COMPLETE, verdict.findings
    assert (verdict.marker.writer, verdict.marker.step) == ("convert", 7)
    source, copy = dcptool.open(part.path), dcptool.open(target)
    assert list(copy) == list(source)
    paths = [(fqn,) if entry.path == () else entry.path for fqn, entry in source.items()]  # DCP names a bare tensor
    assert [entry.path for entry in copy.values()] == paths
    state = {fqn: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for fqn, entry in copy.tensors.items()}
    dcp.load(state, checkpoint_id=target, no_dist=True)
    for fqn, tensor in state.items():
        assert digest(tensor) == part.expected[fqn]["sha256"], fqn
        if source.format.name == "dcp":
            assert list(copy.tensors[fqn].chunks.boxes()) == list(source.tensors[fqn].chunks.boxes())
            assert [c.item.file for c in copy.tensors[fqn].chunks] == [c.item.file for c in source.tensors[fqn].chunks]
    for fqn in source.objects:
        with contextlib.suppress(DcptoolError):
            assert repr(copy.value(fqn)) == repr(source.value(fqn)), fqn
    assert done.nbytes_in == done.nbytes_out
    again = tmp_path / "again"
    convert(target, again, "dcp")
    for file in target.glob("*.distcp"):
        assert (again / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["megatron_tp2", "megatron_dp2_fpar"])
def test_g_megatron_through_a_pt_file_and_back(tmp_path, name):
    """Its sharded objects hold tensors, in lists of dicts, and stay objects."""
    source = FOREIGN / name / "iter_0000010"
    convert(source, tmp_path / "m.pt", "torch")
    convert(tmp_path / "m.pt", tmp_path / "back", "dcp")
    before, back = dcptool.open(source), dcptool.open(tmp_path / "back")
    assert any("rng_state" in fqn for fqn in before.objects)
    assert set(back.objects) == set(before.objects)
    assert set(back.tensors) == set(before.tensors)
    assert dcptool.compare(source, tmp_path / "back").equal
    assert not differences(torch.load(tmp_path / "m.pt", weights_only=False), loaded_by_torch(tmp_path / "back"))


def loaded_by_torch(folder) -> dict:
    assert stock_convert(folder, folder.parent / "stock_back.pt")
    return torch.load(folder.parent / "stock_back.pt", weights_only=False)


@pytest.mark.parametrize("part", [part for part in PARTS if part.damaged], ids=lambda part: part.name)
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_damaged_sources_are_refused(part, to, tmp_path):
    with pytest.raises(DcptoolError):
        convert(part.path, tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def state_of_all_dtypes():
    """One tensor of every dtype torch can save, with every bit pattern of the small ones, and edge values."""
    from dcptool.checkpoint.dtypes import BY_NAME

    state = {}
    for name in [name for name, kind in BY_NAME.items() if kind.numpy]:
        dtype = getattr(torch, name)
        state[name] = torch.arange(512, dtype=torch.int32).to(torch.uint8).view(dtype).reshape(-1)
    state["bf16.all"] = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    state["scalar"] = torch.tensor(1.5)
    state["empty"] = torch.empty(0, 3)
    state["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    state["channels_last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state["conj"] = torch.randn(4, dtype=torch.complex64).conj()
    state["sliced"] = torch.arange(100.0)[10:50:3]
    return state


def test_every_dtype_in_every_direction(tmp_path):
    state = state_of_all_dtypes()
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", "dcp")
    convert(tmp_path / "b", tmp_path / "c.pt", "torch")
    lacking = ("complex128", "complex32")
    convert(tmp_path / "c.pt", tmp_path / "d", "safetensors", ConvertOptions(exclude=lacking, max_shard_nbytes=20_000))
    convert(tmp_path / "d", tmp_path / "e", "dcp")
    convert(tmp_path / "e", tmp_path / "f.pt", "torch")
    assert not differences(state, torch.load(tmp_path / "c.pt"))
    kept = {name: tensor for name, tensor in state.items() if name not in lacking}
    assert not differences(kept, torch.load(tmp_path / "f.pt"))
    index = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in kept.values())
    assert set(index["weight_map"]) == set(kept)


@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_casts_round_as_torch_does(tmp_path, stored, to):
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if stored == "float32":
        values = (bits * 65537 + 12345).view(torch.float32)
    else:
        values = bits.to(torch.int16).view(getattr(torch, stored))
    torch.save({"w": values, "ids": torch.arange(7), "flags": torch.ones(3, dtype=torch.bool)}, tmp_path / "a.pt")
    options = ConvertOptions(renaming=Renaming(dtype=to))
    done = convert(tmp_path / "a.pt", tmp_path / "b.safetensors", "safetensors", options)
    assert done.n_cast == (stored != to)
    from safetensors.torch import load_file

    ours = load_file(tmp_path / "b.safetensors")
    theirs = values.to(getattr(torch, to))
    finite = ~torch.isnan(theirs)
    assert torch.equal(ours["w"][finite], theirs[finite])
    assert torch.equal(torch.isnan(ours["w"]), ~finite)
    assert ours["ids"].dtype == torch.int64
    assert ours["flags"].dtype == torch.bool


class TestNames:
    @pytest.fixture
    def source(self, tmp_path):
        state = {"app": {"model": {"module.w": torch.ones(2), "module.b": torch.zeros(2)}, "optim": {"lr": 0.1}}}
        torch.save(state, tmp_path / "a.pt")
        return tmp_path / "a.pt"

    def names(self, source, tmp_path, to="torch", **options):
        target = tmp_path / f"out.{'pt' if to == 'torch' else to}"
        renaming = {key: options.pop(key) for key in list(options) if key in Renaming._fields}
        convert(source, target, to, ConvertOptions(renaming=Renaming(**renaming), overwrite=True, **options))
        return torch.load(target, weights_only=False)

    def test_strip_add_rename_clean(self, source, tmp_path):
        keys = ("app.model.*",)
        stripped = self.names(source, tmp_path, keys=keys, strip_prefix="app.model.")
        assert list(stripped) == ["module.w", "module.b"]
        clean = self.names(source, tmp_path, keys=keys, strip_prefix="app.model.", clean_names=True)
        assert list(clean) == ["w", "b"]
        added = self.names(source, tmp_path, keys=keys, strip_prefix="app.model.", add_prefix="net.")
        assert list(added["net"]) == ["module.w", "module.b"]
        renamed = self.names(source, tmp_path, keys=keys, strip_prefix="app.model.", rename=(("module.w", "weight"),))
        assert list(renamed) == ["weight", "module.b"]

    def test_collisions_and_nothing(self, source, tmp_path):
        with pytest.raises(LayoutError, match="would both be named 'x'"):
            self.names(source, tmp_path, rename=(("app.model.module.w", "x"), ("app.model.module.b", "x")))
        with pytest.raises(LayoutError, match=r"no entry matches 'nope'; names begin with 'app' \(16 bytes\)"):
            self.names(source, tmp_path, keys=("nope",))
        with pytest.raises(LayoutError, match="leaves nothing"):
            self.names(source, tmp_path, exclude=("*",))
        with pytest.raises(LayoutError, match="no selected entry has this name"):
            self.names(source, tmp_path, rename=(("typo", "x"),))

    def test_r38_keys_that_collide_as_text(self, tmp_path):
        torch.save({"c": {0: torch.ones(1), "0": torch.zeros(1)}}, tmp_path / "a.pt")
        with pytest.raises(LayoutError, match="once keys are text"):
            convert(tmp_path / "a.pt", tmp_path / "d", "dcp")


def save_of_a_class(_, folder):
    """In a process of its own: the class is to be gone here."""
    sys.path.insert(0, str(folder))
    import gone

    torch.save({"o": gone.C()}, folder / "a.pt")


def load_of_a_class(_, folder):
    sys.path.insert(0, str(folder))
    return torch.load(folder / "b.pt", weights_only=False)["o"].x


class TestFromPt:
    def test_as_torch_converts_it(self, tmp_path):
        from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

        state = {
            "model": {"w": torch.randn(5, 3), "layers": [torch.ones(2), {"b": torch.zeros(3, dtype=torch.int64)}]},
            "step": 7,
            "betas": (0.9, 0.95),
            "names": ["a", "b"],
            "nothing": None,
            "empty": {},
            "tuple": (torch.arange(3), 1),
        }
        torch.save(state, tmp_path / "a.pt")
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "stock")
        convert(tmp_path / "a.pt", tmp_path / "ours", "dcp")
        stock, ours = dcptool.open(tmp_path / "stock"), dcptool.open(tmp_path / "ours")
        assert set(ours) == set(stock)
        assert {fqn: entry.path for fqn, entry in ours.items()} == {fqn: entry.path for fqn, entry in stock.items()}
        for fqn, entry in stock.tensors.items():
            assert np.array_equal(ours.read(fqn), stock.read(fqn))
            assert ours[fqn].shape == entry.shape
        for fqn in stock.objects:
            assert repr(ours.value(fqn)) == repr(stock.value(fqn))
        assert stock_convert(tmp_path / "ours", tmp_path / "back.pt")
        assert stock_convert(tmp_path / "stock", tmp_path / "theirs.pt")
        back, theirs = (torch.load(tmp_path / name, weights_only=False) for name in ("back.pt", "theirs.pt"))
        assert not differences(theirs, back)

    def test_objects_keep_what_they_share(self, tmp_path):
        shared = torch.arange(4.0)
        torch.save({"o": (shared, shared, [1, {2}])}, tmp_path / "a.pt")
        convert(tmp_path / "a.pt", tmp_path / "d", "dcp")
        convert(tmp_path / "d", tmp_path / "b.pt", "torch")
        first, second, rest = torch.load(tmp_path / "b.pt", weights_only=False)["o"]
        assert first.data_ptr() == second.data_ptr()
        assert torch.equal(first, shared)
        assert rest == [1, {2}]

    def test_classes_are_carried_not_imported(self, tmp_path):
        (tmp_path / "gone.py").write_text("class C:\n    def __init__(self): self.x = [1, 2]\n")
        values(run_ranks(0, save_of_a_class, tmp_path))
        convert(tmp_path / "a.pt", tmp_path / "d", "dcp")
        convert(tmp_path / "d", tmp_path / "b.pt", "torch")
        assert "gone" not in sys.modules
        assert values(run_ranks(0, load_of_a_class, tmp_path)) == [[1, 2]]


class TestSafety:
    def test_leaving_out_many_is_no_more_work_per_entry(self, tmp_path, monkeypatch):
        """A lost file may hold a part of every tensor; names are then looked up, not matched one against the other."""
        states = [{f"{rank}.{index}": torch.ones(1) for index in range(60)} for rank in range(2)]
        source = save(tmp_path / "source", *states)
        (source / "__1_0.distcp").unlink()
        matched = []

        def counted(name, pattern):
            matched.append(pattern)
            return fnmatchcase(name, pattern)

        monkeypatch.setattr(selection, "fnmatchcase", counted)
        options = ConvertOptions(keys=("*",), exclude=("0.7*",), skip_corrupt=True)
        convert(source, tmp_path / "out.safetensors", "safetensors", options)
        assert set(dcptool.open(tmp_path / "out.safetensors")) == {name for name in states[0] if name[:3] != "0.7"}
        assert set(matched) == {"*", "0.7*"}

    @pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
    def test_any_flipped_bit_of_a_payload_is_refused(self, tmp_path, to):
        folder = damage.copy(FOREIGN / "w_async", tmp_path / "c")
        checkpoint = dcptool.open(folder)
        for fqn, entry in checkpoint.tensors.items():
            for chunk in entry.chunks:
                record = checkpoint.payload(entry, chunk).record
                if not record.nbytes:
                    continue
                at = chunk.item.byte_offset + record.byte_offset + record.nbytes // 2
                damage.flip_byte(folder / chunk.item.file, at, 0x10)
                with pytest.raises(ItemError, match="bytes were changed") as error:
                    convert(folder, tmp_path / "out", to)
                assert repr(fqn) in str(error.value)
                assert chunk.item.file in str(error.value)
                damage.flip_byte(folder / chunk.item.file, at, 0x10)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]

    @pytest.mark.parametrize("to", ["safetensors", "dcp"])
    def test_a_record_that_many_tensors_share_is_read_and_checked_once(self, tmp_path, monkeypatch, to):
        """Views of one storage are one record of a `.pt` file: checked from what all of them read."""
        whole = torch.arange(40_000, dtype=torch.float32).reshape(20, 2000)
        torch.save({f"row{index}": whole[index] for index in range(20)}, tmp_path / "a.pt")
        read_into, read = LocalStorage.read_into, []

        def counted(self, name, byte_offset, out):
            read.append(len(out))
            read_into(self, name, byte_offset, out)

        monkeypatch.setattr(LocalStorage, "read_into", counted)
        convert(tmp_path / "a.pt", tmp_path / "out", to)
        assert whole.nbytes <= sum(read) < 1.5 * whole.nbytes
        entry = dcptool.open(tmp_path / "a.pt").tensors["row7"]
        payload = dcptool.open(tmp_path / "a.pt").payload(entry, entry.chunks[0])
        damage.flip_byte(tmp_path / "a.pt", payload.record.item.byte_offset + payload.record.byte_offset + 8000 * 7)
        with pytest.raises(ItemError, match="bytes were changed") as error:
            convert(tmp_path / "a.pt", tmp_path / "other", to)
        assert all(repr(f"row{index}") in str(error.value) for index in range(19))
        assert not (tmp_path / "other").exists()

    @pytest.mark.parametrize(("name", "n_unproven"), [("w_nocrc", 8), ("w_safetensors", 7), ("w_zstd", 0)])
    def test_what_has_no_checksums_is_copied_and_said(self, tmp_path, name, n_unproven):
        for to, target in (("torch", "out.pt"), ("dcp", "out")):
            notes = dcptool.convert(FOREIGN / name, tmp_path / target, to).notes
            told = [note for note in notes if "without checksums" in note]
            assert [note.partition(" tensors")[0] for note in told] == [f"all {n_unproven}"] * bool(n_unproven)

    def test_files_beside_it_that_are_not_copied_are_named(self, tmp_path):
        source = FOREIGN / "megatron_tp2" / "iter_0000010"
        notes = dcptool.convert(source, tmp_path / "out.pt", "torch", dry_run=True).notes
        assert [note for note in notes if note.startswith("not carried") and "common.pt (Megatron" in note]
        notes = dcptool.convert(FOREIGN / "w_async", tmp_path / "out", "dcp", dry_run=True).notes
        assert not [note for note in notes if note.startswith("not carried")]

    def test_skip_corrupt_leaves_out_and_says_so(self, tmp_path):
        folder = damage.copy(FOREIGN / "w_async", tmp_path / "c")
        checkpoint = dcptool.open(folder)
        entry = checkpoint.tensors["model.proj.weight"]
        chunk = entry.chunks[1]
        record = checkpoint.payload(entry, chunk).record
        damage.flip_byte(folder / chunk.item.file, chunk.item.byte_offset + record.byte_offset)
        done = cli("convert", "--to", "safetensors", "--skip-corrupt", folder, tmp_path / "m.safetensors")
        assert done.returncode == 1
        assert "model.proj.weight" in done.stderr
        written = dcptool.open(tmp_path / "m.safetensors")
        assert set(written) == set(checkpoint.tensors) - {"model.proj.weight"}

    @pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
    def test_check_compares_before_it_is_published(self, tmp_path, to, monkeypatch):
        for name in ("xver_t2130", "w_safetensors", "dtypes_keys_t2130"):
            exclude = ("c32", "*complex*", "*c128*", "*c32*") if to == "safetensors" else ()
            with contextlib.suppress(UnsupportedError):
                convert(FOREIGN / name, tmp_path / f"{name}.out", to, ConvertOptions(check=True, exclude=exclude))
        import dcptool.ops.convert.member as module

        def change(checkpoint, groups, storage, *rest, **more):
            report = copy(checkpoint, groups, storage, *rest, **more)
            for file in (file for group in groups for file in group):
                path = storage._path(file.name)
                data = bytearray(open(path, "rb").read())  # noqa: SIM115
                at = data.find(np.full(4, 1.0, np.float32).tobytes())
                if at >= 0:
                    data[at] ^= 1
                    open(path, "wb").write(data)  # noqa: SIM115
            return report

        copy = module.copy
        monkeypatch.setattr(module, "copy", change)
        torch.save({"w": torch.ones(64)}, tmp_path / "a.pt")
        with pytest.raises(ItemError, match="differs from the source in 1 entries, the first 'w'"):
            convert(tmp_path / "a.pt", tmp_path / "bad", to, ConvertOptions(check=True))
        assert not (tmp_path / "bad").exists()

    def test_existing_output(self, tmp_path):
        (tmp_path / "m.pt").write_text("precious")
        with pytest.raises(OutputExistsError, match="--overwrite"):
            convert(FOREIGN / "w_async", tmp_path / "m.pt", "torch")
        assert (tmp_path / "m.pt").read_text() == "precious"
        with pytest.raises(OutputExistsError, match=r"no file of torch\.save: not replaced"):
            convert(FOREIGN / "w_async", tmp_path / "m.pt", "torch", ConvertOptions(overwrite=True))
        assert (tmp_path / "m.pt").read_text() == "precious"
        torch.save({"old": 1}, tmp_path / "m.pt")
        convert(FOREIGN / "w_async", tmp_path / "m.pt", "torch", ConvertOptions(overwrite=True))
        assert torch.load(tmp_path / "m.pt", weights_only=False)["step"] is not None
        (tmp_path / "d").mkdir()
        convert(FOREIGN / "w_async", tmp_path / "d", "dcp")
        with pytest.raises(OutputExistsError):
            convert(FOREIGN / "w_async", tmp_path / "d", "dcp")
        (tmp_path / "d" / "__7_0.distcp").write_bytes(b"left by a wider save")
        convert(FOREIGN / "w_threads3", tmp_path / "d", "dcp", ConvertOptions(overwrite=True))
        assert not (tmp_path / "d" / "__7_0.distcp").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "m.pt"]
        with pytest.raises(OutputExistsError, match="is a folder"):
            convert(FOREIGN / "w_async", tmp_path / "d", "torch", ConvertOptions(overwrite=True))

    @pytest.mark.parametrize("where", ["itself", "inside", "around"])
    def test_the_source_is_no_target(self, tmp_path, where):
        folder = damage.copy(FOREIGN / "w_async", tmp_path / "run" / "c")
        target = {"itself": folder, "inside": folder / "new", "around": tmp_path / "run"}[where]
        before = sorted(path.name for path in folder.iterdir())
        with pytest.raises(UnsupportedError, match="choose another place"):
            convert(folder, target, "dcp", ConvertOptions(overwrite=True))
        assert sorted(path.name for path in folder.iterdir()) == before

    def test_no_space_and_no_way(self, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: usage)
            with pytest.raises(StorageError, match="100 bytes free"):
                convert(FOREIGN / "w_async", tmp_path / "m.pt", "torch")
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError):
            convert(FOREIGN / "w_async", tmp_path / "file" / "m.pt", "torch")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]

    def test_a_dry_run_writes_nothing(self, tmp_path):
        done = cli("convert", "--to", "dcp", "--dry-run", FOREIGN / "w_async", tmp_path / "d")
        assert done.returncode == 0
        assert "would be" in done.stdout
        assert not list(tmp_path.iterdir())


def test_the_command(tmp_path):
    done = cli("convert", "--to", "torch", FOREIGN / "w_async", tmp_path / "m.pt")
    assert done.returncode == 0
    assert done.stdout.startswith("8 tensors, 3 objects, 6.96 kB in, 6.96 kB out, ")
    assert cli("convert", "--to", "onnx", FOREIGN / "w_async", tmp_path / "x").returncode == 2
    assert cli("convert", "--to", "torch", tmp_path / "gone", tmp_path / "x").returncode == 3
    done = cli("convert", "--to", "safetensors", "--json", FOREIGN / "w_async", tmp_path / "hf")
    document = json.loads(done.stdout)
    assert (document["n_tensors"], document["published"]) == (8, True)
    assert document["skipped"] == ["step", "cfg.lr", "cfg.name"]
    kept = cli("convert", "--to", "safetensors", "--objects", "keep", FOREIGN / "w_async", tmp_path / "hf2")
    assert kept.returncode == 0, kept.stderr
    assert set(json.loads((tmp_path / "hf2" / "objects.json").read_text())) == {"step", "cfg.lr", "cfg.name"}
    assert cli("convert", "--to", "torch", "--objects", "error", FOREIGN / "w_async", tmp_path / "y").returncode == 3


def test_from_and_to_an_object_store(s3_url, tmp_path):
    import fsspec

    filesystem, base = fsspec.url_to_fs(s3_url)
    filesystem.put(str(FOREIGN / "w_async"), f"{base}/step_1", recursive=True)
    convert(f"{s3_url}/step_1", tmp_path / "m.pt", "torch")
    assert torch.load(tmp_path / "m.pt", weights_only=False)["zeros"].shape == (40, 40)
    convert(tmp_path / "m.pt", f"{s3_url}/step_2", "dcp")
    assert judge(f"{s3_url}/step_2", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).state is State.COMPLETE
    convert(f"{s3_url}/step_2", f"{s3_url}/m.safetensors", "safetensors")
    assert set(dcptool.open(f"{s3_url}/m.safetensors")) == set(dcptool.open(FOREIGN / "w_async").tensors)
    for overwrite in (False, True):  # what is there could not be kept until the new one is complete
        with pytest.raises(OutputExistsError):
            convert(f"{s3_url}/step_1", f"{s3_url}/step_2", "dcp", ConvertOptions(overwrite=overwrite))
    assert judge(f"{s3_url}/step_2").state is State.COMPLETE


@pytest.mark.parametrize(("to", "name"), [("safetensors", "m.safetensors"), ("torch", "m.pt"), ("dcp", "d")])
def test_a_damaged_source_leaves_nothing_in_an_object_store(s3_url, tmp_path, to, name):
    folder = damage.copy(FOREIGN / "w_async", tmp_path / "c")
    checkpoint = dcptool.open(folder)
    chunk = checkpoint.tensors["zeros"].chunks[0]
    record = checkpoint.payload(checkpoint.tensors["zeros"], chunk).record
    damage.flip_byte(folder / chunk.item.file, chunk.item.byte_offset + record.byte_offset)
    with pytest.raises(ItemError, match="bytes were changed"):
        convert(folder, f"{s3_url}/{name}", to)
    with pytest.raises(DcptoolError):
        dcptool.open(f"{s3_url}/{name}")
    import fsspec

    filesystem, base = fsspec.url_to_fs(s3_url)
    assert not filesystem.exists(f"{base}/{name}")


class TestEngineTorch:
    def test_it_is_the_same(self, tmp_path):
        for to, name in (("torch", "a.pt"), ("safetensors", "a.safetensors")):
            done = cli("convert", "--to", to, "--engine", "torch", "--trust", FOREIGN / "w_async", tmp_path / name)
            assert done.returncode == 0, done.stderr
            convert(FOREIGN / "w_async", tmp_path / f"ours.{name}", to)
        theirs, ours = (torch.load(tmp_path / name, weights_only=False) for name in ("a.pt", "ours.a.pt"))
        assert not differences(theirs, ours)
        from safetensors.torch import load_file

        assert not differences(load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "ours.a.safetensors"))
        done = cli("convert", "--to", "dcp", "--engine", "torch", "--trust", tmp_path / "a.pt", tmp_path / "d")
        assert done.returncode == 0, done.stderr
        assert set(dcptool.open(tmp_path / "d")) == set(dcptool.open(FOREIGN / "w_async"))

    def test_it_asks_for_trust_and_names_what_it_cannot(self, tmp_path):
        command = ("convert", "--engine", "torch")
        done = cli(*command, "--to", "torch", FOREIGN / "w_async", tmp_path / "a.pt")
        assert done.returncode == 3
        assert "executes the pickles" in done.stderr
        done = cli(*command, "--trust", "--to", "torch", FOREIGN / "w_safetensors", tmp_path / "a.pt")
        assert done.returncode == 3
        assert "torch cannot convert it" in done.stderr
        done = cli(*command, "--trust", "--to", "dcp", FOREIGN / "w_async", tmp_path / "d")
        assert done.returncode == 2
        assert "not dcp to dcp; --engine stream" in done.stderr
        done = cli(*command, "--trust", "--keys", "x", "--to", "torch", FOREIGN / "w_async", tmp_path / "a.pt")
        assert done.returncode == 2
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_records_beyond_four_gigabytes(tmp_path):
    """zip64, of a tensor of zeros that takes no memory to make; torch reads it by mmap."""
    source = tmp_path / "a.safetensors"
    nbytes = (4 << 30) + 17
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with source.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
        file.seek(-1, os.SEEK_END)
        file.write(b"\7")
    convert(source, tmp_path / "b.pt", "torch")
    loaded = torch.load(tmp_path / "b.pt", mmap=True)["w"]
    assert loaded.shape == (nbytes,)
    assert (int(loaded[-1]), int(loaded[0])) == (7, 0)
    assert zipfile.ZipFile(tmp_path / "b.pt").testzip() is None
    convert(tmp_path / "b.pt", tmp_path / "c", "dcp")
    assert dcptool.open(tmp_path / "c").read("w", (nbytes - 2,), (2,)).tolist() == [0, 7]
