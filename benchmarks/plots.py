"""Draw how time grows: `python -m benchmarks.plots docs/speed.json docs/growth.svg` (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import click
import matplotlib

from benchmarks.results import Result, how, load
from benchmarks.rows import GROWTH, ROWS

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "dcptool"  # the same picture from the same results


@click.command()
@click.argument("results_file", type=click.Path(path_type=Path, exists=True))
@click.argument("picture", type=click.Path(path_type=Path))
def main(results_file: Path, picture: Path) -> None:
    """Draw a plot per thing that grows, times over sizes, both axes logarithmic."""
    from matplotlib import pyplot

    found = {result.row: result for result in load(results_file) if result.medium == "disk"}
    figure, axes = pyplot.subplots(1, len(GROWTH), figsize=(12, 4), layout="constrained")
    for axis, (grows, works) in zip(axes, GROWTH.items(), strict=True):
        theirs_drawn: set[str] = set()
        for color, (work, points) in zip(("C0", "C1", "C2"), works.items(), strict=False):
            _draw(axis, color, work, [(size, found[row]) for size, row in points], theirs_drawn)
        axis.set(xscale="log", yscale="log", xlabel=grows, ylabel="seconds")
        sizes = [size for size, _ in next(iter(works.values()))]
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(0.04, 400)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small", loc="upper left")
    figure.suptitle(how(list(found.values())), fontsize="small")
    figure.savefig(picture, metadata={"Date": None})


def _draw(axis: object, color: str, work: str, points: list[tuple[int, Result]], theirs_drawn: set[str]) -> None:
    """Draw our times, and those of what they are compared with, once for each that is."""
    sizes = [size for size, _ in points]
    axis.plot(sizes, [result.ours.seconds for _, result in points], "o-", color=color, label=work)
    against = ROWS[points[0][1].row].against.replace("`", "")
    if against not in theirs_drawn:
        theirs_drawn.add(against)
        seconds = [result.theirs.seconds for _, result in points]
        axis.plot(sizes, seconds, "s--", color=color, alpha=0.5, label=against)


if __name__ == "__main__":
    main()
