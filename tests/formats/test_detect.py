"""Which checkpoint a path means: files, folders, parents as frameworks nest them, and things that are none."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError, MetadataError, StorageError, UnsupportedError
from dcptool.formats.detect import find_parts
from dcptool.ops.verify.verdict import State
from dcptool.storage import locate
from tests.conftest import FOREIGN, run
from tests.damage import copy, truncate

pytestmark = pytest.mark.torchfree

SMALL = FOREIGN / "w_nodist"

# R03: where frameworks put their DCP folders below the one users think of.
NESTED = {
    "accelerate": ["pytorch_model_fsdp_0", "optimizer_0"],
    "olmo": ["model_and_optim"],
    "nemo": ["policy/weights/model", "policy/optimizer/optim"],
    "megatron": ["iter_0000010"],
    "nemo2": ["weights"],
    "composer": ["ep1-ba500"],
}


@pytest.mark.parametrize("name", NESTED)
def test_parents_find_their_parts(tmp_path, name):
    for part in NESTED[name]:
        copy(SMALL, tmp_path / part)
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "rank0.pt").write_bytes(b"x")
    (tmp_path / ".hidden").mkdir()
    copy(SMALL, tmp_path / ".hidden" / "x")
    copy(SMALL, tmp_path / "tmp_save")
    assert sorted(part.name for part in find_parts(locate(tmp_path))) == sorted(NESTED[name])
    if len(NESTED[name]) == 1:
        assert dcptool.open(tmp_path).read("w").shape == (3, 5)
    else:
        with pytest.raises(CheckpointNotFoundError, match="holds 2 checkpoints; name one") as caught:
            dcptool.open(tmp_path)
        assert all(str(tmp_path / part) in str(caught.value) for part in NESTED[name])


def test_metadata_file_itself_means_its_folder():
    assert dcptool.open(SMALL / ".metadata").read("w").shape == (3, 5)
    assert "rank-local" in dcptool.open(FOREIGN / "w_no_collectives" / "__1.metadata").flavour


def test_a_data_file_names_its_folder():
    with pytest.raises(UnsupportedError, match=r"one data file of a DCP checkpoint; name its folder"):
        dcptool.open(SMALL / "__0_0.distcp")


# R05: four ways to have no metadata, four different lines.
def test_r05_missing_empty_truncated_and_text_are_told_apart(tmp_path):
    for name in ("missing", "empty", "cut", "text"):
        copy(SMALL, tmp_path / name)
    (tmp_path / "missing" / ".metadata").rename(tmp_path / "missing" / ".metadata.tmp")
    truncate(tmp_path / "empty" / ".metadata", 0)
    truncate(tmp_path / "cut" / ".metadata", 300)
    (tmp_path / "text" / ".metadata").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name, error, says in [
        ("missing", CheckpointNotFoundError, r"\.metadata\.tmp is there: the save never finished"),
        ("empty", MetadataError, "is empty"),
        ("cut", MetadataError, "cut short: it ends at byte 300"),
        ("text", MetadataError, "Git LFS pointer"),
    ]:
        with pytest.raises(error, match=says) as caught:
            dcptool.open(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


# R52, R69: folders of other software are named, not called damaged.
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("metadata.pkl", "metadata.pkl"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "DeepSpeed"),
        ("model.rank_0.pth", "one torch.save file per rank"),
        (".snapshot_metadata", "torchsnapshot"),
        ("_CHECKPOINT_METADATA", "Orbax"),
        ("ep1-ba500-rank0.pt", "one torch.save file per rank.*\n.*dcptool shows one file at a time: .*-rank0.pt"),
        ("consolidated.00.pth", "Llama"),
        ("gpt.nemo", "a NeMo archive, which is a tar file"),
        ("recipe_state.pt", "torchtune"),
        ("zero_to_fp32.py", "DeepSpeed"),
        ("model.ckpt-7.data-00000-of-00001", "TensorFlow"),
        ("model.pt", "holds torch.save files \\(model.pt\\); name one"),
        ("notes.txt", "holds no checkpoint"),
    ],
)
def test_other_formats_are_named(tmp_path, file, says):
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError, match=says) as caught:
        dcptool.open(tmp_path)
    assert "damaged" not in str(caught.value)


def test_megatrons_zarr_back_end_is_named_and_its_torch_dist_is_not(tmp_path):
    for folder in ("embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc1.weight"):
        (tmp_path / "zarr" / folder).mkdir(parents=True)
        (tmp_path / "zarr" / folder / ".zarray").write_text('{"zarr_format": 2}')
        (tmp_path / "zarr" / folder / "0.0").write_bytes(b"x")
    (tmp_path / "zarr" / "common.pt").write_bytes(b"x")
    (tmp_path / "zarr" / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(CheckpointNotFoundError, match=r"metadata\.json looks like a Megatron checkpoint of the zarr"):
        dcptool.open(tmp_path / "zarr")
    (tmp_path / "zarr" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CheckpointNotFoundError, match=r"holds torch\.save files \(common\.pt\)"):
        dcptool.open(tmp_path / "zarr")
    megatron = copy(FOREIGN / "megatron_tp2" / "iter_0000010", tmp_path / "torch_dist")
    assert dcptool.open(megatron).flavour == "Megatron torch_dist"


def test_folders_tell_too(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError, match="mp_rank_00 looks like a legacy Megatron checkpoint"):
        dcptool.open(tmp_path)


def test_an_archive_as_the_path_itself(tmp_path):
    import tarfile

    (tmp_path / "weights").mkdir()
    with tarfile.open(tmp_path / "gpt.nemo", "w") as archive:
        archive.add(tmp_path / "weights", "weights")
    with pytest.raises(UnsupportedError, match=r"gpt\.nemo is a tar archive.*unpack it"):
        dcptool.open(tmp_path / "gpt.nemo")


def test_files_that_are_none(tmp_path):
    for name, content, says in [
        ("a.txt", b"hello", "looks like text"),
        ("empty.pt", b"", "is empty"),
        ("page.pt", b"<html>404", "HTML"),
        ("bare.pkl", b"\x80\x04N.", "bare pickle"),
        ("cut.safetensors", b"\x10\0\0\0\0\0\0\0{", "cut short"),
        ("short.safetensors", b"abc", "not a header length"),
        ("cut.pt", b"PK\x03\x04" + bytes(50), "does not end like a zip"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises((MetadataError, UnsupportedError), match=says) as caught:
            dcptool.open(tmp_path / name)
        assert name in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 2


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="is empty"):
        dcptool.open(tmp_path)


def test_a_folder_in_place_of_the_metadata(tmp_path):
    (tmp_path / "c" / ".metadata").mkdir(parents=True)
    (tmp_path / "c" / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises((CheckpointNotFoundError, StorageError)):
        dcptool.open(tmp_path / "c")


def test_metadata_beside_rank_metadata_is_noted(tmp_path):
    folder = copy(SMALL, tmp_path / "c")
    shutil.copy(FOREIGN / "w_no_collectives" / "__0.metadata", folder)
    assert [problem.kind for problem in dcptool.open(folder).problems] == ["two-metadata"]


def test_a_missing_rank_of_rank_local_metadata_is_an_error(tmp_path):
    folder = copy(FOREIGN / "w_no_collectives", tmp_path / "c")
    (folder / "__0.metadata").unlink()
    problems = dcptool.open(folder).problems
    assert [problem.kind for problem in problems] == ["rank-metadata-missing"]


def test_safetensors_index_problems(tmp_path):
    folder = copy(FOREIGN / "hf_consolidated", tmp_path / "c")
    (folder / "model-00002-of-00002.safetensors").unlink()
    problems = dcptool.open(folder).problems
    assert {problem.kind for problem in problems} == {"missing-file"}
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x.safetensors"}}')
    with pytest.raises(MetadataError, match="outside the folder; refused"):
        dcptool.open(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(MetadataError, match="not an index"):
        dcptool.open(folder)


# R42: everything works on a URL, with ranged reads only.
def test_r42_urls():
    import fsspec

    filesystem = fsspec.filesystem("memory")
    for file in SMALL.iterdir():
        filesystem.pipe_file(f"/r42/step_1/{file.name}", file.read_bytes())
    checkpoint = dcptool.open("memory://r42/step_1")
    assert checkpoint.read("w").tobytes() == dcptool.open(SMALL).read("w").tobytes()
    assert dcptool.summarize("memory://r42").steps[0].state == "complete"


def save_safetensors(path, **tensors):
    """Write a file of uint8 tensors with a header of our own, no library needed."""
    import json

    header, data = {}, b""
    for name, values in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(values)]}
        data += bytes(values)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_one_name_in_two_files_that_are_no_shards_is_never_mixed(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", w=[1, 2, 3, 4])
    save_safetensors(tmp_path / "b.safetensors", w=[9, 9])
    checkpoint = dcptool.open(tmp_path)
    assert checkpoint.read("w").tolist() == [1, 2, 3, 4]
    assert [problem.kind for problem in checkpoint.problems] == ["duplicate-name"]
    assert "a.safetensors and in b.safetensors" in checkpoint.problems[0].message


def test_two_indexes_are_a_question_not_a_choice(tmp_path):
    folder = copy(FOREIGN / "hf_consolidated", tmp_path / "c")
    shutil.copy(folder / "model.safetensors.index.json", folder / "model.fp16.safetensors.index.json")
    with pytest.raises(CheckpointNotFoundError, match="2 safetensors indexes; name one"):
        dcptool.open(folder)
    assert not dcptool.open(folder / "model.safetensors.index.json").problems


def test_a_missing_shard_between_others_is_named(tmp_path):
    folder = copy(FOREIGN / "hf_sharded", tmp_path / "c")
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    summary = dcptool.summarize(folder).checkpoints[0]
    assert summary.state != "complete"
    messages = " ".join(problem.message for problem in summary.problems)
    assert "the files of shard 2 of at least 3 are missing" in messages
    assert "no chunk holds" not in messages  # what was in a file that is not there is not known


def test_a_rank_that_had_nothing_to_write_is_not_missed(tmp_path):
    """Boxes decide, not the numbers in the names: a rank outside the submesh leaves no file."""
    folder = copy(FOREIGN / "hf_sharded", tmp_path / "c")
    last = folder / "shard-00003-model-00001-of-00001.safetensors"
    last.rename(folder / "shard-00007-model-00001-of-00001.safetensors")
    for path in (folder, FOREIGN / "hf_idle_absent_w4"):
        for level in Level:
            (verdict,) = dcptool.verify(path, dcptool.VerifyOptions(level=level)).verdicts
            assert (verdict.state, verdict.reason) == (State.COMPLETE, "")
        assert run("convert", "--to", "safetensors", path, tmp_path / f"{path.name}.safetensors").returncode == 0
    (note,) = [found.message for found in dcptool.open(folder).problems]
    assert note.startswith("there is no file of shards 3, 4, 5, 6 of at least 7, and ")
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    (missing,) = [found for found in dcptool.open(folder).problems if found.kind == "missing-file"]
    assert "the files of shards 2, 3, 4, 5, 6 of at least 7 are missing" in missing.message


def test_a_file_that_the_index_does_not_name_is_there(tmp_path):
    """An exporter wrote the index first: a warning with words, for who loads by it does not see the file."""
    for number in (1, 2):
        save_file({f"w{number}": np.ones(3)}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w1": "model-00001-of-00002.safetensors"}}))
    (verdict,) = dcptool.verify(tmp_path).verdicts
    assert verdict.state is State.COMPLETE
    assert verdict.reason == f"model-00002-of-00002.safetensors is there, but {index.name} does not name it"
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    (verdict,) = dcptool.verify(tmp_path).verdicts
    assert verdict.state is State.INCOMPLETE
    assert "1 of 2 files are missing: model-00002-of-00002.safetensors" in verdict.reason


def test_one_damaged_file_among_many_does_not_hide_the_rest(tmp_path):
    folder = copy(FOREIGN / "w_no_collectives", tmp_path / "ranks")
    truncate(folder / "__1.metadata", 500)
    checkpoint = dcptool.open(folder)
    assert "rank-metadata-damaged" in {problem.kind for problem in checkpoint.problems}
    assert checkpoint.read("model.rep").shape == (3,)
    folder = copy(FOREIGN / "hf_sharded", tmp_path / "shards")
    truncate(folder / "shard-00003-model-00001-of-00001.safetensors", 20)
    checkpoint = dcptool.open(folder)
    assert "bad-file" in {problem.kind for problem in checkpoint.problems}
    assert len(checkpoint.tensors["model.embed.weight"].chunks) == 2


def test_links_that_loop_or_point_are_no_steps(tmp_path):
    run = tmp_path / "run"
    copy(SMALL, run / "step_1")
    (run / "loop").symlink_to("loop")
    (run / "step_9").symlink_to("step_1")
    (run / "latest").symlink_to("step_1")
    copy(SMALL, tmp_path / "elsewhere")
    (run / "step_99").symlink_to(tmp_path / "elsewhere")
    summary = dcptool.summarize(run)
    assert [step.name for step in summary.steps] == ["step_1"]
    assert not summary.others
    (run / "step_1" / "loop").symlink_to("loop")
    assert dcptool.open(run / "step_1").read("w").shape == (3, 5)


def test_chained_urls_name_parts_inside(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for file in (FOREIGN / "accelerate_fsdp2").rglob("*"):
            if file.is_file():
                archive.write(file, f"ck/{file.relative_to(FOREIGN / 'accelerate_fsdp2')}")
    summary = dcptool.summarize(f"zip://ck::file://{tmp_path}/x.zip")
    assert [checkpoint.state for checkpoint in summary.checkpoints] == ["complete", "complete"]
