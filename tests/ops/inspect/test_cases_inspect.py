"""What people ran into, one test per case as far as `inspect` goes; saves are by torch's own planner and writer.

R36, R37 and the kinds of notes are in test_notes.py; every flavour with its evidence is in test_flavours.py.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re

import pytest

import dcptool
from dcptool.errors import CheckpointNotFoundError
from tests.conftest import FOREIGN, PARTS, WHOLE, part, run
from tests.damage import copy

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import metadata as torch_metadata  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402

from tests.ranks import Shard, save  # noqa: E402


def summary(path, **options):
    (checkpoint,) = dcptool.summarize(path, **options).checkpoints
    return checkpoint


def messages(path) -> dict[str, str]:
    return {problem.kind: problem.message for problem in summary(path).problems}


def model(names: str = "ab") -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.ones(4, 2) for name in names}


def adamw(names: str = "ab") -> dict:
    """A real AdamW's state after one step, named by parameter index."""
    parameters = [torch.nn.Parameter(torch.ones(4, 2)) for _ in names]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    return optimizer.state_dict()


# The note on a prefix of all names: test_notes.py::test_a_prefix_of_all_names.
def test_r08_the_model_alone_is_selected_and_its_share_shown(tmp_path):
    state = {"app": {"model": model(), "optim": adamw()}, "sched": {"last_epoch": 3}}
    path = save(tmp_path / "c", state)
    shown = run("inspect", path, "--keys", "app.model.*").stdout
    assert "content     2 tensors of 64 B, 0 objects (selected from " in shown
    assert "app.optim" not in shown
    groups = {group.name: (group.n_tensors, group.nbytes) for group in summary(path, depth=2).groups}
    assert groups["app.model"] == (2, 64)
    assert groups["app.optim"] == (6, 2 * 2 * 32 + 2 * 4)
    assert groups["sched"] == (0, 0)
    done = run("inspect", path, "--keys", "model.*")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"{path}: no entry matches 'model.*'; names begin with 'app' (200 bytes), 'sched' (0 bytes)" in done.stderr


def test_r10_alike_directories_are_told_apart(tmp_path):
    plain = save(tmp_path / "plain", {"w": torch.ones(2)})
    megatron = save(tmp_path / "megatron", {"w": torch.ones(2)})
    (megatron / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 7}, megatron / "common.pt")
    lightning = save(tmp_path / "lightning", {"w": torch.ones(2)})
    torch.save({"epoch": 1}, lightning / "meta.pt")
    for path, says in [
        (plain, "torch DCP (.metadata version 1.0.0)"),
        (megatron, 'Megatron torch_dist (metadata.json says "torch_dist"; .metadata version 1.0.0)'),
        (lightning, "Lightning (meta.pt beside .metadata; .metadata version 1.0.0)"),
        (FOREIGN / "hf_sharded", "safetensors, HuggingFace DCP shards (3 files with safetensors headers; "),
        (FOREIGN / "w_no_collectives", "torch DCP, rank-local metadata (2 × __R.metadata, no .metadata: "),
    ]:
        assert re.search(f"^  format +{re.escape(says)}", run("inspect", path).stdout, re.MULTILINE)


def test_r13_hyper_parameters_stand_apart_from_tensors(tmp_path):
    state = {"opt": adamw()}
    new = save(tmp_path / "new", state)
    removed = state["opt"]["param_groups"][0].pop("decoupled_weight_decay", "not in this torch")
    old = save(tmp_path / "old", state)
    objects = [{item.fqn: item.value for item in summary(path).objects} for path in (new, old)]
    assert all(fqn.startswith("opt.param_groups.0.") for fqn in objects[0])
    assert objects[0]["opt.param_groups.0.lr"] == 0.001
    assert objects[0].keys() - objects[1].keys() == {"opt.param_groups.0.decoupled_weight_decay"}
    assert objects[0]["opt.param_groups.0.decoupled_weight_decay"] == removed
    assert all("param_groups" not in tensor.fqn for tensor in summary(new).tensors)


def test_r15_extra_state_is_one_line_whatever_form_it_has(tmp_path):
    state = {
        "m.layers.fc._extra_state/shard_0_2": io.BytesIO(b"x"),
        "m.layers.fc._extra_state/shard_1_2": torch.zeros(0, dtype=torch.uint8),
        "m.layers.fc.weight": torch.ones(3),
    }
    path = save(tmp_path / "c", state)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, path / "common.pt")
    shown = run("inspect", path)
    assert (shown.returncode, shown.stderr) == (0, "")
    notes = [line for line in shown.stdout.splitlines() if line.startswith("note: ") and "_extra_state" in line]
    assert notes == [
        "note: 2 entries are _extra_state: FP8 bookkeeping that comes and goes with TransformerEngine's version"
    ]
    kinds = {type(entry).__name__ for fqn, entry in dcptool.open(path).items() if "_extra_state" in fqn}
    assert kinds == {"ObjectEntry", "TensorEntry"}


