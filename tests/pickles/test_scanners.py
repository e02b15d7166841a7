"""Scanners as oracles: what any of them calls critical is `unsafe` here. And what dcptool finds that they do not.

Slow, and needs a network or the folder `DCPTOOL_SCANNERS`; see `tests.pickles.scanners`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dcptool
from dcptool.ops.verify.verdict import State
from tests.conftest import ROOT
from tests.pickles import scanners
from tests.pickles.attacks import ATTACKS, MKDIR, zipped
from tests.pickles.test_attacks import acting, files, state, step, with_item

__all__ = ["acting", "files", "step"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    folder = Path(os.environ.get("DCPTOOL_SCANNERS") or tmp_path_factory.mktemp("scanners"))
    if not all((folder / name).is_dir() for name in scanners.SCANNERS):
        scanners.install(folder, ROOT / "constraints.txt")
    return folder


@pytest.mark.parametrize("name", scanners.SCANNERS)
def test_what_a_scanner_calls_critical_is_unsafe(environments, files, acting, name):
    answers = dict(zip(files, scanners.ask(environments, name, list(files.values())), strict=True))
    critical = {key for key, answer in answers.items() if answer}
    assert len(critical & acting) > 50  # it was asked
    states = {key: state(files[key], dcptool.VerifyOptions()) for key in ATTACKS}
    assert {key for key in critical if states[key] is not State.UNSAFE} == set()
    missed = {key for key in acting if not answers[key]}
    assert missed, "it finds all of them by now"
    assert all(states[key] is State.UNSAFE for key in missed)


@pytest.mark.parametrize("name", scanners.FOLDERS)
def test_what_lies_in_a_checkpoint_no_scanner_of_folders_sees(environments, step, tmp_path, name):
    """README says so: `.metadata` and the objects in `.distcp` files."""
    evil = b"\x80\x02" + MKDIR + b"."
    hidden = with_item(step, tmp_path / "item", zipped(("archive/data.pkl", evil), ("archive/version", b"3\n")))
    with (hidden / dcptool.open(hidden)["hook"].item.file).open("ab") as out:  # modelscan looks at a file's last item
        out.write(zipped(("archive/data.pkl", b"\x80\x02N."), ("archive/version", b"3\n")))
    metadata = with_item(
        step,
        tmp_path / "metadata",
        zipped(
            ("archive/data.pkl", b"\x80\x02N."),
        ),
    )
    path = metadata / ".metadata"
    path.write_bytes(path.read_bytes()[:-1] + MKDIR + b"0.")
    seen = tmp_path / "seen"
    seen.mkdir()
    (seen / "model.pkl").write_bytes(evil)
    assert scanners.ask_folders(environments, name, [seen, hidden, metadata]) == [True, False, False]
    assert state(metadata, dcptool.VerifyOptions()) is State.UNSAFE
    assert state(hidden) is State.UNSAFE
