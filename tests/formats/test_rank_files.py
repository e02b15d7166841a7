"""Files of single ranks as verl 0.9.1 and torch_checkpointing 0.1.1 leave them, against what their own loaders say."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import zipfile

import pytest

import dcptool
from dcptool.checkpoint.kinds import Severity
from dcptool.checks.check import Level
from dcptool.formats.rank_files.optimizer import Parameter, names_of
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.pickles import inert
from dcptool.pickles.emit import emit
from dcptool.pickles.standins import call, new
from tests.conftest import OLD, RANKS, run
from tests.damage import flip_byte, overwrite

pytestmark = pytest.mark.torchfree
FSDP2, FSDP1, ALONE = (RANKS / name for name in ("verl_fsdp2_w2", "verl_fsdp1_shardedtensor_w2", "verl_single_rank"))
TCK = [RANKS / "tck_w1", RANKS / "tck_w2"]
FOLDERS = [FSDP2, FSDP1, *TCK]
ONE = ALONE / "model_world_size_4_rank_2.pt"


def by_name(path):
    return path.name


def about(folder):
    return json.loads((RANKS / f"{folder.name}.expected.json").read_text())


def truth(folder):
    """What the producer's own loader says: fqn → what is there; the optimizer's by the names of the live run."""
    told = about(folder)
    entries = dict(told["parts"]["."])
    names = told.get("optimizer_param_names_of_the_live_run", {})
    for key, entry in (told.get("optimizer") or {}).get(".", {}).items():
        _, number, kept = key.split(".")
        entries[f"optim.state.{names[number]}.{kept}"] = entry
    return entries


def require_true(checkpoint, entries, skipped=()):
    for fqn, expected in entries.items():
        if expected["kind"] == "tensor":
            entry = checkpoint[fqn]
            assert (f"torch.{entry.dtype}", list(entry.shape)) == (expected["dtype"], expected["shape"]), fqn
            assert hashlib.sha256(checkpoint.read(fqn).tobytes()).hexdigest() == expected["sha256"], fqn
        elif "objects" not in skipped:
            assert repr(checkpoint.value(fqn)) == expected["repr"]


def verdict_on(folder, level=Level.METADATA):
    return judge(folder, VerifyOptions(level=level, grace=0))


@pytest.fixture
def copied(tmp_path):
    return lambda folder, name="": shutil.copytree(folder, tmp_path / (name or folder.name))


class TestFolder:
    @pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
    def test_holds_what_its_own_software_loads(self, folder):
        checkpoint = dcptool.open(folder)
        require_true(checkpoint, truth(folder))
        assert not [problem for problem in checkpoint.problems if problem.severity is Severity.ERROR]
        assert checkpoint.world_size == int(folder.name[-1])

    def test_nothing_else_is_in_the_optimizer_than_torch_flattens(self):
        checkpoint = dcptool.open(FSDP2)
        weights = set(about(FSDP2)["parts"]["."])
        groups = {fqn for fqn in checkpoint if fqn.startswith("optim.param_groups.")}
        assert {fqn.removeprefix("optim.param_groups.").rpartition(".")[0] for fqn in groups} == weights
        assert checkpoint.value("optim.param_groups.lm_head.weight.betas") == (0.9, 0.95)
        assert checkpoint["optim.param_groups.lm_head.weight.lr"].path == ("optim", "param_groups.lm_head.weight.lr")
        assert not [fqn for fqn in groups if fqn.endswith(".params")]

    def test_what_each_rank_has_of_its_own_says_whose_it_is(self):
        checkpoint = dcptool.open(FSDP2)
        for rank in (0, 1):
            expected = about(FSDP2)["rank_files"][f"extra_state_world_size_2_rank_{rank}.pt"]["rng.cpu"]
            read = checkpoint.read(f"extra_state.rank{rank}.rng.cpu")
            assert hashlib.sha256(read.tobytes()).hexdigest() == expected["sha256"]

    def test_the_optimizer_of_fsdp1_is_named_as_what_cannot_be_read(self):
        checkpoint = dcptool.open(FSDP1)
        [found] = checkpoint.problems
        assert (found.kind, found.severity) == ("optimizer-not-read", Severity.WARNING)
        assert {fqn for fqn in checkpoint if fqn.startswith("optim")} == {"optim.rank0", "optim.rank1"}

    @pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
    @pytest.mark.parametrize("level", Level)
    def test_is_whole(self, folder, level):
        verdict = verdict_on(folder, level)
        assert (verdict.state, verdict.resumable) == (State.COMPLETE, True)
        done = run("inspect", folder)
        assert done.returncode == 0
        assert "complete" in done.stdout

    @pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
    @pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
    def test_is_converted(self, folder, to, tmp_path):
        out = tmp_path / {"dcp": "out", "torch": "out.pt", "safetensors": "out.safetensors"}[to]
        done = run("convert", "--check", "--to", to, folder, out)
        assert done.returncode == 0, done.stderr
        require_true(dcptool.open(out), truth(folder), ("objects",) if to == "safetensors" else ())
        assert verdict_on(out, Level.DEEP).whole

    def test_a_model_keeps_its_configuration(self, tmp_path, copied):
        step = copied(FSDP2, "global_step_3/actor")
        (step.parent / "data.pt").write_bytes((FSDP2 / "extra_state_world_size_2_rank_0.pt").read_bytes())
        done = run(
            "convert",
            "--to",
            "safetensors",
            "--exclude",
            "optim.*",
            "--exclude",
            "extra_state.*",
            step,
            tmp_path / "hf",
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "hf" / "config.json").read_bytes() == (FSDP2 / "huggingface" / "config.json").read_bytes()
        require_true(dcptool.open(tmp_path / "hf"), about(FSDP2)["parts"]["."])

    def test_diff_shows_one_changed_tensor(self, copied):
        other = copied(FSDP2)
        name = other / "model_world_size_2_rank_1.pt"
        with zipfile.ZipFile(name) as archive:
            at = archive.getinfo(next(n for n in archive.namelist() if n.endswith("/data/0"))).header_offset
        flip_byte(name, at + 200)
        done = run("diff", FSDP2, other)
        assert done.returncode == 1 or "CRC" in done.stderr
        assert run("diff", FSDP2, FSDP2).returncode == 0


class TestBroken:
    @pytest.mark.parametrize("folder", [FSDP2, FSDP1, TCK[1]], ids=by_name)
    def test_files_of_a_rank_that_are_missing_are_named_once(self, folder, copied, tmp_path):
        step = copied(folder)
        for file in step.glob("*_1.pt"):
            file.unlink()
        verdict = verdict_on(step)
        assert (verdict.state, verdict.resumable) == (State.INCOMPLETE, False)
        kinds = [finding.kind for finding in verdict.findings if finding.is_error]
        assert kinds == ["missing-file"]
        assert "_1.pt" in verdict.reason
        for command in (
            ["convert", "--to", "dcp"],
            ["convert", "--to", "safetensors"],
            ["reshard", "--world-size", "1", "--dry-run"],  # which needs no torch
        ):
            done = run(*command, step, tmp_path / "out")
            assert done.returncode == 3
            assert "_1.pt" in done.stderr
            assert not (tmp_path / "out").exists()

    def test_a_damaged_file_is_no_leftover(self, copied):
        step = copied(FSDP2)
        (step / "model_world_size_2_rank_1.pt").write_bytes(b"x")
        findings = verdict_on(step).findings
        assert [found.kind for found in findings if found.is_error] == ["bad-file"]
        assert not [found for found in findings if "older or wider save" in found.message]

    @pytest.mark.parametrize("folder", [FSDP2, FSDP1, TCK[1]], ids=by_name)
    def test_without_any_file_it_is_incomplete(self, folder, copied):
        step = copied(folder)
        for file in sorted(step.glob("*.pt")):
            data = file.read_bytes()
            file.unlink()
            verdict = verdict_on(step)
            assert (verdict.state, verdict.resumable) == (State.INCOMPLETE, False)
            assert f"{file.name} is missing" in verdict.reason
            file.write_bytes(data)

    def test_a_value_that_is_not_finite_is_named(self, copied):
        step = copied(FSDP2)
        checkpoint = dcptool.open(step)
        payload = checkpoint.payload(checkpoint["lm_head.weight"], checkpoint["lm_head.weight"].chunks[1])
        place = payload.record.item.byte_offset + payload.record.byte_offset
        overwrite(step / "model_world_size_2_rank_1.pt", place, b"\xff" * 4)
        assert judge(step, VerifyOptions(finite=True, grace=0)).not_finite == ("lm_head.weight",)
        assert judge(FSDP2, VerifyOptions(finite=True, grace=0)).finite is True

    @pytest.mark.parametrize("folder", [FSDP2, FSDP1, TCK[1]], ids=by_name)
    def test_a_cut_file_is_a_finding(self, folder, copied):
        step = copied(folder)
        for file in sorted(step.glob("*.pt")):
            data = file.read_bytes()
            for left in (len(data) - 1, len(data) // 2, 0):
                file.write_bytes(data[:left])
                verdict = verdict_on(step)
                assert not verdict.whole
                assert [finding for finding in verdict.findings if finding.file == file.name], (file.name, left)
            file.write_bytes(data)

    def test_a_flipped_bit_is_seen_by_deep(self, copied):
        step = copied(FSDP2)
        for file in sorted(step.glob("*.pt")):
            data = file.read_bytes()
            with zipfile.ZipFile(file) as archive:
                info = max(archive.infolist(), key=lambda info: info.file_size if "/data/" in info.filename else -1)
            flip_byte(file, info.header_offset + 200)
            assert verdict_on(step, Level.DEEP).state is State.DAMAGED, file.name
            file.write_bytes(data)

    def test_ranks_of_two_saves_disagree(self, copied):
        """A file of another model under the name of a rank."""
        step = copied(FSDP2)
        shutil.copy(TCK[1] / "model_1.pt", step / "model_world_size_2_rank_1.pt")
        assert not verdict_on(step).whole

    def test_files_of_another_world_size_are_named(self, copied):
        step = copied(FSDP2)
        shutil.copy(step / "model_world_size_2_rank_0.pt", step / "model_world_size_1_rank_0.pt")
        checkpoint = dcptool.open(step)
        assert checkpoint.world_size == 2
        assert "leftover-files" in {problem.kind for problem in checkpoint.problems}
        require_true(checkpoint, truth(FSDP2))

    def test_metadata_of_torch_checkpointing_that_lies(self, copied):
        step = copied(TCK[1])
        data = (step / "metadata.pkl").read_bytes()
        for at in range(0, len(data), 97):
            (step / "metadata.pkl").write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
            verdict_on(step)  # never an error of ours
        (step / "metadata.pkl").write_bytes(b"")
        assert not verdict_on(step).whole


class TestRun:
    @pytest.fixture
    def verl(self, tmp_path):
        for number in (1, 2, 3):
            step = tmp_path / "run" / f"global_step_{number}"
            shutil.copytree(FSDP2, step / "actor")
            shutil.copy(FSDP2 / "extra_state_world_size_2_rank_0.pt", step / "data.pt")
        (step / "actor" / "model_world_size_2_rank_0.pt").unlink()
        for file in (tmp_path / "run").rglob("*"):
            os.utime(file, (OLD, OLD))
        return tmp_path / "run"

    def test_latest_prune_mark_and_copy(self, verl, tmp_path):
        assert run("latest", verl).stdout.strip() == str(verl / "global_step_2")
        assert run("mark", verl / "global_step_2").returncode == 0
        assert run("verify", "--deep", "--require-marker", verl / "global_step_2").returncode == 0
        done = run("copy", verl / "global_step_2", tmp_path / "copy")
        assert done.returncode == 0, done.stderr
        assert verdict_on(tmp_path / "copy", Level.DEEP).whole
        assert run("prune", verl, "--keep", "1", "--yes").returncode == 0
        assert sorted(path.name for path in verl.iterdir()) == ["global_step_2", "global_step_3"]

    def test_what_a_marked_step_loses_is_seen(self, verl):
        assert run("mark", "--checksums", verl / "global_step_1").returncode == 0
        flip_byte(verl / "global_step_1" / "actor" / "optim_world_size_2_rank_1.pt", 20_000)
        assert run("verify", "--deep", verl / "global_step_1").returncode == 1


class TestOneFileAlone:
    def test_has_the_boxes_of_its_rank(self):
        checkpoint = dcptool.open(ONE)
        for fqn, expected in about(ALONE)["parts"]["."].items():
            entry = checkpoint[fqn]
            assert list(entry.shape) == expected["global_shape"]
            assert [chunk[:2] for chunk in entry.chunks] == [(tuple(expected["offset"]), tuple(expected["shape"]))]
            read = checkpoint.read(fqn, expected["offset"], expected["shape"])
            assert hashlib.sha256(read.tobytes()).hexdigest() == expected["sha256"]
            with pytest.raises(dcptool.errors.LayoutError):
                checkpoint.read(fqn)

    def test_says_whose_it_is_and_how_much(self):
        done = run("inspect", ONE)
        assert "rank 2 of 4" in done.stdout
        assert "1/4 of these tensors" in done.stdout

    @pytest.mark.parametrize("level", Level)
    def test_is_incomplete_with_the_way_out(self, level):
        verdict = verdict_on(ONE, level)
        assert verdict.state is State.INCOMPLETE
        [found] = verdict.findings
        assert found.kind == "one-rank"
        assert str(ALONE) in found.next_step

    @pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
    @pytest.mark.parametrize("file", [ONE, FSDP1 / "model_world_size_2_rank_1.pt"], ids=by_name)
    def test_is_not_converted(self, file, to, tmp_path):
        for more in ([], ["--skip-corrupt"]):
            done = run("convert", "--to", to, *more, file, tmp_path / "out")
            assert done.returncode == 3
            assert "rank" in done.stderr or "no chunk holds" in done.stderr
            assert list(tmp_path.iterdir()) == []


MODEL = [
    Parameter(fqn, shape, fqn)
    for fqn, shape in {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (2, 4), "b.bias": (2,)}.items()
]


class TestNumbers:
    """Which parameter a number of an optimizer is."""

    def test_one_group_is_in_the_order_of_the_model(self):
        shapes = {0: (4, 4), 1: (4,), 3: (2,)}
        assert names_of(MODEL, [[0, 1, 2, 3]], shapes) == {0: "a.weight", 1: "a.bias", 2: "b.weight", 3: "b.bias"}

    def test_groups_by_shape(self):
        shapes = {0: (4, 4), 1: (2, 4), 2: (4,), 3: (2,)}
        assert names_of(MODEL, [[0, 1], [2, 3]], shapes) == {
            0: "a.weight",
            1: "b.weight",
            2: "a.bias",
            3: "b.bias",
        }

    def test_a_tied_parameter_counts_once(self):
        model = [*MODEL, Parameter("tied.weight", (4, 4), "a.weight")]
        assert names_of(model, [[0, 1, 2, 3]], {0: (4, 4)})[0] == "a.weight"

    def test_frozen_ones_are_told_by_their_shapes_alone(self):
        assert names_of(MODEL, [[0]], {0: (2, 4)}) == {0: "b.weight"}

    @pytest.mark.parametrize(
        ("groups", "shapes"),
        [
            ([[0, 1]], {0: (4, 4)}),  # nothing tells what 1 is
            ([[0, 1, 2, 3]], {0: (2, 4)}),  # another order
            ([[0], [1]], {0: (4, 4), 1: (4, 4)}),  # one shape in two groups
            ([[0]], {0: (9,)}),
            ([[0, 1, 2, 3]], {9: (4, 4)}),  # state of what is in no group
            ([[0, 0]], {0: (4, 4)}),
        ],
    )
    def test_else_nothing_is_certain(self, groups, shapes):
        assert names_of(MODEL, groups, shapes) is None


def rewritten(file, change):
    """Write a file anew with what `change` makes of the stand-ins of its first tensor's attributes."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in members if name.endswith("/data.pkl"))
    root = inert.load(members[name])
    call = root.items[0][1]
    function, kind, arguments, state = call.args
    call.args = (function, kind, *change(arguments, state))
    members[name] = emit(root, 2)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)


