"""Reshard: from the layout of one world size or mesh to that of another, as a job of that size would have saved it."""

from __future__ import annotations

import os
import time
from functools import partial

from dcptool.copying.publishing import require_place
from dcptool.groups.together import require_gloo, work_together
from dcptool.groups.torchrun import under_torchrun
from dcptool.ops.replacing import replaced
from dcptool.ops.reshard.member import read_paths, reshard_member
from dcptool.ops.reshard.plan import ReshardOptions, make_plan, options_problem
from dcptool.ops.reshard.result import Resharded, summarize_plan
from dcptool.storage import Progress, is_url, locate

__all__ = ["ReshardOptions", "Resharded", "options_problem", "reshard"]

DEFAULTS = ReshardOptions()


def reshard(
    source: str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] | None = None,
    options: ReshardOptions = DEFAULTS,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Resharded:
    """Write a checkpoint as a job with another number of ranks, or another mesh, would have saved it.

    Works as a gloo process group: of forked processes on this machine, or of those torchrun started, which then share
    the work. The number of target ranks never means so many processes.

    Args:
        source: path or URL of a checkpoint of any format; None for the one in the current folder, or the newest
            complete one of the run in or below it.
        target: path or URL of the output folder; None for `<RUN>-ws<N>/<STEP>` beside the run directory.
        options: see `ReshardOptions`.
        dry_run: plan only; needs no torch and writes nothing.
        progress: told the bytes as they are written.

    Returns:
        What was written, or would be; the same on every process under torchrun.

    Raises:
        ItemError: the source is damaged; the message names tensor, file and bytes. Nothing is published.
        LayoutError: what is wanted cannot be laid out; the message names the tensor.
        OutputExistsError: there is something at the target.
        StorageError: the target cannot be written.
        UnsupportedError: torch is not installed.
        WorkerError: a process was lost.

    Example:
        >>> dcptool.reshard("ckpt/step_500", "ckpt-ws48/step_500", ReshardOptions(world_size=48))
    """
    began = time.perf_counter()
    source = None if source is None else os.fspath(source)
    target = None if target is None else os.fspath(target)
    if dry_run:
        plan = make_plan(source, target, options)
        require_place(plan.target, False, plan.nbytes, options.overwrite, read_paths(plan.source, options))
        replaces = replaced(plan.target, "dcp") if options.overwrite else ""
        workers = _n_workers(options, plan.n_ranks)
        return summarize_plan(plan, options, workers, time.perf_counter() - began, False, replaces)
    if not under_torchrun():
        _require_paths(source, target, options)
    require_gloo("reshard", "--dry-run does not")
    work = partial(reshard_member, source=source, target=target, options=options, began=began)
    n_workers = _n_workers(options, options.world_size or os.cpu_count() or 1)
    return work_together(n_workers, work, options.timeout, progress, publishes=True)


def _require_paths(source: str | None, target: str | None, options: ReshardOptions) -> None:
    """Refuse local paths that are wrong at first sight, before torch is imported, which takes seconds.

    Raises:
        CheckpointNotFoundError: there is no source.
        OutputExistsError, StorageError, UnsupportedError: the output cannot go there.
    """
    for path in (source, options.like, *options.also):
        if path is not None and not is_url(path):
            locate(path)
    if target is not None and not is_url(target):
        sources = read_paths(source, options) if source is not None else ()
        require_place(target, False, 0, options.overwrite, sources)
        if options.overwrite:
            replaced(target, "dcp")


def _n_workers(options: ReshardOptions, n_ranks: int) -> int:
    return options.workers or max(1, min(n_ranks, os.cpu_count() or 1))
