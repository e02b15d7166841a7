"""The inert loader: what it makes of pickles, and what pickles built to harm do to it."""

from __future__ import annotations

import collections
import pickle
import pickletools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcptool.errors import MetadataError, RunsCodeError, UnsafePickleError
from dcptool.pickles import inert
from dcptool.pickles.calls import Calls
from dcptool.pickles.standins import qualified_name

pytestmark = pytest.mark.torchfree

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4).map(frozenset)
    ),
    max_leaves=20,
)


def is_native(data: bytes) -> bool:
    """Whether the pickle rebuilds its values without naming a function (old protocols call some for sets, bytes)."""
    return not any("GLOBAL" in opcode.name for opcode, _, _ in pickletools.genops(data))


@given(VALUES, st.integers(0, 5))
def test_plain_values_come_back_equal(value, protocol):
    data = pickle.dumps(value, protocol)
    loaded = inert.load(data)
    if is_native(data):
        assert loaded == value
        assert list(map(type, flattened(loaded))) == list(map(type, flattened(value)))


def flattened(value):
    """The value and everything in it, depth first."""
    yield value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flattened(key)
            yield from flattened(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flattened(item)


def test_bytes_after_the_end_are_ignored_as_pickle_does():
    data = pickle.dumps([1])
    assert inert.load(data + b"junk") == [1]


def test_nothing_is_imported_and_nothing_called():
    node = inert.load(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert qualified_name(node) == "os.system"
    assert node.called
    assert node.args == ("exit 1",)


def test_how_things_were_made_is_kept():
    class Plain:
        pass

    globals()["Plain"] = Plain
    Plain.__qualname__ = "Plain"
    made = Plain()
    made.x = made.self = made
    made.x = 3
    value = [made, collections.OrderedDict(a=1), made]
    first, ordered, again = inert.load(pickle.dumps(value, 4))
    assert first is again
    assert not first.called
    assert first.state["x"] == 3
    assert first.state["self"] is first
    assert ordered.called
    assert ordered.items == [("a", 1)]


def nested_tuples(depth: int) -> bytes:
    return b"\x80\x04})" + b"\x85" * depth + b"Ns."


def doubled_tuples(levels: int) -> bytes:
    body = b"".join(b"\x94h" + bytes([level]) + b"\x86" for level in range(levels))
    return b"\x80\x04})" + body + b"Ns."


BOMBS = {
    "memo index of LONG_BINPUT": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo index of PUT": b"Np4000000000\n.",
    "tuples nested to overflow the stack": nested_tuples(1_000_000),
    "tuples nested a little too deep": nested_tuples(300),
    "tuples that double": doubled_tuples(60),
    "one long tuple hashed often": b"\x80\x04(" + b"K\x01" * 5_000 + b"t\x94}(" + b"h\x00N" * 30_000 + b"u.",
    "one long number hashed often": b"\x80\x04\x8b\x40\x0d\x03\x00" + b"\x01" * 200_000 + b"\x94}("
    + b"h\x00N" * 100_000 + b"u.",
    "tuples in a frozenset": b"\x80\x04(" + doubled_tuples(60)[3:-3] + b"\x91.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name):
    with pytest.raises(UnsafePickleError):
        inert.load(BOMBS[name])


def test_the_extension_registry_is_code_outside_the_file():
    calls = Calls()
    inert.load(b"\x80\x04\x82\x01.", calls=calls)
    assert calls.unsafe == ("copyreg._extension_registry",)


def test_a_damaged_pickle_that_runs_code_says_so():
    with pytest.raises(RunsCodeError) as caught:
        inert.load(b"\x80\x04cposix\nsystem\n\x8c\x04true\x85R0N")
    assert caught.value.names == ("posix.system",)


DAMAGED = {
    "text": b"hello world",
    "empty": b"",
    "only a protocol": b"\x80\x04",
    "a protocol of the future": b"\x80\x09N.",
    "a length beyond the end": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "a bytearray beyond the end": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a stack that runs empty": b"\x80\x04\x85.",
    "a mark that is not there": b"\x80\x04t.",
    "two ways to number the memo": b"\x80\x04N\x94Nq\x05.",
    "no opcode": b"\x80\x04\xff.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a dict key without hash": b"\x80\x04}]Ns.",
    "buffers": b"\x80\x05\x97.",
    "a call of a number": b"\x80\x04K\x01)R.",
    "a line without end": b"cos\nsystem",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pickles_give_one_clear_error(name):
    with pytest.raises(MetadataError) as caught:
        inert.load(DAMAGED[name])
    assert "\n" not in str(caught.value)


def test_a_mark_popped_by_pop_does_not_confuse_the_walk():
    # The unpickler's POP takes the mark; a walk that took a value instead would lose count of what is nested.
    data = b"\x80\x04})(0" + b"\x85" * 1000 + b"Ns."
    with pytest.raises(UnsafePickleError):
        inert.load(data)


def test_deep_lists_are_no_danger_and_load():
    data = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert isinstance(inert.load(data), list)
