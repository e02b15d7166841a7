"""What people ran into, one test per case as far as `verify`, `latest`, `mark` and `prune` go.

Saves are by torch's own planner and writer. Shown elsewhere already:

* R01: test_latest.py::TestLatest::test_r01_a_save_that_never_finished
* R02, both halves and a name in both: test_directory.py::TestNodeLocalHalves
* R06, every place a bit can flip in: test_verify.py::test_a_flipped_bit, test_flips_that_matter_are_found
* R19, links, vanishing steps, half-deleted ones: test_latest.py::TestLatest, test_prune.py::TestDelete
* R20, trackers: test_latest.py::TestLatest::test_r20_no_pointer_or_a_pointer_that_is_wrong, test_none_is_an_answer
* R24, R41, on every format: test_verify.py::test_files_missing_empty_or_too_many, test_a_file_cut_at_every_512_bytes
* R25, other wrong metadata: test_verify.py::test_metadata_that_is_wrong
* R26, replicas that differ: test_verify.py::test_values_that_differ_between_ranks_are_told
* R42, object stores: test_directory.py::TestObjectStore
* R68, every writer without checksums: test_verify.py::test_what_has_no_checksums_is_counted_and_neither_good_nor_bad
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.errors import CheckpointNotFoundError, ItemError
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, Verdict, VerifyOptions
from tests.conftest import FOREIGN, OLD, ROOT
from tests.conftest import run as cli
from tests.damage import copy, edit_metadata, flip_byte, truncate

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from tests.ops.inspect.test_cases_inspect import large_metadata  # noqa: E402
from tests.ranks import Shard, save  # noqa: E402

RECORDS, DEEP = VerifyOptions(level=Level.RECORDS), VerifyOptions(level=Level.DEEP)


def age(path: Path) -> Path:
    """Set the times of all files to long ago: nobody is writing there."""
    for file in path.rglob("*"):
        if file.is_file() and not file.is_symlink():
            os.utime(file, (OLD, OLD))
    return path


def step(path: Path, metadata: bool = True) -> Path:
    """A whole step of two ranks, written long ago; without `metadata` as a killed save leaves it."""
    save(path, *({"w": Shard.of(torch.arange(8.0), rank, 2), f"dl.rank{rank}": rank} for rank in range(2)))
    if not metadata:
        (path / ".metadata").unlink()
    return age(path)


def sharded(path: Path, ranks: int = 4) -> Path:
    """Three sharded tensors and an object per rank."""
    whole = {f"layer{index}.weight": torch.arange(64.0).reshape(16, 4) + index for index in range(3)}
    states = [
        {**{fqn: Shard.of(tensor, rank, ranks) for fqn, tensor in whole.items()}, f"dl.rank{rank}": {"pos": rank}}
        for rank in range(ranks)
    ]
    return age(save(path, *states))


def errors(verdict: Verdict) -> dict[str, str]:
    """Kind → message of the errors; of several of one kind the last."""
    return {finding.kind: finding.message for finding in verdict.findings if finding.severity.value == "error"}


def kept(run_dir: Path, keep: int, **options) -> dict[str, bool]:
    """What `prune` would do."""
    plan = make_plan(run_dir, keep, now=OLD + 10 * 86400, **options)
    return {decision.name: decision.keep for decision in plan.decisions}


def payload_place(path: Path, fqn: str, chunk: int = 0) -> tuple[Path, int]:
    """File and first byte of the values of one chunk."""
    checkpoint = dcptool.open(path)
    entry = checkpoint.tensors[fqn]
    payload = checkpoint.payload(entry, entry.chunks[chunk])
    return path / payload.record.item.file, payload.record.item.byte_offset + payload.record.byte_offset


# Both halves together, and a name in both: test_directory.py::TestNodeLocalHalves.
def test_r02_each_half_says_whose_files_are_elsewhere(tmp_path):
    whole = sharded(tmp_path / "whole")
    first, second = tmp_path / "a", tmp_path / "b"
    for half, names in ((first, (".metadata", "__0_0", "__1_0")), (second, ("__2_0", "__3_0"))):
        half.mkdir()
        for name in names:
            file = name if name == ".metadata" else f"{name}.distcp"
            shutil.copy2(whole / file, half / file)
    done = cli("verify", first)
    assert done.returncode == 1
    assert re.search(
        r"error: 2 of 4 files \(ranks 2–3\) are missing: they held \d+% of the bytes, 8 items of 3 tensors;",
        done.stdout,
    )
    assert "(or name their folders with --also)" in done.stdout
    done = cli("verify", second)
    assert done.returncode == 1
    assert "no .metadata, only data files of ranks 2–3: the save never finished, or this is one node's half" in (
        done.stdout
    )
    assert cli("verify", "--deep", first, "--also", second).returncode == 0


def test_r04_what_a_pointer_claims_is_looked_at(tmp_path):
    run_dir = tmp_path / "run"
    step(run_dir / "step-5")
    good, torn = step(run_dir / "step-10"), step(run_dir / "step-20", metadata=False)
    truncate(torn / "__0_0.distcp", 500)
    age(torn)
    (run_dir / "latest").symlink_to("step-20")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("20\n")
    done = cli("latest", run_dir)
    assert (done.returncode, done.stdout) == (0, f"{good}\n")
    assert "step-20 is incomplete: no .metadata" in done.stderr
    for pointer in ("latest", "latest_checkpointed_iteration.txt"):
        assert f"the pointer {pointer} names step-20, which is not complete; it was not followed" in done.stderr
    # What counts is complete; what a pointer names, and what is not complete, stays unless asked for.
    assert kept(run_dir, 1) == {"step-5": False, "step-10": True, "step-20": True}
    ask = {"include_incomplete": True, "older_than": 86400.0}
    assert kept(run_dir, 1, **ask) == {"step-5": False, "step-10": True, "step-20": True}
    (run_dir / "latest").unlink()
    (run_dir / "latest").symlink_to("step-30")
    (run_dir / "latest_checkpointed_iteration.txt").unlink()
    assert "the pointer latest names step-30, which is not there" in cli("latest", run_dir).stderr
    assert kept(run_dir, 1, **ask) == {"step-5": False, "step-10": True, "step-20": False}
    assert kept(run_dir, 1, include_incomplete=True, older_than=30 * 86400.0)["step-20"]
    os.utime(torn / "__0_0.distcp")  # somebody writes there
    assert kept(run_dir, 1, **ask)["step-20"]
    assert cli("prune", run_dir, "--keep", "1").returncode == 2
    assert (run_dir / "step-5").exists()


@pytest.mark.parametrize(
    ("content", "state", "says"),
    [
        (None, "incomplete", r"no \.metadata, only data files of ranks 0–1: the save never finished"),
        (b"", "incomplete", r"it is empty"),
        (300, "damaged", r"byte 300"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "damaged", r"Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html>401</html>\n", "damaged", r"HTML"),
        (b"see the other folder\n", "damaged", r"text"),
    ],
    ids=["missing", "empty", "cut", "lfs", "html", "text"],
)
def test_r05_what_is_wrong_with_the_metadata_in_one_line(tmp_path, content, state, says):
    path = step(tmp_path / "c", metadata=content is not None)
    if isinstance(content, bytes):
        (path / ".metadata").write_bytes(content)
    elif content is not None:
        truncate(path / ".metadata", content)
    age(path)
    done = cli("verify", path)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"  state    {state}\n" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(says, lines[0])
    assert "resume from" in done.stdout.lower()
    with pytest.raises(ItemError, match=says):
        dcptool.mark_complete(path)
    assert not (path / "_COMPLETE").exists()


def test_r06_a_flipped_bit_loads_silently_and_deep_names_it(tmp_path):
    path = save(tmp_path / "c", {"w": torch.arange(64)})
    file, start = payload_place(path, "w")
    dcptool.mark_complete(path, checksums=True)
    (path / "_COMPLETE").rename(tmp_path / "marker")
    flip_byte(file, start + 8 * 5)
    state = {"w": torch.zeros(64, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert state["w"].tolist() == [*range(5), 4, *range(6, 64)]  # torch does not notice
    assert judge(path).whole
    assert judge(path, RECORDS).whole
    verdict = judge(path, DEEP)
    (finding,) = verdict.findings
    assert (verdict.state, finding.kind, finding.file, finding.fqn) == (State.DAMAGED, "wrong-crc", file.name, "w")
    assert (finding.offsets, finding.sizes) == ((0,), (64,))
    assert finding.byte_range[0] <= start < finding.byte_range[1]
    assert re.match(
        r"__0_0\.distcp, bytes 0–[\d,]+: 'w': record data/0 has CRC32 [0-9a-f]{8}, stored is ", finding.message
    )
    (tmp_path / "marker").rename(path / "_COMPLETE")
    assert errors(judge(path, DEEP))["changed-file"].startswith("__0_0.distcp is not what was marked: its SHA-256")


def test_r15_shards_of_extra_state_are_counted(tmp_path):
    state = {
        "m.fc._extra_state/shard_0_2": io.BytesIO(b"x"),
        "m.fc._extra_state/shard_1_2": torch.zeros(0, dtype=torch.uint8),
        "m.fc.weight": torch.ones(3),
    }
    whole = save(tmp_path / "whole", state)
    torch.save({}, whole / "common.pt")
    (whole / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    for level in Level:
        verdict = judge(whole, VerifyOptions(level=level))
        assert verdict.state is State.COMPLETE
        assert [finding.kind for finding in verdict.findings] == ["not-resumable"]  # it has no optimizer
    del state["m.fc._extra_state/shard_0_2"]
    verdict = judge(save(tmp_path / "gap", state))
    assert not verdict.whole
    assert errors(verdict) == {
        "shard-gap": "'m.fc._extra_state' has 1 of its 2 shards; shard_0_2 is missing",
    }


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class TestR16NothingIsExecuted:
    @pytest.fixture
    def everything(self, tmp_path):
        """Gives what every command says of a run with one step, in which nothing may come to be executed."""

        def look(folder: Path) -> Verdict:
            age(folder)
            for level in Level:
                verdict = judge(folder, VerifyOptions(level=level))
            dcptool.verify(folder.parent, DEEP)
            dcptool.find_latest(folder.parent, DEEP)
            make_plan(folder.parent, 1, now=OLD + 1e6)
            return verdict

        return look

    def test_in_the_metadata(self, tmp_path, everything):
        path = step(tmp_path / "run" / "step_1")
        edit_metadata(path, lambda metadata: metadata.planner_data.update(evil=Evil(tmp_path / "executed")))
        verdict = everything(path)
        assert verdict.state is State.UNSAFE
        (told,) = (finding for finding in verdict.findings if finding.kind == "unsafe-pickle")
        assert "posix.mkdir" in told.message
        (path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
        verdict = everything(path)
        assert verdict.state is State.UNSAFE
        assert "posix.mkdir" in verdict.reason
        with pytest.raises(ItemError, match=r"posix\.mkdir"):
            dcptool.mark_complete(path)
        assert not (tmp_path / "executed").exists()

    def test_in_an_object(self, tmp_path, everything):
        path = save(tmp_path / "run" / "step_1", {"w": torch.ones(3), "evil": Evil(tmp_path / "executed")})
        assert everything(path).state is State.UNSAFE
        with pytest.raises(ItemError, match="is unsafe, not marked"):
            dcptool.mark_complete(path, checksums=True)
        report = dcptool.verify(path, load=True)
        assert report.verdicts[0].state is State.UNSAFE
        assert "1 objects not tried (--trust)" in report.verdicts[0].findings[-1].message
        assert not (tmp_path / "executed").exists()

    def test_files_outside_are_not_read(self, tmp_path, everything, monkeypatch):
        path = step(tmp_path / "run" / "step_1")
        outside = shutil.move(path / "__1_0.distcp", tmp_path / "run" / "outside.distcp")

        def escape(metadata):
            for place in metadata.storage_data.values():
                if place.relative_path == "__1_0.distcp":
                    place.relative_path = "../outside.distcp"

        edit_metadata(path, escape)
        opened = []
        real = os.open
        monkeypatch.setattr(os, "open", lambda name, *args, **kw: opened.append(str(name)) or real(name, *args, **kw))
        verdict = everything(path)
        assert not verdict.whole
        assert "../outside.distcp" in " ".join(errors(verdict).values())
        assert not [name for name in opened if name.endswith(Path(outside).name)]


def test_r17_a_gap_in_what_ranks_keep_is_warned_of(tmp_path):
    states = [{"obj": rank, "w": torch.ones(2), f"dl.rank{rank}": {"pos": rank}} for rank in range(4)]
    assert judge(save(tmp_path / "whole", *states), DEEP).findings == ()
    del states[2]["dl.rank2"]
    verdict = judge(save(tmp_path / "gap", *states))
    assert verdict.state is State.COMPLETE
    assert [(finding.kind, finding.severity.value) for finding in verdict.findings] == [("family-gap", "warning")]
    assert verdict.findings[0].message == ("'dl.rankN.pos' is there for 3 ranks, the last 3, but not for rank 2")


def test_r18_a_smaller_job_saved_less_which_is_no_fault(tmp_path):
    """Two steps of one run, by 4 ranks and by 2: rank 2's state is gone, and only this run's older step tells."""
    for number, ranks in ((1, 4), (2, 2)):
        sharded(tmp_path / "run" / f"step_{number}", ranks)
    report = dcptool.verify(tmp_path / "run", DEEP)
    assert report.good
    assert [verdict.world_size for verdict in report.verdicts] == [4, 2]
    assert [verdict.findings for verdict in report.verdicts] == [(), ()]


def test_r19_names_in_order_and_only_known_ones(tmp_path):
    run_dir = tmp_path / "run"
    for number in (5, 9, 15):
        step(run_dir / f"step-{number}")
    step(run_dir / "step-10", metadata=False)
    for other in ("step-015x", "step-20.tmp", "notes"):
        step(run_dir / other)
    elsewhere = step(tmp_path / "elsewhere")
    (run_dir / "step-99").symlink_to(elsewhere)
    assert cli("latest", run_dir).stdout == f"{run_dir / 'step-15'}\n"
    assert [found.name for found in dcptool.find_steps(run_dir)] == ["step-5", "step-9", "step-10", "step-15"]
    assert kept(run_dir, 1) == {"step-5": False, "step-9": False, "step-10": True, "step-15": True}
    assert kept(run_dir, 2)["step-9"]  # step-10 is broken and does not count
    done = cli("prune", run_dir, "--keep", "1", "--yes")
    assert done.returncode == 0
    assert done.stdout.index("DELETE") < done.stdout.index("deleted 2 steps, ")
    left = ["notes", "step-015x", "step-10", "step-15", "step-20.tmp", "step-99"]
    assert sorted(path.name for path in run_dir.iterdir()) == left
    assert (elsewhere / ".metadata").exists()
    for ask in (dcptool.find_latest, dcptool.verify, lambda path: make_plan(path, 1, now=OLD)):
        with pytest.raises(CheckpointNotFoundError, match="gone: no such file or directory"):
            ask(tmp_path / "gone")


# Trackers of plain steps: test_latest.py::TestLatest::test_r20_no_pointer_or_a_pointer_that_is_wrong.
def test_r20_composite_steps_without_a_tracker_are_found(tmp_path):
    run_dir = tmp_path / "run"
    for number in (10, 20):
        for part in ("actor", "critic"):
            step(run_dir / f"global_step_{number}" / part)
    assert cli("latest", run_dir).stdout == f"{run_dir / 'global_step_20'}\n"
    (run_dir / "latest_checkpointed_iteration.txt").write_text("10")
    done = cli("latest", run_dir)
    assert done.stdout == f"{run_dir / 'global_step_20'}\n"
    assert "names global_step_10, older than the newest complete step" in done.stderr
    for number in (10, 20):
        (run_dir / f"global_step_{number}" / "critic" / ".metadata").unlink()
    done = cli("latest", "--json", run_dir)
    assert done.returncode == 1
    assert json.loads(done.stdout)["path"] is None
    assert "no complete step to resume from" in done.stderr


def test_r24_what_a_lost_file_held(tmp_path):
    path = sharded(tmp_path / "c")
    file = path / "__1_0.distcp"
    content = file.read_bytes()
    share = f"{len(content) / sum(data.stat().st_size for data in path.glob('*.distcp')):.0%}"
    file.unlink()
    verdict = judge(path)
    held = f"{share} of the bytes, 4 items"
    assert verdict.state is State.INCOMPLETE
    assert errors(verdict) == {"missing-file": f"__1_0.distcp (rank 1) is missing: it held {held} of 3 tensors"}
    file.write_bytes(b"")
    assert errors(judge(path)) == {"short-file": f"__1_0.distcp is empty; it should hold {held}"}
    truncate_to = len(content) - 200
    file.write_bytes(content[:truncate_to])
    verdict = judge(path)
    assert verdict.state is State.INCOMPLETE
    assert f"{truncate_to:,} bytes of at least {len(content):,}" in errors(verdict)["short-file"]
    assert verdict.findings[0].byte_range == (truncate_to, len(content))
    file.write_bytes(content)
    (path / "__4_0.distcp").write_bytes(b"")  # an idle rank's
    age(path)
    assert judge(path, DEEP).findings == ()


def test_r25_a_hole_is_named(tmp_path):
    path = save(tmp_path / "c", *({"w": Shard.of(torch.arange(8.0), rank, 2), "b": torch.ones(2)} for rank in range(2)))

    def widen(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size([12])

    edit_metadata(path, widen)
    for level in Level:
        verdict = judge(path, VerifyOptions(level=level))
        (finding,) = (finding for finding in verdict.findings if finding.severity.value == "error")
        assert (verdict.state, finding.kind, finding.fqn) == (State.DAMAGED, "hole", "w")
        assert (finding.offsets, finding.sizes) == ((8,), (4,))
        assert finding.message == "'w': no chunk holds 4 of its 12 elements (33%), the first at [8] sizes [4]"
    with pytest.raises(ItemError, match="no chunk holds 4 of its 12"):
        dcptool.mark_complete(path)


# Replicas that differ: test_verify.py::test_values_that_differ_between_ranks_are_told.
def test_r26_metadata_of_every_rank_is_one_checkpoint(tmp_path):
    path = age(copy(FOREIGN / "w_no_collectives", tmp_path / "c"))
    verdict = judge(path, DEEP)
    assert verdict.state is State.COMPLETE
    assert verdict.parts[0].flavour == "torch DCP, rank-local metadata"
    (path / "__0.metadata").rename(tmp_path / "0")
    verdict = judge(path)
    assert not verdict.whole
    assert errors(verdict)["rank-metadata-missing"].startswith("rank-local metadata of rank 0 is missing")
    (tmp_path / "0").rename(path / "__0.metadata")
    (path / "__1.metadata").unlink()
    verdict = judge(path)
    assert not verdict.whole
    assert "no chunk holds" in errors(verdict)["hole"]


@pytest.mark.parametrize("shape", [(6, 2), (1, 3), (0, 3)], ids=str)
def test_r27_empty_shards_are_whole(tmp_path, shape):
    states = [{"w": Shard.of(torch.ones(shape), rank, 4), "scale": torch.tensor(2.0)} for rank in range(4)]
    path = save(tmp_path / "c", *states)
    for level in Level:
        verdict = judge(path, VerifyOptions(level=level))
        assert (verdict.state, verdict.findings) == (State.COMPLETE, ())
    assert dcptool.verify(path, load=True).good


def test_r41_a_cut_file_costs_no_read_and_its_bytes_are_told(tmp_path, monkeypatch):
    path = save(tmp_path / "c", {"w": torch.ones(8), "step": 7, "note": "abc"})
    file = path / "__0_0.distcp"
    items = sorted(
        [entry.chunks[0].item for entry in dcptool.open(path).tensors.values()]
        + [entry.item for entry in dcptool.open(path).objects.values()],
        key=lambda item: item.byte_offset,
    )
    end = file.stat().st_size
    assert items[-1].byte_offset + items[-1].nbytes == end
    content = file.read_bytes()
    reads = count_reads(monkeypatch)
    for nbytes in (end - 200, items[-1].byte_offset):  # torch: no central directory; EOFError
        file.write_bytes(content[:nbytes])
        verdict = judge(path)
        assert verdict.state is State.INCOMPLETE
        assert f"__0_0.distcp is cut short: {nbytes:,} bytes of at least {end:,}" in verdict.reason
    assert reads.pop(".metadata") < 64 << 10
    assert sum(reads.values()) == 0


class TestR42Urls:
    @pytest.fixture
    def memory(self, tmp_path):
        """A run directory in fsspec's memory, which knows only names and bytes; gives its URL and the file system."""
        import fsspec

        filesystem = fsspec.filesystem("memory")
        base = f"/{tmp_path.name}"
        for number in (1, 2, 3):
            step(tmp_path / "run" / f"step_{number}")
        filesystem.put(str(tmp_path / "run"), base, recursive=True)
        yield f"memory:/{base}", filesystem
        filesystem.rm(base, recursive=True)

    def test_every_command(self, memory):
        url, filesystem = memory
        filesystem.rm(f"{url}/step_3/__1_0.distcp")
        report = dcptool.verify(url, DEEP)
        assert [(found.name, found.state.value) for found in report.verdicts] == [
            ("step_1", "complete"),
            ("step_2", "complete"),
            ("step_3", "incomplete"),
        ]
        found = dcptool.find_latest(url)
        assert found.path == f"{url}/step_2"
        assert "__1_0.distcp (rank 1) is missing" in found.skipped[0].reason
        assert dcptool.mark_complete(found.path, checksums=True).path == f"{url}/step_2/_COMPLETE"
        assert judge(found.path, DEEP).state is State.COMPLETE
        plan = make_plan(url, 1, now=OLD)
        assert [decision.name for decision in plan.removed] == ["step_1"]
        assert dcptool.delete_steps(plan).names == ("step_1",)
        assert not filesystem.exists(f"{url}/step_1")
        assert [found.name for found in dcptool.find_steps(url)] == ["step_2", "step_3"]

    def test_ranges_only(self, memory, monkeypatch):
        url, filesystem = memory
        ranges = []
        real = type(filesystem).cat_file

        def cat_file(self, path, start=None, end=None, **options):
            ranges.append((path.rpartition("/")[2], start, end))
            return real(self, path, start=start, end=end, **options)

        monkeypatch.setattr(type(filesystem), "cat_file", cat_file)
        assert judge(f"{url}/step_1").state is State.COMPLETE
        assert all(start is not None and end is not None for _, start, end in ranges)
        assert sum(end - start for name, start, end in ranges if name != ".metadata") < 4096  # objects, and a few bytes

    def test_file_urls_are_local_paths(self, tmp_path):
        path = step(tmp_path / "run" / "step_1")
        assert judge(f"file://{path}", DEEP).state is State.COMPLETE
        assert cli("latest", f"file://{path.parent}").stdout == f"{path}\n"


