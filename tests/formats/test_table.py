"""The formats there are: what names of their files lead to, and that the pages know all of them."""

from pathlib import Path

import pytest

from dcptool.errors import UnsupportedError
from dcptool.formats.output import OUTPUT_FORMATS, is_one_file
from dcptool.formats.table import FORMATS
from dcptool.ops.reshard.source import default_target

ROOT = Path(__file__).parents[2]
SUFFIXES = [suffix for known in FORMATS for suffix in known.format.suffixes]


@pytest.mark.parametrize("writer", OUTPUT_FORMATS, ids=lambda writer: writer.to)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_output_never_gets_the_name_of_another_format(writer, suffix):
    own = next((known.format.suffixes for known in FORMATS if writer.suffix in known.format.suffixes), ())
    if suffix == writer.suffix or (suffix in own and writer.is_always_file):
        assert is_one_file(writer.to, f"run/model{suffix}")
    else:
        with pytest.raises(UnsupportedError, match="name it"):
            is_one_file(writer.to, f"run/model{suffix}")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_resharded_file_becomes_a_folder_without_its_suffix(suffix):
    assert default_target(f"/run/model{suffix}", 4) == "/run-ws4/model"


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.format.name)
def test_every_format_is_in_the_pages(known):
    said = (ROOT / "docs/json.md").read_text()
    assert all(line.count(known.format.name) for line in said.splitlines() if '"format": "dcp | ' in line)
