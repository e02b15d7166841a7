"""What cannot be looked into is not proven: items whose codec is not installed, or that nobody knows."""

from __future__ import annotations

import json
import os
import sys

import pytest

import dcptool
from dcptool import Level, VerifyOptions
from dcptool.checkpoint.findings import Finding, state_of
from dcptool.checkpoint.kinds import Severity
from dcptool.checks import items
from dcptool.errors import ItemError, StorageError
from dcptool.ops.prune.plan import plan_prune
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State
from dcptool.storage.local import LocalStorage
from tests import damage
from tests.conftest import FOREIGN, OLD, run

CODEC = "pip install 'dcptool[zstd]'"


@pytest.fixture
def without_codec(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)


@pytest.fixture
def step(tmp_path, without_codec):
    """A zstd checkpoint with a flipped byte, where zstandard is not installed."""
    folder = damage.copy(FOREIGN / "w_zstd", tmp_path / "run" / "step_2")
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[400] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    for path in folder.iterdir():
        os.utime(path, (OLD, OLD))
    return folder


@pytest.mark.usefixtures("without_codec")
def test_the_default_level_needs_no_codec():
    done = run("verify", "fixtures/foreign/w_zstd")
    assert (done.returncode, done.stderr) == (0, "")
    assert "state    complete" in done.stdout


@pytest.mark.parametrize("option", ["--records", "--deep"])
def test_what_was_not_read_is_not_complete(step, option):
    done = run("verify", option, step)
    assert done.returncode == 1
    assert "state    other" in done.stdout
    assert "checked  nothing: 15 items could not be read" in done.stdout
    assert "error: __0_0.distcp, bytes 0–794: 'model.embed.weight' at [0, 0]: it is zstd-compressed\n" in done.stdout
    assert done.stdout.endswith(f"\n  {CODEC}\n")
    document = json.loads(run("verify", option, "--json", step).stdout)["checkpoints"][0]
    assert document["state"] == "other"
    assert document["checked"] == {
        "n_items": 0, "n_unverifiable": 0, "unverifiable_nbytes": 0, "nbytes": 0, "n_unread": 15
    }  # fmt: skip
    assert {finding["kind"] for finding in document["findings"]} == {"unsupported-item"}


def test_latest_prefers_what_was_read(step):
    damage.copy(FOREIGN / "w_nodist", step.parent / "step_1")
    done = run("latest", "--deep", step.parent)
    assert done.stdout.strip().endswith("step_1")
    assert "step_2 is other: __0_0.distcp" in done.stderr
    table = run("verify", "--deep", step.parent).stdout
    assert "with 2 steps; checked: every byte; 15 items could not be read" in table


@pytest.mark.parametrize("option", [(), ("--checksums",)])
def test_it_is_not_marked(step, option):
    done = run("mark", *option, step)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"{step} cannot be checked, not marked: __0_0.distcp" in done.stderr
    assert f"See all: dcptool verify {'--deep' if option else '--records'} {step}" in done.stderr
    assert not (step / "_COMPLETE").exists()


def test_a_transform_nobody_knows_is_the_same(tmp_path):
    folder = damage.copy(FOREIGN / "w_zstd", tmp_path / "c")
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"stream.zstd", b"stream.what"))
    found = judge(folder, VerifyOptions(Level.DEEP))
    assert (found.state, found.tally.n_items, found.tally.n_unread) == (State.OTHER, 0, 15)
    assert {finding.next_step for finding in found.findings} == {"a newer version may know it"}
    assert judge(folder).state is State.COMPLETE


def test_what_is_damaged_besides_stays_so():
    def error(kind):
        return Finding(kind, Severity.ERROR, "?")

    assert state_of([error("unsupported-item"), error("wrong-crc")]) == "damaged"
    assert state_of([error("unsupported-item"), error("missing-file")]) == "incomplete"
    assert state_of([error("unsupported-item")]) == "other"


def test_many_are_counted_as_what_they_are(step, monkeypatch):
    monkeypatch.setattr(items, "MAX_PER_FILE", 2)
    found = judge(step, VerifyOptions(Level.DEEP))
    assert {finding.kind for finding in found.findings} == {"unsupported-item"}
    assert [f.message for f in found.findings if "more items" in f.message] == [
        "2 more items of __0_0.distcp cannot be looked into",
        "9 more items of __1_0.distcp cannot be looked into",
    ]


def test_files_that_do_not_open_are_not_counted_as_read(tmp_path, monkeypatch):
    folder = damage.copy(FOREIGN / "w_threads3", tmp_path / "c")
    whole = judge(folder, VerifyOptions(Level.DEEP)).tally
    name = min(path.name for path in folder.glob("*.distcp"))
    for method in ("read", "read_into"):
        plain = getattr(LocalStorage, method)

        def failing(storage, file, *args, plain=plain):
            if file == name:
                raise StorageError(f"{file}: permission denied")
            return plain(storage, file, *args)

        monkeypatch.setattr(LocalStorage, method, failing)
    found = judge(folder, VerifyOptions(Level.DEEP))
    n_unread = dcptool.open(folder).usage[name].items
    assert n_unread > 0
    assert (found.tally.n_items, found.tally.n_unread) == (whole.n_items - n_unread, n_unread)
    assert found.tally.nbytes < whole.nbytes
    assert f"; {n_unread} item{'s' * (n_unread > 1)} could not be read\n" in run("verify", "--deep", folder).stdout


def test_prune_leaves_it_alone(step):
    found = [judge(step, VerifyOptions(Level.DEEP))]
    decision = plan_prune("run", found, 1, include_incomplete=True, now=1e12).decisions[0]
    assert (decision.keep, decision.reason) == (True, "could not be read: left alone")


def test_statistics_name_what_to_install(step):
    done = run("inspect", "--stats", "--keys", "model.*", step)
    assert done.returncode == 1
    assert "damaged" not in done.stdout
    assert "dcptool verify" not in done.stdout
    assert f"it is zstd-compressed\n  {CODEC}\n" in done.stdout
    assert "(all files there and long enough; what is said below could not be read)" in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w_nodist", "the tensors below read, no CRC32 wrong)"),
        ("w_nocrc", "the tensors below read; stored without checksums)"),
        ("w_safetensors", "the tensors below read; stored without checksums)"),
        ("hf_sharded", "the tensors below read; stored without checksums)"),
    ],
)
def test_statistics_claim_no_checksum_where_there_is_none(name, words):
    assert f"long enough; {words}" in run("inspect", "--stats", f"fixtures/foreign/{name}").stdout


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_conversion_names_what_it_could_not_read(step, tmp_path, to):
    done = run("convert", "--to", to, step, tmp_path / ("o.pt" if to == "torch" else "o"))
    assert done.returncode == 3
    assert f"error: {step}/__1_0.distcp, bytes 0–448: 'step': it is zstd-compressed\n  {CODEC}\n" in done.stderr


@pytest.mark.parametrize("option", [(), ("--skip-corrupt",)])
def test_conversion_calls_nothing_damaged_that_it_could_not_read(step, tmp_path, option):
    done = run("convert", "--to", "safetensors", "--objects", "skip", *option, step, tmp_path / "o.safetensors")
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert lines[0] == f"error: {step} cannot be read here, nothing was written:"
    assert lines[1].endswith("'model.count': it is zstd-compressed")
    assert lines[-1] == f"  {CODEC}"
    assert "--skip-corrupt" not in done.stderr
    assert not (tmp_path / "o.safetensors").exists()


def test_the_library_refuses_too(step):
    with pytest.raises(ItemError, match="cannot be checked, not marked"):
        dcptool.mark_complete(step, checksums=True)
