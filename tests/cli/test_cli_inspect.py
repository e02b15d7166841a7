"""`dcptool inspect` as a process: output, exit codes, JSON, and what a tired person sees when something is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

import dcptool
from tests.conftest import FOREIGN, PARTS, ROOT, run, run_process
from tests.damage import copy, truncate


@pytest.mark.torchfree
def test_a_checkpoint():
    done = run("inspect", "fixtures/foreign/xver_t2130")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fixtures/foreign/xver_t2130\n")
    for line in (
        "world size  4",
        "5 files, 219 kB",
        "19 tensors of 5.25 kB, 82 objects",
        "model.emb.weight                       float32  37×9     1.33 kB  Shard(0) ×4",
        "optim.param_groups.{0–1}.betas                         2  tuple               (0.8845491502812526, 0.95)",
    ):
        assert line in done.stdout


def test_chunks_show_boxes_and_places():
    done = run("inspect", "fixtures/foreign/mesh2d_fsdp_tp", "--chunks", "--keys", "model.w2.weight")
    assert done.returncode == 0
    assert "Shard(0) ×2, Shard(1) ×2" in done.stdout
    assert done.stdout.count("    offsets [") == 4
    assert "__3_0.distcp:" in done.stdout


@pytest.mark.parametrize("also", ["--values", "--stats", "--by-file"])
def test_chunks_are_listed_whatever_else_is_shown(also):
    path = "fixtures/foreign/mesh2d_fsdp_tp"
    done, alone = (run("inspect", path, *options, "--keys", "model.w2.weight") for options in ([also], []))
    both = run("inspect", path, "--chunks", also, "--keys", "model.w2.weight")
    assert both.stdout.startswith(done.stdout)
    assert both.stdout.count("    offsets [") == 4
    assert "    offsets [" not in done.stdout + alone.stdout
    several = run("inspect", "fixtures/foreign/accelerate_fsdp2", "--chunks")
    assert several.stdout.count("    offsets [") > 4


def test_selection_and_depth():
    done = run(
        "inspect", "fixtures/foreign/xver_t2130", "--keys", "optim.state.*", "--exclude", "*step", "--depth", "3"
    )
    assert "8 tensors of 3.46 kB, 0 objects (selected from 101 entries)" in done.stdout
    assert "optim.state.emb " in done.stdout
    done = run("inspect", "fixtures/foreign/xver_t2130", "--keys", "nothing*")
    assert done.returncode == 3
    assert "fixtures/foreign/xver_t2130: no entry matches 'nothing*'; names begin with 'optim' (" in done.stderr
    done = run("inspect", "fixtures/foreign/xver_t2130", "--keys", "model.emb*", "--exclude", "*")
    assert done.stderr.endswith("--exclude leaves out the entry that matches 'model.emb*'\n")


# R64: a schema other programs can rely on.
@pytest.mark.torchfree
def test_r64_json():
    done = run("inspect", "fixtures/foreign/xver_t2130", "--json", "--chunks")
    document = json.loads(done.stdout)
    assert list(document) == ["schema", "path", "checkpoints"]
    assert document["schema"] == 1
    (checkpoint,) = document["checkpoints"]
    fields = "path format flavour evidence world_size nbytes state tensors objects files notes"
    assert list(checkpoint) == fields.split()
    tensor = next(tensor for tensor in checkpoint["tensors"] if tensor["fqn"] == "model.emb.weight")
    chunks = tensor.pop("chunks")
    files = [f"__{rank}_0.distcp" for rank in range(4)]
    assert tensor == {
        "fqn": "model.emb.weight", "kind": "tensor", "dtype": "float32", "shape": [37, 9], "nbytes": 1332,
        "layout": "Shard(0) ×4", "n_chunks": 4, "files": files,
    }  # fmt: skip
    assert list(chunks[0]) == ["offsets", "sizes", "file", "byte_offset", "nbytes"]
    betas = next(item for item in checkpoint["objects"] if item["fqn"] == "optim.param_groups.0.betas")
    assert (betas["kind"], betas["value"], betas["class"]) == ("object", [0.8845491502812526, 0.95], "tuple")
    size = os.path.getsize(FOREIGN / "xver_t2130/.metadata")
    file = {"name": ".metadata", "nbytes": size, "rank": None, "n_items": 0, "item_nbytes": 0}
    assert file in checkpoint["files"]
    notes = [(note["kind"], note["severity"]) for note in checkpoint["notes"]]
    assert notes == [("integer-keys", "note"), ("whole-tensors", "note")]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_foreign_checkpoint_shows_as_text_and_json(part):
    from dcptool.errors import DcptoolError
    from dcptool.render.inspect import to_text
    from dcptool.render.inspect_json import to_json

    try:
        summary = dcptool.summarize(part.path, chunks=True)
    except DcptoolError as error:
        assert part.damaged, error
        return
    assert summary.good or part.damaged
    text = to_text(summary, 80)
    assert all(line == line.rstrip() for line in text.splitlines())
    names = [item.fqn for found in summary.checkpoints for item in found.objects]
    folded = len(names) > 40
    printable = [fqn for fqn in part.expected if fqn.isprintable() and not (folded and fqn in names)]
    assert all(fqn in text for fqn in printable) or part.damaged
    document = json.loads(json.dumps(to_json(summary), allow_nan=False))
    names = {entry["fqn"] for found in document["checkpoints"] for entry in found["tensors"] + found["objects"]}
    assert names == set(part.expected) or part.damaged


def test_a_run_directory_gives_a_row_per_step_and_the_next_command():
    done = run("inspect", "fixtures/foreign/run_crashed")
    assert done.returncode == 1  # four of the five steps are not whole
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if re.match(r"step_\d+ ", line)}
    assert rows == dict.fromkeys(["step_200", "step_300", "step_400", "step_500"], "incomplete") | {
        "step_100": "complete"
    }
    assert (
        "step_200: __1_0.distcp (rank 1) is missing: it held 71% of the bytes, 17 items of 6 tensors\n" in done.stdout
    )
    assert done.stdout.splitlines()[-1] == (
        "newest complete step: dcptool inspect fixtures/foreign/run_crashed/ckpt/step_100"
    )
    document = json.loads(run("inspect", "fixtures/foreign/run_crashed", "--json").stdout)
    assert [step["state"] for step in document["steps"]] == ["complete"] + ["incomplete"] * 4
    step = document["steps"][4]
    assert (step["n_entries"], step["n_files"]) == (None, 3)
    assert step["nbytes"] > 4858


def test_a_parent_shows_all_its_parts():
    done = run("inspect", "fixtures/foreign/accelerate_fsdp2")
    assert done.returncode == 0
    assert done.stdout.startswith("fixtures/foreign/accelerate_fsdp2 holds 2 checkpoints; name one")
    assert "layout" not in done.stdout
    assert "accelerate_fsdp2/optimizer_0\n" in done.stdout
    assert "accelerate_fsdp2/pytorch_model_fsdp_0\n" in done.stdout


@pytest.mark.parametrize("arguments", [["--nonsense"], [], ["a", "b"], ["x", "--depth", "-1"]])
def test_wrong_usage_exits_2(arguments):
    done = run("inspect", *arguments)
    assert done.returncode == 2
    assert "Usage: dcptool inspect" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere", "error: nowhere: no such file or directory\n"),
        ("README.md", "error: README.md is no checkpoint: it is not a pickle: it looks like text\n"),
        (
            "dcptool",
            (
                "error: dcptool holds no checkpoint, nor do its folders 3 levels down "
                "(no .metadata, no __R_N.distcp, no safetensors)\n"
            ),
        ),
        (
            "fixtures/foreign/w_nodist/__0_0.distcp",
            "error: fixtures/foreign/w_nodist/__0_0.distcp is one data file of a DCP checkpoint; "
            "name its folder: fixtures/foreign/w_nodist\n",
        ),
    ],
)
def test_what_cannot_be_opened_is_one_line_and_exit_3(path, says):
    done = run("inspect", path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", says)


def test_a_damaged_checkpoint_prints_what_it_can_and_exits_1(tmp_path):
    folder = copy(FOREIGN / "ddp", tmp_path / "c")
    truncate(folder / "__0_0.distcp", 5000)
    done = run("inspect", folder)
    assert done.returncode == 1
    assert "state       incomplete" in done.stdout
    assert "error: __0_0.distcp is cut short: 5,000 bytes of at least" in done.stdout
    assert "optim" in done.stdout
    assert run("inspect", folder, "--quiet").stdout == ""
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp (rank 0) is missing" in run("inspect", folder).stdout


def test_names_cannot_act_on_the_terminal(tmp_path):
    data = (FOREIGN / "w_nodist" / ".metadata").read_bytes()
    folder = copy(FOREIGN / "w_nodist", tmp_path / "c")
    name = b"\x8c\x08nested.b"
    assert name in data
    (folder / ".metadata").write_bytes(data.replace(name, b"\x8c\x08\x1b[31m\n\xc2\x9b", 1))
    done = run("inspect", folder)
    assert "\x1b" not in done.stdout
    assert "\\x1b[31m\\n\\x9b" in done.stdout


def test_a_closed_pipe_is_quiet_and_a_c_locale_is_fine():
    command = f"{sys.executable} -m dcptool inspect fixtures/foreign/xver_t2130 --json --chunks | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")
    done = run_process(
        "inspect", "fixtures/foreign/ddp", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_version():
    assert run("--version").stdout == f"dcptool, version {dcptool.__version__}\n"
    assert "Exits 1 if something is missing or damaged." in run("inspect", "-h").stdout
    done = run()
    assert done.returncode == 2


def test_debug_shows_the_traceback():
    done = run_process("--debug", "inspect", "nowhere")
    assert "Traceback" in done.stderr


def test_a_bug_is_called_one(monkeypatch, capsys):
    from dcptool.cli import main
    from dcptool.ops.inspect import inspect as overview

    def broken(*args, **kwargs):
        raise RuntimeError("boom")

    monkeypatch.setattr(overview, "summarize", broken)
    with pytest.raises(SystemExit) as done:
        main(["inspect", "x"])
    assert done.value.code == 70
    assert "this is a bug in dcptool: RuntimeError: boom" in capsys.readouterr().err


# What somebody with a dead job ran into: the answer must not look better than it is.


def test_zeros_in_place_of_a_shard_are_an_error(tmp_path):
    folder = copy(FOREIGN / "ddp", tmp_path / "c")
    for file in folder.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    done = run("inspect", folder)
    assert done.returncode == 1
    assert "its bytes are zeros: they never reached the disk" in done.stdout
    checkpoint = dcptool.open(folder)
    for read, names in ((checkpoint.read, checkpoint.tensors), (checkpoint.value, checkpoint.objects)):
        with pytest.raises(dcptool.checkpoint.checkpoint.DcptoolError, match="its bytes are zeros"):
            read(next(iter(names)))


def test_a_model_file_does_not_hide_the_steps_beside_it(tmp_path):
    run_dir = copy(FOREIGN / "trainer_fsdp2", tmp_path / "run")
    model = FOREIGN / "hf_consolidated" / "model-00002-of-00002.safetensors"
    (run_dir / "model.safetensors").write_bytes(model.read_bytes())
    copy(FOREIGN / "w_nodist", run_dir / "best")
    done = run("inspect", run_dir)
    assert "is a run directory with 1 step" in done.stdout
    assert (
        f"also here:\n  dcptool inspect {run_dir}/model.safetensors\n  dcptool inspect {run_dir}/best\n" in done.stdout
    )


def test_one_bad_checkpoint_does_not_hide_the_good_ones(tmp_path):
    folder = copy(FOREIGN / "accelerate_fsdp2", tmp_path / "c")
    truncate(folder / "optimizer_0" / ".metadata", 100)
    done = run("inspect", folder)
    assert done.returncode == 1
    assert "pytorch_model_fsdp_0\n" in done.stdout
    assert f"error: {folder}/optimizer_0/.metadata: the pickle is cut short" in done.stdout
    document = json.loads(run("inspect", folder, "--json").stdout)
    assert document["errors"][0]["path"] == f"{folder}/optimizer_0"


def test_without_any_complete_step_it_says_so(tmp_path):
    folder = copy(FOREIGN / "run_crashed" / "ckpt", tmp_path / "run")
    for file in folder.glob("step_[123]00/__0_0.distcp"):
        file.unlink()
    done = run("inspect", folder)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"no complete step; the newest that opens: dcptool inspect {folder}/step_300"


def test_files_of_an_older_save_do_not_count(tmp_path):
    folder = copy(FOREIGN / "ddp", tmp_path / "c")
    (folder / "__7_0.distcp").write_bytes(b"older")
    done = run("inspect", folder)
    assert done.returncode == 0
    assert "world size  2" in done.stdout
    assert (
        "note: __7_0.distcp (5 bytes) is not named by the metadata: it is left by an older or wider save" in done.stdout
    )


def test_a_missing_file_is_marked_where_its_chunks_are_listed(tmp_path):
    folder = copy(FOREIGN / "xver_t2130", tmp_path / "c")
    (folder / "__1_0.distcp").unlink()
    truncate(folder / "__2_0.distcp", 100)
    done = run("inspect", folder, "--chunks", "--keys", "model.emb.weight")
    assert len(re.findall(r"__1_0\.distcp:\d+\+\d+  MISSING\n", done.stdout)) == 1
    assert len(re.findall(r"__2_0\.distcp:\d+\+\d+  BEYOND THE END\n", done.stdout)) == 1


def test_exact_names_select_and_beginnings_are_explained():
    assert dcptool.summarize(FOREIGN / "xver_t2130", keys="model.ema").checkpoints[0].tensors[0].fqn == "model.ema"
    done = run("inspect", "fixtures/foreign/xver_t2130", "--keys", "model.block")
    assert "xver_t2130: no entry is named 'model.block'; for those that begin so: --keys 'model.block*'" in done.stderr
    done = run("inspect", "fixtures/foreign/run_crashed", "--chunks")
    assert done.stderr == "note: a run directory shows its steps; --chunks: name one of them\n"
    done = run("inspect", "fixtures/foreign/run_crashed", "--values", "--by-file")
    assert done.stderr == "note: a run directory shows its steps; --values, --by-file: name one of them\n"
    assert run("inspect", "fixtures/foreign/run_crashed", "--chunks", "--quiet").stderr == ""


def test_mistakes_get_a_next_step(tmp_path):
    assert run("inspect", "fixtures/foreign/xver_t213").stderr == (
        "error: fixtures/foreign/xver_t213: no such file or directory; did you mean fixtures/foreign/xver_t2130?\n"
    )
    assert run("inspect", "fixtures/nope/a/b").stderr.endswith("; fixtures exists\n")
    assert run("inspect", "").stderr == "error: the path is empty\n"
    done = run("fixtures/foreign/ddp")
    assert done.returncode == 2
    assert "did you mean: dcptool inspect fixtures/foreign/ddp" in done.stderr
    document = json.loads(run("inspect", "nowhere", "--json").stdout)
    assert document["errors"][0]["message"] == "nowhere: no such file or directory"


def test_a_full_disk_is_not_a_bug():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "dcptool", "inspect", "fixtures/foreign/ddp"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (3, "error: cannot write the output: No space left on device\n")


def test_lines_of_a_message_cannot_pass_for_others(tmp_path):
    (tmp_path / "x\nerror: all is lost").mkdir()
    done = run("inspect", tmp_path / "x\nerror: all is lost")
    assert not re.search(r"^error: all is lost", done.stderr, re.MULTILINE)


def test_by_file_shows_what_each_rank_wrote(tmp_path):
    done = run("inspect", "fixtures/foreign/pp_disjoint", "--by-file")
    assert done.returncode == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith("__")}
    assert [row[1] for row in rows.values()] == ["0", "1", "2", "3"]
    assert re.search(r"imbalance: rank \d has \d\.\d\d × the mean of 4 ranks", done.stdout)
    folder = copy(FOREIGN / "pp_disjoint", tmp_path / "c")
    (folder / "__2_0.distcp").unlink()
    assert re.search(r"__2_0\.distcp +2 +MISSING", run("inspect", folder, "--by-file").stdout)


def test_thousands_of_layers_stay_readable_and_nothing_is_lost(tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    state = {f"model.layers.{i}.{name}": torch.zeros(2, 3) for i in range(500) for name in ("q", "k")}
    state["model." + "long" * 60] = torch.zeros(1)
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    done = run("inspect", tmp_path / "c")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["model.layers.{0–499}.q", "500", "float32", "2×3", "12", "kB", "whole"] in lines
    assert "model." + "long" * 60 in done.stdout
    assert len(lines) < 25
    one = run("inspect", tmp_path / "c", "--keys", "model.layers.7.*").stdout
    assert "model.layers.7.q" in one
    assert len(json.loads(run("inspect", tmp_path / "c", "--json").stdout)["checkpoints"][0]["tensors"]) == 1001


def test_values_of_selected_entries():
    done = run(
        "inspect", "fixtures/foreign/dtypes_keys_t2130", "--values", "--keys", "special.nan_inf", "--keys", "dtype.*"
    )
    assert done.returncode == 0
    assert "special.nan_inf  float32 6\n" in done.stdout
    assert re.search(r"special\.nan_inf.*\n +nan +inf", done.stdout)
    done = run(
        "inspect", "fixtures/foreign/xver_t2130", "--values", "--keys", "model.emb.weight", "--keys", "extra.size"
    )
    assert "model.emb.weight  float32 37×9, the first 8×8\n" in done.stdout
    assert "extra.size  torch.Size\n  torch.Size([2, 3])\n" in done.stdout
    checkpoint = dcptool.open(FOREIGN / "xver_t2130")
    first = checkpoint.read("model.emb.weight")[0, 0]
    assert f"{first:.6g}" in done.stdout
    document = json.loads(run("inspect", "fixtures/foreign/dtypes_keys_t2130", "--values", "--json").stdout)
    tensors = {tensor["fqn"]: tensor for tensor in document["checkpoints"][0]["tensors"]}
    assert tensors["special.nan_inf"]["corner"][:2] == ["nan", "inf"]
    assert sum("corner" in tensor for tensor in tensors.values()) == 50
