"""What docs/guarantees.md promises where no other test holds it."""

from __future__ import annotations

import os
import re
import tracemalloc

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save_file

import dcptool
from dcptool.checkpoint.selection import Renaming
from dcptool.errors import ItemError, LayoutError
from dcptool.formats.dcp.items import undo_transforms
from dcptool.ops.convert.convert import ConvertOptions, convert
from dcptool.storage import remote
from tests import damage
from tests.conftest import FOREIGN

ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What may do something to a terminal, or to the order of what it shows."""
HOSTILE = "\x9b31m\u202e\x07\x1b]0;x\x07\n"
"""click takes the commonest escape codes out where there is no terminal; these it leaves."""


@pytest.fixture(scope="module")
def strided(tmp_path_factory):
    """Three `.pt` files of 48 MiB of values: as they lie, transposed, every other column."""
    import torch

    folder = tmp_path_factory.mktemp("strided")
    whole = torch.arange(24 << 20, dtype=torch.float32).reshape(4096, -1)
    for name, tensor in {"plain": whole[:2048], "transposed": whole[:2048].t(), "columns": whole[:, ::2]}.items():
        torch.save({"w": tensor.clone() if name == "plain" else tensor}, folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("plain", None), ("plain", "float64"), ("plain", "bfloat16"), ("transposed", None), ("columns", None)],
)
def test_a_copy_needs_no_more_memory_than_its_plan_says(strided, tmp_path, layout, dtype, threads):
    options = ConvertOptions(threads=threads, renaming=Renaming(dtype=dtype))
    convert(FOREIGN / "w_nodist", tmp_path / "first.safetensors", "safetensors")  # imports count for nothing
    tracemalloc.start()
    try:
        done = convert(strided / f"{layout}.pt", tmp_path / "m.safetensors", "safetensors", options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.nbytes_in > done.memory_nbytes // 2
    assert peak < done.memory_nbytes + (2 << 20)


@pytest.mark.torchfree
def test_an_index_comes_last_in_an_object_store(monkeypatch):
    order = []
    real = remote.RemoteSink.finish

    def finish(sink):
        real(sink)
        order.append(sink._opened.path.rpartition("/")[2])

    monkeypatch.setattr(remote.RemoteSink, "finish", finish)
    convert(FOREIGN / "w_async", "memory://guarantees/hf", "safetensors", ConvertOptions(max_shard_nbytes=500))
    assert len(order) > 3
    assert order[-1] == "model.safetensors.index.json"
    order.clear()
    convert(FOREIGN / "w_async", "memory://guarantees/dcp", "dcp")
    assert order[-2:] == [".metadata", "_COMPLETE"]


@pytest.mark.torchfree
def test_a_frame_that_grows_without_end_is_refused(tmp_path):
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    assert len(bomb) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(ItemError, match="more than the 67,108,864 bytes it may have"):
            undo_transforms(bomb, ("stream.zstd/1",), 64 << 20)
        assert tracemalloc.get_traced_memory()[1] < 72 << 20
    finally:
        tracemalloc.stop()


def test_such_a_frame_in_a_checkpoint_is_named(tmp_path):
    path = damage.copy(FOREIGN / "w_zstd", tmp_path / "c")
    item = dcptool.open(path).tensors["model.embed.weight"].chunks[0].item
    bomb = zstandard.ZstdCompressor().compress(bytes(80 << 20))
    (path / "__9_0.distcp").write_bytes(bomb)

    def move(metadata):
        for info in metadata.storage_data.values():
            if (info.relative_path, info.offset) == (item.file, item.byte_offset):
                info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(bomb)

    damage.edit_metadata(path, move)
    with pytest.raises(ItemError, match=r"__9_0\.distcp.*'model\.embed\.weight'.*more than the 67,108,864 bytes"):
        dcptool.open(path).read("model.embed.weight")


def test_lists_are_not_filled_up_without_end(tmp_path):
    path = damage.copy(FOREIGN / "w_nodist", tmp_path / "c")

    def far_away(metadata):
        metadata.planner_data = {fqn: (fqn, (1 << 23) - 1) for fqn in metadata.planner_data}

    damage.edit_metadata(path, far_away)
    assert len(dcptool.open(path)) > 3
    tracemalloc.start()
    try:
        with pytest.raises(LayoutError, match="--nesting flat keeps flat names"):
            convert(path, tmp_path / "m.pt", "torch")
        assert tracemalloc.get_traced_memory()[1] < 300 << 20  # 8 bytes a place, and no more than 2 × 2**24 of them
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "m.pt").exists()


def test_a_tensor_in_an_object_is_checked_before_it_is_shown(tmp_path):
    import torch

    torch.save({"pair": (torch.arange(5.0), 1)}, tmp_path / "o.pt")
    convert(tmp_path / "o.pt", tmp_path / "o", "dcp")
    assert str(dcptool.open(tmp_path / "o").value("pair")) == "(tensor([0.0, 1.0, 2.0, 3.0, 4.0], dtype=float32), 1)"
    for file in (tmp_path / "o.pt", tmp_path / "o" / "__0_0.distcp"):
        damage.flip_byte(file, file.read_bytes().index(np.arange(5, dtype=np.float32).tobytes()) + 5)
    for path in (tmp_path / "o.pt", tmp_path / "o"):
        with pytest.raises(ItemError, match="bytes were changed"):
            dcptool.open(path).value("pair")


def test_what_torch_wrote_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    from dcptool.ops.convert.torch_engine import convert_with_torch

    events = []
    real_sync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def replace(source, target):
        events.append(("replace", os.path.basename(source)))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    convert_with_torch(str(FOREIGN / "w_async"), str(tmp_path / "m.pt"), "torch", trust=True)
    [renamed] = [event[1] for event in events if isinstance(event, tuple)]
    assert events.index(renamed) < events.index(("replace", renamed))


class Told:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_reader_executes_objects_as_torch_does_and_nothing_else(tmp_path, capsys):
    import torch
    import torch.distributed.checkpoint as dcp

    from dcptool.training import Reader

    dcp.save({"w": torch.ones(3), "object": Told()}, checkpoint_id=tmp_path / "c", no_dist=True)
    capsys.readouterr()
    dcp.load({"w": torch.zeros(3)}, storage_reader=Reader(tmp_path / "c"), no_dist=True)
    assert "executed" not in capsys.readouterr().out
    dcp.load({"object": None}, storage_reader=Reader(tmp_path / "c"), no_dist=True)
    assert "executed" in capsys.readouterr().out


@pytest.mark.torchfree
def test_links_are_followed_when_read_and_never_written_through(tmp_path):
    path = damage.copy(FOREIGN / "w_nodist", tmp_path / "c")
    outside = (path / "__0_0.distcp").rename(tmp_path / "outside")
    (path / "__0_0.distcp").symlink_to(outside)
    before = outside.read_bytes()
    assert dcptool.verify(path, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
    convert(path, tmp_path / "d", "dcp")
    assert not (tmp_path / "d" / "__0_0.distcp").is_symlink()
    (tmp_path / "e").symlink_to(path)
    convert(FOREIGN / "w_async", tmp_path / "e", "dcp", ConvertOptions(overwrite=True))
    assert not (tmp_path / "e").is_symlink()
    assert (path / "__0_0.distcp").is_symlink()
    assert outside.read_bytes() == before


@pytest.fixture
def hostile(tmp_path):
    """A run of two steps whose entries, files, markers and pointers have names that act on a terminal."""
    names = {f"a{HOSTILE}": (4, 4), f"m.{HOSTILE}": (3,), f"optimizer.{HOSTILE}.exp_avg": (2,)}
    save_file({name: np.ones(shape, np.float32) for name, shape in names.items()}, tmp_path / "m.safetensors")
    run = tmp_path / "run"
    run.mkdir()
    for step in ("step_1", "step_2"):
        convert(tmp_path / "m.safetensors", run / step, "dcp")
    data = (run / "step_2" / "__0_0.distcp").read_bytes()
    damage.flip_byte(run / "step_2" / "__0_0.distcp", data.index(np.ones(4, np.float32).tobytes()))
    (run / "step_2" / "_COMPLETE").unlink()
    (run / "step_2" / f"__9_0{HOSTILE.strip()}.distcp").write_bytes(b"x")
    (run / "latest").write_text(f"step_9{HOSTILE}")
    (run / "step_1" / "_COMPLETE").write_text('{"schema": 1, "writer": "\\u009b"}')
    return run


def test_names_reach_no_terminal_by_any_command(hostile, commands, tmp_path):
    one, two, out = hostile / "step_1", hostile / "step_2", tmp_path / "out"
    for arguments, code in {
        ("inspect", hostile): 1,
        ("inspect", "--chunks", one): 0,
        ("inspect", "--by-file", two): 0,
        ("inspect", "--stats", two): 1,
        ("inspect", "--values", two): 0,
        ("inspect", "--json", two): 0,
        ("inspect", "--keys", "none", two): 3,
        ("verify", hostile): 1,
        ("verify", "--deep", two): 1,
        ("verify", "--deep", "--json", two): 1,
        ("verify", "--load", two): 0,
        ("latest", hostile): 0,
        ("mark", "--checksums", two): 3,
        ("prune", "--keep", 1, "--dry-run", hostile): 0,
        ("convert", "--to", "torch", two, out): 3,
        ("convert", "--to", "torch", "--skip-corrupt", two, out): 1,
        ("convert", "--to", "dcp", "--rename", f"m.{HOSTILE}=a{HOSTILE}", one, f"{out}2"): 3,
        ("reshard", "--world-size", 2, two, f"{out}3"): 3,
        ("reshard", "--mesh", "d=2", "--placement", "*=d:7", one, f"{out}4"): 3,
        ("copy", two, f"{out}5"): 3,
        ("copy", hostile, f"{out}6"): 1,
        ("rescue", one, "--like", two): 3,
        ("diff", one, two): 1,
        ("diff", "--json", one, two): 1,
        ("diff", one, FOREIGN / "w_async"): 1,
        ("report", "--deep", two, "-o", f"{out}.html"): 1,
        ("interval", hostile, "--mtbf", "3h", "--save", "4s"): 0,
    }.items():
        done = commands.run(*arguments)
        text = done.out + done.err
        assert not ACTING.search(text), (arguments, text)
        assert done.code == code, (arguments, text)
