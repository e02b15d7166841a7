"""What a reshard did, or would do, as text and as JSON."""

from __future__ import annotations

from typing import Any

from dcptool.ops.reshard.reshard import Resharded
from dcptool.render.text import table
from dcptool.words import nbytes, plural, shown

SCHEMA = 1
MAX_ROWS = 16


def resharded_line(done: Resharded) -> str:
    """Return the line that ends a reshard."""
    rate = done.nbytes_out / max(done.seconds, 1e-9)
    sizes = f"{nbytes(done.nbytes)} of values, {nbytes(done.nbytes_out)} out"
    times = f"{done.seconds:.2f} s, {nbytes(int(rate))}/s"
    return f"{_counts(done)} for {plural(done.world_size, 'rank')}, {sizes}, {times}: {shown(done.path)}"


def plan_text(done: Resharded) -> str:
    """Return the plan of a dry run: bytes of each rank, the balance, and what it takes."""
    sizes = done.rank_nbytes
    rows = [[f"{rank}", f"{size:,}"] for rank, size in enumerate(sizes[:MAX_ROWS])]
    if len(sizes) > MAX_ROWS:
        rows[-2:] = [["…", "…"], [f"{len(sizes) - 1}", f"{sizes[-1]:,}"]]
    mean = sum(sizes) / len(sizes)
    most = max(sizes)
    balance = f"the largest rank has {most / mean:.2f} times the mean" if mean else "nothing to write"
    idle = sum(not size for size in sizes)
    return "\n".join(
        [
            table(["rank", "bytes"], rows, right=(0, 1)),
            "",
            f"{shown(done.path)} would be {nbytes(done.nbytes_out)} for {plural(done.world_size, 'rank')}: "
            f"{_counts(done)}",
            f"balance: {balance}" + (f"; {plural(idle, 'rank')} idle" if idle else ""),
            f"{plural(done.workers, 'worker process')} would share the work, with up to "
            f"{nbytes(done.memory_nbytes)} of memory for buffers in each",
        ]
    )


def resharded_json(done: Resharded) -> dict[str, Any]:
    """Return a reshard as plain data; the layout is documented in docs/json.md."""
    lost = [{"fqn": fqn, **found._asdict()} for fqn, found in done.lost.items()]
    return {"schema": SCHEMA, **done._asdict(), "lost": lost, "nbytes_out": done.nbytes_out}


def _counts(done: Resharded) -> str:
    counts = plural(done.n_tensors, "tensor")
    return f"{counts}, {plural(done.n_objects, 'object')}" if done.n_objects else counts
