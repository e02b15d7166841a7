"""Every way to damage a file beside a checkpoint, by its kind: which level finds it, and what it makes of the step.

A cell is the state and the lowest level that shows it; `marker` says that nothing in such a file tells, and that a
marker with checksums does.
"""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

import dcptool
from dcptool.checks.check import Level
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from tests import damage
from tests.conftest import FOREIGN

pytestmark = pytest.mark.torchfree
METADATA, RECORDS, DEEP = Level
MARKER = "marker"
FILES = {
    "torch zip": ("trainer_fsdp2/checkpoint-2", "scheduler.pt"),
    "pickle": ("accelerate_fsdp2", "random_states_0.pkl"),
    "json": ("trainer_fsdp2/checkpoint-2", "trainer_state.json"),
    "torch zip of Lightning": ("lightning_modelparallel/step=3.ckpt", "meta.pt"),
    "torch zip of Megatron": ("megatron_tp2/iter_0000010", "common.pt"),
}


def place_in(file: Path) -> int:
    """Place of a byte that only a checksum proves: in a record of a zip, a value of a pickle, a name of JSON."""
    data = file.read_bytes()
    if not zipfile.is_zipfile(file):
        return data.rindex(b"\x01" if file.suffix == ".pkl" else b"log_history")
    with zipfile.ZipFile(file) as archive:
        [member] = [one for one in archive.infolist() if one.filename.endswith("serialization_id")]
        head = data[member.header_offset : member.header_offset + 30]
        return member.header_offset + 30 + sum(int.from_bytes(head[at : at + 2], "little") for at in (26, 28))


def missing(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    damage.truncate(file, 0)


def half(file: Path) -> None:
    damage.truncate(file, file.stat().st_size // 2)


def last_byte(file: Path) -> None:
    damage.truncate(file, len(file.read_bytes().rstrip()) - 1)


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def html(file: Path) -> None:
    file.write_text("<html><body>403 Forbidden</body></html>")


def lfs(file: Path) -> None:
    damage.leave_lfs_pointer(file)


def value(file: Path) -> None:
    damage.flip_byte(file, place_in(file))


def directory(file: Path) -> None:
    damage.flip_byte(file, file.read_bytes().index(b"PK\x01\x02"))


def runs_code(file: Path) -> None:
    class Code:
        def __reduce__(self):
            return eval, ("1",)

    file.write_bytes(pickle.dumps(Code()))


ZIP = {
    missing: (State.INCOMPLETE, METADATA),
    empty: (State.INCOMPLETE, METADATA),
    half: (State.INCOMPLETE, METADATA),
    last_byte: (State.INCOMPLETE, METADATA),
    zeros: (State.DAMAGED, METADATA),
    html: (State.DAMAGED, METADATA),
    lfs: (State.INCOMPLETE, METADATA),
    value: (State.DAMAGED, DEEP),
    directory: (State.INCOMPLETE, METADATA),
    runs_code: (State.UNSAFE, METADATA),
}
TABLE = {
    "torch zip": ZIP,
    "torch zip of Lightning": ZIP,
    "torch zip of Megatron": ZIP,
    "pickle": {**ZIP, value: MARKER, directory: None},
    "json": {**ZIP, value: MARKER, directory: None, runs_code: (State.DAMAGED, METADATA)},
}
CELLS = [(kind, how) for kind, column in TABLE.items() for how, cell in column.items() if cell]


@pytest.fixture
def step(tmp_path):
    def make(kind: str) -> tuple[Path, Path]:
        source, name = FILES[kind]
        folder = Path(shutil.copytree(FOREIGN / source, tmp_path / source.rpartition("/")[2]))
        if kind == "pickle":  # which accelerate writes with torch.save; other trainers do not
            (folder / name).write_bytes(pickle.dumps({"step": 1, "numpy": (1, 2), "list": [1] * 50}))
        return folder, folder / name

    return make


def states(folder: Path) -> dict[Level, State]:
    return {level: judge(folder, VerifyOptions(level=level, grace=0)).state for level in Level}


@pytest.mark.parametrize("kind", FILES)
def test_whole_it_is_complete_at_every_level(step, kind):
    assert set(states(step(kind)[0]).values()) == {State.COMPLETE}


@pytest.mark.parametrize(("kind", "how"), CELLS, ids=lambda value: getattr(value, "__name__", value))
def test_damage(step, kind, how):
    folder, file = step(kind)
    cell = TABLE[kind][how]
    if cell == MARKER:
        dcptool.mark_complete(folder, checksums=True)
        how(file)
        found = states(folder)
        assert found == {METADATA: State.COMPLETE, RECORDS: State.COMPLETE, DEEP: State.DAMAGED}
        return
    how(file)
    state, first = cell
    for level, found in states(folder).items():
        assert found is (state if level >= first else State.COMPLETE), level
    verdict = judge(folder, VerifyOptions(level=first, grace=0))
    assert file.name in verdict.reason
    told = [finding for finding in verdict.findings if finding.is_error and file.name in finding.message]
    assert all(finding.next_step for finding in told)