def test_r53_values_tell_nothing_of_replicas(tmp_path):
    states = [
        {"norm": Shard.of(torch.ones(8), rank, 4), "buffer": torch.ones(2), "step": torch.tensor(1.0)}
        for rank in range(4)
    ]
    path = save(tmp_path / "c", *states)
    verdict = judge(path, DEEP)
    assert (verdict.state, verdict.findings) == (State.COMPLETE, ())
    assert verdict.tally.n_items == 4 + 1 + 1
    entry = dcptool.open(path).tensors["norm"]
    (path / entry.chunks[2].item.file).unlink()  # equal to the ones that are left, and still missed
    assert judge(path).state is State.INCOMPLETE


def test_r57_150_000_chunks_in_512_files_cost_a_few_bytes_of_each(tmp_path, monkeypatch):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(large_metadata(300, 512), 4))
    item = b"PK\x03\x04" + bytes(974) + b"PK\x05\x06" + bytes(18)  # all that the default level looks at
    for rank in range(512):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(item * 300)
    reads = count_reads(monkeypatch)
    verdict = judge(tmp_path)
    assert (verdict.state, verdict.findings) == (State.COMPLETE, ())
    assert (verdict.parts[0].world_size, verdict.parts[0].n_tensors) == (512, 300)
    assert reads.pop(".metadata") <= (tmp_path / ".metadata").stat().st_size + 4096
    assert len(reads) == 512
    assert max(reads.values()) <= 64


