"""`dcptool copy`."""

from __future__ import annotations

import os
from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool copy /local/ckpt/step_500 s3://bucket/run/step_500")
@click.argument("source", metavar="SRC", type=options.PATH)
@click.argument("target", metavar="DST", type=options.PATH)
@options.also
@options.marker
@click.option("--trust", is_flag=True, help="Copy also what runs code when it is loaded.")
@options.overwrite
@click.option("--threads", type=click.IntRange(1), help="Parts read, and written, at the same time.")
@click.option("--dry-run", is_flag=True, help="Print the plan, write nothing.")
@options.output
def copy(source: str, target: str, dry_run: bool, **chosen: Any) -> int:
    """Copy a step byte for byte, from any storage to any other, proven on the way.

    SRC is a step, or a run directory, of which the complete steps are copied that DST has not, the one saved first
    first. DST is the copy itself, not a folder to put it in.

    Every file of the step is copied. Every CRC32 stored in it is checked and every file hashed while its bytes pass;
    what is damaged, not whole or unsafe is not published. The copy's marker, with the SHA-256 of every file, comes
    last. Run it again after a failure, and only the rest is moved.

    Exits 1 if steps of a run were left, other than those being written.

    Under torchrun each of its processes sends what it sees of one step: node-local disks are read as one, files on
    shared storage are shared out.
    """
    from dcptool.cli.progress import bar
    from dcptool.groups.torchrun import speaks_for_all, under_torchrun
    from dcptool.ops.copy.copy import copy_steps
    from dcptool.ops.copy.step import CopyOptions, CopyWatch
    from dcptool.ops.copy.together import copy_together
    from dcptool.render.copy import copy_json, copy_text, notes, plan_text

    meant = CopyOptions(**chosen)
    if under_torchrun() and meant.also:
        raise click.UsageError("under torchrun each process sends what it sees itself: without --also")
    with bar(speaks_for_all()) as progress:
        expect, say = progress.expect if progress else None, options.noting()
        if under_torchrun():
            # torch's own lines on lost connections, with C++ stacks, would bury the one that says what happened.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            done = copy_together(source, target, meant, CopyWatch(progress, expect, say), dry_run=dry_run)
        else:
            done = copy_steps(source, target, meant, dry_run=dry_run, progress=progress, expect=expect, say=say)
    if not speaks_for_all():
        return 0 if done.good else 1
    show = plan_text if dry_run else copy_text
    options.answer(lambda: copy_json(done), lambda: show(done), notes(done))
    return 0 if done.good else 1
