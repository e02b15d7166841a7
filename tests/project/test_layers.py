"""The order of the layers, what may be imported at module level, and the promises of the public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dcptool
from dcptool import errors
from tests.conftest import ROOT

ROOMS = (
    "errors words storage checkpoint pickles copying formats frameworks "
    "checks groups runs ops render training cli __main__"
).split()
HEAVY = {"torch", "numpy", "ml_dtypes", "fsspec", "zstandard", "s3fs", "safetensors"}
MODULES = sorted((ROOT / "dcptool").rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES})


def dotted(path: Path) -> str:
    """Return a module's or a folder's name below the package."""
    return ".".join(path.relative_to(ROOT / "dcptool").with_suffix("").parts).removesuffix(".__init__")


KNOWN = {f"dcptool.{dotted(path)}" for path in MODULES}


def imports(tree: ast.Module, everywhere: bool) -> set[str]:
    """Names of imported modules: at module level only, or inside functions too; never under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & KNOWN or {node.module}
    return found


def imported(path: Path) -> set[str]:
    """Names below the package of all its modules that a module imports, wherever it does."""
    every = imports(ast.parse(path.read_text()), everywhere=True)
    return {name.removeprefix("dcptool.") for name in every if name.startswith("dcptool.")}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_room_imports_only_from_those_before_it(path):
    room = dotted(path).partition(".")[0]
    if room == "__init__":
        return
    assert room in ROOMS, f"{room} is no room: give it a place in the order"
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    assert {name for name in imported(path) if name.partition(".")[0] not in allowed} == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_within_a_folder_no_cycles(folder):
    prefix = f"{dotted(folder)}." if folder != ROOT / "dcptool" else ""
    uses: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        mine = dotted(path).removeprefix(prefix).partition(".")[0]
        inside = {name.removeprefix(prefix).partition(".")[0] for name in imported(path) if name.startswith(prefix)}
        uses.setdefault(mine, set()).update(inside - {mine})
    list(TopologicalSorter(uses).static_order())  # a CycleError names the cycle


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != ROOT / "dcptool"], ids=dotted)
def test_a_folder_explains_itself(folder):
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_heavy_libraries_are_imported_where_they_are_used(path):
    if dotted(path).startswith("training"):  # exists only for torch, and nothing else imports it
        return
    assert not {module.partition(".")[0] for module in imports(ast.parse(path.read_text()), everywhere=False)} & HEAVY


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_module_is_two_things(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.torchfree
def test_inspect_imports_neither_torch_nor_numpy_nor_fsspec():
    code = """if True:
        import sys
        from dcptool.cli import main
        try:
            main(["inspect", sys.argv[1], "--chunks"])
        except SystemExit as done:
            assert not done.code, done.code
        print(sorted({"torch", "numpy", "fsspec", "ml_dtypes"} & set(sys.modules)), file=sys.stderr)
    """
    for name in ("xver_t2130", "w_noflatten", "megatron_tp2/iter_0000010", "hf_sharded"):
        path = ROOT / "fixtures" / "foreign" / name
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"


def test_no_two_classes_have_one_name():
    nodes = (node for path in MODULES for node in ast.walk(ast.parse(path.read_text())))
    counts = Counter(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in counts.items() if count > 1} == set()


def test_public_names_are_sorted_documented_and_there():
    assert list(dcptool.__all__) == sorted(dcptool.__all__, key=str)
    for name in dcptool.__all__:
        assert getattr(dcptool, name).__doc__


def test_every_error_is_documented_and_part_of_the_tree():
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    for error in classes:
        assert issubclass(error, errors.DcptoolError)
        assert error.__doc__
        assert error.__name__ in errors.__doc__
    builtin = {"DcptoolError": Exception, "StorageError": OSError, "UnsupportedError": NotImplementedError}
    for name, base in builtin.items():
        assert issubclass(getattr(errors, name), base)
