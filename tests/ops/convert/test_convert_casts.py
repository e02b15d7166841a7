"""What a cast does to numbers: which tensors it takes, what it refuses, and what it says of values that it loses."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dcptool
from dcptool.checkpoint.casting import Loss, is_optimizer_state, loss_of_cast
from dcptool.checkpoint.selection import Renaming
from dcptool.copying import reading
from dcptool.errors import UnsupportedError
from dcptool.ops.convert.convert import ConvertOptions, convert
from tests.conftest import FOREIGN, run

torch = pytest.importorskip("torch")

from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def options(**renaming) -> ConvertOptions:
    return ConvertOptions(renaming=Renaming(**renaming))


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "weight.scale", "scale_weight", "input_scale"])
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_n10_float8_with_scales_is_refused_with_what_to_do(tmp_path, scale, to):
    state = {
        "mlp.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        f"mlp.{scale}": torch.ones(1, 1),
        "norm": torch.ones(4),
    }
    torch.save(state, tmp_path / "m.pt")
    with pytest.raises(UnsupportedError, match=r"mean something only with scales, as 'mlp\.weight'") as error:
        convert(tmp_path / "m.pt", tmp_path / "out", to if to != "torch" else "dcp", options(dtype="bfloat16"))
    assert "Without --dtype" in error.value.next_step
    assert not (tmp_path / "out").exists()
    target = tmp_path / ("o.pt" if to == "torch" else "o")
    convert(tmp_path / "m.pt", target, to)
    assert dcptool.open(target)["mlp.weight"].dtype == "float8_e4m3fn"
    convert(tmp_path / "m.pt", tmp_path / "n.pt", "torch", options(dtype="bfloat16")._replace(keys=("norm",)))


def test_n10_integers_with_scales_too_and_float8_without_stays_and_is_told(tmp_path):
    torch.save({"w": torch.ones(4, dtype=torch.int8), "w_scale": torch.ones(1)}, tmp_path / "q.pt")
    with pytest.raises(UnsupportedError, match="'w' with 'w_scale'"):
        convert(tmp_path / "q.pt", tmp_path / "o.pt", "torch", options(dtype="float16"))
    mask = torch.ones(2, dtype=torch.uint8)
    torch.save({"a.w": torch.ones(4).to(torch.float8_e5m2), "b": torch.ones(2), "mask": mask}, tmp_path / "f.pt")
    done = convert(tmp_path / "f.pt", tmp_path / "o.pt", "torch", options(dtype="float16"))
    assert any("1 tensor keep their dtype, such as 'a.w', which is float8_e5m2" in note for note in done.notes)
    assert done.n_cast == 1


@pytest.fixture
def job(tmp_path):
    """A model with AdamW, as a job of two ranks saves it."""
    model = {"w": torch.randn(8, 4), "b": torch.randn(8)}
    states = [
        {
            "model": {name: Shard.of(tensor, rank, 2) for name, tensor in model.items()},
            "optim": {"state": {name: {"exp_avg": Shard.of(tensor, rank, 2), "step": torch.tensor(3.0)}
                                for name, tensor in model.items()}},
        }
        for rank in range(2)
    ]  # fmt: skip
    return save(tmp_path / "step_1", *states)


def test_n24_the_optimizer_is_cast_only_if_told(tmp_path, job):
    done = convert(job, tmp_path / "a", "dcp", options(dtype="bfloat16"))
    found = {fqn: entry.dtype for fqn, entry in dcptool.open(tmp_path / "a").tensors.items()}
    assert {dtype for fqn, dtype in found.items() if fqn.startswith("model.")} == {"bfloat16"}
    assert {dtype for fqn, dtype in found.items() if fqn.startswith("optim.")} == {"float32"}
    assert done.n_cast == 2
    assert any("4 tensors of optimizer state keep their dtype" in note for note in done.notes)
    assert any("--cast-optimizer" in note for note in done.notes)
    done = convert(job, tmp_path / "b", "dcp", options(dtype="bfloat16", cast_optimizer=True))
    assert {entry.dtype for entry in dcptool.open(tmp_path / "b").tensors.values()} == {"bfloat16"}
    assert done.n_cast == 6


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("accelerate_fsdp2", "optimizer_0"),
        ("trainer_fsdp2/checkpoint-2", "optimizer_0"),
        ("lightning_modelparallel/step=3.ckpt", "optimizer_0."),
        ("megatron_tp2/iter_0000010", "optimizer."),
        ("torchtitan_dcp/checkpoint/step-2", "optimizer."),
    ],
)
def test_n24_what_is_optimizer_state_in_real_checkpoints(name, part):
    path = FOREIGN / name
    folder = path / part if (path / part).is_dir() else path
    for fqn in dcptool.open(folder).tensors:
        assert is_optimizer_state(fqn) is (folder != path or fqn.startswith(part)), fqn


@pytest.mark.parametrize(
    "name", ["model.optimus.w", "optional.w", "opt.decoder.w", "model.state.w", "adopt.exp.w", "optim"]
)
def test_what_is_only_named_alike_is_not(name):
    assert not is_optimizer_state(name)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("cast", FLOATS)
def test_n24_losses_are_those_of_torch(stored, cast):
    """Every exponent, both signs, the edges of each dtype: counted by torch's own cast, value by value."""
    source, target = getattr(torch, stored), getattr(torch, cast)
    edges = [info(dtype) for dtype in map(torch.finfo, (torch.float16, torch.bfloat16, torch.float32, torch.float64))
             for info in (lambda i: i.max, lambda i: i.tiny, lambda i: i.smallest_normal / 4)]  # fmt: skip
    powers = [2.0**power for power in range(-1074, 1024)]
    values = torch.tensor([0.0, float("inf"), float("nan"), *edges, *powers], dtype=torch.float64)
    before = torch.cat([values, -values, values * 0.999]).to(source)
    after = before.to(target)
    finite, exact, new = torch.isfinite(before), before.double(), after.double()
    normal = exact.abs() >= torch.finfo(source).tiny
    wanted = Loss(
        int((finite & torch.isinf(after)).sum()),
        int(((exact != 0) & (new == 0)).sum()),
        int(((new != 0) & (new.abs() < torch.finfo(target).tiny) & normal).sum()),
    )
    arrays = []
    for tensor, name in ((before, stored), (after, cast)):
        raw = tensor.contiguous().view(torch.uint8).numpy()
        arrays.append(raw.view(dcptool.checkpoint.dtypes.numpy_dtype(name)))
    assert loss_of_cast(*arrays, stored, cast) == wanted
    if cast == "float16" and stored != "float16":
        assert all(wanted)


