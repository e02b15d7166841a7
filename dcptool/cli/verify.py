"""`dcptool verify`."""

from __future__ import annotations

import os
from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool verify --deep ckpt/step_500")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=options.PATH)
@click.option("--records", is_flag=True, help="Also look into the headers of every stored item.")
@click.option("--deep", is_flag=True, help="Also read every byte and check every checksum.")
@click.option(
    "--load", is_flag=True, help="Also load everything with the installed torch: the check before an upgrade."
)
@click.option("--trust", is_flag=True, help="With --load: load objects too, which executes their pickles.")
@options.finite
@options.require_marker
@options.marker
@click.option(
    "--grace",
    type=options.DURATION,
    default="1h",
    show_default=True,
    help="A folder without metadata that was written to this lately counts as being saved.",
)
@options.by
@options.also
@options.threads
@options.output
def verify(paths: tuple[str, ...], records: bool, deep: bool, load: bool, trust: bool, **chosen: Any) -> int:
    """Tell whether checkpoints are whole and undamaged.

    PATH is a checkpoint, or a run directory (a row per step, then details). Without options this reads the metadata
    and the sizes of files: seconds, whatever the size.

    Exits 1 unless every checkpoint is complete, with --finite also if one holds NaN or infinity; in a run directory a
    step may be in progress. Of several paths one that cannot be opened stops none of the others; then it exits 3.

    Under torchrun, with --records, --deep or --finite, its processes share the reading, on one machine or several.
    """
    from dcptool.cli.progress import bar
    from dcptool.errors import DcptoolError
    from dcptool.groups.torchrun import speaks_for_all, under_torchrun
    from dcptool.ops.verify.together import verify_together
    from dcptool.ops.verify.verdict import VerifyOptions
    from dcptool.ops.verify.verify import verify as verify_path
    from dcptool.render.verify import verify_json, verify_text
    from dcptool.words import shown

    options.require_use_of_threads(
        chosen["threads"], records or deep or chosen["finite"], "--records, --deep and --finite"
    )
    if trust and not load:
        raise click.UsageError("--trust only means something with --load")
    if load and chosen["also"]:
        raise click.UsageError("--load needs all files in one folder; --also only reads them as if they were")
    meant = VerifyOptions(options.level_of(records, deep), **chosen)
    together = under_torchrun() and (records or deep or chosen["finite"])
    if together and (load or len(paths) > 1):
        raise click.UsageError("under torchrun: one PATH, without --load")
    if together:  # torch's own lines on lost connections, with C++ stacks, would bury the one that says what happened
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    documents = []
    code = 0
    for path in paths:
        try:
            with bar() as progress:
                if together:
                    report = verify_together(path, meant, progress)
                else:
                    report = verify_path(path, meant, progress, load=load, trust=trust)
        except DcptoolError as error:
            if len(paths) == 1:
                raise
            click.echo(f"error: {shown(str(error))}", err=True)
            documents.append({"path": path, "error": str(error)})
            code = 3
            continue
        code = max(code, int(not report.good))
        if not speaks_for_all():
            continue
        if options.wants_json():
            documents.append(verify_json(report))
        else:
            options.say(verify_text(report, options.width()) + "\n" * (path is not paths[-1]))
    if options.wants_json() and speaks_for_all():
        options.print_json(documents[0] if len(paths) == 1 else {"schema": 1, "reports": documents})
    return code
