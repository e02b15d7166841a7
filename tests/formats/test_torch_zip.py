"""Zips as torch writes them: laid out from a template, and read with the directory of one like it at hand."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest

from dcptool.copying.outputs import Closing, Fill, Literal
from dcptool.errors import ItemError
from dcptool.formats.torch_save import zip as torch_zip
from dcptool.formats.torch_save.zip import TorchZip, head_nbytes
from dcptool.formats.torch_save.zip_write import NewMember, lay_out_zip, template

pytestmark = pytest.mark.torchfree


def members(nbytes):
    return [
        NewMember("data.pkl", Literal(b"pickle")),
        NewMember("data/0", Fill("w", (0,), (nbytes,), "uint8", nbytes)),
        NewMember("byteorder", Literal(b"little")),
        NewMember("version", Literal(b"3\n")),
    ]


def rendered(parts, payload, crcs):
    """The bytes of parts, but for a payload too long for a test."""
    pieces = [
        part.make(crcs) if isinstance(part, Closing) else part.data if isinstance(part, Literal) else payload
        for part in parts
    ]
    for part, piece in zip(parts, pieces, strict=True):
        assert isinstance(part, Fill) or part.nbytes == len(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000, (1 << 32) - 1, 1 << 32, 5 << 32])
def test_a_template_makes_what_laying_out_makes(nbytes):
    crcs = [1, 2, 0xDEADBEEF]
    parts, total = lay_out_zip(members(nbytes), 2)
    found = template(members(nbytes))
    closing = found.closing(2)
    assert len(found.head) + nbytes + closing.nbytes == total
    assert found.head + b"..." + closing.make(crcs) == rendered(parts, b"...", crcs)
    assert len(found.checksums) == 2  # in the descriptor and in the directory


def test_a_template_makes_what_zipfile_reads():
    payload = b"0123456789" * 7
    found = template(members(len(payload)))
    data = found.head + payload + found.closing(0).make([zlib.crc32(payload)])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == payload


def made(payload, names=("data.pkl", "data/0", "version")):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(f"archive/{name}", payload if name == "data/0" else name)
    return file.getvalue()


def opened(data):
    read = []

    def reader(byte_offset, nbytes):
        read.append((byte_offset, nbytes))
        return data[byte_offset : byte_offset + nbytes]

    return TorchZip(reader, len(data)), read


def test_a_small_zip_is_read_once_and_one_that_was_read_not_again():
    data = made(b"12345678")
    archive, read = opened(data)
    assert archive.content("data/0") == b"12345678"
    assert read == [(0, len(data))]
    archive = TorchZip(lambda *_: pytest.fail("it was all there"), len(data), data[: head_nbytes(len(data))])
    assert archive.content("data/0") == b"12345678"


def test_directories_alike_but_for_checksums_say_the_same():
    torch_zip._SEEN.clear()
    first = opened(made(b"12345678"))[0]
    (seen,) = torch_zip._SEEN.values()
    other = opened(made(b"87654321"))[0]
    assert list(torch_zip._SEEN.values()) == [seen]
    assert other.content("data/0") == b"87654321"
    differing = [name for name, member in first.members.items() if other.members[name] != member]
    assert differing == ["data/0"]
    assert other.members["data/0"] == first.members["data/0"]._replace(crc32=zlib.crc32(b"87654321"))


def test_of_a_directory_alike_every_flipped_bit_tells_the_same_as_without_the_first():
    """The shortcut must not hide what parsing finds, nor find anything else."""
    whole = made(b"12345678")
    start = whole.index(b"PK\1\2")
    for at in range(start, len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            outcomes = []
            for before in (None, whole):
                torch_zip._SEEN.clear()
                if before:
                    opened(before)
                try:
                    outcomes.append(opened(bytes(damaged))[0].members)
                except ItemError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]


def test_few_directories_are_kept():
    torch_zip._SEEN.clear()
    for length in range(1, torch_zip.MAX_SEEN + 50):
        opened(made(b"1", ("data.pkl", "data/0", "version", "x" * length)))
    assert len(torch_zip._SEEN) <= torch_zip.MAX_SEEN
