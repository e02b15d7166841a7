"""Writing graphs of stand-ins back as pickles: the same graph, and for Python and torch the same objects."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import operator
import pathlib
import pickle
import pickletools
import struct
import types
import uuid
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcptool
from dcptool.errors import DcptoolError, MetadataError, UnsafePickleError
from dcptool.formats.dcp.items import undo_transforms
from dcptool.formats.dcp.metadata import read_records
from dcptool.formats.torch_save.zip import TorchZip
from dcptool.pickles import inert
from dcptool.pickles.emit import emit
from dcptool.pickles.standins import Global, Node, PersistentId, call, new, ref
from tests.conftest import FOREIGN

torchfree = pytest.mark.torchfree
both = pytest.mark.parametrize("protocol", [2, 4])

PLAIN = (type(None), bool, int, str, bytes, bytearray, complex)


def assert_same_graph(first, second):
    """Fail unless both are one graph: the same values in the same order, shared and cyclic in the same places."""
    there, back = {}, {}
    todo = [(first, second)]
    while todo:
        a, b = todo.pop()
        assert type(a) is type(b), (a, b)
        if isinstance(a, PLAIN):
            assert a == b
        elif isinstance(a, float):
            assert struct.pack("d", a) == struct.pack("d", b)
        elif isinstance(a, Global):
            assert place_today(a) == place_today(b)
        elif a == () == b:
            pass
        elif id(a) in there or id(b) in back:
            assert there.get(id(a)) == id(b), "shared in one graph only"
            assert back.get(id(b)) == id(a), "shared in one graph only"
        else:
            there[id(a)], back[id(b)] = id(b), id(a)
            todo += zip(parts(a), parts(b), strict=True)


def place_today(name):
    """Where Python 3 has what a name means."""
    module = "pathlib" if name.module == "pathlib._local" else name.module
    return NAME_MAPPING.get((module, name.name), (IMPORT_MAPPING.get(module, module), name.name))


def parts(value):
    """What a container, node or persistent id holds, as one list."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, dict):
        return flat(value.items())
    if isinstance(value, PersistentId):
        return [value.value]
    assert isinstance(value, Node)
    made = [value.function, value.args, value.called, value.kwargs, value.state]
    put = [value.appended or [], flat(value.items or ()), value.dropped or []]
    return made + [part for values in put for part in (len(values), *values)]


def flat(pairs):
    return [part for pair in pairs for part in pair]


def again(graph, protocol):
    """The graph after it was written and loaded."""
    return inert.load(emit(graph, protocol))


# What other software wrote.

METADATA = sorted([*FOREIGN.rglob(".metadata"), *FOREIGN.rglob("__*.metadata")])
FILES = sorted(path for path in FOREIGN.rglob("*") if path.suffix in (".pt", ".pth", ".bin") and path.is_file())
per_metadata = pytest.mark.parametrize("path", METADATA, ids=lambda path: str(path.relative_to(FOREIGN)))
per_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOREIGN)))
per_folder = pytest.mark.parametrize(
    "folder", sorted({path.parent for path in METADATA}), ids=lambda path: str(path.relative_to(FOREIGN))
)


def loadable(path):
    try:
        return inert.load(path.read_bytes())
    except MetadataError:
        pytest.skip("damaged on purpose")


@torchfree
@per_metadata
def test_metadata_is_the_same_graph(path):
    graph = loadable(path)
    assert_same_graph(graph, again(graph, 4))
    assert_same_graph(graph, again(graph, 2))


@torchfree
@per_metadata
def test_metadata_says_the_same_and_is_read_in_bulk(path):
    written = emit(loadable(path), 4)
    before, after = read_records(path.read_bytes()), read_records(written, min_records=2)
    assert str((before.tensors, before.order)) == str((after.tensors, after.order))
    assert before.items == after.items
    assert (before.paths, before.save_id, before.evidence) == (after.paths, after.save_id, after.evidence)
    assert [problem.message for problem in before.problems] == [problem.message for problem in after.problems]


