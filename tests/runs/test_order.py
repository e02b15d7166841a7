"""Which step was saved last: what markers of saves say, else numbers; and what times say against that."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import dcptool
from dcptool.ops.prune.prune import make_plan
from dcptool.ops.verify.verdict import VerifyOptions
from dcptool.runs.directory import run_at
from dcptool.runs.order import in_order
from dcptool.storage import locate
from tests.conftest import OLD
from tests.conftest import run as cli
from tests.run_steps import crash, latest, saved, steps

pytestmark = pytest.mark.torchfree
HOUR = 3600


def written(step, when: float) -> None:
    """Let a step have been written at a time."""
    for path in (*step.rglob("*"), step):
        os.utime(path, (when, when))


def marked_as_save(step, number: int | None = None, **fields) -> None:
    saved(step)
    document = json.loads((step / "_COMPLETE").read_text())
    (step / "_COMPLETE").write_text(json.dumps({**document, "number": number, **fields}))


def order(folder, by=None) -> list[str]:
    return [save.name for save in in_order(run_at(locate(folder)), by=by)]


@pytest.fixture
def gone_back(tmp_path):
    """A run that reached step 700, went back to 500, and saved 510 and 520."""
    folder = steps(tmp_path / "run", "step_500", "step_600", "step_700", "step_510", "step_520")
    for number, name in enumerate(("step_500", "step_600", "step_700", "step_510", "step_520"), 1):
        marked_as_save(folder / name, number, resumed_from=500 if number > 3 else None)
    return folder


def test_what_was_saved_last_is_the_newest_whatever_its_number(gone_back):
    assert order(gone_back) == ["step_500", "step_600", "step_700", "step_510", "step_520"]
    assert latest(gone_back).path == str(gone_back / "step_520")
    assert latest(gone_back, by="number").path == str(gone_back / "step_700")
    assert [d.name for d in make_plan(gone_back, 2, now=OLD).decisions if d.keep] == ["step_510", "step_520"]
    kept = [d.name for d in make_plan(gone_back, 2, VerifyOptions(by="number"), now=OLD).decisions if d.keep]
    assert kept == ["step_600", "step_700"]
    assert [verdict.name for verdict in dcptool.verify(gone_back).verdicts][-1] == "step_520"


def test_the_numbers_survive_copying_and_marking_by_hand(gone_back, tmp_path):
    copied = shutil.copytree(gone_back, tmp_path / "copy", copy_function=shutil.copyfile)
    assert latest(copied).path == str(copied / "step_520")
    assert not latest(copied).order  # numbers settle it: times are not asked
    dcptool.mark_complete(copied / "step_600")
    marker = json.loads((copied / "step_600" / "_COMPLETE").read_text())
    assert (marker["number"], marker["writer"]) == (2, "save")
    assert latest(copied).path == str(copied / "step_520")


def test_a_save_that_was_killed_stands_where_the_job_was(gone_back):
    steps(gone_back, "step_530", "step_800")
    crash(gone_back / "step_530")
    crash(gone_back / "step_800")
    assert order(gone_back) == [
        "step_500", "step_600", "step_700", "step_800", "step_510", "step_520", "step_530"
    ]  # fmt: skip
    found = latest(gone_back)
    assert found.path == str(gone_back / "step_520")
    assert [verdict.name for verdict in found.skipped] == ["step_530"]


@pytest.fixture
def contradicted(tmp_path):
    """Steps 500 to 700 of one run, then another that wrote 100 into the same folder; nothing is marked."""
    folder = steps(tmp_path / "run", "step_100", "step_500", "step_600", "step_700")
    for name, hours in (("step_500", 1), ("step_600", 2), ("step_700", 3), ("step_100", 14)):
        written(folder / name, OLD + hours * HOUR)
    return folder


def test_n03_times_that_contradict_the_numbers_are_told(contradicted):
    done = cli("latest", contradicted)
    assert done.stdout == f"{contradicted}/step_700\n"
    assert "WARNING: step_100 was written 11 h after step_700, which has the higher number" in done.stderr
    assert "--by time" in done.stderr
    done = cli("verify", contradicted)
    assert "warning: step_100 was written 11 h after step_700" in done.stdout
    document = json.loads(cli("latest", "--json", contradicted).stdout)
    assert [finding["kind"] for finding in document["order"]] == ["order-unclear"]


def test_n03_prune_keeps_both_sides_until_it_is_settled(contradicted):
    plan = make_plan(contradicted, 1, now=OLD)
    assert [d.name for d in plan.decisions if d.keep] == ["step_100", "step_700"]
    assert [note.kind for note in plan.notes] == ["order-unclear"]
    assert "went back" in next(d.reason for d in plan.decisions if d.name == "step_100")
    for by, name in (("number", "step_700"), ("time", "step_100")):
        plan = make_plan(contradicted, 1, VerifyOptions(by=by), now=OLD)
        assert [d.name for d in plan.decisions if d.keep] == [name]
        assert not plan.notes
        assert cli("latest", "--by", by, contradicted).stdout == f"{contradicted}/{name}\n"


@pytest.mark.parametrize("what", ["copied down", "a file added"])
def test_n03_the_time_of_a_folder_is_not_that_of_its_save(contradicted, what):
    """Stores keep the times of files alone, and whoever adds a file to a step makes its folder new."""
    new = [contradicted / "step_700"] if what == "a file added" else list(contradicted.iterdir())
    for step in new:
        if what == "a file added":
            (step / "eval.json").write_text("{}")
        os.utime(step)
    assert "step_100 was written 11 h after step_700" in latest(contradicted).order[0].message
    assert [d.name for d in make_plan(contradicted, 1, now=OLD).decisions if d.keep] == ["step_100", "step_700"]


def test_results_put_into_an_old_step_make_it_no_newer(tmp_path):
    folder = steps(tmp_path / "run", "step_100", "step_700")
    for hours, name in enumerate(("step_100", "step_700")):
        written(folder / name, OLD + hours * HOUR)
    (folder / "step_100" / "eval_results.json").write_text("{}")
    assert not latest(folder).order
    assert order(folder, by="time") == ["step_100", "step_700"]


@pytest.mark.parametrize("what", ["link", "marker", "a minute", "not whole"])
def test_what_is_no_contradiction(contradicted, what):
    step = contradicted / "step_100"
    if what == "not whole":
        crash(step)
    else:
        written(step, OLD + HOUR + (2 * HOUR + 50) * (what == "a minute"))
        if what == "link":
            (step / "data").symlink_to(contradicted)
        elif what == "marker":
            dcptool.mark_complete(step)
    assert not latest(contradicted).order
    assert not dcptool.verify(contradicted).notes
    assert latest(contradicted).path == str(contradicted / "step_700")


@pytest.mark.parametrize("number", [0, -1, "3", 1.5, True])
def test_a_marker_with_a_number_that_is_none_counts_for_nothing(gone_back, number):
    marked_as_save(gone_back / "step_700", number)
    found = dcptool.verify(gone_back / "step_700").verdicts[0]
    assert [finding.kind for finding in found.findings if finding.is_error] == ["bad-marker"]


def test_a_time_in_the_future_is_said_to_be(run_of):
    folder = run_of("step_1", "step_2")
    crash(folder / "step_2")
    now = __import__("time").time()
    written(folder / "step_2", now + 3 * HOUR + 60)
    done = cli("verify", folder)
    assert "in 3 h" in done.stdout
    assert "a file was written 3 h in the future, by the clock here" in done.stdout
    assert "in-progress" not in cli("verify", "--grace", "0s", folder).stdout
