"""`dcptool.training` without torch, and dcptool without `dcptool.training`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.torchfree
def test_without_torch_one_error_says_what_to_install():
    done = python(
        "import sys; sys.modules['torch'] = None; import dcptool, dcptool.cli; from dcptool.training import Reader"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dcptool.errors.UnsupportedError: dcptool.training needs torch")
    assert last.endswith("pip install 'dcptool[torch]'")


@pytest.mark.torchfree
def test_nothing_else_imports_it():
    done = python(
        "import sys, dcptool, dcptool.cli; [getattr(dcptool, name) for name in dcptool.__all__]; "
        "print([name for name in sys.modules if name.startswith(('torch', 'dcptool.training'))])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_public_names_are_documented():
    pytest.importorskip("torch")
    import dcptool.training as training

    assert list(training.__all__) == sorted(training.__all__)
    assert all(getattr(training, name).__doc__ for name in training.__all__)