def spec_of(state):
    return state[1]["_spec"].state


def shaped(shape):
    def change(arguments, state):
        spec_of(state)["tensor_meta"].args = (call("torch.Size", shape), *spec_of(state)["tensor_meta"].args[1:])
        return (*arguments[:2], shape, *arguments[3:]), state

    return change


def edited(edit):
    def change(arguments, state):
        edit(spec_of(state))
        return arguments, state

    return change


def axes(*sizes):
    def edit(spec):
        spec["mesh"].state["_layout"].state["axes"] = tuple(
            new("torch.distributed._mesh_layout._FlatLayout", {"shape": size, "stride": (1,)}) for size in sizes
        )

    return edit


def placed(name, **attributes):
    return lambda spec: spec.update(placements=(new(f"torch.distributed.tensor.placement_types.{name}", attributes),))


LIES = {
    "a longer whole": shaped((2**62, 12)),
    "a shape that is none": lambda arguments, state: ((*arguments[:2], ("a",), *arguments[3:]), state),
    "two shapes": lambda arguments, state: ((*arguments[:2], (36, 12), *arguments[3:]), state),
    "no such dimension": edited(placed("Shard", dim=7)),
    "no dimension": edited(placed("Shard", dim="0")),
    "a strided cut of too many parts": edited(placed("_StridedShard", dim=0, split_factor=10**12)),
    "another cut": edited(placed("Shard", dim=1)),
    "a rank outside": edited(lambda spec: spec["mesh"].state.update(_coordinate_on_dim=(99,))),
    "no place": edited(lambda spec: spec["mesh"].state.pop("_coordinate_on_dim")),
    "a mesh of nothing": edited(axes((0,))),
    "a mesh of more dimensions": edited(axes((2,), (3,))),
    "an enormous mesh": edited(axes((10**15,))),
    "a mesh that is none": edited(lambda spec: spec.update(mesh=None)),
    "no placements": edited(lambda spec: spec.update(placements=None)),
    "no spec": lambda arguments, state: (arguments, (None, {"_local_tensor": state[1]["_local_tensor"]})),
}


