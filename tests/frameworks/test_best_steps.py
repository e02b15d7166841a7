"""Which step its trainer calls the best, read without executing anything."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest

from dcptool.runs.best import best_steps
from dcptool.runs.directory import find_runs
from dcptool.storage import locate
from tests.conftest import FOREIGN
from tests.run_steps import steps


def best_of(folder):
    [run] = find_runs(locate(folder))
    return best_steps(run)


@pytest.fixture
def trainer(tmp_path):
    """Three steps of the Trainer; the second and third say that the first is the best."""
    for number in (10, 20, 30):
        folder = tmp_path / "run" / f"checkpoint-{number}"
        shutil.copytree(FOREIGN / "trainer_fsdp2" / "checkpoint-2", folder)
        says(folder, "out/checkpoint-10" if number > 10 else None)
    return tmp_path / "run"


def says(step, best):
    state = json.loads((step / "trainer_state.json").read_text())
    (step / "trainer_state.json").write_text(json.dumps({**state, "best_model_checkpoint": best}))


@pytest.mark.torchfree
class TestTrainer:
    def test_the_newest_record_counts(self, trainer):
        assert best_of(trainer).named == {"checkpoint-10": "the best by checkpoint-30/trainer_state.json"}
        says(trainer / "checkpoint-30", "C:\\out\\checkpoint-20")
        assert set(best_of(trainer).named) == {"checkpoint-20"}
        says(trainer / "checkpoint-30", "/elsewhere/checkpoint-99")
        assert not best_of(trainer).named

    def test_what_cannot_be_read_is_a_finding_and_an_older_record_counts(self, trainer):
        (trainer / "checkpoint-30" / "trainer_state.json").write_text('{"best_model_checkpoint": ')
        found = best_of(trainer)
        assert found.named == {"checkpoint-10": "the best by checkpoint-20/trainer_state.json"}
        assert [(problem.kind, problem.file) for problem in found.problems] == [
            ("unreadable-best", "checkpoint-30/trainer_state.json")
        ]
        (trainer / "checkpoint-30" / "trainer_state.json").write_text("[" * 100_000)
        assert len(best_of(trainer).problems) == 1

    def test_values_of_other_kinds_name_nothing(self, trainer):
        for value in (5, ["checkpoint-10"], {"a": "checkpoint-10"}, ""):
            for number in (10, 20, 30):
                says(trainer / f"checkpoint-{number}", value)
            assert not best_of(trainer).named


@pytest.mark.torchfree
def test_a_link_named_best_leads_to_one(tmp_path):
    folder = steps(tmp_path / "run", "step_1", "step_2", "step_3")
    (folder / "best").symlink_to("step_2")
    (folder / "bestiary").symlink_to("step_1")
    assert best_of(folder).named == {"step_2": "the link best leads to it"}


class TestLightning:
    @pytest.fixture
    def run(self, tmp_path):
        torch = pytest.importorskip("torch")

        def made(callbacks):
            for number in (3, 6):
                name = f"epoch=0-step={number}.ckpt"
                folder = tmp_path / "run" / name
                shutil.copytree(FOREIGN / "lightning_modelparallel" / "step=3.ckpt", folder, dirs_exist_ok=True)
                torch.save({"global_step": number, "callbacks": callbacks, "score": torch.ones(3)}, folder / "meta.pt")
            return tmp_path / "run"

        return made

    def test_every_callback_may_name_one(self, run):
        first, second = ("/gone/epoch=0-step=3.ckpt", "rel/epoch=0-step=6.ckpt")
        callbacks = {
            "ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_path": first, "best_k_models": {first: 1.0}},
            "ModelCheckpoint{'monitor': None}": {"best_model_path": second},
            "EarlyStopping": {"wait_count": 1},
        }
        named = best_of(run(callbacks)).named
        assert named == dict.fromkeys(
            ("epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"), "the best by epoch=0-step=6.ckpt/meta.pt"
        )

    def test_nothing_is_executed(self, run, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        folder = run({})
        (folder / "epoch=0-step=6.ckpt" / "meta.pt").write_bytes(pickle.dumps({"callbacks": Evil()}))
        assert not best_of(folder).named
        os.truncate(folder / "epoch=0-step=6.ckpt" / "meta.pt", 30)
        assert [problem.file for problem in best_of(folder).problems] == ["epoch=0-step=6.ckpt/meta.pt"]
        assert not (tmp_path / "executed").exists()
