"""--finite: which tensors hold NaN or infinities, told in the pass that reads every byte; oracle is torch itself."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import dcptool  # noqa: E402
from dcptool import Level, VerifyOptions  # noqa: E402
from dcptool.checkpoint import dtypes  # noqa: E402
from dcptool.checkpoint.kinds import Severity  # noqa: E402
from dcptool.checkpoint.numbers import array_dtype, can_be_not_finite, not_finite, plain_numbers  # noqa: E402
from dcptool.ops.verify.judge import judge  # noqa: E402
from dcptool.ops.verify.verdict import State  # noqa: E402
from dcptool.storage.local import LocalStorage  # noqa: E402
from tests import damage  # noqa: E402
from tests.conftest import FOREIGN, ROOT, UNREAD, run  # noqa: E402
from tests.run_steps import latest, names  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
FINITE = VerifyOptions(finite=True)
FLOATS = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "complex128 complex64 complex32"
).split()
HAVE_INF = [dtype for dtype in FLOATS if not dtype.endswith(("fn", "fnu", "fnuz"))]
NAN, INF = float("nan"), float("inf")


def save(folder, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return folder


def found_in(path) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """What dcptool says of each tensor that is not finite: NaN, infinities, first index."""
    report = dcptool.check(dcptool.open(path), finite=True)
    assert report.level is Level.DEEP
    assert [finding.kind for finding in report.findings if finding.is_error] == ["not-finite"] * bool(report.not_finite)
    return {fqn: tuple(found) for fqn, found in report.not_finite.items()}


def by_torch(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]] | None:
    """The same of a tensor as torch says; None if all of it is finite."""
    wide = tensor.to(
        torch.complex128 if tensor.is_complex() else torch.float64
    )  # which know isfinite, as float8 does not
    bad = ~torch.isfinite(wide)
    if not bad.any():
        return None
    n_nan = int(torch.isnan(wide).sum())
    return n_nan, int(bad.sum()) - n_nan, tuple(bad.nonzero()[0].tolist())


def expected(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    return {fqn: said for fqn, tensor in state.items() if (said := by_torch(tensor))}


def tensor_of(dtype: str, shape=(7, 9), nan=((2, 3), (6, 8)), inf=((1, 8),)) -> torch.Tensor:
    """A tensor with NaN and infinities at these places, where its dtype has them."""
    kind = getattr(torch, dtype)
    values = torch.linspace(0.25, 2, steps=int(np.prod(shape)), dtype=torch.float64).reshape(shape)
    for index in nan:
        values[index] = NAN
    for index in inf:
        values[index] = INF if dtype in HAVE_INF else 1.0
    return values.to(kind)


@pytest.fixture
def pieces(monkeypatch):
    """Sets how many bytes are read of a local file at once."""
    return lambda nbytes: monkeypatch.setattr(LocalStorage, "piece_nbytes", nbytes)


class TestBits:
    @pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtypes.lookup(dtype).itemsize <= 2])
    def test_every_pattern_of_a_narrow_float(self, dtype):
        itemsize = dtypes.lookup(dtype).itemsize
        every = np.arange(1 << (8 * itemsize)).astype(f"<u{itemsize}")
        values = torch.from_numpy(every.view(np.uint8)).view(getattr(torch, dtype)).to(torch.float64)
        for one, finite, nan in zip(every[:, None], torch.isfinite(values), torch.isnan(values), strict=True):
            said = [(list(places), list(is_nan)) for places, is_nan in not_finite(one.view(array_dtype(dtype)), dtype)]
            assert said == ([] if finite else [([0], [bool(nan)])]), hex(int(one[0]))

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_the_edges_of_wide_ones(self, dtype):
        kind = np.finfo(dtype)
        fine = [0.0, -0.0, kind.max, kind.min, kind.tiny, kind.smallest_subnormal, -kind.smallest_subnormal]
        assert list(not_finite(np.array(fine, dtype), dtype)) == []
        for bad in (INF, -INF, NAN, -NAN):
            [(places, is_nan)] = not_finite(np.array([*fine, bad], dtype), dtype)
            assert (list(places), list(is_nan)) == ([len(fine)], [bad != bad])

    @pytest.mark.parametrize("dtype", ["complex128", "complex64", "complex32"])
    def test_a_complex_number_with_a_nan_in_it_is_nan(self, dtype):
        parts = [(1.0, 2.0), (NAN, 1.0), (1.0, NAN), (INF, NAN), (NAN, -INF), (INF, 1.0), (1.0, -INF)]
        half = {"complex128": "f8", "complex64": "f4", "complex32": "f2"}[dtype]
        array = np.array(parts, half).reshape(-1).view(array_dtype(dtype))
        [(places, is_nan)] = not_finite(array, dtype)
        assert (list(places), list(is_nan)) == ([1, 2, 3, 4, 5, 6], [True] * 4 + [False] * 2)

    def test_no_dtype_is_forgotten(self):
        for name, dtype in dtypes.BY_NAME.items():
            is_float = name.startswith(("float", "bfloat", "complex")) and not name.startswith("float4")
            assert can_be_not_finite(name) == is_float, dtype
        largest = np.array([1.5e308 + 1.5e308j])  # its magnitude is none float64 holds
        assert np.isinf(np.abs(plain_numbers(largest))).all()
        assert list(not_finite(largest, "complex128")) == []


class TestWhatIsFound:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_every_dtype(self, tmp_path, dtype):
        state = {
            "bad": tensor_of(dtype),
            "good": tensor_of(dtype, nan=(), inf=()),
            "empty": tensor_of(dtype, (0, 3), (), ()),
        }
        save(tmp_path / "dcp", state)
        stock = {fqn: torch.empty_like(tensor) for fqn, tensor in state.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(stock, checkpoint_id=tmp_path / "dcp")
        assert set(expected(stock)) == {"bad"}
        assert found_in(tmp_path / "dcp") == expected(stock)
        torch.save(state, tmp_path / "w.pt")
        assert found_in(tmp_path / "w.pt") == expected(torch.load(tmp_path / "w.pt"))

    @pytest.mark.parametrize("dtype", [name for name in FLOATS if dtypes.lookup(name).safetensors])
    def test_every_dtype_of_safetensors(self, tmp_path, dtype):
        try:
            save_file({"bad": tensor_of(dtype), "good": tensor_of(dtype, nan=(), inf=())}, tmp_path / "w.safetensors")
        except (KeyError, ValueError):
            pytest.skip(f"this safetensors does not write {dtype}")
        said = found_in(tmp_path / "w.safetensors")
        assert said == expected(load_file(tmp_path / "w.safetensors"))
        assert set(said) == {"bad"}

    def test_integers_and_bools_are_finite_whatever_their_bits(self, tmp_path):
        ones = torch.full((64,), 255, dtype=torch.uint8)
        kinds = "int64 int32 int16 int8 uint8 uint16 uint32 uint64".split()
        state = {name: ones.view(getattr(torch, name)) for name in kinds}
        assert found_in(save(tmp_path / "dcp", {**state, "bool": torch.ones(5, dtype=torch.bool)})) == {}

    @pytest.mark.parametrize("nbytes", [1, 16, 33, 64, 4096])
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_at_the_borders_of_pieces(self, tmp_path, pieces, dtype, nbytes):
        torch.save({f"at {at}": tensor_of(dtype, (41,), [(at,)], ()) for at in range(41)}, tmp_path / "w.pt")
        pieces(nbytes)
        assert found_in(tmp_path / "w.pt") == {f"at {at}": (1, 0, (at,)) for at in range(41)}

    @pytest.mark.parametrize("nbytes", [32, 1 << 20])
    def test_views_of_one_storage(self, tmp_path, pieces, nbytes):
        base = torch.randn(6, 10, 8)
        base.view(-1)[[0, 79, 80, 203, 204, 300, 479]] = torch.tensor([NAN, INF, NAN, -INF, NAN, NAN, INF])
        views = {
            "all": base,
            "turned": base.permute(2, 0, 1),
            "column": base[:, :, 3],
            "steps": base[::2, 1::3, ::4],
            "row": base[2, 5],
            "repeated": base[2:3, 5:6, 3:5].expand(3, 4, 2),
            "one": base[2, 5, 4],
            "windows": base.view(-1).unfold(0, 7, 2),
            "between": base.view(-1).as_strided((3, 2), (2, 3), 200),
            "none": base[4, :2],
            "empty": base[:0],
        }
        torch.save(views, tmp_path / "w.pt")
        pieces(nbytes)
        assert found_in(tmp_path / "w.pt") == expected(torch.load(tmp_path / "w.pt"))

    @pytest.mark.parametrize("seed", range(20))
    def test_any_view(self, tmp_path, pieces, seed):
        rng = np.random.default_rng(seed)
        base = torch.randn(600)
        base[torch.from_numpy(rng.integers(0, 600, 60))] = NAN
        base[torch.from_numpy(rng.integers(0, 600, 20))] = -INF
        views = {}
        for number in range(8):
            shape = rng.integers(1, 5, rng.integers(0, 5)).tolist()
            strides = rng.integers(0, 40, len(shape)).tolist()
            views[str(number)] = base.as_strided(shape, strides, int(rng.integers(0, 20)))
        torch.save(views, tmp_path / "w.pt")
        pieces(int(rng.integers(1, 300)))
        assert found_in(tmp_path / "w.pt") == expected(views)

    def test_what_no_tensor_uses_does_not_count(self, tmp_path):
        base = torch.ones(100)
        base[:10] = base[50:] = NAN
        base[20:30:2] = INF
        torch.save({"middle": base[10:20], "odd": base[21:30:2]}, tmp_path / "w.pt")
        assert found_in(tmp_path / "w.pt") == {}
        assert judge(tmp_path / "w.pt", FINITE).finite is True

    def test_conjugates_and_negatives(self, tmp_path):
        value = torch.tensor([1 + 2j, complex(NAN, 1), complex(1, -INF)])
        for state in ({"conj": value.conj()}, {"neg": value.conj().imag, "real": value.real}):
            torch.save(state, tmp_path / "w.pt")
            assert found_in(tmp_path / "w.pt") == expected(torch.load(tmp_path / "w.pt")) != {}

    def test_more_than_one_slice_and_more_than_one_range(self, tmp_path, monkeypatch):
        monkeypatch.setattr("dcptool.checks.items.RANGE_NBYTES", 1 << 16)
        state = {f"w{number}": torch.zeros(300_000) for number in range(3)}
        state["w1"][[65_535, 65_536, 299_999]] = NAN
        state["w2"][131_072] = INF
        assert found_in(save(tmp_path / "dcp", state)) == {"w1": (3, 0, (65_535,)), "w2": (0, 1, (131_072,))}

    def test_tensors_inside_objects_count_as_the_object(self, tmp_path):
        inside = (torch.tensor([1.0, NAN]), {"deep": [torch.tensor([[INF]]), torch.tensor([NAN, 0.0])]})
        clean = (torch.ones(3), "text")
        assert found_in(save(tmp_path / "dcp", {"o": {"x": inside}, "p": {"x": clean}})) == {"o.x": (2, 1, (0,))}
        torch.save({"o": inside, "p": clean, "q": 3, "t": inside[0]}, tmp_path / "w.pt")
        assert found_in(tmp_path / "w.pt") == {"o": (2, 1, (0,)), "t": (1, 0, (1,))}

    def test_zstd_safetensors_blobs_and_shards_of_torch(self, tmp_path):
        """Of what other software wrote, what torch's isfinite says of the values that are read."""
        for name in ("w_zstd", "w_safetensors", "hf_sharded", "mesh2d_fsdp_tp", "w_nocrc", "xver_t222"):
            opened = dcptool.open(FOREIGN / name)
            assert found_in(FOREIGN / name) == {
                fqn: said for fqn in opened.tensors if (said := by_torch(opened.read_torch(fqn)))
            }, name


