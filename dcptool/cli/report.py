"""`dcptool report`."""

from __future__ import annotations

from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool report --deep ckpt/step_500 -o report.html")
@click.argument("path", type=options.PATH)
@click.option("-o", "--output", required=True, metavar="FILE", type=options.PATH, help="The page to write.")
@click.option("--records", is_flag=True, help="Findings as of `verify --records`.")
@click.option("--deep", is_flag=True, help="Findings as of `verify --deep`: read every byte, check every checksum.")
@options.selection
@click.option("--overwrite", is_flag=True, help="Replace a page that is there, once the new one is complete.")
@options.threads
@options.output
def report(path: str, output: str, records: bool, deep: bool, threads: int | None, **chosen: Any) -> int:
    """Write one self-contained HTML page on a checkpoint.

    It shows what verify finds, bytes by group and by file, and a map of every tensor's shards with their places. It
    works from a file, loads nothing, and can be sent around.

    Exits 1 if the checkpoint is not complete; the page is written all the same.
    """
    import gc

    gc.disable()  # nothing here makes cycles worth the time that looking for them takes
    from dcptool.cli.progress import bar
    from dcptool.ops.report.report import write_report
    from dcptool.render.report import report_json, report_line

    if output == "-":
        raise click.UsageError("-o names a file, such as report.html; the page is not written to stdout")
    options.require_use_of_threads(threads, records or deep, "--records and --deep")
    with bar() as progress:
        level = options.level_of(records, deep)
        done = write_report(path, output, level=level, threads=threads, **chosen, progress=progress)
    options.answer(lambda: report_json(done), lambda: report_line(done), done.notes)
    return 0 if done.good else 1
