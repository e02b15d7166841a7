"""Zips and safetensors files that torch and safetensors do not read, or read otherwise, are never called whole.

Their own loaders are the oracle: of each file one thing is changed where no checksum covers it.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors import SafetensorError, safe_open  # noqa: E402

import dcptool  # noqa: E402
from dcptool.checks.check import Level  # noqa: E402
from dcptool.ops.verify.verdict import State  # noqa: E402
from tests.conftest import run  # noqa: E402

STATE = {"w": torch.arange(300.0), "b": torch.ones(3)}


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


GOOD = saved(STATE)
END = GOOD.rfind(b"PK\5\6")
END64 = GOOD.rfind(b"PK\6\6")
LOCATOR64 = GOOD.rfind(b"PK\6\7")


def entries(data):
    """Byte offset in the directory of each record's entry, by the record's name."""
    found, at = {}, data.find(b"PK\1\2")
    while data[at : at + 4] == b"PK\1\2":
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        found[data[at + 46 : at + 46 + name].decode().split("/", 1)[1]] = at
        at += 46 + name + extra + comment
    return found


ENTRIES = entries(GOOD)


def patched(at, form, *values, data=GOOD):
    changed = bytearray(data)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


def rebuilt(rename=lambda name: name, without=()):
    """The same records, stored by the standard library under other names."""
    source, file = zipfile.ZipFile(io.BytesIO(GOOD)), io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for info in source.infolist():
            if info.filename.split("/", 1)[1] not in without:
                target.writestr(zipfile.ZipInfo(rename(info.filename)), source.read(info))
    return file.getvalue()


def moved(name, new):
    return rebuilt(lambda found: new if found.endswith(f"/{name}") else found)


def with_version(text):
    source, file = zipfile.ZipFile(io.BytesIO(GOOD)), io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for info in source.infolist():
            content = text if info.filename.endswith("/version") else source.read(info)
            target.writestr(zipfile.ZipInfo(info.filename), content)
    return file.getvalue()


def zip64(*values, sizes=(0xFFFFFFFF, 0xFFFFFFFF), nbytes=None):
    """The entry of data/0 with its sizes in the field for large ones."""
    extra = struct.pack("<2H", 1, 8 * len(values) if nbytes is None else nbytes)
    extra += b"".join(struct.pack("<Q", value) for value in values)
    at = ENTRIES["data/0"]
    entry = bytearray(GOOD[at : at + 46 + struct.unpack_from("<H", GOOD, at + 28)[0]])
    struct.pack_into("<2L", entry, 20, *sizes)
    struct.pack_into("<H", entry, 30, len(extra))
    data = bytearray(GOOD[:at] + entry + extra + GOOD[at + len(entry) :])
    longer = len(extra)
    struct.pack_into("<Q", data, END64 + longer + 40, END64 - GOOD.find(b"PK\1\2") + longer)
    struct.pack_into("<Q", data, LOCATOR64 + longer + 8, END64 + longer)
    struct.pack_into("<L", data, END + longer + 12, END64 - GOOD.find(b"PK\1\2") + longer)
    return bytes(data)


ZIPS = {
    "nothing changed": GOOD,
    "written by zipfile": rebuilt(),
    "no version": rebuilt(without=("version",)),
    "no data.pkl": rebuilt(without=("data.pkl",)),
    "no storage": rebuilt(without=("data/0",)),
    "no byteorder": rebuilt(without=("byteorder",)),
    "no serialization_id": rebuilt(without=(".data/serialization_id",)),
    "version 1": with_version(b"1\n"),
    "version 0": with_version(b"0\n"),
    "version 10": with_version(b"10\n"),
    "version 11": with_version(b"11\n"),
    "version of letters": with_version(b"x\n"),
    "storage outside the folder": moved("data/0", "data/0"),
    "storage in another folder": moved("data/0", "other/data/0"),
    "version outside the folder": moved("version", "version"),
    "byteorder outside the folder": moved("byteorder", "byteorder"),
    "pickle outside the folder": moved("data.pkl", "data.pkl"),
    "pickle in another folder": moved("data.pkl", "other/data.pkl"),
    "no folder": rebuilt(lambda name: name.split("/", 1)[1]),
    "folders in folders": rebuilt(lambda name: f"a/{name}"),
    "zip64": zip64(1200, 1200),
    "zip64, sizes larger": zip64(1204, 1204),
    "zip64, sizes that differ": zip64(1204, 1200),
    "zip64, one size": zip64(1200),
    "zip64, no size": zip64(),
    "zip64, field too long": zip64(1200, 1200, nbytes=20),
    "zip64, field too short": zip64(1200, 1200, nbytes=12),
    "zip64, enormous": zip64(1 << 63, 1 << 63),
    "zip64 not needed": zip64(5, 5, sizes=(1200, 1200)),
    "no disk at all": patched(LOCATOR64 + 16, "<L", 0),
    "a short end": patched(END64 + 4, "<Q", 43),
    "a long end": patched(END64 + 4, "<Q", 45),
    "an empty alignment": patched(ENTRIES[".storage_alignment"] + 16, "<3L", 0, 0, 0),
    "an empty byteorder": patched(ENTRIES["byteorder"] + 16, "<3L", 0, 0, 0),
    "an empty version": patched(ENTRIES["version"] + 16, "<3L", 0, 0, 0),
    "an empty pickle": patched(ENTRIES["data.pkl"] + 16, "<3L", 0, 0, 0),
    "an empty serialization_id": patched(ENTRIES[".data/serialization_id"] + 16, "<3L", 0, 0, 0),
    "comment": GOOD[: END + 20] + struct.pack("<H", 5) + b"hello",
    **{f"{name} is a folder": patched(at + 38, "<L", 0x10) for name, at in ENTRIES.items()},
    **{f"{name} is a folder to unix": patched(at + 38, "<L", 0x4000 << 16) for name, at in ENTRIES.items()},
    **{f"{name} encrypted": patched(at + 8, "<H", 1) for name, at in ENTRIES.items()},
    **{f"{name} longer": patched(at + 20, "<2L", *[n + 1 for n in struct.unpack_from("<2L", GOOD, at + 20)])
       for name, at in ENTRIES.items()},
    **{f"{name} elsewhere": patched(at + 42, "<L", struct.unpack_from("<L", GOOD, at + 42)[0] + 1)
       for name, at in ENTRIES.items()},
    **{f"byte {at - END64} of the end": patched(at, "<B", GOOD[at] ^ 1) for at in range(END64, END + 20)},
}  # fmt: skip
AS_TORCH_READS = {
    "nothing changed", "written by zipfile", "no byteorder", "no serialization_id", "version 1", "version 10", "zip64",
    "zip64 not needed", "comment", *(name for name in ZIPS if name.endswith("to unix")),
}  # fmt: skip


def torch_reads(data):
    """Whether torch loads the same values, both from a stream and from a mapped file."""
    try:
        found = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        return False
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


def state_of(path, level=Level.DEEP):
    (verdict,) = dcptool.verify(path, dcptool.VerifyOptions(level=level)).verdicts
    return verdict.state


@pytest.mark.parametrize("name", ZIPS)
def test_a_pt_file_is_whole_only_if_torch_reads_it(name, tmp_path):
    (tmp_path / "a.pt").write_bytes(ZIPS[name])
    whole = state_of(tmp_path / "a.pt") is State.COMPLETE
    assert whole or name not in AS_TORCH_READS
    assert torch_reads(ZIPS[name]) or not whole
    if name in AS_TORCH_READS:
        assert torch_reads(ZIPS[name])


def test_what_the_directory_shows_of_a_pt_file_shows_by_default(tmp_path):
    for name in ("no version", "storage outside the folder", "data/0 is a folder", "zip64, field too long"):
        (tmp_path / "a.pt").write_bytes(ZIPS[name])
        assert state_of(tmp_path / "a.pt", Level.METADATA) is State.DAMAGED
        assert run("convert", "--to", "safetensors", tmp_path / "a.pt", tmp_path / "o.safetensors").returncode == 3


@pytest.mark.parametrize("name", ["nothing", "version", "folder", "folder bit", "locator"])
def test_an_item_of_dcp_is_whole_only_if_torch_reads_it(name, tmp_path):
    value = torch.arange(300.0)
    dcp.save({"w": value, "b": torch.ones(3)}, checkpoint_id=tmp_path / "s", no_dist=True)
    item = dcptool.open(tmp_path / "s").tensors["w"].chunks[0].item
    file = tmp_path / "s" / item.file
    whole = file.read_bytes()
    zipped = whole[item.byte_offset : item.byte_offset + item.nbytes]
    places = entries(zipped)
    changed = {
        "nothing": zipped,
        "version": zipped.replace(b"archive/version", b"archive/verzion"),
        "folder": zipped.replace(b"archive/data/0", b"archjve/data/0"),
        "folder bit": patched(places["data/0"] + 38, "<L", 0x10, data=zipped),
        "locator": patched(zipped.rfind(b"PK\6\7") + 16, "<L", 0, data=zipped),
    }[name]
    file.write_bytes(whole[: item.byte_offset] + changed + whole[item.byte_offset + item.nbytes :])
    state = {"w": torch.zeros(300)}
    try:
        dcp.load(state, checkpoint_id=tmp_path / "s", no_dist=True)
        loads = torch.equal(state["w"], value)
    except BaseException:
        loads = False
    assert loads is (name == "nothing")
    assert state_of(tmp_path / "s", Level.RECORDS) is (State.COMPLETE if loads else State.DAMAGED)


@pytest.mark.parametrize("n_bytes", [0, 1000, 20_000, 200_000], ids=lambda n: f"{n} bytes more")
def test_what_follows_a_zip_is_a_note_as_far_as_torch_reads_past_it(n_bytes, tmp_path):
    good = saved({**STATE, "p": torch.zeros(n_bytes, dtype=torch.uint8)})
    n_read = 0
    for n_zeros in (0, 1, 22, 64, 4073, 4075, 4096, 8000, 40_000, 65_513, 65_514, 65_536, 100_000):
        data = good + bytes(n_zeros)
        (tmp_path / "a.pt").write_bytes(data)
        try:
            reads = torch.equal(torch.load(io.BytesIO(data), weights_only=True)["w"], STATE["w"])
        except Exception:
            reads = False
        n_read += reads
        (verdict,) = dcptool.verify(tmp_path / "a.pt", dcptool.VerifyOptions(level=Level.DEEP)).verdicts
        assert verdict.state is (State.COMPLETE if reads else State.DAMAGED), n_zeros
        noted = [finding.message for finding in verdict.findings if finding.kind == "padded-file"]
        assert bool(noted) is (reads and n_zeros > 0)
        if noted:
            assert f"{n_zeros:,} zeros follow the end of its zip, which torch.load reads past" in noted[0]
            assert np.array_equal(dcptool.open(tmp_path / "a.pt").read("w"), STATE["w"].numpy())
    assert n_read > 3
    (tmp_path / "a.pt").write_bytes(good + b"other bytes")
    done = run("verify", tmp_path / "a.pt")
    assert (done.returncode, "warning: 11 bytes follow the end" in done.stdout) == (0, True)


DATA = np.arange(6, dtype="<f4").tobytes() + np.arange(3, dtype="<i8").tobytes()
W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "I64", "shape": [3], "data_offsets": [24, 48]}
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [48, 48]}
TEXT = json.dumps({"w": W, "b": B})


def headed(header, data=DATA):
    """A safetensors file of a header, given as its JSON, its text or its bytes."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


