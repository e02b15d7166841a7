"""`dcptool inspect`."""

from __future__ import annotations

from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool inspect ckpt/step_500 --keys 'model.*' --chunks")
@click.argument("path", type=options.PATH)
@click.option("--chunks", is_flag=True, help="List every tensor's boxes and where they are stored.")
@click.option("--values", is_flag=True, help="Print the first elements of each tensor and objects in full.")
@click.option("--stats", is_flag=True, help="Read all tensors shown: min, max, mean, std, norm, zeros, NaN, Inf.")
@click.option("--by-file", is_flag=True, help="Show the files: size, items, and how evenly ranks share the bytes.")
@click.option(
    "--depth", type=click.IntRange(0), default=1, show_default=True, help="Parts of a name that make a group."
)
@options.selection
@options.threads
@options.output
def inspect(path: str, by_file: bool, **chosen: Any) -> int:
    """Show what is in a checkpoint.

    PATH is a local path or URL of a DCP directory, a .pt file, a safetensors file, index or folder, a folder that
    holds several checkpoints, or a run directory (one row per step).

    Exits 1 if something is missing or damaged.
    """
    import gc

    gc.disable()  # nothing here makes cycles worth the quarter of the time that looking for them takes
    from dcptool.cli.progress import bar
    from dcptool.errors import DcptoolError
    from dcptool.ops.inspect.inspect import summarize
    from dcptool.render.inspect import to_text
    from dcptool.render.inspect_json import to_json

    options.require_use_of_threads(chosen["threads"], chosen["stats"], "--stats")
    try:
        with bar(chosen["stats"]) as progress:
            summary = summarize(path, **chosen, progress=progress)
    except DcptoolError as error:
        if options.wants_json():
            options.print_json(
                {"schema": 1, "path": path, "checkpoints": [], "errors": [{"path": path, "message": str(error)}]}
            )
        raise
    if summary.steps and not options.is_quiet():
        given = {name: chosen[name] for name in ("keys", "exclude", "chunks", "values", "stats")}
        unused = [f"--{name}" for name, value in {**given, "by-file": by_file}.items() if value]
        if unused:
            click.echo(f"note: a run directory shows its steps; {', '.join(unused)}: name one of them", err=True)
    options.answer(lambda: to_json(summary), lambda: to_text(summary, options.width(), by_file, chosen["values"]))
    return 0 if summary.good else 1
