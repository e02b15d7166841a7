"""`dcptool interval`."""

from __future__ import annotations

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool interval --save 45s --failures 466 --in 54d --restart 10m --interval 1h")
@click.argument("run_dir", required=False, type=options.PATH)
@click.option("--save", type=options.DURATION, help="How long training stands still for a save.")
@click.option("--mtbf", type=options.DURATION, help="Mean time between failures of the job …")
@click.option("--failures", type=click.IntRange(1), metavar="N", help="… or how many there were …")
@click.option("--in", "period", type=options.DURATION, help="… in how much time.")
@click.option(
    "--restart",
    type=options.DURATION,
    default="0s",
    show_default=True,
    help="From a failure until training goes on.",
)
@click.option(
    "--interval",
    "intervals",
    multiple=True,
    type=options.DURATION,
    help="Also show what this one loses. Repeatable.",
)
@options.marker
@options.output
def interval(
    run_dir: str | None,
    save: float | None,
    mtbf: float | None,
    failures: int | None,
    period: float | None,
    restart: float,
    intervals: tuple[float, ...],
    marker: str,
) -> int:
    """Find how often to save, so that saves and failures together lose the least time.

    RUN_DIR is a run whose markers hold how long its saves take and when they were, as dcptool.training writes them:
    then --save need not be given, and what the run does now is shown too.

    With saves that block, a kill loses at most the steps of one interval; with async_save the save in flight goes too:
    up to two intervals less a step.
    """
    from dcptool.ops.interval import optimal_interval, read_cadence
    from dcptool.render.interval import interval_json, interval_text
    from dcptool.words import shown

    cadence = read_cadence(run_dir, marker) if run_dir is not None else None
    blocked = save if save is not None or cadence is None else cadence.save_seconds
    if blocked is None and cadence is None:
        raise click.UsageError("how long does a save take? Pass --save 45s, or a RUN_DIR whose markers hold it.")
    if blocked is None and cadence is not None:
        raise click.UsageError(
            f"no marker of the {cadence.n_steps:,} steps in {cadence.path} holds how long a save took: pass --save 45s"
        )
    between = _mtbf(mtbf, failures, period)
    mtbf_option = "--mtbf" if period is None else "--in"
    for option, seconds in (("--save", blocked), (mtbf_option, between), *(("--interval", one) for one in intervals)):
        if not seconds:
            raise click.UsageError(f"{option} must be more than 0; pass what it is on average, such as 0.5s")
    report = optimal_interval(
        blocked or 0.0,
        between,
        restart,
        intervals=intervals,
        cadence_seconds=cadence.interval_seconds if cadence else None,
    )
    lines = []
    if cadence and cadence.interval_seconds is None:
        lines.append(f"note: too few markers in {shown(cadence.path)} to tell how often it saves; --interval shows one")
    options.answer(lambda: interval_json(report, cadence), lambda: interval_text(report, cadence), lines=lines)
    return 0


def _mtbf(mtbf: float | None, failures: int | None, period: float | None) -> float:
    """Return the mean time between failures, in seconds.

    Raises:
        click.UsageError: it is given twice, or not at all, or only half.
    """
    if mtbf is not None and failures is None and period is None:
        return mtbf
    if mtbf is None and failures is not None and period is not None:
        return period / failures
    if mtbf is None and failures is None and period is None:
        raise click.UsageError("how often does the job fail? Pass --mtbf 3h, or --failures 466 --in 54d.")
    raise click.UsageError("pass either --mtbf, or --failures together with --in")
