"""The best interval between saves, against simulated failures, against the exact minimum, and from markers of a run."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcptool
from dcptool.errors import CheckpointNotFoundError
from dcptool.formats.marker import NAME, Marker
from dcptool.ops.interval import daly_interval, optimal_interval, read_cadence, young_interval
from dcptool.render.interval import duration, interval_text, percent
from tests.conftest import FOREIGN, run

HOUR = 3600.0


def simulated(interval, save, mtbf, restart, n_intervals=20_000, seed=0):
    """Shares of (saving, failures, both) of a job that fails at random, one event after the other.

    Knows nothing of the formulas: a failure is drawn, work since the last save is lost, a restart may fail too.
    """
    draw = random.Random(seed)
    useful = saving = wall = 0.0
    next_failure = draw.expovariate(1 / mtbf)

    def passes(seconds):
        """Let time pass; False if a failure came first."""
        nonlocal wall, next_failure
        if next_failure < wall + seconds:
            wall = next_failure
            next_failure = wall + draw.expovariate(1 / mtbf)
            return False
        wall += seconds
        return True

    for _ in range(n_intervals):
        while not passes(interval + save):
            while not passes(restart):
                pass
        useful += interval
        saving += save
    return saving / wall, 1 - (useful + saving) / wall, 1 - useful / wall


@pytest.mark.parametrize(
    ("save", "mtbf", "restart", "interval"),
    [
        (45, 10_000, 600, 919),  # about Llama 3
        (45, 10_000, 600, HOUR),
        (300, 3_000, 0, 900),
        (5, 100_000, 1_200, 300),
        (60, 60, 10, 60),  # failures as often as saves
        (200, 60, 30, 30),
    ],
)
def test_shares_are_those_of_a_job_that_fails_at_random(save, mtbf, restart, interval):
    choice = optimal_interval(save, mtbf, restart, intervals=[interval]).choices[-1]
    found = simulated(interval, save, mtbf, restart)
    shares = (choice.saving_share, choice.failure_share, choice.lost_share)
    assert shares == pytest.approx(found, abs=0.012)
    assert choice.saving_share + choice.failure_share == pytest.approx(choice.lost_share)


@pytest.mark.parametrize("part", [1e-5, 1e-3, 0.01, 0.1, 0.5, 1, 1.9, 2.1, 10])
def test_daly_is_near_the_exact_minimum_and_young_where_saves_are_short(part):
    mtbf = 10_000.0
    save = part * mtbf

    def lost(interval):
        return optimal_interval(save, mtbf, intervals=[interval]).choices[-1].lost_share

    low, high = 0.0, mtbf  # the derivative of the share is 0 where e^((τ+δ)/M)·(1 - τ/M) = 1
    for _ in range(200):
        middle = (low + high) / 2
        is_before = math.exp((middle + save) / mtbf) * (1 - middle / mtbf) > 1
        low, high = (middle, high) if is_before else (low, middle)
    best = lost(low)
    assert best <= min(lost(low * 0.9), lost(low * 1.1)) + 1e-12
    assert lost(daly_interval(save, mtbf)) - best < 0.003
    assert daly_interval(save, mtbf) == pytest.approx(low, rel=0.12)
    if part <= 0.01:
        assert young_interval(save, mtbf) == pytest.approx(low, rel=0.06)


@given(st.floats(1e-3, 1e7), st.floats(1e-3, 1e9), st.floats(0, 1e7), st.lists(st.floats(1e-3, 1e9), max_size=3))
def test_shares_are_shares_whatever_the_times(save, mtbf, restart, intervals):
    report = optimal_interval(save, mtbf, restart, intervals=intervals, cadence_seconds=0.0)
    assert report.optimum_seconds > 0
    assert [choice.name for choice in report.choices] == ["daly", "young", "cadence", *["given"] * len(intervals)]
    for choice in report.choices:
        assert 0 <= choice.saving_share <= 1
        assert 0 <= choice.failure_share <= 1
        assert 0 <= choice.lost_share <= 1
        assert choice.saving_share + choice.failure_share == pytest.approx(choice.lost_share, abs=1e-9)
    assert report.choices[2].lost_share == 1  # who saves all the time gets nowhere
    assert interval_text(report)


def test_limits():
    assert daly_interval(2_000, 1_000) == 1_000  # a save as long as two failures apart
    assert daly_interval(5_000, 1_000) == 1_000
    assert young_interval(50, 100) == 100
    assert optimal_interval(1, 1e12).optimum_seconds == pytest.approx(math.sqrt(2e12), rel=1e-5)
    assert optimal_interval(1e6, 1, intervals=[1e6]).choices[-1].lost_share == 1  # never done
    assert optimal_interval(10, 3600, 600).optimum_seconds == optimal_interval(10, 3600).optimum_seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_seconds": 0, "mtbf_seconds": 1}, "save_seconds must be more than 0"),
        ({"save_seconds": -1, "mtbf_seconds": 1}, "save_seconds must be more than 0"),
        ({"save_seconds": math.nan, "mtbf_seconds": 1}, "save_seconds must be"),
        ({"save_seconds": 1, "mtbf_seconds": 0}, "mtbf_seconds must be more than 0"),
        ({"save_seconds": 1, "mtbf_seconds": math.inf}, "mtbf_seconds must be more than 0 and finite"),
        ({"save_seconds": 1, "mtbf_seconds": 1, "restart_seconds": -1}, "restart_seconds must be at least 0"),
        ({"save_seconds": 1, "mtbf_seconds": 1, "intervals": [1, 0]}, "intervals must be more than 0"),
        ({"save_seconds": 1, "mtbf_seconds": 1, "cadence_seconds": -1}, "cadence_seconds must be at least 0"),
    ],
)
def test_times_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimal_interval(**arguments)


def step(folder, number, created, writer="save", **fields):
    path = folder / f"step_{number}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"")
    (path / NAME).write_bytes(Marker(NAME, writer, number, created, **fields).document())


@pytest.fixture
def run_dir(tmp_path):
    """Saves 20 min apart, of 60 s of which training waits 30; one after a crash of hours; one made by hand."""
    folder = tmp_path / "ckpt"
    for number, hour, minute in ((100, 0, 0), (200, 0, 20), (300, 0, 40), (400, 9, 0), (500, 9, 20)):
        created = f"2026-01-01T{hour:02}:{minute:02}:00+00:00"
        step(folder, number, created, save_seconds=60.0, blocked_seconds=30.0)
    step(folder, 600, "2026-01-01T09:20:01+00:00", "mark")
    (folder / "step_700").mkdir()
    (folder / "step_800").mkdir()
    (folder / "step_800" / NAME).write_text("{not JSON")
    return folder


def test_the_cadence_of_a_run(run_dir):
    cadence = dcptool.read_cadence(run_dir)
    assert cadence[:6] == (str(run_dir), 8, 5, 30.0, 20 * 60 - 30.0, pytest.approx((20 * 60 - 30) / 100))
    assert cadence[6:] == (None, None)  # these markers list no files
    assert dcptool.read_cadence(run_dir.parent) == cadence  # the run directory is found below
    for path in run_dir.glob(f"step_*/{NAME}"):
        if path.parent.name != "step_800":
            fields = json.loads(path.read_text())
            fields.pop("blocked_seconds", None)
            path.write_text(json.dumps(fields))
    assert read_cadence(run_dir).save_seconds == 60.0  # of the whole save, where that is all that is known


def test_times_that_go_back_or_are_none_count_for_nothing(tmp_path):
    for number, created in ((1, "2026-01-01T02:00:00Z"), (2, "2026-01-01T01:00:00Z"), (3, None), (4, "yesterday")):
        step(tmp_path / "run", number, created)
    cadence = read_cadence(tmp_path / "run")
    assert (cadence.n_markers, cadence.save_seconds, cadence.interval_seconds, cadence.step_seconds) == (4, *[None] * 3)
    with pytest.raises(CheckpointNotFoundError, match="holds no steps"):
        read_cadence(tmp_path / "run" / "step_1")


class TestCommand:
    def test_of_a_run(self, run_dir):
        done = run("interval", run_dir, "--mtbf", "3h", "--restart", "10m", "--interval", "1h")
        assert (done.returncode, done.stderr) == (0, "")
        first, *rest = done.stdout.splitlines()
        assert first.startswith("save every 13.1 min of training, about 67 steps: ")
        assert rest[0] == "  a save takes 30 s, a restart 10 min; a failure every 3 h"
        assert rest[1] == f"  {run_dir}: 5 markers of 8 steps, saves of 30 s, 19.5 min between them"
        assert rest[2].endswith("up to one interval of steps; with saves in the background, 2 intervals less a step")
        rows = [re.split(r" {2,}", line) for line in rest[6:]]
        assert [row[:3] for row in rows] == [
            ["optimum (Daly)", "13.1 min", "67"],
            ["optimum (Young)", "13.4 min", "69"],
            ["as the run saves", "19.5 min", "100"],
            ["--interval", "1 h", "308"],
        ]
        lost = [float(row[5].rstrip("%")) for row in rows]
        assert lost[0] <= lost[1] < lost[2] < lost[3]

    def test_json_says_the_same(self, run_dir):
        document = json.loads(run("interval", run_dir, "--failures", 466, "--in", "54d", "--json").stdout)
        assert (document["schema"], document["save_seconds"]) == (1, 30.0)
        assert document["mtbf_seconds"] == 54 * 86_400 / 466
        assert document["cadence"]["interval_seconds"] == 1170.0
        assert document["choices"][0]["interval_seconds"] == document["optimum_seconds"]
        document = json.loads(run("interval", "--save", "45s", "--mtbf", "3h", "--json").stdout)
        assert document["cadence"] is None
        assert run("interval", "--save", "45s", "--mtbf", "3h", "--quiet").stdout == ""

    def test_what_is_given_counts_more_than_what_is_found(self, run_dir):
        done = run("interval", run_dir, "--mtbf", "3h", "--save", "2m")
        assert "a save takes 2 min, a restart 0 s" in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--mtbf", "3h"], "Pass --save 45s, or a RUN_DIR"),
            (["--save", "45s"], "Pass --mtbf 3h, or --failures 466 --in 54d"),
            (["--save", "45s", "--failures", "3"], "--failures together with --in"),
            (["--save", "45s", "--mtbf", "3h", "--in", "3d"], "either --mtbf, or --failures"),
            (["--save", "45s", "--failures", "0", "--in", "3d"], "0 is not in the range"),
            (["--save", "0s", "--mtbf", "3h"], "--save must be more than 0"),
            (["--save", "1s", "--mtbf", "0h"], "--mtbf must be more than 0"),
            (["--save", "1s", "--failures", "3", "--in", "0d"], "--in must be more than 0"),
            (["--save", "1s", "--mtbf", "3h", "--interval", "0s"], "--interval must be more than 0"),
            (["--save", "-1s", "--mtbf", "3h"], "'-1s' is no length of time"),
            (["--save", "45", "--mtbf", "3h"], "'45' is no length of time; write 90s"),
            (["--save", "45s", "--mtbf", "9" * 330 + "d"], "999' is no length of time; write 90s"),
        ],
    )
    def test_what_is_missing_or_wrong_is_named(self, arguments, message):
        done = run("interval", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr

    def test_a_run_whose_markers_do_not_tell(self, tmp_path):
        done = run("interval", FOREIGN / "run_crashed", "--mtbf", "3h")
        assert done.returncode == 2
        assert "no marker of the 5 steps in" in done.stderr
        assert "pass --save 45s" in done.stderr
        done = run("interval", FOREIGN / "run_crashed", "--mtbf", "3h", "--save", "45s")
        assert done.returncode == 0
        assert "too few markers in" in done.stderr
        assert run("interval", tmp_path / "gone", "--mtbf", "3h").returncode == 3
        assert run("interval", tmp_path, "--mtbf", "3h").returncode == 3


def test_numbers_are_short():
    assert [duration(seconds) for seconds in (0, 0.25, 59.94, 60, 3600, 86_400, 1e9)] == [
        "0 s", "0.25 s", "59.9 s", "1 min", "1 h", "1 d", "11,574 d",
    ]  # fmt: skip
    assert [percent(share) for share in (0, 1e-7, 0.0005, 0.02, 0.999, 1)] == [
        "0%", "0.00%", "0.05%", "2.0%", "99.9%", "100%",
    ]  # fmt: skip
