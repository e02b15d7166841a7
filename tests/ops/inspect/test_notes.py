"""Notes on real checkpoints and on small ones made for each kind; and on none that do not need them."""

from __future__ import annotations

import pytest

import dcptool
from tests.conftest import FOREIGN, PARTS

torch = pytest.importorskip("torch")

from tests.ranks import Shard, save  # noqa: E402


def kinds(path):
    return {problem.kind: problem.message for problem in dcptool.summarize(path).checkpoints[0].problems}


def saved(tmp_path, *states):
    """The notes on a save, by one rank for each state."""
    return kinds(save(tmp_path / "c", *states))


def saved_pt(tmp_path, state):
    torch.save(state, tmp_path / "m.pt")
    return kinds(tmp_path / "m.pt")


EXPECTED = {
    "ddp": {"stored-once", "whole-tensors"},
    "hsdp": set(),
    "mesh2d_fsdp_tp": set(),
    "w_threads3": {"whole-tensors"},
    "xver_t2130": {"integer-keys", "whole-tensors"},
    "xver_t222": {"unflattened", "whole-tensors"},
    "fsdp1_t222_orig": {"unflattened"},
    "w_noflatten": {"unflattened", "whole-tensors"},
    "torchtitan_dcp/checkpoint/step-2": {"per-rank"},
    "dtypes_keys_t2130": {"integer-keys", "whole-tensors"},
    "pp_disjoint": {"family-gap", "per-rank", "whole-tensors"},
    "megatron_tp2/iter_0000010": {"extra-state", "layer-stacks", "side-files", "whole-tensors"},
    "megatron_dp2_fpar/iter_0000010": {"extra-state", "layer-stacks", "side-files", "whole-tensors"},
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
    found = saved(tmp_path / "gap", *[state] * 4)["per-rank"]
    assert found == "'dl.rankN.pos' is saved per rank, for 4 ranks, 1 of them missing"
    assert "per-rank" not in saved(tmp_path / "none", {"ranking": 1, "rank_": 2, "brank3": 3})


def test_families_that_imply_another_number_of_ranks(tmp_path):
    loaders = {f"dataloader.dp_rank_{rank}": {"pos": rank} for rank in range(2)}
    for ranks, says in [
        (2, "for 2 ranks"),
        (4, "for 2 ranks, but 4 ranks wrote files: data-parallel size 2?"),
        (3, "for 2 ranks, but 3 ranks wrote files"),
        (1, "for 2 ranks, but 1 rank wrote files"),
    ]:
        found = saved(tmp_path / str(ranks), *[loaders] * ranks)["per-rank"]
        assert found == f"'dataloader.dp_rank_N.pos' is saved per rank, {says}"
    found = saved(tmp_path / "one", {"rank0": 1}, {})["per-rank"]
    assert found == "'rankN' is saved per rank, for 1 rank, but 2 ranks wrote files"


# R17
def test_state_of_each_rank_that_is_stored_once(tmp_path):
    states = [
        {"rng": {"python": (3, rank)}, "w": torch.zeros(1), "cuda_rng_state": torch.get_rng_state()} for rank in (0, 1)
    ]
    found = saved(tmp_path / "some", *states)["stored-once"]
    assert found.endswith(
        "1 entry like it are stored once, of 2 ranks: the same on all of them, or the other ranks' is lost"
    )
    sampler = [{"train": {"sampler": {"epoch": rank}}} for rank in range(2)]
    found = saved(tmp_path / "one", *sampler)["stored-once"]
    assert found.startswith("'train.sampler.epoch' is stored once, of 2 ranks")
    assert "stored-once" not in saved(tmp_path / "alone", sampler[0])
    family = [{f"dataloader.rank{rank}": 1, "rng": 2} for rank in range(2)]
    assert "stored-once" not in saved(tmp_path / "family", *family)
    others = {"model": {"random.weight": torch.zeros(2), "up.sampler": torch.zeros(2)}, "random_seed": 3, "order": 4}
    assert "stored-once" not in saved(tmp_path / "others", others, others)


# R29, R30
def test_whole_tensors_and_the_files_they_are_spread_over(tmp_path):
    replicas = {f"norm{i}": torch.ones(2) for i in range(8)}
    states = [{"w": Shard.of(torch.zeros(8, 2), rank, 4), **replicas} for rank in range(4)]
    found = saved(tmp_path / "spread", *states)["whole-tensors"]
    checkpoint = dcptool.open(tmp_path / "spread" / "c")
    n_files = len({checkpoint[fqn].chunks[0].item.file for fqn in replicas})
    assert n_files > 1
    assert found == (
        "8 of 9 tensors are stored whole, such as 'norm0': one rank's copy each, "
        f"spread over the files of {n_files} ranks"
    )
    found = kinds(save(tmp_path / "lowest", *states, lowest_rank=True))["whole-tensors"]
    assert found == "8 of 9 tensors are stored whole, such as 'norm0': one rank's copy"
    assert not saved(tmp_path / "alone", replicas)
    found = saved(tmp_path / "replicas", *[replicas] * 2)["whole-tensors"]
    assert found.startswith("8 of 8 tensors are stored whole, such as 'norm0'")
    assert not saved(tmp_path / "shards", *({"w": state["w"], "step": torch.tensor(1.0)} for state in states))


# R38
def test_keys_that_look_like_integers(tmp_path):
    import collections

    state = {"sched": {"milestones": collections.Counter({2: 1, 4: 1})}, "list": [{"lr": 1}, {"lr": 2}]}
    found = saved(tmp_path / "one", state)
    assert found == {"integer-keys": "keys under 'sched.milestones' look like integers; DCP stores them as text"}
    state |= {"seen": {-1: "a", 7: "b"}, 12: "c"}
    found = saved(tmp_path / "more", state)["integer-keys"]
    assert found.startswith("keys under 'sched.milestones' and in 2 other places look like integers")
    assert saved(tmp_path / "top", {3: 1})["integer-keys"].startswith("keys at top level look like")
    assert not saved(
        tmp_path / "none", {"model": {"layers.0.w": torch.zeros(1)}, "list": [{}, {"a": 1}], "007": 1, "²": 2}
    )
    assert "integer-keys" not in saved_pt(tmp_path, state)  # where they are integers still


def test_index_keyed_optimizers_are_noted_once(tmp_path):
    state = {"optim": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}}
    assert set(saved(tmp_path, state)) == {"index-keyed-optimizer"}


