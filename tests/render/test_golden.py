"""What `dcptool inspect` prints of each flavour, kept as text: a change of output is seen in review.

`pytest --update-golden` writes the files anew.
"""

from __future__ import annotations

import pytest

from dcptool.ops.inspect.inspect import summarize
from dcptool.render.inspect import to_text
from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "golden"
CASES = {
    "plain": ("xver_t2130", {}),
    "torch22": ("xver_t222", {}),
    "mesh": ("mesh2d_fsdp_tp", {"chunks": True, "keys": "model.*"}),
    "hsdp": ("hsdp", {}),
    "megatron": ("megatron_tp2/iter_0000010", {}),
    "lightning": ("lightning_modelparallel/step=3.ckpt", {}),
    "accelerate": ("accelerate_fsdp2", {}),
    "dtypes": ("dtypes_keys_t2130", {}),
    "rank_local": ("w_no_collectives", {}),
    "safetensors_dcp": ("w_safetensors", {}),
    "zstd": ("w_zstd", {}),
    "hf_shards": ("hf_sharded_multi", {"depth": 2}),
    "hf_race": ("hf_rank0_race", {}),
    "run": ("run_crashed", {}),
}


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", CASES)
def test_inspect(name, width, monkeypatch, request):
    path, options = CASES[name]
    monkeypatch.chdir(ROOT / "fixtures" / "foreign")
    by_file = name == "zstd"
    text = to_text(summarize(path, **options), width, by_file) + "\n"
    golden = GOLDEN / f"{name}_{width}.txt"
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
