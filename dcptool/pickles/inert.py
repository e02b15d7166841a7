"""Load a pickle into a graph of stand-ins: nothing is imported, nothing is called.

Identity and cycles are kept. Which names are *understood* is the reader's decision: it may pass functions of its own
for some of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from dcptool.errors import MetadataError, RunsCodeError
from dcptool.pickles.calls import Calls
from dcptool.pickles.machine import Machine, NotKeptError, Take
from dcptool.pickles.walk import imports

_PICKLES_OF_TORCH = 5
"""Magic number, version, system, the object, keys of its storages. Source: torch 2.13, serialization._legacy_save."""


def load(
    data: bytes,
    understood: Mapping[str, Callable[..., Any]] | None = None,
    calls: Calls | None = None,
    take: Take | None = None,
) -> Any:
    """Load one pickle into stand-ins.

    Args:
        data: the pickle; bytes after its STOP are ignored, as `pickle` does.
        understood: functions that are called in place of some names, by `module.name`.
        calls: filled with what the pickle would have imported and called.
        take: may take runs of equal records at once, leaving what it likes in their place.

    Returns:
        The root of the graph.

    Raises:
        UnsafePickleError: reading it would exhaust memory, the stack or time.
        MetadataError: the bytes are no whole pickle; the message gives the byte.
        RunsCodeError: they are none, but `pickle` runs code before it finds out.
    """
    calls = calls or Calls()
    try:
        return _scanned(Machine(data, understood or {}, take, calls), calls)
    except NotKeptError:
        return load(data, understood, calls)


def scan(data: bytes, calls: Calls) -> int:
    """Note what the first pickle in some bytes runs, and return the byte after it; raises as `load`."""
    machine = Machine(data, {}, None, calls)
    _scanned(machine, calls)
    return machine.position


def load_stream(data: bytes, calls: Calls) -> tuple[list[Any], int]:
    """Load the pickles that a stream of torch.save before 1.6 begins with, as `load` does one.

    Returns:
        Magic number, version, system, the object, the keys of its storages; and the byte after them.
    """
    found, position = [], 0
    for _ in range(_PICKLES_OF_TORCH):
        machine = Machine(data[position:], {}, None, calls)
        found.append(_scanned(machine, calls))
        position += machine.position
    return found, position


def _scanned(machine: Machine, calls: Calls) -> Any:
    try:
        root = _run(machine, calls)
        while calls.nested:
            _read_through(calls.nested.pop(), calls)
        return root
    except MetadataError as error:
        if machine.data.startswith(b"\x80"):  # `pickle` may know what the machine does not, and run what follows
            calls.add_names(imports(machine.data))
        if calls.certain:
            raise RunsCodeError(error.message, calls.certain) from None
        raise


def _read_through(data: bytes, calls: Calls) -> None:
    """Note what the pickles of a stream of torch.save run; raw storages follow the last, their list of keys."""
    rest = data
    for _ in range(_PICKLES_OF_TORCH):
        machine = Machine(rest, {}, None, calls)
        _run(machine, calls)
        rest = rest[machine.position :]


def _run(machine: Machine, calls: Calls) -> Any:
    try:
        return machine.run()
    except IndexError:
        # Past the end of the data, or of the stack: which of the two, the position tells.
        if machine.position >= len(machine.data):
            raise MetadataError(f"the pickle is cut short: it ends at byte {len(machine.data)}") from None
        raise MetadataError(f"the pickle is damaged at byte {machine.position}: its stack is empty") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error) as error:
        if isinstance(error, MetadataError):
            raise
        what = f"{type(error).__name__}: {error}"[:200]
        raise MetadataError(f"the pickle is damaged at byte {machine.position}: {what}") from None
    finally:
        calls.add_names(machine.globals)
