"""What a message tells to do next can be done, and does what it says."""

from __future__ import annotations

import json
import os
import time

import pytest

import dcptool
from dcptool.errors import ItemError
from dcptool.ops.reshard.plan import make_plan
from tests import damage
from tests.conftest import FOREIGN, OLD, run

SAVED = FOREIGN / "xver_t2130"
RANK_LOCAL = FOREIGN / "w_no_collectives"


def copied(source, tmp_path, name="step_5"):
    return damage.copy(source, tmp_path / name)


def age(folder):
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (OLD, OLD))
    return folder


@pytest.fixture
def flipped(tmp_path):
    """A copy with one byte of a tensor's values changed, which shows when everything is read."""
    path = copied(SAVED, tmp_path)
    entry = dcptool.open(path).tensors["model.emb.weight"]
    payload = dcptool.open(path).payload(entry, entry.chunks[0])
    record = payload.record
    damage.flip_byte(path / record.item.file, record.item.byte_offset + record.byte_offset)
    return path


def test_mark_names_the_level_that_sees_it(flipped):
    done = run("mark", "--checksums", "--marker", "DONE", flipped)
    assert done.returncode != 0
    command = done.stderr.strip().rpartition("See all: dcptool ")[2]
    assert command == f"verify --deep --marker DONE {flipped}"
    assert "bytes were changed" in run(*command.split()).stdout


def test_verify_names_the_marker_it_asks_for():
    done = run("verify", "--require-marker", "--marker", "DONE", SAVED)
    assert f"dcptool mark --marker DONE {SAVED}" in done.stdout
    assert f"dcptool mark {SAVED}" in run("verify", "--require-marker", SAVED).stdout


def test_rescue_does_not_offer_to_overwrite(tmp_path):
    path = copied(SAVED, tmp_path)
    (path / ".metadata").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    done = run("rescue", path, "--like", SAVED, "-o", tmp_path / "out")
    assert "is there already; name another place" in done.stderr
    assert "--overwrite" not in done.stderr


class TestLostRankMetadata:
    """One `__R.metadata` of a save with use_collectives=False is gone."""

    @pytest.fixture
    def lost(self, tmp_path):
        path = age(copied(RANK_LOCAL, tmp_path))
        (path / "__0.metadata").unlink()
        return path

    @pytest.mark.parametrize("command", ["verify", "inspect"])
    def test_its_data_is_no_leftover_and_rescue_is_named(self, lost, command):
        shown = " ".join(run(command, lost).stdout.split())
        assert "rank-local metadata of rank 0 is missing" in shown
        assert f"dcptool rescue {lost} --like STEP may rebuild" in shown
        assert "older or wider save" not in shown

    def test_files_of_ranks_that_have_theirs_may_be_leftovers(self, lost):
        (lost / "__1_9.distcp").write_bytes(b"PK")
        (lost / "__0_9.distcp").write_bytes(b"PK")
        found = [finding for finding in dcptool.check(dcptool.open(lost)).findings if finding.kind == "leftover-files"]
        assert [finding.message for finding in found] == [
            "__1_9.distcp (2 bytes) is not named by the metadata: it holds items of an older or wider save"
        ]

    def test_convert_names_no_option_that_is_refused_too(self, lost, tmp_path):
        for option in ((), ("--skip-corrupt",)):
            done = run("convert", "--to", "torch", *option, lost, tmp_path / "out.pt")
            assert done.returncode != 0
            assert "leaves such entries out" not in done.stderr
            assert f"dcptool rescue {lost} --like STEP" in done.stderr
        dcptool.rescue(lost, RANK_LOCAL)
        assert run("convert", "--to", "torch", "--rank", "0", lost, tmp_path / "out.pt").returncode == 0

    def test_while_it_may_still_be_written(self, lost):
        os.utime(lost / "__1.metadata", (time.time(), time.time()))
        shown = " ".join(run("verify", lost).stdout.split())
        assert "no metadata yet" not in shown
        assert "metadata of some ranks not yet there, and a file was written" in shown


