"""Graphs of stand-ins as torch pickles them: tensors to be written, and objects to be carried with their storages.

Source: torch 2.13, `_utils.py` (`_rebuild_tensor_v2`, `_rebuild_tensor_v3`) and `serialization.py` (`persistent_id`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.extents import Ints, Record
from dcptool.checkpoint.regions import contiguous_strides, volume
from dcptool.errors import ItemError
from dcptool.pickles.standins import Global, Node, PersistentId, call, ref

TAIL = (("byteorder", b"little"), ("version", b"3\n"))
"""Records that torch looks for in every archive, besides the pickle and the storages."""


class ObjectGraph(NamedTuple):
    """An object: its pickle's graph, and the records of the storages in it, by key."""

    root: Any
    storages: dict[str, Record]


def tensor_node(dtype: str, shape: Ints, key: str) -> Node:
    """Return the graph of a contiguous tensor whose storage is its own, under a key of the archive."""
    kind = dtypes.lookup(dtype)
    count = volume(shape)
    strides = contiguous_strides(shape)
    hooks = call("collections.OrderedDict")
    if kind.storage:
        storage = PersistentId(("storage", Global("torch", kind.storage), key, "cpu", count))
        return call("torch._utils._rebuild_tensor_v2", storage, 0, shape, strides, False, hooks)
    storage = PersistentId(("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", count * kind.itemsize))
    return call("torch._utils._rebuild_tensor_v3", storage, 0, shape, strides, False, hooks, ref(f"torch.{dtype}"))


class Keys:
    """Gives storages their keys in a new archive: one key for one record, however often it is referred to."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self._keys: dict[Record, str] = {}
        self._count = 0

    def fresh(self) -> str:
        """Return a key that is not taken."""
        self._count += 1
        return str(self._count - 1)

    def of(self, record: Record) -> str:
        """Return the key of a carried record."""
        key = self._keys.get(record)
        if key is None:
            key = self._keys[record] = self.fresh()
            self.records[key] = record
        return key


def rekey(graph: ObjectGraph, keys: Keys) -> Any:
    """Give the storages in a graph their keys in a new archive, in place, and return its root.

    Raises:
        ItemError: the graph refers to a storage the archive does not have.
    """
    done: set[int] = set()
    for found in persistent_ids(graph.root):
        if id(found) in done:
            continue
        done.add(id(found))
        value = found.value
        if isinstance(value, tuple) and len(value) == 6 and value[5] is None:
            value = value[:5]  # as before torch 1.6, where the last one is of a view
        if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage":
            raise ItemError("it refers to something outside its pickle that is no storage")
        record = graph.storages.get(str(value[2]))
        if record is None:
            raise ItemError(f"its archive has no storage {value[2]!r}")
        found.value = (*value[:2], keys.of(record), *value[3:])
    return graph.root


def persistent_ids(root: Any) -> Iterator[PersistentId]:
    """Yield every persistent id in a graph, each as often as it is reached by another way into a container."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, PersistentId):
            yield value
            continue
        if not isinstance(value, dict | list | tuple | set | frozenset | Node) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, Node):
            waiting += [value.function, value.args, value.kwargs, value.state, value.items, value.appended]
            waiting.append(value.dropped)
        else:
            waiting += value