@per_metadata
def test_torch_reads_the_same_metadata(path):
    import torch.distributed.checkpoint  # noqa: F401

    written = emit(loadable(path), 4)
    try:
        expected = pickle.loads(path.read_bytes())
    except Exception as error:  # of a torch or Python that is not installed
        if isinstance(error, ModuleNotFoundError) and "pathlib" in str(error):
            assert pickle.loads(written).storage_meta.checkpoint_id
        return
    assert_same_value(expected, pickle.loads(written))
    assert_same_value(expected, pickle.loads(emit(inert.load(written), 2)))


def test_paths_of_python_3_13_become_readable_everywhere():
    data = (FOREIGN / "py313_t2130" / ".metadata").read_bytes()
    assert b"pathlib._local" in data
    for protocol in (2, 4):
        assert b"pathlib._local" not in emit(inert.load(data), protocol)


def archives(folder):
    """The zips of all items of a checkpoint, one of each different pickle."""
    found = {}
    try:
        checkpoint = dcptool.open(str(folder))
    except DcptoolError:
        return []
    for entry in checkpoint.values():
        items = [entry.item] if hasattr(entry, "item") else [chunk.item for chunk in entry.chunks]
        for item in filter(None, items):
            with contextlib.suppress(DcptoolError):
                stored = checkpoint.storage.read(item.file, item.byte_offset, item.nbytes)
                data = undo_transforms(stored, item.transforms, 1 << 26)
                found.setdefault(opened(data).content("data.pkl"), data)
    return list(found.values())


def opened(data):
    return TorchZip(lambda at, nbytes: data[at : at + nbytes], len(data))


def rebuilt(data, pickled):
    """The zip of torch.save with another pickle in it."""
    archive, out = opened(data), io.BytesIO()
    with zipfile.ZipFile(out, "w") as copy:
        for member in archive.members.values():
            content = pickled if member.name == "data.pkl" else archive.content(member.name)
            copy.writestr(member.full_name, content)
    return out.getvalue()


def torch_load(data, weights_only):
    """What torch makes of a zip, and whether it could."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(io.BytesIO(data), weights_only=weights_only), True
        except Exception as error:
            return error, False


def assert_item_comes_back(data):
    """Fail unless the pickle of a zip is written as the same graph, and loads as the same object wherever it loads."""
    graph = inert.load(opened(data).content("data.pkl"))
    assert_same_graph(graph, again(graph, 2))
    assert_same_graph(graph, again(graph, 4))
    written = rebuilt(data, emit(graph, 2))
    for weights_only in (True, False):
        expected, could = torch_load(data, weights_only)
        if could:
            value, could = torch_load(written, weights_only)
            assert could, value
            assert_same_value(expected, value)


def test_fixtures_have_items():
    assert len(archives(FOREIGN / "dtypes_keys_t2130")) > 20


@per_folder
def test_items_come_back(folder):
    for data in archives(folder):
        assert_item_comes_back(data)


@per_file
def test_files_of_torch_save_come_back(path):
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        pytest.skip("no zip")
    assert_item_comes_back(data)


def assert_same_value(first, second):
    """Fail unless two unpickled objects are equal: tensors by every bit, unknown objects by their attributes."""
    import torch

    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert_same_tensor(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same_value(first[key], second[key])
    elif isinstance(first, list | tuple):
        for a, b in zip(first, second, strict=True):
            assert_same_value(a, b)
    elif isinstance(first, float | np.ndarray | np.generic):
        np.testing.assert_array_equal(first, second)
    elif dataclasses.is_dataclass(first) or (type(first).__eq__ is object.__eq__ and hasattr(first, "__dict__")):
        # by attribute: an older torch's dataclasses lack some of today's
        assert_same_value(vars(first), vars(second))
    elif type(first).__eq__ is object.__eq__:
        assert repr(first).partition(" at 0x")[0] == repr(second).partition(" at 0x")[0]
    else:
        assert first == second


def assert_same_tensor(first, second):
    import torch

    assert (first.dtype, first.requires_grad) == (second.dtype, second.requires_grad)
    assert (first.layout, first.device) == (second.layout, second.device)
    assert_same_value(first.__dict__, second.__dict__)
    if first.layout != torch.strided or type(first) not in (torch.Tensor, torch.nn.Parameter):
        assert repr(first) == repr(second)
        return
    assert (first.shape, first.stride()) == (second.shape, second.stride())
    assert (first.is_conj(), first.is_neg()) == (second.is_conj(), second.is_neg())
    assert first.storage_offset() == second.storage_offset()
    if first.device.type != "meta" and not first.is_quantized:
        assert bytes(first.untyped_storage()) == bytes(second.untyped_storage())


# What Python's pickler writes.


class Colour(enum.Enum):
    RED = "red"


class Flag(enum.IntFlag):
    A = 1
    B = 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Config:
    name: str
    values: list

    @dataclasses.dataclass
    class Inner:
        depth: int

        class Innermost(enum.Enum):
            ONE = 1


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("x", "y")
    x: int
    y: object

    def __getstate__(self):
        return (self.x, self.y)

    def __setstate__(self, state):
        for name, value in zip(("x", "y"), state, strict=True):
            object.__setattr__(self, name, value)


class Slots:
    __slots__ = ("__dict__", "x")

    def __eq__(self, other):
        return (self.x, self.__dict__) == (other.x, other.__dict__)

    def __hash__(self):
        return 0


class Keywords:
    """Made by `__new__` with keyword arguments."""

    def __new__(cls, *, value):
        self = super().__new__(cls)
        self.value = value
        return self

    def __getnewargs_ex__(self):
        return (), {"value": self.value}

    def __getstate__(self):
        return None

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __hash__(self):
        return 0


class Listed(list):
    """A list with attributes."""


class Mapped(dict):
    """A dict with attributes."""


class Gathered(set):
    """A set with attributes."""


class Text(str):
    """A string of one's own."""