class TestSeveralChunks:
    def test_the_first_index_is_that_of_the_whole_tensor(self, tmp_path):
        """Four chunks, as DCP's HuggingFace writer on a 2 × 2 mesh leaves them."""
        whole = torch.zeros(6, 10)
        whole[2, 9] = whole[3, 0] = NAN
        whole[5, 5] = -INF
        folder = tmp_path / "shards"
        folder.mkdir()
        for number, (rows, columns) in enumerate([(0, 0), (0, 5), (3, 0), (3, 5)], 1):
            part = whole[rows : rows + 3, columns : columns + 5].contiguous()
            info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [rows, columns]}}), "DCP_VERSION": "1.0"}
            save_file({"w": part}, folder / f"shard-{number:05d}-model-00001-of-00001.safetensors", info)
        opened = dcptool.open(folder)
        assert len(opened.tensors["w"].chunks) == 4
        assert torch.equal(opened.read_torch("w").nan_to_num(), whole.nan_to_num())
        assert found_in(folder) == {"w": by_torch(whole)} == {"w": (2, 1, (2, 9))}

    def test_chunks_of_several_files_of_a_save_by_ranks(self, tmp_path):
        folder = damage.copy(FOREIGN / "mesh2d_fsdp_tp", tmp_path / "c")
        opened = dcptool.open(folder)
        fqn, entry = next((fqn, entry) for fqn, entry in opened.tensors.items() if len(entry.chunks) > 2)
        chunk = entry.chunks[len(entry.chunks) - 1]
        payload = opened.payload(entry, chunk)
        record = payload.record
        start = chunk.item.byte_offset + record.byte_offset + payload.storage_offset * 4
        damage.overwrite(folder / chunk.item.file, start, np.array([NAN], "<f4").tobytes())
        report = dcptool.check(dcptool.open(folder), finite=True)
        assert report.not_finite == {fqn: (1, 0, chunk.offsets)}
        assert {finding.kind for finding in report.findings if finding.is_error} == {"not-finite", "wrong-crc"}


