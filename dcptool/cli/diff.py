"""`dcptool diff`."""

from __future__ import annotations

from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool diff ckpt/step_500 model.safetensors --strip-prefix-a model.")
@click.argument("a", metavar="A", type=options.PATH)
@click.argument("b", metavar="B", type=options.PATH)
@click.option("--layout", is_flag=True, help="Also compare how tensors are cut into chunks.")
@click.option("--rtol", type=options.TOLERANCE, default=0.0, metavar="R", help="Take |a - b| up to R·|b| …")
@click.option("--atol", type=options.TOLERANCE, default=0.0, metavar="T", help="… plus T as equal; bitwise without.")
@click.option("--nan-equal", is_flag=True, help="Take any NaN as equal to any other.")
@click.option("--strip-prefix-a", default="", metavar="P", help="Take this off the front of A's names.")
@click.option("--strip-prefix-b", default="", metavar="P", help="Take this off the front of B's names.")
@options.selection
@options.threads
@options.output
def diff(a: str, b: str, **chosen: Any) -> int:
    """Compare two checkpoints of any formats, layouts and numbers of ranks.

    Compared are names, kinds, shapes, dtypes, all values bit for bit, and objects, in constant memory. With --keys and
    --exclude an entry counts as named if it is under its name on either side.

    Exits 1 if something differs or cannot be read.
    """
    from dcptool.cli.progress import bar
    from dcptool.ops.diff.diff import DiffOptions, compare
    from dcptool.render.diff import diff_json, diff_text

    with bar() as progress:
        report = compare(a, b, DiffOptions(**chosen), progress=progress)
    options.answer(lambda: diff_json(report), lambda: diff_text(report, options.width()))
    return 0 if report.equal else 1
