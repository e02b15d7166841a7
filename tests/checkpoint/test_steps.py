"""Names of step directories."""

from __future__ import annotations

import pytest

from dcptool.checkpoint.steps import in_step_order, step_number

pytestmark = pytest.mark.torchfree

KNOWN = (
    "step_500 step-500 step500 iter_0000500 global_step500 global_step_500 checkpoint-500 checkpoint_500 "
    "epoch_1_step_500 epoch=1-step=500.ckpt step=500.ckpt ep1-ba500 500 000500"
).split()
OTHERS = (
    "tmp_step_500 old_500 step_500.tmp step-015x notes step_ -500 5e2 checkpoint step_500_final .step_500 "
    "pytorch_model_fsdp_0 optimizer_0 version_0 step_500\n"
).split(" ")


@pytest.mark.parametrize("name", KNOWN)
def test_known_names(name):
    assert step_number(name) == 500


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_left_alone(name):
    assert step_number(name) is None


def test_order_is_by_number():
    assert in_step_order(["step-10", "step-9", "notes", "step-100"]) == ["step-9", "step-10", "step-100"]
