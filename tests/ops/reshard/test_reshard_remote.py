"""Reshard from and to object stores: by ranged reads, with handles that are opened in the workers."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from dcptool.ops.reshard.reshard import ReshardOptions  # noqa: E402
from tests import damage  # noqa: E402
from tests.commands import HURRY, wait_for  # noqa: E402
from tests.conftest import FOREIGN  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)
COUNTED = """
import json, os
from s3fs import S3FileSystem
real = S3FileSystem._call_s3
async def call(self, method, *arguments, **options):
    with open({log!r}, "a") as file:
        asked = {{**next((found for found in arguments if isinstance(found, dict)), {{}}), **options}}
        file.write(json.dumps([os.getpid(), method, asked.get("Key", ""), asked.get("Range", "")]) + "\\n")
    return await real(self, method, *arguments, **options)
S3FileSystem._call_s3 = call
"""
SLOW = (
    HURRY
    + """
import os, time
from dcptool.storage import remote
from dcptool.ops.reshard import member
real_write = member._write
def told_write(group, *rest):
    global RANK
    RANK = group.rank
    return real_write(group, *rest)
member._write = told_write
real_finish = remote.RemoteSink.finish
def finish(self):
    real_finish(self)
    open({flags!r} + f"/{{RANK}}", "w").close()
    while {held} and not os.path.exists({flags!r} + "/go"):
        time.sleep(0.02)
