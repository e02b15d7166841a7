"""Cases of people who convert checkpoints; docs/cases.md says which tests elsewhere show the others."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import textwrap

import pytest

import dcptool
from dcptool.checkpoint.selection import Renaming
from dcptool.errors import DcptoolError, ItemError, UnsafePickleError
from dcptool.ops.convert.convert import ConvertOptions, convert
from tests import damage
from tests.conftest import FOREIGN, ROOT, run

torch = pytest.importorskip("torch")

from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_r08_only_the_wanted_bytes_are_read(tmp_path, monkeypatch):
    state = {
        "app": {
            "model": {"w": torch.randn(64, 64), "b": torch.randn(64)},
            "optim": {"state": {"w": torch.randn(256, 1024)}, "lr": 0.1},
        }
    }
    source = save(tmp_path / "c", state)
    nbytes = 0
    real_pread, real_preadv = os.pread, os.preadv

    def pread(*arguments):
        nonlocal nbytes
        data = real_pread(*arguments)
        nbytes += len(data)
        return data

    def preadv(*arguments):
        nonlocal nbytes
        count = real_preadv(*arguments)
        nbytes += count
        return count

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)
    options = ConvertOptions(keys=("app.model.*",), renaming=Renaming(strip_prefix="app.model."))
    convert(source, tmp_path / "m.safetensors", "safetensors", options)
    assert nbytes < 200_000 < 1_000_000  # the moments alone have a megabyte
    assert set(dcptool.open(tmp_path / "m.safetensors")) == {"w", "b"}


def test_r09_shards_and_an_index_that_is_right(tmp_path):
    """A bf16 weight, a tied head, an integer buffer, a scalar, and what is no tensor: shards for transformers."""
    from safetensors import safe_open

    weight = torch.randn(40, 50).to(torch.bfloat16)
    tensors = {"w": weight, "lm_head": weight, "ids": torch.arange(600), "scale": torch.tensor(2.0)}
    save(tmp_path / "a", {"model": tensors, "n": 7})
    options = ConvertOptions(max_shard_nbytes=5_000)
    done = convert(tmp_path / "a", tmp_path / "hf", "safetensors", options)
    assert done.skipped == ("n",)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"]) == {f"model.{name}" for name in tensors}
    assert len(set(index["weight_map"].values())) == 3
    for fqn, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert torch.equal(opened.get_tensor(fqn), tensors[fqn.removeprefix("model.")])
    with pytest.raises(DcptoolError, match="is there already"):
        convert(tmp_path / "a", tmp_path / "hf", "safetensors", options)


def test_r11_nothing_done_is_an_error_and_what_is_done_is_counted(tmp_path):
    missing = run("convert", "--to", "torch", tmp_path / "nowhere", tmp_path / "m.pt")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "no such file or directory" in missing.stderr
    assert not (tmp_path / "m.pt").exists()
    done = run("convert", "--to", "torch", FOREIGN / "xver_t2130", tmp_path / "m.pt")
    assert done.returncode == 0
    assert re.match(r"19 tensors, 82 objects, 5\.25 kB in, .* out, .*: .*m\.pt\n", done.stdout)


def test_r15_extra_state_is_carried_or_named(tmp_path):
    state = {"m.l.w": torch.ones(3), "m.l._extra_state/shard_0_1": {"scale": [1.0, 2.0]}}
    source = save(tmp_path / "c", state)
    done = convert(source, tmp_path / "m.safetensors", "safetensors")
    assert any("_extra_state" in name for name in done.skipped)
    convert(source, tmp_path / "m.pt", "torch")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    assert "scale" in repr(loaded)


def test_r16_a_conversion_executes_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    source = save(tmp_path / "c", {"w": torch.ones(2), "evil": Evil()})
    for to, name in (("torch", "a.pt"), ("dcp", "d")):
        with pytest.raises(UnsafePickleError, match=r"'evil' calls or names posix\.mkdir"):
            convert(source, tmp_path / name, to)
        assert not (tmp_path / name).exists()
    convert(source, tmp_path / "s.safetensors", "safetensors")  # which takes no objects
    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "a.pt")
    with pytest.raises(ItemError, match="runs code when it is loaded, nothing was written"):
        convert(tmp_path / "a.pt", tmp_path / "e", "dcp")
    assert not (tmp_path / "executed").exists()


def test_r23_tied_weights_are_both_written(tmp_path):
    weight = torch.randn(5, 4)
    source = save(tmp_path / "c", {"embed.weight": weight, "lm_head.weight": weight, "other": weight + 1e-3})
    convert(source, tmp_path / "m.safetensors", "safetensors")
    written = dcptool.open(tmp_path / "m.safetensors")
    assert written.read("embed.weight").tobytes() == written.read("lm_head.weight").tobytes()
    assert written.read("other").tobytes() != written.read("embed.weight").tobytes()


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_r25_a_hole_is_refused_never_filled(tmp_path, to):
    source = save(tmp_path / "c", {"w": torch.arange(8.0), "v": torch.ones(2)})

    def widen(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size((12,))

    damage.edit_metadata(source, widen)
    with pytest.raises(DcptoolError, match=r"'w': no chunk holds 4 of its 12 elements"):
        convert(source, tmp_path / "out", to)
    convert(source, tmp_path / "out", to, ConvertOptions(keys=("v",)))
    assert list(dcptool.open(tmp_path / "out")) == ["v"]


def test_r26_rank_local_saves_become_ordinary_ones(tmp_path):
    convert(FOREIGN / "w_no_collectives", tmp_path / "d", "dcp", ConvertOptions(rank=0))
    assert (tmp_path / "d" / ".metadata").exists()
    assert not list((tmp_path / "d").glob("__*.metadata"))


def test_r27_rows_that_some_ranks_lack(tmp_path):
    whole = {"six": torch.randn(6, 2), "one": torch.randn(1, 3), "none": torch.empty(0, 3)}
    states = [{name: Shard.of(tensor, rank, 4) for name, tensor in whole.items()} for rank in range(4)]
    source = save(tmp_path / "c", *states)
    convert(source, tmp_path / "m.pt", "torch")
    loaded = torch.load(tmp_path / "m.pt")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())


def test_r39_a_pt_file_with_a_prefix_added(tmp_path):
    torch.save({"w": torch.ones(2), "pair": (torch.zeros(1), 2)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "d", "dcp", ConvertOptions(renaming=Renaming(add_prefix="model.")))
    assert {fqn: entry.path for fqn, entry in dcptool.open(tmp_path / "d").items()} == {
        "model.w": ("model", "w"),
        "model.pair": ("model", "pair"),
    }


def test_r40_memory_does_not_grow_with_the_tensor(tmp_path):
    """One tensor of 600 MB; the process may have 200 MiB and what it is without any."""
    nbytes = 600_000_000
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    script = textwrap.dedent(
        """
        import re, sys
        from dcptool.ops.convert.convert import convert
        convert(sys.argv[1], sys.argv[2], "torch")
        status = open("/proc/self/status").read()  # ru_maxrss would count the process that started this one
        print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.safetensors"), str(tmp_path / "b.pt")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) * 1024 < 200 << 20
    assert (tmp_path / "b.pt").stat().st_size > nbytes


