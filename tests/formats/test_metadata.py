"""Records of `.metadata`: what is wrong in them is said, and what torch accepts is read as torch reads it."""

from __future__ import annotations

import pickle
import random
import resource

import pytest

from dcptool.errors import DcptoolError, MetadataError
from dcptool.formats.dcp.build import build
from dcptool.formats.dcp.metadata import read_records
from dcptool.storage import is_inside
from tests.conftest import FOREIGN

SMALL = FOREIGN / "w_nodist" / ".metadata"
OTHERS = ["xver_t2130", "fsdp1_t2130_orig", "w_zstd", "hsdp", "w_no_collectives/__0", "w_safetensors"]


def metadata_of(name):
    path = FOREIGN / f"{name}.metadata" if "/" in name else FOREIGN / name / ".metadata"
    return path.read_bytes()


def ours(data):
    records = read_records(data)
    entries = {fqn: records.tensors.get(fqn) for fqn in records.order}
    items = {(fqn, offsets): tuple(place) for fqn, rows in records.items.items() for offsets, *place in rows}
    paths = records.paths
    return (entries, items, paths), build({".metadata": records}).problems


def torchs(data):
    """torch's reading, None where torch does not accept the bytes or would fail on what they say."""
    import torch
    from torch.distributed.checkpoint import metadata as torch_metadata

    try:
        found = pickle.loads(data)
        entries = {}
        for fqn, record in found.state_dict_metadata.items():
            if isinstance(record, torch_metadata.TensorStorageMetadata):
                assert isinstance(record.size, torch.Size)
                assert isinstance(record.properties.dtype, torch.dtype)
                assert isinstance(record.properties.layout, torch.layout)
                assert all(isinstance(chunk, torch_metadata.ChunkStorageMetadata) for chunk in record.chunks)
                boxes = [(chunk.offsets, chunk.sizes) for chunk in record.chunks]
                assert all(isinstance(size, torch.Size) for box in boxes for size in box)
                boxes = [(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
                entries[fqn] = (str(record.properties.dtype)[6:], tuple(record.size), boxes)
            else:
                assert isinstance(record, torch_metadata.BytesStorageMetadata)
                entries[fqn] = None
        items = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): (
                info.relative_path,
                info.offset,
                info.length,
                tuple(getattr(info, "transform_descriptors", None) or ()),
            )
            for index, info in found.storage_data.items()
        }
    except Exception:
        return None
    return entries, items, found.planner_data


def check_flips(data, places):
    pytest.importorskip("torch")
    accepted = 0
    # Some of these pickles ask torch's own unpickler for gigabytes.
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, before[1]))
    try:
        assert ours(data)[0] == torchs(data)
        for byte_offset, bit in places:
            flipped = bytearray(data)
            flipped[byte_offset] ^= 1 << bit
            try:
                reading, problems = ours(bytes(flipped))
            except DcptoolError as error:
                assert str(error)
                continue
            if not problems:
                accepted += 1
                assert reading == torchs(bytes(flipped)), (byte_offset, bit)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert accepted


# The C unpickler's BYTEARRAY8 leaks a view when its length is wrong, and Python says so when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestFlips:
    def test_every_byte_of_a_small_metadata(self):
        data = SMALL.read_bytes()
        rng = random.Random(0)
        check_flips(data, [(byte_offset, rng.randrange(8)) for byte_offset in range(len(data))])

    @pytest.mark.slow
    def test_every_bit_of_a_small_metadata(self):
        data = SMALL.read_bytes()
        check_flips(data, [(byte_offset, bit) for byte_offset in range(len(data)) for bit in range(8)])

    @pytest.mark.parametrize("name", OTHERS)
    def test_seeded_flips_of_others(self, name):
        data, rng = metadata_of(name), random.Random(name)
        check_flips(data, [(rng.randrange(len(data)), rng.randrange(8)) for _ in range(150)])

    @pytest.mark.slow
    @pytest.mark.parametrize("name", OTHERS)
    def test_many_flips_of_others(self, name):
        data, rng = metadata_of(name), random.Random(name + "slow")
        check_flips(data, [(rng.randrange(len(data)), rng.randrange(8)) for _ in range(4000)])


