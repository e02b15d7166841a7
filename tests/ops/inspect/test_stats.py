"""inspect --stats and tensor_stats: every number is what torch computes in float64, whatever dtype, layout and size."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dcptool
from dcptool.checkpoint import numbers
from dcptool.checkpoint.kinds import Severity
from dcptool.copying import reading
from dcptool.ops.inspect import measuring, stats
from dcptool.ops.inspect.moments import Moments, measure
from tests import damage
from tests.conftest import FOREIGN, WHOLE, part, run

try:
    import torch

    from tests import ranks
except ImportError:  # then only what is marked torchfree runs
    torch = ranks = None

FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def expected(tensor):
    """What torch says: counts, then min, max, mean, std and norm in float64, of finite values."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        packed = tensor.view(torch.uint8).reshape(-1)
        wide = torch.tensor(FLOAT4, dtype=torch.float64)[torch.stack([packed & 15, packed >> 4]).long()].reshape(-1)
    elif tensor.dtype.is_complex:
        wide = tensor.to(torch.complex128)
        wide = torch.where(torch.isnan(wide.real) | torch.isnan(wide.imag), math.nan, wide.abs()).reshape(-1)
    else:
        wide = tensor.double().reshape(-1)
    finite = wide[torch.isfinite(wide)]
    counts = len(wide), int(wide.isnan().sum()), int(wide.isinf().sum()), int((wide == 0).sum())
    if not len(finite):
        return (*counts, None, None, None, None, 0.0)
    unit = 2.0**600 if finite.abs().max() > 1e300 else 1.0  # torch's own sums overflow
    parts = finite / unit
    std = parts.std().item() * unit if len(finite) > 1 else None
    return (
        *counts,
        finite.min().item(),
        finite.max().item(),
        parts.mean().item() * unit,
        std,
        parts.norm().item() * unit,
    )


def same(found, wanted):
    got = (found.n_values, found.n_nan, found.n_inf, found.n_zero, found.min, found.max, found.mean, found.std)
    got = (*got, found.norm)
    assert not found.problem
    assert got[:4] == wanted[:4]
    if isinstance(found.min, float) and found.measured != stats.MAGNITUDES:  # these round in the last bit
        assert (found.min, found.max) == wanted[4:6]
    scale = max(abs(wanted[4] or 0), abs(wanted[5] or 0))
    for one, other in zip(got[4:], wanted[4:], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one == other or math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-14 * scale)


@pytest.mark.parametrize("found", WHOLE, ids=lambda found: found.name)
def test_every_foreign_tensor_has_the_statistics_torch_computes(found):
    ckpt = dcptool.open(found.path)
    report = dcptool.tensor_stats(ckpt)
    assert report.good
    assert [tensor.fqn for tensor in report.tensors] == list(ckpt.tensors)
    assert report.nbytes == sum(entry.nbytes for entry in ckpt.tensors.values())
    for tensor in report.tensors:
        same(tensor, expected(ckpt.read_torch(tensor.fqn)))


FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
INTS = "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
COMPLEX = "complex128 complex64 complex32"


