"""`dcptool inspect`."""

from __future__ import annotations

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
def inspect(
    path: str,
    chunks: bool,
    values: bool,
    stats: bool,
    by_file: bool,
    depth: int,
    keys: tuple[str, ...],
    exclude: tuple[str, ...],
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
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

    options.require_use_of_threads(threads, stats, "--stats")
    try:
        with bar(quiet or not stats) as progress:
            summary = summarize(
                path,
                keys=keys,
                exclude=exclude,
                chunks=chunks,
                values=values,
                depth=depth,
                stats=stats,
                threads=threads,
                progress=progress,
            )
    except DcptoolError as error:
        if as_json and not quiet:
            options.print_json(
                {"schema": 1, "path": path, "checkpoints": [], "errors": [{"path": path, "message": str(error)}]}
            )
        raise
    if summary.steps and not quiet:
        given = [("--keys", keys), ("--exclude", exclude), ("--chunks", chunks), ("--values", values)]
        unused = [option for option, value in [*given, ("--stats", stats), ("--by-file", by_file)] if value]
        if unused:
            click.echo(f"note: a run directory shows its steps; {', '.join(unused)}: name one of them", err=True)
    if as_json and not quiet:
        from dcptool.render.inspect_json import to_json

        options.print_json(to_json(summary))
    elif not quiet:
        from dcptool.render.inspect import to_text

        click.echo(to_text(summary, options.width(), by_file, values))
    return 0 if summary.good else 1
