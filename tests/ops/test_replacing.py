"""--overwrite replaces one checkpoint, or one file of the same format, and never anything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dcptool
from dcptool.errors import OutputExistsError
from tests import damage
from tests.conftest import FOREIGN
from tests.conftest import run as cli
from tests.run_steps import steps

pytestmark = pytest.mark.torchfree
SOURCE = FOREIGN / "w_async"
OVERWRITE = dcptool.ConvertOptions(overwrite=True)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_directory(folder):
    steps(folder, "step_1", "step_2")


def photos(folder):
    (folder / "2024").mkdir(parents=True)
    (folder / "2024" / "a.jpg").write_bytes(b"precious")


def checkpoint_and_notes(folder):
    damage.copy(SOURCE, folder)
    (folder / "notes.txt").write_text("precious")


def parts(folder):
    shutil.copytree(FOREIGN / "accelerate_fsdp2", folder)


def model_folder(folder):
    dcptool.convert(SOURCE, folder, "safetensors")
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("command", ["convert", "convert --dry-run", "reshard", "reshard --dry-run"])
@pytest.mark.parametrize("make", [run_directory, photos, checkpoint_and_notes, parts, model_folder])
def test_i_what_is_no_checkpoint_alone_is_refused_and_listed(tmp_path, make, command):
    target = tmp_path / "there"
    make(target)
    before = tree(target)
    name, *dry = command.split()
    how = ["--to", "dcp"] if name == "convert" else ["--world-size", 2]
    done = cli(name, *how, "--overwrite", *dry, SOURCE, target)
    assert done.returncode == 3
    assert "is not one checkpoint and nothing else: not replaced; there is" in done.stderr
    assert any(str(path).partition("/")[0] in done.stderr for path in before)
    assert tree(target) == before


@pytest.mark.parametrize(
    ("content", "to", "name"),
    [
        (b"precious", "torch", "m.pt"),
        (b"PK\x03\x04 photos", "torch", "m.pt"),
        (b"precious", "safetensors", "m.safetensors"),
    ],
)
def test_i_a_file_of_another_kind_is_refused(tmp_path, content, to, name):
    (tmp_path / name).write_bytes(content)
    for dry_run in (True, False):
        with pytest.raises(OutputExistsError, match="not replaced"):
            dcptool.convert(SOURCE, tmp_path / name, to, OVERWRITE, dry_run=dry_run)
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize(("to", "name"), [("torch", "m.pt"), ("safetensors", "m.safetensors"), ("dcp", "d")])
@pytest.mark.parametrize("state", ["whole", "cut", "empty"])
def test_i_a_dry_run_says_what_would_go(tmp_path, to, name, state):
    target = tmp_path / name
    dcptool.convert(SOURCE, target, to)
    if state != "whole":
        for file in [target] if target.is_file() else list(target.iterdir()):
            damage.truncate(file, 600 * (state == "cut"))
    done = cli("convert", "--to", to, "--overwrite", "--dry-run", SOURCE, target)
    assert done.returncode == 0
    assert f"note: --overwrite replaces what is at {target}: " in done.stderr
    assert dcptool.convert(SOURCE, target, to, OVERWRITE).published
    assert dcptool.compare(SOURCE, target).equal or to == "safetensors"


def test_nothing_there_is_nothing_to_tell(tmp_path):
    done = cli("convert", "--to", "dcp", "--overwrite", SOURCE, tmp_path / "new")
    assert (done.returncode, "replaces" in done.stderr) == (0, False)
