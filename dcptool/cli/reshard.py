"""`dcptool reshard`."""

from __future__ import annotations

import os
from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool reshard --world-size 48 ckpt/step_500 ckpt-48/step_500")
@click.argument("source", metavar="[SRC]", type=options.PATH, required=False)
@click.argument("target", metavar="[DST]", type=options.PATH, required=False)
@click.option("--world-size", type=click.IntRange(1), metavar="N", help="Ranks that will resume from it.")
@click.option("--like", type=options.PATH, metavar="CKPT", help="Take over the layout of this checkpoint.")
@click.option("--mesh", metavar="DIMS", help="Device mesh of the target, the outermost first: dp=6,tp=8.")
@click.option(
    "--placement",
    "placements",
    multiple=True,
    metavar="GLOB=CUTS",
    help="With --mesh: how these tensors are cut, in order: '*.weight=tp:1,dp:0'. The first match wins. Repeatable.",
)
@click.option("--files", type=click.IntRange(1), metavar="N", help="Keep all boxes; put them into N files.")
@options.selection
@options.renaming
@options.torch
@options.also
@options.rank
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Processes that share the work.  [default: processors]"
)
@click.option("--threads", type=click.IntRange(1), default=None, help="Bands each of them reads ahead.  [default: 1]")
@click.option(
    "--timeout",
    type=options.DURATION,
    default="5m",
    show_default=True,
    help="Give up a process that shows no sign of life for so long.",
)
@click.option("--trust", is_flag=True, help="Take also objects that run code when they are loaded.")
@options.overwrite
@click.option("--dry-run", is_flag=True, help="Print the plan, write nothing; needs no torch.")
@options.check
@options.output
def reshard(source: str | None, target: str | None, dry_run: bool, allow_overflow: bool, **chosen: Any) -> int:
    """Write a checkpoint as a job of N ranks would have saved it, optimizer and objects included.

    Without SRC: the checkpoint in the current directory, or the newest complete one of the run in or below it. Without
    DST: <RUN>-ws<N>/<STEP> beside the run directory. Tensors that were sharded along one dimension are sharded along it
    over N; whole ones stay whole. Every checksum of the source is checked on the way.

    Exits 1 if values became infinite, zero or subnormal in a cast.

    Runs a gloo process group of a few local workers; under torchrun it joins torchrun's group instead.
    """
    from dcptool.checkpoint.selection import Renaming
    from dcptool.cli.progress import bar
    from dcptool.groups.torchrun import speaks_for_all
    from dcptool.ops.reshard.reshard import ReshardOptions, options_problem
    from dcptool.ops.reshard.reshard import reshard as reshard_path
    from dcptool.render.convert import lost_lines
    from dcptool.render.reshard import plan_text, resharded_json, resharded_line

    options.require_dtype(click.get_current_context())
    renaming = Renaming(**{name: chosen.pop(name) for name in Renaming._fields})
    meant = ReshardOptions(renaming=renaming, **chosen)
    problem = options_problem(meant)
    if problem:
        raise click.UsageError(problem)
    # torch's own lines on lost connections, with C++ stacks, would bury the one that says what happened.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    with bar() as progress:
        done = reshard_path(source, target, meant, dry_run=dry_run, progress=progress)
    if speaks_for_all():
        show = plan_text if dry_run else resharded_line
        options.answer(lambda: resharded_json(done), lambda: show(done), done.notes, lost_lines(done.lost))
    return 1 if done.lost and not allow_overflow else 0
