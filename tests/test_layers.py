"""The order of the layers, what may be imported at module level, and the promises of the public names."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import dcptool
from dcptool import errors
from tests.conftest import ROOT

ORDER = (
    "errors dtypes model regions findings storage.base storage.local storage.remote storage.union storage "
    "storage.window publishing pickles.standins pickles.opcodes pickles.machine pickles.inert pickles.emit "
    "pickles.tensors pickles.plain fill chunks cover checkpoint selection reading schedule copying formats.torch_zip "
    "formats.torch_zip_scan "
    "formats.torch_items formats.safetensors_header formats.dcp.tokens formats.dcp.tensor_runs formats.dcp.bulk "
    "formats.dcp.metadata formats.dcp.build formats.dcp.items formats.dcp.reader formats.torch_save "
    "formats.safetensors steps formats.detect marker formats.torch_graphs formats.torch_zip_write "
    "formats.torch_save_write formats.safetensors_write formats.dcp.printing formats.dcp.relocate "
    "formats.dcp.write formats.layouts placements checks.families "
    "checks.extents checks.files checks.paths checks.copies checks.items checks names notes runs summary "
    "comparing.results comparing.arithmetic comparing.bands comparing.pool comparing.values comparing.graphs "
    "comparing.objects comparing.pairing comparing.outline comparing.live comparing moments stats activity verdict "
    "torch_reader torch_load "
    "verification pointers newest marking retention interval guards rewrite torch_engine rescuing.matching rescuing "
    "resharding.mesh resharding.assign resharding.rules resharding.plan resharding.group resharding.member "
    "resharding.supervisor resharding overview render.text columns report "
    "training.reader training.rng training.optimizers training.state training.ranks training.staging training.saving "
    "training.restoring training.manager training "
    "render.folding render.stats render.inspect render.inspect_json render.verify "
    "render.convert render.interval render.reshard render.rescue render.diff render.report page "
    "cli.options cli.progress cli.inspect cli.verify cli.latest cli.mark cli.prune cli.convert cli.reshard cli.rescue "
    "cli.diff cli.report cli.interval cli __main__ "
).split()
HEAVY = {"torch", "numpy", "ml_dtypes", "fsspec", "zstandard", "s3fs", "safetensors"}
MODULES = sorted((ROOT / "dcptool").rglob("*.py"))


def dotted(path) -> str:
    return ".".join(path.relative_to(ROOT / "dcptool").with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.Module, everywhere: bool) -> set[str]:
    """Names of imported modules: at module level only, or inside functions too; never under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {f"dcptool.{name}" for name in ORDER}
            found |= inside & known or {node.module}
    return found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_imports_only_what_stands_before_it(path):
    name = dotted(path)
    ours = imports(ast.parse(path.read_text()), everywhere=True)
    ours = {module.removeprefix("dcptool.") for module in ours if module.startswith("dcptool.")}
    if name in ("__init__", "pickles", "formats", "formats.dcp", "render"):  # packages that only describe themselves
        assert name == "__init__" or not ours
        return
    assert name in ORDER, f"{name} has no place in the order"
    before = set(ORDER[: ORDER.index(name)])
    assert {module for module in ours if module in ORDER and module != name} <= before


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
