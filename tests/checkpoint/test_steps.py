"""Names of step directories."""

from __future__ import annotations

import pytest

from dcptool.checkpoint.steps import common_pattern, in_step_order, is_rare, step_number, step_order

pytestmark = pytest.mark.torchfree

KNOWN = (
    "step_500 step-500 step500 iter_0000500 global_step500 global_step_500 checkpoint-500 checkpoint_500 "
    "epoch_1_step_500 epoch=1-step=500.ckpt step=500.ckpt ep1-ba500 500 000500 "
    "epoch=1-step=500-val_loss=0.12.ckpt epoch=1-step=500-v1.ckpt epoch=1-val_loss=-1.2e-05-step=500-v12.ckpt "
    "llama-epoch=1-step=500.ckpt hpc_ckpt_500.ckpt epoch_500 epoch500 dist_epoch_500 epoch=500.ckpt "
    "gpt--val_loss=2.1-step=500-consumed_samples=2400.0 gpt--val_loss=2.1-step=500-consumed_samples=2400.0-last "
    "my-model_2--loss=nan-epoch=0-consumed_samples=500.0-last"
).split()
OTHERS = (
    "tmp_step_500 old_500 step_500.tmp step-015x notes step_ -500 5e2 checkpoint step_500_final .step_500 "
    "pytorch_model_fsdp_0 optimizer_0 version_0 checkpoint-2-ws3 ep1-ba500-rank0.pt last.ckpt last-v1.ckpt "
    "loss=0.50.ckpt epoch=0-step=6-val old-epoch=1-step=500.ckpt epoch=1-step=500.ckpt.tmp epoch=1.5-step=x.ckpt "
    "released step=1.5 gpt--val_loss=2.1-step=500-EMA epoch=1-step=500-ws3.ckpt step=9999999999999999999 step_500\n"
).split(" ")


@pytest.mark.parametrize("name", KNOWN)
def test_known_names(name):
    assert step_number(name) == 500


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_left_alone(name):
    assert step_number(name) is None


def test_order_is_by_number():
    assert in_step_order(["step-10", "step-9", "notes", "step-100"]) == ["step-9", "step-10", "step-100"]


def test_a_release_of_megatron_is_iteration_zero():
    assert step_number("release") == 0
    assert is_rare("release")
    assert not is_rare("iter_0000010")


ORDERED = (
    ("epoch=0-step=2.ckpt", "epoch=0-step=2-v1.ckpt", "epoch=0-step=2-v10.ckpt", "epoch=0-step=3.ckpt"),
    ("ep1-ba900", "ep2-ba100"),
    ("epoch_9", "epoch_10"),
    ("a--val_loss=9.1-step=99-consumed_samples=800.0", "a--val_loss=2.1-step=299-consumed_samples=2400.0"),
    ("a--val_loss=2.1-step=299-consumed_samples=2400.0", "a--val_loss=2.1-step=299-consumed_samples=2400.0-last"),
    ("weights-at-900", "weights-at-1000"),
)


@pytest.mark.parametrize("names", ORDERED)
def test_order_is_by_epoch_step_and_version(names):
    assert sorted(set(names), key=step_order) == list(names)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ("weights-at-100 weights-at-200 logs", "weights-at-N"),
        ("my_model_step_1 my_model_step_0", "my_model_step_N"),
        ("t5@100 t5@200", "t5@N"),
        ("ckpt100 ckpt200", "ckptN"),
    ],
)
def test_names_that_differ_in_one_number_may_be_steps(names, pattern):
    found = common_pattern(names.split())
    assert str(found) == pattern
    assert found.number(names.split()[0]) == int("".join(filter(str.isdigit, names.split()[0][2:])))


@pytest.mark.parametrize(
    "names",
    [
        "weights-at-100",  # one name is no pattern
        "a1-b100 a1-b200 a2-b100",  # several numbers differ
        "a1-b100 a2-b200",
        "a-100 a-200 b-100 b-200",  # two patterns
        "pytorch_model_fsdp_0 pytorch_model_fsdp_1",  # parts of one checkpoint
        "unit_1 unit_2 unit_3",
        "old_500 old_600",
        "tmp_step_500 tmp_step_600",
        "step_500.tmp step_600.tmp",
        ".step_500 .step_600",
        "checkpoint-2-ws3 checkpoint-4-ws3",
        "llama-7b llama-13b",  # sizes, versions, copies for other numbers of ranks
        "qwen2 qwen3",
        "ckpt-ws48 ckpt-ws64",
        "seed_41 seed_42",
        "job-1001 job-1002",
    ],
)
def test_names_that_are_no_clear_pattern_are_left_alone(names):
    assert common_pattern(names.split()) is None