def test_r58_metadata_that_promises_more_than_is_there(tmp_path):
    """A merge that wrote a few bytes and said that all went well."""
    path = save(tmp_path / "c", {"w": torch.ones(8), "b": torch.ones(4)})

    def promise(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size([625_000_000])

    edit_metadata(path, promise)
    verdict = judge(path, RECORDS)
    assert verdict.state is State.DAMAGED
    assert {finding.fqn for finding in verdict.findings if finding.severity.value == "error"} == {"w"}
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:1000])
    assert re.search(r"cut short: 1,000 bytes of at least [\d,]+; it should hold 100% of the bytes", judge(path).reason)


def test_r60_the_damaged_item_is_named_and_the_others_are_intact(tmp_path):
    path = sharded(tmp_path / "c")
    file, start = payload_place(path, "layer1.weight", chunk=2)
    item = dcptool.open(path).tensors["layer1.weight"].chunks[2].item
    flip_byte(file, item.byte_offset + 4)  # in the header of the first record
    flip_byte(file, start)
    verdict = judge(path, DEEP)
    bad = [finding for finding in verdict.findings if finding.severity.value == "error"]
    assert {(found.fqn, found.file, found.offsets) for found in bad} == {("layer1.weight", "__2_0.distcp", (8, 0))}
    assert bad[0].byte_range == (item.byte_offset, item.byte_offset + item.nbytes)
    span = f"bytes {item.byte_offset:,}–{item.byte_offset + item.nbytes:,}"
    assert bad[0].message.startswith(f"__2_0.distcp, {span}: 'layer1.weight' at [8, 0]: ")
    assert verdict.tally.n_items == 4 * 4  # all were looked at
    document = json.loads(cli("verify", "--deep", "--json", path).stdout)
    assert document["checkpoints"][0]["findings"][0]["fqn"] == "layer1.weight"