@contextmanager
def bytes_read(monkeypatch):
    """Counts the bytes that are read of local files."""
    count = [0]
    real_into, real = LocalStorage.read_into, LocalStorage.read

    def read_into(self, name, byte_offset, out):
        count[0] += len(out)
        return real_into(self, name, byte_offset, out)

    def read(self, name, byte_offset, nbytes):
        data = real(self, name, byte_offset, nbytes)
        count[0] += len(data)
        return data

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read_into", read_into)
        patched.setattr(LocalStorage, "read", read)
        yield count


class TestReading:
    @pytest.mark.parametrize("kind", ["dcp", "w.pt", "w.safetensors", "zstd"])
    def test_nothing_is_read_twice(self, tmp_path, monkeypatch, kind):
        state = {"a": torch.full((300, 500), NAN), "b": torch.randn(70_000, dtype=torch.float64)}
        state["c"] = state["a"].t() if kind == "w.pt" else torch.arange(9)
        path = FOREIGN / "w_zstd" if kind == "zstd" else tmp_path / kind
        if kind == "dcp":
            save(path, state)
        elif kind == "w.pt":
            torch.save(state, path)
        elif kind == "w.safetensors":
            save_file(state, path)
        opened, again = dcptool.open(path), dcptool.open(path)
        with bytes_read(monkeypatch) as deep:
            dcptool.check(opened, Level.DEEP)
        with bytes_read(monkeypatch) as finite:
            dcptool.check(again, finite=True)
        assert finite == deep
        assert deep[0] > 0.9 * sum(use.nbytes for use in opened.usage.values() if kind != "w.pt")

    def test_deep_alone_does_without_numpy(self, tmp_path):
        save(tmp_path / "c", {"w": torch.ones(9)})
        code = "import sys; from dcptool.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        code += "print('numpy' in sys.modules, file=sys.stderr)"
        for option, needs in (("--deep", "False"), ("--finite", "True")):
            command = [sys.executable, "-c", code, "verify", option, tmp_path / "c"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
            assert done.stderr.strip() == needs

    def test_the_records_of_a_pt_file_are_gone_through_once(self, tmp_path, monkeypatch):
        """Each of its tensors has all of them: each with each is 400 million for 20,000 tensors."""
        torch.save({f"w{number}": torch.ones(2) for number in range(200)}, tmp_path / "w.pt")
        from dcptool.checks.items import _Scan

        n_calls = 0
        real = _Scan._read

        def read(self, *args):
            nonlocal n_calls
            n_calls += 1
            return real(self, *args)

        monkeypatch.setattr(_Scan, "_read", read)
        for finite in (False, True):
            n_calls = 0
            assert dcptool.check(dcptool.open(tmp_path / "w.pt"), Level.DEEP, finite=finite).good
            assert 200 < n_calls < 220

    def test_what_repeats_a_few_elements_without_end_is_not_written_out(self, tmp_path, monkeypatch):
        base = torch.tensor([1.0, NAN, 3.0])
        repeated, windows = base.expand(1 << 20, 1 << 18, 3), base.as_strided((1 << 14, 1 << 14, 2, 2), (0, 0, 1, 1))
        torch.save({"repeated": repeated}, tmp_path / "w.pt")
        assert found_in(tmp_path / "w.pt") == {"repeated": (1 << 38, 0, (0, 0, 1))}
        torch.save({"windows": windows}, tmp_path / "v.pt")
        verdict = judge(tmp_path / "v.pt", FINITE)
        assert (verdict.state, verdict.finite) == (State.OTHER, None)
        assert "repeated" in verdict.reason


def write_run(folder, **states):
    """A run directory with a step each."""
    for name, state in states.items():
        save(folder / name, state)
    return folder


GOOD = {"model.w": torch.ones(4, 5), "optim.state.exp_avg": torch.zeros(20)}
BAD = {**GOOD, "optim.state.exp_avg": torch.tensor([0.0] * 7 + [NAN, INF])}


class TestVerify:
    def test_a_step_that_is_not_finite_is_complete_and_not_good(self, tmp_path):
        path = save(tmp_path / "c", BAD)
        assert run("verify", "--deep", path).returncode == 0
        done = run("verify", "--finite", path)
        assert done.returncode == 1
        assert "state    complete" in done.stdout
        assert "finite   no: optim.state.exp_avg" in done.stdout
        assert (
            "error: 1 tensor holds NaN or infinities: 'optim.state.exp_avg' (1 NaN and 1 infinite, the first at [7])\n"
            in (done.stdout)
        )
        assert run("verify", "--finite", "--quiet", save(tmp_path / "good", GOOD)).returncode == 0
        assert "finite   yes" in run("verify", "--finite", tmp_path / "good").stdout
        assert "  finite " not in run("verify", "--deep", tmp_path / "good").stdout

    def test_three_are_named_and_the_others_counted(self, tmp_path):
        state = {f"w{number}": torch.tensor([[0.0, NAN], [INF, NAN]]) for number in range(1200)}
        done = run("verify", "--finite", save(tmp_path / "c", state))
        words = "(2 NaN and 1 infinite, the first at [0, 1])"
        assert (
            f"1,200 tensors hold NaN or infinities: 'w0' {words}, 'w1' {words}, 'w2' {words} and 1,197 more"
            in done.stdout
        )
        assert "finite   no: w0, w1, w2 and 1,197 more" in done.stdout
        document = json.loads(run("verify", "--finite", "--json", tmp_path / "c").stdout)["checkpoints"][0]
        assert (document["finite"], len(document["not_finite"]), document["level"]) == (False, 1200, "deep")

    def test_a_scalar_has_no_index(self, tmp_path):
        done = run("verify", "--finite", save(tmp_path / "c", {"s": torch.tensor(NAN)}))
        assert "1 tensor holds NaN or infinities: 's' (1 NaN)\n" in done.stdout

    def test_the_table_of_a_run_has_a_column_if_it_is_asked_for(self, tmp_path):
        folder = write_run(tmp_path / "run", step_1=GOOD, step_2={**BAD, "model.w": torch.full((2,), INF)}, step_3=GOOD)
        damage.truncate(next((folder / "step_3").glob("*.distcp")), 1000)
        done = run("verify", "--finite", folder)
        assert done.returncode == 1
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
        place = done.stdout.splitlines()[2].index("finite")
        cells = [line[place:].split("  ")[0].strip() for line in done.stdout.splitlines()[4:7]]
        assert rows[0][-3:] == ["finite", "worst", "finding"]
        assert cells == ["yes", "2 tensors", "–"]
        assert done.stdout.endswith(f"newest complete, finite step: {folder}/step_1\n")
        header = run("verify", "--deep", folder).stdout.splitlines()[2]
        assert "finite" not in header
        shutil.rmtree(folder / "step_1")
        assert run("verify", "--finite", folder).stdout.endswith(
            "no step is complete and finite: nothing to resume from\n"
        )

    def test_json_knows_what_was_not_asked(self, tmp_path):
        path = save(tmp_path / "c", BAD)
        plain = json.loads(run("verify", "--deep", "--json", path).stdout)["checkpoints"][0]
        asked = json.loads(run("verify", "--finite", "--json", path).stdout)
        assert (plain["finite"], plain["not_finite"]) == (None, [])
        assert asked["good"] is False
        [found] = asked["checkpoints"]
        assert (found["finite"], found["not_finite"], found["state"]) == (False, ["optim.state.exp_avg"], "complete")
        [finding] = [finding for finding in found["findings"] if finding["severity"] == "error"]
        assert (finding["kind"], finding["fqn"]) == ("not-finite", "optim.state.exp_avg")
        document = json.loads(run("verify", "--finite", "--json", save(tmp_path / "good", GOOD)).stdout)["checkpoints"][
            0
        ]
        assert (document["finite"], document["not_finite"]) == (True, [])

    def test_a_flipped_bit_that_makes_a_nan_is_damage_too(self, tmp_path):
        path = save(tmp_path / "c", {"w": torch.full((64,), 1.5)})  # 0x3FC00000: one more bit makes it a NaN
        entry = dcptool.open(path).tensors["w"]
        record = dcptool.open(path).payload(entry, entry.chunks[0]).record
        damage.flip_byte(path / record.item.file, record.item.byte_offset + record.byte_offset + 4 * 9 + 3, 0x40)
        verdict = judge(path, FINITE)
        assert {finding.kind for finding in verdict.findings if finding.is_error} == {"wrong-crc", "not-finite"}
        assert (verdict.state, verdict.finite, verdict.not_finite) == (State.DAMAGED, False, ("w",))
        assert "first at [9]" in "".join(finding.message for finding in verdict.findings)

    def test_parts_and_files_beside_them_count(self, tmp_path):
        """What a model and an optimizer hold, wherever a trainer puts the latter."""
        step = tmp_path / "step_1"
        save(step / "actor", GOOD)
        save(step / "critic", BAD)
        torch.save({"state": {0: {"exp_avg": torch.tensor([NAN, 1.0])}}}, step / "optimizer.pt")
        torch.save({"step": 5, "lr": torch.ones(2)}, step / "scheduler.pt")
        verdict = judge(step, FINITE)
        assert verdict.not_finite == ("critic: optim.state.exp_avg", "optimizer.pt: state.0.exp_avg")
        assert "optimizer.pt: 1 tensor holds NaN or infinities: 'state.0.exp_avg' (1 NaN, the first at [0])" in [
            finding.message for finding in verdict.findings
        ]
        assert judge(step, VerifyOptions(Level.DEEP)).not_finite == ()

    def test_a_file_beside_it_that_is_damaged_is_so_with_either_option(self, tmp_path):
        save(tmp_path / "c", GOOD)
        torch.save({"w": torch.zeros(9000)}, tmp_path / "c" / "extra.pt")
        damage.flip_byte(tmp_path / "c" / "extra.pt", 9000)
        for options in (VerifyOptions(Level.DEEP), FINITE):
            verdict = judge(tmp_path / "c", options)
            assert [finding.kind for finding in verdict.findings if finding.is_error] == ["damaged-side-file"]
            assert verdict.state is State.DAMAGED

    @pytest.mark.parametrize("name", ["megatron_legacy_tp2"])
    def test_steps_of_trainers_whose_files_are_all_beside(self, tmp_path, name):
        """All tensors in their files are looked at."""
        folder = damage.copy(UNREAD / name, tmp_path / name)
        step = next(path for path in (folder, *sorted(folder.iterdir())) if judge(path).whole)
        assert judge(step, FINITE).finite is True
        file = max(step.rglob("*.pt"), key=lambda path: path.stat().st_size)
        with zipfile.ZipFile(file) as archive:
            storages = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size >= 16]
        for info in storages:
            name_nbytes, extra_nbytes = struct.unpack("<HH", file.read_bytes()[info.header_offset + 26 :][:4])
            damage.overwrite(
                file, info.header_offset + 30 + name_nbytes + extra_nbytes, b"\xff" * 16
            )  # NaN of any float
        verdict = judge(step, FINITE)
        assert (verdict.state, verdict.finite) == (State.DAMAGED, False)
        assert {found.partition(": ")[0] for found in verdict.not_finite} == {str(file.relative_to(step))}

    def test_values_that_could_not_be_seen_are_not_known(self, tmp_path):
        save(tmp_path / "c", GOOD)
        torch.save({"w": torch.zeros(3)}, tmp_path / "c" / "old.pt", _use_new_zipfile_serialization=False)
        verdict = judge(tmp_path / "c", FINITE)
        assert (verdict.state, verdict.finite) == (State.COMPLETE, None)
        [warning] = [finding for finding in verdict.findings if finding.kind == "finite-unknown"]
        assert warning.message == "old.pt: whether its tensors are finite is not known: torch.save before 1.6 wrote it"
        assert warning.severity is Severity.WARNING
        done = run("verify", "--finite", tmp_path / "c")
        assert (done.returncode, "finite   not known" in done.stdout) == (0, True)


