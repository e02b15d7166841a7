"""`dcptool reshard` as somebody meets it who is tired: what is typed wrong, what is broken, and what it says then."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dcptool
from tests import damage
from tests.conftest import FOREIGN

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")
SOURCE = FOREIGN / "xver_t2130"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --world-size N, or --mesh, --like or --files"),
        (["--world-size", 0], "0 is not in the range"),
        (["--world-size", "eight"], "'eight' is not a valid integer"),
        (["--world-size", 99_999_999], "99,999,999 ranks are more than the 1,048,576 dcptool lays out"),
        (["--files", 99_999_999], "99,999,999 ranks are more than"),
        (["--files", 0], "0 is not in the range"),
        (["--mesh", "dp=0"], "--mesh dp=0: 'dp=0' is no mesh dimension; write --mesh dp=6,tp=8"),
        (["--mesh", "dp=1024,tp=4096"], "4,194,304 ranks are more than"),
        (["--mesh", "dp=2,dp=2"], "a name comes twice"),
        (["--mesh", "8"], "'8' is no mesh dimension; write"),
        (["--mesh", "dp=2", "--files", 3], "--mesh and --files are two layouts; give one of them"),
        (["--mesh", "dp=2", "--world-size", 3], "--world-size 3 contradicts --mesh dp=2, which is 2 ranks"),
        (["--files", 2, "--world-size", 3], "--world-size 3 contradicts --files 2"),
        (["--world-size", 2, "--placement", "*=dp:0"], "--placement needs --mesh, such as --mesh dp=6,tp=8"),
        (["--mesh", "dp=2", "--placement", "dp:0"], "write GLOB=DIM:N, such as '*.weight=tp:1,dp:0'"),
        (["--mesh", "dp=2", "--placement", "*=tp:0"], "the mesh has no dimension 'tp', only dp"),
        (["--mesh", "dp=2", "--placement", "*=dp:0,dp:1"], "a mesh dimension cuts twice"),
        (["--world-size", 2, "--timeout", "0s"], "--timeout must be at least 2s"),
        (["--world-size", 2, "--timeout", "5"], "'5' is no length of time; write 90s, 30m, 2h or 1d"),
        (["--world-size", 2, "--workers", 0], "0 is not in the range"),
        (["--wrld-size", 2], "Did you mean"),
    ],
)
def test_wrong_usage(commands, tmp_path, options, words):
    done = commands.run("reshard", *options, SOURCE, tmp_path / "out")
    assert done.code == 2
    assert words in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--mesh", "dp=2,tp=2", "--placement", "*=tp:5"],
            "'model.ema' has shape [5] and no dimension 5 that tp could cut",
        ),
        (["--like", "nosuch"], "nosuch: no such file or directory"),
        (["--like", FOREIGN / "ddp"], "has none of the entries, which are 'model.steps_seen'"),
        (["--like", FOREIGN / "xver_t260", "--world-size", 3], "which 4 ranks saved"),
        (["--world-size", 2, "--keys", "nomatch*"], "no entry matches 'nomatch*'; names begin with 'optim'"),
        (["--world-size", 2, "--exclude", "*"], "--exclude '*' leaves nothing"),
        (["--world-size", 2, "--also", "nosuch"], "nosuch: no such file or directory"),
    ],
)
def test_what_cannot_be_done(commands, tmp_path, options, words):
    for extra in ([], ["--dry-run"]):
        done = commands.run("reshard", *options, *extra, SOURCE, tmp_path / "out")
        assert done.code == 3
        assert words in done.err, done.err
        assert len(done.err.splitlines()) <= 2
        assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def broken(kind: str, folder: Path) -> Path:
    path = damage.copy(SOURCE, folder / "step_5")
    item = dcptool.open(path)["model.emb.weight"].chunks[1].item
    if kind == "flipped":
        damage.flip_byte(path / item.file, item.byte_offset + item.nbytes // 2)
    elif kind == "short":
        damage.truncate(path / item.file, item.byte_offset + 100)
    elif kind == "lfs":
        damage.leave_lfs_pointer(path / item.file)
    else:
        (path / (item.file if kind == "missing" else ".metadata")).unlink()
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flipped", r"__1_0\.distcp, bytes [\d,]+–[\d,]+: 'model\.emb\.weight' at \[\d+, 0\]: .*CRC"),
        ("short", r"__1_0\.distcp is cut short"),
        ("missing", r"__1_0\.distcp \(rank 1\) is missing: it held"),
        ("lfs", r"__1_0\.distcp is a Git LFS pointer, not the file itself\n  Run git lfs pull there"),
        ("metadata", r"no \.metadata, only data files of ranks 0–3: the save never finished"),
    ],
)
def test_broken_sources(commands, tmp_path, kind, words):
    path = broken(kind, tmp_path)
    done = commands.run("reshard", "--world-size", 3, "--workers", 3, path, tmp_path / "out" / "step_5")
    assert done.code == 3
    assert re.search(words, done.err), done.err
    assert not (tmp_path / "out" / "step_5").exists()
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_paths_that_are_no_one_checkpoint(commands, tmp_path):
    cases = {
        FOREIGN / "nosuch": "no such file or directory",
        SOURCE / "__0_0.distcp": "is one data file of a DCP checkpoint; name its folder",
        FOREIGN / "run_crashed": "holds 5 checkpoints; name one:",
        tmp_path: "",
    }
    for path, words in cases.items():
        done = commands.run("reshard", "--world-size", 2, path, tmp_path / "out")
        assert done.code == 3
        assert words in done.err
        assert done.err.startswith("error: ")
    done = commands.run("reshard", "--world-size", 2, FOREIGN / "run_crashed", "out")
    assert f"dcptool reshard --world-size 2 {FOREIGN}/run_crashed/ckpt/step_100 out" in done.err


class TestWithoutPaths:
    def test_in_a_run_directory(self, commands, tmp_path):
        run = damage.copy(FOREIGN / "run_crashed", tmp_path / "job") / "ckpt"
        done = commands.run("reshard", "--world-size", 3, cwd=run)
        assert done.code == 0, done.err
        notes = done.err.splitlines()
        assert notes[0] == f"note: the source is the newest complete step, {run}/step_100"
        passed = [re.search(r"step_(\d+) is incomplete and was passed over: ", note) for note in notes[1:5]]
        assert [found[1] for found in passed] == ["500", "400", "300", "200"]
        assert done.out.endswith(f": {tmp_path}/job/ckpt-ws3/step_100\n")
        assert dcptool.verify(tmp_path / "job" / "ckpt-ws3" / "step_100").good

    def test_in_a_checkpoint(self, commands, tmp_path):
        here = damage.copy(SOURCE, tmp_path / "run" / "step_5")
        done = commands.run("reshard", "--world-size", 3, cwd=here)
        assert done.code == 0
        assert f"note: the source is the checkpoint in the current folder, {here}" in done.err
        assert dcptool.compare(here, tmp_path / "run-ws3" / "step_5").equal

    def test_where_there_is_none(self, commands, tmp_path):
        done = commands.run("reshard", "--world-size", 3, cwd=tmp_path)
        assert done.code == 3
        assert "Name the checkpoint to reshard: dcptool reshard --world-size N SRC" in done.err


def test_sources_of_other_formats(commands, tmp_path):
    dcptool.convert(SOURCE, tmp_path / "model.pt", "torch")
    dcptool.convert(SOURCE, tmp_path / "model.safetensors", "safetensors")
    sources = [tmp_path / "model.pt", tmp_path / "model.safetensors"]
    sources += [FOREIGN / name for name in ("hf_sharded", "hf_consolidated", "w_no_collectives", "w_zstd", "w_nocrc")]
    for index, source in enumerate(sources):
        target = tmp_path / "out" / f"step_{index}"
        rank = ["--rank", 0] if source.name == "w_no_collectives" else []
        done = commands.run("reshard", "--world-size", 3, "--check", *rank, source, target)
        assert done.code == 0, done.err
        assert dcptool.compare(source, target).equal
        assert dcptool.verify(target, dcptool.VerifyOptions(level=dcptool.Level.DEEP)).good
    done = commands.run("reshard", "--world-size", 3, tmp_path / "model.pt", cwd=tmp_path)
    assert done.out.endswith(f"{tmp_path}-ws3/model\n")


def test_a_placement_that_matches_nothing_is_told(commands, tmp_path):
    options = ["--mesh", "dp=2", "--placement", "model.nosuch*=dp:0", "--placement", "model.*weight=dp:0"]
    done = commands.run("reshard", "--dry-run", *options, SOURCE, tmp_path / "out")
    assert done.code == 0
    assert "note: --placement 'model.nosuch*' matches no tensor; names are such as 'model.steps_seen'" in done.err
    assert "match no --placement and are sharded by their stored boxes: 'model.ema'" in done.err


def test_json_and_quiet(commands, tmp_path):
    done = commands.run("reshard", "--json", "--world-size", 3, SOURCE, tmp_path / "out")
    found = json.loads(done.out)
    assert (found["schema"], found["published"], found["world_size"], len(found["rank_nbytes"])) == (1, True, 3, 3)
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert [written[f"__{rank}_0.distcp"] for rank in range(3)] == found["rank_nbytes"]
    assert found["nbytes_out"] == sum(written.values())
    planned = json.loads(
        commands.run("reshard", "--json", "--dry-run", "--world-size", 3, SOURCE, tmp_path / "out2").out
    )
    assert planned["published"] is False
    assert planned["rank_nbytes"] == found["rank_nbytes"]
    done = commands.run("reshard", "--quiet", "--world-size", 3, SOURCE, tmp_path / "quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = commands.run("reshard", "--quiet", "--world-size", 3, SOURCE, tmp_path / "quiet")
    assert (done.code, done.out) == (3, "")
