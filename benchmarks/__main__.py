"""The command line of the benchmarks; see the package."""

from __future__ import annotations

import compileall
import tempfile
from pathlib import Path

import click
from tabulate import tabulate

import dcptool
from benchmarks.measure import compare
from benchmarks.results import HEADERS, cells, how, measured, save
from benchmarks.rows import ROWS


@click.command(help="Run comparisons; all of them unless some are named.")
@click.argument("names", nargs=-1, metavar="[ROW]...", type=click.Choice(list(ROWS)))
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
        click.echo("\n".join(f"{name:<22}{row.what} against {row.against}" for name, row in ROWS.items()))
        return
    cache = cache or Path(tempfile.gettempdir()) / "dcptool-benchmarks"
    cache.mkdir(parents=True, exist_ok=True)
    # As pip does for what it installs; an editable install would be compiled by the first run, or by every run.
    compileall.compile_dir(Path(dcptool.__file__).parent, quiet=2)
    results = []
    for name in names or ROWS:
        click.echo(f"{name} …", err=True)
        results.append(measured(name, cache, *compare(*ROWS[name].commands(cache), runs)))
        if json_file:
            save(json_file, results)
    click.echo(tabulate([cells(result) for result in results], HEADERS, disable_numparse=True))
    click.echo(f"\n{how(results)}")


if __name__ == "__main__":
    main()
