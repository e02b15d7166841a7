"""Values of one name that are not the same on all ranks: each rank keeps its own, under a name of its own.

DCP saves a tensor that is no DTensor, and any object, once, whichever rank it is from: right for what is replicated,
wrong for BatchNorm's statistics, a local expert, an optimizer of local tensors. Here the lowest rank that has such a
value keeps the name, so that it is found by all who know the name; others save theirs as `rank_local.rank<r>.<name>`.

Digests of all bytes are compared at the first save and whenever names or kinds have changed, later of a sample.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
_SAMPLE = 256
"""So many elements of a tensor are looked at once its name is known."""
_MISSING, _BLANK = 0, 1
"""In place of a digest: the rank has no such value; only zeros, for the parameter was never stepped there."""


class Flat(NamedTuple):
    """A state by the names of its leaves, and the path of each in the nested state."""

    values: dict[str, Any]
    paths: dict[str, Path]


class Share(NamedTuple):
    """What one rank has to save.

    Attributes:
        flat: its state.
        names: of what may be another rank's too: no DTensor, nor what is per rank already; sorted.
        blank: parameters that were never stepped on this rank.
    """

    flat: Flat
    names: tuple[str, ...]
    blank: frozenset[str]

    @staticmethod
    def of(flat: Flat, apart: Collection[str], unstarted: Iterable[str]) -> Share:
        """Return the share of a rank, of whose state some groups at the top are per rank already."""
        values = sorted(flat.values.items(), key=lambda pair: pair[0])
        names = (name for name, value in values if flat.paths[name][0] not in apart and _is_plain(value))
        return Share(flat, tuple(names), frozenset(unstarted))


class RankLocal:
    """Tells, save by save, which values are not the same on all ranks. Called by all ranks in the same order.

    Attributes:
        changed: whether, at the last save, names or kinds of any rank were not those of the save before.
    """

    def __init__(self) -> None:
        self.changed = True
        self._known: bytes | None = None
        self._local: set[str] = set()

    def arrange(self, state: Callable[[], Share], ranks: Ranks, what: str) -> tuple[Share, Flat]:
        """Return what there is to save, and what this rank shall save of it.

        Args:
            state: returns what this rank has; called once.
            ranks: all of them.
            what: is tried, for errors.
        """
        shares: list[Share] = []
        kinds: list[bytes] = []

        def first() -> tuple[Any, ...]:
            shares.append(state())
            values = shares[0].flat.values
            kinds.append(_hash(f"{name} {_kind(values[name])}" for name in sorted(values)))
            return kinds[0] != self._known, *(() if ranks.world_size == 1 else self._first_look(shares[0]))

        told = ranks.share(what, first)
        share = shares[0]
        self.changed = any(changed for changed, *_ in told)
        self._known = kinds[0]
        if ranks.world_size == 1:
            return share, share.flat
        if not self.changed and len(set(told)) == 1:  # then no value began to differ, and rank 0 has all there are
            return share, _moved(share.flat, self._local if ranks.rank else (), ranks.rank)
        return share, self._looked(share, ranks, what)

    def _first_look(self, share: Share) -> tuple[bytes, bytes, bytes]:
        """Return digests of the names of what may differ, of what is blank, and of a sample of the values."""
        return _hash(share.names), _hash(sorted(share.blank)), self._glance(share.flat, share.names, share.blank)

    def _glance(self, flat: Flat, names: Iterable[str], blank: frozenset[str]) -> bytes:
        """Return a digest of a sample of all values that may begin to differ."""
        values = {name: flat.values[name] for name in names if name not in self._local}
        values = {name: value for name, value in values.items() if not _is_blank(flat.paths[name], blank)}
        together: dict[Any, list[torch.Tensor]] = {}
        rest = []
        for value in values.values():
            if torch.is_tensor(value) and _is_simple(value):
                together.setdefault((value.dtype, value.device), []).append(_sample(value))
            else:
                rest.append(value)
        parts = (_bytes_of(torch.cat(samples), True) for samples in together.values())
        return _hash([*(crc32(part).to_bytes(4, "little") for part in parts), *_parts(rest, False)])

    def _looked(self, share: Share, ranks: Ranks, what: str) -> Flat:
        """Compare the digests of all values, and return what this rank shall save."""
        flat, names, blank = share.flat, share.names, share.blank

        def digests() -> np.ndarray[Any, Any]:
            found = (
                _BLANK if _is_blank(flat.paths[name], blank) else _digest(flat.values[name], self.changed)
                for name in names
            )
            return np.fromiter(found, np.uint64, len(names))

        mine = ranks.agree(what, digests)
        by_rank = ranks.gather((_hash(names), _hash([mine.tobytes()])))
        same_names = len({told for told, _ in by_rank}) == 1
        if len(set(by_rank)) == 1 and not self._local:
            return flat
        every_name = [names] * ranks.world_size if same_names else ranks.gather(names)
        every = sorted(set().union(*every_name))
        return self._arranged(flat, every, _table(every, every_name, ranks.gather(mine)), ranks)

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
        for name in [name for name, here in zip(every, there[ranks.rank], strict=True) if name in values and not here]:
            del values[name], paths[name]
        mine = {name for name, rank in zip(every, owner, strict=True) if rank == ranks.rank}
        return _moved(Flat(values, paths), self._local - mine - groups, ranks.rank)

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


def _moved(flat: Flat, names: Iterable[str], rank: int) -> Flat:
    """Return a state in which some values have names of the rank's own."""
    values, paths = dict(flat.values), dict(flat.paths)
    for name in sorted(names):
        if name in values:
            own = f"{PREFIX}.rank{rank}.{name}"
            values[own], paths[own] = values.pop(name), (PREFIX, f"rank{rank}", *paths.pop(name))
    return Flat(values, paths)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, DTensor | ShardedTensor)


def _is_blank(path: Path, unstarted: frozenset[str]) -> bool:
    return path[:2] == ("optim", "state") and path[2] in unstarted


def _kind(value: Any) -> str:
    return str(value.dtype) if torch.is_tensor(value) else ""


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
    if not _is_simple(tensor):
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream.getbuffer()
    flat = _elements(tensor) if full else _sample(tensor)
    data: memoryview = flat.cpu().contiguous().view(torch.uint8).numpy().data
    return data


def _is_simple(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements are values in memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = _elements(tensor)
    return flat[:: flat.numel() // _SAMPLE] if flat.numel() > _SAMPLE else flat


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
