"""Resharding whole steps: all parts into the same place, the files beside as their trainer needs them, one output."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

import dcptool
from dcptool.checkpoint.selection import Renaming
from dcptool.errors import (
    ItemError,
    LayoutError,
    OutputExistsError,
    SeveralCheckpointsError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
)
from dcptool.ops import carrying
from dcptool.ops.reshard import member
from dcptool.ops.reshard.plan import ReshardOptions, make_plan
from dcptool.ops.reshard.source import default_target
from dcptool.ops.verify.verdict import State
from tests import damage
from tests.alone import reshard_alone
from tests.conftest import FOREIGN, UNREAD, run

torch = pytest.importorskip("torch")

from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)
TRAINER = FOREIGN / "trainer_fsdp2" / "checkpoint-2"
ACCELERATE = FOREIGN / "accelerate_fsdp2"
LIGHTNING = FOREIGN / "lightning_modelparallel" / "step=3.ckpt"
MEGATRON = FOREIGN / "megatron_tp2" / "iter_0000010"
PARTS = ("optimizer_0", "pytorch_model_fsdp_0")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def beside(folder: Path) -> set[str]:
    """Names of all files but those of DCP and the marker."""
    return {name for name in files(folder) if not name.endswith((".distcp", ".metadata", "_COMPLETE"))}


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "run" / source.name))


@pytest.mark.parametrize(
    ("source", "parts", "carried"),
    [
        (TRAINER, PARTS, {"trainer_state.json", "scheduler.pt"}),
        (ACCELERATE, PARTS, {"scheduler.bin", "custom_checkpoint_0.pkl"}),
        (LIGHTNING, ("",), {"meta.pt"}),
        (MEGATRON, ("",), {"common.pt", "metadata.json"}),
    ],
    ids=["trainer", "accelerate", "lightning", "megatron"],
)
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_every_part_is_resharded_in_its_place_and_the_files_beside_follow(tmp_path, source, parts, carried, n_ranks):
    out = tmp_path / "out" / source.name
    done = reshard_alone(source, out, world_size=n_ranks, check=True)
    for part in parts:
        assert dcptool.compare(source / part, out / part).equal
        assert {path.name for path in (out / part).glob("*.distcp")} == {f"__{r}_0.distcp" for r in range(n_ranks)}
        assert dcptool.open(out / part).world_size == n_ranks
    for name in carried:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    [verdict] = dcptool.verify(out, DEEP).verdicts
    assert verdict.state is State.COMPLETE, verdict.findings
    assert verdict.marker.writer == "reshard"
    assert set(verdict.marker.files) == files(out) - {"_COMPLETE"}
    assert set(done.carried) == beside(out)
    assert done.nbytes_out == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


class TestFilesOfRanks:
    def test_a_rank_that_is_new_has_none_and_that_is_told(self, tmp_path):
        done = reshard_alone(TRAINER, tmp_path / "o" / "checkpoint-2", world_size=4)
        assert {name for name in done.carried if "rng" in name} == {"rng_state_0.pth", "rng_state_1.pth"}
        assert any("rng_state_*.pth" in note and "finds none for ranks 2–3 (2)" in note for note in done.notes)

    def test_a_rank_that_is_gone_is_left_out_and_that_is_told(self, tmp_path):
        done = reshard_alone(ACCELERATE, tmp_path / "out", world_size=1)
        assert {name for name in done.carried if "random" in name} == {"random_states_0.pkl"}
        assert any("random_states_*.pkl" in note and "that of rank 1 left out" in note for note in done.notes)

    def test_one_rank_alone_has_the_name_its_trainer_looks_for_and_back(self, tmp_path):
        one, two = tmp_path / "one" / "checkpoint-2", tmp_path / "two" / "checkpoint-2"
        reshard_alone(TRAINER, one, world_size=1)
        assert {name for name in beside(one) if "rng" in name} == {"rng_state.pth"}
        assert (one / "rng_state.pth").read_bytes() == (TRAINER / "rng_state_0.pth").read_bytes()
        reshard_alone(one, two, world_size=2)
        assert {name for name in beside(two) if "rng" in name} == {"rng_state_0.pth"}

    def test_files_of_no_known_trainer_are_carried_and_their_gaps_told(self, tmp_path):
        step = save(tmp_path / "run" / "step_5", *({"w": Shard.of(torch.arange(12.0), r, 4)} for r in range(4)))
        for rank in (0, 1, 3):
            torch.save({"seed": rank}, step / f"rng_rank{rank}.pt")
        (step / "notes.txt").write_text("lr was halved by hand")
        done = reshard_alone(step, tmp_path / "out", world_size=3)
        assert beside(tmp_path / "out") == {"rng_rank0.pt", "rng_rank1.pt", "rng_rank3.pt", "notes.txt"}
        told = "\n".join(done.notes)
        assert "of no known use: notes.txt, rng_rank*.pt (3 files)" in told
        assert "finds none for rank 2; that of rank 3 carried, of no rank any more" in told

    def test_numbers_with_zeros_in_front_are_one_family(self, tmp_path):
        step = copied(MEGATRON, tmp_path)
        (step / "mp_rank_00").mkdir()
        for rank in range(12):
            torch.save({"at": rank}, step / "mp_rank_00" / f"train_dataloader_dprank{rank:03d}.pt")
        done = reshard_alone(step, tmp_path / "out", world_size=11)
        [note] = [note for note in done.notes if "dprank" in note]
        assert note.startswith("mp_rank_00/train_dataloader_dprank*.pt (the data loader): carried for ranks 0–10 (11)")
        assert note.endswith("; that of rank 11 left out: data is read again, or left out, and in another order")
        assert len(list((tmp_path / "out" / "mp_rank_00").iterdir())) == 11

    def test_files_that_are_spread_only_are_all_carried(self, tmp_path):
        done = reshard_alone(ACCELERATE, tmp_path / "out", files=1)
        assert {name for name in done.carried if "random" in name} == {"random_states_0.pkl", "random_states_1.pkl"}


def test_what_would_be_wrong_is_left_out_and_named(tmp_path):
    step = copied(MEGATRON, tmp_path)
    (step / "integrity.json").write_text(json.dumps({"files": {"common.pt": "0" * 64}}))
    done = reshard_alone(step, tmp_path / "out", world_size=3)
    assert "integrity.json" not in beside(tmp_path / "out")
    assert any("left out, for it would be wrong: integrity.json (SHA-256 of the files)" in note for note in done.notes)


@pytest.mark.parametrize(
    "step",
    [
        UNREAD / "megatron_legacy_tp2" / "iter_0000010",
    ],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)
def test_files_that_only_as_many_ranks_can_load_are_refused_with_what_it_means(tmp_path, step):
    with pytest.raises(UnsupportedError, match="only as many as saved it can load it"):
        make_plan(str(step), str(tmp_path / "out"), ReshardOptions(3))


@pytest.mark.parametrize("how", ["cut", "changed", "runs code"])
def test_damaged_and_unsafe_files_beside_are_refused(tmp_path, how):
    step = copied(ACCELERATE, tmp_path)
    victim = step / "custom_checkpoint_0.pkl"
    if how == "cut":
        victim.write_bytes(victim.read_bytes()[:-200])
    elif how == "changed":
        victim.write_bytes(b"")
    else:

        class Evil:
            def __reduce__(self):
                return os.system, ("true",)

        victim.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UnsafePickleError if how == "runs code" else ItemError, match="custom_checkpoint_0"):
        reshard_alone(step, tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()
    if how == "runs code":
        reshard_alone(step, tmp_path / "out", world_size=3, trust=True)
        assert (tmp_path / "out" / victim.name).read_bytes() == victim.read_bytes()


def test_a_damaged_part_or_a_file_that_changes_leaves_nothing(tmp_path, monkeypatch):
    step = copied(TRAINER, tmp_path)
    part = dcptool.open(step / "optimizer_0")
    entry = next(iter(part.tensors.values()))
    record = part.payload(entry, entry.chunks[-1]).record
    damage.flip_byte(step / "optimizer_0" / record.item.file, record.item.byte_offset + record.byte_offset)
    with pytest.raises(ItemError, match="optimizer_0"):
        reshard_alone(step, tmp_path / "out", world_size=3)
    shutil.copytree(TRAINER, step, dirs_exist_ok=True)
    real = carrying._require_unchanged

    def changed(storage, file):
        (step / file.name).write_bytes(b"another save")
        real(storage, file)

    monkeypatch.setattr(carrying, "_require_unchanged", changed)
    with pytest.raises(StorageError, match="changed while it was read"):
        reshard_alone(step, tmp_path / "out", world_size=3)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_metadata_of_all_parts_then_the_trainers_last_file_then_the_marker(tmp_path, monkeypatch):
    order = []
    real = member.LocalStorage.create

    def create(self, name):
        order.append(name)
        return real(self, name)

    monkeypatch.setattr("dcptool.storage.local.LocalStorage.create", create)
    reshard_alone(TRAINER, tmp_path / "out", world_size=2)
    last = ["optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata", "trainer_state.json", "_COMPLETE"]
    assert order[-4:] == last


def test_one_part_alone_as_before_and_what_was_left_is_listed(tmp_path):
    done = reshard_alone(TRAINER / "optimizer_0", tmp_path / "out", world_size=3)
    assert files(tmp_path / "out") == {".metadata", "_COMPLETE", *(f"__{rank}_0.distcp" for rank in range(3))}
    [left] = [note for note in done.notes if note.startswith("not carried, of the step")]
    for name in ("pytorch_model_fsdp_0/", "scheduler.pt", "rng_state_*.pth (2 files", "trainer_state.json"):
        assert name in left


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("/d/run/checkpoint-500", "/d/run-ws6/checkpoint-500"),
        ("/d/run/checkpoint-500/optimizer_0", "/d/run-ws6/checkpoint-500/optimizer_0"),
        ("/d/run/global_step_20/actor/model", "/d/run-ws6/global_step_20/actor/model"),
        ("/d/run/checkpoint-500/iter_0000500", "/d/run-ws6/checkpoint-500/iter_0000500"),
        ("/d/run/step_1/dcp.pt", "/d/run-ws6/step_1/dcp"),
        ("/d/2024/ckpt", "/d/2024-ws6/ckpt"),
        ("s3://b/run/step_1/model", "s3://b/run-ws6/step_1/model"),
    ],
)
def test_the_default_place_is_never_in_the_run(source, target):
    assert default_target(source, 6) == target


def test_a_part_of_a_step_whose_name_tells_nothing(tmp_path):
    step = Path(shutil.copytree(ACCELERATE, tmp_path / "run" / "best"))
    plan = make_plan(str(step / "optimizer_0"), None, ReshardOptions(3))
    assert plan.target == str(tmp_path / "run-ws3" / "best" / "optimizer_0")
    with pytest.raises(LayoutError, match="name DST"):
        default_target("/step_1/model", 3)


@pytest.mark.parametrize(
    ("source", "name", "warned"),
    [
        (TRAINER, "checkpoint-2-ws3", True),
        (TRAINER, "resharded", False),
        (MEGATRON, "iter_0000010-ws3", True),
        (MEGATRON, "ws3", False),
        (FOREIGN / "torchtitan_dcp" / "checkpoint" / "step-2", "step-2-ws3", True),
        (FOREIGN / "torchtitan_dcp" / "checkpoint" / "step-2", "old-step-2", True),
        (FOREIGN / "torchtitan_dcp" / "checkpoint" / "step-2", "ws3", False),
        (LIGHTNING, "last-ws3.ckpt", True),
    ],
)
def test_a_name_that_the_trainer_of_the_run_takes_for_its_own_is_warned_of(tmp_path, source, name, warned):
    step = copied(source, tmp_path)
    plan = make_plan(str(step), str(step.parent / name), ReshardOptions(3))
    assert any("is in a run directory of" in note for note in plan.notes) is warned
    plan = make_plan(str(step), str(tmp_path / "elsewhere" / name), ReshardOptions(3))
    assert not any("is in a run directory of" in note for note in plan.notes)


class TestOptions:
    def test_keys_select_over_all_parts(self, tmp_path):
        done = reshard_alone(TRAINER, tmp_path / "out", world_size=3, keys=("model.*", "nosuch"))
        assert done.parts == ("pytorch_model_fsdp_0",)
        assert not (tmp_path / "out" / "optimizer_0").exists()
        told = "\n".join(done.notes)
        assert "nothing of optimizer_0/ is selected" in told
        assert told.count("matches nothing") == 1
        with pytest.raises(LayoutError):
            reshard_alone(TRAINER, tmp_path / "none", world_size=3, keys=("nosuch",))

    def test_a_placement_need_match_in_one_part_only(self, tmp_path):
        options = {"mesh": "dp=2", "placements": ("*exp_avg=dp:0", "model.*=dp:0", "nosuch=dp:0")}
        done = reshard_alone(TRAINER, tmp_path / "out", **options)
        assert [note for note in done.notes if "matches no tensor" in note] == [
            note for note in done.notes if note.startswith("--placement 'nosuch'")
        ]

    def test_like_takes_over_the_layout_of_each_part(self, tmp_path):
        reshard_alone(TRAINER, tmp_path / "five" / "checkpoint-2", world_size=5)
        back = tmp_path / "back" / "checkpoint-2"
        reshard_alone(tmp_path / "five" / "checkpoint-2", back, like=str(TRAINER))
        for part in PARTS:
            for fqn, entry in dcptool.open(TRAINER / part).tensors.items():
                assert list(dcptool.open(back / part)[fqn].chunks.boxes()) == list(entry.chunks.boxes())

    def test_what_it_wrote_itself_may_be_replaced_but_nothing_more(self, tmp_path):
        out = tmp_path / "out"
        reshard_alone(TRAINER, out, world_size=3)
        done = reshard_alone(TRAINER, out, world_size=2, overwrite=True)
        assert any("--overwrite replaces" in note for note in done.notes)
        assert dcptool.open(out / "optimizer_0").world_size == 2
        (out / "thesis.tex").write_text("years of work")
        with pytest.raises(OutputExistsError, match="thesis"):
            reshard_alone(TRAINER, out, world_size=3, overwrite=True)


class TestNamesAndDtypes:
    """As `convert` changes them: what reshard makes of a checkpoint is what it makes of the converted one."""

    @pytest.mark.parametrize(
        "renaming",
        [
            Renaming(strip_prefix="state_dict.", add_prefix="net."),
            Renaming(dtype="bfloat16"),
            Renaming(dtype="float16", cast_optimizer=True),
            Renaming(rename=(("state_dict.l1.weight", "first"),), dtype="float64"),
        ],
    )
    def test_of_one_checkpoint(self, tmp_path, renaming):
        converted = tmp_path / "converted"
        dcptool.convert(LIGHTNING, converted, "dcp", dcptool.ConvertOptions(renaming=renaming))
        reshard_alone(converted, tmp_path / "theirs", world_size=3)
        done = reshard_alone(LIGHTNING, tmp_path / "ours", world_size=3, renaming=renaming, check=True)
        ours, theirs = dcptool.open(tmp_path / "ours"), dcptool.open(tmp_path / "theirs")
        assert list(ours) == list(theirs)
        assert [entry.path for entry in ours.values()] == [entry.path for entry in theirs.values()]
        assert dcptool.compare(tmp_path / "ours", tmp_path / "theirs").equal
        assert (done.n_cast > 0) is (renaming.dtype is not None)

    def test_of_all_parts(self, tmp_path):
        renaming = Renaming(rename=(("model.lm_head.weight", "model.head"),), dtype="bfloat16")
        step = copied(TRAINER, tmp_path)
        (step / "config.json").write_text('{"dtype": "float32"}')
        reshard_alone(step, tmp_path / "out", world_size=3, renaming=renaming)
        model = dcptool.open(tmp_path / "out" / "pytorch_model_fsdp_0")
        assert "model.head" in model
        assert {entry.dtype for entry in model.tensors.values()} == {"bfloat16"}
        moments = dcptool.open(tmp_path / "out" / "optimizer_0").tensors
        assert "bfloat16" not in {entry.dtype for entry in moments.values()}
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}
        with pytest.raises(LayoutError, match="no entry of any part"):
            reshard_alone(step, tmp_path / "no", world_size=3, renaming=Renaming(rename=(("nosuch", "x"),)))

    def test_what_a_cast_loses_is_told_by_all_workers(self, tmp_path):
        tensor = torch.arange(40.0).view(10, 4) * 1e4
        source = save(tmp_path / "c", *({"w": Shard.of(tensor, rank, 2)} for rank in range(2)))
        arguments = ("--world-size", "3", "--workers", "2", "--dtype", "float16", "--json", str(source))
        result = run("reshard", *arguments, str(tmp_path / "out"))
        assert result.returncode == 1
        wanted = int(torch.isinf(tensor.half()).sum())
        assert json.loads(result.stdout)["lost"] == [{"fqn": "w", "n_infinite": wanted, "n_zero": 0, "n_subnormal": 0}]
        arguments = tuple(word for word in arguments if word != "--json")
        result = run("reshard", "--allow-overflow", *arguments, str(tmp_path / "two"))
        assert result.returncode == 0
        assert f"{wanted} became infinite" in result.stderr
        assert run("reshard", "--allow-overflow", "--world-size", "3", str(source)).returncode == 2


def test_a_run_directory_names_its_steps(tmp_path):
    run_folder = FOREIGN / "accelerate_fsdp2_auto" / "checkpoints"
    with pytest.raises(SeveralCheckpointsError) as found:
        make_plan(str(run_folder), str(tmp_path / "out"), ReshardOptions(3))
    assert found.value.parts == tuple(str(run_folder / f"checkpoint_{number}") for number in (0, 1))
    shutil.copytree(run_folder / "checkpoint_1", tmp_path / "run" / "checkpoint_1")
    reshard_alone(tmp_path / "run", tmp_path / "out", world_size=3)
    assert set(PARTS) <= {path.name for path in (tmp_path / "out").iterdir()}


def test_a_step_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(copied(TRAINER, tmp_path))
    plan = make_plan(None, None, ReshardOptions(3))
    assert plan.target == str(tmp_path / "run-ws3" / "checkpoint-2")
    assert [part.name for part in plan.parts] == list(PARTS)


def test_a_part_below_keeps_its_place(tmp_path):
    """OLMo-core's step is a folder around one DCP folder; a folder around one that is nothing itself is not."""
    step = tmp_path / "run" / "step3"
    save(step / "model_and_optim", *({"model": {"w": Shard.of(torch.arange(8.0), rank, 2)}} for rank in range(2)))
    (step / "train").mkdir()
    for rank in range(2):
        torch.save({"rank": rank}, step / "train" / f"rank{rank}.pt")
    (step / ".metadata.json").write_text('{"version": "v2"}')
    reshard_alone(step, tmp_path / "out", world_size=1)
    assert beside(tmp_path / "out") == {"train/rank0.pt", ".metadata.json"}
    assert dcptool.open(tmp_path / "out" / "model_and_optim").world_size == 1
    shutil.copytree(step / "model_and_optim", tmp_path / "just" / "dcp")
    reshard_alone(tmp_path / "just", tmp_path / "flat", world_size=3)
    assert dcptool.open(tmp_path / "flat").world_size == 3
    assert (tmp_path / "flat" / ".metadata").exists()


def test_other_steps_in_a_folder_are_left_alone_and_named(tmp_path):
    source = save(tmp_path / "c", {"w": torch.arange(4.0)})
    save(source / "step_7", {"w": torch.arange(4.0)})
    done = reshard_alone(source, tmp_path / "out", world_size=2)
    assert not (tmp_path / "out" / "step_7").exists()
    assert any("no part of the checkpoint: step_7/" in note or "step_*/" in note for note in done.notes), done.notes


def test_as_a_user_types_it(tmp_path):
    """Forked workers; SRC and DST as paths, then --json."""
    step = copied(TRAINER, tmp_path)
    result = run("reshard", "--world-size", "3", "--workers", "2", "--json", str(step))
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    out = tmp_path / "run-ws3" / "checkpoint-2"
    assert document["path"] == str(out)
    assert document["parts"] == list(PARTS)
    assert set(document["carried"]) == beside(out)
    for part in PARTS:
        assert dcptool.compare(step / part, out / part).equal
    digests = [hashlib.sha256((folder / "scheduler.pt").read_bytes()).digest() for folder in (step, out)]
    assert digests[0] == digests[1]
