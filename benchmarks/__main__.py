"""The command line of the benchmarks; see the package."""

from __future__ import annotations

import compileall
import json
import os
import platform
import tempfile
from pathlib import Path

import click
from tabulate import tabulate

import dcptool
from benchmarks.measure import Side, compare
from benchmarks.rows import ROWS


@click.command(help="Run comparisons; all of them unless some are named.")
@click.argument("names", nargs=-1, metavar="[ROW]...", type=click.Choice(list(ROWS)))
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1), help="Counted runs of each side.")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Where checkpoints are kept; default: a temporary folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print all runs as JSON.")
@click.option("--list", "only_list", is_flag=True, help="List the rows.")
def main(names: tuple[str, ...], runs: int, cache: Path | None, as_json: bool, only_list: bool) -> None:
    if only_list:
        click.echo("\n".join(f"{name:<22}{row.what} against {row.against}" for name, row in ROWS.items()))
        return
    cache = cache or Path(tempfile.gettempdir()) / "dcptool-benchmarks"
    cache.mkdir(parents=True, exist_ok=True)
    # As pip does for what it installs; an editable install would be compiled by the first run, or by every run.
    compileall.compile_dir(Path(dcptool.__file__).parent, quiet=2)
    results = {}
    for name in names or ROWS:
        click.echo(f"{name} …", err=True)
        ours, theirs = compare(*ROWS[name].commands(cache), runs)
        results[name] = (ours, theirs)
    if as_json:
        click.echo(json.dumps({name: [_json(side) for side in sides] for name, sides in results.items()}, indent=2))
        return
    headers = ["work", "ours", "theirs", "ratio", "goal", "our memory", "theirs", "ratio", "goal"]
    click.echo(tabulate([_row(name, *sides) for name, sides in results.items()], headers, disable_numparse=True))
    click.echo(
        f"\n{os.cpu_count()} processors, {platform.machine()}, Python {platform.python_version()}, median of {runs}"
    )


def _row(name: str, ours: Side, theirs: Side) -> list[str]:
    row = ROWS[name]
    ratios = [a.seconds / b.seconds for a, b in zip(ours.runs, theirs.runs, strict=True)]
    return [
        row.what,
        f"{ours.seconds:.2f} s",
        f"{theirs.seconds:.2f} s",
        f"{ours.seconds / theirs.seconds:.3f} ({min(ratios):.3f}–{max(ratios):.3f})",
        "" if row.goal_seconds is None else f"≤ {row.goal_seconds:.3f}",
        f"{ours.nbytes / 1e6:.0f} MB",
        f"{theirs.nbytes / 1e6:.0f} MB",
        f"{ours.nbytes / theirs.nbytes:.2f}",
        "" if row.goal_nbytes is None else f"≤ {row.goal_nbytes}",
    ]


def _json(side: Side) -> dict[str, object]:
    runs = [{"seconds": run.seconds, "nbytes": run.nbytes} for run in side.runs]
    return {"command": side.command, "seconds": side.seconds, "nbytes": side.nbytes, "runs": runs}


if __name__ == "__main__":
    main()