class TestLies:
    @pytest.mark.parametrize("lie", LIES)
    def test_are_findings(self, lie, copied):
        step = copied(FSDP2)
        rewritten(step / "model_world_size_2_rank_1.pt", LIES[lie])
        verdict = verdict_on(step)
        assert verdict.state is State.DAMAGED
        assert "embed_tokens" in " ".join(finding.message for finding in verdict.findings)
        alone = verdict_on(step / "model_world_size_2_rank_1.pt")
        assert not alone.whole

    @pytest.mark.parametrize("name", ["Partial", "_MaskPartial", "SomethingNew"])
    def test_a_placement_that_is_no_value_is_named(self, name, copied):
        step = copied(FSDP2)
        rewritten(step / "model_world_size_2_rank_1.pt", edited(placed(name, reduce_op="sum")))
        assert not verdict_on(step).whole
        done = run("inspect", step / "model_world_size_2_rank_1.pt")
        assert f"placed as {name}" in done.stdout

    def test_offsets_of_a_sharded_tensor_outside(self, copied):
        def change(arguments, state):
            metadata = state[0][0].state[1]["metadata"].state[1]
            metadata["shard_offsets"] = [30, 0]
            return arguments, state

        step = copied(FSDP1)
        rewritten(step / "model_world_size_2_rank_1.pt", change)
        assert verdict_on(step).state is State.DAMAGED

    def test_overlapping_shards_are_seen(self, copied):
        def change(arguments, state):
            state[0][0].state[1]["metadata"].state[1]["shard_offsets"] = [10, 0]
            return arguments, state

        step = copied(FSDP1)
        rewritten(step / "model_world_size_2_rank_1.pt", change)
        assert {"hole", "overlap"} <= {finding.kind for finding in verdict_on(step).findings}

    def test_a_file_that_runs_code_makes_the_step_unsafe(self, copied, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        for folder in (FSDP2, TCK[1]):
            step = copied(folder)
            for file in sorted(step.glob("*.pt")):
                data = file.read_bytes()
                file.write_bytes(pickle.dumps(Evil()))
                assert verdict_on(step).state is State.UNSAFE, file.name
                assert run("convert", "--to", "torch", step, tmp_path / "out.pt").returncode == 3
                file.write_bytes(data)
        (step / "metadata.pkl").write_bytes(pickle.dumps(Evil()))
        assert verdict_on(step).state is State.UNSAFE
        assert not (tmp_path / "executed").exists()
