"""Runs of records read at once give what reading them one by one gives, whatever is in the pickle."""

from __future__ import annotations

import pickle
import random

import pytest

from dcptool.errors import MetadataError
from dcptool.formats.dcp.bulk import Bulk, ItemRun
from dcptool.formats.dcp.metadata import read_records
from dcptool.pickles import inert
from tests.conftest import FOREIGN

ALL = sorted(path for path in FOREIGN.rglob("*") if path.name.endswith(".metadata"))
NEVER = 1 << 60


def outcome(data: bytes, min_records: int):
    """What reading gives, in a form to compare: the records, or that there was an error."""
    try:
        records = read_records(data, min_records)
    except MetadataError:
        return "error"
    problems = [(problem.kind, problem.message) for problem in records.problems]
    return records.tensors, records.objects, records.order, dict(records.items), records.paths, problems


def metadata_of(tensors, items, share=()):
    """Pickle a metadata with torch's own classes: fqn → (shape, boxes), and (fqn, offsets, file, start, length)."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    def chunk(offsets, sizes):
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    state = {
        fqn: TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size(shape), [chunk(*box) for box in boxes]
        )
        if boxes is not None
        else BytesStorageMetadata()
        for fqn, (shape, boxes) in tensors.items()
    }
    storage = {
        MetadataIndex(fqn, None if offsets is None else torch.Size(offsets), None if offsets is None else index): (
            _StorageInfo(file, start, length)
        )
        for index, (fqn, offsets, file, start, length) in enumerate(items)
    }
    return pickle.dumps(Metadata(state, {fqn: (fqn,) for fqn in state}, storage), 4)


def rows(ndim, count, size=3):
    rest = (7,) * (ndim - 1)
    return [((index * size, *(0,) * (ndim - 1)), (size, *rest)) for index in range(count)]


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(FOREIGN)))
def test_foreign_metadata(path):
    data = path.read_bytes()
    slowly = outcome(data, NEVER)
    assert slowly != "error" or path.name == ".metadata.tmp"
    assert outcome(data, 1) == slowly
    assert outcome(data, 8) == slowly


@pytest.mark.parametrize("name", ["xver_t2130", "xver_t222", "fsdp1_t2130_orig", "hsdp", "w_threads3"])
def test_flipped_bits(name):
    data = (FOREIGN / name / ".metadata").read_bytes()
    rng = random.Random(name)
    for _ in range(60):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        assert outcome(bytes(flipped), 1) == outcome(bytes(flipped), NEVER)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_many_chunks_of_any_ndim(ndim):
    boxes = rows(ndim, 2500)
    places = [
        ("w", offsets, f"__{index % 7}_0.distcp", index << 28, 1 << 28) for index, (offsets, _) in enumerate(boxes)
    ]
    data = metadata_of({"w": ((7500, *(7,) * (ndim - 1)), boxes)}, places)
    fast = outcome(data, 8)
    assert fast == outcome(data, NEVER)
    assert len(fast[3]["w"]) == 2500
    assert not fast[5]


def test_tensors_of_different_ndim_and_objects_in_one_order():
    tensors = {f"t{ndim}": ((300, *(7,) * (ndim - 1)), rows(ndim, 100)) for ndim in (1, 2, 3)}
    tensors |= {f"o{index}": ((), None) for index in range(30)}
    items = []
    for rank in range(100):
        file = f"__{rank}_0.distcp"
        items += [(fqn, boxes[rank][0], file, 9, 9) for fqn, (_, boxes) in tensors.items() if boxes]
        items += [(f"o{index}", None, file, 9, 9) for index in range(30) if index % 100 == rank]
    data = metadata_of(tensors, items)
    assert outcome(data, 1) == outcome(data, 4) == outcome(data, NEVER)
    # As they come from ranks, one after the other, they are taken a thousand at a time, as pickle batches them.
    assert sum(len(run.rows) for run in item_runs(data)) >= 299  # but for the first, which names the fields
    assert len(item_runs(data)) <= 3


def test_names_that_repeat_are_fetched_from_the_memo():
    file, fqn = "__0_0.distcp", "w" * 300  # too long for a short string, so never read at once
    for name in ("w", fqn, "ünïcode"):
        boxes = rows(2, 200)
        places = [(name, offsets, file, index * 70_000, 70_000) for index, (offsets, _) in enumerate(boxes)]
        data = metadata_of({name: ((600, 7), boxes)}, places)
        assert outcome(data, 4) == outcome(data, NEVER)


def test_wrong_records_are_named_as_ever():
    boxes = [*rows(2, 50), ((3, 0), (3, 7)), ((900, 0), (3, 7))]
    places = [("w", offsets, "__0_0.distcp", 1, 1) for offsets, _ in rows(2, 50)]
    places[7] = ("w", places[7][1], "../x", 1, 1)
    places[9] = ("w", (5000, 0), "__0_0.distcp", 1, 1)
    data = metadata_of({"w": ((150, 7), boxes)}, places)
    fast = outcome(data, 4)
    assert fast == outcome(data, NEVER)
    assert {kind for kind, _ in fast[5]} == {"duplicate-chunk", "chunk-out-of-bounds", "path-escape"}


def taken_from(data):
    """Everything that is read at once."""
    taken = []
    bulk = Bulk(data, 1)

    def take(*args):
        found = bulk.take(*args)
        taken.extend(found.values if found else ())
        return found

    inert.load(data, {"torch.Size": lambda size: size}, None, take)
    return taken


def item_runs(data):
    return [value for value in taken_from(data) if isinstance(value, ItemRun)]


@pytest.mark.torchfree
def test_it_is_used_at_all():
    taken = taken_from((FOREIGN / "xver_t2130" / ".metadata").read_bytes())
    assert {"TensorRow", "ChunkRun", "ItemRun"} <= {type(value).__name__ for value in taken}