# Families with gaps and of other sizes: test_notes.py::test_families_that_imply_another_number_of_ranks.
def test_r17_one_rank_has_the_state_of_all(tmp_path):
    states = [{"rng": {"python": rank}, "w": torch.ones(1), f"dl.rank{rank}": {"pos": rank}} for rank in range(4)]
    found = summary(save(tmp_path / "family", *states))
    kept = {item.fqn: item.value for item in found.objects}
    assert kept.pop("rng.python") in range(4)
    assert kept == {f"dl.rank{rank}.pos": rank for rank in range(4)}
    assert messages(tmp_path / "family")["per-rank"] == "'dl.rankN.pos' is saved per rank, for 4 ranks"
    once = save(tmp_path / "once", *({"rng": state["rng"], "w": state["w"]} for state in states))
    assert "note: 'rng.python' is stored once, of 4 ranks: the same on all of them, or the other ranks' is lost\n" in (
        run("inspect", once).stdout
    )


def test_r29_of_values_that_differ_by_rank_one_is_there_and_it_says_so(tmp_path):
    path = save(tmp_path / "c", *({"w": torch.full((3,), float(rank))} for rank in range(2)))
    shown = run("inspect", path, "--chunks").stdout
    assert "note: 1 of 1 tensors are stored whole, such as 'w': one rank's copy\n" in shown
    assert "  If ranks held different values under that name, the others are lost.\n" in shown
    rank = int(re.search(r"offsets \[0\] sizes \[3\]  __(\d)_0\.distcp:", shown)[1])
    assert dcptool.open(path).read("w").tolist() == [rank] * 3


def test_r30_one_nodes_files_are_not_enough(tmp_path):
    replicas = {f"count{i}": torch.tensor(i) for i in range(8)} | {"scale": torch.ones(2), "shift": torch.ones(2)}
    states = [{"w": Shard.of(torch.zeros(8, 2), rank, 4), **replicas} for rank in range(4)]
    path = save(tmp_path / "c", *states)
    assert re.search(r"stored whole, .* spread over the files of 2 ranks", messages(path)["whole-tensors"])
    files = {file for tensor in summary(path).tensors if tensor.fqn in replicas for file in tensor.files}
    assert len(files) > 2
    for rank in (2, 3):  # the other node's
        (path / f"__{rank}_0.distcp").unlink()
    assert re.fullmatch(
        r"2 of 4 files \(ranks 2–3\) are missing: they held \d+% of the bytes, \d+ items of \d+ tensors"
        r"; the first is __2_0.distcp",
        messages(path)["missing-file"],
    )
    assert summary(path).state == "incomplete"


def test_r31_who_wrote_what_and_replicas_are_stored_once(tmp_path):
    whole = torch.arange(80.0).reshape(40, 2)
    states = [{"w": Shard.of(whole, rank % 2, 2)} for rank in range(4)]
    path = save(tmp_path / "c", *states, lowest_rank=True)
    (tensor,) = summary(path).tensors
    assert (str(tensor.layout), tensor.n_chunks, tensor.files) == ("Shard(0) ×2", 2, ("__0_0.distcp", "__1_0.distcp"))
    shown = run("inspect", path, "--by-file").stdout
    rows = {cells[0]: cells for line in shown.splitlines() if (cells := line.split())[:1] and "distcp" in cells[0]}
    assert [rows[f"__{rank}_0.distcp"][1] for rank in range(4)] == ["0", "1", "2", "3"]
    assert [rows[f"__{rank}_0.distcp"][-1] for rank in range(4)] == ["50.0%", "50.0%", "0.0%", "0.0%"]
    assert shown.endswith("imbalance: rank 0 has 2.00 × the mean of 4 ranks\n")
    hsdp = summary(part("hsdp").path)
    assert {str(tensor.layout) for tensor in hsdp.tensors} == {"Shard(0) ×2"}


# Optimizers for some parameters: test_notes.py::test_an_optimizer_without_tensors_and_one_for_some_parameters.
def test_r35_no_optimizer_tensors_shows_in_the_overview(tmp_path):
    state = {"model": model("abcd"), "optim": {"param_groups": [{"lr": 0.1, "params": ["a.weight"]}], "state": {}}}
    shown = run("inspect", save(tmp_path / "c", state)).stdout
    assert re.search(r"^model +4 +32 +128 B +0 +float32$", shown, re.MULTILINE)
    assert re.search(r"^optim +0 +0 +0 B +\d+$", shown, re.MULTILINE)
    assert "note: there are optimizer hyper-parameters but no optimizer tensors: it was saved before its first" in shown


def test_r38_text_keys_that_were_integers(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([parameter], lr=0.1), milestones=[2, 4])
    path = save(tmp_path / "c", {"sched": schedule.state_dict()})
    assert (
        "note: keys under 'sched.milestones' look like integers; DCP stores them as text\n"
        in run("inspect", path).stdout
    )