remote.RemoteSink.finish = finish
"""
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    whole = {f"layers.{index}.weight": torch.randn(24, 40) for index in range(2)}
    states = [{**{name: Shard.of(tensor, rank, 4) for name, tensor in whole.items()}, "step": 7} for rank in range(4)]
    return save(tmp_path_factory.mktemp("source") / "step_7", *states)


def test_every_direction_by_ranged_reads(commands, source, s3_url, tmp_path):
    """Local → store → store → local: equal at every station, and no whole data file is fetched."""
    log = tmp_path / "log"
    stations = [source, f"{s3_url}/a/step_7", f"{s3_url}/b/step_7", tmp_path / "out" / "step_7"]
    for here, there in pairwise(stations):
        code = COUNTED.format(log=str(log))
        done = commands.run("reshard", "--world-size", 3, "--workers", 2, here, there, code=code)
        assert (done.code, done.err) == (0, "")
    assert dcptool.compare(source, stations[-1]).equal
    assert dcptool.verify(stations[-1], DEEP).good
    assert dcptool.verify(stations[1]).good
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    fetched = [call for call in calls if call[1] == "get_object"]
    readers = {process for process, _, key, _ in fetched if key.endswith(".distcp")}
    assert len(readers) == 4  # two workers each of the second and the third reshard
    assert all(re.fullmatch(r"bytes=\d+-\d+", asked) for *_, asked in fetched)
    again = commands.run("reshard", "--world-size", 5, "--overwrite", source, f"{s3_url}/a/step_7")
    assert again.code == 3
    assert "is there already; an object store has no rename" in again.err


def test_in_a_process_that_has_used_the_store_before(source, s3_url):
    """The parent has an event loop in a thread, which a forked worker does not have."""
    filesystem, base = fsspec.url_to_fs(s3_url)
    filesystem.put(f"{source}/", f"{base}/step_7", recursive=True)
    assert dcptool.open(f"{s3_url}/step_7").read("layers.0.weight").shape == (24, 40)
    done = dcptool.reshard(f"{s3_url}/step_7", f"{s3_url}/new/step_7", ReshardOptions(world_size=3, workers=2))
    assert done.workers == 2
    assert dcptool.compare(source, f"{s3_url}/new/step_7").equal


def test_a_whole_step_to_a_store_and_back(commands, s3_url, tmp_path):
    """Parts, files of ranks and of the job; a part that is damaged leaves nothing of the others."""
    step = FOREIGN / "trainer_fsdp2" / "checkpoint-2"
    there, back = f"{s3_url}/run/checkpoint-2", tmp_path / "back" / "checkpoint-2"
    for source, target, n_ranks in ((step, there, 3), (there, back, 2)):
        done = commands.run("reshard", "--world-size", n_ranks, "--workers", 2, "--check", source, target)
        assert done.code == 0, done.err
    for part in ("optimizer_0", "pytorch_model_fsdp_0"):
        assert dcptool.compare(step / part, back / part).equal
    for name in ("scheduler.pt", "trainer_state.json", "rng_state_1.pth"):
        assert (back / name).read_bytes() == (step / name).read_bytes()
    assert dcptool.verify(there).good
    damaged = damage.copy(step, tmp_path / "run" / "checkpoint-2")
    item = next(iter(dcptool.open(damaged / "pytorch_model_fsdp_0").tensors.values())).chunks[1].item
    damage.flip_byte(damaged / "pytorch_model_fsdp_0" / item.file, item.byte_offset + item.nbytes // 2)
    done = commands.run("reshard", "--world-size", 3, "--workers", 2, damaged, f"{s3_url}/other/checkpoint-2")
    assert done.code == 3
    filesystem, base = fsspec.url_to_fs(s3_url)
    filesystem.invalidate_cache()
    assert not filesystem.exists(f"{base}/other")


@pytest.mark.parametrize("how", ["worker", "parent", "damaged"])
def test_nothing_is_left_in_the_store(commands, source, s3_url, tmp_path, how):
    flags = tmp_path / "flags"
    flags.mkdir()
    filesystem, base = fsspec.url_to_fs(s3_url)
    here = source
    if how == "damaged":
        here = damage.copy(source, tmp_path / "damaged")
        item = dcptool.open(here)["layers.1.weight"].chunks[3].item
        damage.flip_byte(here / item.file, item.byte_offset + item.nbytes // 2)
    code = SLOW.format(flags=str(flags), held=how != "damaged")
    running = commands.start("reshard", "--world-size", 4, "--workers", 2, here, f"{s3_url}/step_7", code=code)
    if how != "damaged":
        wait_for(lambda: all((flags / str(rank)).exists() for rank in range(2)))
        filesystem.invalidate_cache()
        assert filesystem.find(f"{base}/step_7")
        victim, number = (running.children()[1], signal.SIGKILL) if how == "worker" else (running.pid, signal.SIGTERM)
        os.kill(victim, number)
    done = running.wait()
    expected = {
        "worker": "rank 1 of 2 was killed by SIGKILL",
        "parent": "",
        "damaged": "is damaged, nothing was written",
    }
    assert done.code == (143 if how == "parent" else 3)
    assert expected[how] in done.err
    wait_for(lambda: not running.left(), 10)
    filesystem.invalidate_cache()
    assert not filesystem.find(f"{base}/step_7")


def test_a_second_run_to_one_place_removes_nothing_of_the_first(commands, source, s3_url, tmp_path):
    """Both have looked before either had written."""
    target = f"{s3_url}/step_7"
    slow = SLOW.format(flags=str(tmp_path), held=True)
    blind = "from dcptool.copying import publishing\npublishing._require_nothing_there = lambda path: None\n"
    first = commands.start("reshard", "--world-size", 4, "--workers", 2, source, target, code=slow)
    wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
    second = commands.run("reshard", "--world-size", 4, "--workers", 2, source, target, code=blind)
    assert second.code == 3
    assert re.search(r"^error: rank \d of 2: s3://.*/__\d_0\.distcp is there already", second.err)
    (tmp_path / "go").touch()
    assert first.wait().code == 0
    assert dcptool.verify(target, DEEP).good


def test_what_is_removed_from_a_store_stops_looking_whole_first(monkeypatch):
    """Stopped after the marker was written and before anybody heard of it: marker and metadata go before the data."""
    from dcptool.groups import audience

    deleted: list[str] = []

    class Store:
        def delete(self, name: str) -> None:
            deleted.append(name)

    monkeypatch.setattr(audience, "storage_at", lambda url: Store())
    output = audience.UnfinishedOutput()
    made = ["__0_0.distcp", "__1_0.distcp", ".metadata", "_COMPLETE"]
    output.note("writing", ("s3://bucket/run/step_1", ("_COMPLETE", ".metadata")))
    for name in made:
        output.note("made", name)
    output.remove()
    assert set(deleted[:2]) == {"_COMPLETE", ".metadata"}
    assert sorted(deleted) == sorted(made)
