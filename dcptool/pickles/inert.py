"""Load a pickle into a graph of stand-ins: nothing is imported, nothing is called.

Identity and cycles are kept. Which names are *understood* is the reader's decision: it may pass functions of its own
for some of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from dcptool.errors import MetadataError
from dcptool.pickles.calls import Calls
from dcptool.pickles.machine import Machine, NotKeptError, Take
from dcptool.pickles.standins import qualified_name

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
    """
    calls = calls or Calls()
    machine = Machine(data, understood or {}, take, calls)
    try:
        root = machine.run()
        while calls.nested:
            _read_through(calls.nested.pop(), calls)
        return root
    except MetadataError:
        raise
    except NotKeptError:
        return load(data, understood, calls)
    except IndexError:
        # Past the end of the data, or of the stack: which of the two, the position tells.
        if machine.position >= len(data):
            raise MetadataError(f"the pickle is cut short: it ends at byte {len(data)}") from None
        raise MetadataError(f"the pickle is damaged at byte {machine.position}: its stack is empty") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise MetadataError(f"the pickle is damaged at byte {machine.position}: {what}") from None
    finally:
        calls.names |= {qualified_name(found) for found in machine.globals.values()}


def _read_through(data: bytes, calls: Calls) -> None:
    """Note what the pickles of a stream of torch.save run; raw storages follow the last, their list of keys."""
    rest = data
    for _ in range(_PICKLES_OF_TORCH):
        machine = Machine(rest, {}, None, calls)
        machine.run()
        calls.names |= {qualified_name(found) for found in machine.globals.values()}
        rest = rest[machine.position :]