def test_r68_items_without_checksums_are_counted_not_judged(tmp_path):
    state = {"a": torch.ones(8), "b": torch.zeros(8)}
    path = save(tmp_path / "with", state, single_file_per_rank=False)
    torch.serialization.set_crc32_options(False)
    try:
        without = save(tmp_path / "without", state, single_file_per_rank=False)
    finally:
        torch.serialization.set_crc32_options(True)
    verdict = judge(without, DEEP)
    assert verdict.state is State.COMPLETE
    assert verdict.findings[0].message.startswith("all items are stored without checksums (")
    place = {fqn: payload_place(path, fqn) for fqn in state}
    shutil.copy(payload_place(without, "a")[0], place["a"][0])
    verdict = judge(path, DEEP)
    assert verdict.state is State.COMPLETE
    assert re.fullmatch(
        r"1 of 2 items are stored without checksums \([\d,]+ bytes\): not verifiable", verdict.findings[0].message
    )
    flip_byte(*payload_place(path, "a"))
    assert judge(path, DEEP).whole
    flip_byte(*place["b"])
    assert [found.fqn for found in judge(path, DEEP).findings if found.kind == "wrong-crc"] == ["b"]


def count_reads(monkeypatch) -> dict[str, int]:
    """Count bytes as `os.pread` and `os.preadv` give them, by the name of the file; grows as reads happen."""
    reads: dict[str, int] = {}
    pread, preadv = os.pread, os.preadv

    def count(descriptor: int, nbytes: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        reads[name] = reads.get(name, 0) + nbytes

    def counted_pread(descriptor, nbytes, byte_offset):
        data = pread(descriptor, nbytes, byte_offset)
        count(descriptor, len(data))
        return data

    def counted_preadv(descriptor, buffers, byte_offset, *flags):
        done = preadv(descriptor, buffers, byte_offset, *flags)
        count(descriptor, done)
        return done

    monkeypatch.setattr(os, "pread", counted_pread)
    monkeypatch.setattr(os, "preadv", counted_preadv)
    return reads


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    whole = {f"layer{index}.weight": torch.zeros(64, 1 << 13) for index in range(4)}
    states = [
        {**{fqn: Shard.of(tensor, rank, 64) for fqn, tensor in whole.items()}, f"dl.rank{rank}": {"pos": rank}}
        for rank in range(64)
    ]
    path = save(tmp_path_factory.mktemp("wide") / "c", *states)
    assert len(list(path.glob("*.distcp"))) == 64
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) > 8 << 20
    return path


