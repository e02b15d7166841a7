"""Tensors made of tensors: torchao's weights and optimizer states, torch's quantised tensors, in DCP and `.pt` files.

The truth is what the software that made them found in the live tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
import zlib

import pytest

import dcptool
from dcptool.checkpoint.selection import Renaming
from dcptool.checks.check import Level
from dcptool.ops.convert.convert import ConvertOptions
from dcptool.ops.reshard.plan import ReshardOptions
from dcptool.ops.verify.verdict import State
from dcptool.pickles import inert
from dcptool.pickles.emit import emit
from dcptool.pickles.standins import Global, Node
from dcptool.pickles.wrapped import wrapped
from tests.conftest import MADE_OF_TENSORS, OLD, foreign_tensors, part, run
from tests.damage import flip_byte

CHECKED = [found for found in MADE_OF_TENSORS if not found.name.startswith("legacy")]
"""Those stored with checksums."""
WHOLE = [found for found in MADE_OF_TENSORS if not found.name.endswith("_w2")]
DCP = [found for found in WHOLE if found.path.is_dir()]
NAMES = {"q_per_channel_scales": "scales", "q_per_channel_zero_points": "zero_points"}
PIECES = part("ao_optim_dcp_w2")


def by_name(found):
    return found.name


def inner_of(found):
    """fqn of each inner tensor → what its producer says of it."""
    return {
        f"{fqn}.{NAMES.get(name, name)}": inner
        for fqn in sorted(foreign_tensors(found))
        for name, inner in found.expected[fqn]["inner"].items()
        if name != "dequantize"  # what torch makes of it
    }


def sha256(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def require_inner(checkpoint, found):
    inner = inner_of(found)
    assert inner
    for fqn, expected in inner.items():
        entry = checkpoint.flat.tensors[fqn]
        assert (f"torch.{entry.dtype}", list(entry.shape)) == (expected["dtype"], expected["shape"]), fqn
        assert sha256(checkpoint.read(fqn)) == expected["sha256"], fqn


def require_plain(checkpoint, found):
    plain = {fqn: entry for fqn, entry in found.expected.items() if "inner" not in entry and entry["kind"] == "tensor"}
    for fqn, expected in plain.items():
        assert sha256(checkpoint.read(fqn)) == expected["sha256"], fqn


def verdict(path, level=Level.METADATA, **options):
    (only,) = dcptool.verify(path, dcptool.VerifyOptions(level=level), **options).verdicts
    return only


@pytest.mark.parametrize("found", WHOLE, ids=by_name)
def test_every_inner_tensor_is_found(found):
    checkpoint = dcptool.open(found.path)
    assert set(checkpoint) == set(found.expected)
    assert set(checkpoint.subclasses) == foreign_tensors(found)
    for fqn, subclass in checkpoint.subclasses.items():
        expected = found.expected[fqn]
        assert (f"torch.{subclass.piece.dtype}", list(subclass.piece.shape)) == (expected["dtype"], expected["shape"])
        if expected["class"].startswith("torchao"):
            assert subclass.piece.kind == f"a {expected['class']}"
    assert set(checkpoint.flat.tensors) - set(checkpoint.tensors) == set(inner_of(found))
    require_inner(checkpoint, found)
    require_plain(checkpoint, found)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("found", MADE_OF_TENSORS, ids=by_name)
def test_they_are_proven(found, level):
    judged = verdict(found.path, level)
    assert judged.state is State.COMPLETE
    assert [finding.kind for finding in judged.findings] == ["not-verifiable"] * (level > 1 and found not in CHECKED)
    if level:
        assert judged.tally.n_unread == 0
        assert judged.tally.n_unverifiable == (found not in CHECKED)


@pytest.mark.parametrize("found", CHECKED, ids=by_name)
def test_a_flipped_bit_in_any_inner_tensor_is_found(found, tmp_path):
    checkpoint = dcptool.open(found.path)
    subclass = checkpoint.subclasses[sorted(foreign_tensors(found))[0]]
    for inner in subclass.inner:
        copied = tmp_path / inner.inner
        shutil.copytree(found.path, copied) if found.path.is_dir() else shutil.copy(found.path, copied)
        chunk = inner.chunks[0]
        record = checkpoint.payload(inner, chunk).record
        file = copied / chunk.item.file if copied.is_dir() else copied
        flip_byte(file, chunk.item.byte_offset + record.byte_offset + record.nbytes // 2)
        judged = verdict(copied, Level.DEEP)
        assert judged.state is State.DAMAGED
        assert "wrong-crc" in {finding.kind for finding in judged.findings}


@pytest.mark.parametrize("found", MADE_OF_TENSORS, ids=by_name)
def test_inspect_shows_class_and_inner_tensors(found):
    done = run("inspect", "--json", "--values", "--stats", found.path)
    assert done.returncode == 0
    tensors = {tensor["fqn"]: tensor for tensor in json.loads(done.stdout)["checkpoints"][0]["tensors"]}
    for fqn in foreign_tensors(found):
        inside = [tensor for tensor in tensors.values() if tensor.get("inside") == fqn]
        assert {tensor["fqn"].removeprefix(f"{fqn}.") for tensor in inside} == {
            NAMES.get(name, name) for name in found.expected[fqn]["inner"] if name != "dequantize"
        }
        assert tensors[fqn]["nbytes"] == sum(tensor["nbytes"] for tensor in inside)
        assert tensors[fqn]["class"]
        assert "stats" not in tensors[fqn]
        assert all(tensor["stats"]["n_values"] for tensor in inside)
    text = run("inspect", "--keys", sorted(foreign_tensors(found))[0], found.path).stdout
    assert sorted(inner_of(found))[0].rpartition(".")[0] in text


@pytest.mark.parametrize("to", ["dcp", "torch"])
@pytest.mark.parametrize("found", WHOLE, ids=by_name)
def test_carried_whole(found, to, tmp_path):
    path = tmp_path / ("out.pt" if to == "torch" else "out")
    dcptool.convert(found.path, path, to, ConvertOptions(check=True))
    written = dcptool.open(path)
    require_inner(written, found)
    require_plain(written, found)
    before = dcptool.open(found.path).subclasses
    assert {fqn: subclass.piece for fqn, subclass in written.subclasses.items()} == {
        fqn: subclass.piece for fqn, subclass in before.items()
    }
    assert verdict(path, Level.DEEP).state is State.COMPLETE
    assert dcptool.compare(found.path, path).equal


@pytest.mark.parametrize("found", [found for found in WHOLE if found in CHECKED], ids=by_name)
def test_safetensors_take_what_is_inside(found, tmp_path):
    path = tmp_path / "out.safetensors"
    done = run("convert", "--to", "safetensors", found.path, path)
    assert done.returncode == 3
    assert "made of other tensors, such as" in done.stderr
    assert "--flatten-subclasses writes what is inside them" in done.stderr
    assert not list(tmp_path.iterdir())
    exclude = [] if found.name != "quantized_dcp_w1" else ["--exclude", "q.per_tensor*"]
    done = run("convert", "--to", "safetensors", "--check", "--flatten-subclasses", *exclude, found.path, path)
    assert done.returncode == 0, done.stderr
    written = dcptool.open(path)
    for fqn, expected in inner_of(found).items():
        if not exclude or "per_tensor" not in fqn:
            assert sha256(written.read(fqn)) == expected["sha256"]


def test_one_scale_that_is_no_tensor_is_not_lost(tmp_path):
    found = part("quantized_dcp_w1")
    done = run("convert", "--to", "safetensors", "--flatten-subclasses", found.path, tmp_path / "out.safetensors")
    assert done.returncode == 3
    assert "its integers alone would be written" in done.stderr
    assert not list(tmp_path.iterdir())


def test_scales_are_never_cast(tmp_path):
    found = part("ao_weights_dcp_w1")
    options = ConvertOptions(keys=("model.int8.*",), flatten_subclasses=True, renaming=Renaming(dtype="float16"))
    dcptool.convert(found.path, tmp_path / "out.safetensors", "safetensors", options)
    written = dcptool.open(tmp_path / "out.safetensors")
    assert written.tensors["model.int8.0.bias"].dtype == "float16"
    assert written.tensors["model.int8.0.weight.scale"].dtype == "float32"


def test_pieces_of_ranks_are_joined():
    checkpoint = dcptool.open(PIECES.path)
    assert set(checkpoint.subclasses) == foreign_tensors(PIECES)
    for fqn, subclass in checkpoint.subclasses.items():
        expected = PIECES.expected[fqn]
        for rank, pieces in enumerate(expected["pieces"]):
            for inner in subclass.inner:
                piece = pieces[inner.inner]
                offsets, sizes = inner.chunks.box(min(rank, len(inner.chunks) - 1))
                assert list(sizes) == piece["shape"]
                assert sha256(checkpoint.read(inner.fqn, offsets, sizes)) == piece["sha256"]
    require_plain(checkpoint, PIECES)


@pytest.mark.parametrize("n_ranks", [1, 4])
def test_resharded_where_blocks_allow(n_ranks, tmp_path):
    pytest.importorskip("torch")
    dcptool.reshard(PIECES.path, tmp_path / "out", ReshardOptions(world_size=n_ranks, workers=1, check=True))
    assert dcptool.compare(PIECES.path, tmp_path / "out").equal
    assert verdict(tmp_path / "out", Level.DEEP).state is State.COMPLETE
    written = dcptool.open(tmp_path / "out")
    for fqn, subclass in written.subclasses.items():
        assert len(subclass.entry.chunks) == n_ranks
        assert subclass.piece.attributes.keys() == dcptool.open(PIECES.path).subclasses[fqn].piece.attributes.keys()
    dcptool.reshard(tmp_path / "out", tmp_path / "back", ReshardOptions(world_size=2, workers=1))
    assert dcptool.compare(PIECES.path, tmp_path / "back").equal
    back = dcptool.open(tmp_path / "back").subclasses
    assert {fqn: one.piece for fqn, one in back.items()} == {
        fqn: one.piece for fqn, one in dcptool.open(PIECES.path).subclasses.items()
    }


def test_rows_of_scales_follow_any_cut(tmp_path):
    pytest.importorskip("torch")
    found = part("ao_weights_dcp_w1")
    dcptool.reshard(found.path, tmp_path / "out", ReshardOptions(world_size=3, workers=1, check=True))
    require_inner(dcptool.open(tmp_path / "out"), found)
    dcptool.convert(tmp_path / "out", tmp_path / "out.pt", "torch", ConvertOptions(check=True))
    written = dcptool.open(tmp_path / "out.pt")
    require_inner(written, found)
    before = dcptool.open(found.path).subclasses
    assert {f: one.piece for f, one in written.subclasses.items()} == {f: one.piece for f, one in before.items()}


def test_one_scale_goes_to_all_and_scales_of_blocks_to_theirs(tmp_path):
    pytest.importorskip("torch")
    found = part("ao_scales_dcp_w1")
    dcptool.reshard(found.path, tmp_path / "out", ReshardOptions(world_size=2, workers=1, check=True))
    written = dcptool.open(tmp_path / "out")
    require_inner(written, found)
    one, blocks = written.subclasses["one_scale"], written.subclasses["blocks"]
    assert [len(inner.chunks) + len(inner.replicas) for inner in (*one.inner, *blocks.inner)] == [2, 2, 2, 2]
    assert one.piece.attributes["block_size"] == [32, 32]
    assert blocks.piece.attributes["block_size"] == [128, 128]
    dcptool.convert(tmp_path / "out", tmp_path / "back.pt", "torch", ConvertOptions(check=True))
    before, after = dcptool.open(found.path).subclasses, dcptool.open(tmp_path / "back.pt").subclasses
    assert {fqn: made.piece for fqn, made in after.items()} == {fqn: made.piece for fqn, made in before.items()}


def test_pieces_with_scales_of_their_own_are_not_joined_where_that_cannot_be(tmp_path):
    torch = pytest.importorskip("torch")
    found = part("ao_scales_dcp_w1")
    dcptool.reshard(found.path, tmp_path / "s", ReshardOptions(world_size=3, workers=1, keys=("one_scale",)))
    checkpoint = dcptool.open(tmp_path / "s")
    scale = checkpoint.subclasses["one_scale"].inner[1]
    place = scale.replicas[0].item
    record = checkpoint.source.payload(scale, scale.replicas[0], place).record
    path = tmp_path / "s" / place.file
    data = bytearray(path.read_bytes())
    start, item = (
        place.byte_offset + record.byte_offset,
        bytes(data[place.byte_offset : place.byte_offset + place.nbytes]),
    )
    data[start : start + 4] = torch.tensor([7.0]).numpy().tobytes()
    changed = zlib.crc32(data[start : start + 4])
    data = bytes(data).replace(zlib.crc32(item[record.byte_offset : record.byte_offset + 4]).to_bytes(4, "little"),
                               changed.to_bytes(4, "little"))  # fmt: skip
    path.write_bytes(data)
    (tmp_path / "s" / "_COMPLETE").unlink()
    assert verdict(tmp_path / "s", Level.DEEP).state is State.COMPLETE
    made = dcptool.open(tmp_path / "s").subclasses["one_scale"]
    assert (made.inner, made.problem.endswith("each piece has another scale")) == ((), True)
    dcptool.convert(tmp_path / "s", tmp_path / "same", "dcp")  # in its own boxes
    assert (tmp_path / "same" / path.name).stat().st_size == len(data)
    refused = (
        ["convert", "--to", "torch"],
        ["convert", "--to", "safetensors", "--flatten-subclasses"],
        ["convert", "--to", "dcp", "--dequantize", "bfloat16"],
        ["reshard", "--world-size", "2"],
    )
    for command in refused:
        done = run(*command, tmp_path / "s", tmp_path / ("o.pt" if "torch" in command else "o"))
        assert done.returncode == 3, done.stderr
        assert "Traceback" not in done.stderr
        assert "one_scale" in done.stderr or "nothing that --dequantize knows" in done.stderr


def test_a_cut_through_a_block_is_refused(tmp_path):
    pytest.importorskip("torch")
    done = run("reshard", "--world-size", "3", part("ao_optim_dcp_w1").path, tmp_path / "out")
    assert done.returncode == 3
    assert "exp_avg' is a torchao.optim.subclass_8bit.OptimState8bit: the box at [0, 0] sizes [43, 64]" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("found", DCP, ids=by_name)
def test_a_run_of_such_steps(found, tmp_path):
    folder = tmp_path / "run"
    for name in ("step_10", "step_20", "step_30"):
        shutil.copytree(found.path, folder / name)
    for file in folder.rglob("*"):
        os.utime(file, (OLD, OLD))
    assert run("latest", "--deep", folder).stdout.strip().endswith("step_30")
    done = run("mark", "--checksums", folder / "step_30")
    assert done.returncode == 0, done.stderr
    assert run("verify", "--deep", folder / "step_30").returncode == 0
    done = run("prune", folder, "--keep", "1", "--include-incomplete", "--older-than", "1s", "--yes")
    assert done.returncode == 0, done.stderr
    assert "step_30" in {path.name for path in folder.iterdir()}


def test_a_report_shows_them(tmp_path):
    done = run("report", part("ao_weights_dcp_w1").path, "-o", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert "model.int8.0.weight.qdata" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_scale_that_is_nan_is_told(to, tmp_path):
    nan = b"\x00\x00\xc0\x7f"
    changed = rewritten(
        part("ao_weights_pt/model.pt").path, tmp_path / "m.pt", storages={"1": lambda data: nan + data[4:]}
    )
    path = tmp_path / ("o.pt" if to == "torch" else "o")
    dcptool.convert(changed, path, to)
    done = run("verify", "--finite", path)
    assert done.returncode == 1
    assert "'model.int8.0.weight.scale' (1 NaN" in done.stdout


def test_diff_sees_a_scale_that_differs(tmp_path):
    found = part("ao_weights_pt/model.pt")
    changed = rewritten(found.path, tmp_path / "changed.pt", storages={"1": lambda data: data[:-1] + b"\x40"})
    report = dcptool.compare(found.path, changed)
    assert [difference.fqn_a for difference in report.differences] == ["model.int8.0.weight.scale"]


def rewritten(source, target, graph=lambda root: None, storages=None, without=()):
    """A `.pt` file with a changed pickle, or changed storages, and right checksums."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data, key = old.read(name), name.rpartition("/")[2]
            if name.endswith("data.pkl"):
                root = inert.load(data)
                graph(root)
                data = emit(root, 2)
            elif storages and key in storages:
                data = storages[key](data)
            if key not in without or "/data/" not in name:
                new.writestr(name, data)
    return target


