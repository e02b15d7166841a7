"""Values of one name that are not the same on all ranks: each rank keeps its own, under a name of its own.

DCP saves a tensor that is no DTensor, and any object, once, whichever rank it is from: right for what is replicated,
wrong for BatchNorm's statistics, a local expert, an optimizer of local tensors. Here the lowest rank that has such a
value keeps the name, so that it is found by all who know the name; others save theirs as `rank_local.rank<r>.<name>`.

Digests of all bytes are compared at the first save and whenever names or shapes have changed, later of a sample.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.fill import crc32
from dcptool.training.ranks import Ranks
from dcptool.training.tree import Path
from dcptool.words import listed

logger = logging.getLogger("dcptool.training")
PREFIX = "rank_local"
_OWN = re.compile(rf"{PREFIX}\.rank(\d+)\.(.+)", re.DOTALL)
_PARAMS = "params"
_SAMPLE = 4096
"""So many elements of a tensor are looked at once its name is known."""
_MISSING, _BLANK = 0, 1
"""In place of a digest: the rank has no such value; only zeros, for the parameter was never stepped there."""


class Flat(NamedTuple):
    """A state by the names of its leaves, and the path of each in the nested state."""

    values: dict[str, Any]
    paths: dict[str, Path]


class RankLocal:
    """Tells, save by save, which values are not the same on all ranks. Called by all ranks in the same order.

    Attributes:
        changed: whether, at the last save, names or shapes of any rank were not those of the save before.
    """

    def __init__(self) -> None:
        self.changed = True
        self._known: bytes | None = None
        self._names: list[tuple[str, ...]] = []
        self._local: set[str] = set()

    def arrange(self, flat: Flat, apart: Iterable[str], unstarted: Iterable[str], ranks: Ranks, what: str) -> Flat:
        """Return what this rank shall save.

        Args:
            flat: the state.
            apart: groups at the top that are per rank already.
            unstarted: parameters that were never stepped on this rank.
            ranks: all of them.
            what: is tried, for errors.
        """
        left_out, blank = set(apart), set(unstarted)
        names = tuple(
            sorted(
                name for name, value in flat.values.items() if flat.paths[name][0] not in left_out and _is_plain(value)
            )
        )
        shapes = _hash(
            f"{name} {_shape(value)}" for name, value in sorted(flat.values.items(), key=lambda pair: pair[0])
        )
        first = ranks.gather((shapes != self._known, _hash(names)))
        self.changed = any(changed for changed, _ in first)
        self._known = shapes
        if self.changed:
            self._names = []
        if ranks.world_size == 1:
            return flat

        def digests() -> np.ndarray[Any, Any]:
            found = (
                _BLANK if _is_blank(flat.paths[name], blank) else _digest(flat.values[name], self.changed)
                for name in names
            )
            return np.fromiter(found, np.uint64, len(names))

        mine = ranks.agree(what, digests)
        same_names = len({told for _, told in first}) == 1
        if same_names and not self._local and len(set(ranks.gather(_hash([mine.tobytes()])))) == 1:
            return flat
        if not self._names:
            self._names = [names] * ranks.world_size if same_names else ranks.gather(names)
        every = sorted(set().union(*self._names))
        table = _table(every, self._names, ranks.gather(mine))
        return self._arranged(flat, every, table, ranks)

    def _arranged(self, flat: Flat, every: Sequence[str], table: np.ndarray[Any, Any], ranks: Ranks) -> Flat:
        stepped = table > _BLANK
        there = np.where(stepped.any(0), stepped, table != _MISSING)
        owner = there.argmax(0)
        differs = there & (table != table[owner, np.arange(len(every))])
        found = {name for name, local in zip(every, differs.any(0), strict=True) if local}
        groups = {name for name in found if name.endswith(f".{_PARAMS}") and name.startswith("optim.param_groups.")}
        self._tell(found - self._local - groups - {"optim_unstarted"}, ranks)
        self._local |= found - groups
        values, paths = dict(flat.values), dict(flat.paths)
        for name, union in _unions(sorted(groups), values, ranks).items():
            values[name] = union
        for index, name in enumerate(every):
            if name not in values or name in groups:
                continue
            if not there[ranks.rank, index]:
                del values[name], paths[name]
            elif name in self._local and owner[index] != ranks.rank:
                own = f"{PREFIX}.rank{ranks.rank}.{name}"
                values[own], paths[own] = values.pop(name), (PREFIX, f"rank{ranks.rank}", *paths.pop(name))
        return Flat(values, paths)

    def _tell(self, found: set[str], ranks: Ranks) -> None:
        if found and ranks.rank == 0:
            which = listed(sorted(found), 5)
            logger.warning("not the same on all ranks, so each keeps its own, under %s.rank<r>: %s", PREFIX, which)


class RankView(NamedTuple):
    """What a checkpoint has for one rank.

    Attributes:
        names: name → the name in the checkpoint: the rank's own value, or that of all.
        own: by name the ranks that have one of their own, besides the one whose value has the name itself.
    """

    names: dict[str, str]
    own: dict[str, frozenset[int]]


def view_of(checkpoint: Checkpoint, rank: int) -> RankView:
    """Return what a checkpoint has for a rank."""
    names: dict[str, str] = {}
    mine: dict[str, str] = {}
    own: dict[str, set[int]] = {}
    for fqn in checkpoint:
        match = _OWN.fullmatch(fqn)
        if match is None:
            names[fqn] = fqn
            continue
        own.setdefault(match[2], set()).add(int(match[1]))
        if int(match[1]) == rank:
            mine[match[2]] = fqn
    return RankView({**names, **mine}, {name: frozenset(ranks) for name, ranks in own.items()})


def _is_plain(value: Any) -> bool:
    return not isinstance(value, DTensor | ShardedTensor)


def _is_blank(path: Path, unstarted: set[str]) -> bool:
    return path[:2] == ("optim", "state") and path[2] in unstarted


def _shape(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else ""


def _hash(parts: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.digest()


def _digest(value: Any, full: bool) -> int:
    """Return 64 bits of a value that are equal for equal ones, and are neither of the two special ones."""
    digest = int.from_bytes(_hash(_parts(value, full))[:8], "little")
    return digest if digest > _BLANK else digest + 2


def _parts(value: Any, full: bool) -> Iterable[Any]:
    if torch.is_tensor(value):
        yield f"{value.dtype} {tuple(value.shape)}"
        yield crc32(_bytes_of(value, full)).to_bytes(4, "little")
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}"
        yield value.tobytes() if not value.dtype.hasobject else repr(value.tolist())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key)
            yield from _parts(part, full)
        yield f"{type(value)} {len(value)}"
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part, full)
        yield f"{type(value)} {len(value)}"
    else:
        yield re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _bytes_of(tensor: torch.Tensor, full: bool) -> memoryview:
    """Return the bytes of a tensor, or of a sample of its elements."""
    tensor = tensor.detach()
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
    ):
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream.getbuffer()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if not full and flat.numel() > _SAMPLE:
        flat = flat[:: flat.numel() // _SAMPLE]
    data: memoryview = flat.cpu().contiguous().view(torch.uint8).numpy().data
    return data


def _table(
    every: Sequence[str], names: Sequence[Sequence[str]], digests: Sequence[np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    """Return digests by rank and name, `_MISSING` where a rank has no such value."""
    table = np.full((len(names), len(every)), _MISSING, np.uint64)
    at = {name: index for index, name in enumerate(every)}
    columns: dict[int, Any] = {}
    for rank, (mine, found) in enumerate(zip(names, digests, strict=True)):
        if id(mine) not in columns:
            columns[id(mine)] = np.fromiter((at[name] for name in mine), np.intp, len(mine))
        table[rank, columns[id(mine)]] = found
    return table


def _unions(groups: Sequence[str], values: Mapping[str, Any], ranks: Ranks) -> dict[str, list[str]]:
    """Return the parameters of optimizer groups whose lists differ between ranks: those of all ranks together."""
    if not groups:
        return {}
    told = ranks.gather([values.get(name, ()) for name in groups])
    unions = {name: list(dict.fromkeys(fqn for lists in told for fqn in lists[at])) for at, name in enumerate(groups)}
    return {name: union for name, union in unions.items() if name in values}
