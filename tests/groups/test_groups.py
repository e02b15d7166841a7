"""Groups of forked members at work that has nothing to do with checkpoints."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dcptool import groups  # noqa: E402
from dcptool.errors import ItemError, SeveralCheckpointsError, WorkerError  # noqa: E402
from dcptool.groups.audience import Audience  # noqa: E402
from dcptool.groups.group import ProcessGroup  # noqa: E402
from dcptool.groups.sharing import agree, blocks, contribute, require_going, values_of  # noqa: E402
from dcptool.groups.together import require_gloo, work_together  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBERS = [str(number) for number in range(7)]


def summed(group: ProcessGroup, audience: Audience) -> tuple[int, list[int]]:
    """Rank 0 decides on numbers, each member adds up its own, all return the sum and who took part."""
    numbers = agree(group, lambda: NUMBERS)

    def part() -> tuple[int, int]:
        mine = blocks(numbers, group.size)[group.rank]
        audience.progress(len(mine))
        return sum(map(int, mine)), os.getpid()

    found = contribute(group, audience, part)
    return agree(group, lambda: (sum(total for total, _ in values_of(found)), [pid for _, pid in values_of(found)]))


def test_members_share_and_gather_numbers():
    told: list[int] = []
    total, members = work_together(2, summed, 30.0, told.append)
    assert total == 21
    assert len({os.getpid(), *members}) == 3
    assert sum(told) == 7


def test_the_example_of_the_page_runs(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text("line\n" * 5)
    code = textwrap.dedent(re.search(r"^    def work.*?(?=^\S)", groups.__doc__, re.MULTILINE | re.DOTALL)[0])
    names = {
        **{tool.__name__: tool for tool in (agree, blocks, contribute, values_of, require_gloo, work_together)},
        "ProcessGroup": ProcessGroup,
        "Audience": Audience,
        "os": os,
        "folder": tmp_path,
        "progress": None,
        "n_lines": lambda name: (tmp_path / name).read_text().count("\n"),
    }
    exec(code, names)
    assert names["total"] == 15


@pytest.mark.parametrize("value", [None, 0, "x"])
def test_any_value_is_a_result(value):
    assert work_together(2, lambda group, audience: agree(group, lambda: value), 30.0) == value


def in_part(group: ProcessGroup, audience: Audience, action) -> None:
    """Rank 1 does something, rank 0 waits until it hears of it."""

    def part() -> None:
        if group.rank == 1:
            action()
        while True:
            require_going(group)
            time.sleep(0.05)

    found = contribute(group, audience, part)
    agree(group, lambda: values_of(found))


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ItemError("'w' is odd"), ItemError, r"rank 1 of 2: 'w' is odd"),
        (SeveralCheckpointsError("two", "run", ("a", "b")), SeveralCheckpointsError, r"rank 1 of 2: two"),
        (WorkerError("no memory"), WorkerError, r"no memory"),
        (ValueError("odd"), WorkerError, r"rank 1 of 2 failed, this is a bug in dcptool: ValueError: odd"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_one_member_meets_is_raised_as_the_cause(monkeypatch, error, kind, message):
    if kind is not ItemError:  # that one at the real pace
        monkeypatch.setattr(groups.group, "BEAT_SECONDS", 0.2)
    with pytest.raises(kind) as caught:
        work_together(2, partial(in_part, action=partial(raising, error)), 30.0)
    assert re.fullmatch(message, str(caught.value))
    if kind is SeveralCheckpointsError:
        assert caught.value.parts == ("a", "b")


def test_what_rank_0_meets_is_raised_by_all():
    def work(group: ProcessGroup, audience: Audience) -> None:
        agree(group, partial(raising, ItemError("'w' is odd")))

    with pytest.raises(ItemError, match=r"^'w' is odd$"):
        work_together(2, work, 30.0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("publishes", "after"), [(False, ""), (True, "; nothing was published")])
def test_a_member_that_is_killed_is_named(publishes, after):
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        work_together(2, partial(in_part, action=killed), 30.0, publishes=publishes)
    hint = "(out of memory? fewer --workers need less)"
    assert str(caught.value) == f"rank 1 of 2 was killed by SIGKILL {hint}{after}"
    assert time.monotonic() - began < 20


def test_what_killed_members_began_is_removed(tmp_path):
    folder = tmp_path / ".dcptool-12345678.tmp"

    def work(group: ProcessGroup, audience: Audience) -> None:
        if group.rank == 0:
            folder.mkdir()
            audience.writing(str(folder), ())
            (folder / "half").write_text("x")
        in_part(group, audience, killed)

    with pytest.raises(WorkerError, match="rank 1 of 2 was killed"):
        work_together(2, work, 30.0)
    assert not list(Path(tmp_path).iterdir())
