"""Convert: open, select, lay out, copy, look at the result, publish. What all conversions have in common."""

from __future__ import annotations

import os
import time
from functools import partial

from dcptool.copying.publishing import require_place
from dcptool.groups.together import require_gloo, work_together
from dcptool.ops.convert.member import convert_alone, convert_member, threads_of
from dcptool.ops.convert.plan import ConvertOptions, make_plan, options_problem
from dcptool.ops.convert.result import Conversion, summarize_conversion
from dcptool.storage import Progress

__all__ = ["Conversion", "ConvertOptions", "convert", "convert_together", "options_problem"]

DEFAULTS = ConvertOptions()


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    options: ConvertOptions = DEFAULTS,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint of any format to another one.

    Args:
        source: local path or URL of a checkpoint, or of a step of several DCP checkpoints: each is converted into the
            same place below the target, which is a folder then.
        target: local path or URL of the output: a file for "torch"; a file if it ends in `.safetensors`, else a folder,
            for "safetensors"; a folder for "dcp".
        to: "safetensors", "torch" or "dcp".
        options: see `ConvertOptions`; with several workers this process is forked, so call it before it has threads.
        dry_run: plan only, write nothing; refuses what the conversion itself would refuse without reading tensors.
        progress: told the bytes as they are written.

    Returns:
        What was written.

    Raises:
        ItemError: the source is damaged; the message names tensor, file and bytes. Nothing is written.
        LayoutError: nothing is selected, names collide, or a tensor has holes.
        OutputExistsError: there is something at the target.
        UnsupportedError: the format cannot hold something that is selected.
        StorageError: the target cannot be written.
        WorkerError: one of several processes was lost.

    Example:
        >>> dcptool.convert("ckpt/step_500", "model.safetensors", "safetensors", ConvertOptions(keys=("model.*",)))
    """
    began = time.perf_counter()
    workers = options.workers or 1
    path, output = os.fspath(source), os.fspath(target)
    if dry_run:
        plan = make_plan(path, output, to, options)
        require_place(plan.path, plan.is_file, plan.nbytes, options.overwrite, plan.sources)
        threads = threads_of(options, workers)
        return summarize_conversion(plan, options, time.perf_counter() - began, False, workers, threads)
    if workers == 1:
        return convert_alone(path, output, to, options, progress, began)
    return convert_together(path, output, to, options, progress)


def convert_together(
    source: str, target: str, to: str, options: ConvertOptions, progress: Progress | None = None
) -> Conversion:
    """Convert with several processes: those that torchrun started, each of which calls this; else forked ones.

    Args:
        source, target, to, options: as of `convert`, the same for all, on storage that they share.
        progress: told the bytes that all of them write; under torchrun those of this one.

    Returns:
        The same on all of them.

    Raises:
        DcptoolError: as `convert`; under torchrun what one raised, on all.
        WorkerError: a process was lost.
    """
    began = time.perf_counter()
    require_gloo("convert with several processes", "one alone does not")
    work = partial(convert_member, source=source, target=target, to=to, options=options, began=began)
    return work_together(options.workers or 1, work, options.timeout, progress, publishes=True)
