"""`dcptool rescue`."""

from __future__ import annotations

from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool rescue ckpt/step_500 --like ckpt/step_400")
@click.argument("path", metavar="CKPT", type=options.PATH)
@click.option("--like", required=True, type=options.PATH, metavar="CKPT", help="A whole step of the same run.")
@click.option(
    "-o", "--output", type=options.PATH, metavar="DIR", help="Write a copy with the metadata here; CKPT stays as it is."
)
@click.option("--dry-run", is_flag=True, help="Read and check everything, write nothing.")
@options.threads
@options.output
def rescue(path: str, **chosen: Any) -> int:
    """Rebuild the lost .metadata of a checkpoint whose data files are whole.

    It is that of another step of the same run, with the places of this step's items. Every data file must hold the same
    items in the same order (kinds, dtypes, shapes, strides), and every checksum must be right; else nothing is written
    (exit 3). No marker is written.
    """
    from dcptool.cli.progress import bar
    from dcptool.ops.rescue.rescue import rescue as rescue_path
    from dcptool.render.rescue import rescued_json, rescued_text

    with bar() as progress:
        done = rescue_path(path, **chosen, progress=progress)
    options.answer(lambda: rescued_json(done), lambda: rescued_text(done), done.notes)
    return 0