class TestLatest:
    def test_steps_that_are_not_finite_are_passed_over(self, tmp_path):
        folder = write_run(tmp_path / "run", step_1=GOOD, step_2=GOOD, step_3=BAD, step_4=BAD)
        assert run("latest", "--deep", folder).stdout == f"{folder}/step_4\n"
        done = run("latest", "--finite", folder)
        assert (done.returncode, done.stdout) == (0, f"{folder}/step_2\n")
        words = "1 tensor holds NaN or infinities: 'optim.state.exp_avg' (1 NaN and 1 infinite, the first at [7])"
        assert done.stderr.splitlines() == [f"step_4 is not finite: {words}", f"step_3 is not finite: {words}"]
        found = latest(folder, finite=True)
        assert (found.verdict.name, names(found.skipped)) == (
            "step_2",
            [("step_4", "complete"), ("step_3", "complete")],
        )

    def test_none_is_better_than_one_that_is_not_finite(self, tmp_path):
        folder = write_run(tmp_path / "run", step_1=BAD, step_2=BAD)
        done = run("latest", "--finite", folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith(
            f"{folder} has no complete, finite step to resume from; see: dcptool verify --finite {folder}\n"
        )
        document = json.loads(run("latest", "--finite", "--json", folder).stdout)
        assert document["path"] is None
        assert [step["not_finite"] for step in document["skipped"]] == [["optim.state.exp_avg"]] * 2
