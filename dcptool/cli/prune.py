"""`dcptool prune`."""

from __future__ import annotations

import sys
from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool prune ckpt --keep 3 --archive-every 1000 --dry-run")
@click.argument("run_dir", type=options.PATH)
@click.option("--keep", type=click.IntRange(1), required=True, help="How many of the newest complete steps to keep.")
@click.option("--archive-every", type=click.IntRange(1), metavar="STEPS", help="Keep every multiple of this too.")
@click.option("--include-incomplete", is_flag=True, help="Delete incomplete, damaged and unmarked steps too …")
@click.option("--older-than", type=options.DURATION, help="… that were last written so long ago.")
@click.option("--deep", is_flag=True, help="Check every byte of the newest step that is kept before anything goes.")
@click.option("--finite", is_flag=True, help="… and that it holds neither NaN nor infinity.")
@options.by
@options.require_parts
@options.require_marker
@options.marker
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@options.output
def prune(
    run_dir: str,
    keep: int,
    archive_every: int | None,
    include_incomplete: bool,
    older_than: float | None,
    deep: bool,
    finite: bool,
    dry_run: bool,
    yes: bool,
    **chosen: Any,
) -> int:
    """Delete old checkpoints of a run.

    Only complete steps count toward --keep. Never deleted are the newest complete step, the newest to resume from, the
    newest with checksums in its marker, what a pointer or the record of the best step names, what a kept step has links
    into, what is being written, and what could not be read. Before anything goes, the headers of every item of the
    newest step that is kept are looked at. Shows the plan and asks; off a terminal --dry-run or --yes is needed.

    Exits 1 if something was not deleted after all.
    """
    import time

    from dcptool.cli.progress import bar
    from dcptool.ops.prune.delete import delete_steps
    from dcptool.ops.prune.prune import make_plan
    from dcptool.ops.verify.verdict import VerifyOptions
    from dcptool.render.prune import deleted_lines, plan_json, plan_text

    if include_incomplete != (older_than is not None):
        raise click.UsageError("--include-incomplete and --older-than go together: say how old they must be")
    if dry_run and yes:
        raise click.UsageError("--dry-run and --yes contradict each other")
    ask = not dry_run and not yes
    if ask and (options.is_quiet() or options.wants_json() or not sys.stdin.isatty()):
        raise click.UsageError("nobody can be asked here: add --dry-run to see the plan or --yes to delete")
    meant = VerifyOptions(**chosen)
    plan = make_plan(
        run_dir,
        keep,
        meant,
        archive_every=archive_every,
        include_incomplete=include_incomplete,
        older_than=older_than or 0.0,
        now=time.time(),
    )
    proof = options.level_of(True, deep or finite)
    options.say(plan_text(plan, proof, finite))
    deleted = None
    if plan.removed and (yes or (ask and click.confirm(f"delete {len(plan.removed)} of {len(plan.decisions)} steps?"))):
        with bar() as progress:
            deleted = delete_steps(plan, meant, proof=proof, finite=finite, progress=progress)
    if options.wants_json():
        options.print_json(plan_json(plan, deleted))
    elif deleted:
        options.say("\n".join(["", *deleted_lines(deleted)]))
    elif not plan.removed:
        options.say("\nnothing to delete")
    return 1 if deleted and deleted.refused else 0