@pytest.mark.parametrize("nbytes", [0, 100])
def test_metadata_that_cannot_be_read_may_be_rebuilt(tmp_path, nbytes):
    path = age(copied(SAVED, tmp_path))
    content = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(content[:nbytes])
    os.utime(path / ".metadata", (OLD, OLD))
    told = f"or move it away, then dcptool rescue {path} --like STEP may rebuild it"
    assert told in " ".join(run("verify", path).stdout.split())
    assert told in run("inspect", path).stderr
    (path / ".metadata").rename(tmp_path / "away")
    assert run("rescue", path, "--like", SAVED).returncode == 0


@pytest.mark.parametrize("how", ["between items", "empty"])
def test_rescue_says_which_file_ends_early(tmp_path, how):
    path = copied(SAVED, tmp_path)
    entries = dcptool.open(SAVED).entries.values()
    ends = [
        item.byte_offset + item.nbytes
        for entry in entries
        for item in [chunk.item for chunk in getattr(entry, "chunks", ())] or [entry.item]
        if item and item.file == "__0_0.distcp"
    ]
    damage.truncate(path / "__0_0.distcp", min(ends) if how == "between items" else 0)
    (path / ".metadata").unlink()
    done = run("rescue", path, "--like", SAVED)
    assert f"ends at byte {min(ends):,}" in done.stderr or "__0_0.distcp is empty" in done.stderr
    assert "It is cut short, or of another layout" in done.stderr
    assert "name another one" not in done.stderr


def test_rescue_does_not_send_in_circles(tmp_path):
    path, other = copied(SAVED, tmp_path), copied(SAVED, tmp_path, "step_6")
    for folder in (path, other):
        (folder / ".metadata").unlink()
    for like in (path, other):
        done = run("rescue", path, "--like", like)
        assert "rescue may rebuild" not in done.stderr
        assert "name another one" in done.stderr


def test_what_is_missing_is_not_called_damaged(tmp_path):
    path = copied(SAVED, tmp_path)
    (path / "__1_0.distcp").unlink()
    told = f"{path} is not whole, nothing was written"
    assert told in run("convert", "--to", "torch", path, tmp_path / "out.pt").stderr
    with pytest.raises(ItemError, match=told):
        make_plan(str(path), str(tmp_path / "out"), dcptool.ReshardOptions(2))


def test_reshard_of_damage_says_what_to_do(flipped, tmp_path):
    with pytest.raises(ItemError) as caught:
        dcptool.reshard(flipped, tmp_path / "out", dcptool.ReshardOptions(world_size=2, workers=1))
    assert f"{flipped} is damaged, nothing was written" in str(caught.value)
    assert str(caught.value).endswith("Copy the files again from where they were saved, or take another step.")


def test_what_is_left_out_is_said_with_its_cause(tmp_path):
    path = copied(SAVED, tmp_path)
    (path / "__0_0.distcp").unlink()
    damage.truncate(path / "__1_0.distcp", 1)
    done = run("convert", "--to", "torch", "--skip-corrupt", "--json", path, tmp_path / "out.pt")
    messages = [found["message"] for found in json.loads(done.stdout)["corrupt"]]
    assert any("is stored in __0_0.distcp" in text and "that file is missing" in text for text in messages)
    assert any("is stored in __1_0.distcp" in text and "that file ends at byte 1" in text for text in messages)
    assert "1 bytes" not in done.stdout + done.stderr


def test_one_byte_is_one_byte(tmp_path):
    path = age(copied(SAVED, tmp_path))
    damage.truncate(path / "__1_0.distcp", 1)
    (path / "__9_0.distcp").write_bytes(b"P")
    shown = run("verify", path).stdout
    assert "__1_0.distcp is cut short: 1 byte of at least" in shown
    assert "__9_0.distcp (1 byte) is not named by the metadata: it is left by" in " ".join(shown.split())
    assert "1 bytes" not in shown
