"""Notes on real checkpoints and on small ones made for each kind; and on none that do not need them."""

from __future__ import annotations

import pytest

import dcptool
from tests.conftest import FOREIGN, PARTS

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402


def kinds(path):
    return {problem.kind: problem.message for problem in dcptool.summarize(path).checkpoints[0].problems}


def saved(tmp_path, state):
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    return kinds(tmp_path / "c")


EXPECTED = {
    "ddp": set(),
    "hsdp": set(),
    "mesh2d_fsdp_tp": set(),
    "w_threads3": {"whole-tensors"},
    "xver_t2130": {"whole-tensors"},
    "xver_t222": {"unflattened", "whole-tensors"},
    "fsdp1_t222_orig": {"unflattened"},
    "w_noflatten": {"unflattened", "whole-tensors"},
    "torchtitan_dcp/checkpoint/step-2": {"per-rank"},
    "megatron_tp2/iter_0000010": {"extra-state", "side-files", "whole-tensors"},
    "lightning_modelparallel/step=3.ckpt": {"side-files"},
    "hf_consolidated": set(),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_foreign_checkpoints(name):
    assert set(kinds(FOREIGN / name)) == EXPECTED[name]


def test_notes_never_make_a_checkpoint_bad():
    for part in PARTS:
        if not part.damaged:
            assert all(found.state == "complete" for found in dcptool.summarize(part.path).checkpoints)


# R56
def test_wrapper_parts_of_names(tmp_path):
    state = {"model": {"module._orig_mod.w": torch.zeros(1), "modules.w": torch.zeros(1), "v": torch.zeros(1)}}
    assert saved(tmp_path, state)["wrapper-names"] == (
        "names have parts of wrappers: _orig_mod. in 1 entry, module. in 1 entry; a bare model does not have them"
    )


# R35
def test_an_optimizer_without_tensors_and_one_for_some_parameters(tmp_path):
    model = {f"{name}.weight": torch.zeros(2) for name in "abcd"}
    groups = [{"lr": 0.1, "params": ["a.weight"]}]
    none = saved(tmp_path / "none", {"model": model, "optim": {"param_groups": groups, "state": {}}})
    assert "saved before its first step" in none["no-optimizer-state"]
    state = {f"{name}.weight": {"exp_avg": torch.zeros(2)} for name in "abc"}
    some = saved(tmp_path / "some", {"model": model, "optim": {"param_groups": groups, "state": state}})
    assert "no state for 1 of 4 weights and biases, such as 'model.d.weight'" in some["partial-optimizer"]
    state["d.weight"] = {"exp_avg": torch.zeros(2)}
    full = saved(tmp_path / "full", {"model": model, "optim": {"param_groups": groups, "state": state}})
    assert not full


# R36
def test_an_optimizer_keyed_by_index(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert "by parameter index (2 of them)" in found["index-keyed-optimizer"]


# R17, R18
def test_per_rank_families_and_their_gaps(tmp_path):
    state = {f"dl.rank{rank}": {"pos": rank} for rank in (0, 1, 3)} | {"w": torch.zeros(1), "ranking": 1}
    assert saved(tmp_path, state)["per-rank"] == "'dl.rankN.pos' is saved per rank, for 4 ranks, 1 of them missing"