def first_subclass(root):
    """The first node in a `.pt` that is made of tensors, and its state."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Node) and wrapped(value):
            return value
        if isinstance(value, Node):
            waiting += [item for _, item in value.items or ()]
        elif isinstance(value, dict):
            waiting += value.values()
    raise AssertionError


def with_shape(node, shape):
    node.args = (*node.args[:2], shape, (shape[1], 1), *node.args[4:])


LIES = {
    "an inner tensor larger than its storage": lambda node: with_shape(node.args[3]["qdata"], (1 << 40, 64)),
    "an inner tensor of another shape": lambda node: with_shape(node.args[3]["qdata"], (16, 64)),
    "scales of fewer rows": lambda node: with_shape(node.args[3]["scale"], (3, 1)),
    "an outer shape without end": lambda node: setattr(
        node, "args", (*node.args[:2], (*node.args[2][:2], (1 << 62, 1 << 62), *node.args[2][3:]), node.args[3])
    ),
    "a block of no length": lambda node: node.args[3].update(block_size=[0, 0]),
    "no block": lambda node: node.args[3].pop("block_size"),
    "a negative size": lambda node: with_shape(node.args[3]["qdata"], (-1, 64)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_shapes_are_found(lie, tmp_path):
    changed = rewritten(
        part("ao_weights_pt/model.pt").path, tmp_path / "m.pt", lambda root: LIES[lie](first_subclass(root))
    )
    judged = verdict(changed, Level.DEEP)
    assert judged.state is not State.COMPLETE
    done = run("convert", "--to", "dcp", changed, tmp_path / "out")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_storage_that_is_not_there(tmp_path):
    changed = rewritten(part("ao_weights_pt/model.pt").path, tmp_path / "m.pt", without=("1",))
    assert verdict(changed, Level.RECORDS).state is State.DAMAGED
    assert run("convert", "--to", "torch", changed, tmp_path / "out.pt").returncode == 3


def test_a_call_among_attributes_is_told_and_never_made(tmp_path):
    def call_in(root):
        first_subclass(root).args[3]["mm_config"] = Node(Global("posix", "system"), ("touch hit",), True)

    changed = rewritten(part("ao_weights_pt/model.pt").path, tmp_path / "m.pt", call_in)
    judged = verdict(changed, Level.DEEP)
    assert "unsafe-pickle" in {finding.kind for finding in judged.findings}
    assert judged.state is not State.COMPLETE
    assert run("convert", "--to", "dcp", changed, tmp_path / "out", cwd=tmp_path).returncode == 3
    assert not (tmp_path / "hit").exists()


def test_a_call_in_an_item_of_dcp(tmp_path):
    found = part("ao_weights_dcp_w1")
    shutil.copytree(found.path, tmp_path / "s")
    pytest.importorskip("torch")
    metadata = pickle.loads((tmp_path / "s" / ".metadata").read_bytes())
    index = next(i for i in metadata.storage_data if i.fqn == "model.int8.0.weight")
    place = metadata.storage_data[index]
    data = (tmp_path / "s" / place.relative_path).read_bytes()
    item = io.BytesIO(data[place.offset : place.offset + place.length])
    (tmp_path / "item").write_bytes(item.getvalue())

    def call_in(root):
        root.args[3]["reduce_range"] = Node(Global("posix", "system"), ("touch hit",), True)

    changed = rewritten(tmp_path / "item", tmp_path / "changed", call_in).read_bytes()
    (tmp_path / "s" / "__1_0.distcp").write_bytes(changed)
    place.relative_path, place.offset, place.length = "__1_0.distcp", 0, len(changed)
    (tmp_path / "s" / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    judged = verdict(tmp_path / "s", Level.RECORDS)
    assert judged.state is not State.COMPLETE
    assert "unsafe-pickle" in {finding.kind for finding in judged.findings}
    for command in (["convert", "--to", "dcp"], ["convert", "--to", "torch"], ["reshard", "--world-size", "2"]):
        done = run(*command, tmp_path / "s", tmp_path / ("out.pt" if "torch" in command else "out"))
        assert done.returncode == 3, done.stderr
        assert "runs code" in done.stderr
