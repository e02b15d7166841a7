"""`dcptool inspect` as a process: output, exit codes, JSON, and what a tired person sees when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import dcptool
from tests.conftest import FOREIGN, PARTS, ROOT
from tests.damage import copy, truncate

pytestmark = pytest.mark.torchfree


def run(*args, env=None, **kwargs):
    command = [sys.executable, "-m", "dcptool", *map(str, args)]
    environment = {**os.environ, "COLUMNS": "120", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, **kwargs)


def test_a_checkpoint():
    done = run("inspect", "fixtures/foreign/xver_t2130")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fixtures/foreign/xver_t2130\n")
    for line in (
        "world size  4",
        "5 files, 219 kB",
        "19 tensors of 5.25 kB, 82 objects",
        "model.emb.weight                       float32  37×9     1.33 kB  Shard(0) ×4",
        "optim.param_groups.0.betas                      tuple               (0.8845491502812526, 0.95)",
    ):
        assert line in done.stdout


def test_chunks_show_boxes_and_places():
    done = run("inspect", "fixtures/foreign/mesh2d_fsdp_tp", "--chunks", "--keys", "model.w2.weight")
    assert done.returncode == 0
    assert "Shard(0) ×2, Shard(1) ×2" in done.stdout
    assert done.stdout.count("    offsets [") == 4
    assert "__3_0.distcp:" in done.stdout


def test_selection_and_depth():
    done = run(
        "inspect", "fixtures/foreign/xver_t2130", "--keys", "optim.state.*", "--exclude", "*step", "--depth", "3"
    )
    assert "8 tensors of 3.46 kB, 0 objects (selected from 101 entries)" in done.stdout
    assert "optim.state.emb " in done.stdout
    done = run("inspect", "fixtures/foreign/xver_t2130", "--keys", "nothing*")
    assert done.returncode == 3
    assert done.stderr.startswith("error: no entry matches 'nothing*'; names begin with: model")


# R64: a schema other programs can rely on.
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
    assert {"name": ".metadata", "nbytes": os.path.getsize(FOREIGN / "xver_t2130/.metadata")} in checkpoint["files"]
    assert checkpoint["notes"] == []


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_foreign_checkpoint_shows_as_text_and_json(part):
    from dcptool.errors import DcptoolError
    from dcptool.render.inspect import to_json, to_text

    try:
        summary = dcptool.summarize(part.path, chunks=True)
    except DcptoolError as error:
        assert part.damaged, error
        return
    assert summary.good or part.damaged
    text = to_text(summary, 80)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert all(fqn in text for fqn in part.expected if fqn.isprintable() and not part.damaged)
    document = json.loads(json.dumps(to_json(summary), allow_nan=False))
    names = {entry["fqn"] for found in document["checkpoints"] for entry in found["tensors"] + found["objects"]}
    assert names == set(part.expected) or part.damaged


def test_a_run_directory_gives_a_row_per_step_and_the_next_command():
    done = run("inspect", "fixtures/foreign/run_crashed")
    assert done.returncode == 0
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line.startswith("step_")}
    assert rows == dict.fromkeys(["step_200", "step_300", "step_400", "step_500"], "incomplete") | {
        "step_100": "complete"
    }
    assert "__1_0.distcp (rank 1) is missing: it held 17 items, 71% of the bytes" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "newest complete step: dcptool inspect fixtures/foreign/run_crashed/ckpt/step_100"
    )
    document = json.loads(run("inspect", "fixtures/foreign/run_crashed", "--json").stdout)
    assert [step["state"] for step in document["steps"]] == ["complete"] + ["incomplete"] * 4


def test_a_parent_shows_all_its_parts():
    done = run("inspect", "fixtures/foreign/accelerate_fsdp2")
    assert done.returncode == 0
    assert done.stdout.startswith("fixtures/foreign/accelerate_fsdp2 holds 2 checkpoints")
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
        ("README.md", "error: README.md is no checkpoint: it is not a pickle (it looks like text)\n"),
        ("dcptool", "error: dcptool holds no checkpoint (no .metadata, no __R_N.distcp, no safetensors)\n"),
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
    done = run("inspect", "fixtures/foreign/ddp", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_version():
    assert run("--version").stdout == f"dcptool, version {dcptool.__version__}\n"
    assert "Exits 1 if something is missing or damaged." in run("inspect", "-h").stdout
    done = run()
    assert done.returncode == 2


def test_debug_shows_the_traceback():
    done = run("--debug", "inspect", "nowhere")
    assert "Traceback" in done.stderr


def test_a_bug_is_called_one(monkeypatch, capsys):
    from dcptool import summary
    from dcptool.cli import main

    def broken(*args, **kwargs):
        raise RuntimeError("boom")

    monkeypatch.setattr(summary, "summarize", broken)
    with pytest.raises(SystemExit) as done:
        main(["inspect", "x"])
    assert done.value.code == 70
    assert "this is a bug in dcptool: RuntimeError: boom" in capsys.readouterr().err