def edge_values(dtype):
    """All bit patterns of one byte, else NaN, infinities, both zeros, subnormals, the largest and ordinary values."""
    if dtype.itemsize == 1 and dtype is not torch.bool:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype is torch.bool:
        return torch.tensor([True, False, True, True, False])
    if not dtype.is_floating_point and not dtype.is_complex:
        limits = torch.iinfo(dtype)
        values = [limits.min, limits.max, 0, 1, limits.max - 1, 77]
        return torch.tensor(values, dtype=torch.int64 if limits.max < 1 << 63 else dtype).to(dtype)
    if dtype.is_complex:
        real = edge_values({16: torch.float64, 8: torch.float32, 4: torch.float16}[dtype.itemsize])
        pairs = torch.cartesian_prod(real[:-2], real[:-2])  # the largest of float64 has no magnitude float64 holds
        return torch.view_as_complex(pairs.contiguous())
    limits = torch.finfo(dtype)
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, limits.tiny, limits.smallest_normal / 4, -1.5, 3.0, 0.1]
    return torch.tensor([*values, limits.max, limits.min], dtype=torch.float64).to(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", [*FLOATS.split(), *INTS.split(), *COMPLEX.split(), "float4_e2m1fn_x2"])
def test_edge_values_of_every_dtype_over_four_ranks(tmp_path, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch has no such dtype")
    values = edge_values(dtype)
    data = values.view(torch.uint8).reshape(-1, dtype.itemsize)  # torch cannot flip all of them
    whole = torch.stack([data, data.flip(0), data]).reshape(-1).view(dtype).reshape(3, -1)
    states = [{"sharded": ranks.Shard.of(whole, rank, 4), "one": values[-1].clone()} for rank in range(4)]
    found = {tensor.fqn: tensor for tensor in dcptool.tensor_stats(ranks.save(tmp_path / "c", *states)).tensors}
    same(found["sharded"], expected(whole))
    same(found["one"], expected(values[-1]))
    measured = {"c": "magnitudes", "f": "values"}[name[0]] if name[0] in "cf" else "values"
    assert found["sharded"].measured == ("unpacked" if name.startswith("float4") else measured)
    if name in INTS:
        assert (found["sharded"].min, found["sharded"].max) == (min(values.tolist()), max(values.tolist()))


def test_integers_are_exact_beyond_what_float64_holds(tmp_path):
    path = ranks.save(tmp_path / "c", {"w": torch.tensor([(1 << 63) - 1, (1 << 63) - 3, -(1 << 63)])})
    (found,) = dcptool.tensor_stats(path).tensors
    assert (found.min, found.max) == (-(1 << 63), (1 << 63) - 1)


def test_squares_that_overflow_or_vanish(tmp_path):
    huge, tiny = torch.full((5,), 3e30), torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    wide = torch.tensor([3e300, -4e300], dtype=torch.float64)
    path = ranks.save(
        tmp_path / "c", {"huge": huge, "tiny": tiny, "wide": wide, "mixed": torch.cat([tiny, wide, tiny])}
    )
    found = {tensor.fqn: tensor for tensor in dcptool.tensor_stats(path).tensors}
    assert found["huge"].norm == pytest.approx(math.sqrt(5) * 3e30, rel=1e-6)
    assert found["huge"].std == 0
    assert found["tiny"].norm == pytest.approx(5e-200, rel=1e-12, abs=0)
    assert found["tiny"].std == pytest.approx(math.sqrt(0.5) * 1e-200, rel=1e-12, abs=0)
    assert found["wide"].norm == found["mixed"].norm == pytest.approx(5e300, rel=1e-12)
    assert found["wide"].mean == pytest.approx(-0.5e300, rel=1e-12)


def test_a_large_mean_does_not_eat_the_spread(tmp_path):
    values = 1e8 + torch.arange(1000, dtype=torch.float64) % 2
    (found,) = dcptool.tensor_stats(ranks.save(tmp_path / "c", {"w": values})).tensors
    assert found.std == pytest.approx(0.5002501876563868, rel=1e-12)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_larger_than_a_band_in_any_cut(tmp_path, monkeypatch, dim, threads):
    monkeypatch.setattr(measuring, "BAND_NBYTES", 264)
    monkeypatch.setattr(numbers, "SLICE", 10)
    whole = torch.randn(37, 29, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole[3, 4], whole[30, 2] = math.nan, -math.inf
    states = [{"w": ranks.Shard.of(whole, rank, 3, dim), "t": whole.t()} for rank in range(3)]
    report = dcptool.tensor_stats(ranks.save(tmp_path / "c", *states), threads=threads)
    for tensor in report.tensors:
        same(tensor, expected(whole))
    assert report.nbytes == 2 * whole.numel() * 2


def test_the_number_of_threads_changes_no_bit(tmp_path):
    path = ranks.save(tmp_path / "c", {"w": torch.randn(3, 1 << 20), "v": torch.randn(100)})
    one, four = (dcptool.tensor_stats(path, threads=threads).tensors for threads in (1, 4))
    assert one == four


@example([[0.0, *[2.2250738585e-313] * 3]])
@example([[2.2250738585e-313] * 2])
@example([[5e-324], [5e-324, 1e-323]])
@given(st.lists(st.lists(st.floats(width=64, allow_nan=True, allow_infinity=True), max_size=6), max_size=6))
@settings(max_examples=300)
def test_pieces_merge_to_the_whole(pieces):
    merged = Moments()
    for piece in pieces:
        merged = merged.plus(measure(np.array(piece, "<f8"), "float64"))
    values = [value for piece in pieces for value in piece]
    finite = [value for value in values if math.isfinite(value)]
    assert (merged.n_finite, merged.n_nan) == (len(finite), sum(map(math.isnan, values)))
    assert merged.n_inf == sum(map(math.isinf, values))
    assert merged.n_zero == finite.count(0.0)
    assert (merged.low, merged.high) == (min(finite, default=None), max(finite, default=None))
    if not finite:
        assert merged.average is None
        return
    top = max(map(abs, finite)) or 1.0
    rounding = max(1e-12, 4 * math.ulp(top) / top)  # a subnormal number has few digits
    parts = [value / top for value in finite]
    mean = math.fsum(parts) / len(parts)
    assert merged.average / top == pytest.approx(mean, rel=rounding, abs=max(1e-14, rounding / 100))
    norm = math.sqrt(math.fsum(part * part for part in parts))
    assert merged.norm / top == pytest.approx(norm, rel=rounding) or merged.norm == math.inf
    if len(finite) > 1:
        spread = math.sqrt(math.fsum((part - mean) ** 2 for part in parts) / (len(parts) - 1))
        near = pytest.approx(spread, rel=max(1e-9, rounding), abs=max(1e-14, rounding))
        assert merged.deviation / top == near or merged.deviation == math.inf


def test_keys_and_exclude_select():
    path = FOREIGN / "xver_t2130"
    report = dcptool.tensor_stats(path, "model.*", ("*.bias", "model.ema"))
    names = [tensor.fqn for tensor in report.tensors]
    assert names
    assert all(name.startswith("model.") and not name.endswith(("bias", "ema")) for name in names)
    with pytest.raises(dcptool.errors.LayoutError, match="no entry matches"):
        dcptool.tensor_stats(path, "nothing.*")


# What is pointed out.


def kinds(report):
    return {finding.kind: finding for finding in report.findings}


def test_what_no_trained_model_has_is_pointed_out(tmp_path):
    state = {
        "full": torch.full((4,), math.nan),
        "part": torch.tensor([1.0, math.inf, 2.0]),
        "zero": torch.zeros(3, 2),
        "ones": torch.ones(5),
        "fine": torch.randn(5),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(0.0),
        "optim.state.w.exp_avg_sq": torch.zeros(4),
        "optim.state.v.exp_avg_sq": torch.rand(4),
    }
    report = dcptool.tensor_stats(ranks.save(tmp_path / "c", state))
    found = kinds(report)
    assert report.good
    assert set(found) == {"not-finite", "all-zero", "constant", "never-updated"}
    assert found["not-finite"].severity is Severity.WARNING
    assert "2 tensors hold NaN or infinities, such as 'full' (4 NaN of 4 values)" in found["not-finite"].message
    assert found["all-zero"].message == "'zero' holds zeros only"
    assert found["constant"].message == "'ones' holds one value only (1 everywhere)"
    assert found["never-updated"].fqn == "optim.state.w.exp_avg_sq"


def test_a_damaged_tensor_is_named_and_the_rest_goes_on(tmp_path):
    folder = damage.copy(FOREIGN / "xver_t2130", tmp_path / "c")
    ckpt = dcptool.open(folder)
    chunk = ckpt["model.emb.weight"].chunks[2]
    record = ckpt.payload(ckpt["model.emb.weight"], chunk).record
    damage.flip_byte(folder / record.item.file, record.item.byte_offset + record.byte_offset + 5)
    report = dcptool.tensor_stats(folder)
    assert not report.good
    wrong = [tensor.fqn for tensor in report.tensors if tensor.problem]
    assert wrong == ["model.emb.weight"]
    (finding,) = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert (finding.fqn, finding.offsets, finding.file) == ("model.emb.weight", chunk.offsets, record.item.file)
    assert "CRC32" in finding.message
    whole = {tensor.fqn: tensor for tensor in dcptool.tensor_stats(FOREIGN / "xver_t2130").tensors}
    assert all(tensor == whole[tensor.fqn] for tensor in report.tensors if not tensor.problem)
    done = run("inspect", "--stats", folder)
    assert done.returncode == 1
    assert "'model.emb.weight' at [20, 0]" in done.stdout
    assert "damaged" in done.stdout.splitlines()[2]


def test_missing_files_holes_and_overlaps_are_errors_of_their_tensors(tmp_path):
    folder = damage.copy(FOREIGN / "xver_t2130", tmp_path / "c")
    (folder / "__1_0.distcp").unlink()
    summary = dcptool.summarize(folder, stats=True)
    assert summary.checkpoints[0].state == dcptool.summarize(folder).checkpoints[0].state == "incomplete"
    assert not summary.good

    def change(metadata):
        chunks = metadata.state_dict_metadata["model.emb.weight"].chunks
        chunks.remove(next(chunk for chunk in chunks if chunk.offsets[0] == 0))
        metadata.state_dict_metadata["model.block.0.weight"].chunks[0].sizes = torch.Size([5, 9])

    damage.edit_metadata(folder, change)
    report = dcptool.tensor_stats(folder)
    problems = {tensor.fqn: tensor.problem for tensor in report.tensors if tensor.problem}
    assert "no chunk holds the" in problems["model.emb.weight"]
    assert "two chunks hold" in problems["model.block.0.weight"]
    assert 0 < len(problems) < len(report.tensors)
    assert run("inspect", "--stats", "--quiet", folder).returncode == 1


def test_a_dtype_without_numbers_is_said_so(tmp_path):
    folder = ranks.save(tmp_path / "c", {"w": torch.zeros(3, dtype=torch.uint8), "v": torch.ones(3)})

    def change(metadata):
        metadata.state_dict_metadata["w"].properties.dtype = torch.uint4

    damage.edit_metadata(folder, change)
    report = dcptool.tensor_stats(folder)
    assert report.good
    assert "uint4" in kinds(report)["not-computed"].message
    assert report.tensors[0].norm is None
    assert not report.tensors[1].problem


def test_storages_that_tensors_share_are_checked_once(tmp_path, monkeypatch):
    base = torch.randn(64, 1000)
    torch.save({f"row{index}": base[index] for index in range(64)}, tmp_path / "m.pt")
    read = []
    real = measuring.record_problem
    monkeypatch.setattr(measuring, "record_problem", lambda *args: read.append(args) or real(*args))
    report = dcptool.tensor_stats(tmp_path / "m.pt")
    assert report.good
    assert len(read) == 1
    for index, tensor in enumerate(report.tensors):
        same(tensor, expected(base[index]))
    record = dcptool.open(tmp_path / "m.pt")
    at = record.payload(record["row0"], record["row0"].chunks[0]).record.byte_offset
    damage.flip_byte(tmp_path / "m.pt", at + 4 * 1000 * 63 + 8)
    assert not any(not tensor.problem for tensor in dcptool.tensor_stats(tmp_path / "m.pt").tensors)


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    path = ranks.save(tmp_path / "c", {"w": torch.zeros(1 << 18, 200), "t": torch.zeros(200, 1 << 14).t()})
    code = """if True:
        import re, sys, dcptool
        dcptool.tensor_stats(sys.argv[1], "t", threads=2)
        small = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
        report = dcptool.tensor_stats(sys.argv[1], threads=2)
        assert report.nbytes > 200 << 20
        print(small, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))
    """
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 40 << 10
    assert large < 160 << 10


# The command.


def test_the_table_fits_80_columns_and_is_one_row_each_where_it_fits():
    narrow = run("inspect", "--stats", part("xver_t2130").path, "--keys", "model.*", env={"COLUMNS": "80"}).stdout
    lines = narrow[narrow.index("      min") :].splitlines()
    assert all(len(line) <= 80 for line in lines)
    wide = run("inspect", "--stats", part("xver_t2130").path, "--keys", "model.*", env={"COLUMNS": "140"}).stdout
    row = next(line for line in wide.splitlines() if line.startswith("model.emb.weight"))
    assert row.split()[1:3] == ["float32", "37×9"]
    above = lines.index("model.emb.weight  float32  37×9")
    assert lines[above + 1].split() == row.split()[3:]


def test_numbers_have_four_digits():
    from dcptool.render.stats import number

    shown = [number(value) for value in (0.000012345, -1234.56, 16777216.0, 3, 0.0, math.inf, None, 1 << 40)]
    assert shown == ["1.234e-5", "-1235", "1.678e7", "3", "0", "inf", "–", "1.1e12"]


@pytest.mark.torchfree
def test_json_has_every_number_and_says_what_json_cannot(tmp_path):
    document = json.loads(run("inspect", "--stats", "--json", part("dtypes_keys_t2130").path).stdout)
    tensors = {tensor["fqn"]: tensor["stats"] for tensor in document["checkpoints"][0]["tensors"]}
    assert tensors["special.nan_inf"]["n_nan"] == 1
    assert tensors["dtype.complex64"]["measured"] == "magnitudes"
    assert tensors["zero_size"] == {
        "measured": "values", "n_values": 0, "n_nan": 0, "n_inf": 0, "n_zero": 0, "min": None, "max": None,
        "mean": None, "std": None, "norm": 0.0, "problem": None,
    }  # fmt: skip
    assert "not-finite" in {note["kind"] for note in document["checkpoints"][0]["notes"]}


def test_several_checkpoints_and_run_directories():
    done = run("inspect", "--stats", FOREIGN / "accelerate_fsdp2", "--json")
    document = json.loads(done.stdout)
    assert len(document["checkpoints"]) > 1
    assert all("stats" in tensor for found in document["checkpoints"] for tensor in found["tensors"])
    of_run = run("inspect", "--stats", FOREIGN / "run_crashed")
    assert "--stats: name one of them" in of_run.stderr
    assert run("inspect", "--threads", 2, FOREIGN / "xver_t2130").returncode == 2


def test_readers_bands_and_ours_are_of_one_size():
    assert measuring.BAND_NBYTES == reading.BAND_NBYTES
