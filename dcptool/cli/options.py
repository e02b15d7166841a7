"""Options several commands share, defined once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def selection(command: Command) -> Command:
    """Add --keys and --exclude."""
    command = click.option(
        "--exclude", multiple=True, metavar="GLOB", help="Leave out entries with these names. Repeatable."
    )(command)
    return click.option(
        "--keys",
        multiple=True,
        metavar="GLOB",
        help="Only entries whose whole name matches; * crosses dots. Repeatable.",
    )(command)


def output(command: Command) -> Command:
    """Add --json and --quiet."""
    command = click.option("--quiet", is_flag=True, help="Print nothing; the exit code is the answer.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON with a documented, numbered schema.")(
        command
    )


class Duration(click.ParamType[float]):
    """A length of time such as 90s, 30m, 2h or 1d; its value is in seconds."""

    name = "duration"
    _UNITS: ClassVar[dict[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        seconds = float(match[1]) * self._UNITS[match[2]] if match else math.inf
        if seconds == math.inf:
            self.fail(f"{str(value)[:80]!r} is no length of time; write 90s, 30m, 2h or 1d", param, ctx)
        return seconds


def marker(command: Command) -> Command:
    """Add --marker."""
    return click.option(
        "--marker",
        default="_COMPLETE",
        show_default=True,
        metavar="NAME",
        callback=_marker_name,
        help="Name of the marker file.",
    )(command)


def _marker_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from dcptool.marker import name_problem

    problem = name_problem(value)
    if problem:
        raise click.BadParameter(problem, ctx, param)
    return value


def require_marker(command: Command) -> Command:
    """Add --require-marker."""
    return click.option("--require-marker", is_flag=True, help="A checkpoint without a marker is not complete.")(
        command
    )


def require_parts(command: Command) -> Command:
    """Add --require."""
    return click.option(
        "--require",
        default="",
        metavar="PARTS",
        help="Parts a step must have, separated by commas, such as actor,critic,data/data.pt.",
    )(command)


def also(command: Command) -> Command:
    """Add --also."""
    return click.option(
        "--also",
        multiple=True,
        metavar="DIR",
        type=click.Path(),
        help="A folder with further files of the same save, such as another node's disk. Repeatable.",
    )(command)


def threads(command: Command) -> Command:
    """Add --threads."""
    return click.option(
        "--threads",
        type=click.IntRange(1),
        default=None,
        help="Reads at the same time.  [default: by processors]",
    )(command)


PIPED_WIDTH = 1000
"""Columns where there is no terminal: each entry stays on one line, for grep and awk."""


def width() -> int:
    """Return the columns of the terminal, or many where there is none."""
    import shutil

    return shutil.get_terminal_size((PIPED_WIDTH, 40)).columns


class Size(click.ParamType[int]):
    """A number of bytes such as 5GB (5·10⁹) or 500MB."""

    name = "size"
    _UNITS: ClassVar[dict[str, int]] = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", str(value).upper())
        nbytes = float(match[1]) * self._UNITS[match[2] or ""] if match else 0
        if not 1 <= nbytes < math.inf:
            self.fail(f"{str(value)[:80]!r} is no size; write 5GB or 500MB", param, ctx)
        return int(nbytes)


class Tolerance(click.ParamType[float]):
    """A finite number of at least 0."""

    name = "tolerance"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            self.fail(f"{value!r} is no tolerance; write a number such as 1e-6", param, ctx)
        return number


class Pair(click.ParamType[tuple[str, str]]):
    """OLD=NEW."""

    name = "pair"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        old, equals, new = str(value).partition("=")
        if not old or not equals or not new:
            self.fail(f"{value!r} must be OLD=NEW", param, ctx)
        return old, new


def parts_of(text: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas."""
    return tuple(name for part in text.split(",") if (name := part.strip().strip("/")))


def print_json(document: dict[str, Any]) -> None:
    """Print a JSON document on stdout."""
    import json

    click.echo(json.dumps(document, indent=2, allow_nan=False))