# R08
def test_a_prefix_of_all_names(tmp_path):
    inside = {"model": {"w": torch.zeros(2)}, "optim": {"state": {"w": {"step": torch.zeros(1)}}}, "step": 1}
    found = saved(tmp_path / "app", {"app": inside})
    assert found["common-prefix"] == "all names begin with 'app.'; --keys 'app.model.*' selects the model alone"
    assert "common-prefix" not in saved(tmp_path / "bare", inside)
    assert "common-prefix" not in saved(tmp_path / "model", {"app": {"model": inside["model"], "other": 1}})
    assert "common-prefix" not in saved(tmp_path / "optim", {"app": {"emb": {"w": torch.zeros(1)}, "optim": {"x": 1}}})
    assert "common-prefix" not in saved(tmp_path / "two", {"app": inside, "step": 1})


def test_megatrons_stacks_of_layers():
    found = kinds(FOREIGN / "megatron_tp2/iter_0000010")["layer-stacks"]
    assert found == "18 tensors hold 2 layers each, stacked along dim 0 with one box per layer (Megatron)"


def test_stacks_need_megatron_and_its_name_for_all_layers(tmp_path):
    names = ("decoder.layers.mlp.weight", "decoder.layers.0.bias", "other")
    states = [{name: Shard.of(torch.zeros(2, 3), rank, 2) for name in names} for rank in range(2)]
    assert "layer-stacks" not in saved(tmp_path, *states)
    (tmp_path / "c" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    found = kinds(tmp_path / "c")["layer-stacks"]
    assert found == "1 tensor holds 2 layers, stacked along dim 0 with one box per layer (Megatron)"


def test_views_in_a_pt_file(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {"a": base.clone(), "t": base.t().contiguous().t(), "step2": base.clone()[:, ::2], "row": base.clone()[1]}
    found = saved_pt(tmp_path, state)
    assert found == {
        "strided-tensors": "2 tensors are stored transposed or strided, such as 't'",
        "partial-storage": "1 tensor is only part of a larger storage, such as 'row': 16 of 48 bytes, from byte 16 on",
    }
    plain = {"a": base, "one": torch.ones(1, 3).t(), "empty": torch.zeros(0, 2), "scalar": torch.tensor(1), "n": 3}
    assert not saved_pt(tmp_path, plain)


def test_tensors_that_share_a_storage_in_a_pt_file(tmp_path):
    tied, flat = torch.zeros(4, 2), torch.zeros(6)
    found = saved_pt(tmp_path, {"emb": tied, "head": tied, "other": torch.zeros(2)})
    assert found == {
        "shared-storage": "1 storage is shared by several tensors: 'emb' and 'head' (the same values, as tied weights)"
    }
    state = {"a": flat[:2], "b": flat[2:4], "c": flat[4:], "emb": tied, "head": tied}
    found = saved_pt(tmp_path, state)
    assert set(found) == {"partial-storage", "shared-storage"}
    assert found["shared-storage"] == (
        "2 storages are shared by several tensors: 'a' and 'b' and 1 more (parts or views of it)"
    )
    assert dcptool.open(tmp_path / "m.pt").read("c").shape == (2,)
