"""diff and compare: every pair of forms of one state is equal, and whatever differs is found, counted and named."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcptool
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.dtypes import BY_NAME
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Extent, Payload, Record
from dcptool.checkpoint.format import Format
from dcptool.checkpoint.numbers import array_dtype
from dcptool.checkpoint.regions import contiguous_strides, intersect, volume
from dcptool.checkpoint.selection import Renaming
from dcptool.errors import LayoutError
from dcptool.ops.diff import arithmetic, sides, values
from dcptool.ops.diff.diff import DiffOptions, compare_checkpoints
from dcptool.ops.diff.pairing import likely_renames, pair
from dcptool.ops.diff.refinement import refinement
from dcptool.ops.diff.results import Difference, DiffReport, Known, Lone, Side, Values
from dcptool.render.diff import diff_text
from tests import damage
from tests.conftest import WHOLE, part, run

try:
    import torch
    from safetensors.torch import save_file

    from tests import ranks
except ImportError:  # then only what is marked torchfree runs
    torch = save_file = ranks = None

BITWISE = DiffOptions()

# Forms of one state.


def same_states():
    """Groups of foreign parts whose producers say that they hold the same."""
    groups = {}
    for found in WHOLE:
        facts = ("kind", "dtype", "shape", "sha256", "type", "repr_sha256")
        state = {fqn: [entry.get(fact) for fact in facts] for fqn, entry in found.expected.items()}
        groups.setdefault(json.dumps(state, sort_keys=True), []).append(found)
    return [(group[0], other) for group in groups.values() for other in group[1:]]


@pytest.mark.torchfree
@pytest.mark.parametrize(("one", "other"), same_states(), ids=lambda found: found.name)
def test_foreign_forms_of_one_state_are_equal(one, other):
    report = dcptool.compare(one.path, other.path)
    assert report.equal
    assert report.n_tensors + report.n_objects == len(one.expected)
    assert report.nbytes == sum(entry.get("nbytes", 0) for entry in one.expected.values() if entry["kind"] == "tensor")


@pytest.mark.torchfree
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("xver_t241", "xver_t2130"),
        ("dtypes_keys_t2130", "dtypes_keys_t241"),
        ("hsdp", "run_crashed/ckpt/step_100"),
        ("py313_t2130", "w_async"),
        ("fsdp1_t2130_orig", "fsdp1_t222_flat"),
        ("megatron_dp2_fpar/iter_0000010", "megatron_tp2/iter_0000010"),
    ],
)
def test_foreign_differences_are_those_the_producers_hashes_tell(one, other):
    one, other = part(one), part(other)
    report = dcptool.compare(one.path, other.path)
    both = one.expected.keys() & other.expected.keys()
    assert {entry.fqn for entry in report.only_in_a} == one.expected.keys() - both
    assert {entry.fqn for entry in report.only_in_b} == other.expected.keys() - both
    facts = ("shape", "dtype", "sha256", "repr_sha256", "type")
    different = {f for f in both if any(one.expected[f].get(x) != other.expected[f].get(x) for x in facts)}
    assert {difference.fqn_a for difference in report.differences} == different
    assert not report.unreadable
    assert not report.equal


def state():
    """A state with the kinds of values trainers save."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 12, generator=generator)
    return {
        "model": {
            "w": weight,
            "t": torch.randn(6, 4, generator=generator).t(),
            "h": torch.randn(5, 7, generator=generator).bfloat16(),
            "i": torch.arange(12, dtype=torch.int64),
            "b": torch.tensor([True, False, True]),
            "c": torch.randn(4, dtype=torch.complex64, generator=generator),
            "zero": torch.zeros(0, 3),
            "s": torch.tensor(2.5),
        },
        "optim": {"state": {"w": {"exp_avg": weight * 2}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        "rng": {"bytes": b"\x00\xff", "nested": ({"a": [1, None]}, "text"), "empty": {}},
        "step": 7,
    }


def flat_tensors():
    found = {f"model.{name}": tensor.contiguous() for name, tensor in state()["model"].items()}
    return {**found, "optim.state.w.exp_avg": state()["optim"]["state"]["w"]["exp_avg"]}


def sharded(rank, count, dim):
    whole = state()
    shards = {
        name: ranks.Shard.of(value, rank, count, min(dim, value.ndim - 1)) if value.ndim else value
        for name, value in whole["model"].items()
    }
    return {**whole, "model": shards}


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The same state in every form, by name."""
    folder = tmp_path_factory.mktemp("forms")
    ranks.save(folder / "one", state())
    ranks.save(folder / "four", *(sharded(rank, 4, 0) for rank in range(4)))
    ranks.save(folder / "columns", *(sharded(rank, 3, 1) for rank in range(3)), single_file_per_rank=False)
    torch.save(state(), folder / "whole.pt")
    save_file(flat_tensors(), folder / "flat.safetensors")
    return folder


@pytest.mark.parametrize("name", ["four", "columns", "whole.pt", "flat.safetensors"])
@pytest.mark.parametrize("first", ["one", "columns"])
def test_every_form_of_one_state_is_equal_to_every_other(forms, first, name):
    for pair_ in ((first, name), (name, first)):
        report = dcptool.compare(forms / pair_[0], forms / pair_[1])
        assert report.equal, report
        assert report.n_tensors == 9
    excused = {entry.excused for entry in (*report.only_in_a, *report.only_in_b)}
    assert excused <= {"DCP stores no empty dict", "safetensors holds no objects"}
    if name == "flat.safetensors":
        assert "only on one side: 5 objects (safetensors holds no objects)" in diff_text(report, 120).splitlines()[0]


def test_layouts_are_compared_when_asked_for(forms):
    options = DiffOptions(layout=True, keys=("model.w", "model.s"))
    report = dcptool.compare(forms / "one", forms / "four", options)
    assert report.differences == (Difference("layout", "model.w", "model.w", "whole", "Shard(0) ×4"),)
    assert dcptool.compare(forms / "four", forms / "four", options).equal
    assert "1 layout" in diff_text(report, 120)


# What differs.


def saved(folder, name, **changes):
    """A one-rank checkpoint of a small state with some entries changed, or taken out where the new value is None."""
    whole = {
        "model.a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "model.b": torch.tensor([1.0, -0.0, math.nan, math.inf]),
        "model.i": torch.tensor([2**62, 5]),
        "optim": {"param_groups": [{"lr": 0.1}]},
        "info": {"list": [1, 2.0, "x"], "tuple": (1, 2)},
        **changes,
    }
    return ranks.save(folder / name, {key: value for key, value in whole.items() if value is not None})


def only(report):
    """The one difference of a report."""
    (difference,) = report.differences
    assert not report.equal
    assert not report.unreadable
    return difference


def compared(tmp_path, options=BITWISE, /, **changes):
    one = tmp_path / "one" if (tmp_path / "one").exists() else saved(tmp_path, "one")
    return dcptool.compare(one, saved(tmp_path, "other", **changes), options)


def test_one_element(tmp_path):
    changed = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    changed[1, 2] += 0.5
    found = only(compared(tmp_path, **{"model.a": changed}))
    assert (found.kind, found.fqn_a) == ("values", "model.a")
    got = found.values
    assert (got.n_different, got.n_elements, got.first, got.first_a, got.first_b) == (1, 12, (1, 2), 6.0, 6.5)
    assert (got.max_abs, got.max_rel, got.same_multiset) == (0.5, 0.5 / 6.5, False)
    assert got.a.norm == pytest.approx(np.linalg.norm(np.arange(12)))
    assert got.b.mean == pytest.approx(66.5 / 12)


def test_a_nan_a_signed_zero_and_an_infinity(tmp_path):
    nan = only(compared(tmp_path, **{"model.b": torch.tensor([math.nan, -0.0, math.nan, math.inf])}))
    assert (nan.values.n_different, nan.values.first, nan.values.max_abs) == (1, (0,), 0)
    assert (nan.values.a.n_nan, nan.values.b.n_nan) == (1, 2)
    shutil.rmtree(tmp_path / "other")
    zero = only(compared(tmp_path, **{"model.b": torch.tensor([1.0, 0.0, math.nan, math.inf])}))
    assert (zero.values.n_different, zero.values.first, zero.values.max_abs, zero.values.max_rel) == (1, (1,), 0, 0)
    shutil.rmtree(tmp_path / "other")
    other_nan = torch.tensor([0x3F800000, -0x80000000, 0x7FC00001, 0x7F800000], dtype=torch.int64).int()
    report = compared(tmp_path, **{"model.b": other_nan.view(torch.float32)})
    assert only(report).values.first == (2,)
    assert dcptool.compare(tmp_path / "one", tmp_path / "other", DiffOptions(nan_equal=True)).equal
    assert not dcptool.compare(tmp_path / "one", tmp_path / "other", DiffOptions(rtol=0.1)).equal


def test_tolerance(tmp_path):
    changed = torch.arange(12, dtype=torch.float32).reshape(3, 4) * (1 + 1e-6)
    report = compared(tmp_path, DiffOptions(rtol=1e-5), **{"model.a": changed})
    assert report.equal
    assert report.n_within == 1
    assert "1 within the tolerance" in diff_text(report, 120)
    got = only(dcptool.compare(tmp_path / "one", tmp_path / "other", DiffOptions(atol=6e-6))).values
    assert 0 < got.n_different < 12


def test_integers_are_compared_exactly(tmp_path):
    got = only(compared(tmp_path, **{"model.i": torch.tensor([2**62 - 1, 5])})).values
    assert (got.n_different, got.max_abs, got.first_a, got.first_b) == (1, 1, 2**62, 2**62 - 1)
    assert isinstance(got.max_abs, int)


def test_dtypes(tmp_path):
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    found = only(compared(tmp_path, **{"model.a": whole.double()}))
    assert (found.kind, found.a, found.b, found.values.n_different) == ("dtype", "float32", "float64", 0)
    shutil.rmtree(tmp_path / "other")
    shutil.rmtree(tmp_path / "one")
    fine = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    saved(tmp_path, "one", **{"model.a": fine})
    rounded = only(compared(tmp_path, **{"model.a": fine.bfloat16()}))
    assert rounded.values.n_different > 0
    assert (rounded.values.compared_as, rounded.values.rounded) == ("float32", "bfloat16")
    shutil.rmtree(tmp_path / "other")
    other = fine.bfloat16()
    other[2, 3] += 1
    changed = compared(tmp_path, **{"model.a": other})
    assert only(changed).values.rounded == ""
    assert "12 of 12 differ as float32, max abs" in diff_text(changed, 120)


def test_shape_and_kind(tmp_path):
    shape = only(compared(tmp_path, **{"model.a": torch.zeros(3, 5)}))
    assert (shape.kind, shape.a, shape.b) == ("shape", "[3, 4]", "[3, 5]")
    shutil.rmtree(tmp_path / "other")
    report = compared(tmp_path, **{"model.a": 3.0})
    kind = only(report)
    assert (kind.kind, kind.a, kind.b) == ("kind", "tensor float32 [3, 4]", "object")
    assert diff_text(report, 120).startswith("different: 1 kind\n")


@pytest.mark.parametrize(
    ("changes", "fqn", "where", "a", "b"),
    [
        ({"optim": {"param_groups": [{"lr": 0.2}]}}, "optim.param_groups.0.lr", "", "0.1", "0.2"),
        ({"optim": {"param_groups": [{"lr": 1}]}}, "optim.param_groups.0.lr", "", "0.1", "1"),
        ({"info": {"list": [1, 2.5, "x"], "tuple": (1, 2)}}, "info.list", "[1]", "[1, 2.0, 'x']", "[1, 2.5, 'x']"),
        ({"info": {"list": [1, 2, "x"], "tuple": (1, 2)}}, "info.list", "[1]", "[1, 2.0, 'x']", "[1, 2, 'x']"),
        ({"info": {"list": [1, 2.0, "x"], "tuple": (1, 2, 3)}}, "info.tuple", "", "2 values", "3 values"),
        ({"info": {"list": [1, 2.0, "x"], "tuple": [1, 2]}}, "info.tuple", "", "(1, 2)", "[1, 2]"),
    ],
)
def test_objects(tmp_path, changes, fqn, where, a, b):
    report = compared(tmp_path, **changes)
    assert only(report) == Difference("object", fqn, fqn, a, b, where)
    assert diff_text(report, 120).startswith("different: 1 object\n")


class Settings:
    """A class that dcptool knows nothing of."""

    def __init__(self, rate, table):
        self.rate, self.table = rate, table


def test_opaque_objects_are_compared_as_graphs_with_their_tensors(tmp_path):
    large = torch.arange(5000, dtype=torch.float32).reshape(50, 100)
    saved(tmp_path, "one", o=Settings(0.5, {"t": large, "s": {1, 2}}), n=(large, "x"))
    same = saved(tmp_path, "same", o=Settings(0.5, {"t": large.clone(), "s": {2, 1}}), n=(large.clone(), "x"), step=1)
    report = dcptool.compare(tmp_path / "one", same, DiffOptions(exclude=("step",)))
    assert report.equal
    assert report.n_objects == 5
    changed = large.clone()
    changed[40, 3] = -1
    other = saved(tmp_path, "other", o=Settings(0.25, {"t": large, "s": {1, 2}}), n=(changed, "x"))
    report = dcptool.compare(tmp_path / "one", other)
    found = {difference.fqn_a: (difference.where, difference.a, difference.b) for difference in report.differences}
    assert found == {
        "o": ("['rate']", "0.5", "0.25"),
        "n": ("[0]", "tensor float32 [50, 100]", "tensor float32 [50, 100] of other values"),
    }
    torch.save({"o": Settings(0.5, {"t": large, "s": {1, 2}}), "n": (large, "x")}, tmp_path / "o.pt")
    assert dcptool.compare(tmp_path / "one", tmp_path / "o.pt", DiffOptions(keys=("o", "n"))).equal


def test_the_same_values_in_another_order_are_named(tmp_path):
    whole = torch.randn(40, 50, generator=torch.Generator().manual_seed(2))
    shuffled = whole[torch.randperm(40, generator=torch.Generator().manual_seed(3))]
    saved(tmp_path, "one", **{"model.a": whole})
    report = compared(tmp_path, **{"model.a": shuffled})
    got = only(report).values
    assert got.same_multiset
    assert got.a.norm == pytest.approx(got.b.norm)
    assert "same values in another order" in diff_text(report, 160)
    shuffled = shuffled.clone()
    shuffled[0, 0] += 1e-3
    shutil.rmtree(tmp_path / "other")
    assert not only(compared(tmp_path, **{"model.a": shuffled})).values.same_multiset


def test_missing_and_unexpected_keys_hyper_parameters_and_extra_states(tmp_path):
    extra = {f"model.l{index}._extra_state": b"" for index in range(30)}
    groups = [{"lr": 0.1, "decoupled_weight_decay": False}] * 2
    report = compared(
        tmp_path, **{"model.b": None, "optim": {"param_groups": groups}, **extra, "new.c": torch.zeros(2)}
    )
    text = diff_text(report, 120)
    assert text.startswith("different: 1 key only in A, 34 keys only in B\n")
    assert "only in A: 1 key\n  model.b  float32 [4]" in text
    assert "optimizer hyper-parameters only in B: decoupled_weight_decay ×2, lr" in text
    assert "_extra_state only in B: 30 entries" in text
    assert "only in B: 1 key\n  new.c  float32 [2]" in text
    topics = {entry.topic for entry in report.only_in_b}
    assert topics == {"", "hyper-parameter", "extra-state"}


def test_a_subset_is_said(tmp_path):
    report = compared(tmp_path, **{"model.b": None})
    (note,) = report.notes
    assert note.message == "B is a strict subset of A: all it holds is in A with the same values"


def test_nesting_differs_and_is_only_noted(tmp_path):
    moment = torch.ones(3)
    ranks.save(tmp_path / "nested", {"optimizer": {"state": {"m.w": {"exp_avg": moment}}}})
    ranks.save(tmp_path / "flat", {"optimizer": {"state.m.w.exp_avg": moment}})
    report = dcptool.compare(tmp_path / "nested", tmp_path / "flat")
    assert report.equal
    (note,) = report.notes
    assert note.kind == "nesting-differs"
    assert "['optimizer']['state']['m.w']['exp_avg'] in A, ['optimizer']['state.m.w.exp_avg'] in B" in note.message


@pytest.mark.torchfree
def test_containers_of_before_flattening_are_noted():
    report = dcptool.compare(part("w_async").path, part("w_noflatten").path)
    assert [note.kind for note in report.notes] == ["flattening-differs"]


@pytest.mark.torchfree
def test_what_a_format_cannot_hold_is_said_and_counts_for_nothing():
    report = dcptool.compare(part("w_threads3").path, part("hf_sharded").path)
    assert [(entry.fqn, entry.excused) for entry in report.only_in_a if not entry.excused] == [("zeros", "")]
    assert "only in A without being a difference: 3 objects (safetensors holds no objects)" in diff_text(report, 120)


# Names.


def test_a_prefix_is_found_said_and_taken_as_meant_when_asked(tmp_path):
    layers = {f"layers.{index}.w": torch.full((2, 2), float(index)) for index in range(5)}
    one = ranks.save(tmp_path / "bare", layers)
    other = ranks.save(tmp_path / "full", {"model": layers, "step": torch.tensor(3)})
    report = dcptool.compare(one, other)
    assert not report.equal
    assert not report.differences
    assert (report.alignment.prefix_a, report.alignment.prefix_b, report.alignment.n_aligned) == ("", "model.", 5)
    text = diff_text(report, 120)
    assert text.startswith("different: names of 5 entries, 1 key only in B\n")
    assert "--strip-prefix-b model." in text
    meant = DiffOptions(strip_prefix_b="model.", keys=("model.*",))
    assert dcptool.compare(one, other, meant).equal
    assert not dcptool.compare(one, other, meant._replace(keys=())).equal
    with pytest.raises(LayoutError, match="no entry matches 'nothing'"):
        dcptool.compare(one, other, DiffOptions(keys=("nothing",)))
    typo = dcptool.compare(one, one, DiffOptions(strip_prefix_a="modle.", strip_prefix_b="layers."))
    assert [note.message for note in typo.notes if note.kind == "unused-prefix"] == [
        "no name of A begins with 'modle.': --strip-prefix-a did nothing"
    ]


def test_wrappers_in_names_are_seen_through(tmp_path):
    one = ranks.save(tmp_path / "bare", {"a.0.w": torch.ones(2), "a.1.w": torch.zeros(2), "b": torch.ones(1)})
    wrapped = {"_orig_mod.a.0.w": torch.ones(2), "_orig_mod.a._checkpoint_wrapped_module.1.w": torch.zeros(2)}
    other = ranks.save(tmp_path / "wrapped", {**wrapped, "b": torch.ones(1)})
    report = dcptool.compare(one, other)
    assert report.alignment.wrappers == ("_orig_mod", "_checkpoint_wrapped_module")
    assert report.alignment.n_aligned == 2
    assert "different: names of 2 entries; all values equal" in diff_text(report, 120)


def tensors(*names, shape=(2, 2)):
    return [Known(name, "tensor", "float32", shape) for name in names]


@pytest.mark.torchfree
def test_both_sides_may_have_a_prefix_and_pairs_by_name_come_first():
    names = [f"layers.{index}.w" for index in range(4)]
    a = tensors("step", *(f"model.{name}" for name in names), *(f"ema.{name}" for name in names))
    b = tensors("step", *(f"model.{name}" for name in names), *(f"model_ema.{name}" for name in names))
    paired = pair(a, b, DiffOptions())
    assert (paired.alignment.prefix_a, paired.alignment.prefix_b) == ("ema.", "model_ema.")
    assert [y.fqn for x, y in paired.both if x.fqn == "model.layers.2.w"] == ["model.layers.2.w"]
    assert not paired.only_in_a
    with pytest.raises(LayoutError, match="would both be 'w'"):
        pair(tensors("w", "m.w"), b, DiffOptions(strip_prefix_a="m."))


@pytest.mark.torchfree
def test_likely_renames():
    a = [*tensors("enc.layers.0.w", "enc.layers.1.w", "norm.gamma"), *tensors("head", shape=(3,))]
    b = [*tensors("enc.blocks.0.w", "enc.blocks.1.w", "norm.weight"), *tensors("lm.head", shape=(4,))]
    assert [(x.fqn, y.fqn) for x, y in likely_renames(a, b)] == [
        ("enc.layers.0.w", "enc.blocks.0.w"),
        ("enc.layers.1.w", "enc.blocks.1.w"),
        ("norm.gamma", "norm.weight"),
    ]


def test_names_may_be_given_as_a_conversion_changed_them(forms, tmp_path):
    names = {"model.w": "other.weight", "model.i": "index"}
    renaming = Renaming(rename=tuple(names.items()))
    chosen = DiffOptions(keys=tuple(names))
    dcptool.convert(forms / "four", tmp_path / "x.pt", "torch", dcptool.ConvertOptions(chosen.keys, renaming=renaming))
    checkpoints = dcptool.open(forms / "four"), dcptool.open(tmp_path / "x.pt")
    assert compare_checkpoints(*checkpoints, chosen, names=names).equal
    assert not compare_checkpoints(*checkpoints, chosen).equal


def test_renamed_tensors_are_compared(tmp_path):
    same = {f"keep.{index}": torch.ones(1) for index in range(4)}
    one = ranks.save(tmp_path / "one", {**same, "x.old.w": torch.ones(3), "x.old.b": torch.ones(5)})
    other = ranks.save(tmp_path / "other", {**same, "x.new.w": torch.ones(3), "y.b": torch.zeros(5), "z": 1})
    report = dcptool.compare(one, other)
    assert [(r.fqn_a, r.fqn_b, r.equal) for r in report.renames] == [
        ("x.old.w", "x.new.w", True),
        ("x.old.b", "y.b", False),
    ]
    assert "x.old.w → x.new.w  (equal values)" in diff_text(report, 120)


# What cannot be read.


def test_a_damaged_item_is_named_and_the_rest_compared(forms, tmp_path):
    folder = damage.copy(forms / "four", tmp_path / "damaged")
    checkpoint = dcptool.open(folder)
    entry = checkpoint.tensors["model.w"]
    chunk = entry.chunks[2]
    record = checkpoint.payload(entry, chunk).record
    damage.flip_byte(folder / chunk.item.file, chunk.item.byte_offset + record.byte_offset + 9)
    for one, other, letter in ((forms / "one", folder, "B"), (folder, forms / "one", "A")):
        report = dcptool.compare(one, other)
        assert not report.equal
        assert not report.differences
        (finding,) = report.unreadable
        assert (finding.kind, finding.fqn, finding.offsets) == ("unreadable", "model.w", chunk.offsets)
        assert finding.message.startswith(f"{letter}: ")
        assert "bytes were changed since they were saved" in finding.message
        assert diff_text(report, 120).startswith("not readable: 1 entry; nothing else differs")
    (folder / "__2_0.distcp").unlink()
    report = dcptool.compare(forms / "one", folder)
    assert {finding.fqn for finding in report.unreadable} >= {"model.w", "model.t", "model.h"}
    assert not report.differences


def test_a_git_lfs_pointer_is_named(forms, tmp_path):
    folder = damage.copy(forms / "four", tmp_path / "clone")
    damage.leave_lfs_pointer(folder / "__1_0.distcp")
    report = dcptool.compare(forms / "one", folder)
    assert report.unreadable
    for finding in report.unreadable:
        assert finding.message.startswith(f"B: {finding.fqn!r}: __1_0.distcp is a Git LFS pointer, not the file itself")
        assert finding.next_step == "Run git lfs pull there."


def test_a_storage_that_many_tensors_share_is_checked_once(tmp_path, monkeypatch):
    flat = torch.arange(400.0)
    for name, values_ in (("a.pt", flat), ("b.pt", flat + 1)):
        torch.save({f"w{index}": values_[4 * index : 4 * index + 4] for index in range(100)}, tmp_path / name)
    checked, check_whole = [], sides.check_whole
    monkeypatch.setattr(sides, "check_whole", lambda *args: (checked.append(args), check_whole(*args))[1])
    assert len(dcptool.compare(tmp_path / "a.pt", tmp_path / "b.pt").differences) == 100
    assert len(checked) == 2
    damage.flip_byte(tmp_path / "b.pt", (tmp_path / "b.pt").read_bytes().index((flat + 1).numpy().tobytes()) + 3)
    assert len(dcptool.compare(tmp_path / "a.pt", tmp_path / "b.pt").unreadable) == 100


def test_damaged_objects_and_holes_are_findings(tmp_path):
    one, other = saved(tmp_path, "one"), saved(tmp_path, "other")
    item = dcptool.open(other).objects["info.tuple"].item
    pickled = (other / item.file).read_bytes().index(b"\x80\x02", item.byte_offset)
    damage.flip_byte(other / item.file, pickled + 4)
    report = dcptool.compare(one, other)
    assert [finding.fqn for finding in report.unreadable] == ["info.tuple"]

    def shrink(metadata):
        stored = metadata.state_dict_metadata["model.a"]
        stored.size = torch.Size((4, 4))

    for folder in (one, other):
        damage.edit_metadata(folder, shrink)
    report = dcptool.compare(one, other, DiffOptions(keys=("model.*",)))
    assert [finding.fqn for finding in report.unreadable] == ["model.a"]
    assert "no chunk holds the [1, 4] elements at [3, 0]" in report.unreadable[0].message


# Streaming.


class Memory:
    """A checkpoint of tensors in memory, cut into chunks, some stored transposed and some with gaps before them."""

    def __init__(self, arrays, boxes, dtype, transposed=False):
        self.items, entries, table = {}, {}, ChunkTable()
        self.transposed = transposed
        for fqn, array in arrays.items():
            mark = table.mark()
            for offsets, sizes in boxes[fqn]:
                there = array[(*(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True)), ...)]
                data = (there.T if transposed else there).tobytes()
                item = Extent(f"{len(self.items)}", 0, len(data))
                self.items[item.file] = data
                table.add(offsets, sizes, item)
            entries[fqn] = TensorEntry(fqn, dtype, array.shape, None, table.chunks_since(mark, array.ndim))
        self.piece_nbytes = 1 << 20
        self.checkpoint = Checkpoint(
            "memory", "", Format("memory", "nothing"), "in memory", (), entries, {}, table, self, self
        )

    def payload(self, entry, chunk, item):
        strides = contiguous_strides(chunk.sizes)
        if self.transposed:
            strides = tuple(reversed(contiguous_strides(tuple(reversed(chunk.sizes)))))
        return Payload(Record(item, 0, item.nbytes, "data/0", None), entry.dtype, chunk.sizes, strides)

    def read_into(self, record, byte_offset, out):
        out[:] = self.items[record.item.file][byte_offset : byte_offset + len(out)]


@st.composite
def cuts(draw, shape):
    """Boxes that tile a shape: cut along one dimension after the other, each part on its own."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        offsets, sizes = boxes.pop(index)
        at = draw(st.integers(0, sizes[dim]))
        for start, size in ((0, at), (at, sizes[dim] - at)):
            boxes.append(
                (
                    (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                    (*sizes[:dim], size, *sizes[dim + 1 :]),
                )
            )
    return draw(st.permutations(list(dict.fromkeys(boxes))))


@st.composite
def pairs(draw):
    """Two checkpoints of one tensor in layouts of their own, its dtype, and where an element was flipped, if so."""
    dtype = draw(st.sampled_from(["float32", "int64", "bfloat16", "bool", "complex128", "float8_e5m2", "complex32"]))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    form = array_dtype(dtype)
    seed = np.random.default_rng(draw(st.integers(0, 9)))
    data = seed.integers(0, 2 if dtype == "bool" else 256, volume(shape) * form.itemsize, dtype=np.uint8)
    one = np.frombuffer(data.tobytes(), form).reshape(shape)
    other, index = one.copy(), None
    if draw(st.booleans()):
        index = tuple(draw(st.integers(0, size - 1)) for size in shape)
        flat = other.reshape(-1).view(np.uint8)
        flat[int(np.ravel_multi_index(index, shape)) * form.itemsize if shape else 0] ^= 1
    sides = (Memory({"w": array}, {"w": draw(cuts(shape))}, dtype, draw(st.booleans())) for array in (one, other))
    return *sides, index


@settings(max_examples=80)
@given(pairs(), st.integers(1, 9))
def test_random_layouts_of_one_tensor_are_equal_and_one_flip_is_found(case, band_elements):
    one, other, index = case
    one.piece_nbytes = other.piece_nbytes = 16 * band_elements
    report = dcptool.compare(one.checkpoint, other.checkpoint, DiffOptions(threads=1))
    assert report.equal == (index is None)
    if index is not None:
        got = only(report).values
        assert (got.n_different, got.first, got.same_multiset) == (1, index, False)


@given(st.tuples(st.integers(1, 7), st.integers(1, 7)).flatmap(lambda shape: st.tuples(cuts(shape), cuts(shape))))
def test_the_refinement_is_every_intersection_once(case):
    sides = []
    for boxes in case:
        table = ChunkTable()
        for offsets, sizes in boxes:
            table.add(offsets, sizes, None)
        sides.append(table.chunks_since((0, 0), 2))
    expected = {(i, j, box) for i, x in enumerate(case[0]) for j, y in enumerate(case[1]) if (box := intersect(x, y))}
    found = list(refinement(*sides))
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_overlapping_chunks_are_read_as_read_does():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    boxes = [((0, 0), (2, 4)), ((1, 0), (2, 4))]
    one = Memory({"w": array}, {"w": boxes}, "float32")
    other = Memory({"w": array}, {"w": [((0, 0), (3, 4))]}, "float32", True)
    assert dcptool.compare(one.checkpoint, other.checkpoint).equal


def test_memory_is_that_of_the_threads_buffers(monkeypatch):
    made = []

    class Counted(values.Buffers):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            made.append(nbytes)

    monkeypatch.setattr(values, "Buffers", Counted)
    array = np.zeros((1 << 12, 1 << 10), np.float32)  # 16 MiB
    changed = array.copy()
    changed[3000, 7] = 1
    whole, rows = [((0, 0), array.shape)], [((row, 0), (1 << 10, 1 << 10)) for row in range(0, 1 << 12, 1 << 10)]
    names = [f"w{index}" for index in range(3)]
    one = Memory(dict.fromkeys(names, array), dict.fromkeys(names, whole), "float32")
    other = Memory({**dict.fromkeys(names, array), "w2": changed}, dict.fromkeys(names, rows), "float32")
    other.piece_nbytes = 64 << 20
    tracemalloc.start()
    report = dcptool.compare(one.checkpoint, other.checkpoint, DiffOptions(threads=3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert only(report).values.first == (3000, 7)
    assert len(made) <= 3
    assert set(made) == {values.MAX_BOX_NBYTES}
    assert peak < 3 * 5 * values.MAX_BOX_NBYTES  # two boxes and what is computed of slices, and windows between


def test_progress_counts_every_byte_once(forms):
    told = []
    report = dcptool.compare(forms / "one", forms / "four", progress=told.append)
    assert sum(told) == report.nbytes > 0


# Arithmetic.


@pytest.mark.torchfree
@pytest.mark.parametrize("dtype", [dtype.name for dtype in BY_NAME.values() if dtype.numpy])
def test_every_dtype_compares_by_bits(dtype):
    form = array_dtype(dtype)
    data = np.arange(64, dtype=np.uint8) % 2 if dtype == "bool" else np.arange(64, dtype=np.uint8)
    one = data.view(form)
    other = one.copy()
    other.view(np.uint8)[-1] ^= 1
    errors = arithmetic.compare_arrays(one, other, dtype, dtype, DiffOptions())
    assert (errors.n_different, errors.first) == (1, len(one) - 1)
    assert errors.bits_a != errors.bits_b
    shuffled = one[::-1].copy()
    errors = arithmetic.compare_arrays(one, shuffled, dtype, dtype, DiffOptions())
    assert errors.bits_a == errors.bits_b
    assert errors.n_different > 0
    scratch = np.empty(8, bool)
    assert arithmetic.same_bits(one, one.copy(), scratch)
    assert not arithmetic.same_bits(one, other, scratch)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=20))
def test_errors_are_numpys(rows):
    one, other = np.array(rows, np.float32).T.copy()
    errors = arithmetic.compare_arrays(one, other, "float32", "float32", DiffOptions())
    different = one.view("u4") != other.view("u4")
    assert errors.n_different == different.sum()
    finite = np.isfinite(one) & np.isfinite(other)
    if errors.n_different and finite.any():
        distance = np.abs(one[finite].astype(float) - other[finite])
        scale = np.maximum(np.abs(one[finite]), np.abs(other[finite])).astype(float)
        assert errors.max_abs == distance.max()
        assert errors.max_rel == max(d / s if s else 0 for d, s in zip(distance, scale, strict=True))
    tolerant = arithmetic.compare_arrays(one, other, "float32", "float32", DiffOptions(rtol=0.5, atol=1.0))
    with np.errstate(all="ignore"):
        wide = one.astype(float), other.astype(float)
        assert tolerant.n_different == (different & ~np.isclose(*wide, rtol=0.5, atol=1.0)).sum()


@pytest.mark.torchfree
def test_dtypes_of_a_pair_have_a_common_one():
    common = arithmetic.common_dtype
    assert common("bfloat16", "float8_e4m3fn") == "float32"
    assert common("int8", "float32") == "float32"
    assert common("complex32", "float32") == "complex64"
    assert common("qint32", "int32") is None
    assert common("qint32", "qint32") == "qint32"


# A live state dict.


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_compare_with_a_live_state_of_dtensors(tmp_path, one_process):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    live = {
        "model": {"w": distribute_tensor(torch.randn(8, 2), mesh, [Shard(0)]), "deep": {"b": torch.zeros(3)}},
        "layer": layer,
        "optimizer": optimizer,
        "list": [torch.ones(1), {"x": 1}],
        "plain": [1, 2],
        "empty": {},
        "array": np.zeros(3),
        "step": 5,
    }
    dcp.save(live, checkpoint_id=tmp_path / "ckpt")
    report = dcptool.compare(live, tmp_path / "ckpt")
    assert report.equal, report
    assert not report.values_compared
    assert "values were not compared" in diff_text(report, 120)
    live["model"]["w"] = distribute_tensor(torch.randn(9, 2), mesh, [Shard(0)])
    live["model"]["deep"] = {"b": torch.zeros(3, dtype=torch.bfloat16), "new": torch.zeros(1)}
    live["step"] = torch.tensor(5)
    del live["plain"]
    report = dcptool.compare(live, dcptool.open(tmp_path / "ckpt"))
    assert {(d.kind, d.fqn_a, d.a, d.b) for d in report.differences} == {
        ("shape", "model.w", "[9, 2]", "[8, 2]"),
        ("dtype", "model.deep.b", "bfloat16", "float32"),
        ("kind", "step", "tensor int64 []", "object"),
    }
    assert [entry.fqn for entry in report.only_in_a] == ["model.deep.new"]
    assert [entry.fqn for entry in report.only_in_b] == ["plain"]


def test_live_names_that_collide_are_refused(forms):
    with pytest.raises(LayoutError, match=r"would both be named 'a\.b'"):
        dcptool.compare({"a.b": 1, "a": {"b": 2}}, forms / "one")


def test_a_live_state_is_flattened_as_torch_does(tmp_path):
    odd = {"a": {0: torch.ones(1), "t": (torch.ones(1), 2)}, "l": [[1, [torch.ones(2)]], 3], "e": [], "d": [{}, 1]}
    ranks.save(tmp_path / "odd", odd)
    assert dcptool.compare(odd, tmp_path / "odd").equal


# The command.


def test_exit_codes_and_forms_of_output(forms, tmp_path):
    assert run("diff", forms / "one", forms / "four").returncode == 0
    other = saved(tmp_path, "other")
    done = run("diff", forms / "one", other, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["schema"], document["equal"], document["values_compared"]) == (1, False, True)
    quiet = run("diff", forms / "one", other, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, "", "")
    assert run("diff", forms / "one", tmp_path / "nowhere").returncode == 3
    assert run("diff", forms / "one").returncode == 2
    for number in ("-1", "nan", "inf", "x"):
        done = run("diff", forms / "one", other, "--rtol", number)
        assert done.returncode == 2
        assert f"'{number}' is no tolerance; write a number such as 1e-6" in done.stderr


def test_json_has_a_form_for_every_number(tmp_path, capsys):
    from dcptool.render.diff import diff_json

    changed = {"model.b": torch.tensor([1.0, -0.0, 1.0, math.inf]), "c": torch.tensor([1j])}
    saved(tmp_path, "one", c=torch.tensor([2j]))
    report = compared(tmp_path, **changed)
    document = json.loads(json.dumps(diff_json(report), allow_nan=False))
    by_name = {difference["fqn_a"]: difference["values"] for difference in document["differences"]}
    assert (by_name["model.b"]["first_a"], by_name["model.b"]["a"]["n_nan"]) == ("nan", 1)
    assert (by_name["c"]["first_a"], by_name["c"]["max_abs"]) == ("2j", 1.0)


@pytest.mark.torchfree
def test_thousands_of_differences_stay_readable():
    side = Side("a", "dcp", "torch DCP", 9000, 0, 1)
    found = Values("float32", 10, 3, 0.5, 0.25, (1,), 1.0, 1.5)
    names = [f"layers.{layer}.experts.{expert}.{kind}" for layer in range(30) for expert in range(50) for kind in "abc"]
    differences = [Difference("values", name, name, "float32", "float32", values=found) for name in names]
    differences += [Difference("dtype", f"o.{name}", f"o.{name}", "float32", "bfloat16") for name in names]
    lone = tuple(Lone(f"x.{name}", "tensor", "float32", (2,), "") for name in names)
    odd = tuple(Lone(f"odd{name}x", "object", "", (), "") for name in names)
    report = DiffReport(side, side, 9000, 0, 1, lone, odd, (), tuple(differences), None, 0, (), (), True)
    text = diff_text(report, 120)
    assert text.startswith("different: 9,000 tensors, 4,500 keys only in A, 4,500 keys only in B\n")
    assert "layers.{0–29}.experts.{0–49}.a  ×1,500" in text
    assert "4,500 of 15,000" in text
    assert len(text.splitlines()) < 80
    assert max(map(len, text.splitlines())) <= 120
