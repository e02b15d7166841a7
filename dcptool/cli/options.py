"""Options several commands share, defined once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
