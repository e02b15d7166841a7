"""`dcptool inspect`."""

from __future__ import annotations

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool inspect ckpt/step_500 --keys 'model.*' --chunks")
@click.argument("path")
@click.option("--chunks", is_flag=True, help="List every tensor's boxes and where they are stored.")
@click.option(
    "--depth", type=click.IntRange(0), default=1, show_default=True, help="Parts of a name that make a group."
)
@options.selection
@options.output
def inspect(
    path: str, chunks: bool, depth: int, keys: tuple[str, ...], exclude: tuple[str, ...], as_json: bool, quiet: bool
) -> int:
    """Show what is in a checkpoint.

    PATH is a local path or URL of a DCP directory, a .pt file, a safetensors file, index or folder, a folder that
    holds several checkpoints, or a run directory (one row per step).

    Exits 1 if something is missing or damaged.
    """
    from dcptool.summary import summarize

    summary = summarize(path, keys=keys, exclude=exclude, chunks=chunks, depth=depth)
    if as_json and not quiet:
        import json

        from dcptool.render.inspect import to_json

        click.echo(json.dumps(to_json(summary), indent=2, allow_nan=False))
    elif not quiet:
        import shutil

        from dcptool.render.inspect import to_text

        click.echo(to_text(summary, shutil.get_terminal_size((120, 40)).columns))
    return 0 if summary.good else 1
