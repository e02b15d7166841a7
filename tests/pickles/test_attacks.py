"""What acts when `pickle`, torch or numpy loads it is `unsafe`, wherever it lies; values of common packages never are.

The oracle is loading: each file of the collection is loaded in a subprocess, and whether it acted is looked at.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings

import pytest

import dcptool
from dcptool.checkpoint.extents import Extent
from dcptool.errors import ItemError, MetadataError, RunsCodeError
from dcptool.formats.torch_save import items
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.ops.verify.verdict import State
from dcptool.pickles.files import refuse_code
from tests.conftest import FOREIGN
from tests.damage import edit_metadata
from tests.pickles.attacks import ATTACKS, CHILD, JOB, MKDIR, PLAIN, zipped

torch = pytest.importorskip("torch")

RECORDS = dcptool.VerifyOptions(dcptool.Level.RECORDS)
HARMLESS_HERE = {
    # torch refuses these zips; numpy.load and torch.load find no such file; a store opens its file later.
    "zip: another folder, first", "zip: another folder, last", "zip: the folder of the first record",
    "zip: twice, the second", "zip: in capitals behind", "zip: a folder deeper", "zip: the file flags of encryption",
    "zip: another pickle beside", "zip: another pickle beside, by content", "stream: behind the first pickle",
    "stream: behind raw values", "pickle: torch.load", "pickle: numpy.load", "pickle: torch's file store",
    "pickle: shelve",
}  # fmt: skip
"""Unsafe all the same: other versions, or other loaders, may do otherwise."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every file of the collection, by its name there."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for number, (key, attack) in enumerate(ATTACKS.items()):
        found[key] = folder / f"{number}{attack.suffix}"
        found[key].write_bytes(attack.data)
    return found


@pytest.fixture(scope="module")
def acting(files, tmp_path_factory):
    """Those that act when they are loaded."""
    folder = tmp_path_factory.mktemp("loaded")
    (folder / "job.py").write_text(JOB)
    asked = json.dumps([[str(path), ATTACKS[key].loader] for key, path in files.items()])
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return {key for key, acted in zip(files, json.loads(done.stdout), strict=True) if acted}


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    from torch.distributed import checkpoint as dcp

    folder = tmp_path_factory.mktemp("run") / "step_1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(3), "hook": 7}, checkpoint_id=folder, no_dist=True)
    return folder


def state(path, options=RECORDS):
    return dcptool.verify(path, options).verdicts[0].state


def test_the_collection_acts(acting):
    assert set(ATTACKS) - acting <= HARMLESS_HERE
    assert len(acting) > 140


def test_a_file_alone_is_unsafe_at_once(files, acting):
    states = {key: state(path, dcptool.VerifyOptions()) for key, path in files.items()}
    assert {key for key in acting if states[key] is not State.UNSAFE} == set()
    assert set(states.values()) == {State.UNSAFE}


def test_a_file_beside_a_checkpoint(files, acting, step):
    found = {}
    for key, path in files.items():
        beside = shutil.copy(path, step / f"state{path.suffix}")
        found[key] = state(step)
        os.unlink(beside)
    assert {key for key in acting if found[key] is not State.UNSAFE} == set()
    assert state(step) is State.COMPLETE


