"""Converting steps of several checkpoints: each into its place in one folder, the files beside as the output needs."""

from __future__ import annotations

import shlex
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
from dcptool.ops.convert.convert import ConvertOptions, convert
from dcptool.ops.verify.verdict import State
from tests import damage
from tests.conftest import FOREIGN, run

torch = pytest.importorskip("torch")

from tests.ranks import save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)
TRAINER = FOREIGN / "trainer_fsdp2" / "checkpoint-2"
ACCELERATE = FOREIGN / "accelerate_fsdp2"
MODEL, OPTIMIZER = PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def beside(folder: Path) -> set[str]:
    return {name for name in files(folder) if not name.endswith((".distcp", ".metadata", "_COMPLETE"))}


@pytest.fixture
def step(tmp_path) -> Path:
    """A step of the Trainer with what describes its model."""
    path = Path(shutil.copytree(TRAINER, tmp_path / "run" / "checkpoint-2"))
    (path / "config.json").write_text('{"torch_dtype": "float32"}')
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("source", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
class TestAllParts:
    def test_to_dcp_it_is_the_step_once_more(self, tmp_path, source):
        out = tmp_path / "out" / source.name
        done = convert(source, out, "dcp", ConvertOptions(check=True))
        assert set(done.parts) == set(PARTS)
        assert beside(out) == beside(source) == set(done.carried)
        for part in PARTS:
            assert dcptool.compare(source / part, out / part, dcptool.DiffOptions(layout=True)).equal
        [verdict] = dcptool.verify(out, DEEP).verdicts
        assert verdict.state is State.COMPLETE, verdict.findings
        assert set(verdict.marker.files) == files(out) - {"_COMPLETE"}
        assert {name for name, _ in done.files} == files(out)
        assert [path.name for path in out.parent.iterdir()] == [source.name]

    def test_to_torch_one_file_each(self, tmp_path, source):
        out = tmp_path / "out"
        done = convert(source, out, "torch", ConvertOptions(check=True))
        assert files(out) == {f"{part}.pt" for part in PARTS}
        for part in PARTS:
            alone = tmp_path / f"{part}.pt"
            convert(source / part, alone, "torch")
            assert (out / f"{part}.pt").read_bytes() == alone.read_bytes()
            assert torch.load(out / f"{part}.pt", weights_only=True)
        assert any("not carried: " in note and "scheduler." in note for note in done.notes)

    def test_to_safetensors_a_folder_each(self, tmp_path, source):
        from safetensors.torch import load_file

        out = tmp_path / "out"
        convert(source, out, "safetensors", ConvertOptions(check=True))
        assert files(out) == {f"{part}/model.safetensors" for part in PARTS}
        for part in PARTS:
            names = set(dcptool.open(source / part).tensors)
            assert set(load_file(out / part / "model.safetensors")) == names

    def test_several_processes_write_the_same(self, tmp_path, source, commands):
        for to in ("dcp", "safetensors", "torch"):
            for workers in (1, 3):
                done = commands.run("convert", "--to", to, "--workers", workers, source, tmp_path / f"{to}{workers}")
                assert done.code == 0, done.err
            one, three = (
                {name: (tmp_path / f"{to}{n}" / name).read_bytes() for name in files(tmp_path / f"{to}{n}")}
                for n in (1, 3)
            )
            assert one.keys() == three.keys()
            assert {name for name in one if one[name] != three[name]} <= {
                "_COMPLETE",
                *(f"{part}/.metadata" for part in PARTS),
            }


def test_what_describes_the_model_goes_along(step, tmp_path):
    options = ConvertOptions(renaming=Renaming(dtype="bfloat16"))
    done = convert(step, tmp_path / "out", "safetensors", options)
    assert beside(tmp_path / "out") == {
        "config.json",
        "tokenizer.json",
        *(f"{part}/model.safetensors" for part in PARTS),
    }
    assert '"bfloat16"' in (tmp_path / "out" / "config.json").read_text()
    assert dcptool.open(tmp_path / "out" / MODEL).tensors["model.lm_head.weight"].dtype == "bfloat16"
    assert sum("no architecture is mapped" in note for note in done.notes) == 1
    done = convert(step, tmp_path / "bare", "dcp", ConvertOptions(side_files=False))
    assert beside(tmp_path / "bare") == set()
    assert any("config.json" in note for note in done.notes)


class TestSelection:
    def test_a_part_of_which_nothing_is_selected_is_left_out_and_named(self, tmp_path):
        done = convert(TRAINER, tmp_path / "out", "torch", ConvertOptions(keys=("model.*",)))
        assert files(tmp_path / "out") == {f"{MODEL}.pt"}
        assert f"nothing of {OPTIMIZER}/ is selected: left out" in done.notes

    def test_into_one_file_if_only_one_part_is_selected(self, tmp_path):
        for to, name in (("torch", "m.pt"), ("safetensors", "m.safetensors")):
            convert(TRAINER, tmp_path / name, to, ConvertOptions(keys=("model.*",)))
            convert(TRAINER / MODEL, tmp_path / f"alone.{name}", to)
            assert (tmp_path / name).read_bytes() == (tmp_path / f"alone.{name}").read_bytes()

    def test_names_and_globs_are_about_all_parts(self, tmp_path):
        renaming = Renaming(rename=(("model.lm_head.weight", "head"),))
        done = convert(TRAINER, tmp_path / "out", "dcp", ConvertOptions(exclude=("*exp_avg*",), renaming=renaming))
        assert "head" in dcptool.open(tmp_path / "out" / MODEL)
        assert not any("exp_avg" in fqn for fqn in dcptool.open(tmp_path / "out" / OPTIMIZER))
        assert not any("matches nothing" in note for note in done.notes)
        with pytest.raises(LayoutError, match="--rename odd=…: no entry of any part"):
            convert(TRAINER, tmp_path / "x", "dcp", ConvertOptions(renaming=Renaming(rename=(("odd", "x"),))))
        with pytest.raises(LayoutError, match="no entry matches"):
            convert(TRAINER, tmp_path / "x", "dcp", ConvertOptions(keys=("odd.*",)))
        done = convert(TRAINER, tmp_path / "y", "dcp", ConvertOptions(exclude=("odd.*",)))
        assert any("--exclude 'odd.*' matches nothing" in note for note in done.notes)


class TestRefused:
    def test_one_file_for_several_parts_with_what_to_type(self, tmp_path):
        done = run("convert", "--to", "torch", TRAINER, tmp_path / "all.pt")
        assert done.returncode == 3
        first, *commands, last = done.stderr.splitlines()
        assert first == f"error: {TRAINER} holds 2 checkpoints; name one:"
        assert {tuple(shlex.split(command)) for command in commands} == {
            ("dcptool", "convert", "--to", "torch", f"{TRAINER}/{part}", f"{tmp_path}/all.pt") for part in PARTS
        }
        assert last.strip() == f"Or name a folder for all of them, such as {tmp_path}/all: each becomes a file in it."
        assert not list(tmp_path.iterdir())

    def test_a_run_and_parts_of_other_formats(self, tmp_path):
        run_folder = FOREIGN / "accelerate_fsdp2_auto" / "checkpoints"
        with pytest.raises(SeveralCheckpointsError) as found:
            convert(run_folder, tmp_path / "out", "dcp")
        assert len(found.value.parts) == 4
        source = tmp_path / "step_3"
        save(source / "sharded", {"w": torch.ones(3)})
        convert(source / "sharded", source / "hf", "safetensors")
        with pytest.raises(SeveralCheckpointsError):
            convert(source, tmp_path / "out", "safetensors")

    @pytest.mark.parametrize("part", PARTS)
    def test_damage_in_any_part_leaves_nothing(self, step, tmp_path, part):
        file = step / part / "__1_0.distcp"
        item = next(
            chunk.item
            for entry in dcptool.open(step / part).tensors.values()
            for chunk in entry.chunks
            if chunk.item and chunk.item.file == file.name and 0 not in chunk.sizes
        )
        damage.flip_byte(file, item.byte_offset + item.nbytes // 2)
        for to in ("dcp", "torch", "safetensors"):
            with pytest.raises(ItemError):
                convert(step, tmp_path / "out", to)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        done = convert(step, tmp_path / "out", "dcp", ConvertOptions(skip_corrupt=True))
        assert {finding.file for finding in done.corrupt} == {f"{part}/__1_0.distcp"}
        assert dcptool.verify(tmp_path / "out", DEEP).good

    def test_what_runs_code_beside(self, step, tmp_path):
        import pickle

        class Harm:
            def __reduce__(self):
                return print, ("no",)

        (step / "scheduler.pt").write_bytes(pickle.dumps(Harm()))
        with pytest.raises(UnsafePickleError, match=r"scheduler\.pt"):
            convert(step, tmp_path / "out", "dcp")
        assert convert(step, tmp_path / "st", "safetensors").published  # which leaves it

    def test_changed_meanwhile(self, step, tmp_path, monkeypatch):
        from dcptool.ops.convert import member

        copy = member.copy

        def copied(*arguments, **more):
            with open(step / OPTIMIZER / "__0_0.distcp", "ab") as file:
                file.write(b"x")
            return copy(*arguments, **more)

        monkeypatch.setattr(member, "copy", copied)
        with pytest.raises(StorageError, match=r"__0_0\.distcp changed while it was read"):
            convert(step, tmp_path / "out", "dcp")
        assert not (tmp_path / "out").exists()

    def test_places(self, step, tmp_path):
        with pytest.raises(UnsupportedError, match="lies in the source"):
            convert(step, step / "copy", "dcp")
        convert(step, tmp_path / "out", "dcp")
        with pytest.raises(OutputExistsError):
            convert(step, tmp_path / "out", "dcp")
        done = convert(step, tmp_path / "out", "dcp", ConvertOptions(overwrite=True))
        assert any("--overwrite replaces" in note for note in done.notes)
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        with pytest.raises(OutputExistsError, match="thesis"):
            convert(step, tmp_path / "out", "dcp", ConvertOptions(overwrite=True))


def test_the_metadata_of_all_parts_then_the_trainers_last_file_then_the_marker(tmp_path, monkeypatch):
    from dcptool.storage.local import LocalStorage

    order, real = [], LocalStorage.create

    def create(self, name):
        order.append(name)
        return real(self, name)

    monkeypatch.setattr(LocalStorage, "create", create)
    convert(TRAINER, tmp_path / "out", "dcp")
    assert order[-4:] == [f"{OPTIMIZER}/.metadata", f"{MODEL}/.metadata", "trainer_state.json", "_COMPLETE"]


def test_a_dry_run_says_what_is_done(tmp_path):
    planned = convert(TRAINER, tmp_path / "out", "dcp", dry_run=True)
    assert not list(tmp_path.iterdir())
    done = convert(TRAINER, tmp_path / "out", "dcp")
    assert planned.files == done.files
    assert planned.parts == done.parts
