"""What a rescue did, or would do, as text and as JSON."""

from __future__ import annotations

import shlex
from typing import Any

from dcptool.ops.rescue.rescue import Rescued
from dcptool.words import nbytes, plural, shown

SCHEMA = 1


def rescued_text(done: Rescued) -> str:
    """Return what was rebuilt from what, and what to do next."""
    which = done.metadata[0] if len(done.metadata) == 1 else plural(len(done.metadata), "metadata file")
    counts = f"{plural(done.n_tensors, 'tensor')}, {plural(done.n_objects, 'object')}"
    path = shown(shlex.quote(done.path))
    would = "would be rebuilt" if not done.published else "rebuilt"
    last = f"No marker was written. If you trust it: dcptool mark {path}" if done.published else "Nothing was written."
    return "\n".join(
        [
            f"{shown(done.path)}: {which} {would} after {shown(done.like)}",
            f"  {plural(len(done.files), 'file')}, {plural(done.n_items, 'item')} ({counts}) like the sibling's, "
            f"in the same order; every byte of {nbytes(done.nbytes)} read",
            f"  {last}",
        ]
    )


def rescued_json(done: Rescued) -> dict[str, Any]:
    """Return a rescue as plain data; the layout is documented in docs/json.md."""
    files = [{"name": name, "nbytes": size} for name, size in done.files]
    return {"schema": SCHEMA, **done._asdict(), "files": files}