def lossy(tmp_path):
    state = {
        "w": torch.tensor([1.0, 1e5, -3e38, 1e-9, 1e-6]),
        "v": torch.tensor([1e-30]),
        "ok": torch.ones(3),
        "zero": torch.zeros(9),
    }
    torch.save(state, tmp_path / "big.pt")
    return tmp_path / "big.pt"


def test_n24_lost_values_are_counted_per_tensor_and_exit_1(tmp_path):
    source = lossy(tmp_path)
    result = run("convert", "--to", "torch", "--dtype", "float16", str(source), str(tmp_path / "f.pt"))
    assert result.returncode == 1
    assert (
        "warning: the cast lost values of 2 tensors: 2 became infinite, 2 became zero, 1 became subnormal"
        in result.stderr
    )
    assert "  w: 2 became infinite, 1 became zero, 1 became subnormal" in result.stderr
    assert torch.isinf(torch.load(tmp_path / "f.pt")["w"]).sum() == 2
    result = run(
        "convert",
        "--to",
        "torch",
        "--dtype",
        "float16",
        "--allow-overflow",
        "--json",
        str(source),
        str(tmp_path / "g.pt"),
    )
    assert result.returncode == 0
    lost = {row["fqn"]: row for row in json.loads(result.stdout)["lost"]}
    assert lost["w"] == {"fqn": "w", "n_infinite": 2, "n_zero": 1, "n_subnormal": 1}
    assert set(lost) == {"w", "v"}
    result = run("convert", "--to", "torch", "--dtype", "bfloat16", str(source), str(tmp_path / "h.pt"))
    assert result.returncode == 0, result.stderr
    result = run("convert", "--to", "torch", "--allow-overflow", str(source), str(tmp_path / "i.pt"))
    assert result.returncode == 2


def test_n24_over_bands_chunks_and_shards_each_value_counts_once(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BAND_NBYTES", 4096)
    tensor = torch.from_numpy(np.random.default_rng(1).standard_normal((300, 40)).astype(np.float32) * 3e4)
    source = save(tmp_path / "c", *({"w": Shard.of(tensor, rank, 3)} for rank in range(3)))
    wanted = int((torch.isinf(tensor.half())).sum())
    for to, target in (("torch", "o.pt"), ("safetensors", "hf"), ("dcp", "d")):
        done = convert(source, tmp_path / target, to, options(dtype="float16"))
        assert done.lost["w"].n_infinite == wanted > 0
