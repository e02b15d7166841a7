"""Jobs of many lives: killed at any moment and started anew with other numbers of ranks, they train as if never killed.

Every step of every life is compared, bit for bit, with a reference that has run without dcptool at the numbers of ranks
which that life's state has been through. `LIVES=20 LIVES_SEED=7 pytest -m slow --timeout 0 -k "test_lives and ddp"`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from tests.forks import start  # noqa: E402
from tests.launches import launch, told, torchrun  # noqa: E402
from tests.training import lives_job  # noqa: E402
from tests.training.lives_job import INTERVAL, KEEP, PATIENCE  # noqa: E402
from tests.training.lives_model import ROWS  # noqa: E402

N_KILLS = int(os.environ.get("LIVES", "5"))
SEED = int(os.environ.get("LIVES_SEED", "0"))
STEPS = 14
"""The longest that a life may be; the last one has so many steps."""

Key = tuple[tuple[int, int], ...]
"""Numbers of ranks, each with the step that it began after: what the state of a life has been through."""


class Life(NamedTuple):
    """One start of a job.

    Attributes:
        number: the first is 0.
        plan: how it was started, how it was to end.
        lines: what it said before the next life looked for a checkpoint.
        markers: steps that were marked when it began.
        nbytes: of the run directory when it had ended, and of the largest step in it.
        seconds: from start to end.
        passed: what it said of the steps that it did not restore.
        complaint: what it wrote to stderr, the end of it.
    """

    number: int
    plan: dict[str, Any]
    lines: list[dict[str, Any]]
    markers: list[int]
    nbytes: tuple[int, int]
    seconds: float
    passed: str
    complaint: str

    def said(self, name: str, default: Any = None) -> Any:
        """What was said last under a name."""
        return next((line[name] for line in reversed(self.lines) if name in line), default)

    @property
    def losses(self) -> dict[int, list[str]]:
        return {line["step"]: line["losses"] for line in self.lines if "step" in line}

    @property
    def key(self) -> Key:
        return tuple((ranks, after) for ranks, after in self.said("worlds"))

    def __str__(self) -> str:
        how, kill = self.plan["how"], self.plan["kill"]
        return f"life {self.number} ({self.plan['world']} ranks, {how}, resumed at {self.said('resumed')}, kill {kill})"


def plans(name: str) -> list[dict[str, Any]]:
    """How the lives of a row begin and end: the same for the same seed."""
    chance = random.Random(f"{SEED} {name}")
    found = []
    for number in range(N_KILLS + 1):
        world = chance.choice(ROWS[name].worlds)
        victim = chance.choice(["agent", *range(world)])
        early = chance.random() < 0.15  # while it starts, or restores
        at, delay = (0, chance.uniform(0.0, 0.6)) if early else (chance.randint(1, STEPS), chance.uniform(0.0, 0.12))
        kill = {"victim": victim, "at": at, "delay": delay} if number < N_KILLS else None
        how = chance.choice(["save", "async_save"])
        plan = {"world": world, "how": how, "kill": kill, "steps": STEPS + 10 if kill else STEPS}
        found.append({**plan, "linger": chance.uniform(0.0, 0.8), "command": number == 1})
    return found


def run_job(folder: Path, world: int, settings: dict[str, Any], command: bool = False) -> str:
    """Start a job by torchrun's agent, or by the command itself, and wait; returns what it wrote to stderr."""
    out, text = folder / f"out{settings.get('life', '')}", json.dumps(settings)
    if command:
        task: tuple[Any, ...] = (torchrun, ["--standalone", f"--nproc-per-node={world}", lives_job.__file__, text])
    else:
        task = (launch, world, 0, lives_job.run, text)
    process = start(told, 0, out, *task)
    process.join(2 * PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail(f"a job hangs: {settings}\n{out.with_name(f'{out.name}.err').read_text()[-3000:]}")
    return out.with_name(f"{out.name}.err").read_text()


def live_all(folder: Path, name: str) -> list[Life]:
    """All lives of a row, one after the other."""
    run, log = folder / "run", folder / "log"
    begun: list[tuple[Any, ...]] = []
    for number, plan in enumerate(plans(name)):
        markers = marked(run)
        settings = {"row": name, "run": str(run), "log": str(log), "life": number, **plan}
        began = time.monotonic()
        errors = run_job(folder, plan["world"], settings, plan["command"])
        seconds = time.monotonic() - began
        passed = "\n".join(re.findall(r".* was (?:passed over|not restored): .*", errors))
        begun.append((number, plan, markers, (nbytes_of(run), largest_step(run)), seconds, passed, complaint(errors)))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    looks = {line["life"]: place for place, line in enumerate(lines) if "looking" in line}
    lives = []
    for number, plan, *others in begun:
        until = min((place for life, place in looks.items() if life > number), default=len(lines))
        said = [line for place, line in enumerate(lines) if line["life"] == number and place < until]
        lives.append(Life(number, plan, said, *others))
    return lives


def complaint(errors: str) -> str:
    """What a job that failed said last, without what torchrun puts before it."""
    text = re.sub(r"(?m)^(E\d{4} .*?api\.py:\d+\]|\[rank\d+\]:) ?", "", errors)
    return next(
        (found[-1500:] for found in re.findall(r"TrainingError: (.*?)(?:\n\n|\Z)", text, re.DOTALL)), text[-1500:]
    )


def ended_by_itself(life: Life) -> str:
    """Say why a life ended that nothing had killed yet, "" if it lived as long as it should."""
    kill, resumed = life.plan["kill"], life.said("resumed")
    if kill is None:
        return "" if life.said("ended") else f"{life}: it did not end: {life.complaint}"
    if kill["at"] == 0 or (resumed is not None and max(life.losses, default=0) >= resumed + kill["at"]):
        return ""
    return f"{life}: it ended before it was killed: {life.complaint}"


def marked(run: Path) -> list[int]:
    return sorted(int(file.parent.name.rpartition("_")[2]) for file in run.glob("step_*/_COMPLETE"))


def nbytes_of(folder: Path) -> int:
    """Bytes of all files; what goes meanwhile counts for nothing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def largest_step(run: Path) -> int:
    return max((nbytes_of(run / f"step_{step}") for step in marked(run)), default=0)


def references(folder: Path, name: str, lives: list[Life]) -> dict[Key, list[dict[str, Any]]]:
    """What the reference says, for each sequence of numbers of ranks that a life has been through."""
    needed: dict[Key, tuple[set[int], set[int], set[int]]] = {}  # steps to reach, to picture, to dump
    for life in lives:
        for length in range(1, len(life.key) + 1):
            needed.setdefault(life.key[:length], (set(), set(), set()))
        reached, pictured, _ = needed[life.key]
        reached |= {life.said("resumed"), *life.losses}
        pictured |= {life.said("resumed"), life.said("ended", 0)}
    for key in needed:
        if len(key) > 1:
            needed[key[:-1]][0].add(key[-1][1])
            needed[key[:-1]][2].add(key[-1][1])
    said = {}
    for key in sorted(needed, key=len):
        reached, pictured, dumps = needed[key]
        place = folder / "reference" / "-".join(f"{ranks}from{after}" for ranks, after in key)
        place.mkdir(parents=True)
        start_at = key[-1][1]
        parent = "-".join(f"{ranks}from{after}" for ranks, after in key[:-1])
        settings = {
            "row": name,
            "log": str(place / "log"),
            "source": str(folder / "reference" / parent / str(start_at)) if parent else "",
            "start": start_at,
            "until": max(reached, default=start_at),
            "pictures": sorted(pictured),
            "dumps": sorted(dumps),
            "folder": str(place),
        }
        errors = run_job(place, key[-1][0], settings)
        said[key] = [json.loads(line) for line in (place / "log").read_text().splitlines()]
        assert "done" in said[key][-1], errors[-3000:]
    return said


def differences(life: Life, reference: list[dict[str, Any]]) -> list[str]:
    """What is not the same in a life and in the reference."""
    losses = {line["step"]: line["losses"] for line in reference if "step" in line}
    pictures = {line["at"]: line["picture"] for line in reference if "picture" in line}
    found = []
    for line in life.lines:
        if "picture" in line:
            at, when = (line["resumed"], "restored") if "resumed" in line else (line["ended"], "at the end")
            here, there = (comparable(picture, life.key, at) for picture in (line["picture"], pictures[at]))
            other = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
            if other:
                found.append(f"{life}: {when}, step {at}: not the same: {', '.join(other)}")
    wrong = [step for step, values in life.losses.items() if losses[step] != values]
    if wrong:
        found.append(f"{life}: losses differ from step {min(wrong)} on")
    return found


def comparable(picture: dict[str, Any], key: Key, at: int) -> dict[str, Any]:
    """A picture; of buffers, which each rank has its own of, where there are more ranks now only what these had."""
    if len(key) < 2 or at > key[-1][1]:
        return picture
    (before, _), (now, _) = key[-2:]
    buffers = {name: value for name, value in picture.items() if name.startswith("buffer.")}
    return picture | {n: (v if isinstance(v, list) else [v] * now)[: min(before, now)] for n, v in buffers.items()}


def lost(last: Life, life: Life) -> tuple[int, str]:
    """How many steps of the life before it a life has to do again, and what is wrong with that, "" if nothing."""
    resumed = life.said("resumed")
    done = max(last.losses, default=last.said("resumed", 0))
    steps = done - resumed
    most = INTERVAL if last.plan["how"] == "save" else 2 * INTERVAL - 1
    waiting = "saving" in (last.lines[-1] if last.lines else {})  # for the save before, which takes longer than steps
    if last.plan["how"] == "async_save" and waiting:
        most = 2 * INTERVAL
    if steps > most:
        said = f"before it: {last}, last said {last.lines[-1:]}; marked were {life.markers}; {life.passed}"
        return steps, f"{life}: {steps} steps lost; {said}"
    if resumed < max(life.markers, default=0):
        return steps, f"{life}: marked were {life.markers}; {life.passed}"
    return steps, ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_lives(tmp_path, name):
    lives = live_all(tmp_path, name)
    wrong = [problem for life in lives if (problem := ended_by_itself(life))]
    resumed = [life for life in lives if life.said("resumed") is not None]
    said = references(tmp_path, name, resumed)
    wrong += [problem for life in resumed for problem in differences(life, said[life.key])]
    losses = [lost(before, life) for before, life in itertools.pairwise(resumed)]
    wrong += [problem for _, problem in losses if problem]
    times = max((nbytes / step for nbytes, step in (life.nbytes for life in lives) if step), default=0.0)
    if times > KEEP + 2.1:  # what is in flight, what a kill left before it was deleted, and markers and the lease
        wrong.append(f"the run directory had {times:.2f} times the bytes of a step")
    said_of_row = {
        "lives": len(lives),
        "resumed": len(resumed),
        "steps": sum(len(life.losses) for life in lives),
        "references": len(said),
        "most steps lost": max((lost for lost, _ in losses), default=0),
        "folder, in steps": round(times, 2),
        "longest life, s": round(max(life.seconds for life in lives), 1),
        "wrong": len(wrong),
    }
    print(f"\n{name}: {', '.join(f'{what}: {value}' for what, value in said_of_row.items())}")
    assert not wrong, "\n".join(wrong)