class SetFromOutside:
    """Given its state by a function, whose result pickle drops."""

    def __reduce__(self):
        return SetFromOutside, (), vars(self), None, None, set_state

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __hash__(self):
        return 0


def set_state(target, state):
    target.__dict__.update(state)


class Ünicode:
    """A name that is no ASCII."""

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return 0


def with_attributes(value, **attributes):
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


OBJECTS = {
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "OrderedDict with attributes": with_attributes(collections.OrderedDict(a=1), _metadata={"": {"version": 2}}),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "Counter": collections.Counter("abracadabra"),
    "deque": collections.deque([1, [2]], maxlen=5),
    "ChainMap": collections.ChainMap({1: 2}, {3: 4}),
    "namedtuple": Point(1, [2]),
    "SimpleNamespace": types.SimpleNamespace(a=1, b=[2]),
    "enum": [Colour.RED, Colour.RED, Flag.A | Flag.B],
    "dataclass": Config("x", [1, 2]),
    "class inside a class": [Config.Inner(3), Config.Inner, Config.Inner.Innermost.ONE, Config.Inner(4)],
    "frozen slots": Slotted(1, "y"),
    "slots and attributes": with_attributes(Slots(), x=1, y=2),
    "keyword arguments": [Keywords(value=3), Keywords(value={}), *[Keywords(value=n) for n in range(20)]],
    "list subclass": with_attributes(Listed([1, 2]), note="x"),
    "list subclass of one": Listed([[]]),
    "dict subclass": with_attributes(Mapped(a=1, b={}), note="x"),
    "set subclass": with_attributes(Gathered([1, 2]), note="x"),
    "str subclass": Text("x"),
    "state setter": [with_attributes(SetFromOutside(), x=1), with_attributes(SetFromOutside(), y=[])],
    "unicode name": Ünicode(),
    "sets": [set(), {1, "a"}, frozenset(), frozenset([1, (2, frozenset())])],
    "bytes": [b"", b"a", bytes(range(256)), b"x" * 70_000],
    "bytearrays": [bytearray(), bytearray(b"\0\xff"), bytearray(300)],
    "complex": [1 + 2j, complex(-0.0, float("inf"))],
    "datetime": [
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
        datetime.date(2024, 1, 2),
        datetime.timedelta(1, 2, 3),
    ],
    "numbers": [decimal.Decimal("1.50"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
    "ranges": [range(3), range(1, 10, 2), slice(1, None, 2)],
    "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("y")],
    "numpy arrays": np.arange(6, dtype=np.float32).reshape(2, 3),
    "numpy fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "numpy objects": np.array([1, "a", None], dtype=object),
    "numpy records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", ">f8")]),
    "numpy scalars": [np.float64(1.5), np.int8(-3), np.bool_(True), np.datetime64("2024-01-01"), np.str_("x")],
    "numpy random state": np.random.RandomState(5).get_state(),
    "functions": [len, operator.add, collections.OrderedDict.fromkeys, "".join, np.mean, functools.reduce],
    "types": [int, type(None), type(...), Config, np.float32, ValueError, zip],
    "singletons": [None, ..., NotImplemented, True, False],
    "partial": functools.partial(int, base=2),
    "exception": [type(e)(*e.args) for e in (KeyError("x"), OSError(2, "gone"))],
}  # fmt: skip