@pytest.mark.torchfree
def test_every_cut_gives_one_error():
    data = SMALL.read_bytes()
    for nbytes in range(len(data)):
        with pytest.raises(MetadataError) as caught:
            read_records(data[:nbytes])
        assert "\n" not in str(caught.value)


class Record:
    """Stand-in for torch's classes in a hand-made metadata."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Properties:
    def __init__(self, dtype):
        self.dtype = dtype


@pytest.mark.torchfree
class TestForeignPackages:
    """A package of its own classes is read by their fields, and said to be so."""

    def problems(self, **changes):
        dtype = type("float32", (), {"__module__": "torch", "__qualname__": "float32"})
        tensor = Record(
            properties=Properties(dtype),
            size=changes.get("size", (4, 2)),
            chunks=changes.get("chunks", [Record(offsets=(0, 0), sizes=(4, 2))]),
        )
        items = changes.get("items", {("w", (0, 0)): ("__0_0.distcp", 0, 100)})
        index = {Record(fqn=fqn, offset=at): Record(relative_path=file, offset=start, length=length)
                 for (fqn, at), (file, start, length) in items.items()}  # fmt: skip
        root = Record(state_dict_metadata={"w": tensor, **changes.get("more", {})}, storage_data=index)
        root.planner_data = changes.get("planner_data")
        root.custom = "kept"
        records = read_records(self.pickled(root))
        view = build({".metadata": records})
        return view, [problem for problem in view.problems if problem.kind != "unknown-global"], records

    @staticmethod
    def pickled(root):
        """Pickle with the dtype stand-in written as the name torch.float32."""

        class Pickler(pickle._Pickler):  # the Python one, whose save_global can be replaced
            dispatch = pickle._Pickler.dispatch.copy()

            def save_type(self, obj):
                if obj.__module__ == "torch":
                    self.save("torch")
                    self.save(obj.__name__)
                    self.write(pickle.STACK_GLOBAL)
                else:
                    self.save_global(obj)

            dispatch[type] = save_type

        import io

        out = io.BytesIO()
        Pickler(out, 4).dump(root)
        return out.getvalue()

    def test_it_reads_and_says_so(self):
        view, problems, records = self.problems()
        assert not problems
        assert view.entries["w"].dtype == "float32"
        assert view.entries["w"].chunks[0].item.nbytes == 100
        assert records.extra == {"custom": "kept"}
        assert any("test_metadata.Record" in problem.message for problem in view.problems)

    @pytest.mark.parametrize(
        ("kind", "changes"),
        [
            ("bad-chunk", {"chunks": [Record(offsets=(0,), sizes=(4,))]}),
            ("bad-chunk", {"chunks": [Record(offsets=(0, -1), sizes=(4, 2))]}),
            ("chunk-out-of-bounds", {"chunks": [Record(offsets=(2, 0), sizes=(4, 2))]}),
            ("duplicate-chunk", {"chunks": [Record(offsets=(0, 0), sizes=(4, 2)) for _ in range(2)]}),
            ("chunk-without-item", {"items": {}}),
            ("item-without-chunk", {"items": {("w", (0, 0)): ("a", 0, 1), ("w", (2, 0)): ("a", 0, 1)}}),
            ("item-without-chunk", {"items": {("w", (0, 0)): ("a", 0, 1), ("v", None): ("a", 0, 1)}}),
            ("path-escape", {"items": {("w", (0, 0)): ("../a", 0, 1)}}),
            ("bad-item", {"items": {("w", (0, 0)): ("a", -1, 1)}}),
            ("bad-tensor", {"size": (1 << 40, 1 << 40)}),
            ("bad-path", {"planner_data": {"v": ("v",)}}),
            ("unknown-entry", {"more": {"x": 3}}),
            ("bad-name", {"more": {3: Record()}}),
        ],
    )
    def test_what_is_wrong_is_named(self, kind, changes):
        _, problems, _ = self.problems(**changes)
        assert kind in {problem.kind for problem in problems}
        assert all(problem.message for problem in problems)


@pytest.mark.torchfree
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("__0_0.distcp", True), ("sub/__0_0.distcp", True), ("a..b", True),
        ("", False), ("/abs", False), ("../x", False), ("a/../../x", False), ("..\\x", False), ("\\\\host\\x", False),
        ("C:\\x", False), ("a\0b", False),
    ],
)  # fmt: skip
def test_paths_stay_inside(name, inside):
    assert is_inside(name) == inside