def with_item(step, folder, data):
    """Copy a step and put bytes in place of its object's item."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(step, folder)
    file = folder / dcptool.open(folder)["hook"].item.file
    start = file.stat().st_size
    with file.open("ab") as out:
        out.write(data)

    def move(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "hook":
                info.offset, info.length = start, len(data)

    edit_metadata(folder, move)
    return folder


def test_an_object_in_a_checkpoint(acting, step, tmp_path):
    missed = set()
    for key in acting:
        attack = ATTACKS[key]
        wrapped = [attack.data]
        if attack.loader == "pickle":
            wrapped.append(zipped(("archive/data.pkl", attack.data), ("archive/version", b"3\n")))
        missed |= {
            key for data in wrapped if state(with_item(step, tmp_path / "step_2", data)) is not State.UNSAFE
        }  # fmt: skip
    assert missed == set()


def test_metadata(acting, step, tmp_path):
    folder = shutil.copytree(step, tmp_path / "step_3")
    missed = set()
    for key in acting:
        if ATTACKS[key].loader == "pickle":
            (folder / ".metadata").write_bytes(ATTACKS[key].data)
            missed |= {key} if state(folder, dcptool.VerifyOptions()) is not State.UNSAFE else set()
    assert missed == set()


def test_inside_real_metadata(acting, step, tmp_path):
    """Before and after what torch wrote, which all the same is read: a call whose result is dropped."""
    folder = shutil.copytree(step, tmp_path / "step_4")
    data = (folder / ".metadata").read_bytes()
    missed = set()
    for key in acting:
        body = ATTACKS[key].data
        if key.startswith("pickle: ") and body[:1] == b"\x80" and body[-1:] == b".":
            for hidden in (data[:-1] + body[2:-1] + b"0.", data[:2] + body[2:-1] + b"0" + data[2:]):
                (folder / ".metadata").write_bytes(hidden)
                missed |= {key} if state(folder, dcptool.VerifyOptions()) is not State.UNSAFE else set()
    assert missed == set()


def test_rank_metadata(tmp_path):
    folder = shutil.copytree(FOREIGN / "w_no_collectives", tmp_path / "step_1")
    path = folder / "__1.metadata"
    path.write_bytes(b"\x80\x02" + MKDIR)
    assert state(folder, dcptool.VerifyOptions()) is State.UNSAFE


def test_text_and_damage_are_not_called_unsafe(step):
    words = "unicode\nios\ncode\nposix\nsystem\nos\n"
    for name, data in {
        "vocab.txt": words, "vocab.bin": "I\n" + words, "log": "Icode\n" + words, "notes": "N\n" + words,
        "names.csv": "(cos\n", "cut.dat": b"\x80\x04X" + words.encode(),
    }.items():  # fmt: skip
        path = step / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        assert state(step) is not State.UNSAFE, name
        path.unlink()


def test_one_changed_bit_in_an_item_is_damage():
    """Its checksum tells; and of what torch's writers call, a name or an opcode one bit away is no attack."""
    out = io.BytesIO()
    torch.save({"w": torch.nn.Parameter(torch.ones(2)), "a": [1, 2.5, "x"], "d": torch.float32}, out)
    data = out.getvalue()
    found = set()
    for at in range(data.index(b"\x80\x02"), data.index(b"PK", data.index(b"\x80\x02"))):
        for bit in range(8):
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            archive = TorchZip(lambda start, nbytes, of=changed: of[start : start + nbytes], len(data), changed)
            with pytest.raises((ItemError, MetadataError)) as caught:
                items.examine(archive, Extent("f", 0, len(data)), False)
            try:
                refuse_code(io.BytesIO(changed), caught.value)
            except RunsCodeError as error:
                found |= set(error.names)
    assert found == set()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_pickles_is_fine(protocol, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.TransformerEncoderLayer(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    subclass = torch.ones(2)
    subclass.tag = "kept with it"
    value = {
        "model": model, "optimizer": optimizer, "buffer": torch.nn.Buffer(torch.ones(2)), "attribute": subclass,
        "schedule": torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
        "sparse": torch.eye(3).to_sparse(), "nested": torch.nn.Parameter(torch.ones(2)), "types": (int, str, float),
        "data": torch.utils.data.TensorDataset(torch.ones(3)), "device": torch.device("cpu"),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(), "average": torch.optim.swa_utils.AveragedModel(model),
        "version": torch.torch_version.TorchVersion("2.1"), "function": torch.nn.functional.gelu,
    }  # fmt: skip
    torch.save(value, tmp_path / "model.pt", pickle_protocol=protocol)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(value, protocol))
    assert dcptool.verify(tmp_path / "model.pt").good
    assert state(tmp_path / "plain.pkl") is State.OTHER


def test_plain_pickles_are_no_checkpoint_but_not_unsafe(tmp_path):
    (tmp_path / "a.pkl").write_bytes(PLAIN)
    assert state(tmp_path / "a.pkl") is State.OTHER