@torchfree
@both
@pytest.mark.parametrize("source", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_come_back(name, source, protocol):
    try:
        data = pickle.dumps(OBJECTS[name], source)
    except (TypeError, pickle.PicklingError):
        pytest.skip("Python cannot pickle it in this protocol")
    graph = inert.load(data)
    written = emit(graph, protocol)
    assert_equal_objects(pickle.loads(written), pickle.loads(data))
    if protocol == source or (protocol == 4 and source < 4):
        assert_same_graph(graph, inert.load(written))
    assert_same_graph(inert.load(written), again(inert.load(written), protocol))


def assert_equal_objects(first, second):
    assert type(first) is type(second)
    if isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_equal_objects(a, b)
    elif isinstance(first, np.ndarray):
        assert (first.dtype, first.strides) == (second.dtype, second.strides)
        np.testing.assert_array_equal(first, second)
    elif isinstance(first, BaseException | functools.partial):
        assert repr(first) == repr(second)
    else:
        assert first == second
    assert getattr(first, "__dict__", None) == getattr(second, "__dict__", None) or isinstance(first, type)


@torchfree
def test_output_has_only_opcodes_of_its_protocol():
    for name, value in OBJECTS.items():
        for protocol in (2, 4) if name != "unicode name" else ():  # pickletools reads ASCII only
            written = emit(inert.load(pickle.dumps(value, 5)), protocol)
            assert max(opcode.proto for opcode, _, _ in pickletools.genops(written)) <= protocol


@torchfree
@both
def test_calls_whose_results_are_dropped_are_kept(protocol):
    graph = inert.load(pickle.dumps(OBJECTS["state setter"][0], 4))
    (setter,) = graph.dropped
    assert setter.args == (graph, {"x": 1})
    for _ in range(2):
        graph = again(graph, protocol)
        assert len(graph.dropped) == 1
    # Parts of a recursive tuple are dropped too, and are no such calls.
    member = new("some.Class")
    group = (member, call("some.function", member))
    member.state = [group]
    assert_same_graph(group, again(group, protocol))


@torchfree
def test_classes_that_python_2_made_with_arguments_are_called():
    for data in (b"(I3\nI4\nicollections\nCounter\n.", b"(ccollections\nCounter\nI3\nI4\no."):
        graph = inert.load(data)
        assert (graph.called, graph.args) == (True, (3, 4))
    assert not inert.load(b"(icollections\nCounter\n.").called
    data = b"(I3\nidecimal\nDecimal\n."
    assert pickle.loads(emit(inert.load(data))) == pickle.loads(data) == 3


# Plain values, and graphs of them.

FLOATS = st.floats(allow_nan=False) | st.sampled_from([-0.0, float("inf")])
TEXT = st.text() | st.text(st.characters(categories=["Cs", "Lu"]))
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.integers(-(1 << 70), 1 << 70) | FLOATS | TEXT | st.binary()
    | st.complex_numbers(allow_nan=False) | st.binary().map(bytearray)
)  # fmt: skip
HASHED = st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text()) | st.booleans() | FLOATS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(HASHED, inner, max_size=4)
        | st.sets(HASHED, max_size=4)
        | st.sets(HASHED, max_size=4).map(frozenset)
    ),
    max_leaves=20,
)


