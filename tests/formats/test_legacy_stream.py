"""Files of torch.save as before torch 1.6: pickles, then storages without checksums."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from dcptool.errors import DcptoolError, MetadataError, UnsupportedError  # noqa: E402
from tests.conftest import FOREIGN, run  # noqa: E402

OLD_FILE = FOREIGN / "legacy_stream" / "old.pt"
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)
DTYPES = (torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.uint8)


def save(path, state):
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def verdict(path):
    return dcptool.verify(path, DEEP).verdicts[0]


def test_every_dtype_and_view_is_what_torch_loads(tmp_path):
    base = torch.arange(60).reshape(6, 10)
    state = {"model": {str(dtype): base.to(dtype) for dtype in DTYPES}, "t": base.t(), "part": base[2:4, 1:]}
    state |= {
        "same": base,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "step": 7,
        "deep": [{"w": base[:1]}],
    }
    path = save(tmp_path / "old.pt", state)
    ours, theirs = dcptool.open(path), torch.load(path)
    flat = {f"model.{name}": value for name, value in theirs.pop("model").items()}
    flat |= {"deep.0.w": theirs.pop("deep")[0]["w"], **theirs}
    assert set(ours) == set(flat)
    assert ours.value("step") == flat.pop("step")
    for fqn, tensor in flat.items():
        assert torch.equal(ours.read_torch(fqn), tensor), fqn
        assert ours[fqn].dtype == str(tensor.dtype).removeprefix("torch.")
    assert ours.evidence == ("a torch.save stream, as before torch 1.6",)
    found = verdict(path)
    assert found.state is dcptool.State.COMPLETE
    assert "not-verifiable" in {finding.kind for finding in found.findings}


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_it_becomes_any_format(to, tmp_path):
    suffix = {"torch": "m.pt", "safetensors": "m.safetensors", "dcp": "m"}[to]
    dcptool.convert(OLD_FILE, tmp_path / suffix, to)
    ours, source = dcptool.open(tmp_path / suffix), dcptool.open(OLD_FILE)
    assert set(ours.tensors) == set(source.tensors)
    assert all(ours.read(fqn).tobytes() == source.read(fqn).tobytes() for fqn in source.tensors)


def test_a_pickle_that_is_larger_than_what_is_read_at_first(tmp_path):
    path = save(tmp_path / "old.pt", {"text": "x" * (3 << 20), "w": torch.ones(4)})
    assert dcptool.open(path).read("w").tolist() == [1] * 4


def test_cut_short_anywhere_it_is_refused(tmp_path):
    whole = OLD_FILE.read_bytes()
    for end in range(20, len(whole), 37):
        cut = tmp_path / "cut.pt"
        cut.write_bytes(whole[:end])
        with pytest.raises(MetadataError, match=r"cut\.pt: "):
            dcptool.open(cut)


def test_any_changed_byte_before_the_storages_is_refused_or_harmless(tmp_path):
    """There are no checksums: what opens must still be read without an error of another kind."""
    whole = OLD_FILE.read_bytes()
    for place in range(0, 2400, 3):
        changed = tmp_path / "changed.pt"
        changed.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        try:
            opened = dcptool.open(changed)
            for fqn in opened.tensors:
                opened.read(fqn)
        except DcptoolError:
            continue


def test_code_in_it_is_seen(tmp_path):
    class Acts:
        def __reduce__(self):
            return print, ("ran",)

    path = save(tmp_path / "old.pt", {"w": torch.ones(2), "acts": Acts()})
    assert verdict(path).state is dcptool.State.UNSAFE
    assert run("convert", "--to", "dcp", path, tmp_path / "out").returncode != 0


def test_of_another_byte_order_it_is_refused(tmp_path):
    path = save(tmp_path / "old.pt", {"w": torch.ones(2)})
    data = path.read_bytes()
    at = data.index(b"little_endian")
    value = data.index(b"\x88", at)  # True
    path.write_bytes(data[:value] + b"\x89" + data[value + 1 :])
    with pytest.raises(UnsupportedError, match="not little-endian"):
        dcptool.open(path).read("w")
