"""Jobs of the benchmarks that measure themselves."""

import sys

import pytest

from benchmarks.measure import Run, compare_inside
from benchmarks.rows import MAIN, ROWS, TRAINING, TRAINING_OF

JOB = """
import json, sys
print("a line of somebody else")
print(json.dumps({"save": {"seconds": [float(x) for x in sys.argv[1:]], "nbytes": 7}}))
"""


def test_rounds_of_all_runs_of_a_job_are_kept():
    ours, theirs = compare_inside([sys.executable, "-c", JOB, "1", "3", "2"], [sys.executable, "-c", JOB, "8"], 2)
    assert ours["save"].runs == (Run(1, 7), Run(3, 7), Run(2, 7)) * 2
    assert ours["save"].seconds == 2
    assert theirs["save"].runs == (Run(8, 7),) * 2


def test_a_job_that_fails_is_an_error_with_what_it_said():
    failing = [sys.executable, "-c", "raise SystemExit('no such mesh')"]
    with pytest.raises(RuntimeError, match="no such mesh"):
        compare_inside(failing, failing, 1)


def test_every_row_of_training_belongs_to_one_job():
    measured = {name for name, row in ROWS.items() if row.measures}
    assert measured == TRAINING_OF.keys()
    assert set(TRAINING_OF.values()) == TRAINING.keys()
    assert set(MAIN) <= ROWS.keys()