def types_in(value):
    """The types of the value and of everything in it, depth first."""
    yield type(value)
    if isinstance(value, dict):
        value = flat(value.items())
    if isinstance(value, list | tuple):
        for item in value:
            yield from types_in(item)


@both
@given(VALUES, st.integers(0, 5))
def test_plain_values_come_back_equal(protocol, value, source):
    try:
        data = pickle.dumps(value, source)
    except UnicodeEncodeError:
        return
    expected = pickle.loads(data)
    for graph in (inert.load(data), value):
        loaded = pickle.loads(emit(graph, protocol))
        assert loaded == expected
        assert list(types_in(loaded)) == list(types_in(expected))


@st.composite
def graphs(draw):
    """A list of values that hold one another in every way, cycles through lists, dicts and nodes included."""
    made = [draw(LEAVES) for _ in range(draw(st.integers(1, 4)))]
    for kind in draw(st.lists(st.sampled_from("ltdncpNg"), min_size=1, max_size=12)):
        inner = draw(st.lists(st.sampled_from(made), max_size=5))
        made.append(
            {
                "l": lambda inner: inner,
                "t": tuple,
                "d": lambda inner: dict(enumerate(inner)),
                "n": lambda inner: new("some.Class", inner),
                "c": lambda inner: call("some.function", *inner),
                "p": lambda inner: PersistentId(tuple(inner)),
                "N": lambda inner: Node(ref("some.Class"), (), False, dict(enumerate(inner))),
                "g": lambda inner: ref("some.name"),
            }[kind](inner)
        )
    for target in made:
        later = draw(st.lists(st.sampled_from(made), max_size=3))
        if isinstance(target, list):
            target.extend(later)
        elif isinstance(target, dict):
            target.update(zip("abc", later, strict=False))
        elif isinstance(target, Node) and later:
            target.state, target.appended = later[0], later[1:]
            target.items = [(f"{n}", value) for n, value in enumerate(later)]
    return made


@given(graphs())
def test_graphs_keep_identity_and_cycles(graph):
    graph = inert.load(emit(graph, 4))  # equal strings, names and persistent ids are then shared as pickles share them
    assert_same_graph(graph, again(graph, 4))
    native = inert.load(emit(graph, 2))  # bytes are calls there
    assert_same_graph(native, again(native, 2))
    assert_same_graph(native, again(native, 4))


@torchfree
@both
def test_numbers_keep_every_bit(protocol):
    edges = [0, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 2032, 1 << 5000]
    numbers = [number + step for edge in edges for number in (edge, -edge) for step in (-1, 0, 1)]
    loaded = pickle.loads(emit(numbers, protocol))
    assert loaded == numbers
    assert [pickle.dumps(n, 2) for n in numbers] == [emit(n, 2) for n in numbers]
    floats = [float("nan"), -float("nan"), -0.0, float("-inf"), 5e-324]
    assert struct.pack("5d", *pickle.loads(emit(floats, protocol))) == struct.pack("5d", *floats)


@torchfree
@both
@pytest.mark.parametrize("value", [[], (), {}, set(), frozenset(), "", b"", bytearray(), None, [[]], ((),), {"": ()}])
def test_empty_values(value, protocol):
    assert pickle.loads(emit(value, protocol)) == value


@torchfree
@both
def test_strings_of_every_length_and_with_surrogates(protocol):
    strings = ["", "a" * 255, "a" * 256, "é" * 128, "\ud800", "x\udcffy", "\ud83d\ude00", "😀", "a\nb\0", "a" * 70_000]
    assert pickle.loads(emit(strings, protocol)) == strings


