"""`dcptool convert`."""

from __future__ import annotations

import os
from typing import Any

import click

from dcptool.cli import options


@click.command(epilog="Example: dcptool convert --to safetensors --keys 'model.*' ckpt/step_500 model.safetensors")
@click.argument("source", metavar="SRC", type=options.PATH)
@click.argument("target", metavar="DST", type=options.PATH)
@click.option("--to", type=click.Choice(["torch", "safetensors", "dcp"]), required=True, help="Format of DST.")
@options.selection
@options.renaming
@click.option(
    "--max-shard-size",
    "max_shard_nbytes",
    type=options.BYTE_SIZE,
    default="5GB",
    show_default=True,
    help="Of safetensors in a folder.",
)
@click.option(
    "--nesting", type=click.Choice(["auto", "flat"]), default="auto", show_default=True, help="Of dicts in a .pt file."
)
@click.option("--objects", type=click.Choice(["keep", "skip", "error"]), help="What to do with what is no tensor.")
@click.option(
    "--no-side-files",
    "side_files",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Leave configuration, tokenizer and what else belongs to a folder.",
)
@options.torch
@options.also
@options.rank
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Processes that share the work, of a folder.  [default: 1]"
)
@options.threads
@click.option(
    "--timeout",
    type=options.DURATION,
    default="5m",
    show_default=True,
    help="Give up one of several processes that shows no sign of life for so long.",
)
@click.option(
    "--engine",
    type=click.Choice(["stream", "torch"]),
    default="stream",
    show_default=True,
    help="torch: its own slow code, whole model in memory.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Take also what runs code when it is loaded. With --engine torch: execute the pickles in SRC.",
)
@options.overwrite
@click.option("--dry-run", is_flag=True, help="Print the plan, write nothing.")
@options.check
@click.option("--skip-corrupt", is_flag=True, help="Check first, then leave damaged tensors out (exit 1).")
@options.output
def convert(
    source: str, target: str, to: str, engine: str, trust: bool, dry_run: bool, allow_overflow: bool, **chosen: Any
) -> int:
    """Convert a checkpoint to another format, at the speed of a copy and in constant memory.

    SRC is a checkpoint of any format; DST a file (--to torch; --to safetensors if it ends in .safetensors) or a folder.
    Every checksum of the source is checked on the way: one changed bit, and nothing is written. Of a step of several
    checkpoints each goes into the same place below DST, which is a folder then.

    With --workers a few processes share the files of a folder; under torchrun its processes do, on one machine or
    several.

    Exits 1 if --skip-corrupt left something out, or values became infinite, zero or subnormal in a cast.
    """
    from dcptool.checkpoint.selection import Renaming
    from dcptool.cli.progress import bar
    from dcptool.groups.torchrun import speaks_for_all, under_torchrun
    from dcptool.ops.convert.convert import ConvertOptions, convert_together, options_problem
    from dcptool.ops.convert.convert import convert as convert_path
    from dcptool.render.convert import conversion_json, conversion_line, left_out_lines, plan_text

    _require_meaning(to, target)
    together = under_torchrun() and not dry_run
    if engine == "torch" and together:
        raise click.UsageError("--engine torch is one process: not under torchrun")
    if engine == "torch":
        from dcptool.ops.convert.torch_engine import convert_with_torch, torch_problem
        from dcptool.words import shown

        problem = torch_problem(source, target, to)
        if problem:
            raise click.UsageError(problem)
        version = convert_with_torch(source, target, to, trust=trust, overwrite=chosen["overwrite"])
        document = {"schema": 1, "path": target, "torch": version}
        options.answer(lambda: document, lambda: f"torch {version} wrote {shown(target)}")
        return 0
    renaming = Renaming(**{name: chosen.pop(name) for name in Renaming._fields})
    meant = ConvertOptions(renaming=renaming, trust=trust, **chosen)
    if together or meant.workers:  # torch's own lines on lost connections would bury the one that says what happened
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if problem := options_problem(meant):
        raise click.UsageError(problem)
    with bar() as progress:
        if together:
            done = convert_together(source, target, to, meant, progress)
        else:
            done = convert_path(source, target, to, meant, dry_run=dry_run, progress=progress)
    if speaks_for_all():
        show = plan_text if dry_run else conversion_line
        options.answer(lambda: conversion_json(done), lambda: show(done), done.notes, left_out_lines(done))
    return 1 if done.corrupt or (done.lost and not allow_overflow) else 0


_ENGINE_TORCH_TAKES = {"source", "target", "to", "engine", "trust", "overwrite", "json", "quiet"}


def _require_meaning(to: str, target: str) -> None:
    """Refuse options that would do nothing together with the others.

    Raises:
        click.UsageError: naming the first of them.
    """
    ctx = click.get_current_context()
    given = click.core.ParameterSource.COMMANDLINE
    options_by_name = {param.name: param.opts[0] for param in ctx.command.params if param.name}
    names = {name: option for name, option in options_by_name.items() if ctx.get_parameter_source(name) is given}
    if ctx.params["engine"] == "torch":
        unused = [option for name, option in names.items() if name not in _ENGINE_TORCH_TAKES]
        if unused:
            raise click.UsageError(f"--engine torch converts everything as it is: leave out {', '.join(unused)}")
    options.require_dtype(ctx)
    if "torch" in names and to != "dcp":
        raise click.UsageError(f"--torch is about DCP, not --to {to}: leave it out")
    if "nesting" in names and to != "torch":
        raise click.UsageError(f"--nesting is about .pt files, not --to {to}: leave it out")
    if "max_shard_nbytes" in names and (to != "safetensors" or target.endswith(".safetensors")):
        raise click.UsageError("--max-shard-size is about safetensors in a folder: leave it out, or name a folder")
