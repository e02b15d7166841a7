"""DeepSpeed's checkpoints against what zero_to_fp32 and ds_to_universal read from them; then lies and losses."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import DcptoolError, LayoutError
from dcptool.ops.convert.convert import convert
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests.alone import reshard_alone
from tests.conftest import DEEPSPEED, run

torchfree = pytest.mark.torchfree
FROZEN = {"frozen.weight", "frozen.bias"}


def step_of(name: str) -> Path:
    return next(path for path in (DEEPSPEED / name).iterdir() if path.is_dir())


def expected_of(name: str) -> dict[str, dict[str, object]]:
    """What DeepSpeed's own tools say, by the names that are used here."""
    about = json.loads((DEEPSPEED / f"{name}.expected.json").read_text())
    if "tensors" in about:
        return about["tensors"]
    [tag] = about["parts"]
    found = {}
    for place, told in about["parts"][tag].items():
        parameter, _, kind = place.rpartition("/")
        found[place if not parameter else named(parameter, kind)] = told
    for parameter, kinds in about.get("optimizer_state", {}).get(tag, {}).items():
        for kind, told in kinds.items():
            found.setdefault(named(parameter, kind), told)
    return found


def named(parameter: str, kind: str) -> str:
    return parameter if kind == "fp32" else f"optim.state.{parameter}.{kind}"