@both
def test_long_lists_and_dicts_are_written_in_batches(protocol):
    for count in (1, 2, 999, 1000, 1001, 2500):
        value = [list(range(count)), dict.fromkeys(range(count))]
        written = emit(value, protocol)
        assert pickle.loads(written) == value
        names = collections.Counter(opcode.name for opcode, _, _ in pickletools.genops(written))
        assert names["SETITEM"] + names["SETITEMS"] == -(-count // 1000)
        assert names["APPEND"] + names["APPENDS"] == -(-count // 1000) + 1
    value = list(range(1_000_000))
    assert pickle.loads(emit(value, protocol)) == value


@torchfree
@both
def test_shared_values_are_written_once(protocol):
    shared, name = ["x" * 100], "y" * 100
    written = emit([shared, shared, name, (name,), "".join(["y"] * 100), {name: shared}], protocol)
    assert written.count(b"x" * 100) == written.count(b"y" * 100) == 1
    first, second, *_, last = pickle.loads(written)
    assert first is second is last[name]
    written = emit([ref("a.b"), ref("a.b"), call("a.b")], protocol)
    assert sum("GLOBAL" in opcode.name for opcode, _, _ in pickletools.genops(written)) == 1


@torchfree
@both
def test_recursive_tuples_calls_and_instances(protocol):
    inner: list = []
    recursive = (inner, 1, inner, 2)
    inner += [recursive, (recursive,)]
    holder = Node(ref("some.Class"), (inner,), False, None)
    called = Node(ref("some.function"), (holder, [holder]), True)
    instance = new("some.Class", {"self": None})
    instance.state["self"] = instance
    instance.appended = [called, instance]
    instance.items = [(instance, called), ("again", instance)]
    holder.state = [called, holder]
    inner.append(called)
    for graph in (recursive, inner, holder, called, instance):
        assert_same_graph(graph, again(graph, protocol))
        within = ["before", (1, 2, 3, graph), "after"]  # where what was left on the stack would show
        assert_same_graph(within, again(within, protocol))
    loaded = pickle.loads(emit((box := [], (box.append(box), box)), protocol))
    assert loaded[1][1] is loaded[0] is loaded[0][0]


@torchfree
@both
def test_a_set_may_hold_what_leads_back_to_it(protocol):
    member = new("some.Class", [])
    for kind in (set, frozenset):
        group = kind([member])
        member.state = [group]
        loaded = again(group, protocol)
        if protocol == 2:
            (loaded,) = loaded.args[0]
            assert loaded.state[0].args[0] == [loaded]
        else:
            assert_same_graph(group, loaded)


@torchfree
def test_what_contains_itself_without_end_is_refused():
    node = call("some.function")
    node.args = (node,)
    with pytest.raises(UnsafePickleError, match="without end"):
        emit(node)
    lists: list = [[] for _ in range(2000)]
    tangle = tuple(lists)
    for inner in lists:
        inner.append(tangle)
    with pytest.raises(UnsafePickleError, match="without end"):
        emit(tangle)


def nested(kind, depth):
    value = None
    for _ in range(depth):
        value = kind(value)
    return value


def test_depth_is_no_danger():
    kinds = itertools.cycle([
        lambda value: [value],
        lambda value: (value,),
        lambda value: {"x": value},
        lambda value: new("some.Class", {"x": value}),
        lambda value: call("some.function", value),
        lambda value: (value, 1, 2, 3, [value]),
    ])  # fmt: skip
    graph = nested(lambda value: next(kinds)(value), 50_000)
    assert_same_graph(graph, again(graph, 4))


def test_python_reads_what_is_nested_deep():
    value, depth = pickle.loads(emit(nested(lambda value: [value], 100_000), 2)), 0
    while value:
        value, depth = value[0], depth + 1
    assert depth == 100_000


@torchfree
def test_persistent_ids_are_given_to_the_reader():
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid):
            return "loaded", pid

    storage = PersistentId(("storage", 1))
    for protocol in (2, 4):
        loaded = Unpickler(io.BytesIO(emit([storage, storage, {"x": PersistentId("7")}], protocol))).load()
        assert loaded == [("loaded", ("storage", 1))] * 2 + [{"x": ("loaded", "7")}]


# Names.


@torchfree
def test_names_of_python_2_are_todays_in_protocol_4():
    data = b"c__builtin__\nxrange\n(I3\ntR."
    assert pickle.loads(emit(inert.load(data), 4)) == pickle.loads(emit(inert.load(data), 2)) == range(3)
    assert again(ref("copy_reg._reconstructor"), 4).module == "copyreg"
    assert again(ref("pathlib._local.PosixPath"), 2).module == "pathlib"


@torchfree
def test_names_that_protocol_2_has_no_line_for():
    for name in (Global("a\nb", "c"), Global("a", "b\ud800")):
        with pytest.raises(MetadataError, match="cannot be written"):
            emit(name, 2)
        assert_same_graph(name, again(name, 4))
    loaded = pickle.loads(emit([Global(__name__, "Config.Inner.Innermost"), Global(__name__, "Ünicode")], 2))
    assert loaded == [Config.Inner.Innermost, Ünicode]


@torchfree
def test_what_is_no_stand_in_is_refused():
    with pytest.raises(TypeError, match="a Point is neither"):
        emit([Point(1, 2)])
    with pytest.raises(ValueError, match="protocol"):
        emit(None, 3)


def test_graphs_made_by_hand():
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    module = "torch.distributed.checkpoint.metadata"
    chunk = new(f"{module}.ChunkStorageMetadata", {"offsets": call("torch.Size", (0, 2)), "sizes": call("torch.Size")})
    index = new(f"{module}.MetadataIndex", {"fqn": "w", "offset": None, "index": 0})
    graph = [chunk, index, call("torch.device", "cpu"), ref("torch.float8_e4m3fn")]
    for protocol in (2, 4):
        assert pickle.loads(emit(graph, protocol)) == [
            ChunkStorageMetadata(torch.Size([0, 2]), torch.Size([])),
            MetadataIndex("w", None, 0),
            torch.device("cpu"),
            torch.float8_e4m3fn,
        ]


# What torch.save writes.


def torch_objects():
    """Values as torch.save gets them, by name."""
    import torch

    class_of_tensor = type("TensorOfOnesOwn", (torch.Tensor,), {"__module__": __name__})
    globals()["TensorOfOnesOwn"] = class_of_tensor
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    weight = torch.nn.Parameter(base.clone())
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "tensor": base,
        "views of one storage": [base, base[1:3, ::2], base.t(), base],
        "scalar and empty": [torch.tensor(1), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int8)],
        "conj and neg": [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag],
        "dtypes": [torch.zeros(3, dtype=getattr(torch, name)) for name in (
            "bool", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "uint16", "uint64", "complex128", "int64")],
        "parameter": weight,
        "parameter with attribute": with_attributes(torch.nn.Parameter(base), note="x"),
        "tensor with attribute": with_attributes(base.clone(), note=[1]),
        "subclass": base.clone().as_subclass(class_of_tensor),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.quint8),
        "module state": module.state_dict(),
        "optimizer state": optimizer.state_dict(),
        "module": module,
        "sizes": [torch.Size([2, 3]), torch.Size([]), torch.float16, torch.device("cpu"), torch.strided],
        "plain": {"a": [1, 2.5, None, True, "é", b"bytes", b"", (1,), {1, 2}, 1 << 80, 1 + 2j, bytearray(b"x")]},
        "numpy": {"array": np.arange(3), "scalar": np.float64(2)},
        "mixed": collections.OrderedDict(weight=weight, count=collections.Counter("aab"), tied=weight),
        "tied in a cycle": (lambda made: made.append([made, base]) or made)([base]),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_torch_saves_comes_back():
    import torch

    for name, value in torch_objects().items():
        out = io.BytesIO()
        torch.save(value, out)
        if name == "tied in a cycle":
            graph = inert.load(opened(out.getvalue()).content("data.pkl"))
            loaded, _ = torch_load(rebuilt(out.getvalue(), emit(graph)), True)
            assert loaded[1][0] is loaded
        else:
            assert_item_comes_back(out.getvalue())


def test_torch_loads_plain_values_of_a_written_graph_with_weights_only():
    import torch

    out = io.BytesIO()
    torch.save(None, out)
    value = [
        b"x",
        b"",
        {1, "a"},
        set(),
        bytearray(b"y"),
        bytearray(),
        1j,
        -5,
        1 << 80,
        -0.5,
        "é",
        ((1, 2), [], {}, None),
    ]
    graph = [*value, call("collections.OrderedDict"), call("torch.Size", (2,)), ref("torch.bfloat16")]
    loaded, could = torch_load(rebuilt(out.getvalue(), emit(graph)), True)
    assert could, loaded
    assert loaded == [*value, collections.OrderedDict(), torch.Size([2]), torch.bfloat16]
