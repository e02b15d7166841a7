"""Files that hold one value, nothing, or odd names: converted to what torch loads equal, or a clear error."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors import safe_open  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checks.check import Level  # noqa: E402
from dcptool.ops.verify.verdict import State  # noqa: E402
from tests.conftest import run  # noqa: E402

ROOTS = {
    "a tensor": torch.arange(3.0),
    "nothing": {},
    "a number": 3,
    "None": None,
    "text": "text",
    "an empty list": [],
    "a list": [1, 2],
    "a list of tensors": [torch.ones(2), torch.zeros(1)],
    "a list of dicts": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}],
    "a tuple": (torch.ones(2), 3),
    "a dict without a name": {"": torch.ones(2)},
    "a dict named as one value is": {".": torch.ones(2)},
    "half a surrogate pair": {"a\ud800": torch.ones(2), "b": torch.ones(1)},
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("name", ROOTS)
def test_a_pt_file_becomes_one_that_torch_loads_equal(name, tmp_path):
    torch.save(ROOTS[name], tmp_path / "in.pt")
    done = run("convert", "--to", "torch", "--check", tmp_path / "in.pt", tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), ROOTS[name])


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@pytest.mark.parametrize("name", ROOTS)
def test_other_formats_take_it_or_say_why_not(name, to, tmp_path):
    torch.save(ROOTS[name], tmp_path / "in.pt")
    done = run("convert", "--to", to, tmp_path / "in.pt", tmp_path / "out")
    assert done.returncode in (0, 3)
    assert "bug" not in done.stderr
    assert (tmp_path / "out").exists() is (done.returncode == 0)


def test_a_name_that_is_no_utf8_is_named(tmp_path):
    torch.save(ROOTS["half a surrogate pair"], tmp_path / "in.pt")
    done = run("convert", "--to", "safetensors", tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert done.returncode == 3
    assert r"cannot hold the name 'a\ud800'" in done.stderr
    done = run(
        "convert", "--to", "safetensors", "--strip-prefix", "a\ud800", "--add-prefix", "x", tmp_path / "in.pt",
        tmp_path / "out.safetensors",
    )  # fmt: skip
    assert done.returncode == 0
    with safe_open(tmp_path / "out.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == ["x", "xb"]


def test_keys_that_are_equal_as_text_are_told(tmp_path):
    torch.save({1: torch.ones(1), "1": torch.zeros(2)}, tmp_path / "in.pt")
    assert "'1' is the name of several entries" in run("inspect", tmp_path / "in.pt").stdout
    assert "'1' is the name of several entries" in run("verify", tmp_path / "in.pt").stdout
    done = run("convert", "--to", "safetensors", tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert done.returncode == 0
    assert "'1' is the name of several entries once keys are text; this one has a number added: '1#2'" in done.stderr
    for to in ("torch", "dcp"):
        assert run("convert", "--to", to, tmp_path / "in.pt", tmp_path / "out.pt").returncode == 3


@pytest.mark.parametrize("state", [{}, {"a": {}}], ids=["nothing", "an empty dict"])
def test_a_save_of_nothing_is_the_same_to_every_command(state, tmp_path):
    source = tmp_path / "s"
    dcp.save(state, checkpoint_id=source, no_dist=True)

    def judged(path):
        (verdict,) = dcptool.verify(path, dcptool.VerifyOptions(level=Level.DEEP)).verdicts
        return verdict.state, {finding.kind for finding in verdict.findings}

    assert judged(source) == (State.COMPLETE, {"nothing-saved"})
    for command in (
        ("convert", "--to", "torch", source, tmp_path / "o.pt"),
        ("convert", "--to", "safetensors", source, tmp_path / "o.safetensors"),
        ("convert", "--to", "dcp", "--check", source, tmp_path / "o"),
        ("reshard", "--world-size", 2, source, tmp_path / "r"),
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
        assert "nothing was saved: the source holds no tensor and no object" in done.stderr
    assert torch.load(tmp_path / "o.pt", weights_only=True) == {}
    with safe_open(tmp_path / "o.safetensors", "pt") as opened:
        assert list(opened.keys()) == []
    assert judged(tmp_path / "o.safetensors")[0] is State.COMPLETE
    for folder in ("o", "r"):
        assert judged(tmp_path / folder) == (State.COMPLETE, {"nothing-saved"})
        dcp.load({}, checkpoint_id=tmp_path / folder, no_dist=True)
    done = run("convert", "--to", "torch", "--keys", "w*", source, tmp_path / "o2.pt")
    assert done.returncode == 3  # something was asked for that is not there