def test_r53_boxes_decide_never_values(tmp_path):
    states = [
        {"norm": Shard.of(torch.ones(8), rank, 4), "same": torch.ones(2), "scalar": torch.tensor(1.0)}
        for rank in range(4)
    ]
    convert(save(tmp_path / "c", *states), tmp_path / "m.pt", "torch")
    loaded = torch.load(tmp_path / "m.pt")
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {"norm": (8,), "same": (2,), "scalar": ()}


def test_r54_rows_in_another_order_than_files(tmp_path):
    """Four boxes of a 2×2 mesh, whose order in the metadata is not that of the rows."""
    convert(FOREIGN / "mesh2d_fsdp_tp", tmp_path / "m.pt", "torch")
    source = dcptool.open(FOREIGN / "mesh2d_fsdp_tp")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    chunks = source.tensors["model.w1.weight"].chunks
    assert [chunk.offsets[0] for chunk in chunks] != sorted(chunk.offsets[0] for chunk in chunks)
    assert torch.equal(loaded["model"]["w1.weight"], source.read_torch("model.w1.weight"))


def test_r62_transforms_known_and_unknown(tmp_path):
    source = damage.copy(FOREIGN / "w_zstd", tmp_path / "c")
    convert(source, tmp_path / "m.pt", "torch")
    data = (source / ".metadata").read_bytes()
    assert data.count(b"stream.zstd")
    (source / ".metadata").write_bytes(data.replace(b"stream.zstd", b"stream.what"))
    with pytest.raises(DcptoolError, match=r"stream\.what"):
        convert(source, tmp_path / "n.pt", "torch")
    assert not (tmp_path / "n.pt").exists()


def test_one_bad_item_names_all_that_is_bad(tmp_path):
    """The closest rival stops at the first."""
    source = damage.copy(FOREIGN / "w_async", tmp_path / "c")
    checkpoint = dcptool.open(source)
    for fqn in ("model.embed.weight", "zeros"):
        chunk = checkpoint.tensors[fqn].chunks[0]
        record = checkpoint.payload(checkpoint.tensors[fqn], chunk).record
        damage.flip_byte(source / chunk.item.file, chunk.item.byte_offset + record.byte_offset)
    with pytest.raises(ItemError) as error:
        convert(source, tmp_path / "m.pt", "torch")
    assert set(re.findall(r"'(model\.embed\.weight|zeros)'", str(error.value))) == {"model.embed.weight", "zeros"}


def test_metadata_is_what_a_real_save_writes(tmp_path):
    """Our `.metadata` unpickles into torch's own classes, with equal fields but for places; a save has ids, too."""
    convert(FOREIGN / "w_async", tmp_path / "d", "dcp")
    ours = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    theirs = pickle.loads((FOREIGN / "w_async" / ".metadata").read_bytes())
    assert [*ours.state_dict_metadata] == [*theirs.state_dict_metadata]
    for fqn, entry in theirs.state_dict_metadata.items():
        mine = vars(ours.state_dict_metadata[fqn])
        fields = {name: value for name, value in vars(entry).items() if name != "properties"}
        assert {name: value for name, value in mine.items() if name != "properties"} == fields
        if "properties" in mine:  # of the class that torch 2.2 has
            assert vars(mine["properties"]) == vars(entry.properties)
    assert ours.storage_meta is None
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    places = [{(i.fqn, i.offset): p.relative_path for i, p in m.storage_data.items()} for m in (ours, theirs)]
    assert places[0] == places[1]
