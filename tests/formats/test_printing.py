"""Chunks and places printed in bulk: torch loads from them what was meant, and both of our readers do too."""

from __future__ import annotations

import pickle

import pytest

from dcptool.formats.dcp import printing
from dcptool.formats.dcp.metadata import read_records
from dcptool.formats.dcp.printing import Place
from dcptool.pickles.emit import emit
from dcptool.pickles.standins import Printed, call, new, ref

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint import metadata as records  # noqa: E402

RECORDS = "torch.distributed.checkpoint.metadata"
WIDE = (0, 1, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, 1 << 33, (1 << 39) - 1, 1 << 39, 1 << 47, 1 << 62)

SHAPES = [(), (1 << 58,), (1 << 20, 1 << 20), *((16,) * ndim for ndim in range(3, 7))]


def document(tensors: dict[str, list], objects: list[str]) -> tuple[bytes, list[Place]]:
    """A whole `.metadata`: name → boxes of tensors, and objects; every item in a file of its own number."""
    layout = call("torch.serialization._get_layout", "torch.strided")
    memory_format = call(f"{RECORDS}._MEM_FORMAT_ENCODING", 0)
    state = {}
    places = []
    for name, boxes in tensors.items():
        properties = new(f"{RECORDS}.TensorProperties", (ref("torch.float32"), layout, False, memory_format, False))
        size = call("torch.Size", SHAPES[len(boxes[0][0]) if boxes else 0])
        fields = {"properties": properties, "size": size, "chunks": printing.chunks(boxes)}
        state[name] = new(f"{RECORDS}.TensorStorageMetadata", fields)
        places += [Place(name, box[0], f"__{index % 7}_0.distcp", index * 1000, 10) for index, box in enumerate(boxes)]
    for index, name in enumerate(objects):
        state[name] = new(f"{RECORDS}.BytesStorageMetadata")
        places.append(Place(name, None, "__0_0.distcp", WIDE[index % len(WIDE)], WIDE[-index % len(WIDE)]))
    fields = {
        "state_dict_metadata": state,
        "planner_data": {name: (name,) for name in state},
        "storage_data": printing.places(places, tensors),
        "storage_meta": new(f"{RECORDS}.StorageMeta", {"checkpoint_id": "x", "save_id": "y", "load_id": None}),
        "version": "1.0.0",
    }
    return emit(new(f"{RECORDS}.Metadata", fields), 4), places


CASES = {
    "one": ({"w": [((0,), (4,))]}, []),
    "none": ({"w": []}, ["a"]),
    "objects": ({}, [f"object {index}" for index in range(300)]),
    "dimensions": (
        {f"d{ndim}": [((row,) + (0,) * (ndim - 1), (1,) * ndim) for row in range(9)] for ndim in range(1, 7)},
        ["o"],
    ),
    "scalar": ({"s": [((), ())]}, []),
    "numbers": ({"w": [((start,), (size,)) for start, size in zip(WIDE[:-1], WIDE[-2::-1], strict=True)]}, []),
    "batches": ({"w": [((row, 0), (1, 3)) for row in range(3001)], "v": [((0,), (1,))] * 1}, ["é", "n\nl"]),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_and_both_readers_find_what_was_meant(name):
    tensors, objects = CASES[name]
    data, places = document(tensors, objects)
    loaded = pickle.loads(data)
    assert isinstance(loaded, records.Metadata)
    for fqn, boxes in tensors.items():
        found = loaded.state_dict_metadata[fqn].chunks
        assert all(type(chunk.offsets) is torch.Size for chunk in found)
        assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found] == boxes
    assert [
        (
            index.fqn,
            None if index.offset is None else tuple(index.offset),
            where.relative_path,
            where.offset,
            where.length,
        )
        for index, where in loaded.storage_data.items()
    ] == [tuple(place) for place in places]
    hints = [index.index for index in loaded.storage_data]
    assert hints == [
        None if place.offsets is None else [box[0] for box in tensors[place.name]].index(place.offsets)
        for place in places
    ]
    assert all(where.transform_descriptors is None for where in loaded.storage_data.values())
    slow, bulk = read_records(data, min_records=1 << 40), read_records(data, min_records=1)
    assert slow.problems == bulk.problems == []
    assert slow.tensors == bulk.tensors
    assert {fqn: slow.tensors[fqn][2] for fqn in tensors} == tensors
    assert slow.items == bulk.items


def test_what_torch_pickles_again_is_as_long(tmp_path):
    """Nothing is written twice that a pickler would share: CPython's own pickle of the same is hardly shorter."""
    data, _ = document(*CASES["batches"])
    again = pickle.dumps(pickle.loads(data), 4)
    assert len(data) < 1.1 * len(again)


def test_protocol_2_has_no_such_opcodes():
    with pytest.raises(TypeError):
        emit([Printed((), lambda fetch: (b"N", 0))], 2)
