"""Write the report on a checkpoint: look, describe, render, publish."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.selection import globs, require_match, unmatched
from dcptool.checks.check import Level
from dcptool.copying.outputs import OutputFile
from dcptool.copying.publishing import prepare, require_place
from dcptool.errors import OutputExistsError
from dcptool.formats.detect import found_below, open_checkpoint
from dcptool.ops.guards import leftover_notes, require_no_part
from dcptool.ops.inspect.summary import summarize_checkpoint
from dcptool.ops.replacing import replaced
from dcptool.ops.report.document import describe
from dcptool.ops.report.html import to_html
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.storage import Progress, base_name, is_url, join, write_pieces

WRITE_NBYTES = 1 << 20


class WrittenReport(NamedTuple):
    """What was written.

    Attributes:
        path: of the page.
        nbytes: its size.
        checkpoint: path of the checkpoint it shows.
        state: what `verify` says of that.
        n_tensors, n_objects, n_chunks, n_files: how many it shows.
        n_errors, n_warnings: findings in it.
        seconds: wall time.
        notes: worth knowing, one sentence each.
    """

    path: str
    nbytes: int
    checkpoint: str
    state: State
    n_tensors: int
    n_objects: int
    n_chunks: int
    n_files: int
    n_errors: int
    n_warnings: int
    seconds: float
    notes: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether the checkpoint is complete."""
        return self.state is State.COMPLETE


def write_report(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    level: Level = Level.METADATA,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> WrittenReport:
    """Write one self-contained HTML page on a checkpoint: findings, bytes by group and file, maps of all shards.

    Args:
        path: local path or URL of a checkpoint.
        target: local path or URL of the page; not inside the checkpoint.
        keys, exclude: names or shell globs of the entries to show, and to leave out.
        level: how closely the findings look; see `verify`.
        overwrite: replace a page that is there, once the new one is complete.
        threads: how many read at the same time, from level RECORDS on.
        progress: told the number of bytes as they are read.

    Raises:
        CheckpointNotFoundError, MetadataError, UnsupportedError, StorageError: as `dcptool.open`.
        LayoutError: `keys` match nothing.
        OutputExistsError: there is something at the target.

    Example:
        >>> dcptool.write_report("ckpt/step_500", "report.html").state.value
        'complete'
    """
    began = time.perf_counter()
    source, out = os.fspath(path), os.fspath(target)
    _require_page(out)
    require_place(out, True, 0, overwrite, (source,))  # before all is looked at, which takes time
    if overwrite:
        replaced(out, "page")
    checkpoint = open_checkpoint(source)
    require_no_part(out, checkpoint, "checkpoint")
    keys, exclude = globs(keys), globs(exclude)
    require_match([checkpoint], keys, exclude)
    verdict = judge(checkpoint.path, VerifyOptions(level=level, threads=threads), progress, checkpoint)
    summary = summarize_checkpoint(checkpoint, keys, exclude, chunks=False, depth=1)
    created = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    data = to_html(describe(checkpoint, summary, verdict, created)).encode("utf-8")
    with prepare(out, True, len(data), overwrite, source) as place:
        [file] = place.named([OutputFile(base_name(out), len(data), ())])
        pieces = (data[start : start + WRITE_NBYTES] for start in range(0, len(data), WRITE_NBYTES))
        write_pieces(place.storage, file.name, pieces)
        place.publish(overwrite)
    counts = Counter(finding.severity for finding in verdict.findings)
    return WrittenReport(
        out,
        len(data),
        checkpoint.path,
        verdict.state,
        len(summary.tensors),
        len(summary.objects),
        sum(tensor.n_chunks for tensor in summary.tensors),
        len(summary.files),
        counts[Severity.ERROR],
        counts[Severity.WARNING],
        time.perf_counter() - began,
        (*found_below(source, checkpoint), *unmatched(checkpoint, keys, exclude), *leftover_notes(out)),
    )


def _require_page(path: str) -> None:
    """Refuse a folder as the name of the page."""
    if path.endswith("/") or (not is_url(path) and os.path.isdir(path.removeprefix("file://"))):
        raise OutputExistsError(f"{path} is a folder; name the page in it, such as {join(path, 'report.html')}")
