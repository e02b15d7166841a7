"""`dcptool mark`."""

from __future__ import annotations

from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool mark ckpt/step_500")
@click.argument("path", metavar="CKPT", type=options.PATH)
@click.option("--checksums", is_flag=True, help="Also keep the SHA-256 of every file; reads every byte.")
@click.option("--saved", is_flag=True, help="Mark it as the job that has just saved it: it is the newest of its run.")
@options.marker
@options.threads
@options.output
def mark(path: str, **chosen: Any) -> int:
    """Check a checkpoint and write the marker that says it is complete.

    The check is that of `verify --records`, with --checksums that of `verify --deep`. What does not pass is not marked
    (exit 3).
    """
    import json

    from dcptool.cli.progress import bar
    from dcptool.ops.mark import mark_complete
    from dcptool.render.verify import uncheckable
    from dcptool.words import nbytes, plural, shown

    with bar() as progress:
        marked = mark_complete(path, **chosen, progress=progress)
    files, side = marked.marker.files, marked.verdict.side_files
    what = f"{plural(len(files), 'file')}, {nbytes(sum(files.values()))}"
    before = marked.verdict.marker
    if before and before.sha256 and not chosen["checksums"]:
        what += f" (the {shown(before.name)} before held the SHA-256 of its files; --checksums keeps that)"
    elif side.n_unproven and not chosen["checksums"]:
        what += f" ({uncheckable(side)}; --checksums vouches for {'it' if side.n_unproven == 1 else 'them'} too)"
    options.answer(
        lambda: {"path": marked.path, **json.loads(marked.marker.document())},
        lambda: f"marked {shown(marked.verdict.path)}: {shown(marked.path)} vouches for {what}",
    )
    return 0
