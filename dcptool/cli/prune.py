"""`dcptool prune`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from dcptool.cli import options

if TYPE_CHECKING:
    from dcptool.ops.prune.archive import Archived
    from dcptool.ops.prune.plan import PrunePlan


@click.command(epilog="Example: dcptool prune ckpt --keep 3 --archive-every 1000 --dry-run")
@click.argument("run_dir", type=options.PATH)
@click.option("--keep", type=click.IntRange(1), required=True, help="How many of the newest complete steps to keep.")
@click.option("--archive-every", type=click.IntRange(1), metavar="STEPS", help="Keep every multiple of this too.")
@click.option(
    "--archive-to", type=options.PATH, metavar="DIR", help="Copy these into this folder or URL, then delete them here."
)
@click.option("--threads", type=click.IntRange(1), help="Parts read, and written, at the same time for that.")
@click.option("--include-incomplete", is_flag=True, help="Delete incomplete, damaged and unmarked steps too …")
@click.option("--older-than", type=options.DURATION, help="… that were last written so long ago.")
@click.option("--deep", is_flag=True, help="Check every byte of the newest step that is kept before anything goes.")
@click.option("--finite", is_flag=True, help="… and that it holds neither NaN nor infinity.")
@options.by
@options.require_parts
@options.require_marker
@options.marker
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--yes", is_flag=True, help="Copy and delete without asking.")
@options.output
def prune(
    run_dir: str,
    keep: int,
    archive_every: int | None,
    archive_to: str | None,
    threads: int | None,
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

    With --archive-to multiples of --archive-every are copied there as dcptool copy does, and deleted here only once
    they are proven to be there and nothing else keeps them.

    Exits 1 if something was not archived or deleted after all.
    """
    import time

    from dcptool.cli.progress import bar
    from dcptool.ops.prune.archive import archive_steps
    from dcptool.ops.prune.delete import delete_steps
    from dcptool.ops.prune.prune import make_plan
    from dcptool.ops.verify.verdict import VerifyOptions
    from dcptool.render.prune import archived_lines, deleted_lines, plan_json, plan_text

    if include_incomplete != (older_than is not None):
        raise click.UsageError("--include-incomplete and --older-than go together: say how old they must be")
    if (archive_to is not None or threads is not None) and not (archive_to and archive_every):
        raise click.UsageError("--archive-to needs --archive-every, which says what goes there")
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
        archive_to=archive_to or "",
        include_incomplete=include_incomplete,
        older_than=older_than or 0.0,
        now=time.time(),
    )
    proof = options.level_of(True, deep or finite)
    archived = archive_steps(plan, meant, dry_run=True, proof=proof, threads=threads) if archive_to else None
    plan = plan.keeping(archived.left) if archived else plan
    options.say(plan_text(plan, proof, finite, archived))
    deleted = None
    asked = question(plan, archived)
    if asked and (yes or (ask and click.confirm(asked))):
        if archive_to:
            with bar() as progress:
                expect = progress.expect if progress else None
                say = options.noting()
                archived = archive_steps(
                    plan, meant, proof=proof, threads=threads, progress=progress, expect=expect, say=say
                )
            plan = plan.keeping(archived.left)
        with bar() as progress:
            deleted = delete_steps(plan, meant, proof=proof, finite=finite, archived=archived, progress=progress)
    if options.wants_json():
        options.print_json(plan_json(plan, deleted, archived))
    elif deleted:
        lines = archived_lines(archived) if archived else []
        options.say("\n".join(["", *lines, *deleted_lines(deleted)]))
    elif not plan.removed:
        options.say("\nnothing to delete")
    return 1 if (archived and not archived.good) or (deleted and deleted.refused) else 0


def question(plan: PrunePlan, looked: Archived | None) -> str:
    """Return what is to be agreed to, "" if there is nothing to do."""
    n_copies = sum(step.state == "planned" for step in looked.steps) if looked else 0
    steps = f"delete {len(plan.removed)} of {len(plan.decisions)} steps?" if plan.removed else ""
    if not n_copies:
        return steps
    copies = f"copy {n_copies} of {len(plan.decisions)} steps to {plan.archive}"
    return f"{copies}, then {steps}" if steps else f"{copies}?"