def sha256(array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def differences(checkpoint, name: str) -> list[str]:
    """Tensors that are not what DeepSpeed says; of ZeRO-3 its tools give what the optimizer keeps flat."""
    wrong = []
    shapes = {fqn: told["shape"] for fqn, told in expected_of(name).items() if not fqn.startswith("optim.")}
    for fqn, told in expected_of(name).items():
        parameter = fqn.removeprefix("optim.state.").rpartition(".")[0]
        shape = shapes[parameter] if fqn.startswith("optim.") and told["shape"] else told["shape"]
        entry = checkpoint.tensors.get(fqn)
        if fqn in FROZEN and "bf16" in name:  # ds_to_universal makes fp32 of what is saved, and is used, in bfloat16
            told = {**told, "dtype": f"torch.{entry.dtype}", "sha256": sha256(checkpoint.read(fqn))}
        if entry is None or (f"torch.{entry.dtype}", list(entry.shape)) != (told["dtype"], shape):
            wrong.append(f"{fqn}: {entry}")
        elif sha256(checkpoint.read(fqn)) != told["sha256"]:
            wrong.append(fqn)
    return wrong


NAMES = sorted(path.name.removesuffix(".expected.json") for path in DEEPSPEED.glob("*.expected.json"))


@torchfree
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_what_deepspeed_reads(name):
    checkpoint = dcptool.open(step_of(name))
    assert not differences(checkpoint, name)
    assert {problem.kind for problem in checkpoint.problems} <= {"copies-left-out"}
    trained = [fqn for fqn in checkpoint.tensors if f"optim.state.{fqn}.exp_avg" in checkpoint.tensors]
    params = [name for fqn in checkpoint.objects if fqn.endswith(".params") for name in checkpoint.value(fqn)]
    assert trained == [] or sorted(trained) == sorted(params)
    assert all(checkpoint[f"optim.state.{fqn}.step"].shape == () for fqn in trained)


@torchfree
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", Level)
def test_verify_finds_nothing(name, level):
    verdict = judge(step_of(name), VerifyOptions(level, grace=0))
    assert (verdict.state, verdict.resumable) == (State.COMPLETE, True)
    assert {finding.kind for finding in verdict.findings} <= {"copies-left-out"}


@torchfree
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_conversions_hold_the_same(name, to, tmp_path):
    target = tmp_path / ("out.pt" if to == "torch" else "out")
    done = convert(str(step_of(name)), str(target), to)
    assert not differences(dcptool.open(target), name)
    source = dcptool.open(step_of(name))
    assert (done.n_tensors, done.n_objects) == (len(source.tensors), 0 if to == "safetensors" else len(source.objects))
    assert any("are left out" in note for note in done.notes) == any(
        problem.kind == "copies-left-out" for problem in source.problems
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_ranks", [1, 3, 8])
def test_resharded_it_is_the_same_and_cut_along_dimension_0(name, n_ranks, tmp_path):
    pytest.importorskip("torch")
    reshard_alone(step_of(name), tmp_path / "out", world_size=n_ranks)
    checkpoint = dcptool.open(tmp_path / "out")
    assert not differences(checkpoint, name)
    for entry in checkpoint.tensors.values():
        assert all(offsets[1:] == (0,) * len(offsets[1:]) for offsets, _ in entry.chunks.boxes())


def test_torch_reads_what_it_is_converted_to(tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    load_file = pytest.importorskip("safetensors.torch").load_file
    for name in NAMES:
        step, told = step_of(name), expected_of(name)
        convert(str(step), str(tmp_path / name / "dcp"), "dcp")
        convert(str(step), str(tmp_path / name / "x.safetensors"), "safetensors")
        entries = dcptool.open(step).tensors
        state = {fqn: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for fqn, entry in entries.items()}
        dcp.load(state, checkpoint_id=tmp_path / name / "dcp", no_dist=True)
        flat = load_file(tmp_path / name / "x.safetensors")
        for fqn, tensor in state.items():
            assert torch.equal(tensor, flat[fqn])
            if fqn in told and tensor.dtype is torch.float32:
                assert sha256(tensor.numpy()) == told[fqn]["sha256"], (name, fqn)


@torchfree
def test_boxes_are_read_as_they_are_in_the_whole():
    checkpoint = dcptool.open(step_of("ds_zero3_fp32_w2"))
    whole = checkpoint.read("down.weight")
    assert np.array_equal(checkpoint.read("down.weight", (3, 5), (6, 20)), whole[3:9, 5:25])
    assert len(checkpoint["down.weight"].chunks) == 4  # 11 rows of 29, cut at element 160


@torchfree
@pytest.mark.parametrize(
    ("name", "universal"),
    [("ds_zero1_fp32_w2", "ds_universal_zero1_w2"), ("zero3_w4", "universal_zero3_w4")],
)
def test_a_step_and_its_universal_copy_hold_the_same(name, universal):
    report = dcptool.compare(step_of(name), step_of(universal))
    assert not [one for one in report.differences if one.fqn.startswith("optim.") or one.kind == "tensor"]
    assert set(dcptool.open(step_of(name)).tensors) == set(dcptool.open(step_of(universal)).tensors)


@torchfree
def test_what_is_no_tensor_is_there_by_its_name():
    checkpoint = dcptool.open(step_of("ds_zero2_bf16_w4"))
    values = {fqn: checkpoint.value(fqn) for fqn in checkpoint.objects}
    assert (values["lr_scheduler.last_batch_iteration"], values["global_steps"], values["epoch"]) == (4, 5, 1)
    assert (values["zero.loss_scaler.cur_scale"], values["zero.zero_stage"]) == (1.0, 2)
    assert values["optim.param_groups.1.params"][0] == "scale"
    assert not any(fqn.startswith("module") for fqn in checkpoint)


class TestRun:
    @pytest.fixture
    def folder(self, tmp_path):
        for number in (5, 10):
            shutil.copytree(step_of("ds_zero1_fp32_w2"), tmp_path / f"global_step{number}")
        (tmp_path / "latest").write_text("global_step5")
        return tmp_path

    @torchfree
    def test_the_folder_that_latest_names_is_opened(self, folder):
        assert dcptool.open(folder).root == str(folder / "global_step5")
        (folder / "latest").write_text("global_step10\n")
        assert dcptool.open(folder).root == str(folder / "global_step10")

    @torchfree
    @pytest.mark.parametrize("said", ["global_step15", "../global_step5", "", "x" * 9000, "global_step5/zero"])
    def test_one_that_names_none_of_them_leads_nowhere(self, folder, said):
        (folder / "latest").write_text(said)
        with pytest.raises(DcptoolError, match="holds 2 checkpoints"):
            dcptool.open(folder)

    @torchfree
    def test_inspect_shows_both(self, folder):
        shown = run("inspect", folder).stdout
        assert "global_step5 " in shown
        assert "global_step10" in shown

    @torchfree
    def test_copy_takes_one_whole(self, folder, tmp_path):
        done = run("copy", folder / "global_step10", tmp_path / "copied")
        assert done.returncode == 0, done.stderr
        assert not differences(dcptool.open(tmp_path / "copied"), "ds_zero1_fp32_w2")


class TestLies:
    """Files as DeepSpeed writes them but for one thing."""

    SHAPES = ({"a.weight": (5, 3), "b.weight": (4, 4)}, {"c": (3,)})
    WORLD = 2

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    def parts(self, torch, stage):
        """What each file holds: {name: contents}."""
        shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in self.SHAPES]
        sizes = [sum(size.numel() for size in group.values()) for group in shapes]
        if stage == 3:
            numels = [sum(-(-size.numel() // self.WORLD) for size in group.values()) for group in shapes]
        else:
            numels = [-(-size // (2 * self.WORLD)) * 2 for size in sizes]
        module = {name: torch.zeros(0 if stage == 3 else size) for group in shapes for name, size in group.items()}
        model = {
            "module": module, "buffer_names": [], "param_shapes": shapes, "frozen_param_shapes": None,
            "frozen_param_fragments": None, "shared_params": {}, "dp_world_size": self.WORLD, "global_steps": 3,
        }  # fmt: skip
        files = {}
        for rank in range(self.WORLD):
            flat = [torch.arange(float(n)) + 100 * rank for n in numels]
            state = {
                at: {"step": torch.tensor(3.0), "exp_avg": part + 1, "exp_avg_sq": part + 2}
                for at, part in enumerate(flat)
            }
            groups = [{"lr": 0.1, "params": [at]} for at in range(len(flat))]
            inner = {"state": state, "param_groups": groups}
            names = ("optimizer_state_dict", "fp32_flat_groups") if stage == 3 else (
                "base_optimizer_state", "single_partition_of_fp32_groups"
            )  # fmt: skip
            counts = self.WORLD if stage == 3 else [self.WORLD] * len(flat)
            optimizer = {"zero_stage": stage, "partition_count": counts, names[0]: inner, names[1]: flat}
            files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": optimizer}
            if stage == 3:
                files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = copy.deepcopy(model)
        return files if stage == 3 else {**files, "mp_rank_00_model_states.pt": model}

    def saved(self, torch, folder, files):
        for name, contents in files.items():
            torch.save(contents, folder / name)
        return folder

    def kinds(self, folder, level=Level.DEEP):
        verdict = judge(folder, VerifyOptions(level, grace=0))
        assert not verdict.whole
        for fqn, entry in dcptool.open(folder).tensors.items():
            try:
                assert dcptool.open(folder).read(fqn).shape == entry.shape
            except LayoutError as error:  # a hole
                assert fqn in str(error)
        return {finding.kind for finding in verdict.findings if finding.is_error}

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_without_a_lie_they_are_whole(self, torch, tmp_path, stage):
        folder = self.saved(torch, tmp_path, self.parts(torch, stage))
        assert judge(folder, VerifyOptions(Level.DEEP, grace=0)).whole
        values = dcptool.open(folder).read("a.weight").reshape(-1).tolist()
        cut = 8 if stage == 3 else 16
        assert values == [float(at if at < cut else 100 + at - cut) for at in range(15)]

    @pytest.mark.parametrize("stage", [1, 3])
    @pytest.mark.parametrize("shape", [(5, 4), (50, 3), (1 << 40, 3), (0,), ()])
    def test_a_shape_that_takes_more_or_less_than_there_is(self, torch, tmp_path, stage, shape):
        files = self.parts(torch, stage)
        for name, contents in files.items():
            if "model" in name:
                contents["param_shapes"][0]["a.weight"] = torch.Size(shape)
        assert "bad-partition" in self.kinds(self.saved(torch, tmp_path, files))

    @pytest.mark.parametrize("shape", [(3, 5), (15,)])
    def test_a_shape_of_as_many_elements_is_compared_with_the_model(self, torch, tmp_path, shape):
        files = self.parts(torch, 1)
        files["mp_rank_00_model_states.pt"]["param_shapes"][0]["a.weight"] = torch.Size(shape)
        assert self.kinds(self.saved(torch, tmp_path, files)) == {"wrong-item"}

    @pytest.mark.parametrize("shape", [(1 << 62, 1 << 62), "text", None, [-1], [1.5], [True]])
    def test_a_shape_that_is_none(self, torch, tmp_path, shape):
        files = self.parts(torch, 1)
        size = torch.Size(shape) if isinstance(shape, tuple) else shape
        files["mp_rank_00_model_states.pt"]["param_shapes"][0]["a.weight"] = size
        assert "bad-file" in self.kinds(self.saved(torch, tmp_path, files))

    @pytest.mark.parametrize("stage", [2, 3])
    @pytest.mark.parametrize("change", [-5, 40])
    @pytest.mark.parametrize("what", ["fp32", "exp_avg"])
    def test_a_partition_of_another_length(self, torch, tmp_path, stage, change, what):
        files = self.parts(torch, stage)
        optimizer = files["zero_pp_rank_1_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        inner = optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"][0]
        whole = optimizer[key][0] if what == "fp32" else inner["exp_avg"]
        other = torch.zeros(len(whole) + change)
        if what == "fp32":
            optimizer[key][0] = other
        else:
            inner["exp_avg"] = other
        assert self.kinds(self.saved(torch, tmp_path, files)) == {"bad-partition"}

    def test_of_another_dtype_or_shape_or_no_tensor(self, torch, tmp_path):
        key = "single_partition_of_fp32_groups"
        for number, (other, kind) in enumerate(
            [
                (torch.zeros(16, dtype=torch.float64), "parts-disagree"),
                (torch.zeros(4, 4), "bad-partition"),
                (torch.zeros(32)[::2], "bad-partition"),
                ("text", "bad-partition"),
            ]
        ):
            files = self.parts(torch, 1)
            files["zero_pp_rank_1_mp_rank_00_optim_states.pt"]["optimizer_state_dict"][key][0] = other
            (tmp_path / str(number)).mkdir()
            assert kind in self.kinds(self.saved(torch, tmp_path / str(number), files))

    @pytest.mark.parametrize("stage", [1, 3])
    def test_a_rank_of_another_save(self, torch, tmp_path, stage):
        files = self.parts(torch, stage)
        optimizer = files["zero_pp_rank_1_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
        for group in optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"].values():
            group["step"] = torch.tensor(4.0)
        folder = self.saved(torch, tmp_path, files)
        assert self.kinds(folder, Level.METADATA) == {"ranks-disagree"}
        [error] = [finding for finding in judge(folder).findings if finding.is_error]
        assert "the optimizer's steps are 3 in" in error.message
        assert "4 in zero_pp_rank_1" in error.message

    def test_models_of_two_saves(self, torch, tmp_path):
        files = self.parts(torch, 3)
        files["zero_pp_rank_1_mp_rank_00_model_states.pt"]["global_steps"] = 4
        assert self.kinds(self.saved(torch, tmp_path, files)) == {"ranks-disagree"}

    @pytest.mark.parametrize("stage", [1, 3])
    def test_a_file_that_an_older_save_on_more_ranks_left(self, torch, tmp_path, stage):
        files = self.parts(torch, stage)
        other = copy.deepcopy(files["zero_pp_rank_1_mp_rank_00_optim_states.pt"])
        other["optimizer_state_dict"]["partition_count"] = 4
        files["zero_pp_rank_3_mp_rank_00_optim_states.pt"] = other
        assert "ranks-disagree" in self.kinds(self.saved(torch, tmp_path, files))

    @pytest.mark.parametrize("stage", [1, 3])
    @pytest.mark.parametrize("count", [1 << 40, 0, -1, "2", None, [1 << 40]])
    def test_a_number_of_ranks_that_is_none_costs_nothing(self, torch, tmp_path, stage, count):
        files = self.parts(torch, stage)
        for name, contents in files.items():
            if "optim" in name:
                contents["optimizer_state_dict"]["partition_count"] = count
            else:
                contents["dp_world_size"] = count
        folder = self.saved(torch, tmp_path, files)
        huge = count in (1 << 40, [1 << 40])
        verdict = judge(folder, VerifyOptions(Level.METADATA, grace=0))
        assert verdict.whole is not huge
        assert not huge or {"missing-file"} <= self.kinds(folder)

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("stage", [1, 3])
    def test_without_a_ranks_file_the_others_can_be_read(self, torch, tmp_path, stage, rank):
        folder = self.saved(torch, tmp_path, self.parts(torch, stage))
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
        verdict = judge(folder, VerifyOptions(grace=0))
        assert verdict.state is State.INCOMPLETE
        [error] = [finding for finding in verdict.findings if finding.is_error]
        assert error.message.startswith(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt is missing")
        checkpoint = dcptool.open(folder)
        with pytest.raises(LayoutError, match="no chunk holds"):
            checkpoint.read("a.weight" if rank == 0 else "b.weight")
        with pytest.raises(DcptoolError):
            convert(str(folder), str(tmp_path / "out"), "dcp")

    @pytest.mark.parametrize("stage", [1, 3])
    def test_what_runs_code_is_unsafe_in_each_file(self, torch, tmp_path, stage):
        marker = tmp_path / "executed"

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(marker),)

        for number, name in enumerate(self.parts(torch, stage)):
            files = self.parts(torch, stage)
            files[name]["more"] = Evil()
            (tmp_path / str(number)).mkdir()
            folder = self.saved(torch, tmp_path / str(number), files)
            assert judge(folder, VerifyOptions(grace=0)).state is State.UNSAFE
            with pytest.raises(DcptoolError):
                convert(str(folder), str(tmp_path / "out"), "dcp")
        assert not marker.exists()

    @pytest.mark.parametrize("stage", [1, 3])
    @pytest.mark.parametrize("content", [5, [1], {}, {"module": 7, "optimizer_state_dict": 7}, None, {1: {}}])
    def test_a_file_that_holds_something_else(self, torch, tmp_path, stage, content):
        for number, name in enumerate(self.parts(torch, stage)):
            (tmp_path / str(number)).mkdir()
            folder = self.saved(torch, tmp_path / str(number), {**self.parts(torch, stage), name: content})
            assert judge(folder, VerifyOptions(Level.DEEP, grace=0)).state in (State.DAMAGED, State.INCOMPLETE)

    def test_parameters_that_are_named_as_other_entries(self, torch, tmp_path):
        """No entry is lost for another one's name."""
        self.SHAPES = ({"global_steps": (5, 3), "optim.state.c.exp_avg": (4, 4)}, {"c": (3,)})
        folder = self.saved(torch, tmp_path, self.parts(torch, 1))
        checkpoint = dcptool.open(folder)
        assert {problem.kind for problem in checkpoint.problems} >= {"duplicate-name"}
        assert checkpoint["global_steps"].shape == (5, 3)
        assert checkpoint.value("global_steps#2") == 3

    def test_model_parallel_ranks_are_named_and_not_guessed(self, torch, tmp_path):
        folder = self.saved(torch, tmp_path, self.parts(torch, 1))
        shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
        with pytest.raises(DcptoolError, match="cut by tensor, pipeline or expert parallelism"):
            dcptool.open(folder)