def test_r50_side_files_are_explained_and_an_unfinished_save_is_named(tmp_path):
    shown = run("inspect", "fixtures/foreign/megatron_tp2/iter_0000010").stdout
    assert (
        "note: beside it: common.pt (Megatron's arguments, RNG state and iteration), "
        "metadata.json (Megatron's choice of back end)\n"
    ) in shown
    folder = copy(FOREIGN / "megatron_tp2" / "iter_0000010", tmp_path / "weights")
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no \.metadata, only data files of ranks 0–1: the save never"):
        dcptool.open(folder)


def test_r51_every_torch_opens():
    versions = {re.match(r"\d+\.\d+", found.about["versions"]["torch"])[0] for found in PARTS}
    assert versions >= {"2.2", "2.4", "2.6", "2.13", "2.14"}
    for found in WHOLE:
        checkpoint = summary(found.path)
        assert checkpoint.n_entries == len(found.expected), found.name
        assert (checkpoint.state, checkpoint.good) == ("complete", True), found.name


# Counting by parts, not by text: test_notes.py::test_wrapper_parts_of_names.
def test_r56_wrapper_parts_are_flagged(tmp_path):
    names = ("module._orig_mod.a.weight", "layers.0._checkpoint_wrapped_module.weight", "submodule.weight")
    path = save(tmp_path / "c", {"model": {name: torch.ones(2) for name in names}})
    assert (
        "note: names have parts of wrappers: _orig_mod. in 1 entry, _checkpoint_wrapped_module. in 1 entry, "
        "module. in 1 entry; a bare model does not have them\n"
    ) in run("inspect", path).stdout
    assert "wrapper-names" not in messages(save(tmp_path / "bare", {"model": {"submodule.weight": torch.ones(2)}}))


def large_metadata(n_tensors: int, n_chunks: int) -> torch_metadata.Metadata:
    """Metadata of tensors with a row per rank, one item of 1,000 bytes each."""
    shape = torch.Size([n_chunks, 4])
    properties = torch_metadata.TensorProperties(dtype=torch.float32)
    chunks = [torch_metadata.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in range(n_chunks)]
    names = [f"model.layers.{index}.weight" for index in range(n_tensors)]
    tensors = {name: torch_metadata.TensorStorageMetadata(properties, shape, chunks) for name in names}
    storage = {
        torch_metadata.MetadataIndex(name, chunk.offsets): _StorageInfo(f"__{row}_0.distcp", 1000 * index, 1000)
        for index, name in enumerate(names)
        for row, chunk in enumerate(chunks)
    }
    return torch_metadata.Metadata(tensors, {name: (name,) for name in names}, storage)


def test_r57_150_000_chunks_are_summarized_not_listed(tmp_path):
    with open(tmp_path / ".metadata", "wb") as file:
        pickle.dump(large_metadata(300, 512), file)
    for rank in range(512):
        with open(tmp_path / f"__{rank}_0.distcp", "wb") as file:
            file.truncate(300 * 1000)
    done = run("inspect", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) < 20
    assert "  world size  512" in lines
    assert lines[-1].split() == [
        "model.layers.{0–299}.weight",
        "300",
        "float32",
        "512×4",
        "2.46",
        "MB",
        "Shard(0)",
        "×512",
    ]


def test_r62_codecs_are_shown_and_unknown_ones_are_no_damage(tmp_path):
    assert "items went through stream.zstd/1" in run("inspect", "fixtures/foreign/w_zstd").stdout
    path = save(tmp_path / "c", {"w": torch.ones(3), "step": 7})
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.storage_data = {
        index: dataclasses.replace(info, transform_descriptors=["vendor.codec"])
        for index, info in metadata.storage_data.items()
    }
    with open(path / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    done = run("inspect", path)
    assert done.returncode == 0
    assert "state       complete" in done.stdout
    assert "items went through vendor.codec" in done.stdout
    assert re.search(r"^note: 1 object of __0_0\.distcp cannot be read; .*vendor\.codec", done.stdout, re.MULTILINE)


class TestBeside:
    """A step is judged with the files beside its checkpoints, as `verify` judges it."""

    @pytest.mark.parametrize("how", ["missing", "cut", "empty"])
    def test_n41_what_is_wrong_beside_a_checkpoint_is_wrong_with_the_step(self, tmp_path, how):
        step = copy(FOREIGN / "megatron_tp2" / "iter_0000010", tmp_path / "iter_0000010")
        assert summary(step).good
        common = step / "common.pt"
        if how == "missing":
            common.unlink()
        else:
            common.write_bytes(common.read_bytes()[: 700 * (how == "cut")])
        done = run("inspect", step)
        assert done.returncode == 1
        assert "state       incomplete" in done.stdout
        assert "error: common.pt is" in done.stdout

    def test_of_several_checkpoints_it_stands_above_them(self, tmp_path):
        step = copy(FOREIGN / "accelerate_fsdp2", tmp_path / "checkpoint_0")
        assert dcptool.summarize(step).good
        (step / "random_states_0.pkl").unlink()
        found = dcptool.summarize(step)
        assert not found.good
        assert [note.file for note in found.notes] == ["random_states_0.pkl"]
        assert "error: random_states_0.pkl is missing" in run("inspect", step).stdout