class TestWhatTheDefaultLevelReads:
    """At most 1 MiB beyond the metadata, of a checkpoint of 64 files."""

    def assert_little(self, path: Path, reads: dict[str, int]) -> None:
        metadata = reads.pop(".metadata")
        assert metadata <= (path / ".metadata").stat().st_size + 4096
        assert sum(reads.values()) <= 1 << 20
        assert len(reads) == 64  # and yet every file was looked at

    def test_by_calls_of_python(self, wide, monkeypatch):
        reads = count_reads(monkeypatch)
        assert judge(wide).state is State.COMPLETE
        self.assert_little(wide, reads)

    @pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
    def test_by_system_calls(self, wide, tmp_path):
        calls = "trace=read,pread64,readv,preadv,preadv2,mmap,sendfile,copy_file_range"
        done = subprocess.run(
            [
                "strace",
                "-ff",
                "-y",
                "-e",
                calls,
                "-o",
                tmp_path / "calls",
                sys.executable,
                "-m",
                "dcptool",
                "verify",
                wide,
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        if "ptrace" in done.stderr:
            pytest.skip(f"strace may not trace here: {done.stderr}")
        assert done.returncode == 0, done.stderr
        reads: dict[str, int] = {}
        for trace in tmp_path.glob("calls.*"):
            for line in trace.read_text(errors="replace").splitlines():
                found = re.match(rf"(\w+)\(.*?<{re.escape(str(wide))}/([^>]+)>.* = (\d+)$", line)
                if found:
                    assert found[1] in ("read", "pread64", "preadv", "preadv2"), line
                    reads[found[2]] = reads.get(found[2], 0) + int(found[3])
        self.assert_little(wide, reads)
