"""What pickles would run is told by name, used or not; real writers' metadata and common packages' values are fine."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import enum
import fractions
import functools
import http
import ipaddress
import itertools
import json
import logging
import os
import pathlib
import pickle
import random
import re
import signal
import types
import uuid
import zoneinfo
from typing import NamedTuple

import numpy as np
import pytest

from dcptool.pickles import inert
from dcptool.pickles.calls import Calls
from tests.conftest import FOREIGN

pytestmark = pytest.mark.torchfree


def unsafe(data: bytes) -> tuple[str, ...]:
    calls = Calls()
    inert.load(data, calls=calls)
    return calls.unsafe


CALLED = b"cposix\nsystem\nX\x01\x00\x00\x00x\x85R"
ATTACKS = {
    "reduce": (b"\x80\x02" + CALLED + b".", "posix.system"),
    "its result popped": (b"\x80\x02" + CALLED + b"0}.", "posix.system"),
    "its result popped after the object": (b"\x80\x02}" + CALLED + b"0.", "posix.system"),
    "popped with its mark": (b"\x80\x02}(" + CALLED + b"1.", "posix.system"),
    "kept in the memo only": (b"\x80\x02" + CALLED + b"q\x000N.", "posix.system"),
    "INST": (b"(S'x'\niposix\nsystem\n.", "posix.system"),
    "OBJ": (b"(cposix\nsystem\nS'x'\no.", "posix.system"),
    "NEWOBJ": (b"\x80\x02csubprocess\nPopen\n)\x81.", "subprocess.Popen"),
    "by its old name": (b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x00x\x85R.", "builtins.eval"),
    "only named": (b"\x80\x02cos\nsystem\n.", "os.system"),
    "getattr": (b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x08\x00\x00\x00__call__\x86R.", "builtins.getattr"),
    "a method by getattr": (
        b"\x80\x02cbuiltins\ngetattr\ncpathlib\nPath\nX\x05\x00\x00\x00touch\x86RX\x01\x00\x00\x00x\x85R.",
        "the result of builtins.getattr",
    ),
    "a method by its dots": (b"\x80\x04\x8c\x07pathlib\x8c\x0fPath.write_text\x93N\x85R.", "pathlib.Path.write_text"),
    "partial": (b"\x80\x02cfunctools\npartial\ncos\nsystem\nX\x01\x00\x00\x00x\x86R.", "os.system"),
    "a partial called": (b"\x80\x02cfunctools\npartial\ncbuiltins\nlist\n\x85R)R.", "the result of functools.partial"),
    "torch.load": (b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00x\x85R.", "torch.load"),
    "torch.hub": (b"\x80\x02ctorch.hub\nload\n)R.", "torch.hub.load"),
    "another pickle": (b"\x80\x02c_pickle\nloads\nC\x00\x85R.", "_pickle.loads"),
    "numpy's exec": (
        b"\x80\x02cnumpy.testing._private.utils\nrunstring\n)R.",
        "numpy.testing._private.utils.runstring",
    ),
    "a function of the job": (b"\x80\x02cmyjob.things\nmake\n)R.", "myjob.things.make"),
}


@pytest.mark.parametrize(("data", "name"), ATTACKS.values(), ids=ATTACKS)
def test_what_runs_code_is_named(data, name):
    assert name in unsafe(data)


class Color(enum.Enum):
    RED = 1


class Settings:
    class Kind(enum.Enum):
        SMALL = "small"

    class Part:
        pass

    def __init__(self) -> None:
        self.rate = 0.5


class Registry(dict):
    """A dict with attributes of its own: items, then a state."""

    def __init__(self, items) -> None:
        super().__init__(items)
        self.append = self.extend = Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    n: int


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
def test_values_of_common_packages_and_classes_of_the_job_are_fine(protocol):
    values = [
        {1, 2}, frozenset({3}), 1 + 2j, range(3), slice(1), bytearray(b"x"), b"bytes", ...,
        collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("aa"),
        collections.deque([1]), argparse.Namespace(lr=1.0, path=pathlib.Path("x")),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        datetime.timedelta(1), fractions.Fraction(1, 3), uuid.uuid4(), re.compile("x"), signal.SIGTERM, Color.RED,
        Settings(), functools.partial(max, 1), random.getstate(), np.random.get_state(), np.float64(1), np.arange(3),
        np.dtype("float32"), np.random.default_rng(), ValueError("x"), Settings.Kind.SMALL, Settings.Part(), (int, str),
        logging.getLogger("x"), array.array("i", [1]), itertools.count(3), zoneinfo.ZoneInfo("UTC"), type(None),
        np.ma.array([1, 2], mask=[0, 1]), np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.datetime64("2026"), np.array([{"a": 1}], dtype=object), json.JSONDecodeError("a", "b", 1), list[int],
        types.SimpleNamespace(a=1), http.HTTPStatus.OK, Registry({"a": 1}), collections.ChainMap({}), Frozen(1),
        ipaddress.ip_address("::1"),
        Pair(1, 2),
    ]  # fmt: skip
    assert unsafe(pickle.dumps(values, protocol)) == ()


def test_the_names_the_system_has_are_what_they_are_called_here():
    assert unsafe(pickle.dumps(os.system, 4)) == ("posix.system",)


@pytest.mark.parametrize("path", sorted(FOREIGN.rglob("*metadata")), ids=lambda path: path.parent.name)
def test_metadata_of_real_writers_is_fine(path):
    data = path.read_bytes()
    assert not data or unsafe(data) == ()
