"""`dcptool latest`."""

from __future__ import annotations

from typing import Any

import click

from dcptool.cli import options


@click.command(epilog='Example: torchrun train.py --resume "$(dcptool latest ckpt)"')
@click.argument("run_dir", type=options.PATH)
@click.option("--records", is_flag=True, help="Also look into the headers of every item of the candidates.")
@click.option("--deep", is_flag=True, help="Read every byte of the candidates and check every checksum.")
@options.finite
@click.option("--weights", is_flag=True, help="Take a step that was saved for its weights alone too.")
@click.option("--skip-unreadable", is_flag=True, help="Pass over a step that cannot be read, which may be whole.")
@options.by
@options.also
@options.require_marker
@options.require_parts
@options.marker
@options.output
def latest(run_dir: str, records: bool, deep: bool, weights: bool, skip_unreadable: bool, **chosen: Any) -> int:
    """Print the path of the newest complete checkpoint of a run that a job can resume from.

    Steps are looked at newest first, by what is in them, whatever pointer files say. Newest is what was saved last: by
    the markers that saves leave, else the highest number. Why newer ones were passed over goes to stderr.

    Exits 1 if no step is complete (and finite, with --finite), or there is none; 3 if the newest cannot be read.
    """
    from dcptool.ops.latest import find_latest
    from dcptool.ops.verify.verdict import VerifyOptions
    from dcptool.render.latest import latest_json, latest_lines

    meant = VerifyOptions(options.level_of(records, deep), **chosen)
    found = find_latest(run_dir, meant, weights=weights, skip_unreadable=skip_unreadable)
    if not options.is_quiet():
        for line in latest_lines(found):
            click.echo(line, err=True)
        if options.wants_json():
            options.print_json(latest_json(found))
        elif found.path:
            click.echo(found.path)
    return 0 if found.path else 1
