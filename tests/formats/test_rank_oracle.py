"""DTensors of real jobs under gloo: torch says which boxes each rank has, and resumes from what is made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from tests import rank_jobs  # noqa: E402
from tests.conftest import RANKS, run  # noqa: E402
from tests.forks import run_ranks, values  # noqa: E402

WEIGHTS = ("--exclude", "optim.*", "--exclude", "extra_state.*")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    return folder, values(run_ranks(4, rank_jobs.save_layouts, folder))


def test_boxes_are_those_that_torch_computes(layouts):
    folder, told = layouts
    for rank, found in enumerate(told):
        checkpoint = dcptool.open(folder / f"model_world_size_4_rank_{rank}.pt")
        assert set(checkpoint) == set(found["boxes"])
        for name, box in found["boxes"].items():
            assert [chunk[:2] for chunk in checkpoint[name].chunks] == [box], (rank, name)


def test_files_of_all_ranks_are_the_whole_tensors(layouts):
    folder, told = layouts
    checkpoint = dcptool.open(folder)
    assert checkpoint.problems == ()
    for name, whole in told[0]["wholes"].items():
        assert np.array_equal(checkpoint.read(name), whole), name
    assert run("verify", "--deep", folder).returncode == 0


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_they_are_resharded_exactly(layouts, world_size, tmp_path):
    folder, told = layouts
    done = run("reshard", "--check", "--world-size", world_size, folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    checkpoint = dcptool.open(tmp_path / "out")
    for name, whole in told[0]["wholes"].items():
        assert np.array_equal(checkpoint.read(name), whole), name


def test_a_summand_is_no_value(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    values(run_ranks(2, rank_jobs.save_partial, source))
    checkpoint = dcptool.open(source)
    assert np.array_equal(checkpoint.read("w"), np.ones(4, np.float32))
    assert "Partial" in checkpoint["sum"].foreign
    done = run("convert", "--to", "dcp", source, tmp_path / "out")
    assert done.returncode == 3
    assert "'sum'" in done.stderr


def require_saved(checkpoint, saved):
    assert {fqn for fqn in checkpoint if not fqn.startswith("extra_state.")} == set(saved)
    for fqn, value in saved.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(checkpoint.read(fqn), value), fqn
        else:
            assert checkpoint.value(fqn) == value, fqn


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "2d"])
def test_a_job_goes_on_from_another_number_of_ranks(kind, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    [told, *_] = values(run_ranks(4, rank_jobs.train_and_save, source, kind))
    checkpoint = dcptool.open(source)
    assert checkpoint.problems == ()
    require_saved(checkpoint, told["saved"])
    assert len(checkpoint["embed.weight"].replicas) == (0 if kind == "fsdp" else 2)
    done = run("convert", "--check", "--to", "dcp", source, tmp_path / "dcp")
    assert done.returncode == 0, done.stderr
    for weights in values(run_ranks(2, rank_jobs.resume, str(tmp_path / "dcp"))):
        assert all(np.array_equal(weights[name], value) for name, value in told["after"].items())
    done = run("convert", "--to", "dcp", "--add-prefix", "model.", *WEIGHTS, source, tmp_path / "weights")
    assert done.returncode == 0, done.stderr
    for weights in values(run_ranks(2, rank_jobs.warm, str(tmp_path / "weights"), str(tmp_path / "run"))):
        assert all(np.array_equal(value, told["saved"][name]) for name, value in weights.items())


def test_ranks_without_a_row_hold_empty_parts(tmp_path):
    [told, *_] = values(run_ranks(4, rank_jobs.train_and_save, tmp_path, "fsdp", 2))
    require_saved(dcptool.open(tmp_path), told["saved"])
    assert run("verify", "--deep", tmp_path).returncode == 0
    for rank in (2, 3):
        alone = dcptool.open(Path(tmp_path, f"model_world_size_4_rank_{rank}.pt"))
        assert [chunk[:2] for chunk in alone["embed.weight"].chunks] == [((2, 0), (0, 6))]
        assert f"rank {rank} of 4" in alone.flavour


def test_what_torch_loads_in_a_job_alone_is_no_damage():
    done = run("verify", "--load", "--trust", RANKS / "verl_fsdp1_shardedtensor_w2")
    assert "not proven" in done.stdout
    assert "damaged" not in done.stdout


@pytest.mark.parametrize("name", ["verl_fsdp2_w2", "tck_w2"])
def test_torch_loads_every_file(name):
    done = run("verify", "--load", "--trust", RANKS / name)
    assert done.returncode == 0, done.stdout
    assert "note: torch" in done.stdout


@pytest.mark.slow
def test_transformers_loads_what_is_made_of_the_files_of_four_ranks(tmp_path):
    pytest.importorskip("transformers")
    source = tmp_path / "global_step_5" / "actor"
    source.mkdir(parents=True)
    values(run_ranks(4, rank_jobs.save_llama, source))
    before = torch.load(source / "logits.pt").numpy()
    (source / "logits.pt").unlink()
    done = run("convert", "--to", "safetensors", *WEIGHTS, source, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    [after] = values(run_ranks(0, rank_jobs.logits_of, str(tmp_path / "hf")))
    assert np.array_equal(before, after)
