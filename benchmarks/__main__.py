"""The command line of the benchmarks; see the package."""

from __future__ import annotations

import compileall
import tempfile
from pathlib import Path

import click
from tabulate import tabulate

import dcptool
from benchmarks.measure import compare, compare_inside
from benchmarks.results import HEADERS, Result, cells, how, measured, save
from benchmarks.rows import ROWS, TRAINING, TRAINING_OF, training_commands


@click.command(help="Run comparisons; all of them unless some are named.")
@click.argument("names", nargs=-1, metavar="[ROW]...", type=click.Choice([*ROWS, *TRAINING]))
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1), help="Counted runs of each side.")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Where checkpoints are kept; default: a temporary folder."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also keep all runs here, beside those of other rows."
)
@click.option("--list", "only_list", is_flag=True, help="List the rows.")
def main(names: tuple[str, ...], runs: int, cache: Path | None, json_file: Path | None, only_list: bool) -> None:
    if only_list:
        click.echo("\n".join(f"{name:<30}{row.what} against {row.against}" for name, row in ROWS.items()))
        click.echo(f"\nOf the rows of training, all those of the same number of ranks: {', '.join(TRAINING)}")
        return
    cache = cache or Path(tempfile.gettempdir()) / "dcptool-benchmarks"
    cache.mkdir(parents=True, exist_ok=True)
    # As pip does for what it installs; an editable install would be compiled by the first run, or by every run.
    compileall.compile_dir(Path(dcptool.__file__).parent, quiet=2)
    results: list[Result] = []
    for name in dict.fromkeys(TRAINING_OF.get(name, name) for name in names or ROWS):
        click.echo(f"{name} …", err=True)
        results += _measured(name, cache, runs)
        if json_file:
            save(json_file, results)
    click.echo(tabulate([cells(result) for result in results], HEADERS, disable_numparse=True))
    click.echo(f"\n{how(results)}")


def _measured(name: str, cache: Path, n_runs: int) -> list[Result]:
    """Return the result of a row, or those of all rows that one job of training measures."""
    if name not in TRAINING:
        return [measured(name, cache, *compare(*ROWS[name].commands(cache), n_runs))]
    ours, theirs = compare_inside(*training_commands(cache, TRAINING[name]), n_runs)
    rows = [(row, ROWS[row].measures) for row, group in TRAINING_OF.items() if group == name]
    return [measured(row, cache, ours[measures[0]], theirs[measures[1]]) for row, measures in rows if measures]


if __name__ == "__main__":
    main()
