"""What each process of a conversion does: the first plans, all write files, the first checks, seals and publishes.

Knows nothing of who started the processes, or how they find each other: that is `groups`.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from dcptool.checkpoint.casting import NO_LOSS, Loss
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.copying.engine import CopyReport, copy
from dcptool.copying.outputs import OutputFile, Wanted
from dcptool.copying.pool import MAX_THREADS
from dcptool.copying.publishing import Target, prepare, require_place
from dcptool.errors import LayoutError, UnsupportedError, WorkerError
from dcptool.formats.detect import open_checkpoint
from dcptool.groups.audience import Audience, NotedStorage
from dcptool.groups.group import ProcessGroup
from dcptool.groups.sharing import Contribution, agree, contribute, require_going, values_of
from dcptool.groups.torchrun import under_torchrun
from dcptool.ops.carrying import carry, require_same_bytes
from dcptool.ops.convert.plan import ConvertOptions, ConvertPart, ConvertPlan, lay_out_again, make_plan
from dcptool.ops.convert.result import Conversion, summarize_conversion
from dcptool.ops.guards import LEAVES_OUT, require_equal, require_proven, require_same
from dcptool.ops.sources import open_again
from dcptool.storage import Creator, LocalStorage, Progress, is_url, join, storage_at

NOT_SHARED = "the processes do not see the same checkpoint: is it on storage that all of them share?"

Reports = dict[str, CopyReport]
"""What was copied of each part."""


class _Instructions(NamedTuple):
    """What the first process tells the others.

    Attributes:
        opens: what to open, and where the step is below it.
        target: where to write.
        to: the format.
        parts: of each part by its name how it shall be, and which entries were left out as damaged.
        shares: of each process by part the files it writes, with their bytes.
    """

    opens: tuple[str, str]
    target: str
    to: str
    parts: Mapping[str, tuple[Wanted, frozenset[str]]]
    shares: Sequence[Mapping[str, Mapping[str, int]]]


def convert_alone(
    source: str, target: str, to: str, options: ConvertOptions, progress: Progress | None, began: float
) -> Conversion:
    """Convert with this process alone; arguments and errors as of `convert_member`."""
    audience = Audience(progress)
    with ExitStack() as stack:
        output = _Output(1, audience, options, stack, lambda: None)
        orders = output.begin(source, target, to)
        written = _write(0, 1, orders, output, options, audience, lambda: None)
        return output.finish([Contribution(written, ())], began)


def convert_member(
    group: ProcessGroup,
    audience: Audience,
    source: str,
    target: str,
    to: str,
    options: ConvertOptions,
    began: float,
) -> Conversion:
    """Take part in a conversion; all members return the same, or raise the same.

    Args:
        group: of all members.
        audience: told what this member does.
        source, target, to, options: as of `convert.convert`, the same for all.
        began: `time.perf_counter()` at the start.

    Raises:
        DcptoolError: as `convert.convert`, and what a member met; nothing is published.
    """
    with ExitStack() as stack:
        output = _Output(group.size, audience, options, stack, group.halt)
        orders = agree(group, lambda: output.begin(source, target, to))
        planned = output if group.rank == 0 else None

        def part() -> Reports:
            return _write(group.rank, group.size, orders, planned, options, audience, lambda: require_going(group))

        written = contribute(group, audience, part)
        return agree(group, lambda: output.finish(written, began))


class _Output:
    """What the first process does beside writing its files; the others call nothing of it.

    Attributes:
        plan: what is done, once begun.
        place: where output goes, once begun.
    """

    plan: ConvertPlan
    place: Target

    def __init__(
        self,
        n_members: int,
        audience: Audience,
        options: ConvertOptions,
        stack: ExitStack,
        halt: Callable[[], None],
    ) -> None:
        self._n_members, self._audience, self._options = n_members, audience, options
        self._stack, self._halt = stack, halt

    def begin(self, source: str, target: str, to: str) -> _Instructions:
        """Plan, and make the place, which goes again with the stack if anything fails."""
        plan = self.plan = make_plan(source, target, to, self._options)
        if plan.is_file and self._n_members > 1 and not under_torchrun():
            raise UnsupportedError(f"{plan.path} is one file, which one process writes: leave out --workers")
        require_place(plan.path, plan.is_file, plan.nbytes, self._options.overwrite, plan.sources)
        read = plan.parts[0].checkpoint.path if len(plan.parts) == 1 else plan.sources[0]
        self.place = self._stack.enter_context(
            prepare(plan.path, plan.is_file, plan.nbytes, self._options.overwrite, read)
        )
        self._stack.push(lambda kind, *_: self._failed() if kind else None)  # before what was written is removed
        last = [*(file.name for part in plan.parts for file in part.output.last), *(file.name for file in plan.marker)]
        self._audience.writing(self.place.written, tuple(reversed(last)))
        parts = {part.name: (part.wanted._replace(merged=None), part.left_out) for part in plan.parts}
        return _Instructions(plan.opens, self.place.written, to, parts, shares_of(plan.parts, self._n_members))

    def _failed(self) -> None:
        """Let the others stop, and have removed what was made here, not what another run may have made."""
        self._halt()
        self.place.note(self._audience.names)

    def named(self, files: Sequence[OutputFile]) -> list[OutputFile]:
        """Return files under the names they are written under."""
        return self.place.named(files) if self.plan.is_file else list(files)

    def storage(self) -> Creator:
        """Return where files are made."""
        return NotedStorage(self.place.storage, self._audience) if is_url(self.place.written) else self.place.storage

    def finish(self, written: Sequence[Contribution[Reports]], began: float) -> Conversion:
        """Look at what all have written, and complete it."""
        for one in written:
            self.place.note(one.made)
        reports = values_of(written)
        plan, options = self.plan, self._options
        threads = threads_of(options, self._n_members)
        for part in plan.parts:
            of_part = [found[part.name] for found in reports if part.name in found]
            require_proven(part.checkpoint, of_part, threads, LEAVES_OUT)
        self._seal(threads)
        self._audience.published()
        unproven: dict[str, set[str]] = {}
        lost: dict[str, Loss] = {}
        for name, report in (pair for found in reports for pair in found.items()):
            unproven.setdefault(name, set()).update(report.unproven)
            for fqn, loss in report.lost.items():
                lost[fqn] = lost.get(fqn, NO_LOSS).plus(loss)
        seconds = time.perf_counter() - began
        return summarize_conversion(plan, options, seconds, True, self._n_members, threads, unproven, lost)

    def _seal(self, threads: int) -> None:
        """Write what makes the output complete, look at it, and give it its name."""
        plan, place, following = self.plan, self.place, self.plan.following
        storage, progress = self.storage(), self._audience.progress
        carry(following, [file for file in following.carried if file.name != following.last], storage, progress)
        for part in plan.parts:
            for file in part.output.last:
                copy(part.checkpoint, [self.named([file])], storage, 1, progress)
        carry(following, [file for file in following.carried if file.name == following.last], storage, progress)
        for file in plan.marker:
            copy(plan.parts[0].checkpoint, [self.named([file])], storage, 1, progress)
        for part in plan.parts:
            written = join(place.written, part.place) if part.place else place.written
            part.output.validate(written)
            require_same(place, part.output.files, part.selection, part.place)
            if self._options.check:
                require_equal(part.checkpoint, open_checkpoint(written), part.selection, threads)
        if self._options.check:
            require_same_bytes(following, place.storage)
        place.publish(self._options.overwrite)


def threads_of(options: ConvertOptions, n_members: int) -> int:
    """Return how many threads each process has: those on one machine share its processors."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", n_members)) if under_torchrun() and n_members > 1 else n_members
    return options.threads or max(1, min((os.cpu_count() or 1) // max(here, 1), MAX_THREADS))


def shares_of(parts: Sequence[ConvertPart], n_members: int) -> list[dict[str, dict[str, int]]]:
    """Give each process files, about as many bytes as the others: the largest first, to who has least."""
    shares: list[dict[str, dict[str, int]]] = [{} for _ in range(n_members)]
    files = [(part.name, file) for part in parts for file in part.output.files]
    loads = [(0, member) for member in range(n_members)]
    for name, file in sorted(files, key=lambda found: -found[1].nbytes):
        load, member = heapq.heappop(loads)
        shares[member].setdefault(name, {})[file.name] = file.nbytes
        heapq.heappush(loads, (load + file.nbytes, member))
    return shares


def _write(
    rank: int,
    size: int,
    orders: _Instructions,
    output: _Output | None,
    options: ConvertOptions,
    audience: Audience,
    require_on: Callable[[], None],
) -> Reports:
    """Write this process's files; `require_on` raises where it need not go on."""

    def told(nbytes: int) -> None:
        require_on()
        audience.progress(nbytes)

    storage = output.storage() if output else _storage(orders.target, audience)
    reports = {}
    try:
        for name, names in orders.shares[rank].items():
            checkpoint, files = _part(orders, name, output, options)
            mine = [file for file in files if file.name in names]
            if {file.name: file.nbytes for file in mine} != names:
                raise LayoutError(NOT_SHARED)
            groups = [[file] for file in (output.named(mine) if output else mine)]
            reports[name] = copy(checkpoint, groups, storage, threads_of(options, size), told, shared=True)
        return reports
    except MemoryError:
        if size == 1:
            raise
        memory = f"rank {rank} of {size} has no memory left; --threads 1 and fewer --workers need less"
        raise WorkerError(memory) from None


def _part(
    orders: _Instructions, name: str, output: _Output | None, options: ConvertOptions
) -> tuple[Checkpoint, Sequence[OutputFile]]:
    """Return a part and its files: as planned here, or laid out once more as the first process planned them."""
    if output:
        planned = next(part for part in output.plan.parts if part.name == name)
        return planned.checkpoint, planned.output.files
    path, folder = orders.opens
    checkpoint = open_again(path, options.also, "/".join(filter(None, (folder, name))))
    return checkpoint, lay_out_again(checkpoint, name, orders.to, *orders.parts[name], options).files


def _storage(target: str, audience: Audience) -> Creator:
    return NotedStorage(storage_at(target), audience) if is_url(target) else LocalStorage(target)
