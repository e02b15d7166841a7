"""What runs code when torch loads it is `unsafe`: never complete, marked, chosen, or carried into output (case F)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile

import pytest

import dcptool
from dcptool.errors import ItemError, UnsafePickleError
from dcptool.ops.verify.verdict import State
from tests.conftest import FOREIGN, run
from tests.damage import copy, edit_metadata
from tests.pickles.test_calls import CALLED
from tests.run_steps import steps

SOURCE = FOREIGN / "xver_t2130"
PLACES = {
    "an attribute": lambda data: _attribute(data, "hook"),
    "the version": lambda data: _attribute(data, "version"),
    "before, popped": lambda data: data[:2] + CALLED + b"0" + data[2:],
    "after, popped": lambda data: data[:-1] + CALLED + b"0.",
    "by INST": lambda data: data[:-1] + b"(S'x'\niposix\nsystem\n0.",
    "by OBJ": lambda data: data[:-1] + b"(cposix\nsystem\nS'x'\no0.",
    "by getattr": lambda data: data[:-1] + b"cbuiltins\ngetattr\ncposix\nsystem\nX\x08\x00\x00\x00__call__\x86R0.",
}


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def _attribute(data: bytes, name: str) -> bytes:
    pytest.importorskip("torch")
    metadata = pickle.loads(data)
    setattr(metadata, name, Evil())
    return pickle.dumps(metadata, 4)


def with_metadata(folder, place):
    path = copy(SOURCE, folder) / ".metadata"
    path.write_bytes(PLACES[place](path.read_bytes()))
    return folder


@pytest.mark.parametrize("how", ["pickle", "zip"])
def test_a_step_with_a_small_file_that_runs_code_is_not_chosen(tmp_path, how):
    """At the default level: no clean step is deleted in its favour either."""
    for number in (1, 2):
        shutil.copytree(FOREIGN / "accelerate_fsdp2", tmp_path / "run" / f"step_{number}")
    file = tmp_path / "run" / "step_2" / "random_states_0.pkl"
    if how == "pickle":
        file.write_bytes(pickle.dumps({"torch": Evil()}))
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"torch": Evil()}, 2))
            archive.writestr("archive/version", "3\n")
    done = run("latest", tmp_path / "run")
    assert done.stdout == f"{tmp_path}/run/step_1\n"
    assert "step_2 is unsafe: random_states_0.pkl runs code" in done.stderr
    plan = run("prune", tmp_path / "run", "--keep", 1, "--dry-run").stdout
    assert "step_1  keep" in plan


@pytest.mark.parametrize("place", PLACES)
def test_metadata_that_runs_code(tmp_path, place):
    folder = with_metadata(tmp_path / "run" / "step_2", place)
    for level in dcptool.Level:
        [verdict] = dcptool.verify(folder, dcptool.VerifyOptions(level)).verdicts
        assert verdict.state is State.UNSAFE
        assert any(f.kind == "unsafe-pickle" and f.file == ".metadata" and f.is_error for f in verdict.findings)
    done = run("verify", folder)
    assert done.returncode == 1
    assert "error: the metadata runs code when it is loaded: it calls or names " in done.stdout
    shown = run("inspect", folder)
    assert shown.returncode == 1
    assert "posix.system" in shown.stdout or "builtins.getattr" in shown.stdout
    with pytest.raises(ItemError, match="is unsafe, not marked: the metadata runs code"):
        dcptool.mark_complete(folder)
    for to, name in (("torch", "m.pt"), ("dcp", "out"), ("safetensors", "m.safetensors")):
        with pytest.raises(ItemError, match="runs code when it is loaded, nothing was written"):
            dcptool.convert(folder, tmp_path / name, to)
    done = run("reshard", "--world-size", 2, "--dry-run", folder, tmp_path / "resharded")
    assert (done.returncode, "runs code when it is loaded" in done.stderr) == (3, True)
    assert not (folder / "_COMPLETE").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_clean_step_is_chosen_and_kept(tmp_path):
    run_dir = steps(tmp_path / "run", "step_1", "step_2")
    metadata = run_dir / "step_2" / ".metadata"
    metadata.write_bytes(PLACES["after, popped"](metadata.read_bytes()))
    found = dcptool.find_latest(run_dir)
    assert found.verdict.name == "step_1"
    assert [verdict.state for verdict in found.skipped] == [State.UNSAFE]
    done = run("prune", "--keep", 1, "--yes", "--json", run_dir)
    assert {step["name"]: step["keep"] for step in json.loads(done.stdout)["steps"]} == {"step_1": True, "step_2": True}
    row = next(line for line in run("verify", run_dir).stdout.splitlines() if line.startswith("step_2 "))
    assert row.split()[1] == "unsafe"


def test_a_sibling_that_runs_code_rebuilds_nothing(tmp_path):
    like = with_metadata(tmp_path / "step_1", "after, popped")
    lost = copy(SOURCE, tmp_path / "step_2")
    (lost / ".metadata").unlink()
    with pytest.raises(ItemError, match="runs code when it is loaded"):
        dcptool.rescue(lost, like)
    assert not (lost / ".metadata").exists()


def saved(path, **state):
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    dcp.save({"w": torch.ones(3), **state}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("level", dcptool.Level)
def test_an_object_that_runs_code(tmp_path, level):
    folder = saved(tmp_path / "step_1", hook=Evil(), step=7)
    [verdict] = dcptool.verify(folder, dcptool.VerifyOptions(level)).verdicts
    assert verdict.state is State.UNSAFE
    [finding] = [finding for finding in verdict.findings if finding.is_error]
    assert (finding.kind, finding.fqn) == ("unsafe-pickle", "hook")
    assert "posix.system" in finding.message
    assert "'hook' runs code when it is loaded" in run("inspect", folder).stdout
    with pytest.raises(ItemError, match="is unsafe, not marked"):
        dcptool.mark_complete(folder)
    for to, name in (("torch", "m.pt"), ("dcp", "out")):
        with pytest.raises(
            UnsafePickleError, match=r"'hook' calls or names posix\.system\n.*--exclude 'hook' leaves it out"
        ):
            dcptool.convert(folder, tmp_path / name, to)
        dcptool.convert(folder, tmp_path / name, to, dcptool.ConvertOptions(exclude=("hook",)))
    dcptool.convert(folder, tmp_path / "m.safetensors", "safetensors")  # holds no objects
    done = run("reshard", "--world-size", 2, "--dry-run", folder, tmp_path / "r")
    assert (done.returncode, "--exclude 'hook' leaves it out" in done.stderr) == (3, True)


def test_a_small_object_that_runs_code_is_not_chosen(tmp_path):
    saved(tmp_path / "run/step_1", hook=3)
    saved(tmp_path / "run/step_2", hook=Evil())
    found = dcptool.find_latest(tmp_path / "run")
    assert (found.verdict.name, [verdict.state for verdict in found.skipped]) == ("step_1", [State.UNSAFE])


def test_a_large_object_is_looked_into_with_records(tmp_path):
    folder = saved(tmp_path / "step_1", hook=[Evil(), "x" * 70_000])
    assert dcptool.verify(folder).good
    assert not dcptool.verify(folder, dcptool.VerifyOptions(dcptool.Level.RECORDS)).good


def test_what_runs_code_is_carried_with_trust_and_not_executed(tmp_path):
    torch = pytest.importorskip("torch")

    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    folder = saved(tmp_path / "step_1", hook=Touch(), step=7)
    assert run("convert", "--to", "torch", "--trust", folder, tmp_path / "m.pt").returncode == 0
    assert run("convert", "--to", "dcp", "--trust", tmp_path / "m.pt", tmp_path / "out").returncode == 0
    assert run("reshard", "--world-size", 2, "--trust", "--dry-run", folder, tmp_path / "r").returncode == 0
    assert not (tmp_path / "executed").exists()
    for path in ("m.pt", "out"):
        [verdict] = dcptool.verify(tmp_path / path, dcptool.VerifyOptions(dcptool.Level.RECORDS)).verdicts
        assert verdict.state is State.UNSAFE
    torch.load(tmp_path / "m.pt", weights_only=False)
    assert (tmp_path / "executed").exists()


def with_pickle(source, target, change) -> None:
    """Copy a zip of torch.save with its pickle changed, and a right CRC."""
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as after:
        for info in before.infolist():
            data = before.read(info)
            after.writestr(info.filename, change(data) if info.filename.endswith("data.pkl") else data)


def test_a_call_in_a_pt_file_whose_result_is_dropped(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3), "step": 7}, tmp_path / "clean.pt")
    with_pickle(tmp_path / "clean.pt", tmp_path / "model.pt", lambda data: data[:-1] + CALLED + b"0.")
    assert dcptool.verify(tmp_path / "clean.pt").good
    [verdict] = dcptool.verify(tmp_path / "model.pt").verdicts
    assert verdict.state is State.UNSAFE
    with pytest.raises(ItemError, match="runs code when it is loaded, nothing was written"):
        dcptool.convert(tmp_path / "model.pt", tmp_path / "out", "dcp")


def test_a_call_in_the_item_of_a_tensor(tmp_path):
    folder = saved(tmp_path / "step_1")
    item = dcptool.open(folder)["w"].chunks[0].item
    [data] = [path for path in folder.iterdir() if path.name == item.file]
    (tmp_path / "item").write_bytes(data.read_bytes()[item.byte_offset : item.byte_offset + item.nbytes])
    with_pickle(tmp_path / "item", tmp_path / "evil", lambda pickled: pickled[:-1] + CALLED + b"0.")
    shutil.copy(tmp_path / "evil", data)

    def longer(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, data.stat().st_size

    edit_metadata(folder, longer)
    assert dcptool.verify(folder, dcptool.VerifyOptions(dcptool.Level.RECORDS)).verdicts[0].state is State.UNSAFE


def test_a_bit_wrong_in_a_name_of_torch_is_damage(tmp_path):
    """Each of these torch refuses; a name it has not is no metadata of torch's."""
    data = (SOURCE / ".metadata").read_bytes()
    name = b"TensorStorageMetadata"
    found = []
    for index in range(len(name)):
        folder = copy(SOURCE, tmp_path / str(index))
        changed = name[:index] + bytes([name[index] ^ 4]) + name[index + 1 :]
        (folder / ".metadata").write_bytes(data.replace(name, changed))
        found.append(dcptool.verify(folder).verdicts[0].state)
    assert set(found) == {State.DAMAGED}


def test_metadata_refers_to_nothing_outside(tmp_path):
    folder = copy(SOURCE, tmp_path / "step_1")
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:-1] + b"NQ0.")
    assert "persistent-id" in {finding.kind for finding in dcptool.verify(folder).verdicts[0].findings}
    assert not dcptool.verify(folder).good