def changed(**fields):
    return headed({"w": {**W, **fields}, "b": B})


HEADERS = {
    "nothing changed": headed(TEXT),
    **{
        f"metadata {value!r}": headed({"__metadata__": value, "w": W, "b": B})
        for value in (
            None,
            {},
            {"a": "b"},
            {"a": 1},
            {"a": None},
            {"a": True},
            {"a": ["x"]},
            {"a": {"b": "c"}},
            [],
            "x",
            3,
        )
    },
    "metadata twice": headed(TEXT[:-1] + ', "__metadata__": {}, "__metadata__": {"a": "b"}}'),
    "a tensor twice": headed(TEXT[:-1] + f', "w": {json.dumps(W)}}}'),
    "a tensor twice, once wrong": headed('{"w": {"shape": [2, 3], "data_offsets": [0, 24]}, ' + TEXT[1:]),
    "a tensor twice, once elsewhere": headed(
        f'{{"w": {json.dumps({**W, "shape": [1], "data_offsets": [4, 8]})}, ' + TEXT[1:]
    ),
    "a field twice": headed(TEXT.replace('"shape": [2, 3]', '"shape": [9], "shape": [2, 3]')),
    "another field": changed(more=1),
    "no dtype": headed({"w": {"shape": [2, 3], "data_offsets": [0, 24]}, "b": B}),
    "a fraction": changed(shape=[2.0, 3]),
    "a truth value": changed(shape=[True, 6]),
    "negative": changed(shape=[-2, -3]),
    "three offsets": changed(data_offsets=[0, 24, 48]),
    "shape that overflows": changed(shape=[1 << 32, 1 << 32]),
    "shape of 2^64": changed(shape=[1 << 64, 0]),
    "a 0 behind an overflow": headed({"w": W, "b": B, "e": {**EMPTY, "shape": [1 << 62, 4, 0]}}),
    "20,000 digits": headed(TEXT.replace("[2, 3]", f"[{'9' * 20_000}, 3]")),
    "no tensor": headed("{}", b""),
    "no tensor, but data": headed("{}"),
    "one without elements": headed({"w": W, "b": B, "e": EMPTY}),
    "half a surrogate pair": headed(TEXT[:-1] + f', "\\ud800": {json.dumps(EMPTY)}}}'),
    "half a pair in metadata": headed(TEXT[:-1] + ', "__metadata__": {"a": "\\ud800"}}'),
    "half a pair, raw": headed((TEXT[:-1] + f', "\ud800": {json.dumps(EMPTY)}}}').encode("utf-8", "surrogatepass")),
    "a whole pair": headed(TEXT[:-1] + f', "\\ud83d\\ude00": {json.dumps(EMPTY)}}}'),
    "not UTF-8": headed(TEXT.encode()[:-1] + b', "\xff": ' + json.dumps(EMPTY).encode() + b"}"),
    "spaces behind": headed(TEXT + "  \n"),
    "zeros behind": headed(TEXT + "\0"),
    "a comma too many": headed(TEXT[:-1] + ",}"),
    "a number that is none": headed(TEXT.replace("[2, 3]", "[NaN, 3]")),
    "bytes behind": headed(TEXT, DATA + bytes(8)),
    "a byte short": headed(TEXT, DATA[:-1]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_file_is_whole_exactly_if_its_library_reads_it(name, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(HEADERS[name])
    try:
        with safe_open(path, "pt") as opened:
            reads = all(opened.get_tensor(key) is not None for key in opened.keys())  # noqa: SIM118
    except SafetensorError:
        reads = False
    for level in Level:
        assert state_of(path, level) is (State.COMPLETE if reads else State.DAMAGED)
